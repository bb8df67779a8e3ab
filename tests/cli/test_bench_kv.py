from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from aneuron.device.profiles import PROFILES
from aneuron.engine import Engine
from aneuron.testing import Count, SimDevice

if TYPE_CHECKING:
    from tests.cli.conftest import Command

prefix_module = import_module("aneuron.cli.bench.prefix")
longprompt_module = import_module("aneuron.cli.bench.longprompt")

PREFIX = ("bench", "prefix", "--model=sim:count", "--rounds=2")
LONGPROMPT = (
    "bench", "longprompt", "--prompts=3", "--prompt-tokens=500",
    "--max-num-batched-tokens=256", "--rounds=3",
)  # fmt: skip


def json_of(aneuron: Command, *arguments: str) -> Any:
    """The one object on stdout; anything else there fails."""
    result = aneuron(*arguments, "--json")
    assert (result.status, result.err) == (0, "")
    return json.loads(result.out)


# ── prefix ──────────────────────────────────────────────────────────────────────────────


def test_prefix_tells_what_the_cache_found(aneuron: Command) -> None:
    result = json_of(aneuron, *PREFIX, "--prefix-tokens=64", "--requests=3")
    assert set(result) == {"ttft_ms", "cached_tokens"}
    assert set(result["ttft_ms"]) == {"cache_on", "cache_off"}
    assert min(result["ttft_ms"].values()) > 0
    assert result["cached_tokens"] == 64


def test_prefix_finds_whole_blocks_only(aneuron: Command) -> None:
    result = json_of(aneuron, *PREFIX, "--prefix-tokens=70", "--requests=2")
    assert result["cached_tokens"] == 64


async def test_prefix_counts_what_the_cache_can_help_and_no_first_request() -> None:
    case = prefix_module._Case("sim:count", 64, 4)
    answers = await prefix_module._measure(case, 3)
    assert [one.cached_tokens for one in answers["cache_on"]] == [64] * 9
    assert [one.cached_tokens for one in answers["cache_off"]] == [0] * 9


async def test_prefix_computes_each_prefix_once_with_the_cache() -> None:
    devices: dict[bool, SimDevice] = {}

    class Case(prefix_module._Case):  # type: ignore[misc,name-defined]
        def engine(self, *, is_cached: bool) -> Engine:
            device = devices[is_cached] = SimDevice()
            return Engine(Count(), device=device, enable_prefix_caching=is_cached)

    await prefix_module._measure(Case("sim:count", 64, 4), 2)
    assert devices[False].num_prefill_tokens == 2 * 4 * (64 + 16)
    assert devices[True].num_prefill_tokens == 2 * (64 + 4 * 16)


@pytest.mark.tiny
@pytest.mark.timeout(120)
def test_prefix_saves_time_to_first_token(aneuron: Command) -> None:
    options = ("--prefix-tokens=512", "--requests=2", "--rounds=1")
    result = json_of(aneuron, "bench", "prefix", *options)
    assert result["cached_tokens"] == 512
    assert result["ttft_ms"]["cache_off"] >= 3 * result["ttft_ms"]["cache_on"]


# ── longprompt ──────────────────────────────────────────────────────────────────────────


def test_longprompt_compares_chunks_with_whole_prompts(aneuron: Command) -> None:
    result = json_of(aneuron, *LONGPROMPT)
    assert set(result) == {"chunk_step_ms", "largest_gap_ms", "largest_gap_ms_unchunked"}
    profile = PROFILES["trn1-llama3-8b"]
    assert result["chunk_step_ms"] == pytest.approx(1000 * profile.prefill_s(256))
    assert result["largest_gap_ms"] >= 0.8 * result["chunk_step_ms"]
    assert result["largest_gap_ms_unchunked"] >= 800 * profile.prefill_s(1500)
    assert result["largest_gap_ms"] < result["largest_gap_ms_unchunked"]


async def test_longprompt_gives_the_stream_a_token_between_two_chunks() -> None:
    case = longprompt_module._Case("micro", 3, 500)
    async with case.engine(256) as engine:
        await longprompt_module._run(case, engine, 0)
        stats, records = engine.stats(), engine.timeline.steps
    chunks = [(at, one) for at, one in enumerate(records) if not one.is_decode]
    assert [int(one.num_scheduled.sum()) for _, one in chunks] == [16, *[256] * 5, 220]
    for at, _ in chunks[:-1]:
        assert records[at + 1].is_decode
        assert 1 in records[at + 1].request_ids
    assert stats.preemptions == stats.prefix_cache_hits == 0


async def test_longprompt_without_chunks_is_one_step_for_all_prompts() -> None:
    case = longprompt_module._Case("micro", 3, 500)
    async with case.engine(case.all_tokens) as engine:
        first = await longprompt_module._run(case, engine, 0)
        await longprompt_module._run(case, engine, 1)
        prefills = [r.num_scheduled.tolist() for r in engine.timeline.steps if not r.is_decode]
        assert engine.stats().prefix_cache_hits == 0
    assert prefills == [[16], [500] * 3] * 2
    assert first.full_step_ms == pytest.approx(2.58)
    assert first.answered_ms > first.largest_gap_ms > 0


async def test_longprompt_says_so_where_the_stream_ends_too_early() -> None:
    class Case(longprompt_module._Case):  # type: ignore[misc,name-defined]
        def stream_tokens(self, chunk: int) -> int:
            return 20

    case = Case("micro", 3, 500)
    async with case.engine(256) as engine:
        with pytest.raises(RuntimeError, match="20 tokens ended before"):
            await longprompt_module._run(case, engine, 0)


@pytest.mark.parametrize(("prompts", "prompt_tokens"), [(1, 1), (7, 3), (40, 50), (10, 2000)])
@pytest.mark.parametrize("share", [1, 3, 40])
async def test_longprompt_has_a_full_chunk_and_a_stream_that_is_long_enough(
    prompts: int, prompt_tokens: int, share: int
) -> None:
    case = longprompt_module._Case("micro", prompts, prompt_tokens)
    chunk = max(1, case.all_tokens // share)
    async with case.engine(chunk) as engine:
        await longprompt_module._run(case, engine, 0)


def test_longprompt_counts_gaps_from_the_arrival_on() -> None:
    times_s = [0.0, 9.0, 10.0, 12.0, 15.0, 16.0]
    assert longprompt_module._largest_gap_s(times_s, 8.0) == 9.0  # it began before, ends after
    assert longprompt_module._largest_gap_s(times_s, 9.0) == 3.0


def test_longprompts_are_all_different() -> None:
    case = longprompt_module._Case("micro", 10, 100)
    beginnings = {tuple(ids[:16]) for number in range(5) for ids in case.drawn(number)}
    assert len(beginnings) == 50


# ── both ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("prefix", "--prefix-tokens=15"), "--prefix-tokens must be at least 16, not 15"),
        (("prefix", "--prefix-tokens=half"), "--prefix-tokens"),
        (
            ("prefix", "--model=sim:count", "--prefix-tokens=40000"),
            "40020 tokens is longer than sim:count takes",
        ),
        (("prefix", "--requests=1"), "--requests must be at least 2, not 1"),
        (("prefix", "--rounds=0"), "--rounds"),
        (("prefix", "--model=sim:none"), "sim:none"),
        (("longprompt", "--profile=fast"), "--profile"),
        (("longprompt", "--prompts=0"), "--prompts"),
        (("longprompt", "--prompts=4096"), "--prompts must be at most 4095, not 4096"),
        (("longprompt", "--prompt-tokens=0"), "--prompt-tokens"),
        (("longprompt", "--max-num-batched-tokens=0"), "--max-num-batched-tokens"),
        (
            ("longprompt", "--max-num-batched-tokens=20001"),
            "--max-num-batched-tokens must be at most 20000, not 20001",
        ),
        (("longprompt", "--max-num-batched-tokens=4"), "timeline keeps the last 4096"),
        (("longprompt", "--rounds=0"), "--rounds"),
    ],
)
def test_a_bad_option_is_named(aneuron: Command, arguments: tuple[str, ...], named: str) -> None:
    result = aneuron("bench", *arguments)
    assert result.status == 2
    assert named in result.err + result.out  # the parser's own messages are on stdout
    assert "Traceback" not in result.err


def test_help_lists_the_profiles(aneuron: Command) -> None:
    words = aneuron("bench", "longprompt", "--help").out.replace(".", ",").split()
    assert {f"{name}," for name in PROFILES} <= set(words)


def test_the_tables_say_what_they_were_measured_on(aneuron: Command) -> None:
    for command, title in ((PREFIX, "Prefix, sim:count"), (LONGPROMPT, "Long prompts, profile")):
        out = aneuron(*command).out
        assert out.startswith(title)
        assert "loop; load" in out
