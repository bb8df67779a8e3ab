"""`aneuron serve`: an OpenAI-compatible server for one model.

Comes in: a model's name, an address, keys and limits. Goes out: answers over HTTP until SIGTERM
or Ctrl-C; on stderr, where it listens. The address is bound before the model is loaded, so
that one that is taken costs nothing, and connections are accepted after.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import logging
import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path  # noqa: TC003 (cyclopts reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from aneuron.cli.loading import opened
from aneuron.cli.options import EngineSettings, Flag
from aneuron.cli.terminal import INTERRUPTED, missing_extra, note
from aneuron.cli.ticker import StatsSettings
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    import socket

    from aneuron.engine import Engine
    from aneuron.server.config import ServerConfig

__all__ = ["ServedEngine", "ServerSettings", "serve"]

_GC_THRESHOLDS = 20_000, 20, 20  # objects, and collections of younger ones
_KEY_VARIABLE = "ANEURON_API_KEY"
_EXTRA = ("msgspec", "starlette", "uvicorn")
_MOST_FILES = 65_536
_LAST_PORT = 65_535
_FLAGS = {
    "api_keys": "--api-key",
    "cors_origins": "--cors-origin",
    "drain_s": "--drain-s",
    "max_body_bytes": "--max-body-bytes",
    "max_num_seqs": "--max-num-seqs",
    "max_waiting": "--max-waiting",
    "reasoning_field": "--reasoning-field",
    "scheduling_policy": "--scheduling-policy",
    "served_model_names": "--served-model-name",
    "tool_parser": "--tool-call-parser",
}


@Parameter(name="*", group=Group("Server", sort_key=1))
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where it listens, and who may do what.

    Attributes:
        host: Name or address to listen on; 0.0.0.0 is all of this machine's.
        port: To listen on; 0 takes a free one.
        uds: Path of a Unix socket, in place of host and port.
        api_key: Requests must bring one of these; several may be given. By default those in the
            variable ANEURON_API_KEY, which other users of the machine cannot see.
        served_model_name: What requests call the model; metrics say the first.
        cors_origin: A browser's pages of this origin may call; several may be given.
        chat_template: A file with a jinja2 template, in place of the model's own.
        tool_call_parser: Format of tool calls: auto, none, or a name such as hermes.
        reasoning_field: Where answers have what the model thinks: reasoning or reasoning_content.
        drain_s: Seconds that open requests may go on after a signal to stop.
        max_body_bytes: Largest request.
        max_connections: Most connections; beyond, requests are answered 503.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_key: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    served_model_name: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    cors_origin: Annotated[
        tuple[str, ...], Parameter(alias="--allowed-origins", json_list=True, negative="")
    ] = ()
    chat_template: Path | None = None
    tool_call_parser: str = "auto"
    reasoning_field: str = "reasoning"
    drain_s: float = 30.0
    max_body_bytes: int = 8 * 2**20
    max_connections: int = 4096


@Parameter(name="*", group=Group("Engine", sort_key=2))
@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine(EngineSettings):
    """How the model runs for many at once.

    Attributes:
        max_num_seqs: Most requests in one step.
        max_waiting: Most requests beside those; beyond, they are answered 429.
        scheduling_policy: Who comes first: fcfs, or by the requests' priority.
        timeline: Keep the times of the last steps, for the picture on the page at /.
    """

    max_num_seqs: int = 64
    max_waiting: int | None = 1024
    scheduling_policy: str = "fcfs"
    timeline: bool = True


_SERVER = ServerSettings()
_ENGINE = ServedEngine()
_STATS = StatsSettings()


async def serve(
    model: str,
    /,
    *,
    quiet: Flag = False,
    stats: StatsSettings = _STATS,
    server: ServerSettings = _SERVER,
    engine: ServedEngine = _ENGINE,
) -> int:
    """Serve a model over HTTP, as OpenAI's clients expect.

    Args:
        model: A built-in name, a directory, a .gguf file, a Hugging Face id, or sim:count.
        quiet: Do not show how far fetching and loading are.
        stats: What is told of the engine; here also where stderr is no terminal.
        server: Where it listens, and who may do what.
        engine: How the model runs.
    """
    _check_extra()
    stats.check()
    from aneuron.server.http import addresses

    try:
        config = _config(model, server)
        template = await _read_template(server.chat_template)
        sockets = await asyncio.to_thread(addresses.bind, server.host, server.port, uds=server.uds)
        urls = [addresses.url(one) for one in sockets]
        try:
            _warn(sockets, config)
            async with opened(model, engine, quiet=quiet) as opened_engine:
                _set_template(opened_engine, template)
                with stats.ticker(opened_engine, always=True):
                    return await _serve(opened_engine, config, server, sockets)
        finally:
            await asyncio.to_thread(addresses.forget, sockets, urls)
    except ConfigError as error:
        if error.param == "port" and _is_taken(error.__cause__):
            way = "--port takes another one, 0 a free one" if server.uds is None else "see --uds"
            raise ConfigError(f"{error}; {way}") from error
        flag = _FLAGS.get(error.param or "")
        if flag is None:
            raise
        raise ConfigError(str(error).replace(str(error.param), flag)) from error


def _is_taken(cause: BaseException | None) -> bool:
    """Return whether an address is another process's, or the system's own."""
    return isinstance(cause, OSError) and cause.errno in {errno.EADDRINUSE, errno.EACCES}


async def _serve(
    engine: Engine, config: ServerConfig, server: ServerSettings, sockets: list[socket.socket]
) -> int:
    from aneuron.server.app import build_app
    from aneuron.server.http.serving import Limits, serve

    app = build_app(engine, config)
    state = app.state.server
    name = state.model_names[0]
    _raise_file_limit()
    _log_warnings()
    _settle()

    async def drain() -> None:
        if state.num_open:
            left = f"open requests ({state.num_open}) may go on for {config.drain_s:g} s"
            note(f"stopping: {left}; a second signal ends them")
        await state.drain(config.drain_s)

    in_time = await serve(
        app,
        sockets=sockets,
        on_started=lambda url: note(f"serving {name} at {url} (Ctrl-C stops it)"),
        drain=drain,
        limits=Limits(max_connections=server.max_connections),
    )
    return 0 if in_time else INTERRUPTED


# ── settings ────────────────────────────────────────────────────────────────────────────


def _check_extra() -> None:
    try:
        import_module("aneuron.server.app")
        import_module("aneuron.server.http.serving")
    except ImportError as fault:
        if str(fault.name).partition(".")[0] not in _EXTRA:
            raise  # our own bug
        raise missing_extra("serve", "serve", fault) from fault


def _config(model: str, server: ServerSettings) -> ServerConfig:
    from aneuron.server.config import ServerConfig
    from aneuron.server.tools import template_name

    tool_parser = None if server.tool_call_parser == "none" else server.tool_call_parser
    template_name(tool_parser, None)  # a wrong one is told before the model is loaded
    if server.uds is None and not 0 <= server.port <= _LAST_PORT:
        raise ConfigError(f"--port must be from 0 to {_LAST_PORT}, not {server.port}")
    if server.max_connections < 1:
        raise ConfigError("--max-connections must be 1 or more")
    return ServerConfig(
        served_model_names=server.served_model_name or (model,),
        api_keys=_keys(server.api_key),
        max_body_bytes=server.max_body_bytes,
        cors_origins=server.cors_origin,
        drain_s=server.drain_s,
        tool_parser=tool_parser,
        reasoning_field=server.reasoning_field,
    )


def _keys(given: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys; a variable that is set and empty is a mistake, not an open server.

    Raises:
        ConfigError: a key is empty, or has a space in it, which no header can send.
    """
    from_environment = os.environ.get(_KEY_VARIABLE)
    if not given and from_environment is None:
        return ()
    keys = given or tuple((from_environment or "").split())
    if not keys or any(not key or key.split() != [key] for key in keys):
        where = "--api-key" if given else _KEY_VARIABLE
        raise ConfigError(f"{where} must be a key: a text with no space in it")
    return keys


async def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return await asyncio.to_thread(path.read_text, "utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path}: {error}") from error


def _set_template(engine: Engine, template: str | None) -> None:
    if template is None:
        return
    tokenizer: Any = engine.tokenizer
    if not hasattr(tokenizer, "chat_template"):
        raise ConfigError("--chat-template: this model's tokenizer takes no template")
    tokenizer.chat_template = template


def _warn(sockets: list[socket.socket], config: ServerConfig) -> None:
    hosts = [one.getsockname()[0] for one in sockets if isinstance(one.getsockname(), tuple)]
    foreign = [host for host in hosts if not ipaddress.ip_address(host).is_loopback]
    if foreign and not config.api_keys:
        note(f"warning: whoever reaches {foreign[0]} may use this server: it asks for no --api-key")


def _log_warnings() -> None:
    """Write what goes wrong to stderr, where nobody has asked for more: a server runs unwatched."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # It tells what the app has told, and of clients that speak no HTTP: they could fill a log.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


def _settle() -> None:
    """Collect garbage seldom, and never look at what stays for good: it holds the loop.

    A full collection took 190 ms with all that a model brings, and 40 to 90 ms with 500 streams,
    several times a second at Python's thresholds. Requests that end leave no cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def _raise_file_limit() -> None:
    """Allow as many open files as the system does: each connection is one."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
