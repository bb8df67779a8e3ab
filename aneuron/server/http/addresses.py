"""Addresses to listen on: sockets that are bound before a model is loaded.

Comes in: a host and a port, or a path. Goes out: bound sockets, or an error that says why not,
while nothing has been paid for yet. All of this blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["bind", "cannot_listen", "forget", "url"]

_UNIX = "unix:"


def bind(host: str, port: int, *, uds: str | None = None) -> list[socket.socket]:
    """Return sockets that are bound, and refuse connections until they are served.

    Args:
        host: a name or an address; "" is all of this machine's.
        port: of all of them; 0 lets the system choose.
        uds: path of a Unix socket, in place of both; a socket that nobody serves is replaced.

    Raises:
        ConfigError: the address is taken, or is not one of this machine's.
    """
    if uds is not None:
        return [_bind_unix(uds)]
    sockets: list[socket.socket] = []
    try:
        kind, passive = socket.SOCK_STREAM, socket.AI_PASSIVE
        for found in socket.getaddrinfo(host or None, port, type=kind, flags=passive):
            chosen = sockets[0].getsockname()[1] if sockets else port
            sockets.append(_bind_one(found[0], (found[4][0], chosen, *found[4][2:])))
    except (OSError, OverflowError) as error:
        _close(sockets)
        raise cannot_listen(f"{host}:{port}", error) from error
    return sockets


def _bind_one(family: int, address: tuple[Any, ...]) -> socket.socket:
    # By this protocol number asyncio knows that small writes are not to wait for an ACK.
    one = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if sys.platform != "win32":  # there, it would let two processes share the port
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit it
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
    except (OSError, OverflowError):
        one.close()
        raise
    return one


def _bind_unix(path: str) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_stale(path):
            Path(path).unlink()
        one.bind(path)
    except OSError as error:
        one.close()
        raise cannot_listen(path, error) from error
    return one


def _is_stale(path: str) -> bool:
    """Return whether this is a socket that nobody serves."""
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            return False
    except OSError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


def cannot_listen(where: str, error: Exception) -> ConfigError:
    """Return the error for an address that cannot be listened on."""
    why = getattr(error, "strerror", None) or str(error)
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        why = "the address is in use"
    return ConfigError(f"cannot listen on {where}: {why}", param="port")


def _close(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        one.close()


def forget(sockets: Sequence[socket.socket], urls: Sequence[str]) -> None:
    """Close sockets that were served under these URLs; a Unix socket's file goes, too."""
    _close(sockets)
    for one in urls:
        if one.startswith(_UNIX):
            with contextlib.suppress(OSError):
                Path(one.removeprefix(_UNIX)).unlink()


def url(bound: socket.socket) -> str:
    """Return the URL of a socket's address."""
    if bound.family == getattr(socket, "AF_UNIX", None):
        return f"{_UNIX}{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
