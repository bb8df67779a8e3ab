"""What `aneuron top` shows: lines of figures, on a screen of their own until it is left.

Comes in: samples of a server. Goes out: the screen, drawn anew after each. The keyboard is watched
by the loop; `q` and Ctrl-C end the view.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from rich.console import RenderableType

    from aneuron.cli.top.watching import Sample, Watched

__all__ = ["drawn", "lines", "pause", "watch"]

_QUIT = frozenset(b"qQ\x03\x04")


async def watch(watched: Watched, interval_s: float) -> None:
    """Show a server until `q` or Ctrl-C.

    Args:
        watched: it has begun.
        interval_s: seconds from sample to sample.
    """
    from rich.live import Live

    # Left by `q` or Ctrl-C, whatever it waits for: the scope then runs out.
    with contextlib.suppress(TimeoutError), Live(screen=True, auto_refresh=False) as live:
        live.update(f"{watched.url}: waiting for the first interval", refresh=True)
        async with asyncio.timeout(None) as scope:
            with _keys(partial(_leave, scope)):
                while True:
                    await pause(interval_s)
                    live.update(drawn(watched.url, await watched.sample()), refresh=True)


async def pause(seconds: float) -> None:
    """Let time pass: samples are as far apart as was asked for."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().create_future()


def _leave(scope: asyncio.Timeout) -> None:
    scope.reschedule(asyncio.get_running_loop().time())


@contextlib.contextmanager
def _keys(leave: Callable[[], None]) -> Iterator[None]:
    """Let `q` and Ctrl-C call a function, as far as the platform can."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as undo:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(signal.SIGINT, leave)
            undo.callback(loop.remove_signal_handler, signal.SIGINT)
        if sys.platform != "win32" and sys.stdin is not None and sys.stdin.isatty():
            import termios
            import tty

            keyboard = sys.stdin.fileno()
            before = termios.tcgetattr(keyboard)
            tty.setcbreak(keyboard)
            undo.callback(termios.tcsetattr, keyboard, termios.TCSADRAIN, before)

            def read() -> None:
                keys = os.read(keyboard, 64)
                if not keys or _QUIT & set(keys):
                    leave()

            loop.add_reader(keyboard, read)
            undo.callback(loop.remove_reader, keyboard)
        yield


def drawn(url: str, sample: Sample) -> RenderableType:
    """Return what the screen shows of a sample."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    title = Text(url, style="bold")
    told = sample.figures
    if told is None:
        return Group(title, Text(sample.trouble, style="red"), Text("q ends this", style="dim"))
    title.append(f"  {told.model} on {told.device}, aneuron {told.version}", style="dim")
    table = Table.grid(padding=(0, 2))
    values = {name: getattr(told, name) for name in told.__slots__}
    probes = {"health": sample.health, "ready": sample.ready}
    for name, value in lines(values | probes):
        table.add_row(name, Text(value))
    return Group(title, "", table, "", Text("q ends this", style="dim"))


def lines(told: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield what is shown, name and text, of figures by name."""
    state = f"health {told['health']}, ready {told['ready']}"
    if told["has_restarted"]:
        state += "; it has restarted"
    yield "state", state
    yield "requests", f"{told['running']:.0f} running, {told['waiting']:.0f} waiting"
    names = ("finished", "aborted", "failed")
    yield "ended per s", ", ".join(f"{told[f'{name}_per_s']:.1f} {name}" for name in names)
    yield "tokens per s", f"{told['tokens_in_per_s']:.0f} in, {told['tokens_out_per_s']:.0f} out"
    yield "first token", _pair(told["ttft_p50_s"], told["ttft_p99_s"])
    yield "between tokens", _pair(told["itl_p50_s"], told["itl_p99_s"])
    yield "KV cache", f"{told['kv_usage']:.0%} held, prefix hits {_share(told['prefix_hit_rate'])}"
    yield "steps per s", f"{told['steps_per_s']:.0f}, async {_share(told['async_share'])}"
    yield "device idle", _share(told["device_idle_share"])
    breaks = [
        f"{reason} {rate:.1f} ({told['break_seconds'].get(reason, 0.0) * 1e3:.0f} ms)"
        for reason, rate in sorted(told["breaks_per_s"].items(), key=lambda pair: -pair[1])
    ]
    yield "breaks per s", ", ".join(breaks) or "none"
    yield "loop lag", f"p99 {_ms(told['lag_p99_s'])}, last {_ms(told['lag_last_s'])}"


def _pair(p50_s: float | None, p99_s: float | None) -> str:
    return f"p50 {_ms(p50_s)}, p99 {_ms(p99_s)}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
