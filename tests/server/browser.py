"""A headless Chromium, driven through a pipe by its own protocol (DevTools), on the test's loop.

The pipe needs no port, no driver and no package, and Chromium ends with it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

__all__ = ["Browser", "Tab", "chromium", "find"]

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--remote-debugging-pipe", "--no-proxy-server",
)  # fmt: skip
# Chromium reads commands from 3 and writes to 4.
ON_3_AND_4 = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3])
os.dup2(reads, 3), os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
LARGEST = 64 * 2**20  # a picture of a page is one message
PATIENCE_S = 20
MISSING = "there is no Chromium: on Debian, `apt-get install chromium`; or set ANEURON_CHROMIUM"


def find() -> str | None:
    """Where Chromium is, if it is installed; `ANEURON_CHROMIUM` may say so."""
    if (given := os.environ.get("ANEURON_CHROMIUM")) is not None:
        return given
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """Calls and events of one Chromium."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.WriteTransport) -> None:
        self._reader, self._writer = reader, writer
        self._ids = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}

    async def read(self) -> None:
        """Take in what it says until it ends."""
        while message := (await self._reader.readuntil(b"\0"))[:-1]:
            told = json.loads(message)
            if "id" in told:
                answer = self._answers.pop(told["id"])
                if not answer.done():
                    answer.set_result(told)
            elif (tab := self._tabs.get(told.get("sessionId", ""))) is not None:
                tab.heard(told["method"], told["params"])

    async def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Ask for something, and return the result."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        asked = {"id": number, "method": method, "params": params}
        if session is not None:
            asked["sessionId"] = session
        self._writer.write(json.dumps(asked).encode() + b"\0")
        async with asyncio.timeout(PATIENCE_S):
            told = await answer
        if "error" in told:
            raise RuntimeError(f"{method}: {told['error']}")
        result: dict[str, Any] = told["result"]
        return result

    @asynccontextmanager
    async def tab(self, *, width: int = 1200, height: int = 900) -> AsyncIterator[Tab]:
        """A tab with a profile of its own: what one keeps, no other sees."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        made = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.call("Target.attachToTarget", targetId=made["targetId"], flatten=True)
        tab = self._tabs[attached["sessionId"]] = Tab(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.call(f"{domain}.enable")
        await tab.resize(width, height)
        try:
            yield tab
        finally:
            await self.call("Target.disposeBrowserContext", browserContextId=context)
            del self._tabs[attached["sessionId"]]


@dataclass
class Tab:
    """One page.

    Attributes:
        asked: method and path of what it has asked the server for.
        sent: bodies of what it has posted.
        complaints: errors on its console but for those of answers, broken policies among them.
    """

    browser: Browser
    session: str
    asked: list[str] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            request = params["request"]
            self.asked.append(f"{request['method']} /{request['url'].split('/', 3)[3]}")
            if "postData" in request:
                self.sent.append(json.loads(request["postData"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            entry = params["entry"]
            if entry["level"] == "error" and entry["source"] != "network":
                self.complaints.append(entry["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self.browser.call(method, self.session, **params)

    async def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def js(self, code: str) -> Any:
        """The value of an expression, of an element that it is there; a promise is awaited."""
        value = f"Promise.resolve({code}).then((one) => one instanceof Node || one)"
        told = await self.call(
            "Runtime.evaluate", expression=value, awaitPromise=True, returnByValue=True,
            userGesture=True,
        )  # fmt: skip
        if "exceptionDetails" in told:
            raise RuntimeError(f"{code}: {told['exceptionDetails']}")
        return told["result"].get("value")

    async def until(self, code: str, is_so: Callable[[Any], bool] = bool) -> Any:
        """Wait until an expression has such a value, and return it: looked at on each frame."""
        value = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not is_so(value := await self.js(code)):
                    await self.js("new Promise((done) => setTimeout(done, 10))")
        except TimeoutError:
            raise AssertionError(f"{code} is {value!r}; console: {self.complaints}") from None
        return value

    async def text(self, selector: str) -> str:
        found: str = await self.js(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    async def click(self, selector: str) -> None:
        """Click on what is seen there, as a user does."""
        at = await self.js(
            f"(() => {{ const box = document.querySelector({json.dumps(selector)})"
            ".getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", clickCount=1
            )

    async def write(self, selector: str, text: str) -> None:
        """Put the cursor into a field and insert a text there."""
        await self.js(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        told = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": codes[key],
            "modifiers": 8 * shift,
        }
        text = {"text": "\r"} if key == "Enter" else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **told, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **told)

    async def picture(self, path: Path, **options: Any) -> None:
        """Write what is seen to a file."""
        told = await self.call("Page.captureScreenshot", **options)
        path.write_bytes(base64.b64decode(told["data"]))


@asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Browser]:
    """Run a Chromium with a new profile in this folder."""
    path = find()
    if path is None:
        raise RuntimeError(MISSING)
    its_reads, our_writes = os.pipe()
    our_reads, its_writes = os.pipe()
    command = (path, *FLAGS, f"--user-data-dir={profile}", "about:blank")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ON_3_AND_4, str(its_reads), str(its_writes), *command,
        pass_fds=(its_reads, its_writes), stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    for one in (its_reads, its_writes):
        os.close(one)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LARGEST)
    reads, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(our_reads, "rb")
    )
    writes, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(our_writes, "wb"))
    browser = Browser(reader, writes)
    reading = asyncio.create_task(browser.read())
    try:
        yield browser
    finally:
        writes.write(b'{"id": 0, "method": "Browser.close"}\0')
        reading.cancel()
        await asyncio.wait([reading])
        reads.close()
        writes.close()
        async with asyncio.timeout(PATIENCE_S):
            await process.wait()


if __name__ == "__main__":  # for nox and CI
    found = find()
    print(found or MISSING)
    sys.exit(found is None)
