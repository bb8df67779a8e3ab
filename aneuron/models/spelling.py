"""What single ids spell: text, or bytes where they end inside a character.

Comes in: a token as its vocabulary writes it. Goes out: its bytes, for the streams of text that
tokenizers make, and for grammars. Pure.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import tokenizers

__all__ = ["ByteLevelPieces", "BytePieces", "spell_byte", "speller"]

_BYTE_TOKEN_CHARS = len("<0x0A>")


class ByteLevelPieces(dict[int, str | bytes]):
    """What each id of a byte-level BPE spells, as far as they were asked for."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(skipped, ""))
        self._token_of = tokenizer.id_to_token

    def __missing__(self, token_id: int) -> str | bytes:
        piece = self[token_id] = _piece(_unmap(self._token_of(token_id) or ""))
        return piece


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """Return the byte of each character that byte-level vocabularies write it with.

    Printable ones stand for themselves, the others for U+0100 and on: `bytes_to_unicode` of
    GPT-2's encoder.py.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in plain)
    table = {chr(byte): byte for byte in plain}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


def _unmap(token: str) -> bytes:
    """Return the bytes of a byte-level token; one that was added may be plain text."""
    table = _byte_of_char()
    try:
        return bytes(table[char] for char in token)
    except KeyError:
        return token.encode()


def _unescape(token: str) -> bytes:
    """Return the bytes of a SentencePiece token: `<0x0A>` is one byte, U+2581 a space."""
    if len(token) == _BYTE_TOKEN_CHARS and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return token.encode()
    return token.replace("\u2581", " ").encode()


def speller(tokenizer: tokenizers.Tokenizer) -> Callable[[str], bytes] | None:
    """Return what tells the bytes of a token, by the kind of vocabulary; None if unknown."""
    state = tokenizer.decoder and json.loads(tokenizer.decoder.__getstate__())
    parts = state.get("decoders", [state]) if state else []
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return _unmap
    return _unescape if kinds & {"ByteFallback", "Metaspace"} else None


def _piece(spelled: bytes) -> str | bytes:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return spelled


class BytePieces(dict[int, str | bytes]):
    """What each id of `ByteTokenizer` spells: text where it is whole characters, else bytes."""

    def __init__(self, skipped: frozenset[int]) -> None:
        super().__init__((token_id, _piece(spell_byte(token_id))) for token_id in range(258))
        self.update(dict.fromkeys(skipped, ""))

    def __missing__(self, token_id: int) -> str:
        return f"<{token_id}>"  # not kept: there may be a million of them


def spell_byte(token_id: int) -> bytes:
    """Return the bytes of one id of `ByteTokenizer`."""
    if token_id < 256:
        return bytes((token_id,))
    return {256: b"<start>", 257: b"<end>"}.get(token_id) or b"<%d>" % token_id
