"""Ids → text in a stream: cases 30 to 32 and 36 to 38, and properties against slow references."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from aneuron.detokenize import Detokenizer, StopSearch
from aneuron.models.tokenizer import ByteTokenizer, HFTokenizer
from aneuron.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aneuron.prompt import Tokenizer as AnyTokenizer

BYTE = ByteTokenizer()
WORDS = ["▁", "▁leading", "▁x", "▁I", "▁am", "▁here", "▁Hi", "ing", "�"]


@lru_cache
def metaspace() -> HFTokenizer:
    """Words with the space in front, as sentencepiece writes them."""
    return _words(decoders.Metaspace())


@lru_cache
def byte_fallback() -> HFTokenizer:
    """The same as Llama 2 has it: unknown characters are spelled in byte tokens."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _words(decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)]))


def _words(decoder: decoders.Decoder) -> HFTokenizer:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoder
    return HFTokenizer(tokenizer, special_tokens={"eos_token": "</s>"})


@lru_cache
def byte_level() -> HFTokenizer:
    """A small byte-level BPE, as GPT-2, Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the end of the leading line, and 🔥🔥 is fire"] * 4, trainer)
    return HFTokenizer(tokenizer, special_tokens={"eos_token": "<|end|>"})


@lru_cache
def sequence() -> HFTokenizer:
    """The same, but a sequence of decoders: nothing tells from outside that it is of bytes."""
    tokenizer = Tokenizer.from_str(byte_level().tokenizer.to_str())
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    return HFTokenizer(tokenizer, special_tokens={"eos_token": "<|end|>"})


ADDED = ["a b", "日本", "\n", "é", "<\ufffd>", "Ġhi", "🔥", "<|x y|>", "«"]


@lru_cache
def added() -> HFTokenizer:
    """Byte-level, with added tokens: as plain text, or in the vocabulary's own letters."""
    tokenizer = Tokenizer.from_str(byte_level().tokenizer.to_str())
    tokenizer.add_tokens(ADDED[:7])
    tokenizer.add_special_tokens(ADDED[7:])
    return HFTokenizer(tokenizer, special_tokens={"eos_token": "<|end|>"})


def kind_of(name: str) -> AnyTokenizer:
    """Return the tokenizer of that name."""
    if name == "byte":
        return BYTE
    kinds = (added, byte_level, byte_fallback, metaspace, sequence)
    return next(kind for kind in kinds if kind.__name__ == name)()


def feed_all(
    tokenizer: AnyTokenizer, prompt: Sequence[int], output: Iterable[int], **sampling: object
) -> tuple[list[str], str | None]:
    """Return the deltas, the flush last, and the stop match."""
    params = SamplingParams.build(None, dict(sampling))
    detokenizer = Detokenizer(tokenizer, prompt, params)
    deltas = [detokenizer.feed(token_id) for token_id in output]
    return [*deltas, detokenizer.flush()], detokenizer.stop_match


def text_of(output: str, **sampling: object) -> tuple[str, str | None]:
    deltas, match = feed_all(BYTE, list(b"prompt"), list(output.encode()), **sampling)
    return "".join(deltas), match


def new_text(tokenizer: AnyTokenizer, prompt: list[int], output: list[int], *, skip: bool) -> str:
    """Return the reference: whole decodes; a character that the output completes is new."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    both = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    common = takewhile(lambda pair: pair[0] == pair[1], zip(before, both, strict=False))
    return both[len(list(common)) :]


# stop strings


def test_case_30_stop_string_over_many_tokens() -> None:
    assert text_of("ABCDEFGHIJK", stop="DEFGHIJ") == ("ABC", "DEFGHIJ")


def test_case_30_nothing_of_the_stop_string_is_ever_shown() -> None:
    deltas, _ = feed_all(BYTE, [1], list(b"ABCDEFGHIJK"), stop="DEFGHIJ")
    assert deltas == ["A", "B", "C", *[""] * 9]


@pytest.mark.parametrize("output", ["plea", "pleasant"])
def test_case_31_held_text_comes_with_the_flush(output: str) -> None:
    assert text_of(output[:4], stop="please") == ("plea", None)


def test_case_31_held_text_comes_when_it_is_no_stop_string() -> None:
    deltas, match = feed_all(BYTE, [1], list(b"pleasant"), stop="please")
    assert deltas == ["", "", "", "", "", "pleasa", "n", "t", ""]
    assert match is None


def test_case_32_min_tokens_passes_over_an_early_match() -> None:
    assert text_of("x\nyzw\nq", stop="\n", min_tokens=4) == ("x\nyzw", "\n")


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (2, "a"), (3, "a\nb"), (4, "a\nb")])
def test_min_tokens_counts_the_token_that_completes_the_match(min_tokens: int, text: str) -> None:
    assert text_of("a\nb\nc", stop="\n", min_tokens=min_tokens) == (text, "\n")


def test_include_stop_keeps_the_match_and_nothing_after_it() -> None:
    assert text_of("one. two.", stop=".", include_stop=True) == ("one.", ".")


def test_stop_inside_one_long_token_drops_the_rest_of_it() -> None:
    deltas, match = feed_all(metaspace(), ids("▁I"), ids("▁leading", "▁am"), stop="ad")
    assert deltas == [" le", "", ""]
    assert match == "ad"


def test_stop_of_two_that_end_together_the_longer_wins() -> None:
    assert text_of("xabc", stop=["bc", "abc"]) == ("x", "abc")


def test_stop_the_first_to_be_complete_wins() -> None:
    assert text_of("abcd", stop=["abcd", "b"]) == ("a", "b")


def test_stop_overlapping_itself() -> None:
    assert text_of("aaab", stop="aab") == ("a", "aab")


def test_stop_across_the_bytes_of_a_character() -> None:
    assert text_of("fin 🔥 more", stop=" 🔥") == ("fin", " 🔥")


def slow_search(pieces: list[str], stops: list[str], quiet: int) -> tuple[str, str | None]:
    """Return text and match by looking at every place of the whole text."""
    text = "".join(pieces)
    number = [index for index, piece in enumerate(pieces) for _ in piece]
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and number[end - 1] >= quiet:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


PIECES = st.lists(st.text("ab.", max_size=5), max_size=12)
STOPS = st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=4)


@pytest.mark.timeout(120)
@given(PIECES, STOPS, st.integers(0, 4))
def test_stop_search_equals_a_slow_search(pieces: list[str], stops: list[str], quiet: int) -> None:
    search = StopSearch(tuple(stops))
    shown = ""
    for index, piece in enumerate(pieces):
        shown += search.push(piece, may_match=index >= quiet)
        if search.match is not None:
            break
        so_far = "".join(pieces[: index + 1])
        assert so_far.startswith(shown)
        held = so_far[len(shown) :]  # exactly what may still become part of a match
        assert not held or any(stop.startswith(held) for stop in stops)
    shown += search.flush()
    assert (shown, search.match) == slow_search(pieces, stops, quiet)


@pytest.mark.timeout(120)
@given(st.text("ab.", max_size=20), STOPS, st.lists(st.integers(0, 20)))
def test_stop_search_does_not_see_token_borders(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(borders)]
    assert slow_search(pieces, stops, 0) == slow_search([text], stops, 0)
    search = StopSearch(tuple(stops), include_stop=True)
    shown = ""
    for piece in pieces:
        if search.match is None:
            shown += search.push(piece)
    before, match = slow_search([text], stops, 0)
    assert shown + search.flush() == before + (match or "")


# characters


def test_case_36_each_character_comes_with_its_last_byte() -> None:
    deltas, _ = feed_all(BYTE, [1], list("é🔥ç".encode()))
    assert deltas == ["", "é", "", "", "", "🔥", "", "ç", ""]


@pytest.mark.parametrize("kind", ["byte", "byte_level", "sequence", "byte_fallback"])
def test_case_37_prompt_ends_inside_a_character(kind: str) -> None:
    """The character whose last byte is generated counts as new; nothing else of the prompt."""
    tokenizer = kind_of(kind)
    spelled = list(map(byte_id(kind), "Hi 🔥!".encode()))
    deltas, _ = feed_all(tokenizer, spelled[:5], spelled[5:])
    assert "".join(deltas) == "🔥!"


@pytest.mark.parametrize("kind", ["byte", "byte_level", "sequence", "byte_fallback"])
def test_prompt_ends_inside_a_character_that_is_never_completed(kind: str) -> None:
    tokenizer = kind_of(kind)
    prompt = list(map(byte_id(kind), "Hi 🔥".encode()))[:5]
    # In byte_fallback any byte would join the broken run, so a whole word follows.
    output = ids("▁am") if kind == "byte_fallback" else list(map(byte_id(kind), b" am"))
    assert "".join(feed_all(tokenizer, prompt, output)[0]) == " am"


def test_case_38_metaspace_words_keep_their_spaces() -> None:
    for tokenizer in (metaspace(), byte_fallback()):
        for words in (["▁", "▁leading", "▁x"], ["▁I", "▁am", "▁here"]):
            for prompt in (ids("▁Hi"), ids("<s>", "▁Hi"), ids("<s>"), ids("▁I", "<s>")):
                deltas, _ = feed_all(tokenizer, prompt, ids(*words))
                assert "".join(deltas) == new_text(tokenizer, prompt, ids(*words), skip=True)
    deltas, _ = feed_all(metaspace(), ids("▁Hi"), ids("▁I", "▁am", "▁here"))
    assert deltas == [" I", " am", " here", ""]


def test_answer_ends_inside_a_character() -> None:
    assert feed_all(BYTE, [1], list(b"ok\xf0\x9f"))[0] == ["o", "k", "", "", "\ufffd"]
    output = list(map(byte_id("byte_level"), b"ok\xf0\x9f"))
    assert feed_all(byte_level(), [5], output)[0] == ["o", "k", "", "", "\ufffd"]
    assert byte_level().decode(output) == "ok\ufffd"


def test_flush_twice_gives_nothing_more() -> None:
    detokenizer = Detokenizer(BYTE, [1], SamplingParams(stop=("abc",)))
    detokenizer.feed(ord("a"))
    assert [detokenizer.flush(), detokenizer.flush()] == ["a", ""]


def test_a_broken_byte_does_not_end_the_stream() -> None:
    """ByteFallback spoils the whole run; what was shown stays, the rest goes on."""
    output = [*map(byte_id("byte_fallback"), b"\xe2\x82\xac\xff"), *ids("▁am", "▁here")]
    deltas, _ = feed_all(byte_fallback(), ids("▁Hi"), output)
    assert "".join(deltas) == "€\ufffd am here"


@pytest.mark.parametrize("kind", ["byte_level", "sequence", "byte_fallback"])
def test_endless_broken_bytes_are_let_go_in_time(kind: str) -> None:
    """Holding them all would make each step slower than the last."""
    tokenizer = kind_of(kind)
    output = list(map(byte_id(kind), b"\xef" * 500))
    output += ids("▁am") if kind == "byte_fallback" else list(map(byte_id(kind), b" am"))
    deltas, _ = feed_all(tokenizer, [70], output)
    assert "".join(deltas) == "\ufffd" * 500 + " am"
    assert len("".join(deltas[:100])) > 60


def test_special_tokens_are_left_out_or_shown() -> None:
    output = ids("▁I", "<s>", "▁am", "</s>")
    assert "".join(feed_all(metaspace(), ids("▁Hi"), output)[0]) == " I am"
    shown = feed_all(metaspace(), ids("▁Hi"), output, skip_special_tokens=False)[0]
    assert "".join(shown) == " I<s> am</s>"


def test_byte_tokenizer_shows_ids_beyond_bytes() -> None:
    output = [72, 258, 256, 1000, 257]
    assert "".join(feed_all(BYTE, [], output)[0]) == "H<258><1000>"
    shown = feed_all(BYTE, [], output, skip_special_tokens=False)[0]
    assert "".join(shown) == "H<258><start><1000><end>"


@pytest.mark.parametrize("kind", ["byte", "byte_level", "sequence", "added", "metaspace"])
@pytest.mark.timeout(120)
@given(data=st.data())
def test_joined_deltas_equal_whole_decodes(kind: str, data: st.DataObject) -> None:
    """For any ids, valid text or not; only the last delta may hold a broken last character."""
    tokenizer = kind_of(kind)
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40)
    text = st.text("ab �🔥é€\n", max_size=12).map(lambda t: _encode(tokenizer, kind, t))
    prompt, output = data.draw(any_ids | text), data.draw(any_ids | text)
    skip = data.draw(st.booleans())
    deltas, _ = feed_all(tokenizer, prompt, output, skip_special_tokens=skip)
    assert "".join(deltas) == new_text(tokenizer, prompt, output, skip=skip)


@pytest.mark.parametrize("kind", ["byte_level", "added"])
def test_each_id_of_a_byte_level_vocabulary(kind: str) -> None:
    """Whole characters come at once, ids that show nothing or do not exist show nothing."""
    tokenizer = kind_of(kind)
    for skip in (True, False):
        for token_id in range(tokenizer.vocab_size + 3):
            deltas, _ = feed_all(tokenizer, [70], [token_id], skip_special_tokens=skip)
            text = tokenizer.decode([token_id], skip_special_tokens=skip)
            assert deltas in ([text, ""], ["", text])
            assert deltas[0] or not text or "\ufffd" in text


def test_prompt_ends_inside_a_character_before_many_special_tokens() -> None:
    """What is skipped does not count: the answer still completes the character."""
    output = list(map(byte_id("byte_level"), "🔥!".encode()))
    end = byte_level().tokenizer.token_to_id("<|end|>")
    assert end is not None
    deltas, _ = feed_all(byte_level(), [*output[:2], *[end] * 40], output[2:])
    assert "".join(deltas) == "🔥!"


@pytest.mark.timeout(120)
@given(st.text("ab 🔥é€", max_size=30), st.integers(0, 60))
def test_byte_fallback_joined_deltas_equal_whole_decodes(text: str, cut: int) -> None:
    """For valid text, cut anywhere, inside a character too."""
    whole = [byte_id("byte_fallback")(byte) for byte in text.encode()]
    deltas, _ = feed_all(byte_fallback(), whole[:cut], whole[cut:])
    assert "".join(deltas) == _after(text.encode(), cut)


def _after(text: bytes, cut: int) -> str:
    """Return the new text: characters whose last byte is at or after the cut."""
    before = text[:cut].decode(errors="ignore")
    expected = text.decode()[len(before) :]
    # Strip() takes the very first space of the whole text.
    return expected[1:] if not before and expected.startswith(" ") else expected


def _encode(tokenizer: AnyTokenizer, kind: str, text: str) -> list[int]:
    if kind == "metaspace":
        return ids(*[f"▁{word}" for word in text.split() if f"▁{word}" in WORDS])
    if isinstance(tokenizer, HFTokenizer):
        return list(tokenizer.tokenizer.encode(text).ids)
    return list(text.encode())


def ids(*tokens: str) -> list[int]:
    found = [metaspace().tokenizer.token_to_id(token) for token in tokens]
    assert None not in found
    return [token_id for token_id in found if token_id is not None]


def byte_id(kind: str) -> _ByteId:
    return _ByteId(kind)


class _ByteId:
    """The id of one byte in each kind of vocabulary."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, byte: int) -> int:
        if self.kind == "byte_fallback":
            return byte + 1
        if self.kind in ("byte_level", "sequence"):
            char = _byte_alphabet()[byte]
            token_id = byte_level().tokenizer.token_to_id(char)
            assert token_id is not None
            return token_id
        return byte


@lru_cache
def _byte_alphabet() -> list[str]:
    """Return GPT-2's printable character for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain}
    table |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]
