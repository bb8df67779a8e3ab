"""Grammars: masks that let through what matches and nothing else, and compiling off the loop."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aneuron import Grammar, InvalidRequest
from aneuron import grammar as module
from aneuron.grammar import GrammarCompiler, GrammarMatcher, fill_bitmask
from aneuron.models.catalog import resolve
from aneuron.models.tokenizer import ByteTokenizer, HFTokenizer

if TYPE_CHECKING:
    from collections.abc import Awaitable

VOCAB = 258
END = 257
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def compiler(vocab_size: int = VOCAB, end_ids: tuple[int, ...] = (END,)) -> GrammarCompiler:
    return GrammarCompiler(ByteTokenizer(vocab_size=vocab_size), vocab_size, end_ids)


def form(**content: Any) -> Grammar:
    made = Grammar.of(content)
    assert made is not None
    return made


def allowed(row: np.ndarray) -> list[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


async def next_ids(matcher: GrammarMatcher, vocab_size: int = VOCAB) -> list[int]:
    [row] = await fill_bitmask([matcher], vocab_size)
    return allowed(row)


async def walk(matcher: GrammarMatcher, chance: random.Random, *, most: int = 400) -> list[int]:
    """Draw allowed bytes until the end, which is taken as soon as `chance` likes."""
    ids: list[int] = []
    while not matcher.is_stopped and len(ids) < most:
        drawn = chance.choice(await next_ids(matcher))
        matcher.advance(drawn)
        assert matcher.error is None
        if drawn == END:
            assert stands(matcher) == (True, None)
            break
        ids.append(drawn)
    return ids


def stands(matcher: GrammarMatcher) -> tuple[bool, str | None]:
    return matcher.is_stopped, matcher.error


async def spell(matcher: GrammarMatcher, text: str) -> None:
    """Let the matcher take a text, each byte of which must be allowed."""
    for byte in text.encode():
        assert byte in await next_ids(matcher), text
        matcher.advance(byte)
        assert matcher.error is None


# ── what is let through ─────────────────────────────────────────────────────────────────


async def test_regex() -> None:
    start = await compiler().compile(form(regex="[ab]{3}[0-9]{2}"))
    for seed in range(20):
        matcher = start.copy()
        text = bytes(await walk(matcher, random.Random(seed))).decode()
        assert re.fullmatch("[ab]{3}[0-9]{2}", text)
        assert matcher.is_stopped


async def test_json_schema_has_no_free_white_space() -> None:
    start = await compiler().compile(form(json=PERSON))
    for seed in range(20):
        text = bytes(await walk(start.copy(), random.Random(seed))).decode()
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags"]
        assert len(value["name"]) <= 8
        assert value["age"] in range(121)
        assert set(value["tags"]) <= {"a", "b"}
        assert text == json.dumps(value, ensure_ascii=False, separators=(",", ":")) or "\\" in text


async def test_json_object_and_any_json_value() -> None:
    made = compiler()
    anything, an_object = form(json=True), Grammar.json_object()
    first = await next_ids(await made.compile(anything))
    assert bytes(first) == bytes(sorted(b'"-0123456789[fnt{'))
    assert bytes(await next_ids(await made.compile(an_object))) == b"{"
    await spell(await made.compile(anything), '[{"a":[1.5e3,null]},"\\u0007\\n\\"é"]')
    matcher = await made.compile(an_object)
    await spell(matcher, '{"a":{"b":[true]}}')
    assert matcher.is_stopped


async def test_a_schema_may_ask_for_white_space() -> None:
    schema = {"const": [1, 2], "x-guidance": {"whitespace_flexible": True}}
    await spell(await compiler().compile(form(json=schema)), "[1, \n 2]")


async def test_lark() -> None:
    source = 'start: pair+\npair: KEY "=" VALUE ";"\nKEY: /[a-c]{1,3}/\nVALUE: "x" | "y"'
    start = await compiler().compile(form(lark=source))
    for seed in range(10):
        text = bytes(await walk(start.copy(), random.Random(seed), most=40)).decode()
        assert re.match("([a-c]{1,3}=[xy];)*", text)
    await spell(start.copy(), "a=x;abc=y;")


TRICKY = [
    '"',
    "\\",
    "\\\\n",
    "/",
    "a/b\\/c",
    "\n",
    "\r\t\0\x7f",
    "é😀\u2028",
    ".*+?()[]{}|^$",
    "~&",
]


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4), st.integers())
@example(TRICKY, 0)
@example(["yes", "yes please", "yes"], 1)
@example(["%llguidance", "#c", "//", "{n}", "<|x|>", "<a>"], 2)
def test_choices_are_met_to_the_letter(choices: list[str], seed: int) -> None:
    async def check() -> None:
        start = await compiler().compile(form(choice=choices))
        for choice in choices:
            await spell(start.copy(), choice)
        drawn = bytes(await walk(start.copy(), random.Random(seed))).decode()
        assert drawn in choices

    asyncio.run(check())


# ── ends and widths ─────────────────────────────────────────────────────────────────────


async def test_end_ids_are_allowed_exactly_where_it_may_end() -> None:
    made = compiler(300, (257, 299, 31, 32))  # two of them are bytes, which they are no more
    matcher = await made.compile(form(regex="a+"))
    assert await next_ids(matcher, 300) == [97]
    matcher.advance(97)
    assert await next_ids(matcher, 300) == [31, 32, 97, 257, 299]
    assert stands(matcher) == (False, None)
    matcher.advance(299)
    assert stands(matcher) == (True, None)


async def test_where_nothing_can_follow_it_stops_by_itself() -> None:
    matcher = await compiler().compile(form(regex="ab"))
    matcher.advance(97)
    assert stands(matcher) == (False, None)
    matcher.advance(98)
    assert stands(matcher) == (True, None)
    matcher.advance(END)  # may still come
    assert stands(matcher) == (True, None)


async def test_without_end_ids_it_ends_where_it_must() -> None:
    matcher = await compiler(end_ids=()).compile(form(regex="ab?"))
    matcher.advance(97)
    assert await next_ids(matcher) == [98]
    matcher.advance(98)
    assert matcher.is_stopped


@pytest.mark.parametrize("vocab_size", [257, 258, 287, 288, 289, 319, 320, 321])
async def test_masks_of_any_width(vocab_size: int) -> None:
    """Ids that the tokenizer does not have are never allowed, nor bits behind the last id."""
    last = vocab_size - 1
    start = await compiler(vocab_size, (last,)).compile(form(lark="start: /(.|\\n)*/"))
    rows = await fill_bitmask([start, start.copy()], vocab_size)
    assert rows.shape == (2, -(-vocab_size // 32))
    assert rows.dtype == np.int32
    begins_character = [*range(128), *range(0xC2, 0xF5)]
    for row in rows:
        assert allowed(row) == [*begins_character, last]


async def test_tokens_longer_than_a_byte_and_special_ones() -> None:
    class Words(ByteTokenizer):
        def spell_vocabulary(self) -> tuple[list[bytes], frozenset[int]]:
            words = [b"", b"ab", b"abc", b"b", b"<|tool|>", b"c1", b"<end>"]
            return words, frozenset((4, 6))

    made = GrammarCompiler(Words(), 10, (6,))
    matcher = await made.compile(form(regex="abc1?"))
    assert await next_ids(matcher, 10) == [1, 2]
    matcher.advance(1)
    assert await next_ids(matcher, 10) == [5]
    matcher = await made.compile(form(lark='start: <|tool|> "b"'))
    assert await next_ids(matcher, 10) == [4]
    matcher = await made.compile(form(choice=["<|tool|>", "ab"]))  # as text it is not the token
    assert await next_ids(matcher, 10) == [1]


async def test_stopped_and_broken_ones_allow_all() -> None:
    made = compiler(300)
    stopped, broken, live = [await made.compile(form(regex="a")) for _ in range(3)]
    stopped.advance(97)
    broken.advance(98)
    assert broken.error is not None
    assert "not satisfy" in broken.error or "doesn't satisfy" in broken.error
    error = broken.error
    broken.advance(97)
    assert broken.error == error
    rows = await fill_bitmask([stopped, broken, live], 300)
    assert (rows[:2] == -1).all()
    assert allowed(rows[2]) == [97]
    assert (await fill_bitmask([stopped], 300) == -1).all()
    assert (await fill_bitmask([], 300)).shape == (0, 10)


async def test_one_that_becomes_too_complex_says_so() -> None:
    rules = [f'r{number}: r{number + 1} | "x"' for number in range(400)]
    source = "\n".join(['start: "q" "a"* r0', *rules, 'r400: "y"'])
    made = compiler()
    broken, other = await made.compile(form(lark=source)), await made.compile(form(regex="a"))
    broken.advance(ord("q"))
    rows = await fill_bitmask([broken, other], VOCAB)
    assert broken.error is not None
    assert "items" in broken.error
    assert "\n<" not in broken.error
    assert (rows[0] == -1).all()
    assert allowed(rows[1]) == [97]


async def test_copies_go_their_own_ways() -> None:
    first = await compiler().compile(form(choice=["ab", "cd"]))
    second = first.copy()
    first.advance(97)
    second.advance(99)
    third = second.copy()
    assert [await next_ids(one) for one in (first, second, third)] == [[98], [100], [100]]


# ── what is refused ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (form(json={"type": 12}), "grammar: json: .*type must be a string"),
        (form(json={"type": "nope"}), "grammar: json: .*Invalid type: nope"),
        (form(json={"type": "string", "pattern": "("}), "grammar: json: .*unclosed group"),
        (form(json={"uniqueItems": True}), "grammar: json: .*uniqueItems"),
        (form(json={"$ref": "http://nowhere.test/"}), "grammar: json: .*does not fetch"),
        (form(json={"x-guidance": 3}), "grammar: json: .*invalid type"),
        (form(regex="("), "grammar: regex: .*unclosed group"),
        (form(regex="(?=a)b"), "grammar: regex: .*look-around"),
        (form(regex="(" * 8000), "grammar: regex: "),
        (form(lark="start: foo"), "grammar: lark: at 1.*unknown name"),
        (form(lark="start: " + "(" * 8_000), "grammar: lark: .*too deeply nested"),
        (form(lark="start: X\nX: /a/ & /b/"), "grammar: lark: no token"),
        (form(lark="start: <|none|>"), "grammar: lark: .*unknown special token"),
        (form(lark="hello"), "grammar: lark: "),
    ],
)
async def test_case_55_what_only_the_compiler_sees(wrong: Grammar, says: str) -> None:
    made = compiler()
    for _ in range(2):  # the second time from what is kept
        with pytest.raises(InvalidRequest, match=re.compile(says, re.DOTALL)) as caught:
            await made.compile(wrong)
        assert caught.value.param == "grammar"
        assert len(str(caught.value)) < 900
        assert "llguidance" not in str(caught.value)
        assert "x-guidance" not in str(caught.value)
    await made.compile(form(regex="a"))  # the next one is served


async def test_what_a_model_cannot_say_is_refused() -> None:
    empty = form(lark='start: ""')
    matcher = await compiler().compile(empty)
    assert await next_ids(matcher) == [END]
    with pytest.raises(InvalidRequest, match="allows no token"):
        await compiler(end_ids=()).compile(empty)


async def test_deep_references_do_not_end_the_process() -> None:
    """They overflowed the usual stack of a thread."""
    names = [f"d{i}" for i in range(1500)]
    rules = {name: {"anyOf": [{"$ref": f"#/$defs/{after}"}]} for name, after in pairwise(names)}
    schema = {"$ref": "#/$defs/d0", "$defs": rules | {names[-1]: {"type": "null"}}}
    lines = [f"{name}: {after}" for name, after in pairwise(names[:700])]
    source = "\n".join(["start: d0", *lines, f'{names[699]}: "null"'])
    made = compiler()
    for one in (form(json=schema), form(lark=source)):
        matcher = await made.compile(one)
        await spell(matcher, "null")
        assert matcher.is_stopped


async def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiler()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequest, match=r'pip install "aneuron\[grammar\]"') as caught:
        await made.compile(form(regex="a"))
    assert caught.value.param == "grammar"


async def test_a_tokenizer_that_cannot_tell() -> None:
    for tokenizer in (object(), type("T", (), {"spell_vocabulary": lambda _: None})()):
        with pytest.raises(InvalidRequest, match="cannot tell") as caught:
            await GrammarCompiler(tokenizer, VOCAB, (END,)).compile(form(regex="a"))
        assert caught.value.param == "grammar"


# ── once, for all who wait ──────────────────────────────────────────────────────────────


class Gate:
    """Counts what goes through, and lets it go on when told."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.seen: list[Any] = []
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self, *args: Any) -> Any:
        self.seen.append(args)
        self.entered.release()
        assert self.opened.wait(10)
        return self.inner(*args)

    async def wait_entered(self) -> None:
        await asyncio.to_thread(self.entered.acquire)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(module._compile)
    monkeypatch.setattr(module, "_compile", gate)
    return gate


async def test_the_same_grammar_is_compiled_once(gate: Gate) -> None:
    made, one = compiler(), form(regex="ab")
    waiting = [asyncio.create_task(made.compile(one)) for _ in range(5)]
    other = asyncio.create_task(made.compile(form(regex="cd")))
    await gate.wait_entered()
    await gate.wait_entered()
    gate.opened.set()
    matchers = [*await asyncio.gather(*waiting), await made.compile(form(regex="ab"))]
    seen = [grammar for _, grammar in gate.seen]  # in the order of two threads
    assert sorted(seen, key=str) == sorted([one, form(regex="cd")], key=str)
    matchers[0].advance(97)
    assert [await next_ids(matcher) for matcher in matchers] == [[98], *[[97]] * 5]
    assert await next_ids(await other) == [99]


async def test_a_cancelled_waiter_harms_no_other(gate: Gate) -> None:
    made, one = compiler(), form(regex="ab")
    first, second, third = (asyncio.create_task(made.compile(one)) for _ in range(3))
    await gate.wait_entered()
    first.cancel()
    third.cancel()
    assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], BaseException)
    assert first.cancelled()
    gate.opened.set()
    assert await next_ids(await second) == [97]
    await made.compile(one)
    assert len(gate.seen) == 1


async def test_all_waiters_cancelled_and_what_is_wrong_is_not_logged(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    made, wrong = compiler(), form(regex="(")
    only = asyncio.create_task(made.compile(wrong))
    await gate.wait_entered()
    only.cancel()
    assert isinstance((await asyncio.gather(only, return_exceptions=True))[0], BaseException)
    gate.opened.set()
    with pytest.raises(InvalidRequest):
        await made.compile(wrong)
    assert len(gate.seen) == 1
    assert not caplog.records


async def test_a_bug_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiler()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_source_text", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await made.compile(form(regex="ab"))
    assert await next_ids(await made.compile(form(regex="ab"))) == [97]


async def test_the_last_64_are_kept(gate: Gate) -> None:
    gate.opened.set()
    made = compiler()
    for number in range(65):
        await made.compile(form(regex=f"a{number}"))
        await made.compile(form(regex="a0"))
    assert len(gate.seen) == 65
    await made.compile(form(regex="a2"))
    await made.compile(form(regex="a64"))
    assert len(gate.seen) == 65
    await made.compile(form(regex="a1"))  # the one that was not asked for the longest
    assert len(gate.seen) == 66


async def test_a_cancelled_fill_waits_for_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = await compiler().compile(form(regex="ab"))
    gate = Gate(module._fill)
    monkeypatch.setattr(module, "_fill", gate)
    filling = asyncio.create_task(fill_bitmask([matcher], VOCAB))
    await gate.wait_entered()
    filling.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not filling.done()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await filling
    matcher.advance(97)  # nobody else uses it
    assert await next_ids(matcher) == [98]


async def test_many_at_once() -> None:
    """Compiles and fills of different requests in different threads."""
    made = compiler()

    async def one(number: int) -> str:
        matcher = await made.compile(form(regex=f"[ab]{{3}}{number % 7}"))
        return bytes(await walk(matcher, random.Random(number))).decode()

    texts = await asyncio.gather(*map(one, range(60)))
    assert all(re.fullmatch(f"[ab]{{3}}{i % 7}", text) for i, text in enumerate(texts))


# ── the loop stays free ─────────────────────────────────────────────────────────────────


async def longest_gap(work: Awaitable[Any]) -> float:
    """Return how long the loop did not turn while something was worked on, in seconds."""
    task = asyncio.ensure_future(work)
    beats = [time.monotonic()]
    while not task.done():
        await asyncio.sleep(0.001)
        beats.append(time.monotonic())
    await task
    return max(after - before for before, after in pairwise(beats))


def schema(number: int) -> Grammar:
    names = {f"property_{number}_{i}": {"enum": [f"v{i}{j}" for j in range(60)]} for i in range(40)}
    return form(json={"type": "object", "properties": names | PERSON["properties"]})  # type: ignore[operator]


async def test_compiling_leaves_the_loop_free() -> None:
    made = compiler()
    await made.compile(form(regex="a"))
    gaps = [await longest_gap(made.compile(schema(number))) for number in range(3)]
    assert min(gaps) < 0.02, gaps


@pytest.mark.alone
async def test_filling_leaves_the_loop_free() -> None:
    start = await compiler().compile(schema(0))
    matchers = [start.copy() for _ in range(200)]
    gaps = [await longest_gap(fill_bitmask(matchers, VOCAB)) for _ in range(3)]
    assert min(gaps) < 0.02, gaps


async def test_advancing_takes_microseconds() -> None:
    matcher = await compiler().compile(form(json=PERSON))
    text = b'{"name":"abc","age":12,"tags":["a","b"]}'
    worst = []
    for _ in range(3):
        one, times = matcher.copy(), []
        for byte in text:
            started = time.perf_counter()
            one.advance(byte)
            times.append(time.perf_counter() - started)
        assert one.is_stopped
        worst.append(max(times))
    assert min(worst) < 0.001


# ── a real vocabulary ───────────────────────────────────────────────────────────────────


@pytest.mark.tiny
@pytest.mark.timeout(60)
async def test_smollm2_vocabulary() -> None:
    path = (await asyncio.to_thread(resolve, "smollm2-135m")).path
    tokenizer = await asyncio.to_thread(HFTokenizer.load, path)
    size = 49_152
    made = GrammarCompiler(tokenizer, size, (0, 2))
    start = await made.compile(form(json=PERSON))
    chance = random.Random(1)
    for _ in range(5):
        matcher, ids = start.copy(), []
        while not matcher.is_stopped:
            ids.append(chance.choice(await next_ids(matcher, size)))
            matcher.advance(ids[-1])
            assert matcher.error is None
        value = json.loads(tokenizer.decode(ids))
        assert list(value) == ["name", "age", "tags"]
    matcher = start.copy()
    for token_id in await tokenizer.encode('{"name":"Ada","age":36,"tags":[]}'):
        assert token_id in await next_ids(matcher, size)  # also as the tokenizer spells it
        matcher.advance(int(token_id))
    assert matcher.is_stopped
    gap_s = await longest_gap(fill_bitmask([start.copy() for _ in range(32)], size))
    assert gap_s < 0.1
