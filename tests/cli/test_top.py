"""`aneuron top`: pages, figures, a server that goes away, and the view at a terminal."""

from __future__ import annotations

import asyncio
import builtins
import json
import signal
import sys
import threading
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from aneuron.cli.http.http1 import BadAnswer
from aneuron.cli.http.trouble import environment_key
from aneuron.cli.top.figures import as_json, figures, quantile, restarted
from aneuron.cli.top.page import NotOurs, read_page
from aneuron.cli.top.view import drawn, lines, watch
from aneuron.cli.top.watching import Sample, Watched
from aneuron.errors import ConfigError
from aneuron.server.config import ServerConfig
from aneuron.server.watch.metrics import Metrics
from aneuron.testing import count_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aneuron.cli.top.page import Page
    from tests.cli.conftest import Command

INF = float("inf")
needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")


def page(at_s: float = 0.0, **samples: float) -> Page:
    """A page with these samples; `name__label__value` has a label."""
    return read_page(page_text(**samples), at_s)


def page_text(**samples: float) -> str:
    rows = ['aneuron_engine_info{device="sim",model_name="m",version="1.2"} 1']
    for words, value in {"engine_open": 1.0, **samples}.items():
        name, _, label = words.partition("__")
        key, _, text = label.partition("__")
        more = f',{key}="{text.replace("_", ".").replace("inf", "+Inf")}"' if key else ""
        rows.append(f'aneuron_{name}{{model_name="m"{more}}} {value}')
    return "\n".join(rows) + "\n"


# ── pages ───────────────────────────────────────────────────────────────────────────────


async def test_a_server_s_own_page_is_read() -> None:
    async with count_engine() as engine:
        metrics = Metrics(engine, ServerConfig(served_model_names=("m",)).served_model_names[0])
        first = read_page((await metrics.render("text/plain"))[0].decode(), 1.0)
        metrics.histograms["time_to_first_token_seconds"].observe(0.003)
        await engine.generate("a" * 40, max_tokens=20)
        second = read_page((await metrics.render("text/plain"))[0].decode(), 3.0)
    told = figures(first, second)
    assert (told.model, told.device, told.is_open, told.has_restarted) == ("m", "sim", True, False)
    assert told.seconds == 2.0
    assert told.tokens_in_per_s == 20.0
    assert told.tokens_out_per_s == 10.0
    assert told.steps_per_s == 10.0
    assert told.async_share == 1.0
    assert told.prefix_hit_rate == 0.0
    assert told.ttft_p50_s is not None
    assert 0.001 < told.ttft_p50_s <= 0.005
    assert told.itl_p50_s is None
    assert told.lag_p99_s is None or told.lag_p99_s >= 0


def test_samples_are_asked_for_by_name_and_label() -> None:
    told = page(flow_breaks_total__reason__grammar=2, flow_breaks_total__reason__hook=3)
    assert told.value("flow_breaks_total") == 5
    assert told.by_label("flow_breaks_total", "reason") == {"grammar": 2, "hook": 3}
    assert told.value("nothing") == 0
    assert told.info("engine")["device"] == "sim"
    assert told.info("nothing") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<html><body>hello</body></html>", "no page of metrics"),
        ('vllm:num_requests_running{model_name="m"} 1\n', "no metrics of aneuron's"),
        ("", "no metrics of aneuron's"),
        ('aneuron_engine_open{model_name="m"} many\n', "no page of metrics"),
    ],
)
def test_other_pages_are_told_apart(text: str, said: str) -> None:
    with pytest.raises(NotOurs, match=said):
        read_page(text, 0.0)


# ── figures ─────────────────────────────────────────────────────────────────────────────


def test_counters_become_rates_and_shares() -> None:
    names = {
        "prompt_tokens_total": 10, "generation_tokens_total": 40, "steps_total": 8,
        "request_success_total__finished_reason__stop": 2, "request_failure_total": 1,
        "request_aborted_total__reason__client": 4, "prefix_cache_queries_total": 20,
        "prefix_cache_hits_total": 5, "async_steps_total": 3, "decode_steps_total": 4,
        "device_busy_seconds_total": 3.0, "device_idle_seconds_total": 1.0,
        "flow_breaks_total__reason__hook": 6, "flow_break_seconds_total__reason__hook": 0.5,
    }  # fmt: skip
    before = page(0.0, **dict.fromkeys(names, 1.0))
    now = {name: value + 1.0 for name, value in names.items()}
    after = page(
        2.0, num_requests_running=3, num_requests_waiting=1, kv_cache_usage_perc=0.25,
        event_loop_lag_last_seconds=0.004, **now,
    )  # fmt: skip
    told = figures(before, after)
    assert (told.running, told.waiting, told.kv_usage, told.lag_last_s) == (3, 1, 0.25, 0.004)
    assert (told.tokens_in_per_s, told.tokens_out_per_s, told.steps_per_s) == (5, 20, 4)
    assert (told.finished_per_s, told.failed_per_s, told.aborted_per_s) == (1, 0.5, 2)
    assert (told.prefix_hit_rate, told.async_share, told.device_idle_share) == (0.25, 0.75, 0.25)
    assert (told.breaks_per_s, told.break_seconds) == ({"hook": 3.0}, {"hook": 0.5})
    assert json.dumps(as_json(told))


def test_nothing_happened_is_no_fault() -> None:
    told = figures(page(1.0), page(1.0))  # and no time went by
    assert told.tokens_out_per_s == told.steps_per_s == 0.0
    assert told.prefix_hit_rate is told.async_share is told.device_idle_share is None
    assert told.breaks_per_s == {}
    assert told.ttft_p50_s is None


def test_a_server_that_began_anew_is_counted_from_its_start() -> None:
    before = page(0.0, generation_tokens_total=1000, steps_total=50)
    after = page(2.0, generation_tokens_total=10, steps_total=60)
    assert restarted(before, after)
    told = figures(before, after)
    assert told.has_restarted
    assert (told.tokens_out_per_s, told.steps_per_s) == (5, 30)
    assert not restarted(before, before)


def test_quantiles_are_of_the_window_alone() -> None:
    name = "time_to_first_token_seconds_bucket__le__"
    old = {f"{name}0_1": 100, f"{name}1_0": 100, f"{name}inf": 100}
    new = {f"{name}0_1": 100, f"{name}1_0": 110, f"{name}inf": 110}
    told = figures(page(0.0, **old), page(1.0, **new))
    assert told.ttft_p50_s == pytest.approx(0.55)
    assert told.ttft_p99_s == pytest.approx(0.991)


@pytest.mark.parametrize(
    ("buckets", "q", "value"),
    [
        ({}, 0.5, None),
        ({1.0: 0, INF: 0}, 0.5, None),
        ({1.0: 10, INF: 10}, 0.5, 0.5),
        ({1.0: 10, 2.0: 20, INF: 20}, 0.5, 1.0),
        ({1.0: 10, 2.0: 20, INF: 20}, 0.75, 1.5),
        ({1.0: 0, 2.0: 4, INF: 4}, 0.0, 1.0),
        ({1.0: 0, 2.0: 4, INF: 4}, 1.0, 2.0),
        ({1.0: 1, 2.0: 1, INF: 10}, 0.9, 2.0),  # above all bounds: the last of them
    ],
)
def test_quantiles_are_those_of_prometheus(
    buckets: dict[float, float], q: float, value: float | None
) -> None:
    assert quantile(buckets, q) == (None if value is None else pytest.approx(value))


# ── a server that comes and goes ────────────────────────────────────────────────────────


class Scripted:
    """A client whose server says these pages in turn; an exception is raised."""

    target = SimpleNamespace(url="http://server", has_key=False)

    def __init__(self, *pages: Any, probes: int = 200) -> None:
        self.pages = list(pages)
        self.probes = probes

    async def get(self, path: str, **_: Any) -> tuple[int, bytes]:
        if path != "/metrics":
            return self.probes, b"{}"
        now = self.pages.pop(0)
        if isinstance(now, Exception):
            raise now
        return now if isinstance(now, tuple) else (200, now.encode())


def watched(*pages: Any, **options: Any) -> Watched:
    client: Any = Scripted(*pages, **options)
    return Watched(client)


async def test_it_goes_on_when_a_server_is_away_and_comes_back() -> None:
    texts = [page_text(steps_total=number) for number in (10, 20, 5, 7)]
    seen = watched(texts[0], texts[1], ConnectionResetError("gone"), TimeoutError(), *texts[2:])
    await seen.begin()
    told = [await seen.sample() for _ in range(5)]
    assert [one.trouble for one in told] == [
        "", "away: gone", "away: it took too long", "it is back: figures follow", "",
    ]  # fmt: skip
    assert [one.figures is not None for one in told] == [True, False, False, False, True]
    assert told[0].health == told[0].ready == "ok"
    assert told[4].figures is not None
    assert not told[4].figures.has_restarted  # both samples are of the new one


async def test_a_restart_between_two_samples_is_told() -> None:
    seen = watched(page_text(steps_total=10), page_text(steps_total=3))
    await seen.begin()
    told = await seen.sample()
    assert told.figures is not None
    assert told.figures.has_restarted


@pytest.mark.parametrize(("status", "word"), [(503, "unavailable"), (404, "status 404")])
async def test_probes_are_told(status: int, word: str) -> None:
    seen = watched(page_text(), page_text(), probes=status)
    await seen.begin()
    told = await seen.sample()
    assert (told.health, told.ready) == (word, word)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ((404, b""), "is no aneuron server: /metrics has the status 404"),
        ((200, b"<html>"), "is no aneuron server: it is no page"),
        ((401, b""), "wants a key: --api-key"),
        ((501, b""), r"has no metrics: there, pip install \"aneuron\[metrics\]\""),
        (BadAnswer("not a status line"), "is no aneuron server: not a status line"),
        (ConnectionRefusedError("refused"), "cannot be reached: refused"),
        (TimeoutError(), "cannot be reached: it took too long"),
    ],
)
async def test_a_wrong_address_is_told_at_once(first: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        await watched(first).begin()


async def test_a_key_that_is_no_longer_taken_is_not_the_end() -> None:
    seen = watched(page_text(), (401, b""))
    await seen.begin()
    assert (await seen.sample()).trouble.startswith("away: http://server wants a key")


# ── what is shown ───────────────────────────────────────────────────────────────────────


def screen(sample: Sample) -> str:
    console = Console(width=100, record=True, file=None, quiet=True)
    with console.capture() as captured:
        console.quiet = False
        console.print(drawn("http://[server]", sample))
    return captured.get()


def test_the_view_shows_all_of_it() -> None:
    before, now = page(0.0), page(1.0, steps_total=5, flow_breaks_total__reason__hook=4)
    shown = screen(Sample(figures(before, now), "", "ok", "unavailable"))
    for text in (
        "http://[server]", "m on sim, aneuron 1.2", "health ok, ready unavailable",
        "0 running, 0 waiting", "hook 4.0 (0 ms)", "p50 -, p99 -", "loop lag", "q ends this",
    ):  # fmt: skip
        assert text in shown
    away = screen(Sample(None, "away: [gone]"))
    assert "away: [gone]" in away


def test_a_restart_is_shown() -> None:
    told = as_json(figures(page(0.0, steps_total=9), page(1.0, steps_total=1)))
    shown = dict(lines({**told, "health": "ok", "ready": "ok"}))
    assert shown["state"] == "health ok, ready ok; it has restarted"


class Changing:
    """A server that is seen; at the third look something happens."""

    url = "http://server"

    def __init__(self, happens: Any) -> None:
        self.looks = 0
        self.happens = happens

    async def sample(self) -> Sample:
        self.looks += 1
        if self.looks == 3:
            self.happens()
        return Sample(None, "away")


@needs_posix
async def test_ctrl_c_leaves_the_view() -> None:
    seen: Any = Changing(lambda: signal.raise_signal(signal.SIGINT))
    async with asyncio.timeout(10):
        await watch(seen, 0.001)
    assert seen.looks >= 3


@needs_posix
async def test_a_hung_server_does_not_hold_the_view() -> None:
    loop = asyncio.get_running_loop()

    class Hung(Changing):
        async def sample(self) -> Sample:
            loop.call_soon(signal.raise_signal, signal.SIGINT)
            await asyncio.Event().wait()
            raise AssertionError

    seen: Any = Hung(None)
    async with asyncio.timeout(10):
        await watch(seen, 0.001)


# ── the command ─────────────────────────────────────────────────────────────────────────


@contextmanager
def server(*, key: str | None = None, paths: tuple[str, ...] = ()) -> Iterator[str]:
    """A server whose counters grow with each scrape; it keeps what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            is_known = key is None or self.headers.get("Authorization") == f"Bearer {key}"
            status = 404 if self.path in paths else 200 if is_known else 401
            body = page_text(steps_total=10.0 * len(asked), generation_tokens_total=7.0).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.daemon_threads = True
    thread = threading.Thread(target=served.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{served.server_address[1]}"
    finally:
        served.shutdown()
        thread.join()
        served.server_close()


def test_once_prints_one_interval(aneuron: Command) -> None:
    with server() as url:
        result = aneuron("top", url, "--once", "--interval=0.1")
        assert (result.status, result.err) == (0, "")
        assert "health ok, ready ok" in result.out
        assert aneuron("top", url, "--interval=0.1").out.startswith("state")  # no terminal
        told = json.loads(aneuron("top", url, "--json", "--interval=0.1").out)
    assert told["url"] == url
    assert told["steps_per_s"] > 0
    assert told["tokens_out_per_s"] == 0
    assert told["health"] == "ok"


def test_a_server_that_goes_at_once_has_no_figures(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(_: Watched) -> Sample:
        return Sample(None, "away: gone")

    monkeypatch.setattr(Watched, "sample", gone)
    with server() as url:
        result = aneuron("top", url, "--json", "--interval=0.1")
    assert (result.status, result.out) == (2, "")
    assert f"error: {url} is gone: away: gone" in result.err


def test_keys_come_from_option_or_environment(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ANEURON_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert environment_key() is None
    with server(key="secret") as url:
        command = ["top", url, "--once", "--interval=0.1"]
        result = aneuron(*command)
        assert (result.status, result.out) == (2, "")
        assert "wants a key" in result.err
        assert aneuron(*command, "--api-key=secret").status == 0
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert aneuron(*command).status == 0
        monkeypatch.setenv("ANEURON_API_KEY", "other more")  # the server's own goes first
        assert aneuron(*command).status == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["http://127.0.0.1:1"], "cannot be reached"),
        (["nonsense"], "URL must be like"),
        (["http://127.0.0.1:1", "--interval=0"], "--interval must be seconds from 0.1, not 0"),
        (["http://127.0.0.1:1", "--interval=nan"], "--interval must be"),
    ],
)
def test_wrong_arguments(aneuron: Command, words: list[str], said: str) -> None:
    result = aneuron("top", *words)
    assert (result.status, result.out) == (2, "")
    assert said in result.err


def test_another_server_is_told_apart(aneuron: Command) -> None:
    with server(paths=("/metrics",)) as url:
        result = aneuron("top", url, "--once")
    assert (result.status, result.out) == (2, "")
    assert "is no aneuron server: /metrics has the status 404" in result.err


def test_the_missing_extra_is_named(aneuron: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "prometheus_client":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    result = aneuron("top", "http://127.0.0.1:1")
    assert (result.status, result.out) == (2, "")
    assert 'top needs more packages: pip install "aneuron[metrics]" (' in result.err


@needs_posix
@pytest.mark.parametrize("how", ["q", "xyzQ", "\x03", "signal"])
def test_the_view_is_left_with_status_0(terminal: Any, how: str) -> None:
    with server() as url, terminal("top", url, "--interval=0.1") as opened:
        opened.wait_for("tokens per s")
        if how == "signal":
            opened.child.send_signal(signal.SIGINT)
        else:
            opened.type(how)
        assert opened.wait_exit() == 0
        assert "Traceback" not in opened.shown


@needs_posix
def test_the_view_goes_on_without_the_server(terminal: Any) -> None:
    with ExitStack() as stack:
        with server() as url:
            opened = stack.enter_context(terminal("top", url, "--interval=0.1"))
            opened.wait_for("tokens per s")
        opened.wait_for("away: ")
        opened.type("q")
        assert opened.wait_exit() == 0
