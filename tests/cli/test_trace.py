from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest

from aneuron import Engine
from aneuron.testing import Fault, SimDevice

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Command


def programs(path: Path) -> list[dict[str, Any]]:
    """The arguments of each program in a Chrome trace."""
    trace = json.loads(path.read_text("utf-8"))
    return [e["args"] for e in trace["traceEvents"] if "request_ids" in e.get("args", {})]


def marked(path: Path, name: str) -> list[ET.Element]:
    svg = ET.fromstring(path.read_text("utf-8"))
    return [one for one in svg.iter() if one.get("class") == name]


def test_it_writes_both_files_and_a_summary(aneuron: Command, tmp_path: Path) -> None:
    out, svg = tmp_path / "trace.json", tmp_path / "trace.svg"
    result = aneuron("trace", "sim:count", "abc", "--max-tokens=10", f"--out={out}", f"--svg={svg}")
    assert (result.status, result.out) == (0, "")
    assert [program["kind"] for program in programs(out)] == ["prefill", *["decode"] * 9]
    assert len(marked(svg, "program")) == 10
    *lines, said_out, said_svg = result.err.splitlines()
    assert said_out == f"wrote {out}: open it at ui.perfetto.dev"
    assert said_svg == f"wrote {svg}: open it in a browser"
    facts = dict(line.split(maxsplit=1) for line in lines)
    assert facts["steps"] == "10 (10 kept)"
    assert facts["decode_async_share"] == "1.000"
    assert facts["breaks"] == "none"


@pytest.mark.parametrize("flag", ["--out", "--svg"])
def test_one_file_is_enough(aneuron: Command, tmp_path: Path, flag: str) -> None:
    result = aneuron("trace", "sim:count", "abc", flag, str(tmp_path / "it"), "--quiet")
    assert (result.status, result.out, result.err) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_json_tells_the_summary_to_machines(aneuron: Command, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    options = ["--max-tokens=10", "--json"]
    result = aneuron("trace", "sim:count", "abc", *options, f"--out={out}")
    assert (result.status, result.err) == (0, "")
    told = json.loads(result.out)
    assert (told["model"], told["out"], told["svg"]) == ("sim:count", str(out), None)
    assert (told["steps"], told["decode_async_share"], told["breaks"]) == (10, 1.0, {})
    assert 0 <= told["idle_share"] <= 1
    assert out.exists()
    alone = json.loads(aneuron("trace", "sim:count", "abc", *options).out)
    assert (alone["steps"], alone["out"]) == (10, None)  # no file need be written


def test_sequences_run_side_by_side(aneuron: Command, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    options = ["--max-tokens=5", "--num-seqs=3", f"--out={out}"]
    assert aneuron("trace", "sim:count", "abc", *options).status == 0
    assert [(program["rows"], program["tokens"]) for program in programs(out)] == [
        (3, 9),
        *[(3, 3)] * 4,
    ]
    assert len(set(programs(out)[0]["request_ids"])) == 3


def test_several_choices_begin_with_one_prompt(aneuron: Command, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    options = ["--max-tokens=3", "--n=2", "--no-enable-prefix-caching", f"--out={out}"]
    assert aneuron("trace", "sim:count", "abc", *options).status == 0
    shapes = [(program["kind"], program["rows"], program["tokens"]) for program in programs(out)]
    assert shapes == [("prefill", 2, 3), *[("decode", 2, 2)] * 2]


def test_the_picture_shows_as_many_steps_as_asked_for(aneuron: Command, tmp_path: Path) -> None:
    svg = tmp_path / "trace.svg"
    for options, shown in ([], 24), (["--last=7"], 7), (["--last=99"], 30):
        command = ["trace", "sim:count", "abc", "--max-tokens=30", f"--svg={svg}", *options]
        assert aneuron(*command).status == 0
        assert len(marked(svg, "program")) == shown


def test_it_takes_the_options_of_run(aneuron: Command, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    options = ["--no-async-scheduling", "--stop=gh", "--max-tokens=50", f"--out={out}"]
    assert aneuron("trace", "sim:count", "abc", *options).status == 0
    assert [program["async"] for program in programs(out)] == [None] * 5
    result = aneuron("trace", "sim:count", *options, stdin="abc")
    assert result.status == 0
    assert "decode_async_share   -" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nowhere to write to: give --out, --svg or both"),
        (["--svg=x.svg", "--num-seqs=0"], "--num-seqs must be at least 1, not 0"),
        (["--svg=x.svg", "--last=0"], "--last must be at least 1, not 0"),
        (["--svg=no/such/x.svg"], "cannot write no/such/x.svg: No such file or directory"),
        (["--out=x.json", f"--svg={'x' * 300}"], "File name too long"),
        (["--out=x", "--svg=../{folder}/x"], "--out and --svg must be two files, not both x"),
        (["--out=."], "cannot write .: Is a directory"),
        (["--svg=x.svg", "--max-tokens=0"], "--max-tokens must be at least 1, not 0"),
        (["--svg=x.svg", "--max-model-len=3"], "the prompt has 3 tokens"),
        (["--svg=x.svg", "--device=tpu"], "--device: unknown device 'tpu'"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(
    aneuron: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [argument.format(folder=tmp_path.name) for argument in arguments]
    result = aneuron("trace", "sim:count", "abc", *arguments)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert message in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_tried_before_the_run_and_left_as_it_is(
    aneuron: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.svg").write_text("old", "utf-8")
    (tmp_path / "link.svg").symlink_to("gone/x.svg")
    (tmp_path / "new.svg").symlink_to("fresh.svg")
    for name in ("old.svg", "new.svg"):
        assert aneuron("trace", "no-such-model", "abc", f"--svg={name}").status == 2
    result = aneuron("trace", "no-such-model", "abc", "--svg=link.svg")
    assert "cannot write link.svg: No such file or directory" in result.err
    assert (tmp_path / "old.svg").read_text("utf-8") == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.svg", "new.svg", "old.svg"]


def test_a_file_that_cannot_be_written_is_an_error(
    aneuron: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("aneuron.timeline.Timeline.save_chrome_trace", fail)
    out, svg = tmp_path / "x.json", tmp_path / "x.svg"
    result = aneuron("trace", "sim:count", "abc", f"--out={out}", f"--svg={svg}")
    assert result.status == 2
    assert f"error: cannot write {out}: No space left on device" in result.err
    assert marked(svg, "program")  # the other one is written all the same

    device = SimDevice(faults=[Fault(5, 101)])
    monkeypatch.setattr("aneuron.models.loading.open_device", lambda _: device)
    result = aneuron("trace", "sim:count", "abc", f"--out={out}")
    assert result.status == 1  # of the step that failed
    assert f"cannot write {out}: No space left on device\nerror: " in result.err


def test_a_step_that_failed_can_be_looked_at(
    aneuron: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimDevice(faults=[Fault(5, 101)])
    monkeypatch.setattr("aneuron.models.loading.open_device", lambda _: device)
    out, svg = tmp_path / "trace.json", tmp_path / "trace.svg"
    result = aneuron("trace", "sim:count", "abc", f"--out={out}", f"--svg={svg}")
    assert result.status == 1
    assert "error: " in result.err
    assert {1, 2, 3, 4} <= {program["step"] for program in programs(out)}
    assert {"1", "2", "3", "4"} <= {
        (one.findtext("{http://www.w3.org/2000/svg}title") or "").split()[1].rstrip(",")
        for one in marked(svg, "program")
    }


@pytest.mark.parametrize("options", [(), ("--quiet",), ("--json",)])
def test_what_was_cut_short_is_written_and_said(
    aneuron: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    async def interrupted(_: Engine) -> None:
        raise asyncio.CancelledError  # as a Runner does at Ctrl-C

    monkeypatch.setattr(Engine, "wait_idle", interrupted)
    svg = tmp_path / "trace.svg"
    result = aneuron("trace", "sim:count", "abc", "--max-tokens=9", f"--svg={svg}", *options)
    said = "" if options else f"wrote {svg}: open it in a browser\n"
    assert (result.status, result.out, result.err) == (130, "", said)
    assert marked(svg, "program")


def test_help_names_the_flags(aneuron: Command) -> None:
    text = aneuron("trace", "--help").out
    for flag in ("--out", "--svg", "--last", "--num-seqs", "--max-tokens", "--token-carry"):
        assert flag in text
    assert "trace" in aneuron("--help").out
