"""Cases 57 to 60 in a real Jupyter kernel, interrupts, and what is shown. One kernel for all."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from jupyter_client.manager import KernelManager

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_client.blocking.client import BlockingKernelClient

ROOT = Path(__file__).parent.parent
CELL_S = 20  # a cell that takes longer hangs

pytestmark = pytest.mark.timeout(90)


class Kernel:
    """A kernel, and what the last cell gave."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client
        self.printed = ""
        self.shown: list[dict[str, Any]] = []  # displays, updates and the cell's own value

    def reply(self, code: str, *, interrupt_at: str | None = None) -> dict[str, Any]:
        """Run a cell; interrupt it, once, when it has printed a text."""
        self.printed, self.shown = "", []
        waiting = [interrupt_at] if interrupt_at else []

        def hook(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                self.printed += content["text"]
                if waiting and waiting[0] in content["text"]:
                    waiting.clear()
                    self.manager.interrupt_kernel()
            elif "data" in content:
                self.shown.append(content["data"])

        message = self.client.execute_interactive(
            textwrap.dedent(code), output_hook=hook, timeout=CELL_S
        )
        content: dict[str, Any] = message["content"]
        return content

    def run(self, code: str) -> str:
        """Run a cell that must succeed; return what it printed."""
        reply = self.reply(code)
        assert reply["status"] == "ok", "\n".join(reply["traceback"])
        return self.printed

    def fails(self, code: str) -> tuple[str, str]:
        """Run a cell that must fail; return the error's name and message."""
        reply = self.reply(code)
        assert reply["status"] == "error", self.printed
        return reply["ename"], reply["evalue"]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    home = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(home / name))
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        patch.setenv("PYTHONPATH", str(ROOT))
        manager = KernelManager()
        manager.start_kernel(cwd=str(home))
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=60)
            kernel = Kernel(manager, client)
            kernel.run(FIRST)
            yield kernel
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
            manager.cleanup_resources()
            manager.context.destroy()


FIRST = """
    import asyncio, gc, logging, sys, threading

    def facts():
        threads = {thread.name for thread in threading.enumerate()}
        return threads, repr(asyncio.get_event_loop_policy()), asyncio.get_running_loop()

    before, modules = facts(), set(sys.modules)
    import aneuron
    from aneuron.testing import assert_idle, no_leaks
    from aneuron import Engine
    changed = [name for name in set(sys.modules) - modules if "nest_asyncio" in name]
    same = facts() == before

    async def use(engine, last=10):
        async with engine:
            return (await engine.generate(prompt_token_ids=[last], max_tokens=3)).token_ids

    engine = await aneuron.open("sim:count", max_num_seqs=64, timeline=True)
"""


def test_case_57_top_level_await(kernel: Kernel) -> None:
    """(a): the engine of one cell is used in the next, and nothing was patched."""
    told = kernel.run("""
        async for token in engine.generate(prompt_token_ids=[10], max_tokens=3):
            print(token.token_id, end=" ")
        print((await engine.generate(prompt_token_ids=[20], max_tokens=2)).token_ids, changed)
    """)
    assert told.strip() == "11 12 13 [21, 22] []"


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("for token in engine.generate('x', max_tokens=1): pass", "TypeError", "async for"),
        ("list(engine.generate('x', max_tokens=1))", "TypeError", "await stream"),
        ("aneuron.open('sim:count').generate('x')", "AttributeError", "await aneuron.open"),
        ("aneuron.Engine('sim:count').generate('x')", "EngineClosed", "await open()"),
        ("asyncio.run(use(aneuron.Engine('sim:count')))", "RuntimeError", "running event loop"),
    ],
)
def test_case_57_blocking_forms_say_to_await(
    kernel: Kernel, code: str, name: str, message: str
) -> None:
    """(b): there is no blocking helper; what looks like one raises at once, and says so."""
    assert kernel.fails(code)[0] == name
    assert message in kernel.fails(code)[1]
    assert kernel.run("async with no_leaks(engine): print(await use(Engine('sim:count')))")


def test_case_58_loops_one_after_another(kernel: Kernel) -> None:
    """`asyncio.run` twice on one engine, in a thread: a cell cannot. Each answers."""
    told = kernel.run("""
        other = Engine("sim:count")
        for last in (10, 20):
            print(await asyncio.to_thread(asyncio.run, use(other, last)))
        print(await use(other, 30))
    """)
    assert told.split("\n")[:3] == ["[11, 12, 13]", "[21, 22, 23]", "[31, 32, 33]"]


def test_case_58_another_loop_is_told_both(kernel: Kernel) -> None:
    told = kernel.run("""
        async def wrong():
            try:
                engine.generate("x")
            except RuntimeError as error:
                return str(error), id(asyncio.get_running_loop())

        print(*await asyncio.to_thread(asyncio.run, wrong()), id(engine.loop), sep="|")
    """)
    message, here, owner = told.strip().split("|")
    assert re.search(rf"belongs to the event loop <.*> at {int(owner):#x}: call it there", message)
    assert re.search(rf"this is <.*> at {int(here):#x}", message)


def test_case_59_garbage_collection_each_turn(kernel: Kernel) -> None:
    told = kernel.run("""
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("asyncio").addHandler(handler)
        ended = False

        async def collect():
            while not ended:
                gc.collect()
                await asyncio.sleep(0)

        async def ids(stream):
            return [token.token_id async for token in stream]

        async def streams():
            engine = await aneuron.open("sim:count", max_num_seqs=64)
            return [engine.generate(prompt_token_ids=[n], max_tokens=20) for n in range(50)]

        collecting = asyncio.create_task(collect())
        got = await asyncio.gather(*map(ids, await streams()))
        ended = True
        await collecting
        gc.collect()
        print(got == [list(range(n + 1, n + 21)) for n in range(50)], said)
    """)
    assert told.strip() == "True []"


def test_case_60_import_changes_nothing(kernel: Kernel) -> None:
    """No thread, no policy, the same loop; and uvloop beside the kernel's own."""
    told = kernel.run("""
        import uvloop

        print(same, await asyncio.to_thread(uvloop.run, use(Engine("sim:count"))))
    """)
    assert told.strip() == "True [11, 12, 13]"


@pytest.mark.parametrize(
    "waits",
    [
        "async for token in stream: print('running', flush=True)",
        "print('running', flush=True); await stream",
        "print('running', flush=True); await asyncio.sleep(60)",
    ],
)
def test_an_interrupted_cell_ends_its_request_only(kernel: Kernel, waits: str) -> None:
    kernel.run("""
        slow = await aneuron.open("sim:count", device="sim:micro", max_num_seqs=4)
        kept = slow.generate(prompt_token_ids=[70], max_tokens=50)  # of another cell
    """)
    reply = kernel.reply(
        f"stream = slow.generate(prompt_token_ids=[5], max_tokens=50_000)\n{waits}",
        interrupt_at="running",
    )
    assert reply["status"] == "error"
    assert reply["ename"] in {"KeyboardInterrupt", "CancelledError"}
    told = kernel.run("""
        del stream  # a cell that waited for something else has left it
        other = await kept
        answer = await slow.generate(prompt_token_ids=[1], max_tokens=3)
        print(other.token_ids == list(range(71, 121)), answer.token_ids)
        await slow.wait_idle()
        assert_idle(slow)
        await slow.aclose()
    """)
    assert told.strip() == "True [2, 3, 4]"


def test_state_and_timeline_are_shown_as_they_are_now(kernel: Kernel) -> None:
    kernel.run("engine")
    first = kernel.shown[-1]["text/html"]
    assert "sim:count" in first
    assert "open" in first
    kernel.run("engine.timeline")
    picture = kernel.shown[-1]["text/html"]
    assert "<svg" in picture
    kernel.run("""
        handle = display(engine, display_id=True)
        async for _ in engine.generate_many([[n] for n in range(4)], max_tokens=7):
            handle.update(engine)
        engine.timeline
    """)
    *cards, later = [one["text/html"] for one in kernel.shown]
    assert len(cards) == 5
    assert len(set(cards)) > 1
    assert later != picture


def test_the_first_chat_asks_for_no_widgets(kernel: Kernel) -> None:
    """What renders chat templates loads progress bars, which in a notebook want ipywidgets."""
    told = kernel.run("""
        import contextlib, gc, io

        from tokenizers import Tokenizer, models
        from aneuron.models.tokenizer import HFTokenizer

        before = "tqdm.auto" in sys.modules
        sys.modules["ipywidgets"] = None  # as where it is not installed
        tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        gc.collect()  # what cells before have left complains now
        with contextlib.redirect_stderr(io.StringIO()) as said:
            await HFTokenizer(tokenizer, chat_template="a").load_renderer()
        print(before, "tqdm.auto" in sys.modules, "transformers" in sys.modules)
        print(repr(said.getvalue()))
    """)
    assert told.split("\n")[:2] == ["False True True", "''"]
