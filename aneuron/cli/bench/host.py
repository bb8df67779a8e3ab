"""`aneuron bench host`: host work per step, in steady decode on a device that costs nothing.

Comes in: numbers of sequences. Goes out: microseconds per step. The device is `cpu`, with its
thread and its future; the program returns tokens computed before. So what is left is the
host's: both loops of the engine, the crossings, detokenising, waking the consumers.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from aneuron.cli.bench.common import (
    Flag,
    JsonFlag,
    check_number,
    default_loop,
    parse_counts,
    run_on,
    show_json,
    show_table,
    tell,
)
from aneuron.cli.bench.rig.parts import (
    ALL_PARTS,
    ENGINE_PARTS,
    PartClock,
    time_decoding,
    time_parts,
)
from aneuron.cli.bench.rig.words import word_tokenizer
from aneuron.cli.bench.rig.workload import StepMarks, max_tokens_for, prompts_of, read_all, submit
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from aneuron.prompt import Tokenizer

__all__ = ["host"]

_WARMUP, _WINDOW, _WINDOWS = 64, 400, 5
_FIGURES = ("turn", "cpu", "engine")
_US = 1e6


def host(
    *,
    num_seqs: str = "1,8,64,256",
    parts: Flag = False,
    loop: str | None = None,
    tokenizer: str = "bpe",
    timeline: Flag = False,
    steps: int = _WINDOW,
    windows: int = _WINDOWS,
    as_json: JsonFlag = False,
) -> None:
    """Measure the host's work per step in steady decode, in microseconds.

    Args:
        num_seqs: Numbers of sequences, separated by commas.
        parts: Tell what each part takes.
        loop: uvloop (the default where there is one) or asyncio.
        tokenizer: bpe, or byte: the simulated models' own.
        timeline: Keep the last steps in the engine's timeline, to see what that costs.
        steps: Steps in a window.
        windows: Windows; the median counts.
        as_json: Print one JSON object in place of the table.
    """
    loop = loop or default_loop()
    counts = parse_counts("--num-seqs", num_seqs)
    check_number("--steps", steps)
    check_number("--windows", windows)
    if tokenizer not in ("bpe", "byte"):
        raise ConfigError(f"--tokenizer must be bpe or byte, not {tokenizer!r}", param="tokenizer")
    wanted = ALL_PARTS if parts else ENGINE_PARTS
    rows = []
    for count in counts:
        tell(f"{count} sequences")
        case = _Case(count, tokenizer, steps, windows, timeline)
        plain = run_on(loop, case.measure(()))
        timed = run_on(loop, case.measure(wanted))
        rows.append(_row(count, plain, timed, with_parts=parts))
    if as_json:
        show_json({"rows": rows})
    else:
        _show(rows, loop)


def _row(
    num_seqs: int, plain: list[_Window], timed: list[_Window], *, with_parts: bool
) -> dict[str, Any]:
    took = {part: median(window.parts_us[part] for window in timed) for part in timed[0].parts_us}
    if "deliver" in took:
        took["deliver"] -= took["update"]  # which it calls
    engine_us = sum(took[part] for part in ENGINE_PARTS)
    if with_parts:
        # Waking and running the consumers, the loop itself, the crossings.
        took["rest"] = median(window.turn_us for window in timed) - sum(took.values())
    return {
        "num_seqs": num_seqs,
        "turn_us": median(window.turn_us for window in plain),
        "cpu_us": median(window.cpu_us for window in plain),
        "engine_us": engine_us,
        "parts": took if with_parts else {},
    }


def _show(rows: list[dict[str, Any]], loop: str) -> None:
    """Print one line per figure, one column per number of sequences."""
    lines = [(f"{name}_us", *(row[f"{name}_us"] for row in rows)) for name in _FIGURES]
    lines += [(f"  {part}", *(row["parts"][part] for row in rows)) for part in rows[0]["parts"]]
    columns = ("us per step", *(f"{row['num_seqs']} seqs" for row in rows))
    show_table(
        "Host work in steady decode, on a device that costs nothing", columns, lines, loop=loop
    )


# ── one measurement ─────────────────────────────────────────────────────────────────────


class _Window(NamedTuple):
    """What a window gave, per step."""

    turn_us: float
    cpu_us: float
    parts_us: dict[str, float]


class _Case(NamedTuple):
    """One row: how many sequences, and how it is measured."""

    num_seqs: int
    tokenizer: str
    steps: int
    windows: int
    timeline: bool = False

    async def measure(self, parts: tuple[str, ...]) -> list[_Window]:
        """Decode on an engine of its own; time these parts, which itself costs time."""
        from aneuron.cli.bench.rig.programs import FreeModel
        from aneuron.engine import Engine

        clock = PartClock()
        marks = StepMarks(
            self.num_seqs,
            lambda: (time.perf_counter(), time.process_time(), dict(clock.seconds)),
            warmup=_WARMUP,
            every=self.steps,
            windows=self.windows,
        )
        max_tokens = max_tokens_for(self.num_seqs, _WARMUP + self.steps * self.windows)
        length = 256 + max_tokens  # the longest prompt has 143
        tokenizer = _make_tokenizer(self.tokenizer)
        if "detokenize" in parts:
            time_decoding(tokenizer, clock)
        engine = Engine(
            FreeModel(2 * self.num_seqs, length, marks),
            device="cpu",
            tokenizer=tokenizer,
            max_num_seqs=self.num_seqs,
            num_kv_blocks=self.num_seqs * (length // 16 + 1),
            block_size=16,
            timeline=self.timeline,
        )
        async with engine:
            time_parts(engine, clock, parts)
            await read_all(submit(engine, prompts_of(self.num_seqs), max_tokens))
        return [self._window(begin, end, parts) for begin, end in marks.windows()]

    def _window(self, begin: _Sample, end: _Sample, parts: tuple[str, ...]) -> _Window:
        per_step = _US / self.steps
        return _Window(
            (end[0] - begin[0]) * per_step,
            (end[1] - begin[1]) * per_step,
            {part: (end[2].get(part, 0.0) - begin[2].get(part, 0.0)) * per_step for part in parts},
        )


_Sample = tuple[float, float, dict[str, float]]


def _make_tokenizer(name: str) -> Tokenizer:
    from aneuron.models.tokenizer import ByteTokenizer

    return word_tokenizer() if name == "bpe" else ByteTokenizer()
