"""Text and ends of answers through the engine, on every carry: cases 30 to 38.

ECHO answers with what its prompt says, so one engine runs any number of scripts at a time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron.testing import Script, SimModel, no_leaks, sim_engine
from tests.support import every_carry, items_of
from tests.test_detokenize import byte_fallback, ids, metaspace, new_text

if TYPE_CHECKING:
    from aneuron import Completion, Engine, Token, TokenStream
    from aneuron.plans import ModelInput

Carry = dict[str, Any]
SMALL: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 64}
START, END = 256, 257
SPACE = 32  # the last id of each prompt: a whole character


class Echo(SimModel):
    """Says what the prompt says, less its last id, and repeats the end: [*script, END, SPACE]."""

    name = "echo"

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"eos_token_ids": (END,), "vocab_size": 512, **options})

    def next_ids(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        context, _ = self._context(inputs)
        told = inputs.context_lens[inputs.sampled_rows] - inputs.prompt_lens
        at = np.clip(np.minimum(told, inputs.prompt_lens - 2), 0, None)
        entries: np.ndarray = context[np.arange(len(context)), at]
        return entries


def say(engine: Engine, script: list[int] | bytes, **params: Any) -> TokenStream:
    return engine.generate(prompt_token_ids=[*script, END, SPACE], **params)


def texts_of(items: list[Token]) -> list[str]:
    return [item.text for item in items]


async def slowly(engine: Engine, stream: TokenStream, first: int) -> list[Token]:
    """Read some tokens, and the others when all is over."""
    items: list[Token] = []
    async for token in stream:
        items.append(token)
        if len(items) == first:
            await engine.wait_idle()
    return items


async def read_in_all_ways(engine: Engine, make: Any) -> tuple[list[Token], Completion]:
    """Stream, fast and slow, and await, at once and late; all tell the same."""
    items = await items_of(make())
    late = make()
    slow = [await slowly(engine, make(), first) for first in (1, 2)]
    await engine.wait_idle()
    assert [await items_of(late), *slow] == [items] * 3
    late, at_once = make(), await make()
    await engine.wait_idle()
    for answer in (at_once, await late, await at_once_after_items(make())):
        assert_tells(answer, items)
    return items, at_once


async def at_once_after_items(stream: TokenStream) -> Completion:
    await items_of(stream)
    return await stream


def assert_tells(answer: Completion, items: list[Token]) -> None:
    assert answer.text == "".join(texts_of(items))
    assert answer.token_ids == [item.token_id for item in items]
    last = items[-1]
    assert (answer.finish_reason, answer.stop_reason) == (last.finish_reason, last.stop_reason)
    assert all(item.finish_reason is None and item.stop_reason is None for item in items[:-1])


# ── ends, to the letter ─────────────────────────────────────────────────────────────────

FIRE = "🔥".encode()
NO_END: dict[str, Any] = {"ignore_eos": True}
ALL: dict[str, Any] = {"skip_special_tokens": False}

# What the answer is made of, what is asked, the text of each item, how it ends, and on what.
ENDS: dict[str, tuple[list[int] | bytes, dict[str, Any], list[str], str, str | int | None]] = {
    "case-30": (
        b"ABCDEFGHIJK", {"stop": "DEFGHIJ"}, ["A", "B", "C", *[""] * 7], "stop", "DEFGHIJ",
    ),
    "case-30-of-several": (
        b"ABCDEFGHIJK", {"stop": ["xyz", "DEFGHIJ", "DEFGHIJKL"]},
        ["A", "B", "C", *[""] * 7], "stop", "DEFGHIJ",
    ),
    "case-31a": (b"plea", {"stop": "please"}, [*[""] * 4, "plea"], "stop", None),
    "case-31b": (
        b"pleasant", {"stop": "please", "max_tokens": 4}, ["", "", "", "plea"], "length", None,
    ),
    "case-31-goes-on": (
        b"pleasant", {"stop": "please"}, [*[""] * 5, "pleasa", "n", "t", ""], "stop", None,
    ),
    "case-31-kept": (
        b"plea", {"stop": "please", "include_stop": True}, [*[""] * 4, "plea"], "stop", None,
    ),
    "case-31-stop-id": (
        b"plea!x", {"stop": "please", "stop_token_ids": [33]}, [*[""] * 4, "plea"], "stop", 33,
    ),
    "case-32": (
        b"x\nyzw\nq", {"stop": "\n", "min_tokens": 4}, ["x", "\n", "y", "z", "w", ""],
        "stop", "\n",
    ),
    "case-32-over-a-border": (
        b"abab", {"stop": "ab", "min_tokens": 2}, ["", ""], "stop", "ab",
    ),
    "case-32-one-too-early": (
        b"abab", {"stop": "ab", "min_tokens": 3}, ["", "ab", "", ""], "stop", "ab",
    ),
    "case-32-overlapping-itself": (
        b"aaaa", {"stop": "aa", "min_tokens": 3}, ["", "a", ""], "stop", "aa",
    ),
    "case-32-kept": (
        b"a.b.c", {"stop": ".", "min_tokens": 3, "include_stop": True},
        ["a", ".", "b", "."], "stop", ".",
    ),
    "case-32-at-the-limit": (
        b"a.b.c", {"stop": ".", "min_tokens": 4, "max_tokens": 4}, ["a", ".", "b", ""],
        "stop", ".",
    ),
    "case-32-never": (
        b"a.b", {"stop": ".", "min_tokens": 3, "max_tokens": 3}, ["a", ".", "b"],
        "length", None,
    ),
    "case-32-end-id-too-early": (
        b"ab", {"min_tokens": 5, "max_tokens": 9}, ["a", "b", "", "", ""], "stop", None,
    ),
    "case-32-end-id-too-early-shown": (
        b"ab", {"min_tokens": 5, **ALL}, ["a", "b", "<end>", "<end>", ""], "stop", None,
    ),
    "case-32-stop-id-too-early": (
        b"abab", {"min_tokens": 3, "stop_token_ids": [98]}, ["a", "b", "a", ""], "stop", 98,
    ),
    "longest-of-those-that-end-together": (
        b"abcdx", {"stop": ["d", "bcd", "cd"]}, ["a", "", "", ""], "stop", "bcd",
    ),
    "longest-kept": (
        b"abcdx", {"stop": ["d", "bcd", "cd"], "include_stop": True}, ["a", "", "", "bcd"],
        "stop", "bcd",
    ),
    "first-to-be-complete": (
        b"abcd", {"stop": ["abcd", "b"]}, ["", "a"], "stop", "b",
    ),
    "first-to-be-complete-kept": (
        b"abcd", {"stop": ["abcd", "b"], "include_stop": True}, ["", "ab"], "stop", "b",
    ),
    "limit-inside-a-stop-string": (
        b"xABCD", {"stop": "ABCD", "max_tokens": 4}, ["x", "", "", "ABC"], "length", None,
    ),
    "limit-completes-a-stop-string": (
        b"xABCD", {"stop": "ABC", "max_tokens": 4}, ["x", "", "", ""], "stop", "ABC",
    ),
    "held-text-and-a-broken-character": (
        "pleé".encode(), {"stop": "pleased", "max_tokens": 4}, ["", "", "", "ple\ufffd"],
        "length", None,
    ),
    "flush-completes-no-stop-string": (
        b"a" + FIRE[:2], {"stop": "a\ufffd", "max_tokens": 3}, ["", "", "a\ufffd"],
        "length", None,
    ),
    "a-broken-character-is-text": (
        b"a" + FIRE[:2] + b"b", {"stop": "\ufffd"}, ["a", "", "", ""], "stop", "\ufffd",
    ),
    "stop-of-many-bytes": (
        "ß é🔥ç".encode(), {"stop": "é🔥"}, ["", "ß", " ", *[""] * 6], "stop", "é🔥",
    ),
    "ignored-end-id-is-a-stop-id": (
        b"ab", {**NO_END, "stop_token_ids": [END]}, ["a", "b", ""], "stop", END,
    ),
    "end-id-is-a-stop-id": (
        b"ab", {"stop_token_ids": [END]}, ["a", "b", ""], "stop", END,
    ),
    "ignored-end-id-spells-a-stop-string": (
        b"ab", {**NO_END, **ALL, "stop": "<end>"}, ["a", "b", ""], "stop", "<end>",
    ),
    "end-id-shows-no-text": (b"ab", ALL, ["a", "b", ""], "stop", None),
    "special-tokens-are-shown": (
        [72, START, 73], ALL, ["H", "<start>", "I", ""], "stop", None,
    ),
    "special-tokens-are-left-out": ([72, START, 73], {}, ["H", "", "I", ""], "stop", None),
    "stop-across-a-skipped-token": (
        [72, START, 73], {"stop": "HI"}, ["", "", ""], "stop", "HI",
    ),
    "prompt-is-not-searched": (b"abc", {"stop": " a"}, ["a", "b", "c", ""], "stop", None),
    "no-text": (
        b"abc", {"detokenize": False, "stop_token_ids": [99]}, ["", "", ""], "stop", 99,
    ),
    "no-text-to-the-limit": (
        b"abc", {"detokenize": False, "max_tokens": 2}, ["", ""], "length", None,
    ),
}  # fmt: skip


@every_carry
@pytest.mark.parametrize("name", ENDS)
async def test_cases_30_to_32_and_their_like(name: str, carry: Carry) -> None:
    """Each item of a stream has its text; read slowly or awaited it is the same."""
    script, options, texts, reason, on = ENDS[name]
    async with sim_engine(Echo(), **SMALL, **carry) as engine, no_leaks(engine):
        items, answer = await read_in_all_ways(engine, lambda: say(engine, script, **options))
        assert texts_of(items) == texts
        assert (answer.finish_reason, answer.stop_reason) == (reason, on)
        assert type(answer.stop_reason) is type(on)


@every_carry
async def test_case_30_to_32_all_at_once_and_in_choices(carry: Carry) -> None:
    """No request's stop strings are another's, in a pool so small that some wait or resume."""
    pool: dict[str, Any] = {**SMALL, "block_size": 4, "num_kv_blocks": 40}
    async with sim_engine(Echo(), **pool, **carry) as engine, no_leaks(engine):
        streams = [
            say(engine, script, n=n, **options)
            for n in (1, 3)
            for script, options, *_ in ENDS.values()
        ]
        answers = await asyncio.gather(*(at_once_after_items(stream) for stream in streams))
        for answer, (_, _, texts, reason, on) in zip(answers, [*ENDS.values()] * 2, strict=True):
            for choice in answer.choices:
                told = choice.text, choice.finish_reason, choice.stop_reason
                assert told == ("".join(texts), reason, on)


@every_carry
async def test_case_33_one_of_several_end_ids(carry: Carry) -> None:
    """258 is as good an end as 257: 4 visible tokens; ignored, 12 tokens and "length"."""
    model = Echo(eos_token_ids=(257, 258))
    async with sim_engine(model, **SMALL, **carry) as engine, no_leaks(engine):
        script = [*b"ABCD", 258, *b"EFGHIJKL"]
        items, answer = await read_in_all_ways(engine, lambda: say(engine, script, max_tokens=12))
        assert texts_of(items) == ["A", "B", "C", "D", ""]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        items, answer = await read_in_all_ways(
            engine, lambda: say(engine, script, max_tokens=12, ignore_eos=True)
        )
        assert [item.token_id for item in items] == script[:12]
        assert (answer.finish_reason, answer.text) == ("length", "ABCD<258>EFGHIJK")


@every_carry
@pytest.mark.parametrize(("max_tokens", "reason"), [(5, "stop"), (4, "length")])
async def test_case_34_end_id_at_the_limit(max_tokens: int, reason: str, carry: Carry) -> None:
    async with sim_engine(Script(b"abcd"), **SMALL, **carry) as engine, no_leaks(engine):
        items, answer = await read_in_all_ways(
            engine, lambda: engine.generate("?", max_tokens=max_tokens)
        )
        assert len(items) == max_tokens
        assert (answer.text, answer.finish_reason) == ("abcd", reason)


@every_carry
async def test_case_35_the_last_tokens_and_the_end_are_ready_together(carry: Carry) -> None:
    """A slow reader loses nothing; max_tokens=1 gives one item with the token and the end."""
    async with sim_engine(Echo(), **SMALL, **carry) as engine, no_leaks(engine):
        script = bytes(range(65, 65 + 26))
        items = await slowly(engine, say(engine, script, max_tokens=26), first=16)
        assert texts_of(items) == [chr(one) for one in script]
        assert [item.finish_reason for item in items] == [None] * 25 + ["length"]
        one, _ = await read_in_all_ways(engine, lambda: say(engine, script, max_tokens=1))
        assert [(item.text, item.finish_reason) for item in one] == [("A", "length")]


# ── characters and words ────────────────────────────────────────────────────────────────


@every_carry
async def test_case_36_each_character_comes_with_its_last_byte(carry: Carry) -> None:
    async with sim_engine(Echo(), **SMALL, **carry) as engine, no_leaks(engine):
        items, _ = await read_in_all_ways(engine, lambda: say(engine, "é🔥ç".encode()))
        assert texts_of(items) == ["", "é", "", "", "", "🔥", "", "ç", ""]


@every_carry
@pytest.mark.parametrize("late", [True, False])
async def test_case_37_prompt_ends_inside_a_character(late: bool, carry: Carry) -> None:
    """What the answer completes is new, to a stop string as well; "Hi" never is."""
    async with sim_engine(Script(FIRE[2:] + b"!"), **SMALL, **carry) as engine, no_leaks(engine):
        for stop, texts in ((None, ["", "🔥", "!", ""]), ("🔥!", ["", "", ""])):
            options: dict[str, Any] = {} if stop is None else {"stop": stop}
            prompt = [*b"Hi ", *FIRE[:2]]
            stream = engine.generate(prompt_token_ids=prompt, **options)
            if late:
                await engine.wait_idle()
            assert texts_of(await items_of(stream)) == texts
            answer = await engine.generate(prompt_token_ids=prompt, **options)
            assert (answer.text, answer.stop_reason) == ("".join(texts), stop)
    async with sim_engine(Script(b" am"), **SMALL, **carry) as engine, no_leaks(engine):
        never_completed = await engine.generate(prompt_token_ids=[*b"Hi ", *FIRE[:2]])
        assert never_completed.text == " am"


@every_carry
@pytest.mark.parametrize("words", [["▁", "▁leading", "▁x"], ["▁I", "▁am", "▁here"]])
@pytest.mark.parametrize("kind", [metaspace, byte_fallback])
async def test_case_38_words_keep_their_spaces(kind: Any, words: list[str], carry: Carry) -> None:
    """Joined deltas are decode(prompt + output) less decode(prompt), also in front of a stop."""
    output, prompt = ids(*words), ids("▁Hi")
    model = Script(output, vocab_size=512, eos_token_ids=())
    async with (
        sim_engine(model, tokenizer=kind(), **SMALL, **carry) as engine,
        no_leaks(engine),
    ):
        options: dict[str, Any] = {"prompt_token_ids": prompt, "max_tokens": 3}
        _, answer = await read_in_all_ways(engine, lambda: engine.generate(**options))
        whole = new_text(kind(), prompt, output, skip=True)
        assert answer.text == whole
        assert whole.startswith(" ")
        stop = words[-1].replace("▁", " ")
        _, answer = await read_in_all_ways(engine, lambda: engine.generate(**options, stop=stop))
        assert (answer.text, answer.stop_reason) == (whole.removesuffix(stop), stop)
