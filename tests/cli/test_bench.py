from __future__ import annotations

import json
import statistics
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron.cli.bench.churn import arrivals_of, lengths_of
from aneuron.cli.bench.common import parse_counts
from aneuron.cli.bench.floor import find_floor
from aneuron.cli.bench.rig.words import word_ids, word_tokenizer
from aneuron.cli.bench.rig.workload import StepMarks, prompts_of, steady_windows
from aneuron.device.profiles import PROFILES
from aneuron.engine import Engine
from aneuron.errors import ConfigError
from aneuron.plans import StepRecord
from aneuron.testing import SimDevice

if TYPE_CHECKING:
    from tests.cli.conftest import Command

floor_module = import_module("aneuron.cli.bench.floor")
churn_module = import_module("aneuron.cli.bench.churn")
overlap_module = import_module("aneuron.cli.bench.overlap")

HOST = ("bench", "host", "--steps=10", "--windows=1")
FLOOR = ("bench", "floor", "--steps=20", "--windows=1")
OVERLAP = ("bench", "overlap", "--steps=10", "--windows=1")
CHURN = ("bench", "churn", "--num-seqs=4", "--requests=5", "--rounds=1", "--mean-tokens=4")


def json_of(aneuron: Command, *arguments: str) -> Any:
    """The one object on stdout; anything else there fails."""
    result = aneuron(*arguments, "--json")
    assert (result.status, result.err) == (0, "")
    return json.loads(result.out)


# ── host ────────────────────────────────────────────────────────────────────────────────


def test_host_gives_a_row_for_each_number_of_sequences(aneuron: Command) -> None:
    rows = json_of(aneuron, *HOST, "--num-seqs=1,3")["rows"]
    assert [row["num_seqs"] for row in rows] == [1, 3]
    for row in rows:
        assert set(row) == {"num_seqs", "turn_us", "cpu_us", "engine_us", "parts"}
        assert min(row["turn_us"], row["cpu_us"], row["engine_us"]) > 0
        assert row["parts"] == {}


def test_host_parts_add_up(aneuron: Command) -> None:
    (row,) = json_of(aneuron, *HOST, "--num-seqs=2", "--parts")["rows"]
    engine = ("schedule", "prepare", "apply", "update")
    assert set(row["parts"]) == {*engine, "launch", "deliver", "detokenize", "rest"}
    assert all(row["parts"][part] > 0 for part in (*engine, "launch", "deliver", "detokenize"))
    assert row["engine_us"] == pytest.approx(sum(row["parts"][part] for part in engine))


def test_host_runs_on_either_loop_with_either_tokenizer(aneuron: Command) -> None:
    options = ("--num-seqs=1", "--tokenizer=byte", "--loop=asyncio")
    assert json_of(aneuron, *HOST, *options)["rows"][0]["turn_us"] > 0


def test_host_can_keep_the_timeline(aneuron: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []

    class Watched(Engine):
        async def aclose(self) -> None:
            kept.append(self.timeline.metrics().kept_steps)
            await super().aclose()

    monkeypatch.setattr("aneuron.engine.Engine", Watched)
    options = ("--num-seqs=1", "--tokenizer=byte")
    assert json_of(aneuron, *HOST, *options)
    assert kept == [0, 0]
    assert json_of(aneuron, *HOST, *options, "--timeline")
    assert min(kept[2:]) > 64


# ── floor ───────────────────────────────────────────────────────────────────────────────


def test_floor_is_the_shortest_program_that_hides_the_host(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[float] = []

    async def idle_share(case: Any, program_ms: float) -> float:
        probed.append(program_ms)
        share: float = 1 - program_ms / (0.5 * case.num_seqs)
        return max(0.0, share)

    monkeypatch.setattr(floor_module._Case, "idle_share", idle_share)
    rows = json_of(aneuron, *FLOOR, "--num-seqs=1,8")["rows"]
    assert [row["num_seqs"] for row in rows] == [1, 8]
    for row in rows:  # idle under 1 % means at least 99 % of the host's turn
        assert 0.99 <= row["floor_ms"] / (0.5 * row["num_seqs"]) <= 0.99 * 1.03
    assert len(probed) < 80  # tries and all


def test_floor_says_so_where_nothing_hides_the_host(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def idle_share(case: Any, program_ms: float) -> float:
        return 0.5

    monkeypatch.setattr(floor_module._Case, "idle_share", idle_share)
    assert json_of(aneuron, *FLOOR, "--num-seqs=1")["rows"][0]["floor_ms"] is None
    assert "over 20" in aneuron(*FLOOR, "--num-seqs=1").out


async def test_floor_needs_every_window_it_was_asked_for() -> None:
    case = floor_module._Case(1, 1500, 3)
    with pytest.raises(RuntimeError, match="2 of 3 windows were kept"):
        await case.turn_ms()


def test_floor_tries_a_missed_probe_again(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tries: dict[float, int] = {}

    async def idle_share(case: Any, program_ms: float) -> float:
        num_tries[program_ms] = num_tries.get(program_ms, 0) + 1
        return 0.5 if num_tries[program_ms] == 1 else 0.0  # disturbed each first time

    monkeypatch.setattr(floor_module._Case, "idle_share", idle_share)
    (row,) = json_of(aneuron, *FLOOR, "--num-seqs=1")["rows"]
    assert row["floor_ms"] == floor_module._LOW_MS
    assert set(num_tries.values()) == {2}


async def test_floor_probes_idle_less_with_longer_programs() -> None:
    case = floor_module._Case(2, 20, 1)
    assert 0 <= await case.idle_share(4.0) < await case.idle_share(0.001) < 1


@pytest.mark.parametrize("guess_ms", [0.001, 0.02, 0.5, 0.7, 5.0, 20.0, 100.0])
@pytest.mark.parametrize("floor_ms", [0.021, 0.7, 0.875, 19.9])
def test_find_floor_is_within_its_tolerance(floor_ms: float, guess_ms: float) -> None:
    found = find_floor(lambda ms: ms >= floor_ms, guess_ms=guess_ms)
    assert found is not None
    assert floor_ms <= found <= floor_ms * 1.03


def test_find_floor_ends_at_both_ends_of_its_range() -> None:
    assert find_floor(lambda _: True, guess_ms=1.0, low_ms=0.5) == 0.5
    assert find_floor(lambda _: False, guess_ms=1.0, high_ms=2.0) is None
    assert find_floor(lambda ms: ms >= 2.0, guess_ms=1.0, high_ms=2.0) == 2.0


# ── overlap ─────────────────────────────────────────────────────────────────────────────


def test_overlap_compares_both_schedulings(aneuron: Command) -> None:
    result = json_of(aneuron, *OVERLAP, "--profile=micro", "--num-seqs=2")
    assert set(result) == {"program_ms", "gap_ms", "sync", "async", "gain"}
    assert set(result["sync"]) == {"ms_per_step", "idle_share"}
    assert set(result["async"]) == {
        "ms_per_step", "idle_share", "async_steps", "sync_fallback_steps",
    }  # fmt: skip
    assert result["program_ms"] == pytest.approx(2.58)
    assert result["gap_ms"] == pytest.approx(0.37)
    # On the modelled timeline neither can be faster, whatever the machine does.
    assert result["sync"]["ms_per_step"] >= 2.58 + 0.37 - 1e-6
    assert result["sync"]["idle_share"] >= 0.37 / (2.58 + 0.37) - 1e-6
    assert result["async"]["ms_per_step"] >= 2.58 - 1e-6
    assert result["async"]["async_steps"] >= 10
    assert result["gain"] == pytest.approx(
        result["sync"]["ms_per_step"] / result["async"]["ms_per_step"]
    )


def test_overlap_tells_what_a_blocked_loop_costs(aneuron: Command) -> None:
    hog_ms, program_ms = 12.0, 2.58
    result = json_of(aneuron, *OVERLAP, f"--loop-hog={hog_ms}")
    assert set(result) == {
        "program_ms", "gap_ms", "sync", "async", "gain",
        "loop_hog_ms", "slack_ms", "excess_ms", "idle_ms_per_hog",
    }  # fmt: skip
    assert result["loop_hog_ms"] == hog_ms
    assert result["slack_ms"] < program_ms  # a launch waits for one program at most
    assert result["excess_ms"] == pytest.approx(hog_ms - result["slack_ms"])
    # The window has one blocked step in ten; two programs at most were launched before it.
    assert result["idle_ms_per_hog"] >= hog_ms - 2 * program_ms
    assert "in hand" in aneuron(*OVERLAP, "--loop-hog=0.1").out


def test_what_blocking_the_loop_costs_is_counted_by_block() -> None:
    case = overlap_module._Case("micro", 1, 0.004, 50)  # five blocks of 4 ms in a window
    windows = [
        overlap_module._Window(2.6, 0.1, idle_ms=idle_ms, program_ms=2.5, lead_ms=lead_ms)
        for idle_ms, lead_ms in ((10.0, 1.5), (20.0, 2.0), (90.0, 2.5))
    ]
    assert overlap_module._hog_result(case, windows) == {
        "loop_hog_ms": 4.0, "slack_ms": 2.0, "excess_ms": 2.0, "idle_ms_per_hog": 4.0,
    }  # fmt: skip
    short = case._replace(hog_s=0.001)
    assert overlap_module._hog_result(short, windows)["excess_ms"] == 0.0


# ── churn ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("load", ["closed", "0.8"])
def test_churn_compares_the_carries(aneuron: Command, load: str) -> None:
    result = json_of(aneuron, *CHURN, f"--load={load}")
    assert list(result) == ["host", "handoff", "resident"]
    for one in result.values():
        assert set(one) == {"tokens_per_s", "decode_async_share", "idle_share", "breaks"}
        assert one["tokens_per_s"] > 0
        assert 0 <= one["idle_share"] < 1
    assert result["resident"]["breaks"] == result["host"]["breaks"] == {}
    assert result["host"]["decode_async_share"] == 0.0
    if load == "closed":  # requests join and leave all the time
        assert result["resident"]["decode_async_share"] == 1.0
        assert result["handoff"]["decode_async_share"] < 1.0
        assert result["handoff"]["breaks"]["composition_changed"] > 0


async def test_churn_answers_every_request_with_its_length() -> None:
    case = churn_module._Case("micro", 3, [1, 2, 5, 1, 1, 3, 2, 1, 4])
    seen: list[int] = []

    class Load(churn_module._Load):  # type: ignore[misc,name-defined]
        async def _answer(self, stream: Any) -> None:
            await super()._answer(stream)
            seen.append(len((await stream).token_ids))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(churn_module, "_Load", Load)
        await churn_module._run(case, {"token_carry": "resident"}, None)
        await churn_module._run(case, {"token_carry": "resident"}, [0.0] * len(case.lengths))
    assert sorted(seen) == sorted([*case.lengths, *case.lengths])


async def test_churn_says_so_where_the_first_steps_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(churn_module, "open_profile", lambda _: SimDevice(checks_inputs=False))
    case = churn_module._Case("micro", 1, [1, 4500, 1])  # the window is about the second one
    with pytest.raises(ConfigError, match=r"^--requests: this takes up to 45\d\d steps"):
        await churn_module._run(case, {}, None)


def test_lengths_are_at_least_one_and_the_same_each_time() -> None:
    lengths = lengths_of(5000, 8.0)
    assert min(lengths) == 1
    assert statistics.mean(lengths) == pytest.approx(8.0, rel=0.05)
    assert lengths == lengths_of(5000, 8.0)
    assert set(lengths_of(10, 1.0)) == {1}


def test_arrivals_come_at_the_rate() -> None:
    arrivals = arrivals_of(5000, 100.0)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(50.0, rel=0.05)


# ── all of them ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("host", "--num-seqs=0"), "--num-seqs"),
        (("host", "--num-seqs=1,,8"), "--num-seqs"),
        (("host", "--num-seqs=many"), "--num-seqs"),
        (("host", "--loop=trio"), "--loop"),
        (("host", "--tokenizer=words"), "--tokenizer"),
        (("host", "--steps=0"), "--steps"),
        (("host", "--windows=-1"), "--windows"),
        (("floor", "--num-seqs=-3"), "--num-seqs"),
        (("floor", "--loop=none"), "--loop"),
        (("floor", "--num-seqs=1,4097"), "--num-seqs must be at most 4096, not 4097"),
        (("floor", "--steps=5000"), "--steps or --windows: this takes up to 15"),
        (("floor", "--windows=14"), "timeline keeps the last 4096"),
        (("overlap", "--num-seqs=4097"), "--num-seqs"),
        (("overlap", "--steps=4096"), "--steps: this takes up to 41"),
        (("churn", "--num-seqs=4097"), "--num-seqs"),
        (("churn", "--requests=1000"), "--requests: this takes up to"),
        (("overlap", "--profile=fast"), "--profile"),
        (("overlap", "--num-seqs=0"), "--num-seqs"),
        (("overlap", "--num-seqs=two"), "--num-seqs"),
        (("overlap", "--loop-hog=-1"), "--loop-hog"),
        (("overlap", "--loop-hog=nan"), "--loop-hog"),
        (("churn", "--load=half"), "--load"),
        (("churn", "--load=0"), "--load"),
        (("churn", "--load=1.5"), "--load"),
        (("churn", "--mean-tokens=0.5"), "--mean-tokens"),
        (("churn", "--requests=1"), "--requests"),
        (("churn", "--profile="), "--profile"),
        (("speed",), "speed"),
    ],
)
def test_a_bad_option_is_named(aneuron: Command, arguments: tuple[str, ...], named: str) -> None:
    result = aneuron("bench", *arguments)
    assert result.status == 2
    assert named in result.err + result.out  # the parser's own messages are on stdout
    assert "Traceback" not in result.err


@pytest.mark.parametrize("command", ["overlap", "churn"])
def test_help_lists_the_profiles(aneuron: Command, command: str) -> None:
    words = aneuron("bench", command, "--help").out.replace(".", ",").split()
    assert {f"{name}," for name in PROFILES} <= set(words)


def test_the_table_says_what_it_was_measured_on(aneuron: Command) -> None:
    out = aneuron(*HOST, "--num-seqs=1", "--loop=asyncio").out
    assert "turn_us" in out
    assert "asyncio; load" in out
    assert "composition_changed" in aneuron(*CHURN).out


def test_numbers_are_a_list() -> None:
    assert parse_counts("--n", "1, 8,64") == [1, 8, 64]
    with pytest.raises(ConfigError, match=r"^--n must be positive integers"):
        parse_counts("--n", "1;8")


# ── the load ────────────────────────────────────────────────────────────────────────────


def program(num_reqs: int, *, is_decode: bool = True) -> Any:
    return SimpleNamespace(is_decode=is_decode, num_reqs=num_reqs)


def test_marks_count_full_decode_steps_only() -> None:
    count = 0
    marks = StepMarks(2, lambda: count, warmup=1, every=2, windows=2)
    for inputs in (program(2, is_decode=False), program(1), *[program(2)] * 9):
        count += 1
        marks(inputs)
    # Steady steps are calls 3, 4, …: the first after one of warm-up, then every second.
    assert marks.samples == [4, 6, 8]
    assert list(marks.windows()) == [(4, 6), (6, 8)]


def test_marks_that_were_not_reached_are_an_error() -> None:
    marks = StepMarks(1, lambda: None, warmup=0, every=5, windows=1)
    marks(program(1))
    with pytest.raises(RuntimeError, match="1 of 2 samples"):
        marks.windows()


def record(step_id: int, num_reqs: int, *, is_decode: bool = True) -> StepRecord:
    rows = np.zeros(num_reqs, np.int64)
    return StepRecord(step_id, is_decode, rows, rows)


def test_windows_share_the_step_between_them() -> None:
    records = [record(1, 2, is_decode=False), record(2, 1), *(record(i, 2) for i in range(3, 10))]
    found = steady_windows(records, 2, warmup=1, every=2)
    assert [[one.step_id for one in window] for window in found] == [[4, 5, 6], [6, 7, 8]]
    with pytest.raises(RuntimeError, match="7 steps of steady decode"):
        steady_windows(records, 2, warmup=0, every=7)


async def test_the_words_are_ascii_and_prompts_are_made_of_them() -> None:
    tokenizer, ids = word_tokenizer(), word_ids()
    text = tokenizer.decode(ids)
    assert text.isascii()
    assert (await tokenizer.encode(text)).tolist() == ids
    prompts = prompts_of(18)
    assert [len(prompt) for prompt in prompts] == [128 + i % 16 for i in range(18)]
    assert set().union(*prompts) <= set(ids)


async def test_the_texts_are_decoded_token_by_token() -> None:
    case = import_module("aneuron.cli.bench.host")._Case(1, "bpe", 5, 1)
    windows = await case.measure(("detokenize",))
    assert windows[0].parts_us["detokenize"] > 0
