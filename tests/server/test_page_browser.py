"""The page as a browser shows it: headless Chromium, which `nox -s page` wants installed."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from aneuron.server import ServerConfig, build_app
from aneuron.server.http.serving import serve
from aneuron.testing import Fault, Script, no_leaks, sim_engine
from tests.server.browser import Browser, Tab, chromium
from tests.server.scripted import PLAIN, byte_level

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from aneuron import Engine
    from tests.server.scripted import Serve

pytestmark = [pytest.mark.browser, pytest.mark.timeout(60)]

STORY = "The tide came in, and the lamp went round. " * 3
HOSTILE = (
    '<img src=x onerror="window.broken=1"><script>window.broken=1</script>'
    '<a href="javascript:broken=1">a</a> &lt;b&gt; <b>bold</b>'
)
IS_WHOLE = "!document.querySelector('[aria-busy]') && document.querySelectorAll('.facts').length"
ANSWER = ".assistant:last-child .text"
PICTURES = ("GET /timeline.json?steps=24", "GET /timeline.svg?steps=24")


@pytest.fixture(scope="module")
def anyio_backend() -> object:
    """One loop will do: the page sees none of it, and the server is tested on all."""
    return ("asyncio", {"use_uvloop": False})


@pytest.fixture(scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    async with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
async def tab(browser: Browser) -> AsyncIterator[Tab]:
    """A page that must not break its own policy, nor throw what nobody catches."""
    async with browser.tab() as opened:
        yield opened
        assert opened.complaints == []


def telling(text: str, **options: Any) -> AbstractAsyncContextManager[Engine]:
    """An engine that always answers so, a byte a step."""
    return sim_engine(Script(text.encode()), **{"latency": 0.001, "timeline": True, **options})


async def opened(tab: Tab, url: str) -> None:
    await tab.go(url)
    await tab.until("document.querySelector('#model').value")


async def say(tab: Tab, text: str) -> None:
    await tab.write("#prompt", text)
    await tab.press("Enter")


async def whole(tab: Tab, text: str) -> str:
    """Say something, and return the whole answer."""
    await say(tab, text)
    await tab.until(IS_WHOLE)
    return await tab.text(ANSWER)


# ── the chat ────────────────────────────────────────────────────────────────────────────


async def test_an_answer_is_shown_as_it_comes(tab: Tab, serve_engine: Serve) -> None:
    async with telling(STORY, latency=0.01) as engine, serve_engine(engine) as server:
        await opened(tab, server.url)
        await say(tab, "Tell me a story.")
        shown = await tab.until(f"document.querySelector('{ANSWER}').textContent")
        assert STORY.startswith(shown)
        assert len(shown) < len(STORY)
        assert await tab.js("document.querySelector('#stop').hidden === false")
        await tab.until(IS_WHOLE)
        assert await tab.js(f"document.querySelector('{ANSWER}').textContent") == STORY
        facts = await tab.text(".assistant .facts")
        usage = f"+ {len(STORY) + 1} tokens"  # and the end
        for told in (usage, "tokens/s", "first token after"):
            assert told in facts
        assert await tab.text(".user .text") == "Tell me a story."
        assert await tab.js("document.activeElement.id") == "prompt"


async def test_a_conversation_and_its_settings(tab: Tab, serve_engine: Serve) -> None:
    async with telling("Yes.") as engine, serve_engine(engine) as server:
        await opened(tab, server.url)
        await tab.click("#settings summary")
        await tab.write("#system", "Be kind.")
        assert await whole(tab, "One") == "Yes."
        await tab.js("document.querySelector('#temperature').value = '0'")
        await tab.js("document.querySelector('#max-tokens').value = '2'")
        assert await whole(tab, "Two") == "Ye"
        assert "cut off" in await tab.text(".assistant:last-child .facts")
        first, second = tab.sent
        assert (first["temperature"], first["max_tokens"]) == (0.7, 512)
        assert (second["temperature"], second["max_tokens"]) == (0, 2)
        assert [(one["role"], one["content"]) for one in second["messages"]] == [
            ("system", "Be kind."), ("user", "One"), ("assistant", "Yes."), ("user", "Two"),
        ]  # fmt: skip
        await tab.click("#new")
        assert await tab.js("document.querySelectorAll('.turn').length") == 0
        await whole(tab, "Three")
        assert [one["content"] for one in tab.sent[-1]["messages"]] == ["Be kind.", "Three"]


async def test_a_setting_that_cannot_be_is_shown(tab: Tab, serve_engine: Serve) -> None:
    async with telling("Yes.") as engine, serve_engine(engine) as server:
        await opened(tab, server.url)
        await tab.js("document.querySelector('#max-tokens').value = '0'")
        await say(tab, "Hello")
        await tab.until("document.querySelector('#settings').open")
        assert await tab.js("document.activeElement.id") == "max-tokens"
        assert not tab.sent
        await tab.js("document.querySelector('#max-tokens').value = ''")  # the server's own
        await tab.click("#send")
        await tab.until(IS_WHOLE)
        assert "max_tokens" not in tab.sent[0]


@pytest.mark.parametrize("way", ["button", "Escape", "new chat"])
async def test_stopping_ends_the_request(tab: Tab, serve_engine: Serve, way: str) -> None:
    async with (
        telling(STORY, latency=0.05) as engine,
        no_leaks(engine),
        serve_engine(engine) as server,
    ):
        await opened(tab, server.url)
        await say(tab, "Tell me a story.")
        await tab.until(f"document.querySelector('{ANSWER}').textContent.length > 2")
        assert engine.stats().running == 1
        if way == "Escape":
            await tab.press("Escape")
        else:
            await tab.click("#stop" if way == "button" else "#new")
        async with asyncio.timeout(5):
            await engine.wait_idle()
        assert engine.stats().generation_tokens < len(STORY)
        assert server.state.metrics.aborted_by_reason["client"] == 1
        await tab.until("document.querySelector('#stop').hidden")
        if way == "new chat":
            assert await tab.js("document.querySelectorAll('.turn').length") == 0
        else:
            assert "stopped" in await tab.text(".assistant .facts")
            assert STORY.startswith(await tab.text(ANSWER))


async def test_what_a_model_says_stays_text(tab: Tab, serve_engine: Serve) -> None:
    async with telling(HOSTILE) as engine, serve_engine(engine) as server:
        await opened(tab, server.url)
        assert await whole(tab, HOSTILE) == HOSTILE
        assert await tab.text(".user .text") == HOSTILE
        assert await tab.js("document.querySelectorAll('main img, main b, main a').length") == 0
        assert await tab.js("window.broken") is None


async def test_reasoning_is_apart_and_is_text(tab: Tab, serve_engine: Serve) -> None:
    told = f"{HOSTILE}</think>\n\nNo."
    tokenizer = byte_level(PLAIN + "<think>\n")
    model = Script(tokenizer.encode_word(told), vocab_size=258)
    for name in ("reasoning", "reasoning_content"):
        config = ServerConfig(reasoning_field=name)
        async with (
            sim_engine(model, latency=0.001, tokenizer=tokenizer) as engine,
            serve_engine(engine, config) as server,
        ):
            await opened(tab, server.url)
            assert (await whole(tab, "Well?")).strip() == "No."
            thought = await tab.js(
                "document.querySelector('.assistant .reasoning div').textContent"
            )
            assert thought.strip() == HOSTILE
            assert await tab.js("document.querySelector('.assistant .reasoning').hidden") is False
            assert await tab.js("window.broken") is None


async def test_the_policy_holds(tab: Tab, serve_engine: Serve) -> None:
    """What the page does not do by itself, its browser would not let it do, either."""
    async with telling("a") as engine, serve_engine(engine) as server:
        await opened(tab, server.url)
        for code in (
            "document.body.innerHTML = '<b>x</b>'",
            "document.body.setAttribute('onclick', 'x = 1')",
            "document.createElement('script').textContent = 'x = 1'",
        ):
            caught = f"(() => {{ try {{ {code} }} catch (error) {{ return error.name }} }})()"
            assert await tab.js(caught) == "TypeError"
        await tab.until("true", lambda _: len(tab.complaints) >= 3)
        assert all("Trusted" in one for one in tab.complaints)
        tab.complaints.clear()


async def test_keys(tab: Tab, browser: Browser, serve_engine: Serve) -> None:
    config = ServerConfig(api_keys=("the-key",))
    async with telling("Yes.") as engine, serve_engine(engine, config) as server:
        await tab.go(server.url)
        await tab.until("document.activeElement.id === 'key'")
        assert "an API key is needed" in await tab.text("main .fault")
        await tab.write("#key", "wrong")
        await tab.press("Enter")
        await tab.until("document.querySelector('main > .fault')?.innerText.includes('wrong')")
        assert "under Settings" in await tab.text("main > .fault")
        await tab.js("document.querySelector('#key').value = ''")
        await tab.write("#key", "the-key")
        await tab.press("Enter")
        await tab.until("document.querySelector('#model').value")
        assert not await tab.js("document.querySelectorAll('main .fault').length")
        assert await whole(tab, "Hello") == "Yes."
        await tab.click("#timeline summary")
        await tab.until("document.querySelector('#picture svg')")
        await tab.js("location.reload()")  # it is kept …
        await tab.until("document.readyState === 'complete' && !document.querySelector('.turn')")
        await tab.until("document.querySelector('#model').value")
        async with browser.tab() as other:  # … by this tab alone
            await other.go(server.url)
            await other.until("document.querySelector('main .fault')")
        assert not [one for one in tab.asked if "the-key" in one]


async def test_an_error_amid_a_stream(tab: Tab, serve_engine: Serve) -> None:
    async with (
        telling(STORY, faults=[Fault(12, 1003)], latency=0.01) as engine,
        serve_engine(engine) as server,
    ):
        await opened(tab, server.url)
        shown = await whole(tab, "Tell me a story.")
        assert shown
        assert STORY.startswith(shown)
        fault = await tab.text(".assistant .fault")
        assert "the device failed" in fault
        assert "Send it again" in fault
        assert (await whole(tab, "Again.")).strip() == STORY.strip()


async def test_a_refusal_gives_the_message_back(tab: Tab, serve_engine: Serve) -> None:
    async with telling("Yes.", max_model_len=64) as engine, serve_engine(engine) as server:
        await opened(tab, server.url)
        await say(tab, "word " * 30)
        await tab.until("document.querySelector('.assistant .fault')")
        assert "new chat" in await tab.text(".assistant .fault")
        assert await tab.js("document.querySelector('#prompt').value") == "word " * 30
        await tab.js("document.querySelector('#prompt').value = ''")
        assert await whole(tab, "Hi") == "Yes."
        assert [one["content"] for one in tab.sent[-1]["messages"]] == ["Hi"]


async def test_a_server_that_is_gone(tab: Tab, serve_engine: Serve) -> None:
    async with telling("Yes.") as engine, serve_engine(engine) as server:
        await opened(tab, server.url)
    await say(tab, "Hello?")
    await tab.until("document.querySelector('.assistant .fault')")
    assert "Check that the server is running" in await tab.text(".assistant .fault")
    assert await tab.js("document.querySelector('#prompt').value") == "Hello?"


READ_EVENTS = """
(async (bytes, size) => {
  const { events } = await import(new URL("page/api.js", document.baseURI));
  const body = new ReadableStream({
    pull: (way) => {
      const piece = bytes.splice(0, size);
      if (piece.length) way.enqueue(new Uint8Array(piece)); else way.close();
    },
  });
  const told = [];
  try {
    for await (const one of events(body)) told.push(one);
  } catch (fault) { told.push(fault.message); }
  return told;
})
"""


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ('data: {"a":1}\n\n: x\n\ndata: {"b":"é🙂"}\n\ndata: [DONE]\n\n', [{"a": 1}, {"b": "é🙂"}]),
        ('event: x\r\ndata: {"a":1}\r\n\r\ndata:[DONE]\r\n\r\ndata: {"c":1}\r\n\r\n', [{"a": 1}]),
        ('data: {"a":1}\r\rdata: [DONE]\r\r', [{"a": 1}]),
        ('data: {"a":1}\n\ndata: {"error":{"message":"b"}}\n\ndata: [DONE]\n\n', [{"a": 1}, "b"]),
        ('data: {"a":1}\n\n', [{"a": 1}, "The connection ended before the answer did."]),
    ],
)  # fmt: skip
async def test_events_may_be_cut_anywhere(
    tab: Tab, serve_engine: Serve, sent: str, told: list[Any]
) -> None:
    async with telling("a") as engine, serve_engine(engine) as server:
        await opened(tab, server.url)
        for size in (1, 2, 3, 7, 1000):
            assert await tab.js(f"{READ_EVENTS}({list(sent.encode())}, {size})") == told


async def test_mounted_under_a_prefix(tab: Tab) -> None:
    stop = asyncio.Event()
    async with telling("Yes.") as engine, asyncio.TaskGroup() as group:
        app = Starlette(routes=[Mount("/llm", build_app(engine))])
        started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        group.create_task(
            serve(app, port=0, stop=stop, handles_signals=False, on_started=started.set_result)
        )
        await opened(tab, f"{await started}/llm/")
        assert await whole(tab, "Hello") == "Yes."
        await tab.click("#timeline summary")
        await tab.until("document.querySelector('#picture svg')")
        assert all(one.split()[1].startswith("/llm/") for one in tab.asked)
        await tab.go("about:blank#left")
        stop.set()


# ── the timeline ────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def quiet(tab: Tab) -> AsyncIterator[None]:
    """In here, the page must not ask for the timeline: looked at for longer than it waits."""
    before = [one for one in tab.asked if "timeline." in one and one not in FILES]
    yield
    await tab.js("new Promise((done) => setTimeout(done, 1500))")
    assert [one for one in tab.asked if "timeline." in one and one not in FILES] == before


FILES = {"GET /page/timeline.js"}


async def test_the_picture_follows_a_stream(tab: Tab, serve_engine: Serve) -> None:
    async with telling(STORY * 2, latency=0.03) as engine, serve_engine(engine) as server:
        await opened(tab, server.url)
        async with quiet(tab):  # it is closed
            await say(tab, "Tell me a story.")
            await tab.until(f"document.querySelector('{ANSWER}').textContent")
        await tab.click("#timeline summary")
        drawn = "document.querySelector('#picture svg')?.textContent"
        first = await tab.until(drawn)
        assert await tab.js("document.querySelectorAll('#picture .program').length") == 24
        assert await tab.text("#running") == "1"
        await tab.until(drawn, lambda now: now != first)
        await tab.until("document.querySelector('#rate').innerText", lambda one: float(one) > 5)
        assert await tab.text("#async") == "100 %"
        assert await tab.js(IS_WHOLE) is False  # it is still coming
        assert set(PICTURES) <= set(tab.asked)
        await tab.click("#stop")
        await tab.until("document.querySelector('#running').innerText === '0'")
        hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true}), "
        told = "document.dispatchEvent(new Event('visibilitychange'))"
        await tab.js(hide % "true" + told)
        async with quiet(tab):
            pass
        number = len(tab.asked)
        await tab.js(hide % "false" + told)
        await tab.until("true", lambda _: len(tab.asked) > number)  # at once
        await tab.click("#timeline summary")
        await tab.until("!document.querySelector('#timeline').open")
        async with quiet(tab):
            pass


async def test_breaks_are_told_by_reason(tab: Tab, serve_engine: Serve) -> None:
    async with telling(STORY, token_carry="handoff") as engine, serve_engine(engine) as server:
        await opened(tab, server.url)
        await tab.click("#timeline summary")
        await tab.until("document.querySelector('#breaks').innerText === 'none'")
        await asyncio.gather(*(engine.generate("a", max_tokens=5 * at) for at in (1, 2)))
        told = await tab.until("document.querySelector('#breaks').innerText", lambda x: x != "none")
        for reason, one in engine.stats().breaks.items():
            assert f"{reason.replace('_', ' ')} {one.count} (" in told


async def test_a_picture_that_fails(tab: Tab, serve_engine: Serve) -> None:
    async with telling("Yes.") as engine, serve_engine(engine) as server:
        await opened(tab, server.url)
    await tab.click("#timeline summary")
    await tab.until("!document.querySelector('#timeline-fault').hidden")
    assert "Check that the server is running" in await tab.text("#timeline-fault")


# ── for everyone ────────────────────────────────────────────────────────────────────────


async def test_keyboard(tab: Tab, serve_engine: Serve) -> None:
    async with telling("Yes.") as engine, serve_engine(engine) as server:
        await opened(tab, server.url)
        await tab.write("#prompt", "One")
        await tab.press("Enter", shift=True)
        await tab.call("Input.insertText", text="Two")
        assert await tab.js("document.querySelector('#prompt').value") == "One\nTwo"
        await tab.press("Enter")
        await tab.until(IS_WHOLE)
        assert tab.sent[-1]["messages"] == [{"role": "user", "content": "One\nTwo"}]
        await tab.press("Enter")  # nothing is written: nothing is sent
        assert len(tab.sent) == 1


async def test_everything_has_a_name(tab: Tab, serve_engine: Serve) -> None:
    """What can be used or read is told by name to who does not see it."""
    async with telling("Yes.") as engine, serve_engine(engine) as server:
        await opened(tab, server.url)
        await tab.js("document.querySelectorAll('details').forEach((one) => { one.open = true })")
        await whole(tab, "Hello")
        tree = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
        roles: dict[str, list[str]] = {}
        for node in tree:
            if not node.get("ignored"):
                name = node.get("name", {}).get("value", "")
                roles.setdefault(node["role"]["value"], []).append(name)
        fields = roles["textbox"] + roles["spinbutton"] + roles["combobox"] + roles["button"]
        assert {"Message", "System prompt", "Temperature", "Max tokens", "API key"} <= set(fields)
        assert {"Model", "Send", "New chat"} <= set(fields)
        assert all(fields)
        assert roles["log"] == ["Conversation"]
        assert {"You", engine.spec.name} <= set(roles["heading"])


@pytest.mark.parametrize("width", [360, 800])
async def test_a_narrow_window(tab: Tab, serve_engine: Serve, width: int) -> None:
    long = "w" * 300 + " and <code that=goes/on-and-on>" * 3
    async with telling(long) as engine, serve_engine(engine) as server:
        await tab.resize(width, 700)
        await opened(tab, server.url)
        await tab.click("#timeline summary")
        await tab.click("#settings summary")
        assert await whole(tab, long) == long
        await tab.until("document.querySelector('#picture svg')")
        sizes = await tab.js(
            "['html', 'body', '#log', '#timeline', '#composer'].map((one) =>"
            " document.querySelector(one)).map((one) => one.scrollWidth - one.clientWidth)"
        )
        assert sizes == [0] * 5
        for one in ("#send", "#prompt", "#new", "#model"):
            box = json.loads(
                await tab.js(
                    f"JSON.stringify(document.querySelector('{one}').getBoundingClientRect())"
                )
            )
            assert box["left"] >= 0
            assert box["right"] <= width
            assert box["bottom"] <= 700


async def test_dark_and_light(tab: Tab, serve_engine: Serve) -> None:
    """The page follows the system, and so does the picture, whose colours are its own."""
    grounds = {}
    async with telling("Yes.") as engine, serve_engine(engine) as server:
        await engine.generate("a")
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            await tab.call("Emulation.setEmulatedMedia", features=[feature])
            await opened(tab, server.url)
            await tab.click("#timeline summary")
            await tab.until("document.querySelector('#picture svg')")
            grounds[scheme] = await tab.js(
                "[getComputedStyle(document.body).backgroundColor,"
                " getComputedStyle(document.querySelector('#picture svg > rect')).fill,"
                " getComputedStyle(document.querySelector('#picture svg > text')).fill]"
            )
    assert all(a != b for a, b in zip(*grounds.values(), strict=True))
