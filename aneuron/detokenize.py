"""Ids → the text that may be shown: nothing of it is ever taken back.

Comes in: one new token id at a time, in order. Goes out: the text that it releases;
incomplete characters and possible beginnings of a stop string are held back, and
`stop_match` tells when a stop string is complete. One `Detokenizer` per request, used by
the task that publishes tokens; nothing here waits.
"""

from __future__ import annotations

import codecs
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import tokenizers
    from tokenizers.decoders import DecodeStream

    from aneuron.params import SamplingParams
    from aneuron.prompt import Ids, Tokenizer

__all__ = ["ByteStream", "Detokenizer", "HFStream", "StopSearch"]

_REPLACEMENT = "\ufffd"
_SEED_IDS = 16  # prompt ids that set the context of the first new token
_MAX_SEED_IDS = 1024  # the same, where the last ones alone give no text
_MAX_HELD_IDS = 32  # DecodeStream decodes all it holds at each step: keep that bounded
_MAX_CHAR_BYTES = 4  # of UTF-8, so at most so many ids for one character


class Detokenizer:
    """The text of one request, released as soon as it is certain.

    Without a stop match, all `feed` and the `flush` at the end together give
    `decode(prompt + output)` less what it has in common with `decode(prompt)`: all of it,
    unless the prompt ends inside a character; the new ids may complete that one, and then
    it counts as new.

    Attributes:
        step: the decoder's own: `feed` without stop strings, None for no text.
        stop_match: the stop string that ended the text, once it is complete.
    """

    __slots__ = ("_flush", "_min_tokens", "_num_fed", "_search", "step", "stop_match")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Ids, params: SamplingParams) -> None:
        stream = tokenizer.decode_stream(
            prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self.step = stream.step
        self._flush = stream.flush
        self._search = (
            StopSearch(params.stop, include_stop=params.include_stop) if params.stop else None
        )
        self._min_tokens = params.min_tokens
        self._num_fed = 0
        self.stop_match: str | None = None

    def feed(self, token_id: int) -> str:
        """Return the text that may be shown now, maybe none.

        A stop string counts if the token that completes it is at least number `min_tokens`
        (counted from 1). From the match on, nothing more comes.
        """
        if self._search is None:
            return self.step(token_id) or ""
        if self.stop_match is not None:
            return ""
        self._num_fed += 1
        text = self.step(token_id)
        if not text:
            return ""
        text = self._search.push(text, may_match=self._num_fed >= self._min_tokens)
        self.stop_match = self._search.match
        return text

    def flush(self) -> str:
        """Return what was held back, at an end without a stop match.

        A character that the answer ends inside becomes U+FFFD; it ends no stop string.
        """
        if self.stop_match is not None:
            return ""
        held = "" if self._search is None else self._search.flush()
        return held + self._flush()


class StopSearch:
    """Finds the first of several strings to be complete in a text that comes in pieces.

    The match that ends first wins; of those that end at the same character, the one that
    starts first. So the result does not depend on how the text is cut into pieces.

    Attributes:
        match: the string that was found.
    """

    __slots__ = ("_first", "_held", "_include_stop", "_states", "_stops", "match")

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stops = [(stop, _fallbacks(stop)) for stop in stops]
        self._states = [0] * len(stops)  # characters of each that the text ends with
        self._first = frozenset(stop[0] for stop in stops)
        self._include_stop = include_stop
        self._held = ""
        self.match: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Return what of the text so far cannot become part of a match, or the rest before one.

        Args:
            text: the next piece.
            may_match: whether a string counts that is complete within this piece.
        """
        first = self._first
        begun = bool(self._held)
        if not begun and first.isdisjoint(text):
            return text
        text = self._held + text
        for end in range(len(self._held) + 1, len(text) + 1):
            char = text[end - 1]
            if not begun and char not in first:
                continue
            length = self._advance(char)
            begun = any(self._states)
            if length and may_match:
                self.match = text[end - length : end]
                self._held = ""
                return text[: end if self._include_stop else end - length]
        certain = len(text) - max(self._states)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Return what is held back; nothing is held after it."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Take one character; return the length of the longest string it completes, or 0."""
        longest = 0
        states = self._states
        for index, (stop, table) in enumerate(self._stops):
            state = states[index]
            while state and stop[state] != char:
                state = table[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                longest = max(longest, state)
                state = table[state - 1]
            states[index] = state
        return longest


@lru_cache(maxsize=256)
def _fallbacks(stop: str) -> tuple[int, ...]:
    """Return, for each prefix, the length of its longest proper prefix that also ends it.

    With it (Knuth, Morris, Pratt) the cost per character does not grow with the string.
    """
    table = [0]
    for char in stop[1:]:
        state = table[-1]
        while state and stop[state] != char:
            state = table[state - 1]
        table.append(state + (stop[state] == char))
    return tuple(table)


class HFStream:
    """DecodeStream, and what it lacks: a flush, a bound, a way on after its errors."""

    # _ids: the seed and all new ids; the text of _ids[:_done] is given out.
    # _carry: how the prompt's last, incomplete character reads if nothing completes it.

    __slots__ = ("_carry", "_done", "_ids", "_skipped", "_stream", "_tokenizer")
    _carry: str
    _done: int
    _ids: list[int]
    _stream: DecodeStream

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, prompt_ids: Ids, skipped: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._start(*self._seed(prompt_ids))

    def step(self, token_id: int) -> str | None:
        """Return the text that this id completes."""
        if token_id in self._skipped:
            return None
        self._ids.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001, it has no class of its own for "not additive here"
            return self._resume()
        if text is None:
            return self._release() if len(self._ids) - self._done > _MAX_HELD_IDS else None
        self._done = len(self._ids)
        return self._less_carry(text) if self._carry else text

    def flush(self) -> str:
        """Return the held text, broken characters included; nothing is held after it."""
        if self._done == len(self._ids):
            return ""
        text = self._less_carry(self._text(len(self._ids)))
        self._done = len(self._ids)
        return text

    def _seed(self, prompt_ids: Ids) -> tuple[list[int], str]:
        """Return the last prompt ids and their text, which begins with a whole character."""
        length = _SEED_IDS
        while True:
            seed = _tail(prompt_ids, length, self._skipped)
            text = self._decode(seed)
            sound = text and not text.startswith(_REPLACEMENT)
            if sound or length >= min(len(prompt_ids), _MAX_SEED_IDS):
                return seed, text
            length *= 4

    def _start(self, seed: list[int], text: str) -> None:
        """Begin after `seed`; the ids of a last, incomplete character stay open."""
        from tokenizers.decoders import DecodeStream

        cut = len(seed)
        while text.endswith(_REPLACEMENT):
            cut -= 1
            if len(seed) - cut > 2 * _MAX_CHAR_BYTES:  # broken text, not one character
                seed, cut = seed[cut:], 0
            text = self._decode(seed[:cut])
        self._ids = seed
        self._done = cut
        self._carry = ""
        self._stream = DecodeStream(ids=seed[:cut])
        if cut < len(seed):
            self._carry = self._text(len(seed))
            self._stream.step(self._tokenizer, seed[cut:])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _text(self, end: int) -> str:
        """Return the text of the held ids up to `end`, spaced as it stands after the rest."""
        context = self._ids[max(0, self._done - _SEED_IDS) : self._done]
        held = self._ids[self._done : end]
        before = self._decode(context)
        both = self._decode(context + held)
        # A broken byte can spoil characters that are given out already; those stay.
        return both[len(before) :] if both.startswith(before) else self._decode(held)

    def _less_carry(self, text: str) -> str:
        text = _after_common(self._carry, text)
        self._carry = ""
        return text

    def _resume(self) -> str | None:
        text = self.flush()
        self._start(*self._seed(self._ids))
        return text or None

    def _release(self) -> str | None:
        """Give out all held text but the last characters, which may be incomplete."""
        from tokenizers.decoders import DecodeStream

        size = len(self._ids)
        whole = self._text(size)
        for cut in range(size - _MAX_CHAR_BYTES, size - 2 * _MAX_CHAR_BYTES, -1):
            head, rest = self._text(cut), self._ids[cut:]
            if head + self._decode(rest) == whole:  # no character spans the cut
                self._done = cut
                self._stream = DecodeStream()
                self._stream.step(self._tokenizer, rest)
                return self._less_carry(head) or None
        return None


class ByteStream:
    """The text of ids each of which spells bytes, the same ones in any context.

    `pieces` has them by id, as text where they are whole characters, which needs no
    decoding. Python's incremental UTF-8 decoder joins the others; it replaces broken bytes
    as Rust does, so as a whole decode does.
    """

    __slots__ = ("_carry", "_decoder", "_is_open", "_pieces")

    def __init__(self, prompt_ids: Ids, pieces: Mapping[int, str | bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(_last_bytes(prompt_ids, pieces))
        self._carry = self._decoder.getstate()[0].decode("utf-8", "replace")
        self._is_open = bool(self._carry)  # inside a character

    def step(self, token_id: int) -> str:
        """Return the text that this id completes, maybe none."""
        piece = self._pieces[token_id]
        if isinstance(piece, str) and not self._is_open:
            return piece
        text = self._decoder.decode(_bytes_of(piece))
        self._is_open = bool(self._decoder.getstate()[0])
        return self._less_carry(text)

    def flush(self) -> str:
        """Return U+FFFD where the last character is incomplete."""
        self._is_open = False
        return self._less_carry(self._decoder.decode(b"", final=True))

    def _less_carry(self, text: str) -> str:
        if text and self._carry:
            text = _after_common(self._carry, text)
            self._carry = ""
        return text


def _bytes_of(piece: str | bytes) -> bytes:
    return piece.encode() if isinstance(piece, str) else piece


def _last_bytes(ids: Ids, pieces: Mapping[int, str | bytes]) -> bytes:
    """Return enough of the prompt's end to know whether it is inside a character."""
    spelled = b""
    for index in range(len(ids) - 1, max(len(ids) - _MAX_SEED_IDS, 0) - 1, -1):
        spelled = _bytes_of(pieces[int(ids[index])]) + spelled
        if len(spelled) >= _MAX_CHAR_BYTES:
            break
    return spelled


def _after_common(prefix: str, text: str) -> str:
    """Return `text` from the first character on in which it differs from `prefix`."""
    length = 0
    for ours, theirs in zip(prefix, text, strict=False):
        if ours != theirs:
            break
        length += 1
    return text[length:]


def _tail(ids: Ids, length: int, skipped: frozenset[int]) -> list[int]:
    """Return the last `length` ids, less those that are skipped."""
    part = ids[-length:] if length else ()
    items = part.tolist() if isinstance(part, np.ndarray) else part
    return [item for item in items if item not in skipped]
