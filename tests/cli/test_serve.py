"""`aneuron serve` as a process: where it listens, who may ask, and how it ends."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import select
import signal
import socket
import sys
import time
from http.client import HTTPConnection, IncompleteRead
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from aneuron.cli.serve import ServerSettings, _config, _keys, _read_template, _set_template, _warn
from aneuron.errors import ConfigError
from aneuron.server.config import ServerConfig
from aneuron.server.http.addresses import bind, forget

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cli.conftest import Command

command = import_module("aneuron.cli.serve")
pytestmark = pytest.mark.timeout(60)
needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
WAIT_S = 30.0


def environment(**given: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "ANEURON_API_KEY"} | given


def wait_for(child: Any, pattern: str) -> re.Match[str]:
    """Read what the process says until it says this."""
    said, end_s = "", time.monotonic() + WAIT_S
    while (found := re.search(pattern, said)) is None:
        ready, _, _ = select.select([child.stderr], [], [], end_s - time.monotonic())
        chunk = os.read(child.stderr.fileno(), 1 << 16) if ready else b""
        assert chunk, f"no {pattern!r} in {said!r}"
        said += chunk.decode()
    return found


def listening(child: Any) -> HTTPConnection:
    found = wait_for(child, r"at http://127\.0\.0\.1:(\d+) .*\n")
    return HTTPConnection("127.0.0.1", int(found[1]), timeout=WAIT_S)


def ask(connection: HTTPConnection, **fields: Any) -> Any:
    body = {"model": "sim:count", "prompt": "abc", "max_tokens": 4} | fields
    headers = {"content-type": "application/json", "authorization": "Bearer one"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection.getresponse()


# ── answers ─────────────────────────────────────────────────────────────────────────────


@needs_posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal(process: Any, number: signal.Signals) -> None:
    with process("serve", "sim:count", "--port=0", env=environment()) as child:
        connection = listening(child)
        answer = json.loads(ask(connection).read())
        assert answer["choices"][0]["text"] == "defg"
        assert answer["model"] == "sim:count"
        child.send_signal(number)
        out, err = child.communicate(timeout=WAIT_S)
        connection.close()
    assert (child.returncode, out) == (0, b"")
    assert err == b"" or err.startswith(b"stopping: open requests (1) may")  # and nothing more


@needs_posix
def test_names_and_keys(process: Any) -> None:
    options = ["--served-model-name=a", "--served-model-name=b", "--api-key=one", "--api-key=two"]
    with process("serve", "sim:count", "--port=0", *options, env=environment()) as child:
        connection = listening(child)
        assert json.loads(ask(connection, model="a").read())["model"] == "a"
        assert ask(connection, model="b").read()[:6] == b'{"id":'
        response = ask(connection, model="sim:count")
        assert (response.status, response.read()[:9]) == (404, b'{"error":')
        connection.request("GET", "/v1/models")
        response = connection.getresponse()
        assert (response.status, response.read()[:9]) == (401, b'{"error":')
        connection.close()


@needs_posix
def test_a_key_from_the_environment(process: Any) -> None:
    with process("serve", "sim:count", "--port=0", env=environment(ANEURON_API_KEY="x")) as child:
        connection = listening(child)
        response = ask(connection)
        assert (response.status, response.read()[:9]) == (401, b'{"error":')
        connection.close()


@needs_posix
def test_a_full_queue_is_told_so(process: Any) -> None:
    options = ["--max-num-seqs=1", "--max-waiting=0", "--port=0"]
    with process("serve", "sim:count", *options, env=environment()) as child:
        connection = listening(child)
        held = ask(connection, max_tokens=30_000, stream=True)
        assert held.readline().startswith(b"data: {")
        second = HTTPConnection("127.0.0.1", connection.port, timeout=WAIT_S)
        response = ask(second)
        assert (response.status, response.read()[:9]) == (429, b'{"error":')
        assert int(response.headers["retry-after"]) >= 1
        held.close()
        connection.close()
        second.close()


@needs_posix
def test_stats_are_told_also_to_a_file(process: Any) -> None:
    options = ["--port=0", "--stats", "--stats-interval=0.1"]
    with process("serve", "sim:count", *options, env=environment()) as child:
        connection = listening(child)
        held = ask(connection, max_tokens=30_000, stream=True)
        found = wait_for(child, r"running 1, waiting 0; tokens/s in \d+, out (\d+); KV \d+%;")
        assert int(found[1]) > 0
        held.close()
        connection.close()


# ── the end ─────────────────────────────────────────────────────────────────────────────


@needs_posix
def test_open_requests_are_finished_and_new_ones_refused(process: Any) -> None:  # case 80
    with process("serve", "sim:count", "--port=0", env=environment()) as child:
        connection = listening(child)
        second = HTTPConnection("127.0.0.1", connection.port, timeout=WAIT_S)
        response = ask(connection, max_tokens=3000, stream=True)
        first = response.readline()
        assert first.startswith(b"data: {")
        child.send_signal(signal.SIGTERM)
        wait_for(child, r"stopping: open requests \(1\) may go on for 30 s")
        refused = ask(second)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        refused.read()
        assert response.read().endswith(b"data: [DONE]\n\n")
        assert child.wait(WAIT_S) == 0
        connection.close()
        second.close()


@needs_posix
def test_what_goes_on_too_long_is_ended(process: Any) -> None:  # case 80
    options = ["--port=0", "--drain-s=0"]
    with process("serve", "sim:count", *options, env=environment()) as child:
        connection = listening(child)
        response = ask(connection, max_tokens=30_000, stream=True)
        assert response.readline().startswith(b"data: {")
        child.send_signal(signal.SIGTERM)
        with pytest.raises(IncompleteRead) as cut:
            response.read()
        rest = cut.value.partial
        assert b'"error"' in rest
        assert b"[DONE]" not in rest
        assert child.wait(WAIT_S) == 0
        connection.close()


@needs_posix
def test_a_second_signal_does_not_wait(process: Any) -> None:
    with process("serve", "sim:count", "--port=0", env=environment()) as child:
        connection = listening(child)
        response = ask(connection, max_tokens=30_000, stream=True)
        assert response.readline().startswith(b"data: {")
        child.send_signal(signal.SIGTERM)
        wait_for(child, "a second signal ends them")
        child.send_signal(signal.SIGTERM)
        assert child.wait(WAIT_S) == 130
        assert b"Traceback" not in child.stderr.read()
        response.close()
        connection.close()


# ── what it refuses to begin with ───────────────────────────────────────────────────────


def test_a_port_in_use_costs_no_model(aneuron: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "opened", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = aneuron("serve", "sim:count", f"--port={port}")
    advice = "--port takes another one, 0 a free one"
    said = f"error: cannot listen on 127.0.0.1:{port}: the address is in use; {advice}\n"
    assert (result.status, result.out, result.err) == (2, "", said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--drain-s=-1"], "error: --drain-s must be"),
        (["--reasoning-field=x"], "error: --reasoning-field must be"),
        (["--max-body-bytes=0"], "error: --max-body-bytes must be"),
        (["--max-connections=0"], "error: --max-connections must be"),
        (["--block-size=0"], "error: --block-size must be"),
        (["--max-num-seqs=0"], "error: --max-num-seqs must be"),
        (["--max-waiting=-1"], "error: --max-waiting must be"),
        (["--max-model-len=0"], "error: --max-model-len must be"),
        (["--api-key="], "error: --api-key must be"),
        (["--api-key=a b"], "error: --api-key must be"),
        (["--chat-template=no/such/file"], "error: --chat-template no/such/file: "),
        (["--host=192.0.2.1"], "error: cannot listen on 192.0.2.1:0: "),
        (["--tool-call-parser=nonsense"], "error: --tool-call-parser"),
    ],
)
def test_wrong_settings(aneuron: Command, options: list[str], said: str) -> None:
    result = aneuron("serve", "sim:count", "--port=0", *options)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(said)


@pytest.mark.parametrize("port", [99999, -1])
def test_a_port_that_is_none_is_named(aneuron: Command, port: int) -> None:
    result = aneuron("serve", "sim:count", f"--port={port}")
    assert (result.status, result.out) == (2, "")
    assert result.err == f"error: --port must be from 0 to 65535, not {port}\n"


def test_a_template_needs_a_tokenizer_that_takes_one(aneuron: Command, tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    result = aneuron("serve", "sim:count", "--port=0", f"--chat-template={file}")
    assert (result.status, result.out) == (2, "")
    assert result.err == "error: --chat-template: this model's tokenizer takes no template\n"


async def test_a_template_from_a_file_is_the_model_s(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}é", encoding="utf-8")
    engine: Any = SimpleNamespace(tokenizer=SimpleNamespace(chat_template="its own"))
    _set_template(engine, await _read_template(None))
    assert engine.tokenizer.chat_template == "its own"
    _set_template(engine, await _read_template(file))
    assert engine.tokenizer.chat_template == "{{ messages }}é"


@pytest.mark.parametrize("package", ["msgspec", "starlette", "uvicorn"])
def test_a_missing_extra_is_named(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    def without(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(command, "import_module", without)
    result = aneuron("serve", "sim:count")
    assert result.status == 2
    missing = f"No module named {package!r}"
    advice = f'serve needs more packages: pip install "aneuron[serve]" ({missing})'
    assert result.err == f"error: {advice}\n"


def test_another_import_error_is_ours(aneuron: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'aneuron.x'", name="aneuron.x")

    monkeypatch.setattr(command, "import_module", without)
    with pytest.raises(ModuleNotFoundError):
        aneuron("serve", "sim:count")


# ── settings ────────────────────────────────────────────────────────────────────────────


def test_keys_come_from_the_command_line_or_else_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ANEURON_API_KEY", raising=False)
    assert _keys(()) == ()
    assert _keys(("one",)) == ("one",)
    monkeypatch.setenv("ANEURON_API_KEY", "two three")
    assert _keys(()) == ("two", "three")
    assert _keys(("one",)) == ("one",)
    monkeypatch.setenv("ANEURON_API_KEY", " ")  # a secret that was not filled in
    with pytest.raises(ConfigError, match="ANEURON_API_KEY must be a key"):
        _keys(())


def test_settings_become_the_server_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANEURON_API_KEY", raising=False)
    assert _config("m", ServerSettings()) == ServerConfig(served_model_names=("m",))
    given = ServerSettings(tool_call_parser="none", cors_origin=("*",), drain_s=1.0)
    config = _config("m", given)
    assert (config.tool_parser, config.cors_origins, config.drain_s) == (None, ("*",), 1.0)


@pytest.mark.parametrize(
    ("host", "keys", "warns"),
    [("127.0.0.1", (), False), ("0.0.0.0", (), True), ("0.0.0.0", ("one",), False)],
)
def test_an_open_door_is_pointed_out(
    capsys: pytest.CaptureFixture[str], host: str, keys: tuple[str, ...], warns: bool
) -> None:
    sockets = bind(host, 0)
    _warn(sockets, ServerConfig(api_keys=keys))
    forget(sockets, [])
    assert capsys.readouterr().err.startswith("warning: whoever reaches 0.0.0.0") is warns


@needs_posix
def test_many_files_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    given: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    command._raise_file_limit()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    command._raise_file_limit()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (90_000, 100_000))
    command._raise_file_limit()
    assert given == [(4096, 4096), (65_536, resource.RLIM_INFINITY)]


def test_what_stays_is_not_collected_again() -> None:
    """A full collection of all that a model brings held the loop some 200 ms."""
    gc.unfreeze()
    thresholds = gc.get_threshold()
    try:
        command._settle()
        assert gc.get_threshold() > thresholds
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < gc.get_freeze_count() / 10
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


# ── what it does before it serves ───────────────────────────────────────────────────────


@pytest.fixture(name="process_settings")
def process_settings_fixture() -> Iterator[None]:
    """Undo what a server does to its process."""
    thresholds, logger = gc.get_threshold(), logging.getLogger("uvicorn.error")
    level = logger.level
    yield
    logger.setLevel(level)
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@needs_posix
@pytest.mark.usefixtures("process_settings")
def test_a_server_settles_before_the_first_request(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    told: dict[str, Any] = {}

    async def serve(_: Any, **given: Any) -> bool:
        told["max_connections"] = given["limits"].max_connections
        told["gc"] = gc.get_threshold()
        told["uvicorn"] = logging.getLogger("uvicorn.error").level
        return True

    monkeypatch.delenv("ANEURON_API_KEY", raising=False)
    monkeypatch.setattr("aneuron.server.http.serving.serve", serve)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: told.update(files=limits))
    result = aneuron("serve", "sim:count", "--port=0", "--host=0.0.0.0", "--max-connections=7")
    assert (result.status, result.out) == (0, "")
    assert result.err.startswith("warning: whoever reaches 0.0.0.0 may use this server")
    assert told == {
        "max_connections": 7,
        "gc": command._GC_THRESHOLDS,
        "uvicorn": logging.CRITICAL,
        "files": (4096, 4096),
    }


@needs_posix
@pytest.mark.usefixtures("process_settings")
@pytest.mark.parametrize(
    ("options", "origins", "blocks"),
    [
        (["--cors-origin=a", "--cors-origin=b", "--num-kv-blocks=64"], ("a", "b"), 64),
        (["--allowed-origins", '["a","b"]', "--num-gpu-blocks-override=32"], ("a", "b"), 32),
        (["--allowed-origins=*", "--num-kv-blocks=64", "--block-size=32"], ("*",), 64),
    ],
)
def test_vllm_s_names_are_taken_as_well(
    aneuron: Command,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    origins: tuple[str, ...],
    blocks: int,
) -> None:
    seen: list[Any] = []

    def build_app(engine: Any, config: ServerConfig) -> Any:
        seen.append((config.cors_origins, engine.stats().num_blocks, engine.config.block_size))
        raise ConfigError("seen")

    monkeypatch.setattr("aneuron.server.app.build_app", build_app)
    assert aneuron("serve", "sim:count", "--port=0", *options).err == "error: seen\n"
    assert seen == [(origins, blocks, 32 if "--block-size=32" in options else 16)]
