"""The tokenizer of the benchmarks: a real one, made in memory, without files or network.

Comes in: nothing. Goes out: a byte-level BPE, as GPT-2 and Llama 3 have it, whose decoding is
that of any model's tokenizer; and ids that it decodes to whole words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aneuron.models.tokenizer import HFTokenizer

__all__ = ["word_ids", "word_tokenizer"]

_WORDS = (
    " the of and to in a is that for it as was with be by on not he his but at are this have "
    "from or had an they which one you were all her she there would their we him been has when "
    "who will no more if out so what up said about than into them can only other time new some"
)


def word_tokenizer() -> HFTokenizer:
    """Return a real byte-level BPE (as GPT-2's and Llama 3's): 256 bytes and some words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from aneuron.models.tokenizer import HFTokenizer

    vocab, merges = _vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return HFTokenizer(tokenizer)


def word_ids() -> list[int]:
    """Return the ids of the whole words of `word_tokenizer`."""
    vocab, _ = _vocabulary()
    return [vocab[f"Ġ{word}"] for word in _WORDS.split()]


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    from tokenizers import pre_tokenizers

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = []
    for word in _WORDS.split():
        spelled = "Ġ"  # how byte-level BPE writes a space
        for letter in word:
            if spelled + letter not in vocab:
                merges.append((spelled, letter))
                vocab[spelled + letter] = len(vocab)
            spelled += letter
    return vocab, merges
