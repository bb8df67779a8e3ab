"""`aneuron bench overlap`: what async scheduling hides, against the synchronous baseline.

Comes in: a latency profile and a number of sequences. Goes out: milliseconds per step and the
share of time that the device idled, both from the modelled timeline of a device in real time.
Two engines are open, and take turns window by window, so that what else the machine does
meets both alike.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from aneuron.cli.bench.common import (
    MAX_SEQS,
    JsonFlag,
    ProfileName,
    check_kept,
    check_number,
    default_loop,
    run_on,
    show_json,
    show_table,
    tell,
)
from aneuron.cli.bench.rig.words import word_tokenizer
from aneuron.cli.bench.rig.workload import (
    SHORT_PROMPT,
    max_tokens_for,
    open_profile,
    prompts_of,
    read_all,
    steady_windows,
    submit,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from aneuron.plans import StepRecord
    from aneuron.stream import TokenStream

__all__ = ["overlap"]

_WARMUP = 8
_HOG_EVERY = 10  # steps
_MS = 1e3


def overlap(
    *,
    profile: ProfileName = "micro",
    num_seqs: int = 1,
    loop_hog: float = 0.0,
    loop: str | None = None,
    steps: int = 100,
    windows: int = 10,
    as_json: JsonFlag = False,
) -> None:
    """Measure sync against async scheduling in real time, with a profile's programs.

    Args:
        profile: A latency profile; its programs' times.
        num_seqs: Number of sequences.
        loop_hog: Milliseconds for which a consumer blocks the loop at every tenth token.
        loop: uvloop (the default where there is one) or asyncio.
        steps: Steps in a window.
        windows: Windows of each; the medians count.
        as_json: Print one JSON object in place of the table.
    """
    loop = loop or default_loop()
    check_number("--num-seqs", num_seqs, at_most=MAX_SEQS)
    check_number("--steps", steps)
    check_number("--windows", windows)
    check_number("--loop-hog", loop_hog, at_least=0)
    case = _Case(profile, num_seqs, loop_hog / _MS, steps)
    check_kept("--steps", case.max_tokens)
    result = run_on(loop, _measure(case, windows))
    if as_json:
        show_json(result)
    else:
        _show(case, result, loop)


async def _measure(case: _Case, windows: int) -> dict[str, Any]:
    async with _Side(case, is_async=False) as sync_side, _Side(case, is_async=True) as async_side:
        for number in range(windows):
            tell(f"window {number + 1} of {windows}")
            await sync_side.run()
            await async_side.run()
        stats = async_side.engine.stats()
        sync_result, async_result = sync_side.result(), async_side.result()
        async_result |= {
            "async_steps": stats.async_steps,
            "sync_fallback_steps": stats.sync_fallback_steps,
        }
        result = {
            "program_ms": median(window.program_ms for window in async_side.windows),
            "gap_ms": async_side.gap_ms,
            "sync": sync_result,
            "async": async_result,
            "gain": sync_result["ms_per_step"] / async_result["ms_per_step"],
        }
        return result | (_hog_result(case, async_side.windows) if case.hog_s else {})


class _Case(NamedTuple):
    """What both sides do."""

    profile: str
    num_seqs: int
    hog_s: float
    steps: int

    @property
    def max_tokens(self) -> int:
        """How long the answers are, and so how many steps of a window must be kept."""
        return max_tokens_for(self.num_seqs, _WARMUP + self.steps, prompt=SHORT_PROMPT)


class _Window(NamedTuple):
    """What one window gave."""

    ms_per_step: float  # from the first program's end to the last one's
    idle_share: float
    idle_ms: float  # of the whole window
    program_ms: float
    lead_ms: float  # that a launch waits for its turn on the device


class _Side:
    """An engine, sync or async, and the windows that it has run."""

    def __init__(self, case: _Case, *, is_async: bool) -> None:
        from aneuron.cli.bench.rig.programs import WordModel
        from aneuron.engine import Engine

        self.case = case
        self.windows: list[_Window] = []
        device = open_profile(case.profile)
        self.gap_ms = device.gap_s * _MS
        length = 64 + case.max_tokens
        self.engine = Engine(
            WordModel(2 * case.num_seqs, length),
            device=device,
            async_scheduling=is_async,
            tokenizer=word_tokenizer(),
            max_num_seqs=case.num_seqs,
            num_kv_blocks=case.num_seqs * (length // 16 + 1),
            timeline=True,
        )

    async def __aenter__(self) -> Self:
        await self.engine.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self.engine.aclose()

    async def run(self) -> None:
        """Run one window: all sequences from prompt to end."""
        num_seqs, hog_s = self.case.num_seqs, self.case.hog_s
        before = self.engine.stats().steps
        prompts = prompts_of(num_seqs, length=SHORT_PROMPT)
        streams = submit(self.engine, prompts, self.case.max_tokens)
        if hog_s:
            await read_all(streams[1:], _read_and_block(streams[0], hog_s))
        else:
            await read_all(streams)
        await self.engine.wait_idle()
        timeline = self.engine.timeline
        records = [r for r in timeline.steps if r.step_id > before]
        steady = steady_windows(records, num_seqs, warmup=_WARMUP, every=self.case.steps)[0]
        self.windows.append(
            _window(steady, timeline.idle_share(steady), timeline.elapsed_s(steady))
        )

    def result(self) -> dict[str, Any]:
        """Return the medians over the windows."""
        return {
            "ms_per_step": median(window.ms_per_step for window in self.windows),
            "idle_share": median(window.idle_share for window in self.windows),
        }


def _hog_result(case: _Case, windows: Sequence[_Window]) -> dict[str, float]:
    """Return what blocking the loop cost the device, and what it should at most.

    The slack is a lower bound: the step loop is woken before the consumers, so the next
    launch is often on the queue before one of them blocks.
    """
    hog_ms = case.hog_s * _MS
    slack_ms = median(window.lead_ms for window in windows)
    num_hogs = case.steps / _HOG_EVERY
    return {
        "loop_hog_ms": hog_ms,
        "slack_ms": slack_ms,
        "excess_ms": max(0.0, hog_ms - slack_ms),
        "idle_ms_per_hog": median(window.idle_ms for window in windows) / num_hogs,
    }


def _window(records: Sequence[StepRecord], idle_share: float, elapsed_s: float) -> _Window:
    first, last = records[0], records[-1]
    ran = [record.device_end_s - record.device_start_s for record in records]
    leads = [record.device_start_s - record.launched_s for record in records]
    return _Window(
        ms_per_step=(last.device_end_s - first.device_end_s) / (len(records) - 1) * _MS,
        idle_share=idle_share,
        idle_ms=idle_share * elapsed_s * _MS,
        program_ms=median(ran) * _MS,
        lead_ms=median(leads) * _MS,
    )


async def _read_and_block(stream: TokenStream, seconds: float) -> None:
    """Read a stream to its end, and now and then hold the loop, and the GIL, for this long."""
    count = 0
    async for _ in stream:
        count += 1
        if count % _HOG_EVERY == 0:
            end_s = time.perf_counter() + seconds
            while time.perf_counter() < end_s:
                pass


def _show(case: _Case, result: dict[str, Any], loop: str) -> None:
    rows = [
        (name, result[name]["ms_per_step"], f"{100 * result[name]['idle_share']:.2f} %")
        for name in ("sync", "async")
    ]
    facts = [
        f"program {result['program_ms']:.3f} ms, gap {result['gap_ms']:.3f} ms",
        f"gain {result['gain']:.3f}",
        "{async_steps} async steps, {sync_fallback_steps} fallbacks".format(**result["async"]),
    ]
    if case.hog_s:
        facts.append(
            "loop blocked for {loop_hog_ms:g} ms at every tenth step: {slack_ms:.3f} ms or more in "
            "hand, excess {excess_ms:.3f} ms, device idle for {idle_ms_per_hog:.3f} ms".format(
                **result
            )
        )
    title = f"Overlap, profile {case.profile}, num_seqs {case.num_seqs}"
    show_table(title, ("scheduling", "ms per step", "idle"), rows, loop=loop, facts=facts)
