"""Every Python block of the documentation runs: in the order of its page, on simulated models.

A page is a namespace that begins with `aneuron` and an open `engine`; a block may `await`, and
what it defines as `test_…` is called. A block that cannot run has a comment in the line above:

    <!-- not run: why -->
    <!-- excerpt: aneuron/file.py -->       its text is checked to be in that file
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import re
import sys
import textwrap
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

import aneuron
from aneuron.models.loading import check_source
from aneuron.server import ServerConfig
from aneuron.testing import Const
from tests.server.conftest import served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType

    from blockbuster import BlockBuster

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("[!_]*/*.md"))]
PAGES += sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^( *)```python\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"^ *<!-- (not run|excerpt): (.+) -->$")
SERVER = "127.0.0.1:8000"  # where pages expect `aneuron serve`
ARGUMENTS = {"async_scheduling.md": ["picture.svg", "handoff", "400"]}


@dataclass
class Block:
    path: Path
    line: int  # of its first line of code, from 1
    code: str
    mark: str | None  # "not run", "excerpt"
    note: str

    def compiled(self, code: str) -> CodeType:
        tree = ast.parse(code)
        ast.increment_lineno(tree, self.line - 1)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        made: CodeType = compile(tree, str(self.path), "exec", flags=flags, dont_inherit=True)
        return made


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text("utf-8")
    found = []
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        mark = MARK.match((before.splitlines() or [""])[-1])
        kind, note = mark.groups() if mark else (None, "")
        code = textwrap.dedent(match[2])
        found.append(Block(path, before.count("\n") + 2, code, kind, note))
    return found


BLOCKS = {str(path.relative_to(ROOT)): blocks_of(path) for path in PAGES}
RUN = {
    page: [block for block in blocks if block.mark is None]
    for page, blocks in BLOCKS.items()
    if any(block.mark is None for block in blocks)
}
EXCERPTS = [block for blocks in BLOCKS.values() for block in blocks if block.mark == "excerpt"]


def talkative() -> Const:
    """A model that says some "a", then ends; it takes what any real one takes."""
    logits = [-10.0] * 258
    logits[ord("a")], logits[257] = 2.0, 0.0
    return Const(logits, max_model_len=512)


class Page:
    """Runs the blocks of one page on one event loop."""

    def __init__(self, runner: asyncio.Runner, name: str) -> None:
        self.runner = runner
        self.namespace: dict[str, Any] = {"aneuron": aneuron, "__name__": f"docs:{name}"}
        self.stack = AsyncExitStack()
        self.address = SERVER

    async def begin(self, *, serves: bool) -> None:
        engine = await aneuron.open("smollm2-135m", timeline=True)
        self.stack.push_async_callback(engine.aclose)
        self.namespace["engine"] = engine
        if serves:
            config = ServerConfig(served_model_names=("smollm2-135m",))
            server = await self.stack.enter_async_context(served(engine, config))
            self.address = server.url.removeprefix("http://")

    def run(self, block: Block) -> None:
        code = block.compiled(block.code.replace(SERVER, self.address))
        before = dict(self.namespace)
        if "asyncio.run(" in block.code:
            eval(code, self.namespace)
        else:
            self.runner.run(self._run(code))
        for name, value in list(self.namespace.items()):
            if name.startswith("test_") and value is not before.get(name):
                self._call(value)

    async def _run(self, code: CodeType) -> None:
        result = eval(code, self.namespace)
        if inspect.iscoroutine(result):
            await result

    def _call(self, test: Callable[[], Any]) -> None:
        result = test()
        if inspect.iscoroutine(result):
            self.runner.run(result)

    async def end(self) -> None:
        """Close what blocks have left open, as their readers would in time."""
        for value in self.namespace.values():
            if isinstance(value, aneuron.Engine):
                await value.aclose()
            if isinstance(value, openai.AsyncOpenAI):
                await value.close()
            if isinstance(value, openai.OpenAI):
                value.close()
        await self.stack.aclose()


@pytest.fixture
def page(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    blocking_calls_raise: BlockBuster,
) -> Iterator[Page]:
    blocking_calls_raise.deactivate()  # a block may write a file
    name = request.param

    def simulated(model: Any, device: Any) -> Any:
        return check_source(talkative() if model == "smollm2-135m" else model, device)

    monkeypatch.setattr("aneuron.engine.check_source", simulated)
    monkeypatch.setattr(sys, "argv", ["page.py", *ARGUMENTS.get(Path(name).name, [])])
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    kept = list(root.handlers)
    loggers = [logging.getLogger(one) for one in ("aneuron", "aneuron.flow")]
    levels = [one.level for one in loggers]
    with asyncio.Runner() as runner:
        page = Page(runner, name)
        runner.run(page.begin(serves=any(SERVER in block.code for block in RUN[name])))
        try:
            yield page
        finally:
            runner.run(page.end())
            blocking_calls_raise.activate()
            for one, level in zip(loggers, levels, strict=True):
                one.setLevel(level)
            for handler in [one for one in root.handlers if one not in kept]:
                root.removeHandler(handler)


@pytest.mark.parametrize(
    ("page", "name"), [(name, name) for name in RUN], indirect=["page"], ids=list(RUN)
)
def test_blocks_run(page: Page, name: str) -> None:
    for block in RUN[name]:
        page.run(block)


@pytest.mark.parametrize("block", EXCERPTS, ids=lambda block: f"{block.path.name}:{block.line}")
def test_excerpts_are_what_the_source_says(block: Block) -> None:
    lines = (ROOT / block.note).read_text("utf-8").splitlines()
    source = "\n".join(line.strip() for line in lines)
    assert "\n".join(line.strip() for line in block.code.strip().splitlines()) in source


def test_each_block_that_is_not_run_says_why() -> None:
    for path in PAGES:
        text = path.read_text("utf-8")
        assert text.count("```python\n") == len(blocks_of(path)), f"{path}: a fence is not closed"
        assert len(re.findall("^ *<!-- (?:not run|excerpt):", text, re.MULTILINE)) == sum(
            block.mark is not None for block in blocks_of(path)
        ), f"{path}: a comment that belongs to no block"
