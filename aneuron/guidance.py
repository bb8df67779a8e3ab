"""`Guidance`: what the host decides of a step's samples before the device draws them.

Comes in: a launch whose sampling waits, since some of its requests have a grammar or hooks
(`logits_processors`). Goes out: `GrammarOutput`, masks and changed logits. With split
executables the device runs the forward pass meanwhile. Run by the step loop; grammars are
filled in, and hooks called, in worker threads.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aneuron.errors import DeviceError, DeviceLost, InvalidRequest
from aneuron.grammar import fill_bitmask
from aneuron.outputs import FinishReason
from aneuron.params import takes_prompt
from aneuron.plans import Break, BreakReason, GrammarOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aneuron.batch import Launch
    from aneuron.errors import RequestError
    from aneuron.futures import DeviceFuture, Signal, Watchdog
    from aneuron.parallel.ranks import RankGroup
    from aneuron.plans import ModelSpec, SchedulerOutput
    from aneuron.request import Request
    from aneuron.runner import ModelRunner
    from aneuron.scheduler import Scheduler

__all__ = ["Guidance"]

_NO_SLOTS = np.zeros(0, np.int64)


class _Reading(NamedTuple):
    """Logits on their way to the host, for the watchdog."""

    future: DeviceFuture

    def fail(self, error: DeviceError) -> None:
        self.future.resolve(None, error)


class Guidance:
    """Waits for the tokens before, then asks the grammars and hooks of a launch."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner | RankGroup,
        spec: ModelSpec,
        *,
        changed: Signal,
        watchdog: Watchdog,
        clock: Callable[[], float],
    ) -> None:
        """Make one.

        Args:
            scheduler: knows the requests.
            runner: has the logits.
            spec: of the model.
            changed: set whenever a step has been applied.
            watchdog: guards the logits' way to the host.
            clock: of the breaks' times.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._spec = spec
        self._changed = changed
        self._watchdog = watchdog
        self._clock = clock
        # Its own: whatever an application does in the loop's executor, no step waits for it.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="aneuron-guidance")

    def close(self) -> None:
        """Let the thread go; a hook that still runs is left behind."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def output(self, plan: SchedulerOutput, launch: Launch) -> GrammarOutput:
        """Return what the host says of a launch's guided samples.

        Raises:
            DeviceLost: the device is gone.
        """
        assert launch.guided is not None
        begun_s = self._clock()
        requests = [self._scheduler.holder(slot) for slot in launch.slots[launch.guided].tolist()]
        ends = launch.ends[launch.guided].tolist()
        while any(map(_lags, requests, ends)):
            await self._changed.wait()
        slots, bitmask = await self._masks([one for one in requests if _is_live(one)])
        hooked_slots, logits = await self._hooked(launch, requests)
        reason = BreakReason.HOOK if hooked_slots.size else BreakReason.GRAMMAR
        if hooked_slots.size or not self._spec.is_split:
            self._runner.note_break(plan, Break(reason, begun_s, self._clock()))
        return GrammarOutput(slots, bitmask, hooked_slots, logits)

    # ── grammars ────────────────────────────────────────────────────────────────────────

    async def _masks(self, requests: list[Request]) -> tuple[np.ndarray, np.ndarray]:
        """Return slots, int64 [G], and what may follow there, int32 [G, ceil(V / 32)]."""
        pairs = [(one.slot, one.matcher) for one in requests if one.matcher is not None]
        if not pairs:
            return _NO_SLOTS, np.zeros((0, -(-self._spec.vocab_size // 32)), np.int32)
        slots, matchers = zip(*pairs, strict=True)
        bitmask = await fill_bitmask(matchers, self._spec.vocab_size, executor=self._pool)
        for slot, matcher in pairs:
            if matcher.error is not None:
                text = f"the grammar failed: {matcher.error}"
                self._fail(slot, InvalidRequest(text, param="grammar"))
        return np.array(slots, np.int64), bitmask

    def _fail(self, slot: int, error: RequestError) -> None:
        """End a request by its own fault; its row of the step is a surplus row."""
        self._scheduler.finish(self._scheduler.holder(slot), FinishReason.ERROR, error=error)

    # ── hooks ───────────────────────────────────────────────────────────────────────────

    async def _hooked(
        self, launch: Launch, requests: list[Request]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return slots, int64 [H], and their logits as hooks left them, float32 [H, V]."""
        assert launch.guided is not None
        asking = [
            (sample, request)
            for sample, request in zip(launch.guided.tolist(), requests, strict=True)
            if request.params.logits_processors and _is_live(request)
        ]
        if not asking:
            return _NO_SLOTS, np.zeros((0, self._spec.vocab_size), np.float32)
        future = self._runner.read_logits(np.array([sample for sample, _ in asking], np.int64))
        self._watchdog.watch(_Reading(future))
        try:
            logits = np.array(await future, np.float32)
        except DeviceLost:
            raise
        except DeviceError:  # the step has failed: so will its sampling
            logits = np.zeros((len(asking), self._spec.vocab_size), np.float32)
        else:
            calls = [_HookCall.of(request, row) for (_, request), row in zip(asking, logits)]  # noqa: B905
            loop = asyncio.get_running_loop()
            faults = await loop.run_in_executor(self._pool, _run_hooks, calls)
            for (_, request), fault in zip(asking, faults, strict=True):
                if fault is not None:
                    self._fail(request.slot, fault)
        return np.array([request.slot for _, request in asking], np.int64), logits


class _HookCall(NamedTuple):
    """The hooks of one request, and what they are told; `logits` is a row to be changed."""

    hooks: Sequence[Callable[..., Any]]
    prompt_ids: np.ndarray
    output_ids: list[int]
    logits: np.ndarray

    @classmethod
    def of(cls, request: Request, logits: np.ndarray) -> _HookCall:
        assert request.prompt_ids is not None
        hooks = request.params.logits_processors
        assert isinstance(hooks, tuple)
        return cls(hooks, request.prompt_ids, request.output_ids.tolist(), logits)


def _run_hooks(calls: Sequence[_HookCall]) -> list[InvalidRequest | None]:
    """Call hooks, one request after the other; return whose fault ends their request."""
    faults: list[InvalidRequest | None] = []
    for call in calls:
        try:
            for hook in call.hooks:
                _run_hook(hook, call)
        except Exception as error:  # noqa: BLE001  code of the user's
            fault = InvalidRequest(
                f"a logits processor failed: {type(error).__name__}: {error}",
                param="logits_processors",
            )
            fault.__cause__ = error
            call.logits[:] = 0.0
            faults.append(fault)
        else:
            faults.append(None)
    return faults


def _run_hook(hook: Callable[..., Any], call: _HookCall) -> None:
    told = [call.output_ids.copy(), call.logits]
    if takes_prompt(hook):
        told.insert(0, call.prompt_ids.tolist())
    result = hook(*told)
    if result is not None:
        row = np.asarray(result, np.float32)
        if row.shape != call.logits.shape:
            raise ValueError(f"it returned shape {row.shape}, not {call.logits.shape}")
        call.logits[:] = row
    best = call.logits.max()
    if not np.isfinite(best):  # NaN, +inf, or nothing but -inf
        raise ValueError(f"it left logits whose maximum is {best}")


def _is_live(request: Request) -> bool:
    return request.finish_reason is None


def _lags(request: Request, end: int) -> bool:
    """Whether a token before position `end` has not been applied."""
    return _is_live(request) and request.prompt_len + len(request.output_ids) < end
