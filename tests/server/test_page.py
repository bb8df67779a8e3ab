"""The page's files, and what it asks for: headers, keys, mounting, the timeline over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from aneuron import Engine
from aneuron.server import ServerConfig, build_app
from aneuron.server.http.guard import PAGE_PATHS
from aneuron.server.page import page_routes
from aneuron.server.wire.misc import MAX_TIMELINE_STEPS
from aneuron.testing import Fault, count_engine
from tests.support import outcomes, start, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.scripted import Serve

KEY = {"authorization": "Bearer one"}
CONFIG = ServerConfig(api_keys=("one",))
TYPES = {"/": "html", "css": "css", "js": "javascript", "svg": "svg+xml"}


def inside(app: Any, **options: Any) -> httpx2.AsyncClient:
    """A client of an app that no socket is needed for."""
    transport = httpx2.ASGITransport(app=app)
    return httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", **options)


# ── the files ───────────────────────────────────────────────────────────────────────────


def test_what_needs_no_key_is_what_the_page_is_made_of() -> None:
    assert {route.path for route in page_routes()} == PAGE_PATHS


async def test_each_file_and_its_headers(serve_engine: Serve) -> None:
    async with count_engine() as engine, serve_engine(engine) as server:
        for path in PAGE_PATHS:
            answer = await server.http.get(path)
            assert answer.status_code == 200
            kind = TYPES[path.rpartition(".")[2]]
            assert answer.headers["content-type"].partition(";")[0].endswith(f"/{kind}")
            policy = dict(
                rule.partition(" ")[::2]
                for rule in answer.headers["content-security-policy"].split("; ")
            )
            assert policy["default-src"] == "'self'"
            assert {policy[name] for name in ("object-src", "base-uri", "frame-ancestors")} == {
                "'none'"
            }
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"


async def test_nothing_inline_and_nothing_from_elsewhere(serve_engine: Serve) -> None:
    async with count_engine() as engine, serve_engine(engine) as server:
        texts = {path: (await server.http.get(path)).text for path in PAGE_PATHS}
    page = texts["/"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", page)
    linked = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert {f"/{path}" for path in linked} == PAGE_PATHS - {
        "/", "/page/api.js", "/page/timeline.js"
    }  # fmt: skip
    for path, text in texts.items():
        addresses = set(re.findall(r"https?://[\w.]+", text))
        assert addresses <= {"http://www.w3.org", "http://127.0.0.1"}, path
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text), path


async def test_it_is_kept_until_it_changes(serve_engine: Serve) -> None:
    async with count_engine() as engine, serve_engine(engine) as server:
        first = await server.http.get("/")
        tag = first.headers["etag"]
        assert first.headers["cache-control"] == "no-cache"
        for known in (tag, f'"x", W/{tag}', "*"):
            again = await server.http.get("/", headers={"if-none-match": known})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == tag
        other = await server.http.get("/", headers={"if-none-match": '"x"'})
        assert (other.status_code, other.content) == (200, first.content)
        assert (await server.http.get("/page/page.js")).headers["etag"] != tag


async def test_head_is_get_without_the_body(serve_engine: Serve) -> None:
    async with count_engine() as engine, serve_engine(engine) as server:
        for path in (*PAGE_PATHS, "/timeline.json"):
            head, whole = await server.http.head(path), await server.http.get(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == str(len(whole.content))
        assert (await server.http.post("/")).status_code == 405


async def test_keys(serve_engine: Serve) -> None:
    """The page has nothing to tell, so it needs none; all that it asks for does."""
    async with count_engine() as engine, serve_engine(engine, CONFIG) as server:
        for path in PAGE_PATHS:
            assert (await server.http.get(path)).status_code == 200
        for path in ("/timeline.svg", "/timeline.json", "/page/", "/page/x.js", "/index.html"):
            assert (await server.http.get(path)).status_code == 401
        for path in ("/timeline.svg", "/timeline.json"):
            assert (await server.http.get(path, headers=KEY)).status_code == 200


async def test_mounted_under_a_prefix() -> None:
    async with count_engine() as engine:
        app = Starlette(routes=[Mount("/llm", build_app(engine, CONFIG))])
        async with inside(app) as client:
            page = await client.get("/llm/")
            assert page.status_code == 200
            for path in re.findall(r'(?:src|href)="([^"]*)"', page.text):
                assert (await client.get(str(page.url.join(path)))).status_code == 200
            assert (await client.get("/llm/timeline.json")).status_code == 401
            assert (await client.get("/llm/timeline.json", headers=KEY)).status_code == 200
            assert (await client.get("/llm")).headers["location"].endswith("/llm/")


async def test_it_is_counted_by_route(serve_engine: Serve) -> None:
    async with count_engine() as engine, serve_engine(engine) as server:
        for path in ("/", "/timeline.svg", "/timeline.json"):
            await server.http.get(path)
            assert server.state.metrics.responses[path, 200] == 1


@pytest.mark.parametrize(
    ("url", "origin", "status"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("http://[::1]:8000", "http://[::1]:8000", 200),
        ("http://localhost:8000", "http://localhost:8000", 200),
        ("http://10.0.0.7", "https://10.0.0.7", 200),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8001", 403),
        ("http://127.0.0.1:8000", "http://localhost:8000", 403),
        ("http://evil.test:8000", "http://evil.test:8000", 403),  # its name, pointed at us
        ("http://127.0.0.1.evil.test", "http://127.0.0.1.evil.test", 403),
        ("http://localhost.evil.test", "http://localhost.evil.test", 403),
        ("http://127.0.0.1:8000", "null", 403),
    ],
)
async def test_own_page_may_write_without_a_key(url: str, origin: str, status: int) -> None:
    async with count_engine() as engine:
        transport = httpx2.ASGITransport(app=build_app(engine))
        async with httpx2.AsyncClient(transport=transport, base_url=url) as client:
            asked = {"model": engine.spec.name, "prompt": [5], "max_tokens": 1}
            answer = await client.post("/v1/completions", json=asked, headers={"origin": origin})
            assert answer.status_code == status


async def test_an_error_amid_a_stream_can_be_read(serve_engine: Serve) -> None:
    """Browsers drop what a page has not read when its connection breaks: it does not, so far."""
    async with (
        count_engine(faults=[Fault(12, 1003)], latency=0.01) as engine,
        serve_engine(engine) as server,
    ):
        body = json.dumps(
            {"model": server.model, "prompt": [5], "max_tokens": 50, "stream": True}
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.split(":")[2]))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readuntil(b'{"error":')
        await reader.readuntil(b"\n\n\r\n")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.read(1)
        writer.close()  # it has read it
        async with asyncio.timeout(0.5):
            await until(lambda: server.state.num_open == 0)


# ── the timeline ────────────────────────────────────────────────────────────────────────


async def test_picture_and_numbers(serve_engine: Serve) -> None:
    async with (
        count_engine(timeline=True, latency=0.001) as engine,
        serve_engine(engine) as server,
    ):
        empty = await server.http.get("/timeline.svg")
        assert "no steps were recorded" in empty.text
        await server.post("/v1/completions", prompt=[77_777], max_tokens=40)
        await engine.wait_idle()
        picture = await server.http.get("/timeline.svg?steps=10")
        assert picture.headers["content-type"] == "image/svg+xml"
        assert picture.headers["cache-control"] == "no-store"
        assert picture.text == engine.timeline.to_svg(10)
        programs = [
            one for one in ET.fromstring(picture.text).iter() if one.get("class") == "program"
        ]
        assert len(programs) == 10
        numbers = (await server.http.get("/timeline.json")).json()
        stats = engine.stats()
        assert numbers["steps"] == numbers["kept_steps"] == stats.steps == 40
        assert numbers["window_steps"] == 24
        assert numbers["window_idle_share"] == engine.timeline.idle_share(
            engine.timeline.steps[-24:]
        )
        assert (numbers["prompt_tokens"], numbers["generation_tokens"]) == (1, 40)
        assert numbers["running"] == numbers["waiting"] == numbers["in_flight_steps"] == 0
        assert numbers["num_blocks"] == stats.num_blocks
        assert "7777" not in picture.text + json.dumps(numbers)  # no token is in it


async def test_shares_and_breaks(serve_engine: Serve) -> None:
    async with (
        count_engine(timeline=True, token_carry="handoff", latency=0.001) as engine,
        serve_engine(engine) as server,
    ):
        await asyncio.gather(*(start(engine, 10 * at, 10 + at) for at in range(1, 5)))
        numbers = (await server.http.get("/timeline.json?steps=64")).json()
        stats = engine.stats()
        assert numbers["breaks"] == {
            reason: {"count": one.count, "seconds": one.seconds}
            for reason, one in stats.breaks.items()
        }
        assert numbers["breaks"]
        assert numbers["window_decode_async_share"] == pytest.approx(stats.decode_async_share)


@pytest.mark.parametrize("steps", ["0", "-1", "x", "", "1.5", "65", "²", "9" * 5000, "3&steps=4"])
@pytest.mark.parametrize("path", ["/timeline.svg", "/timeline.json"])
async def test_steps_that_cannot_be(path: str, steps: str) -> None:
    async with count_engine() as engine, inside(build_app(engine)) as client:
        answer = await client.get(f"{path}?steps={steps}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "steps"
        assert (await client.get(f"{path}?steps={MAX_TIMELINE_STEPS}")).status_code == 200


async def test_who_asks_while_one_is_drawn_shares_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async with count_engine(timeline=True) as engine:
        await engine.generate(prompt_token_ids=[1], max_tokens=50)
        wanted = {steps: engine.timeline.to_svg(steps) for steps in (24, 3)}
        drawn, draw = [], engine.timeline.svg_pieces

        def noted(last: int, **options: Any) -> Iterator[str]:
            drawn.append(last)
            return draw(last, **options)

        monkeypatch.setattr(engine.timeline, "svg_pieces", noted)
        async with inside(build_app(engine)) as client:
            same = await asyncio.gather(*(client.get("/timeline.svg") for _ in range(20)))
            assert {one.text for one in same} == {wanted[24]}
            assert drawn in ([24], [24, 24])
            await client.get("/timeline.svg")
            other = await client.get("/timeline.svg?steps=3")
            assert drawn[-2:] == [24, 3]
            assert other.text == wanted[3]


async def test_others_run_while_it_is_drawn() -> None:
    """The loop gets its turn between steps; and what is drawn is what was asked for."""
    async with count_engine(timeline=True) as engine:
        await engine.generate(prompt_token_ids=[1], max_tokens=100)
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with inside(build_app(engine)) as client:
            await client.get("/timeline.svg")  # what is loaded at first
            counting = asyncio.create_task(count_turns())
            await client.get("/timeline.json")
            without, turns = turns, 0
            await client.get(f"/timeline.svg?steps={MAX_TIMELINE_STEPS}")
            counting.cancel()
        assert turns >= without + 9


async def test_without_a_timeline_and_without_an_engine() -> None:
    engine = Engine("sim:count")
    async with engine:
        app = build_app(engine)
        async with inside(app) as client:
            await engine.generate("a", max_tokens=3)
            assert "timeline=True" in (await client.get("/timeline.svg")).text
            numbers = (await client.get("/timeline.json")).json()
            assert (numbers["steps"], numbers["kept_steps"]) == (3, 0)
            assert numbers["window_decode_async_share"] is None
    async with inside(app) as client:  # closed: its last
        assert (await client.get("/timeline.json")).json()["steps"] == 3


async def test_of_an_engine_that_failed() -> None:
    async with count_engine(timeline=True, faults=[Fault(5, 101)], latency=0.001) as engine:
        await outcomes([start(engine, 10, 50)])
        async with inside(build_app(engine)) as client:
            numbers = (await client.get("/timeline.json")).json()
            assert (numbers["running"], numbers["used_blocks"]) == (0, 0)
            picture = await client.get("/timeline.svg")
            assert "failed" in picture.text or "has not run" in picture.text
