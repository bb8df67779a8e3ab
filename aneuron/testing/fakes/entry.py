"""One launch on a played core, and how long things take there.

An entry is made by `FakeCore.submit`, runs on the core's thread and is waited for on others.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from aneuron.testing.fakes.faults import Violation, nrt_error

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Sequence

    from aneuron.testing.fakes.core import FakeCore
    from aneuron.testing.fakes.faults import Fault

__all__ = ["Entry", "Times", "pause"]

_TIMEOUT, _LOST, _BAD_INPUT, _FAILED, _OUT_OF_BOUNDS = 5, 101, 1002, 1004, 1006
_NEVER = threading.Event()  # nobody sets it: a wait for it with a time is a pause


@dataclass(frozen=True, slots=True)
class Times:
    """Modelled latency in seconds; zero is as fast as it computes.

    Attributes:
        enqueue_s: a launch call.
        decode_s: any decode.
        decode_row_s: each of its rows, on top, padding included.
        prefill_s: any prefill.
        prefill_token_s: each of its tokens, on top, padding included.
        read_s: a copy to the host, once the program has ended.
        compile_s: compiling a program.
        load_s: loading a program: what its first launch takes longer.
        timeout_s: until a program fails that did not end in time (status 5).
    """

    enqueue_s: float = 50e-6
    decode_s: float = 0.0
    decode_row_s: float = 0.0
    prefill_s: float = 0.0
    prefill_token_s: float = 0.0
    read_s: float = 0.0
    compile_s: float = 0.0
    load_s: float = 0.0
    timeout_s: float = 0.0

    def decode(self, num_rows: int) -> float:
        """Return the latency of a decode of so many rows."""
        return self.decode_s + self.decode_row_s * num_rows

    def prefill(self, num_tokens: int) -> float:
        """Return the latency of a prefill of so many tokens."""
        return self.prefill_s + self.prefill_token_s * num_tokens


class Entry:
    """One launch in a core's queue. Every method may be called from several threads.

    Attributes:
        core: that runs it.
        number: which launch of its core it is, from 1.
        start_s: when it starts on the modelled timeline, `time.monotonic` seconds.
        end_s: when it ends there; both are 0 before it has ended.
        error: why it failed, or None.
        is_resolved: whether somebody waited for it until it had ended.
    """

    def __init__(
        self,
        core: FakeCore,
        number: int,
        run: Callable[[], Any],
        *,
        feeds: Sequence[Entry] = (),
        latency_s: float = 0.0,
        keepalive: Sequence[weakref.ref[Any]] = (),
        fault: Fault | None = None,
    ) -> None:
        """Make an entry; `FakeCore.submit` does."""
        self.core = core
        self.number = number
        self.start_s = self.end_s = 0.0
        self.error: RuntimeError | None = None
        self.is_resolved = False
        self._run: Callable[[], Any] | None = run
        self._feeds = tuple(feeds)
        self._latency_s = latency_s
        self._keepalive = tuple(keepalive)
        self._fault = fault
        self._arrival_s = monotonic() + core.times.enqueue_s
        self._value: Any = None
        self._ended = threading.Event()
        self._is_released = False

    @property
    def has_ended(self) -> bool:
        """Whether its program has ended, well or not."""
        return self._ended.is_set()

    @property
    def value(self) -> Any:
        """What its program returned.

        Raises:
            Violation: it has not ended.
            RuntimeError: it, or what fed it, failed; the text has the status code.
        """
        if not self._ended.is_set():
            raise self.core.watch.broken(f"the value of launch {self.number} before it has ended")
        if self.error is not None:
            raise type(self.error)(*self.error.args) from self.error
        return self._value

    def wait(self) -> None:
        """Wait until its program has ended; blocks the calling thread.

        Raises:
            Violation: on a thread with an event loop, or an input of it was dropped.
            RuntimeError: it, or what fed it, failed; the text has the status code.
        """
        self.core.watch.check_caller("a wait for a launch")
        self._ended.wait()
        if not self.is_resolved:
            self._check_inputs("read")
            self.is_resolved = True
            self._keepalive = ()
        _ = self.value

    def read(self) -> Any:
        """Wait, copy to the host, give its place in the queue back and return the value.

        Raises:
            Violation, RuntimeError: as `wait`.
        """
        try:
            self.wait()
        finally:
            self.release()
        pause(self.core.times.read_s)
        self.core.count_read()
        return self._value

    def wait_ended(self) -> None:
        """Wait until its program has ended, as the runtime itself does; it stays unresolved."""
        self._ended.wait()

    def release(self) -> None:
        """Give its place in the queue back, as soon as its program has ended."""
        self._is_released = True
        self.core.forget_ended()

    @property
    def is_in_queue(self) -> bool:
        """Whether it counts against the queue's depth."""
        return not self._ended.is_set() or (self.core.holds_unread and not self._is_released)

    @property
    def is_owed(self) -> bool:
        """Whether somebody still has to wait for it; not if it failed."""
        return not self.is_resolved and self.error is None

    def fail(self, error: RuntimeError) -> None:
        """Have it failed, if it has not: what waits for it raises this."""
        if self.error is None:
            self.error = error

    # ── on the core's thread ────────────────────────────────────────────────────────────

    def execute(self, free_s: float) -> None:
        """Run it on the timeline of a core that is free from `free_s` on."""
        self.start_s = max(free_s, self._arrival_s)
        pause(self.start_s - monotonic())
        for feed in self._feeds:  # on another core, if this waits at all
            feed._ended.wait()  # noqa: SLF001  another entry
        try:
            self._compute()
        except Violation as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001  whatever a program raises has a status
            self.fail(_as_status(error))
        # Modelled, it ends in time however late this thread is, but not before it has computed.
        self.end_s = max(self.start_s + self._latency_s, monotonic())
        pause(self.end_s - monotonic())
        self._check_inputs("ended")

    def end(self) -> None:
        """Show those who wait that it has ended, and let go of what it needed."""
        self._run, self._feeds = None, ()
        self._ended.set()

    def _compute(self) -> None:
        if self.core.is_lost:
            raise nrt_error(_LOST, f"before launch {self.number}")
        for feed in self._feeds:
            if feed.error is not None:
                raise feed.error
        if self._fault is not None:
            self._fail_as(self._fault)
        assert self._run is not None
        self._value = self._run()

    def _fail_as(self, fault: Fault) -> None:
        status = fault.status
        if status == "hang":
            self.core.wait_let_go()
            status = _TIMEOUT
        elif status == _TIMEOUT:
            pause(self.core.times.timeout_s)
        elif status == _LOST:
            self.core.is_lost = True
        assert isinstance(status, int), f"a launch cannot fail with {status!r}"
        raise nrt_error(status, f"rank {fault.rank}, launch {self.number}")

    # ── on both ─────────────────────────────────────────────────────────────────────────

    def _check_inputs(self, when: str) -> None:
        if any(ref() is None for ref in self._keepalive):
            self._keepalive = ()
            what = f"an input of launch {self.number} was dropped before it was {when}"
            self.fail(self.core.watch.broken(f"{what} (nrt status {_BAD_INPUT})"))


def pause(seconds: float) -> None:
    """Take so long on the calling thread; none if that is not positive."""
    if seconds > 0.0:
        _NEVER.wait(seconds)


def _as_status(error: Exception) -> RuntimeError:
    """Return what the runtime makes of an exception in a program."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, RuntimeError) and "nrt status" in text:
        return error
    if isinstance(error, IndexError) or "out of bounds" in text or "out of range" in text:
        failed = nrt_error(_OUT_OF_BOUNDS, text)
    else:
        failed = nrt_error(_FAILED, text)
    failed.__cause__ = error
    return failed
