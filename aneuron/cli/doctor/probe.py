"""`aneuron doctor --probe`: what only hardware can tell, measured on a Neuron device.

Comes in: a device. Goes out: `Findings`. What may leave the device in a bad state, more launches
unread than it bears, comes last. It blocks for minutes, most of them compiling; each part runs on
a daemon thread, so that one which hangs is named and left behind.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from aneuron.cli.doctor.findings import Copies, Depth, Events, Findings, Gil, Timing
from aneuron.cli.doctor.rig import Rig, Size
from aneuron.device.neuron.status import classify
from aneuron.errors import AneuronError, DeviceLost
from aneuron.threads import call_within

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.device.neuron.device import NeuronDevice
    from aneuron.device.neuron.raw import Launched
    from aneuron.models.catalog import Progress

__all__ = ["MEASURE_S", "probe"]

T = TypeVar("T")
MEASURE_S = 300.0  # of all that is measured, which takes seconds
_PREPARE_S = 3600.0  # of compiling and loading; warm-up has a limit for each bucket
_SHORT_S = 0.002  # of a call beside which nothing can be counted
_MOST_UNREAD = 70  # the runtime's own limit is 63
_MOST_UNREAD_NXD = 5
_NEVER = threading.Event()  # nobody sets it: a wait with a time is a pause
_NO_EVENTS = "this runtime has no events"


def probe(
    device: NeuronDevice,
    progress: Progress,
    *,
    size: Size | None = None,
    repeats: int = 7,
    steps: int = 24,
) -> Findings:
    """Measure a device, and give its cores back.

    Args:
        device: that no engine has open.
        progress: told how far it is.
        size: of the model that it runs.
        repeats: of each measurement.
        steps: of each chain of decodes.

    Raises:
        ConfigError: the model does not compile.
        DeviceError: the cores cannot be had, a program failed, or something hangs.
    """
    started_s = perf_counter()
    try:
        make = partial(Rig, device, size or Size(), progress)
        rig = _Limited(device, _PREPARE_S)("compiling and loading the model", make)
        rows, raw = rig.row_sizes[-1], device.raw
        progress("measure", 0, None)
        told = _Limited(device, MEASURE_S)
        timings = told("launches and reads", partial(_timings, rig, repeats))
        sync_s, async_s = told("chains of decodes", partial(_steps, rig, rows, steps))
        copy_s = told("a copy to the host", partial(_copy, rig, rows, repeats))
        gil = told("a thread beside launches and reads", partial(_gil, rig, rows, repeats))
        events = told("events", partial(_events, rig, rows))
        copies = told("a read of the first of two launches", partial(_copies, rig, rows, repeats))
        depth = told("more launches than are read", partial(_depth, rig, rows))
        return Findings(
            kind=device.kind,
            version=getattr(device.compiler or raw, "version", ""),
            queue_depth=getattr(raw, "queue_depth", None),
            timings=timings,
            sync_step_s=sync_s,
            async_step_s=async_s,
            copy_s=copy_s,
            copied_ids=rows,
            gil=gil,
            events=events,
            copies=copies,
            depth=depth,
            total_s=perf_counter() - started_s,
        )
    finally:
        with suppress(RuntimeError):  # by now it may be in no good state
            device.disconnect()


class _Limited:
    """Runs parts of the probe, which may take so long together, on daemon threads.

    Args:
        device: that is probed.
        limit_s: seconds for all parts.
    """

    def __init__(self, device: NeuronDevice, limit_s: float) -> None:
        self._label = device.label
        self._limit_s = limit_s
        self._end_s = perf_counter() + limit_s

    def __call__(self, what: str, part: Callable[[], T]) -> T:
        """Return what a part returns.

        Raises:
            AneuronError: what the part raises, typed.
            DeviceLost: it hangs; its thread is left behind.
        """
        left_s = max(0.0, self._end_s - perf_counter())
        try:
            return call_within(part, left_s, name="aneuron-probe")
        except TimeoutError:
            raise DeviceLost(
                f"device {self._label}: the probe hangs in {what}, or before: not done within "
                f"{self._limit_s:g} s",
                device=self._label,
            ) from None
        except AneuronError:
            raise
        except RuntimeError as error:
            raise classify(error, self._label) from error


def _timings(rig: Rig, repeats: int) -> tuple[Timing, ...]:
    ids, found = rig.begin(rig.row_sizes[-1]), []
    for rows in rig.row_sizes:
        launch = partial(rig.decode, 0, rows, ids[:rows])
        times = _medians(launch, repeats)
        found.append(Timing(f"decode[{rows} rows]", rows, True, *times))  # noqa: FBT003
    for tokens in rig.size.tokens:
        # One less than the bucket: of a full one NxDI takes the next.
        times = _medians(partial(rig.prefill, tokens - 1), repeats)
        found.append(Timing(f"prefill[{tokens} tokens]", tokens, False, *times))  # noqa: FBT003
    return tuple(found)


def _medians(launch: Callable[[], Launched], repeats: int) -> tuple[float, float]:
    """Return seconds of a launch, and of the read behind it."""
    launches, reads = [], []
    for _ in range(repeats):
        start_s = perf_counter()
        launched = launch()
        launched_s = perf_counter()
        launched.read()
        reads.append(perf_counter() - launched_s)
        launches.append(launched_s - start_s)
    return median(launches), median(reads)


def _steps(rig: Rig, rows: int, steps: int) -> tuple[float, float]:
    """Return seconds a step: read before the next launch, and with one launched ahead."""
    ids: Any = rig.begin(rows)
    start_s = perf_counter()
    for step in range(steps):
        ids = rig.decode(step, rows, ids).read()
    sync_s = (perf_counter() - start_s) / steps
    ids = rig.begin(rows)
    start_s = perf_counter()
    newest = rig.decode(0, rows, ids)
    for step in range(1, steps):
        before, newest = newest, rig.decode(step, rows, newest)
        before.read()
    newest.read()
    return sync_s, (perf_counter() - start_s) / steps


def _copy(rig: Rig, rows: int, repeats: int) -> float:
    """Return seconds of a read whose program ended long before."""
    ids, taken = rig.begin(rows), []
    for _ in range(repeats):
        start_s = perf_counter()
        rig.decode(0, rows, ids).read()
        whole_s = perf_counter() - start_s
        launched = rig.decode(0, rows, ids)
        _NEVER.wait(2 * whole_s)
        start_s = perf_counter()
        launched.read()
        taken.append(perf_counter() - start_s)
    return median(taken)


def _gil(rig: Rig, rows: int, repeats: int) -> Gil:
    """Count in a thread beside launches and reads of the longest program there is."""
    launch = _longest(rig, rows)
    beside_launch, beside_read = [], []
    for _ in range(repeats):
        launched, *counted = _counted(launch)
        beside_launch.append(counted)
        _, *counted = _counted(launched.read)
        beside_read.append(counted)
    return Gil(_share(beside_read), _share(beside_launch))


def _longest(rig: Rig, rows: int) -> Callable[[], Launched]:
    """Return what launches the longest program whose launch does not read it."""
    if rig.device.kind == "native":
        return partial(rig.prefill, rig.size.tokens[-1] - 1)
    return partial(rig.decode, 0, rows, rig.begin(rows))


def _share(counted: list[list[Any]]) -> float | None:
    """Return the speed of counting as a share of what it is alone; None if it was too short."""
    count, took_s = (sum(column) for column in zip(*counted, strict=True))
    if took_s < _SHORT_S * len(counted):
        return None
    _, alone, alone_s = _counted(partial(_NEVER.wait, took_s))
    return float(count / took_s / (alone / alone_s))


def _counted(call: Callable[[], Any]) -> tuple[Any, int, float]:
    """Return what a call gave, how far a thread counted beside it, and how long it took."""
    count, is_over, has_begun = 0, False, threading.Event()

    def work() -> None:
        nonlocal count
        has_begun.set()
        while not is_over:
            count += 1

    thread = threading.Thread(target=work, name="aneuron-probe", daemon=True)
    thread.start()
    has_begun.wait()
    before, start_s = count, perf_counter()
    try:
        result = call()
    finally:
        took_s, after = perf_counter() - start_s, count
        is_over = True
        thread.join()
    return result, after - before, took_s


def _events(rig: Rig, rows: int) -> Events:
    raw: Any = rig.device.raw
    if not getattr(raw, "has_events", False):
        return Events(exist=False, before=_NO_EVENTS, after=_NO_EVENTS)
    launched = rig.decode(0, rows, rig.begin(rows))
    event = raw.record_event()
    before = _query(event)
    launched.read()
    return Events(exist=True, before=before, after=_query(event))


def _query(event: Any) -> str:
    query = getattr(event, "query", None)
    if query is None:
        return "the event has no query()"
    try:
        return str(query())
    except Exception as error:  # noqa: BLE001  whatever comes is the finding
        return _told(error)


def _copies(rig: Rig, rows: int, repeats: int) -> Copies:
    """Read the first of two launches, in each way that there is."""
    raw, told = rig.device.raw, ""
    found, copied = list[tuple[float, float]](), list[tuple[float, float]]()
    for _ in range(repeats):
        first, second = _two(rig, rows)
        start_s = perf_counter()
        first.read()
        first_s = perf_counter() - start_s
        second.read()
        found.append((first_s, perf_counter() - start_s))
        if getattr(raw, "has_events", False) and not told:
            try:
                copied.append(_copied(raw, _longest(rig, rows)))
            except Exception as error:  # noqa: BLE001  whatever comes is the finding
                told = _told(error)
    first_s, both_s = (median(column) for column in zip(*found, strict=True))
    if told or not copied:
        return Copies(first_s, both_s, told=told)
    plain_s, queued_s = (median(column) for column in zip(*copied, strict=True))
    return Copies(first_s, both_s, plain_s, queued_s)


def _two(rig: Rig, rows: int) -> tuple[Launched, Launched]:
    """Launch the longest program twice; decodes follow on each other."""
    launch = _longest(rig, rows)
    first = launch()
    is_native = rig.device.kind == "native"
    return first, launch() if is_native else rig.decode(1, rows, first)


def _copied(raw: Any, launch: Callable[[], Any]) -> tuple[float, float]:
    """Return seconds of a blocking copy of the first of two launches, and of queueing one.

    Raises what the runtime raises, and:
        ValueError: the queued copy held something else than a read, so no event tells its end.
    """
    first, second = launch(), launch()
    start_s = perf_counter()
    raw.to_host(first.ids)
    plain_s = perf_counter() - start_s
    first.read()
    second.read()
    first = launch()
    start_s = perf_counter()
    try:
        target, event = raw.to_host(first.ids, non_blocking=True), raw.record_event()
        queued_s = perf_counter() - start_s
        raw.synchronize(event)
        copied = target.numpy().copy()  # what is there now
    finally:
        right = first.read()
    if not np.array_equal(copied[: len(right)], right):
        raise ValueError("behind its event, the queued copy held other ids than a read")
    return plain_s, queued_s


def _depth(rig: Rig, rows: int) -> Depth:
    """Launch more than the runtime may bear, then read all; compare with one by one."""
    depth = getattr(rig.device.raw, "queue_depth", None)
    most = _MOST_UNREAD_NXD if depth is None else min(depth + 2, _MOST_UNREAD)
    ids, right = rig.begin(rows), []
    for step in range(most):
        ids = rig.decode(step, rows, ids).read()
        right.append(ids)
    made: list[Launched] = []
    launches_s, refusal, feed = [], "", rig.begin(rows)
    for step in range(most):
        start_s = perf_counter()
        try:
            made.append(rig.decode(step, rows, made[-1] if made else feed))
        except Exception as error:  # noqa: BLE001  whatever comes is the finding
            refusal = _told(error)
            break
        launches_s.append(perf_counter() - start_s)
    reads = tuple(_read(one, expected) for one, expected in zip(made, right, strict=False))
    differ = len({tuple(one.tolist()) for one in right}) == len(right)
    return Depth(tuple(launches_s), refusal, reads, differ)


def _read(launched: Launched, right: np.ndarray) -> str:
    try:
        return "right" if np.array_equal(launched.read(), right) else "other ids"
    except Exception as error:  # noqa: BLE001  whatever comes is the finding
        return _told(error)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]
