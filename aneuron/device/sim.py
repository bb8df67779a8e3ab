"""The simulated device: a modelled timeline, in real time or in virtual time.

In real time it has threads like any device, on a `VirtualClockLoop` none (`virtual.py`).

A program starts at max(end of the program before, arrival of its launch) and ends its
latency later; oversleeping delays only the read-back, never the timeline. Inputs are read
when a program *starts*, and must still be the same when it ends, so a buffer that is
written again too early shows. Faults come on demand. It counts steps and rows.

The gap of a device is what a step costs beyond its program when the host waits for it: a
launch arrives `enqueue_s` after it was made, and the host has a value `readback_s` after
its program's end. Queued ahead, launches have arrived in time and nothing of it shows.
With a gap, a reader thread waits for the read-back, so that the next program starts
meanwhile; without one the value is in the host's memory already, as on `cpu`, and the
launch thread posts it.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, is_dataclass
from math import inf
from threading import get_ident
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from aneuron.clock import VirtualClockLoop
from aneuron.device.profiles import Profile
from aneuron.device.thread import Job, QueueFull
from aneuron.device.virtual import ModelledDevice
from aneuron.errors import DeviceError, DeviceLost, LaunchFailed, OutOfMemory

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, Sequence

    from aneuron.device.thread import JobQueue
    from aneuron.plans import ModelInput

__all__ = ["Fault", "Latency", "SimDevice", "SimValue"]

_KV_BYTES = 64 * 2**20
_WRITTEN = 1002  # bad input: somebody wrote it while the program ran
# No published figure tells the enqueue cost; the small-graph call that one third party
# measured (94 us) is close to it.
_ENQUEUE_S = 100e-6
# Of a step in two parts, what the second one adds: a small graph's call, and 0.24 ms that the
# vLLM Neuron plugin's notes on structured output give for moving and unpacking the masks.
_SAMPLING_S = 94e-6 + 240e-6
_PR_SET_TIMERSLACK = 29  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Latency:
    """How long programs take, in seconds: a base and what each row or prompt token adds.

    Attributes:
        decode_s: any decode.
        decode_row_s: each of its rows, on top; each token of a draft that is verified, too.
        prefill_s: any prefill; None is as `decode_s`.
        prefill_token_s: each of its tokens, on top, padding included.
    """

    decode_s: float = 0.0
    decode_row_s: float = 0.0
    prefill_s: float | None = None
    prefill_token_s: float = 0.0

    def __call__(self, inputs: ModelInput) -> float:
        """Return the latency of one program; a draft verified is like a row more."""
        if inputs.is_decode or inputs.spec_decode_metadata is not None:
            return self.decode_s + self.decode_row_s * len(inputs.positions)
        base = self.decode_s if self.prefill_s is None else self.prefill_s
        return base + self.prefill_token_s * len(inputs.positions)


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong at one step.

    Attributes:
        step: which one, from 1, in launch order.
        status: a Neuron runtime status code (nrt_status: 2 invalid, 4 out of memory,
            5 time-out, 7 queue full, 101 unrecoverable, 1003 NaN, 1006 out of bounds), or "hang".
        rank: whose device.
        in_sampling: of a step that is split: its sampling part.
    """

    step: int
    status: int | str
    rank: int = 0
    in_sampling: bool = False


class _StatusError(RuntimeError):
    """What a driver raises: a runtime error whose text has the status code."""

    def __init__(self, status: int) -> None:
        super().__init__(f"simulated nrt status {status}")
        self.status = status


class SimValue:
    """A value in the simulated device's memory; the loop's thread must not look at it."""

    __slots__ = ("_array", "_loop_thread")

    def __init__(self, array: np.ndarray, loop_thread: int) -> None:
        self._array = array
        self._loop_thread = loop_thread

    def read(self) -> np.ndarray:
        """Return the array.

        Raises:
            RuntimeError: called on the event loop's thread.
        """
        if get_ident() == self._loop_thread:
            raise RuntimeError("a device value was read on the event loop's thread")
        return self._array


class SimDevice(ModelledDevice):
    """A device that takes as long, and fails, as told.

    All its times are of one clock: `time.monotonic`, or on a `VirtualClockLoop` the loop's.

    Args:
        latency: seconds per program: a number, a `Latency`, a `Profile`, or any function of
            the inputs.
        gap_s: what a step costs beyond its program when the host waits for it: enqueue
            (0.1 ms, at most the gap; inferred, there is no published figure) and
            read-back (the rest).
        faults: what goes wrong, by step and rank.
        sampling_s: seconds of a program that samples apart from the forward pass, on top of
            what `latency` says of the whole.
        skew_s: how much later than the first rank's the last rank's programs end, those of
            the ranks between in proportion; or a function of the rank, called at each
            program on the thread of its device.
        checks_inputs: compare the inputs at a program's start and end, which takes the
            processor some time; benchmarks, which measure that, do without.
        rank: which rank this device is.

    Attributes:
        profile: the `Profile` that `latency` is, or None.
        end_s: end of the latest program, on the modelled timeline.
        busy_s: sum of (end - start) on it.
        idle_s: sum of (start - end of the program before) on it, since the device's start.
        num_steps, num_rows, num_prefill_tokens: programs, and what counts in them.
        num_reads: values copied to the host.
        num_queue_full: launches that found no room.
    """

    name = "sim"

    def __init__(
        self,
        *,
        latency: float | Callable[[ModelInput], float] = 0.0,
        gap_s: float = 0.0,
        faults: Sequence[Fault] = (),
        sampling_s: float = 0.0,
        skew_s: float | Callable[[int], float] = 0.0,
        checks_inputs: bool = True,
        rank: int = 0,
    ) -> None:
        """Make the device; nothing runs before `start`."""
        self._enqueue_s = min(gap_s, _ENQUEUE_S)
        self._readback_s = gap_s - self._enqueue_s
        super().__init__(rank=rank, has_reader=self._readback_s > 0.0)
        self.gap_s = gap_s
        self.profile = latency if isinstance(latency, Profile) else None
        self._latency = latency if callable(latency) else lambda _: latency
        self._all_faults = faults
        self._faults = {
            (fault.step, fault.in_sampling): fault.status for fault in faults if fault.rank == rank
        }
        self.sampling_s = sampling_s
        self._checks_inputs = checks_inputs
        self._skew_s = skew_s
        self._skew = skew_s if callable(skew_s) else None  # the first rank has none
        self._base_end_s = 0.0  # end of the program before, without its skew
        self._has_run = False
        self._loop_thread = 0
        self._never = threading.Event()
        self.end_s = self.busy_s = self.idle_s = 0.0
        self.num_steps = self.num_rows = self.num_prefill_tokens = 0
        self.num_reads = self.num_queue_full = 0

    @classmethod
    def of_profile(cls, profile: Profile, *, checks_inputs: bool = True) -> Self:
        """Return the device that a profile describes: its latency, gap and skew."""
        return cls(
            latency=profile,
            gap_s=profile.gap_s,
            sampling_s=_SAMPLING_S,
            skew_s=profile.skew_s,
            checks_inputs=checks_inputs,
        )

    def _open_queue(self, loop: asyncio.AbstractEventLoop) -> JobQueue:
        is_virtual = isinstance(loop, VirtualClockLoop)
        clock = loop.time if is_virtual else monotonic
        if clock != self._clock:  # the end of the latest program is no time of this one
            self._clock, self.end_s, self._base_end_s = clock, 0.0, 0.0
        # In real time the thread that starts it must not read values. In virtual time there
        # is one thread only, which does everything.
        self._loop_thread = 0 if is_virtual else get_ident()
        self._has_run = False
        return super()._open_queue(loop)

    def memory_budget(self) -> int:
        """Return 64 MiB."""
        return _KV_BYTES

    def _sibling(self, rank: int, num_ranks: int) -> Self:
        skew_s = self._skew_s
        if not callable(skew_s):
            share_s = skew_s * rank / (num_ranks - 1)
            skew_s = lambda _: share_s  # noqa: E731  one expression, made here
        return type(self)(
            latency=self._latency,
            gap_s=self.gap_s,
            faults=self._all_faults,
            sampling_s=self.sampling_s,
            skew_s=skew_s,
            checks_inputs=self._checks_inputs,
            rank=rank,
        )

    # ── on the launch thread ────────────────────────────────────────────────────────────

    def _enter_thread(self) -> None:
        _sleep_precisely()

    def _execute(self, job: Job) -> None:
        for until_s in self._program(job):
            if until_s == inf:
                self._never.wait()
            else:
                self._sleep_until(until_s)

    def _sleep_until(self, when_s: float) -> None:
        if (left_s := when_s - self._clock()) > 0:
            sleep(left_s)

    # ── on the launch thread, or in virtual time on the loop ────────────────────────────

    def _program(self, job: Job) -> Iterator[float]:
        inputs = job.inputs
        if inputs is None:
            self._gather(job)
            return
        is_step = not job.goes_on
        status = self._take_fault(is_step=is_step) if self._faults else None
        if status == 7:
            self.num_queue_full += 1
            raise QueueFull
        arrival_s = job.arrival_s + self._enqueue_s
        start_s = max(arrival_s, self.end_s)
        if start_s > job.arrival_s:
            yield start_s
        if is_step:
            self._count(inputs)
        # The timeline moves on also when the program fails or its input was poisoned.
        latency_s = self._latency(inputs) if is_step else self.sampling_s
        end_s = self._end_time(latency_s, start_s, arrival_s)
        self._put_on_timeline(job, start_s, end_s)
        if status == "hang":
            yield inf
        if status is not None:
            raise _StatusError(int(status))
        self._compute(job, inputs)
        is_checked = self._checks_inputs and end_s > self._clock()
        before = _snapshot(inputs) if is_checked else None
        yield end_s
        if before is not None and _snapshot(inputs) != before:
            raise _StatusError(_WRITTEN)

    def _take_fault(self, *, is_step: bool) -> int | str | None:
        number = self.num_steps + is_step  # of the step that begins, or has begun
        return self._faults.pop((number, not is_step), None)

    def _end_time(self, latency_s: float, start_s: float, arrival_s: float) -> float:
        if self._skew is None:
            return start_s + latency_s
        return self._skewed_end(start_s, arrival_s, latency_s, self._skew)

    def _skewed_end(
        self, start_s: float, arrival_s: float, latency_s: float, skew: Callable[[int], float]
    ) -> float:
        """Return when a program ends on a rank that is late.

        Ranks wait for each other inside a program, so skew does not add up from program to
        program.
        """
        self._base_end_s = max(self._base_end_s, arrival_s) + latency_s
        return max(start_s, self._base_end_s + skew(self.rank))

    def _put_on_timeline(self, job: Job, start_s: float, end_s: float) -> None:
        if self._has_run:
            self.idle_s += start_s - self.end_s
        self._has_run = True
        self.busy_s += end_s - start_s
        self.end_s = end_s
        job.future.device_start_s = start_s
        job.future.device_end_s = end_s

    def _compute(self, job: Job, inputs: ModelInput) -> None:
        assert job.executable is not None
        fed = None if job.feed is None else job.fed_value().read()
        array = self._keep(job.future, job.executable(inputs, fed))
        job.future.device_value = SimValue(array, self._loop_thread)

    def _gather(self, job: Job) -> None:
        now_s = max(self.end_s, job.arrival_s)  # it takes no time
        job.future.device_start_s = job.future.device_end_s = now_s
        array = job.fed_value().read()[job.order]
        job.future.device_value = SimValue(array, self._loop_thread)

    def _count(self, inputs: ModelInput) -> None:
        self.num_steps += 1
        self.num_rows += inputs.num_reqs
        if not inputs.is_decode:
            self.num_prefill_tokens += inputs.num_tokens

    # ── on the thread that copies, or in virtual time on the loop ───────────────────────

    def _host_time(self, job: Job) -> float:
        # A value asked for later starts on its way when it is asked for.
        return max(job.future.device_end_s, job.arrival_s) + self._readback_s

    def _to_host(self, job: Job) -> Any:
        if self._readback_s:
            self._sleep_until(self._host_time(job))  # in virtual time it is that late
        self.num_reads += 1
        return self._with_extras(job.future, job.future.device_value.read())

    def _classify(self, error: Exception) -> DeviceError:
        status = error.status if isinstance(error, _StatusError) else None
        text = f"device {self.label}: {error}"
        match status:
            case 2 | 3 | 1002:
                return LaunchFailed(text, device=self.label)
            case 4:
                return OutOfMemory(text, device=self.label)
            case 1003 | 1006:
                return DeviceError(text, device=self.label)
        return DeviceLost(text, device=self.label)


def _snapshot(part: Any) -> list[bytes]:
    """Return a copy of every array in a launch's inputs, those of its parts included."""
    if isinstance(part, np.ndarray):
        return [part.tobytes()]
    if isinstance(part, tuple):
        return [copy for one in part for copy in _snapshot(one)]
    if not is_dataclass(part):
        return []
    names = part.__dataclass_fields__  # fields() builds a tuple at each call
    return [copy for name in names for copy in _snapshot(getattr(part, name))]


def _sleep_precisely() -> None:
    """Let this thread's sleeps end in time: by default Linux adds 50 us to each."""
    if sys.platform == "linux":
        from ctypes import CDLL

        CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
