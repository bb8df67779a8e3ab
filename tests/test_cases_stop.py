"""Stop strings, however tokens cut the text, against searches that look at every prefix."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aneuron.detokenize import ByteStream
from aneuron.testing import ByteTokenizer, no_leaks, sim_engine
from tests.support import CARRIES, items_of
from tests.test_cases_text import END, SMALL, SPACE, Echo, say, texts_of
from tests.test_detokenize import feed_all, kind_of, slow_search

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aneuron import Completion, TokenStream


class Chunks(ByteTokenizer):
    """Each id spells the bytes that a test gives it, whole characters or not."""

    def __init__(self, chunks: Mapping[int, bytes]) -> None:
        super().__init__(vocab_size=512)
        self.chunks: dict[int, bytes] = {SPACE: b" ", END: b"", **chunks}

    def decode_stream(self, prompt_ids: Any, *, skip_special_tokens: bool = True) -> ByteStream:
        return ByteStream(prompt_ids, self.chunks)


@dataclass(frozen=True)
class Ask:
    """A text in tokens, and what is asked of it."""

    chunks: list[bytes]
    stops: list[str]
    include_stop: bool
    min_tokens: int
    max_tokens: int
    ignore_eos: bool

    @property
    def params(self) -> dict[str, Any]:
        return {
            "stop": self.stops, "include_stop": self.include_stop, "max_tokens": self.max_tokens,
            "min_tokens": min(self.min_tokens, self.max_tokens), "ignore_eos": self.ignore_eos,
        }  # fmt: skip

    def expected(self) -> tuple[str, str, str | None, int]:
        """Text, end, stop string and number of tokens, found by looking at every prefix."""
        shown, spelled = "", b""
        for count in range(1, self.max_tokens + 1):
            may_end = count >= min(self.min_tokens, self.max_tokens)
            if count > len(self.chunks) and may_end and not self.ignore_eos:
                return spelled.decode(errors="replace"), "stop", None, count
            spelled += self.chunks[count - 1] if count <= len(self.chunks) else b""
            text = spelled.decode(errors="ignore")  # less the last character, if incomplete
            for end in range(len(shown) + 1, len(text) + 1) if may_end else ():
                found = [stop for stop in self.stops if text[:end].endswith(stop)]
                if found:
                    stop = max(found, key=len)
                    return (
                        text[: end if self.include_stop else end - len(stop)],
                        "stop",
                        stop,
                        count,
                    )
            shown = text
        return spelled.decode(errors="replace"), "length", None, self.max_tokens


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    """Any text in any tokens, with stop strings that are often in it."""
    text = draw(st.text("ab.é🔥", max_size=12))
    spelled = text.encode()
    cuts = draw(st.sets(st.integers(1, max(1, len(spelled) - 1)), max_size=12))
    borders = sorted({0, len(spelled), *(cut for cut in cuts if cut < len(spelled))})
    chunks = [spelled[a:b] for a, b in pairwise(borders)]
    places = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 5))
    inside = places.map(lambda place: text[place[0] : sum(place)] or "b")
    stops = draw(st.lists(inside | st.text("ab.é🔥", min_size=1, max_size=4), max_size=3))
    count = len(chunks)
    return Ask(
        chunks, stops, draw(st.booleans()), draw(st.integers(0, count + 2)),
        draw(st.integers(1, count + 3)), draw(st.booleans()),
    )  # fmt: skip


@settings(max_examples=settings().max_examples // 2)  # on each of two loops
@pytest.mark.timeout(max(120, settings().max_examples))
@pytest.mark.parametrize("carry", list(CARRIES))
@given(asked=st.lists(asks(), min_size=1, max_size=4), n=st.integers(1, 2))
async def test_stop_strings_however_tokens_cut_them(carry: str, asked: list[Ask], n: int) -> None:
    """Joined deltas are the text before the first match; streamed, late and awaited alike."""
    number = {chunk: 258 + at for at, chunk in enumerate({c for one in asked for c in one.chunks})}
    tokenizer = Chunks({at: chunk for chunk, at in number.items()})
    async with (
        sim_engine(Echo(), tokenizer=tokenizer, **SMALL, **CARRIES[carry]) as engine,
        no_leaks(engine),
    ):
        scripts = [[number[chunk] for chunk in one.chunks] for one in asked]

        def streams() -> list[TokenStream]:
            return [
                say(engine, script, n=n, **one.params)
                for script, one in zip(scripts, asked, strict=True)
            ]

        late = streams()
        fast = await asyncio.gather(*map(items_of, streams()))
        awaited = await asyncio.gather(*map(at_once, streams()))
        slow = await asyncio.gather(*map(items_of, late))
        for at, one in enumerate(asked):
            text, reason, stop, count = one.expected()
            for choice in awaited[at].choices:
                told = choice.text, choice.finish_reason, choice.stop_reason
                assert (*told, len(choice.token_ids)) == (text, reason, stop, count)
            for items in (fast[at], slow[at]):
                for choice_number in range(n):
                    mine = [item for item in items if item.choice == choice_number]
                    assert "".join(texts_of(mine)) == text
                    assert len(mine) == count
                    assert (mine[-1].finish_reason, mine[-1].stop_reason) == (reason, stop)


async def at_once(stream: TokenStream) -> Completion:
    return await stream


@pytest.mark.parametrize("kind", ["byte", "byte_level", "sequence", "added", "metaspace"])
@pytest.mark.timeout(max(120, settings().max_examples))
@given(data=st.data())
def test_stop_strings_in_the_text_of_every_kind_of_tokenizer(
    kind: str, data: st.DataObject
) -> None:
    """For any ids: the pieces that come without stop strings, cut at the first match."""
    tokenizer = kind_of(kind)
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=24)
    prompt, output = data.draw(any_ids), data.draw(any_ids)
    *pieces, flushed = feed_all(tokenizer, prompt, output)[0]
    text = "".join(pieces)
    begin = data.draw(st.integers(0, len(text)))
    inside = text[begin : begin + data.draw(st.integers(1, 9))]
    stops = [inside or "x", *data.draw(st.lists(st.text("ab.\ufffd", min_size=1), max_size=2))]
    min_tokens = data.draw(st.integers(0, len(output)))
    deltas, match = feed_all(tokenizer, prompt, output, stop=stops, min_tokens=min_tokens)
    shown, expected = slow_search(pieces, stops, min_tokens - 1)
    assert match == expected
    assert "".join(deltas) == (shown if match is not None else text + flushed)
