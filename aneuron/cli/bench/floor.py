"""`aneuron bench floor`: the shortest program behind which the host's work disappears.

Comes in: numbers of sequences. Goes out: milliseconds. Probe after probe decodes on `sim`, in
real time, with programs of one length and without a gap, until the length is found from which
on the device idles under 1 % of the time. The search begins at the host's own turn.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from aneuron.cli.bench.common import (
    JsonFlag,
    check_kept,
    check_number,
    default_loop,
    parse_counts,
    run_on,
    show_json,
    show_table,
    tell,
)
from aneuron.cli.bench.rig.words import word_tokenizer
from aneuron.cli.bench.rig.workload import (
    max_tokens_for,
    prompts_of,
    read_all,
    steady_windows,
    submit,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.plans import StepRecord
    from aneuron.timeline import Timeline

__all__ = ["find_floor", "floor"]

_WARMUP, _WINDOW, _WINDOWS = 64, 300, 3
_IDLE_SHARE = 0.01  # of the time, at most
_LOW_MS, _HIGH_MS = 0.02, 20.0
_TRIES = 2  # of a probe
_STRIDE = 1.25  # to the next probe, squared each time, until the floor lies between two
_TOLERANCE = 0.03  # of the floor


def floor(
    *,
    num_seqs: str = "1,8,64,256",
    loop: str | None = None,
    steps: int = _WINDOW,
    windows: int = _WINDOWS,
    as_json: JsonFlag = False,
) -> None:
    """Find the shortest program, in milliseconds, with which the device idles under 1 %.

    Args:
        num_seqs: Numbers of sequences, separated by commas.
        loop: uvloop (the default where there is one) or asyncio.
        steps: Steps in a window; all windows together must be under 4096.
        windows: Windows of each probe; the median counts.
        as_json: Print one JSON object in place of the table.
    """
    loop = loop or default_loop()
    counts = parse_counts("--num-seqs", num_seqs)
    check_number("--steps", steps)
    check_number("--windows", windows)
    for count in counts:
        check_kept("--steps or --windows", _Case(count, steps, windows).max_tokens)
    rows: list[dict[str, Any]] = []
    for count in counts:
        case = _Case(count, steps, windows)

        def is_hidden(program_ms: float, case: _Case = case) -> bool:
            tell(f"{case.num_seqs} sequences, programs of {program_ms:.3f} ms")
            # What else the machine does can only add to the idle time: a miss is tried again.
            return any(
                run_on(loop, case.idle_share(program_ms)) < _IDLE_SHARE for _ in range(_TRIES)
            )

        guess_ms = run_on(loop, case.turn_ms())
        rows.append({"num_seqs": count, "floor_ms": find_floor(is_hidden, guess_ms=guess_ms)})
    if as_json:
        show_json({"rows": rows})
    else:
        _show(rows, loop)


def find_floor(
    is_hidden: Callable[[float], bool],
    *,
    guess_ms: float,
    low_ms: float = _LOW_MS,
    high_ms: float = _HIGH_MS,
    tolerance: float = _TOLERANCE,
) -> float | None:
    """Return the shortest length that hides the host's work; None if even `high_ms` does not.

    Args:
        is_hidden: probes a length; false below the floor, true above it.
        guess_ms: where to begin.
        low_ms: the shortest length to look at.
        high_ms: the longest.
        tolerance: the result is over the floor by at most this share of it.
    """
    at_ms, stride = min(max(guess_ms, low_ms), high_ms), _STRIDE
    if is_hidden(at_ms):
        hidden_ms, bare_ms = at_ms, max(at_ms / stride, low_ms)
        while hidden_ms > low_ms and is_hidden(bare_ms):
            stride *= stride
            hidden_ms, bare_ms = bare_ms, max(bare_ms / stride, low_ms)
    else:
        bare_ms, hidden_ms = at_ms, min(at_ms * stride, high_ms)
        while bare_ms < high_ms and not is_hidden(hidden_ms):
            stride *= stride
            bare_ms, hidden_ms = hidden_ms, min(hidden_ms * stride, high_ms)
        if bare_ms >= high_ms:
            return None
    while hidden_ms > bare_ms * (1 + tolerance):
        middle_ms = (bare_ms * hidden_ms) ** 0.5
        if is_hidden(middle_ms):
            hidden_ms = middle_ms
        else:
            bare_ms = middle_ms
    return hidden_ms


class _Case(NamedTuple):
    """One row: how many sequences, and how it is measured."""

    num_seqs: int
    steps: int
    windows: int

    @property
    def max_tokens(self) -> int:
        """How long the answers are, and so how many steps of one must be kept."""
        return max_tokens_for(self.num_seqs, _WARMUP + self.steps * self.windows)

    async def idle_share(self, program_ms: float) -> float:
        """Decode with programs of this length; return the median share of idle time."""
        timeline, found = await self._decode(program_ms)
        return median(timeline.idle_share(window) for window in found)

    async def turn_ms(self) -> float:
        """Decode with programs that take no time; return the median time of a step."""
        timeline, found = await self._decode(0.0)
        return median(timeline.elapsed_s(window) for window in found) / self.steps * 1e3

    async def _decode(self, program_ms: float) -> tuple[Timeline, list[list[StepRecord]]]:
        """Decode on an engine of its own; return its timeline and the windows.

        Raises:
            RuntimeError: the timeline has fewer windows than were asked for.
        """
        from aneuron.cli.bench.rig.programs import WordModel
        from aneuron.device.sim import SimDevice
        from aneuron.engine import Engine

        length = 256 + self.max_tokens  # the longest prompt has 143
        engine = Engine(
            WordModel(2 * self.num_seqs, length),
            device=SimDevice(latency=program_ms / 1e3, checks_inputs=False),
            tokenizer=word_tokenizer(),
            max_num_seqs=self.num_seqs,
            num_kv_blocks=self.num_seqs * (length // 16 + 1),
            timeline=True,
        )
        async with engine:
            await read_all(submit(engine, prompts_of(self.num_seqs), self.max_tokens))
            timeline = engine.timeline
            found = steady_windows(timeline.steps, self.num_seqs, warmup=_WARMUP, every=self.steps)
        if len(found) < self.windows:
            raise RuntimeError(f"{len(found)} of {self.windows} windows were kept")
        return timeline, found[: self.windows]


def _show(rows: list[dict[str, Any]], loop: str) -> None:
    cells = [
        (row["num_seqs"], f"over {_HIGH_MS:g}" if row["floor_ms"] is None else row["floor_ms"])
        for row in rows
    ]
    title = "Shortest program with the device idle under 1 %"
    show_table(title, ("sequences", "floor ms"), cells, loop=loop)
