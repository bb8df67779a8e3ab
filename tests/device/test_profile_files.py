"""Latency profiles in files: what is written is read again, and what is wrong is named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import ConfigError, Engine
from aneuron.device import open_device
from aneuron.device.profile_files import check_writable, load_profile, save_profile
from aneuron.device.profiles import PROFILES, Figure, Profile, profile
from aneuron.device.sim import SimDevice

if TYPE_CHECKING:
    from pathlib import Path

GOOD: dict[str, Any] = {
    "name": "mine",
    **{
        name: {"ms": at, "source": "measured"}
        for at, name in enumerate(("decode", "decode_row", "prefill_token", "gap", "skew"), 1)
    },
}


def written(folder: Path, told: Any) -> Path:
    path = folder / "chip.json"
    path.write_text(told if isinstance(told, str) else json.dumps(told))
    return path


@pytest.mark.parametrize("name", PROFILES)
def test_what_is_written_is_read_again(name: str, tmp_path: Path) -> None:
    path = tmp_path / "chip.json"
    save_profile(PROFILES[name], path)
    assert load_profile(path) == PROFILES[name]


def test_names_and_sources_may_be_left_out(tmp_path: Path) -> None:
    told = {name: {"ms": figure["ms"]} for name, figure in GOOD.items() if name != "name"}
    found = load_profile(written(tmp_path, told))
    assert (found.name, found.prefill, found.decode) == ("chip", None, Figure(1.0, ""))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("[]", "does not hold an object"),
        ("{", "is no JSON"),
        ({"name": 3}, "name must be a text, not 3"),
        ({"decode_rows": {}}, "unknown field 'decode_rows'; known are name, decode"),
        ({"gap": None}, "gap must be an object, not None"),
        ({"gap": {"ms": "3"}}, "gap.ms must be a number from 0, not '3'"),
        ({"gap": {"ms": -1}}, "gap.ms must be a number from 0, not -1"),
        ({"gap": {"ms": True}}, "gap.ms must be a number from 0, not True"),
        ({"gap": {"ms": float("nan")}}, "gap.ms must be a number from 0, not nan"),
        ({"gap": {"ms": float("inf")}}, "gap.ms must be a number from 0, not inf"),
        ({"gap": {}}, "gap.ms must be a number from 0, not None"),
        ({"gap": {"ms": 1, "unit": "s"}}, "unknown field gap.unit"),
        ({"prefill": {"ms": 1, "source": 2}}, "prefill.source must be a text, not 2"),
        ({"skew": {"ms": 1, "is_inferred": 1}}, "skew.is_inferred must be true or false"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: Any, said: str) -> None:
    path = written(tmp_path, change if isinstance(change, str) else {**GOOD, **change})
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.param == "profile"


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for name in ("decode", "decode_row", "prefill_token", "gap", "skew"):
        told = {key: value for key, value in GOOD.items() if key != name}
        with pytest.raises(ConfigError, match=f"{name} is missing"):
            load_profile(written(tmp_path, told))


def test_a_file_that_is_not_there_is_no_device(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the latency profile") as caught:
        open_device(f"sim:{tmp_path / 'chip.json'}")
    assert caught.value.param == "device"
    with pytest.raises(ConfigError, match="cannot write the profile"):
        save_profile(PROFILES["micro"], tmp_path)


def test_where_nothing_can_be_written_is_known_before(tmp_path: Path) -> None:
    check_writable(tmp_path / "chip.json")
    for path in (tmp_path / "chip.txt", tmp_path / "none" / "chip.json"):
        with pytest.raises(ConfigError) as caught:
            check_writable(path)
        assert caught.value.param == "profile"


def test_a_file_s_name_goes_wherever_a_profile_s_does(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    found: Profile = profile(str(path))
    assert found.name == "mine"
    device = open_device(f"sim:{path}")
    assert isinstance(device, SimDevice)
    assert device.profile == found
    assert device.gap_s == pytest.approx(0.004)


async def test_a_file_s_device_answers(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    async with Engine("sim:count", device=f"sim:{path}") as engine:
        completion = await engine.generate(prompt_token_ids=[5], max_tokens=3, ignore_eos=True)
    assert list(completion.token_ids) == [6, 7, 8]
