"""What ids spell, for grammars: the bytes of each, by the kind of vocabulary."""

from __future__ import annotations

import random
from typing import Any

import llguidance
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from aneuron.models.catalog import resolve
from aneuron.models.tokenizer import ByteTokenizer, HFTokenizer


def byte_level(*added: AddedToken) -> HFTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "Ġa", "Ã©", "aĊ"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(added))
    return HFTokenizer(tokenizer)


def spelled(tokenizer: HFTokenizer) -> tuple[dict[str, bytes], set[str]]:
    vocabulary = tokenizer.spell_vocabulary()
    assert vocabulary is not None
    texts, special_ids = vocabulary
    assert len(texts) == tokenizer.vocab_size
    names = [tokenizer.tokenizer.id_to_token(token_id) or "" for token_id in range(len(texts))]
    return dict(zip(names, texts, strict=True)), {names[token_id] for token_id in special_ids}


def test_byte_level() -> None:
    added = [AddedToken("<|end|>", special=True), AddedToken("<note é>"), AddedToken("two words")]
    texts, special = spelled(byte_level(*added))
    assert sorted(text for text in texts.values() if len(text) == 1) == [
        bytes((byte,)) for byte in range(256)
    ]
    assert texts["Ġa"] == b" a"
    assert texts["Ã©"] == "é".encode()
    assert texts["aĊ"] == b"a\n"
    assert texts["<note é>"] == "<note é>".encode()
    assert texts["two words"] == b"two words"
    assert special == {"<|end|>"}


def sentence_piece(decoder: Any) -> HFTokenizer:
    words = ["<unk>", "<0x0A>", "<0xFF>", "<0xZZ>", "▁", "▁a", "é"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    if decoder is not None:
        tokenizer.decoder = decoder
    return HFTokenizer(tokenizer)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]
        ),
        decoders.Metaspace(),
    ],
)
def test_sentence_piece(decoder: Any) -> None:
    texts, special = spelled(sentence_piece(decoder))
    assert texts == {
        "<unk>": b"<unk>",
        "<0x0A>": b"\n",
        "<0xFF>": b"\xff",
        "<0xZZ>": b"<0xZZ>",
        "▁": b" ",
        "▁a": b" a",
        "é": "é".encode(),
    }
    assert not special


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.CTC()])
def test_other_kinds_are_not_guessed(decoder: Any) -> None:
    assert sentence_piece(decoder).spell_vocabulary() is None


def test_bytes() -> None:
    texts, special_ids = ByteTokenizer(vocab_size=1000).spell_vocabulary()
    assert texts[:256] == [bytes((byte,)) for byte in range(256)]
    assert len(texts) == 258
    assert special_ids == {256, 257}


@pytest.mark.tiny
def test_smollm2_is_read_as_llguidance_reads_it() -> None:
    tokenizer = HFTokenizer.load(resolve("smollm2-135m").path)
    vocabulary = tokenizer.spell_vocabulary()
    assert vocabulary is not None
    texts, special_ids = vocabulary
    theirs = llguidance.LLTokenizer(tokenizer.tokenizer.to_str(), slices=[])
    assert texts == [theirs.decode_bytes([token_id]) for token_id in range(len(texts))]
    assert special_ids == {i for i in range(len(texts)) if theirs.is_special_token(i)}
    ids = random.Random(0).choices(range(100, len(texts)), k=1000)
    assert b"".join(texts[i] for i in ids).decode("utf-8", "replace") == tokenizer.decode(ids)
