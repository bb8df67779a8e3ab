"""What the commands that talk to a server say of one that is away, foreign, or wants a key."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from aneuron.cli.bench.server import load as load_module
from aneuron.cli.http.trouble import message_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cli.conftest import Command

PAGE = b"""<!DOCTYPE HTML><html><head><title>Gone</title><style>h1 {}</style></head>
<body><h1>502 Bad&nbsp;Gateway</h1><hr>nginx</body></html>"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "no such model", "code": 404}}', "no such model"),
        (b'{"object": "error", "message": "vLLM\'s older form"}', "vLLM's older form"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body"], "msg": "field required"}]}', "field required"),
        (b'{"error": "unauthorized"}', "unauthorized"),
        (b'{"code": 7}', '{"code": 7}'),
        (b'"text"', "text"),
        (b"[]", "[]"),
        (b"plain\n  text\x1b[31m", "plain text [31m"),
        (PAGE, "502 Bad Gateway nginx"),
        (b"<broken", "<broken"),
        (b"", ""),
        (b"\xff", "�"),
        (b"x" * 999, "x" * 300),
        (b"[" * 100_000, "[" * 300),
    ],
)
def test_a_foreign_error_is_one_line_of_text(body: bytes, said: str) -> None:
    assert message_of(body) == said


@contextmanager
def foreign(status: int, body: bytes, *, key: str | None = None) -> Iterator[str]:
    """A server that refuses whatever is asked, or whoever has not its key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = None if key is None else f"Bearer {key}"
            is_known = key is not None and self.headers["Authorization"] == wanted
            answer = b'{"data": [{"id": "m"}]}' if is_known else body
            self.send_response(200 if is_known else status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_GET  # noqa: N815  (the base class's name)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("options", [(), ("--model=m",)])
def test_what_a_foreign_server_says_is_shown(aneuron: Command, options: tuple[str, ...]) -> None:
    with foreign(404, PAGE) as url:
        result = aneuron("bench", "serve", url, *options)
    what = "http_404" if options else "GET /v1/models: status 404,"
    end = " 502 Bad Gateway nginx\n"
    assert (result.status, result.out) == (1, "")
    assert result.err == f"error: {url}: {what}{':' if options else ''}{end}"


@pytest.mark.parametrize("options", [(), ("--model=m",)])
def test_a_server_that_is_away_is_told_as_top_tells_it(
    aneuron: Command, options: tuple[str, ...]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    result = aneuron("bench", "serve", url, *options)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"error: {url} cannot be reached: ")
    assert result.err.endswith(". Does `aneuron serve` run?\n")
    assert aneuron("top", url).err == result.err


def test_bench_serve_sends_the_key_of_the_environment(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ANEURON_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with foreign(401, b"", key="secret") as url:
        command: tuple[str, ...] = ("bench", "serve", url, "--num-prompts=1")
        for wants in (aneuron(*command), aneuron(*command, "--model=m")):
            assert (wants.status, wants.out) == (2, "")
            assert wants.err.startswith(f"error: {url} wants a key: --api-key, or the variable")
        assert "wants another key" in aneuron(*command, "--api-key=x").err
        command = (*command, "--num-warmups=0")
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert aneuron(*command).status == 1  # let in, but what it answers is no completion
        monkeypatch.setenv("ANEURON_API_KEY", "other more")  # the server's own goes first
        assert aneuron(*command).status == 2
        monkeypatch.setenv("ANEURON_API_KEY", "secret more")
        result = aneuron(*command, "--json")
        assert result.status == 1
        assert json.loads(result.out)["model"] == "m"
        assert "secret" not in result.out


def test_a_long_load_tells_at_a_terminal_how_many_requests_have_ended(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def at_its_end(reached: Any, tell: Any) -> Iterator[None]:
        yield
        if tell is not None:
            tell(reached())

    monkeypatch.setattr(load_module, "telling", at_its_end)
    with foreign(401, b"", key="secret") as url:
        command = ("bench", "serve", url, "--api-key=secret", "--num-warmups=0", "--num-prompts=3")
        assert "have ended" not in aneuron(*command).err
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        assert "server, run 1 of 1: 3 of 3 requests have ended\n" in aneuron(*command).err
