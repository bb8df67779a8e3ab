"""One NeuronCore, or a set that runs as one: a queue of launches and a modelled timeline.

Comes in: functions to run, from any thread that has no event loop. A daemon thread runs them first
in, first out, and lets each end as late as the modelled latency says. Goes out: an `Entry` for
each, at once; who wants its value waits for it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from aneuron.testing.fakes.entry import Entry, Times, pause
from aneuron.testing.fakes.faults import QUEUE_FULL, FaultPlan, Watch, nrt_error

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Sequence

    from aneuron.testing.fakes.faults import Fault

__all__ = ["Entry", "FakeCore", "Times"]


class FakeCore:
    """A queue of launches, and the thread that runs them.

    Args:
        times: modelled latency; of it, the core itself takes `enqueue_s`, `read_s`, `timeout_s`.
        faults: what goes wrong.
        true_async: a launch returns before its program ends; else it blocks until then.
        queue_depth: launches that it takes before it refuses one.
        holds_unread: a launch keeps its place in the queue until its entry is released, not only
            until its program has ended.
        tells_in_words: every other refusal says without a status code that the queue is full.
        name: of the thread.
        rank: whose faults it takes; None takes all.
        watch: where violations go.

    Attributes:
        is_lost: a fault 101 came: everything that runs fails from then on.
        num_launches: launches that it took.
        num_reads: values copied to the host.
        num_queue_full: launches that it refused for want of room.
        busy_s, idle_s: sums of (end - start) and of (start - end of the launch before), modelled.
        end_s: end of the latest program on the modelled timeline.
    """

    def __init__(
        self,
        times: Times | None = None,
        faults: Sequence[Fault] = (),
        *,
        true_async: bool = True,
        queue_depth: int = 8,
        holds_unread: bool = True,
        tells_in_words: bool = False,
        name: str = "fake-core",
        rank: int | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Make a core; its thread starts with the first launch."""
        self.times = times or Times()
        self.faults = FaultPlan(faults, rank=rank)
        self.true_async = true_async
        self.queue_depth = queue_depth
        self.holds_unread = holds_unread
        self.tells_in_words = tells_in_words
        self.watch = watch or Watch()
        self.is_lost = False
        self.num_launches = self.num_reads = self.num_queue_full = 0
        self.busy_s = self.idle_s = self.end_s = 0.0
        self._name = name
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards all below
        self._to_run: deque[Entry] = deque()
        self._queue: list[Entry] = []  # what counts against its depth
        self._unresolved: list[Entry] = []
        self._is_closed = self._is_held = self._is_let_go = False

    @property
    def violations(self) -> list[str]:
        """What callers did that they must not, oldest first."""
        return self.watch.violations

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def in_flight(self) -> int:
        """How many launches are in its queue."""
        with self._changed:
            return sum(entry.is_in_queue for entry in self._queue)

    def inject(self, *faults: Fault) -> None:
        """Plan faults; their steps count from the next launch."""
        self.faults.add(*faults)

    def submit(
        self,
        run: Callable[[], Any],
        *,
        feeds: Sequence[Entry] = (),
        latency_s: float = 0.0,
        keepalive: Sequence[weakref.ref[Any]] = (),
    ) -> Entry:
        """Queue a program; return at once, or without `true_async` when it has ended.

        Args:
            run: the program, called on the core's thread; its result is the entry's value.
            feeds: launches whose values it reads: it waits for them and fails if one did.
            latency_s: how long it takes, modelled.
            keepalive: what the caller has to keep until somebody has waited for the entry.

        Raises:
            Violation: on a thread with an event loop, in a forked process, or after close.
            RuntimeError: the queue is full: status 7, or words.
        """
        self.watch.check_caller("a launch")
        with self._changed:
            if self._is_closed:
                raise self.watch.broken("a launch after close")
            fault = self._admit()
            self.num_launches += 1
            entry = Entry(
                self, self.num_launches, run, feeds=feeds, latency_s=latency_s,
                keepalive=keepalive, fault=fault,
            )  # fmt: skip
            self._to_run.append(entry)
            self._queue.append(entry)
            self._unresolved.append(entry)
            self._changed.notify_all()
        self._start()
        pause(self.times.enqueue_s)
        if not self.true_async:
            entry.wait_ended()
        return entry

    def hold(self) -> None:
        """Have programs wait before they start, until `go_on`; for tests of what is in flight."""
        with self._changed:
            self._is_held = True

    def go_on(self) -> None:
        """Let the programs start that `hold` keeps."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def let_go(self) -> None:
        """End a program that hangs, with status 5."""
        with self._changed:
            self._is_let_go = True
            self._changed.notify_all()

    def wait_let_go(self) -> None:
        """Wait for `let_go` once; a program that hangs does."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_let_go)
            self._is_let_go = False
            self.is_lost = self.is_lost or self._is_closed  # what is behind it never runs

    def close(self) -> None:
        """Run what is queued, and end the thread; again is no error.

        It waits for a program that hangs, until `let_go`; what is behind that fails. Whatever
        nobody waited for is a violation, except for launches that failed.

        Raises:
            Violation: there were such launches; the core is closed all the same.
        """
        self.watch.check_caller("a close")
        with self._changed:
            self._is_closed, self._is_held = True, False
            left = [entry for entry in self._unresolved if entry.is_owed]
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if owed := [entry.number for entry in left if entry.error is None]:
            raise self.watch.broken(f"closed before anybody waited for launches {owed}")

    def count_read(self) -> None:
        """Count a copy to the host."""
        with self._changed:
            self.num_reads += 1

    def forget_ended(self) -> None:
        """Take what no longer counts out of the queue."""
        with self._changed:
            self._queue = [entry for entry in self._queue if entry.is_in_queue]
            self._unresolved = [entry for entry in self._unresolved if entry.is_owed]

    def _admit(self) -> Fault | None:
        fault = self.faults.next_launch()
        num_queued = sum(entry.is_in_queue for entry in self._queue)
        if num_queued >= self.queue_depth or (fault is not None and fault.status == QUEUE_FULL):
            self.num_queue_full += 1
            if self.tells_in_words and self.num_queue_full % 2 == 0:
                raise RuntimeError("execution queue full")
            raise nrt_error(QUEUE_FULL, f"{num_queued} launches in the queue")
        return fault

    def _start(self) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()

    # ── on the core's thread ────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        while (entry := self._next()) is not None:
            entry.execute(self.end_s)
            if entry.number > 1:
                self.idle_s += entry.start_s - self.end_s
            self.busy_s += entry.end_s - entry.start_s
            self.end_s = entry.end_s
            entry.end()
            self.forget_ended()
            del entry  # idle, the thread keeps nothing of it

    def _next(self) -> Entry | None:
        with self._changed:
            self._changed.wait_for(
                lambda: (bool(self._to_run) and not self._is_held) or self._is_closed
            )
            return self._to_run.popleft() if self._to_run else None
