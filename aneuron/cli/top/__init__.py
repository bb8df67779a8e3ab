"""`aneuron top URL`: what a running server does, live at the terminal.

Comes in: the address of a server. Goes out: a view that is drawn anew each interval, or one sample
as text or JSON. A client like any other: the server answers `/metrics`, and knows of no view.
`page` reads what it answers, `figures` makes rates and quantiles of two pages, `view` draws them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from aneuron.cli.options import Flag, JsonFlag  # noqa: TC001 (cyclopts reads them)
from aneuron.cli.terminal import missing_extra, show_json
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from aneuron.cli.top.watching import Watched

__all__ = ["top"]

_LEAST_S, _MOST_S = 0.1, 3600.0
_TIMEOUT_S = 5.0


async def top(
    url: str = "http://127.0.0.1:8000",
    /,
    *,
    interval: float = 1.0,
    once: Flag = False,
    as_json: JsonFlag = False,
    api_key: str | None = None,
) -> None:
    """Watch a running server: requests, tokens, KV cache, latencies, breaks, lag.

    `q` and Ctrl-C end the view with status 0. Where stdout is no terminal, it is as with --once.

    Args:
        url: Of the server, as `aneuron serve` says it.
        interval: Seconds from sample to sample.
        once: Print what happened in one interval, and exit.
        as_json: Print that as one JSON object.
        api_key: Sent as a bearer token; by default what ANEURON_API_KEY or OPENAI_API_KEY says.
    """
    if not _LEAST_S <= interval <= _MOST_S:
        raise ConfigError(f"--interval must be seconds from {_LEAST_S:g}, not {interval:g}")
    _check_extra()
    from aneuron.cli.http.client import Client, Target
    from aneuron.cli.http.trouble import environment_key
    from aneuron.cli.top.view import lines, watch
    from aneuron.cli.top.watching import Watched

    target = Target(url, api_key or environment_key(), agent="aneuron-top")
    async with Client(target, timeout_s=_TIMEOUT_S) as client:
        watched = Watched(client)
        await watched.begin()
        if not (once or as_json) and sys.stdout.isatty():
            await watch(watched, interval)
            return
        told = await _one(watched, interval)
    if as_json:
        show_json({"url": url, **told})
    else:
        print("\n".join(f"{name:<20} {value}" for name, value in lines(told)), flush=True)


async def _one(watched: Watched, interval_s: float) -> dict[str, Any]:
    from aneuron.cli.top.figures import as_json
    from aneuron.cli.top.view import pause

    await pause(interval_s)
    seen = await watched.sample()
    if seen.figures is None:
        raise ConfigError(f"{watched.url} is gone: {seen.trouble}", param="url")
    return {"health": seen.health, "ready": seen.ready, **as_json(seen.figures)}


def _check_extra() -> None:
    try:
        import prometheus_client  # noqa: F401
    except ImportError as fault:
        raise missing_extra("top", "metrics", fault) from fault
