"""Between a command and its process: the event loop, messages, files to write, the status.

Comes in: a command's function and arguments. Goes out: the status that the process exits
with; what went wrong is said on stderr, in the words of the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from aneuron.cli.options import FLAGS
from aneuron.errors import AneuronError, ConfigError, InternalError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

__all__ = [
    "INTERRUPTED",
    "call",
    "check_writable",
    "describe",
    "missing_extra",
    "note",
    "show_json",
    "stdout_console",
    "telling",
]

_EVERY_S = 3.0
_UNWRITABLE = {errno.ENOSPC, errno.EIO, errno.EDQUOT}
INTERRUPTED = 130  # as a shell reports a process that SIGINT ended
# A setting in a message: `max_tokens`, or as Python spells it, `async_scheduling=False`.
_SETTING = re.compile(rf"\b({'|'.join(n for n in FLAGS if '_' in n)})\b(=True|=False|=)?")


def call(command: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Run a command, a coroutine function on an event loop of its own; return its status."""
    try:
        result = command(*args, **kwargs)
        if asyncio.iscoroutine(result):
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                result = runner.run(result)
        sys.stdout.flush()
    except AneuronError as error:
        note(f"error: {describe(error)}")
        if isinstance(error, InternalError):
            sys.excepthook(type(error), error, error.__traceback__)
        return 2 if isinstance(error, ConfigError | RequestError) else 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED
    except BrokenPipeError:  # the reader (`| head -1`) has what it wanted
        _drop(sys.stdout)
        return 0
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise  # our own bug
        _drop(sys.stdout)
        note(f"error: cannot write the output: {error.strerror}")
        return 1
    return result if isinstance(result, int) else 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for Windows
        return None
    return uvloop.new_event_loop


def _drop(stream: TextIO) -> None:
    """Point a stream at nothing: what is left in its buffer would fail again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def note(text: str, *, end: str = "\n") -> None:
    """Say something that is not part of an answer, which goes on where nobody can hear it."""
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except OSError:
        _drop(sys.stderr)


def stdout_console(*, highlight: bool = False) -> Console:
    """Return what draws tables and help on stdout; a reader that leaves is told as by `print`.

    Args:
        highlight: colour numbers and names in texts that have no style.
    """
    from rich.console import Console

    class StdoutConsole(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1
            raise BrokenPipeError

    return StdoutConsole(highlight=highlight)


def check_writable(path: Path) -> None:
    """Find out whether a file can be written, and leave it as it is.

    To be called before what goes into it is measured.

    Raises:
        ConfigError: it cannot.
    """
    try:
        is_new = not path.exists()  # or a link that leads nowhere yet
        if is_new or not (path.is_fifo() or path.is_char_device()):  # a pipe may block
            path.open("ab").close()
        if is_new:
            Path(os.path.realpath(path)).unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def missing_extra(what: str, extra: str, fault: ImportError) -> ConfigError:
    """Return the error for a command, or an option, whose packages are not all installed."""
    return ConfigError(f'{what} needs more packages: pip install "aneuron[{extra}]" ({fault})')


def show_json(result: dict[str, Any]) -> None:
    """Print one JSON object, the result of a command, on a line."""
    print(json.dumps(result, ensure_ascii=False), flush=True)


@contextlib.contextmanager
def telling(
    reached: Callable[[], float],
    tell: Callable[[float], None] | None,
    *,
    every_s: float = _EVERY_S,
) -> Iterator[None]:
    """Tell a number that grows every few real seconds until the body has ended.

    From a thread: a timer on a loop of virtual time would be one more thing that happens in it.

    Args:
        reached: returns it; called in another thread.
        tell: what is told, in that thread; None: nobody.
        every_s: real seconds between two calls; the first comes after as many.
    """
    if tell is None:
        yield
        return
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(every_s):
            tell(reached())

    thread = threading.Thread(target=run, name="aneuron-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def describe(error: AneuronError) -> str:
    """Return the message of an error, with settings spelled as the command line spells them."""
    message = str(error)
    param = getattr(error, "param", None)
    if param in FLAGS:
        if message.startswith((f"{param} ", f"{param}=")):
            message = f"{FLAGS[param]} {message[len(param) + 1 :]}"
        else:
            message = f"{FLAGS[param]}: {message}"
    return _SETTING.sub(_as_flag, message)


def _as_flag(found: re.Match[str]) -> str:
    flag = FLAGS[found[1]]
    match found[2]:
        case "=False":
            return flag.replace("--", "--no-", 1)
        case "=":
            return f"{flag} "
        case _:
            return flag
