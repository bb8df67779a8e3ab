from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from aneuron.cli.options import CARRIES
from aneuron.cli.simulate.picture import Curves, picture

if TYPE_CHECKING:
    from tests.cli.conftest import Command

ALONE = ("simulate", "--profile=micro", "--num-seqs=1")


def curves(svg: str) -> list[ET.Element]:
    return [
        one for one in ET.fromstring(svg).iter() if (one.get("class") or "").startswith("curve")
    ]


def test_the_picture_has_a_curve_for_each_carry(aneuron: Command, tmp_path: Path) -> None:
    path = tmp_path / "it.svg"
    load = ("--arrivals=poisson:50", "--duration=2", "--carry=all")
    assert aneuron("simulate", "--num-seqs=8", *load, f"--svg={path}").status == 0
    found = [one.get("class") for one in curves(path.read_text())]
    assert found == [f"curve {carry}" for carry in CARRIES] * 2
    texts = {one.text for one in ET.fromstring(path.read_text()).iter()}
    assert {"time to first token", "time per output token", "time, log scale", "50 %"} <= texts


def test_curves_rise_from_left_to_right() -> None:
    times = {"host": np.array([0.002, 2.0, 0.02, 0.2])}
    svg = picture("t", [Curves("a", times), Curves("b", {"host": np.array([])})])
    (line,) = curves(svg)
    points = [tuple(map(float, point.split(","))) for point in line.get("points", "").split()]
    assert points[0] == (0.0, 250.0)
    assert points[-1] == (400.0, 0.0)
    assert points == sorted(points, key=lambda point: (point[0], -point[1]))
    assert "nothing completed" in svg
    assert ">10 ms<" in svg
    assert ">1 s<" in svg


def ticks(svg: str) -> list[tuple[float, str]]:
    """Where each label of the first plot's axis stands, and what it says."""
    plot = next(one for one in ET.fromstring(svg).iter() if one.tag.endswith("}g"))
    texts = [one for one in plot if one.tag.endswith("}text")]
    return [(float(one.get("x", "")), one.text or "") for one in texts if one.get("y", "") == "265"]


@pytest.mark.parametrize(
    ("first_ms", "last_ms", "labels"),
    [
        (3.1, 3.7, "3 3.2 3.4 3.6 3.8 ms"),
        (61, 79, "60 65 70 75 80 ms"),
        (50, 160, "50 70 100 150 200 ms"),
        (2.58, 2.58, "2 2.2 2.4 2.6 2.8 3 ms"),
    ],
)
def test_ticks_are_round_numbers(first_ms: float, last_ms: float, labels: str) -> None:
    times = {"host": np.array([first_ms, last_ms]) / 1000}
    found = [label for _, label in ticks(picture("t", [Curves("a", times)] * 2))]
    *numbers, unit = labels.split()
    assert found == [f"{number} {unit}" for number in numbers]


def test_any_axis_has_some_ticks_that_do_not_touch() -> None:
    generator = random.Random(0)
    for _ in range(300):
        first_s = 10 ** generator.uniform(-4, 2)
        ratio = 10 ** (generator.choice([0.01, 0.1, 1, 4]) * generator.random())
        times = {"resident": np.array([first_s, first_s * ratio])}
        svg = picture("t", [Curves("a", times)] * 2)
        found = ticks(svg)
        assert 4 <= len(found) <= 7, (first_s, ratio, found)
        for (x, label), (next_x, next_label) in pairwise(found):
            assert next_x - x > 5.5 * (len(label) + len(next_label)) / 2
        for line in curves(svg):
            points = line.get("points", "").split()
            assert all(-1e-6 <= float(point.split(",")[0]) <= 400 for point in points)


def test_one_time_is_a_line_upwards() -> None:
    same = Curves("a", {"resident": np.full(5, 0.002)})
    for line in curves(picture("t", [same, same])):
        assert {point.split(",")[0] for point in line.get("points", "").split()} == {"0"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere/it.svg", "No such file or directory"), ("there.svg", "Is a directory"),
        *((name, "it names a folder") for name in ("it.svg/", ".", "..", "")),
    ],
)  # fmt: skip
def test_a_picture_that_cannot_be_written_is_refused_at_once(
    aneuron: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.svg").mkdir()
    result = aneuron(*ALONE, "--arrivals=even:1", f"--svg={name}")
    assert (result.status, result.out) == (2, "")
    assert result.err == f"error: --svg: cannot write {name}: {why}\n"


def test_a_picture_that_cannot_be_written_is_told_at_the_end_too(
    aneuron: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aneuron.cli.simulate.writable", Path)
    result = aneuron(*ALONE, "--arrivals=even:1", "--duration=2", f"--svg={tmp_path}")
    assert result.status == 2
    assert result.err.startswith(f"error: --svg: cannot write {tmp_path}: Is a directory")
