"""Log probabilities of tokens, in the three shapes that clients read.

Comes in: token ids and what the engine says of each (`TokenLogprobs`), and a function that spells
an id as bytes. Goes out: chat's list of tokens, completions' four columns, vLLM's prompt
logprobs. Pure.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from typing import TYPE_CHECKING

from aneuron.server.wire.common import Body

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aneuron.outputs import TokenLogprobs

__all__ = [
    "ChatLogprobs",
    "CompletionLogprobs",
    "LogprobColumns",
    "PromptLogprob",
    "TokenLogprob",
    "TopLogprob",
    "chat_logprobs",
    "prompt_logprobs",
]

_FLOOR = -9999.0  # JSON has no infinity; others say the same


class TopLogprob(Body, frozen=True, kw_only=True):
    """A token that was likely; `bytes` tells half a character, where `token` cannot."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Body, frozen=True, kw_only=True):
    """A token of the answer, and those that were likely in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Body, frozen=True, kw_only=True):
    """The tokens of an answer, or of a delta."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Body, frozen=True, kw_only=True):
    """The same in columns; the first token of an echoed prompt has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def extend(self, more: CompletionLogprobs) -> None:
        """Add the columns of the tokens behind."""
        self.tokens.extend(more.tokens)
        self.token_logprobs.extend(more.token_logprobs)
        self.top_logprobs.extend(more.top_logprobs)
        self.text_offset.extend(more.text_offset)


class PromptLogprob(Body, frozen=True, kw_only=True):
    """What a token of a prompt, or a likely one in its place, has."""

    logprob: float
    rank: int | None
    decoded_token: str


def chat_logprobs(
    ids: Sequence[int], entries: Sequence[TokenLogprobs], spell: Callable[[int], bytes]
) -> ChatLogprobs:
    """Return what chat completions tell of tokens.

    Args:
        ids: of the tokens.
        entries: what the engine says of each.
        spell: gives the bytes of an id.
    """
    told = []
    for token_id, entry in zip(ids, entries, strict=True):
        top = [_top(one, logprob, spell) for one, logprob in entry.top]
        own = _top(token_id, entry.logprob, spell)
        told.append(
            TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)
        )
    return ChatLogprobs(content=told)


def _top(token_id: int, logprob: float, spell: Callable[[int], bytes]) -> TopLogprob:
    spelled = spell(token_id)
    return TopLogprob(token=_text(spelled), logprob=_finite(logprob), bytes=list(spelled))


def _text(spelled: bytes) -> str:
    return spelled.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(_FLOOR, logprob)  # also where it is no number


class LogprobColumns:
    """Makes the columns of one choice of a completion, piece by piece.

    Args:
        spell: gives the bytes of an id.
        hidden: ids that the text leaves out.
    """

    def __init__(
        self, spell: Callable[[int], bytes], *, hidden: frozenset[int] = frozenset()
    ) -> None:
        self._spell = spell
        self._hidden = hidden
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(
        self, ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """Return the columns of the next tokens; offsets are in characters, from the first on."""
        spelled = [self._spell(token_id) for token_id in ids]
        told = [(one, entry) for one, entry in zip(spelled, entries, strict=True)]
        return CompletionLogprobs(
            tokens=[_name(one) for one in spelled],
            token_logprobs=[None if entry is None else _finite(entry.logprob) for _, entry in told],
            top_logprobs=[None if entry is None else self._row(one, entry) for one, entry in told],
            text_offset=[
                self._advance(b"" if token_id in self._hidden else one)
                for token_id, one in zip(ids, spelled, strict=True)
            ],
        )

    def _row(self, own: bytes, entry: TokenLogprobs) -> dict[str, float]:
        row: dict[str, float] = {}
        for token_id, logprob in entry.top:  # the likeliest first: it keeps a name that two have
            row.setdefault(_name(self._spell(token_id)), _finite(logprob))
        row.setdefault(_name(own), _finite(entry.logprob))
        return row

    def _advance(self, spelled: bytes) -> int:
        offset = self._offset
        self._offset += len(self._decoder.decode(spelled))
        return offset


def _name(spelled: bytes) -> str:
    r"""Return a token as text; half a character is `bytes:\xf0\x9f`, as OpenAI has it."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def prompt_logprobs(
    ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    spell: Callable[[int], bytes],
) -> list[dict[str, PromptLogprob] | None]:
    """Return what vLLM's `prompt_logprobs` tell: for each token likely ids, and its own."""
    return [
        None if entry is None else _prompt_row(token_id, entry, spell)
        for token_id, entry in zip(ids, entries, strict=True)
    ]


def _prompt_row(
    own: int, entry: TokenLogprobs, spell: Callable[[int], bytes]
) -> dict[str, PromptLogprob]:
    ranked = {one: (rank, logprob) for rank, (one, logprob) in enumerate(entry.top, 1)}
    rows: dict[int, tuple[int | None, float]] = {own: (None, entry.logprob), **ranked}
    return {
        str(one): PromptLogprob(
            logprob=_finite(logprob), rank=rank, decoded_token=_text(spell(one))
        )
        for one, (rank, logprob) in rows.items()
    }
