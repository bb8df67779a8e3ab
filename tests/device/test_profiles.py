"""Latency profiles: they give back the published figures, and every figure has a source."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aneuron import ConfigError, Engine
from aneuron.device import open_device
from aneuron.device.profiles import PROFILES, Profile, profile
from aneuron.device.sim import SimDevice

NAMES = (
    "inf2-llama3-8b",
    "trn1-llama3-8b",
    "trn2-llama3-8b",
    "inf2-llama3-70b",
    "trn1-llama3-70b",
    "trn2-llama3-70b",
    "micro",
    "micro-long",
)
every_profile = pytest.mark.parametrize("name", NAMES)

# (rows, ms of a decode) and (tokens, ms to the first one), as published
DECODES = {
    "inf2-llama3-8b": [(1, 6.42), (8, 10.45)],
    "trn1-llama3-8b": [(1, 5.86), (8, 7.65)],
    "trn2-llama3-8b": [(2, 10.5)],
    "inf2-llama3-70b": [(1, 35.0)],
    "trn1-llama3-70b": [(1, 26.2), (4, 32.0)],
    "trn2-llama3-70b": [(1, 19.6)],
    "micro": [(1, 2.58), (64, 2.58)],
    "micro-long": [(1, 5.18), (64, 5.18)],
}
PREFILLS = {
    "inf2-llama3-8b": [(128, 25.0), (2048, 102.0)],
    "trn1-llama3-8b": [(128, 17.09), (4096, 153.02)],
    "trn2-llama3-8b": [(512, 51.0)],
    "inf2-llama3-70b": [],
    "trn1-llama3-70b": [(128, 53.2), (2048, 547.0)],
    "trn2-llama3-70b": [(10_000, 814.0)],
    "micro": [(1, 2.58), (4096, 2.58)],
    "micro-long": [(1, 5.18), (4096, 5.18)],
}
GAPS_MS = {"micro": 0.37}


def decode(rows: int) -> Any:
    return SimpleNamespace(
        is_decode=True, num_rows=rows, positions=np.zeros(rows), spec_decode_metadata=None
    )


def prefill(tokens: int) -> Any:
    return SimpleNamespace(
        is_decode=False, num_rows=1, positions=np.zeros(tokens), spec_decode_metadata=None
    )


def test_these_profiles_ship() -> None:
    assert tuple(PROFILES) == NAMES
    assert all(profile(name).name == name for name in NAMES)


@every_profile
def test_published_figures_come_back(name: str) -> None:
    latency_s = profile(name)
    for rows, ms in DECODES[name]:
        assert latency_s(decode(rows)) * 1000 == pytest.approx(ms)
    for tokens, ms in PREFILLS[name]:
        assert latency_s(prefill(tokens)) * 1000 == pytest.approx(ms)
    assert latency_s.gap_s * 1000 == pytest.approx(GAPS_MS.get(name, 0.437))
    assert latency_s.skew_s * 1000 == pytest.approx(0.08)


@every_profile
def test_every_figure_has_a_source_or_a_formula(name: str) -> None:
    figures = dict(profile(name).figures())
    assert set(figures) >= {"decode", "decode_row", "prefill_token", "gap", "skew"}
    for figure in figures.values():
        assert figure.ms >= 0
        if figure.is_inferred:
            assert str(figure).startswith(f"{figure.ms:.4g} ms (inferred: ")
        else:
            assert any(end in figure.source for end in (".csv", ".md", ".py")), figure
            assert "inferred" not in str(figure)


@pytest.mark.parametrize(
    ("name", "figure", "words"),
    [
        ("trn1-llama3-8b", "decode", "int8 weights"),
        ("inf2-llama3-70b", "decode", "the upper end of 32 to 35"),
        ("trn1-llama3-70b", "prefill_token", "(windows 4096 and 1152)"),
        ("trn2-llama3-70b", "decode", "with 814 and 19.6 ms; another has 575.6 and 19.8"),
        ("trn2-llama3-70b", "prefill_token", "with 814 and 19.6 ms; another has 575.6 and 19.8"),
    ],
)
def test_sources_say_which_of_several_figures_it_is(name: str, figure: str, words: str) -> None:
    assert words in getattr(profile(name), figure).source


@pytest.mark.parametrize("model", ["8b", "70b"])
def test_inferred_figures_lie_where_the_published_ones_do(model: str) -> None:
    """A larger model and more rows or tokens take longer; trn1 is quicker than inf2."""
    devices = [profile(f"{device}-llama3-{model}") for device in ("inf2", "trn1", "trn2")]
    for one in devices:
        larger = profile(one.name.replace("8b", "70b"))
        for rows in (1, 8, 64):
            assert one.decode_s(rows) < one.decode_s(rows + 1)
            assert one.decode_s(rows) <= larger.decode_s(rows)
        for tokens in (512, 4096):
            assert 0.010 < one.prefill_s(tokens) < one.prefill_s(tokens + 1)
            assert one.prefill_s(tokens) <= larger.prefill_s(tokens)
    inf2, trn1, _ = devices
    assert all(trn1.decode_s(rows) < inf2.decode_s(rows) for rows in (1, 8, 64))
    assert all(trn1.prefill_s(tokens) < inf2.prefill_s(tokens) for tokens in (128, 2048))


@every_profile
def test_a_device_of_a_profile(name: str) -> None:
    device = open_device(f"sim:{name}")
    assert isinstance(device, SimDevice)
    assert device.name == "sim"
    assert device.profile is profile(name)
    sibling = device.for_rank(1, 2)
    assert isinstance(sibling, SimDevice)
    for one in (device, sibling):
        assert one.gap_s == profile(name).gap_s
        assert one._latency(decode(8)) == profile(name).decode_s(8)
    assert not callable(device._skew_s)
    assert callable(sibling._skew_s)
    assert sibling._skew_s(1) == profile(name).skew_s


def test_a_device_without_a_profile() -> None:
    device = open_device("sim")
    assert isinstance(device, SimDevice)
    assert device.profile is None
    assert device.gap_s == 0.0


@pytest.mark.parametrize("name", ["", "Micro", "micro:1", "llama"])
def test_unknown_profiles(name: str) -> None:
    with pytest.raises(ConfigError, match=r"micro-long") as caught:
        profile(name)
    assert caught.value.param == "profile"
    with pytest.raises(ConfigError, match=r"trn2-llama3-70b") as caught:
        open_device(f"sim:{name}")
    assert caught.value.param == "device"


@pytest.mark.parametrize("name", ["cpu:micro", "sims", "micro", ""])
def test_unknown_devices(name: str) -> None:
    with pytest.raises(ConfigError, match="sim:PROFILE") as caught:
        open_device(name)
    assert caught.value.param == "device"


async def test_an_engine_on_a_profile() -> None:
    async with Engine("sim:count", device="sim:micro") as engine:
        assert (await engine.generate(prompt_token_ids=[7], max_tokens=5)).token_ids == [
            8,
            9,
            10,
            11,
            12,
        ]
        device = engine.device
        assert isinstance(device, SimDevice)
        assert isinstance(device.profile, Profile)
        assert device.busy_s == pytest.approx(device.num_steps * 0.00258)
