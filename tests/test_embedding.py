"""Engines inside programs: several of them, forks, contexts, and their picture of themselves."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import textwrap
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import fromstring

import pytest

import aneuron
from aneuron import BreakStats, Engine, EngineClosed, EngineStats
from aneuron.models.loading import Loaded, load
from aneuron.testing import ByteTokenizer, Const, count_engine, no_leaks, sim_engine
from aneuron.timeline import Timeline
from aneuron.timeline.card import card
from tests.support import after, every_carry, start

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from aneuron.models.catalog import Progress

WHO: ContextVar[str] = ContextVar("WHO", default="nobody")


# ── several engines ─────────────────────────────────────────────────────────────────────


async def test_two_engines_in_one_loop() -> None:
    async with count_engine() as one, count_engine(max_num_seqs=2) as two:
        streams = [start(engine, 10 * n, 20) for n in range(1, 9) for engine in (one, two)]
        answers = await asyncio.gather(*streams)
        assert [one.token_ids for one in answers] == [
            after(10 * n, 20) for n in range(1, 9) for _ in range(2)
        ]
        await one.aclose()
        assert (await start(two, 5, 3)).token_ids == [6, 7, 8]


async def test_one_engine_after_another() -> None:
    for last in range(5):
        async with count_engine() as engine, no_leaks(engine):
            assert (await start(engine, last, 3)).token_ids == after(last, 3)


# ── fork ────────────────────────────────────────────────────────────────────────────────


def run(code: str, cwd: Path) -> list[str]:
    """Run a program that must succeed; return the lines that it and its children print."""
    ignored = "ignore:This process:DeprecationWarning"  # from 3.12 on, of each fork
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", ignored, "-c", textwrap.dedent(code)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.alone
def test_a_forked_child_is_told_so_at_once(tmp_path: Path) -> None:
    """Calls raise, closing is harmless, an engine of its own answers; the parent goes on."""
    code = """
        import asyncio, multiprocessing, os, signal, aneuron

        def tell(what, call):
            try:
                print(what, call())
            except aneuron.EngineClosed as error:
                told = "forked from" in str(error) and str(os.getppid()) in str(error)
                print(what, "refused" if told else error)

        async def child(engine, stream):
            tell("generate", lambda: engine.generate("x"))
            tell("chat", lambda: engine.chat([]))
            tell("many", lambda: engine.generate_many([]))
            tell("abort", lambda: engine.abort("x"))
            print("open", engine.is_open)
            for name, call in {"stream": stream.__anext__, "idle": engine.wait_idle}.items():
                try:
                    await call()
                except aneuron.EngineClosed as error:
                    print(name, "refused")
            stream.cancel()
            await stream.aclose()
            await engine.aclose()
            await engine.aclose()
            async with engine:  # its own by now
                print((await engine.generate(prompt_token_ids=[1], max_tokens=2)).token_ids)
            async with aneuron.Engine("sim:count") as own:
                print((await own.generate(prompt_token_ids=[1], max_tokens=2)).token_ids)

        def start(engine, stream):
            signal.alarm(30)  # ends one that hangs
            asyncio.run(child(engine, stream))

        async def main():
            async with aneuron.Engine("sim:count", device="sim:micro") as engine:
                stream = engine.generate(prompt_token_ids=[10], max_tokens=60)
                await anext(stream)
                forking = multiprocessing.get_context("fork")
                process = forking.Process(target=start, args=(engine, stream))
                process.start()
                await asyncio.to_thread(process.join)
                print("child", process.exitcode)
                print((await stream).token_ids == list(range(11, 71)), engine.is_open)

        asyncio.run(main())
        """
    assert run(code, tmp_path) == [
        "generate refused",
        "chat refused",
        "many refused",
        "abort refused",
        "open False",
        "stream refused",
        "idle refused",
        "[2, 3]",
        "[2, 3]",
        "child 0",
        "True True",
    ]


def test_a_fork_in_the_middle_of_a_coroutine(tmp_path: Path) -> None:
    """The child goes on inside a copy of the loop, where nothing would ever come."""
    code = """
        import asyncio, os, signal, aneuron

        async def main():
            async with aneuron.Engine("sim:count", device="sim:micro") as engine:
                stream = engine.generate(prompt_token_ids=[10], max_tokens=60)
                await anext(stream)
                if pid := os.fork():
                    print("child", (await asyncio.to_thread(os.waitpid, pid, 0))[1])
                    return
                signal.alarm(30)
                try:
                    async for _ in stream:
                        pass
                except aneuron.EngineClosed:
                    print("refused", flush=True)
                await engine.aclose()
                os._exit(0)

        asyncio.run(main())
        """
    assert run(code, tmp_path) == ["refused", "child 0"]


def test_a_child_of_a_process_that_computed_opens_no_model(tmp_path: Path) -> None:
    """Its first step would wait for threads that are not there: refused, also in its children."""
    code = """
        import asyncio, os, signal, aneuron
        from aneuron.threads import use_compute_threads

        use_compute_threads()
        use_compute_threads()
        for _ in range(2):
            if pid := os.fork():
                os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            signal.alarm(30)
            try:
                asyncio.run(aneuron.Engine("smollm2-135m").open())
            except aneuron.ConfigError as error:
                print(error.param, "spawn" in str(error), flush=True)
        """
    assert run(code, tmp_path) == ["device True"] * 2


# ── contexts ────────────────────────────────────────────────────────────────────────────


@every_carry
async def test_hooks_run_in_the_context_of_the_call(carry: dict[str, Any]) -> None:
    """Each in its own, whoever opened the engine, and what a hook sets there stays."""
    calls: ContextVar[int] = ContextVar("calls", default=0)
    seen: dict[str, list[int]] = {}

    def hook(output_ids: list[int], logits: np.ndarray) -> None:
        calls.set(calls.get() + 1)
        seen.setdefault(WHO.get(), []).append(calls.get())

    async def ask(who: str, n: int) -> None:
        WHO.set(who)
        await engine.generate(
            prompt_token_ids=[1], max_tokens=3, n=n, ignore_eos=True, logits_processors=hook
        )

    WHO.set("opener")
    async with sim_engine(Const(), **carry) as engine, no_leaks(engine):
        await asyncio.gather(ask("ann", 1), ask("bob", 2))
    assert seen == {"ann": [1, 2, 3], "bob": [1, 1, 2, 2, 3, 3]}
    assert calls.get() == 0


async def test_the_rest_of_a_request_runs_there_too() -> None:
    """The caller's tokenizer, and what draws prompts for `generate_many`."""
    seen: list[tuple[str, str]] = []

    class Tokenizer(ByteTokenizer):
        async def encode(self, text: str, *args: Any, **options: Any) -> Any:
            seen.append(("tokenizer", WHO.get()))
            return await super().encode(text, *args, **options)

    def prompts() -> Any:
        for text in ("a", "b"):
            seen.append(("prompts", WHO.get()))
            yield text

    async def ask() -> None:
        WHO.set("ann")
        async for _ in engine.generate_many(prompts(), max_tokens=1):
            pass

    WHO.set("opener")
    async with count_engine(tokenizer=Tokenizer()) as engine, no_leaks(engine):
        await asyncio.create_task(ask())
    assert sorted(seen) == [("prompts", "ann")] * 2 + [("tokenizer", "ann")] * 2


async def test_progress_runs_in_the_context_of_open(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def told(*args: Any, progress: Progress, **options: Any) -> Loaded:
        progress("load", 0, None)
        return load(*args, progress=progress, **options)

    monkeypatch.setattr("aneuron.engine.load", told)
    WHO.set("maker")
    engine = Engine("sim:count", progress=lambda *_: seen.append(WHO.get()))
    WHO.set("opener")
    async with engine:
        pass
    assert seen == ["opener"]


# ── the picture ─────────────────────────────────────────────────────────────────────────


def stats(**facts: Any) -> EngineStats:
    names = EngineStats.__dataclass_fields__
    return EngineStats(**{**dict.fromkeys(names, 0), "breaks": {}, "stalled_s": 0.0, **facts})


def text_of(html: str) -> str:
    return " ".join(fromstring(html).itertext())


def test_the_card_says_what_the_engine_does() -> None:
    timeline = Timeline()
    timeline._busy_s, timeline._idle_s = 1.5, 0.5
    told = card(
        "m on cpu",
        "open",
        stats(
            running=3, waiting=2, in_flight_steps=1, num_blocks=1000, free_blocks=750,
            steps=1200, decode_steps=1000, async_steps=990, generation_tokens=4000,
            breaks={"hook": BreakStats(7, 0.1)},
        ),
        timeline,
    )  # fmt: skip
    text = text_of(told)
    for said in (
        "m on cpu", "open", "3 running, 2 waiting", "250 of 1,000 blocks", "4,000 (2,000/s",
        "1,200, 1 in flight", "99.0%", "hook 7",
    ):  # fmt: skip
        assert said in text
    assert "width:25.0%" in told
    empty = text_of(card("m", "open", stats(num_blocks=1), Timeline()))
    assert "async decodes -" in empty
    assert "/s" not in empty


def test_the_card_is_escaped_and_has_no_colours_of_a_page() -> None:
    told = card("<script>alert(1)</script>", "new")
    assert "<script" not in told
    assert "&lt;script&gt;" in told
    whole = card("m", "open", stats(num_blocks=1), Timeline())
    assert "background:#fff" not in whole  # it takes the page's, light or dark
    assert "color:#000" not in whole


async def test_an_engine_shows_itself_at_any_time() -> None:
    engine = Engine("sim:count")
    assert "sim:count" in engine._repr_html_()
    assert "new" in text_of(engine._repr_html_())
    async with engine:
        before = engine._repr_html_()
        stream = start(engine, 10, 20)
        assert "0 running, 1 waiting" in text_of(engine._repr_html_())
        await stream
        assert engine._repr_html_() != before
        assert "20" in text_of(engine._repr_html_())
    assert "closed" in text_of(engine._repr_html_())


async def test_an_open_engine_names_the_device_that_it_found() -> None:
    engine = Engine("sim:count")
    assert repr(engine) == "<Engine sim:count on auto, new>"
    async with engine:
        assert repr(engine) == "<Engine sim:count on sim, open>"
        assert "sim:count on sim" in engine._repr_html_()
    async with Engine("sim:count", device="sim:micro") as named:
        assert repr(named) == "<Engine sim:count on sim:micro, open>"


# ── what looks like a blocking call ─────────────────────────────────────────────────────


# mypy holds the `type: ignore`s needed: it refuses each of these, too.
async def test_blocking_forms_raise_and_say_to_await() -> None:
    with pytest.raises(AttributeError, match=r"await aneuron\.open"):
        _ = aneuron.open("sim:count").generate  # type: ignore[attr-defined]
    with pytest.raises(EngineClosed, match=r"await open\(\)"):
        _ = Engine("sim:count").generate("x")
    async with count_engine() as engine, no_leaks(engine):
        stream = start(engine, 10, 3)
        with pytest.raises(TypeError, match="async for token in stream"):
            list(stream)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="async for token in stream"):
            for _ in stream:  # type: ignore[attr-defined]
                pass
        with pytest.raises(AttributeError, match=r"`completion = await stream`$"):
            stream.result()  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match=r"await stream`; then `completion\.text`"):
            _ = stream.text  # type: ignore[attr-defined]
        assert (await stream).token_ids == [11, 12, 13]


async def test_answers_of_many_prompts_say_to_iterate_them() -> None:
    async with count_engine() as engine, no_leaks(engine):
        answers = engine.generate_many([[10], [20]], max_tokens=2)
        with pytest.raises(TypeError, match="async for index, completion in"):
            list(answers)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="async for index, completion in"):
            await answers  # type: ignore[misc]
        assert dict([one async for one in answers])[1].token_ids == [21, 22]


async def test_with_says_async_with() -> None:
    with pytest.raises(TypeError, match="async with"), Engine("sim:count"):  # type: ignore[attr-defined]
        pass
    with pytest.raises(TypeError, match="async with"), aneuron.open("sim:count"):  # type: ignore[attr-defined]
        pass
    async with count_engine() as engine:
        with pytest.raises(TypeError, match="async with"), start(engine, 10, 3):  # type: ignore[attr-defined]
            pass


async def test_what_an_answer_has_a_stream_says_to_await() -> None:
    names = [name for name in dir(aneuron.Completion) if not name.startswith("_")]
    async with count_engine() as engine:
        stream = start(engine, 10, 1)
        for name in {*names} - {"request_id", "usage"}:  # these it knows
            assert not hasattr(stream, name)
            with pytest.raises(AttributeError, match="await stream"):
                getattr(stream, name)
        assert "text" in dict(inspect.getmembers(type(stream)))  # as tools look at it
        await stream


def test_streams_and_engines_are_as_quick_as_any_object() -> None:
    # With one of these, each attribute of the instance is looked up in Python's slow way.
    for kind in (aneuron.TokenStream, aneuron.CompletionStream, Engine):
        assert not hasattr(kind, "__getattr__")
        assert kind.__getattribute__ is object.__getattribute__
    assert "__dict__" not in dir(aneuron.TokenStream)  # it has slots
