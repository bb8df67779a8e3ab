"""`--stats`: a line per interval on what the engine does, where somebody reads it."""

from __future__ import annotations

import asyncio
import io
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from aneuron.cli.ticker import StatsSettings, Ticker, stats_line
from aneuron.errors import ConfigError
from aneuron.outputs import EngineStats
from aneuron.testing import count_engine

if TYPE_CHECKING:
    from tests.cli.conftest import Command

LINE = re.compile(
    r"running \d+, waiting \d+; tokens/s in \d+, out \d+; KV \d+%; loop lag \d+ ms", re.MULTILINE
)
NOTHING = EngineStats(
    running=0, waiting=0, in_flight_steps=0, num_blocks=0, free_blocks=0, cached_blocks=0,
    prefix_cache_queries=0, prefix_cache_hits=0, preemptions=0, draft_tokens=0,
    accepted_draft_tokens=0, steps=0, decode_steps=0, async_steps=0, sync_fallback_steps=0,
    breaks={}, prompt_tokens=0, generation_tokens=0, stalled_s=0.0,
)  # fmt: skip


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_tells_rates_and_shares() -> None:
    before = replace(NOTHING, prompt_tokens=100, generation_tokens=1000, num_blocks=64)
    after = replace(
        before, running=3, waiting=2, prompt_tokens=300, generation_tokens=1500, free_blocks=48
    )
    told = stats_line(before, after, 2.0, 0.0124)
    assert told == "running 3, waiting 2; tokens/s in 100, out 250; KV 25%; loop lag 12 ms"


def test_an_engine_without_blocks_and_no_time_are_no_fault() -> None:
    told = stats_line(NOTHING, NOTHING, 0.0, 0.0)
    assert told == "running 0, waiting 0; tokens/s in 0, out 0; KV 0%; loop lag 0 ms"


@pytest.mark.parametrize(
    ("settings", "screen", "always", "interval_s"),
    [
        ({}, True, True, None),
        ({"stats": True}, True, False, 1.0),
        ({"stats": True}, False, False, None),
        ({"stats": True}, False, True, 1.0),
        ({"stats_interval": 5.0}, False, False, 5.0),
        ({"stats": True, "stats_interval": 0.5}, True, False, 0.5),
    ],
)
def test_lines_are_written_where_somebody_reads_them(
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    screen: bool,
    always: bool,
    interval_s: float | None,
) -> None:
    monkeypatch.setattr(sys, "stderr", Screen() if screen else io.StringIO())
    engine: Any = None
    assert StatsSettings(**settings).ticker(engine, always=always)._interval_s == interval_s


@pytest.mark.parametrize("interval", [0.0, -1.0, float("nan"), float("inf")])
def test_an_interval_is_a_time(interval: float) -> None:
    with pytest.raises(ConfigError, match="--stats-interval must be seconds"):
        StatsSettings(stats_interval=interval).check()


async def test_it_tells_until_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    told = asyncio.Event()

    def take(text: str) -> None:
        written.append(text)
        if len(written) == 2:
            told.set()

    monkeypatch.setattr("aneuron.cli.ticker.note", take)
    async with count_engine() as engine, asyncio.timeout(10):
        with Ticker(engine, 0.05) as ticker:
            stream = engine.generate("abc", max_tokens=5000)
            await told.wait()
            stream.cancel()
        assert ticker._timer is None
        seen = len(written)
        await engine.generate("abc", max_tokens=50)
        assert len(written) == seen
    assert all(LINE.fullmatch(one) for one in written)


async def test_an_idle_engine_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr("aneuron.cli.ticker.note", written.append)
    async with count_engine() as engine:
        with Ticker(engine, 60) as ticker:
            ticker._tick(engine.loop)
            assert written == []
            await engine.generate("abc", max_tokens=5)  # begun and ended between two lines
            ticker._tick(engine.loop)
            assert len(written) == 1
            ticker._tick(engine.loop)
            assert len(written) == 1


async def test_at_one_terminal_with_the_text_a_line_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", Screen())
    written: list[str] = []
    monkeypatch.setattr("aneuron.cli.ticker.note", written.append)
    async with count_engine() as engine:
        with Ticker(engine, 60) as ticker:
            await engine.generate("abc", max_tokens=5)
            ticker._tick(engine.loop)
    assert written[0].startswith("\nrunning ")


@pytest.mark.parametrize("command", ["run", "chat"])
def test_commands_tell_when_asked_to(aneuron: Command, command: str) -> None:
    prompt = ["abc"] if command == "run" else []
    options = ["--device=sim:micro", "--max-tokens=400", "--stats-interval=0.05"]
    if command == "chat":
        options.append("--temperature=0")
    result = aneuron(command, "sim:count", *prompt, *options, stdin="abc\n")
    assert result.status == 0
    assert LINE.search(result.err)
    assert "running" not in result.out


def test_a_wrong_interval_costs_no_model(aneuron: Command) -> None:
    result = aneuron("run", "sim:count", "abc", "--stats-interval=0")
    assert (result.status, result.out) == (2, "")
    assert "--stats-interval must be" in result.err
