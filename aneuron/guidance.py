"""`Guidance`: what the host decides of a step's samples before the device draws them.

Comes in: a launch whose sampling waits, since some of its requests have a grammar or hooks
(`logits_processors`). Goes out: `GrammarOutput`, masks and changed logits. With split
executables the device runs the forward pass meanwhile. Run by the step loop; grammars are
filled in, and hooks called, in worker threads.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from aneuron.clock import VirtualClockLoop
from aneuron.errors import DeviceError, DeviceLost, InvalidRequest
from aneuron.grammar import fill_bitmask
from aneuron.outputs import FinishReason
from aneuron.params import takes_prompt
from aneuron.plans import Break, BreakReason, GrammarOutput
from aneuron.threads import DaemonExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextvars import Context

    from aneuron.batch import Launch
    from aneuron.errors import AneuronError
    from aneuron.futures import DeviceFuture, Signal, Watchdog
    from aneuron.parallel.ranks import RankGroup
    from aneuron.plans import ModelSpec, SchedulerOutput
    from aneuron.request import Request
    from aneuron.runner import ModelRunner
    from aneuron.scheduler import Scheduler

__all__ = ["Guidance"]

_T = TypeVar("_T")
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
        self._thread = DaemonExecutor("aneuron-guidance")

    def close(self) -> None:
        """Let the thread go; a hook that still runs is left behind."""
        self._thread.shutdown()

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
        bitmask = await fill_bitmask(matchers, self._spec.vocab_size, executor=self._thread)
        for slot, matcher in pairs:
            if matcher.error is not None:
                text = f"the grammar failed: {matcher.error}"
                self._fail(slot, InvalidRequest(text, param="grammar"))
        return np.array(slots, np.int64), bitmask

    def _fail(self, slot: int, error: AneuronError) -> None:
        """End a request by its own fault; its row of the step is a surplus row."""
        self._scheduler.finish(self._scheduler.holder(slot), FinishReason.ERROR, error=error)

    # ── hooks ───────────────────────────────────────────────────────────────────────────

    async def _hooked(
        self, launch: Launch, requests: list[Request]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return slots, int64 [H], and their logits as hooks left them, float32 [H, V]."""
        assert launch.guided is not None
        pairs = zip(launch.guided.tolist(), requests, strict=True)
        asking = [pair for pair in pairs if pair[1].params.logits_processors and _is_live(pair[1])]
        if not asking:
            return _NO_SLOTS, np.zeros((0, self._spec.vocab_size), np.float32)
        samples, asked = zip(*asking, strict=True)
        logits, faults = await self._run_hooks(np.array(samples, np.int64), asked)
        for request, fault in zip(asked, faults, strict=True):
            if fault is not None:
                self._fail(request.slot, fault)
        return np.array([request.slot for request in asked], np.int64), logits

    async def _run_hooks(
        self, samples: np.ndarray, requests: Sequence[Request]
    ) -> tuple[np.ndarray, Sequence[AneuronError | None]]:
        """Return logits, float32 [H, V], and whose fault ends their request."""
        none = np.zeros((len(requests), self._spec.vocab_size), np.float32)
        try:
            logits = await self._read(samples)
        except DeviceLost:
            raise
        except DeviceError as fault:
            # The forward part may be well: these have no logits to be sampled from.
            return none, [fault.copy() for _ in requests]
        calls = [_HookCall.of(request) for request in requests]
        try:
            async with asyncio.timeout(self._watchdog.timeout_s):
                return await self._in_thread(_run_hooks, calls, logits)
        except TimeoutError:
            self._thread.shutdown()  # a function of the user's hangs: left behind
            self._thread = DaemonExecutor("aneuron-guidance")
            text = f"a logits processor took over {self._watchdog.timeout_s:g} s (step_timeout_s)"
            late = InvalidRequest(text, param="logits_processors")
            return none, [late.copy() for _ in requests]

    async def _read(self, samples: np.ndarray) -> np.ndarray:
        """Return the logits of samples, float32 [H, V]; not to be written to."""
        future = self._runner.read_logits(samples)
        self._watchdog.watch(_Reading(future), beside=True)
        logits: np.ndarray = await future
        return logits

    async def _in_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call a function off the loop; where time is virtual, threads would not be waited for."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualClockLoop):
            return function(*args)
        return await loop.run_in_executor(self._thread, function, *args)


class _HookCall(NamedTuple):
    """The hooks of one request, and what they are told beside its logits."""

    hooks: Sequence[Callable[..., Any]]
    context: Context  # of the call that submitted it
    prompt_ids: np.ndarray
    output_ids: list[int]

    @classmethod
    def of(cls, request: Request) -> _HookCall:
        assert request.prompt_ids is not None
        hooks = request.params.logits_processors
        assert isinstance(hooks, tuple)
        assert request.hook_context is not None
        return cls(hooks, request.hook_context, request.prompt_ids, request.output_ids.tolist())


def _run_hooks(
    calls: Sequence[_HookCall], logits: np.ndarray
) -> tuple[np.ndarray, list[InvalidRequest | None]]:
    """Call hooks, one request after the other; return their rows, and whose fault is what."""
    rows = np.array(logits, np.float32)  # their own
    faults: list[InvalidRequest | None] = []
    for call, row in zip(calls, rows, strict=True):
        try:
            for hook in call.hooks:
                call.context.run(_run_hook, hook, call, row)
        except BaseException as error:  # noqa: BLE001  the user's, in a thread: nobody cancels it
            text = f"a logits processor failed: {_describe(error)}"
            fault = InvalidRequest(text, param="logits_processors")
            fault.__cause__ = error if isinstance(error, Exception) else None
            row[:] = 0.0
            faults.append(fault)
        else:
            faults.append(None)
    return rows, faults


def _describe(error: BaseException) -> str:
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:  # noqa: BLE001  what the user's own class raises
        return name


def _run_hook(hook: Callable[..., Any], call: _HookCall, logits: np.ndarray) -> None:
    told = [call.output_ids.copy(), logits]
    if takes_prompt(hook):
        told.insert(0, call.prompt_ids.tolist())
    result = hook(*told)
    if result is not None:
        row = np.asarray(result, np.float32)
        if row.shape != logits.shape:
            raise ValueError(f"it returned shape {row.shape}, not {logits.shape}")
        logits[:] = row
    best = logits.max()
    if not np.isfinite(best):  # NaN, +inf, or nothing but -inf
        raise ValueError(f"it left logits whose maximum is {best}")


def _is_live(request: Request) -> bool:
    return request.finish_reason is None


def _lags(request: Request, end: int) -> bool:
    """Whether a token before position `end` has not been applied."""
    return _is_live(request) and request.prompt_len + len(request.output_ids) < end
