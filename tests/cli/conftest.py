"""How the tests of the command line run it: in this process, as a process, at a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from aneuron.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator

# Where a test run was started in the background, SIGINT is ignored, and children inherit it.
_START = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.argv[1] == "terminal":
    import fcntl, termios
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
del sys.argv[1]
runpy.run_module("aneuron", run_name="__main__", alter_sys=True)
"""
WAIT_S = 15.0


class Result:
    """What a command in this process gave."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status = status
        self.out = out
        self.err = err


class Command(Protocol):
    def __call__(self, *arguments: str, stdin: str | None = "") -> Result: ...


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def aneuron(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process; stdin None is a terminal at which nobody types."""

    def run(*arguments: str, stdin: str | None = "") -> Result:
        monkeypatch.setattr(sys, "stdin", _Terminal() if stdin is None else io.StringIO(stdin))
        status = main(arguments)
        return Result(status, *capsys.readouterr())

    return run


def start(*arguments: str, kind: str = "pipe", **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _START, kind, *arguments]
    return subprocess.Popen(command, **{"stdin": subprocess.DEVNULL, **options})


@contextlib.contextmanager
def process(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run `aneuron` as a process whose stdout and stderr are pipes."""
    pipe = subprocess.PIPE
    child = start(*arguments, **{"stdout": pipe, "stderr": pipe, **options})
    with child:
        try:
            yield child
        finally:
            child.kill()


class Terminal:
    """A process at a terminal of its own: what it shows, and what is typed."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = os.openpty()
        self.shown = ""
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.child = start(*arguments, kind="terminal", start_new_session=True, **streams)
        os.close(theirs)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, text: str, *, count: int = 1) -> None:
        """Read what the process shows until the text is there that often."""
        end_s = time.monotonic() + WAIT_S
        while self.shown.count(text) < count:
            if not self._read(end_s - time.monotonic()):
                pytest.fail(f"no {text!r} in {self.shown[-2000:]!r}")

    def wait_exit(self) -> int:
        """Read to the end; return the status."""
        end_s = time.monotonic() + WAIT_S
        while self._read(end_s - time.monotonic()):
            pass
        return self.child.wait(max(0.1, end_s - time.monotonic()))

    def _read(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], max(0.0, timeout_s))
        try:
            chunk = os.read(self._ours, 1 << 16) if ready else b""
        except OSError:  # Linux: the other end is closed
            chunk = b""
        self.shown += chunk.decode(errors="replace")
        return bool(chunk)

    def close(self) -> None:
        os.close(self._ours)
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGKILL)
        self.child.wait()


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    """Run `aneuron` at a terminal."""
    opened = Terminal(*arguments)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture(name="process")
def process_fixture() -> Any:
    return process


@pytest.fixture(name="terminal")
def terminal_fixture() -> Any:
    return terminal
