"""What a prompt may be: cases 25 to 27 (the part before anything is scheduled)."""

from __future__ import annotations

import time
from array import array
from functools import partial
from typing import Any

import numpy as np
import pytest

from aneuron.errors import ContextTooLong, InvalidRequest
from aneuron.models.tokenizer import ByteTokenizer
from aneuron.params.messages import Conversation
from aneuron.prompt import check_length, tokenize, validate_text, validate_token_ids

LONG = 2**70


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        array("i", [1, 2, 3]),
        np.array([1, 2, 3], dtype=np.int64),
        np.array([1, 2, 3], dtype=np.uint8),
        [np.int32(1), 2, np.uint64(3)],
    ],
)
def test_token_ids_become_an_int32_copy(ids: Any) -> None:
    found = validate_token_ids(ids, vocab_size=4)
    assert found.dtype == np.int32
    assert found.tolist() == [1, 2, 3]


def test_token_ids_are_copied() -> None:
    mine = np.array([1, 2, 3], dtype=np.int32)
    found = validate_token_ids(mine, vocab_size=4)
    mine[:] = 0
    assert found.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], "empty"),
        (np.array([]), "empty"),
        (np.array([], dtype=np.int32), "empty"),
        ("abc", "not str"),
        (b"abc", "not bytes"),
        (7, "not int"),
        (None, "not NoneType"),
        ({1, 2}, "not set"),
        ([1, 2.0], r"\[1\] is 2\.0"),
        ([1, True], r"\[1\] is True"),
        ([1, "2"], r"\[1\] is '2'"),
        ([1, None], r"\[1\] is None"),
        ([[1, 2]], r"\[0\] is \[1, 2\]"),
        (np.array([True]), "bool"),
        (np.array([1.0]), "float64"),
        (array("d", [1.0]), "float64"),
        (np.array([[1, 2]]), "flat"),
        (np.array(1), "flat"),
        ([3, -1], r"\[1\] is -1"),
        ([3, 4, 99], r"\[1\] is 4, outside the vocabulary 0\.\.3"),
        ([0, LONG], rf"\[1\] is {LONG}"),
        ([0, 2**63], r"\[1\] is 9223372036854775808"),
        (np.array([0, 2**64 - 1], dtype=np.uint64), r"\[1\] is 18446744073709551615"),
    ],
)
def test_case_26_bad_token_ids_are_named(ids: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        validate_token_ids(ids, vocab_size=4)
    assert caught.value.param == "prompt_token_ids"


def test_token_ids_of_a_long_prompt_are_checked_fast() -> None:
    ids = list(range(100_000))
    best = min(_seconds(ids) for _ in range(5))
    assert best < 0.1


def _seconds(ids: list[int]) -> float:
    started = time.perf_counter()
    validate_token_ids(ids, vocab_size=100_000)
    return time.perf_counter() - started


@pytest.mark.parametrize("prompt", [b"bytes", 5, None, "half \ud83d of a pair"])
def test_text_that_cannot_be_encoded_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_text(prompt)
    assert caught.value.param == "prompt"


def test_case_25_prompt_over_the_pool_names_its_capacity() -> None:
    with pytest.raises(ContextTooLong, match=r"200 tokens.*pool.*128") as caught:
        check_length(200, max_model_len=4096, capacity=128)
    assert caught.value.param == "prompt"
    check_length(10, max_model_len=4096, capacity=128)


def test_case_26_empty_prompt() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        check_length(0, max_model_len=64, capacity=128)


@pytest.mark.parametrize("length", [64, 65])
def test_case_27_prompt_must_leave_room_for_one_token(length: int) -> None:
    with pytest.raises(ContextTooLong, match=rf"{length} tokens.*limit is 64"):
        check_length(length, max_model_len=64, capacity=128)
    check_length(63, max_model_len=64, capacity=128)


async def test_tokenize_text_and_messages() -> None:
    tokenizer = ByteTokenizer(add_bos=True)
    assert (await tokenize(tokenizer, "Hi")).tolist() == [256, 72, 105]
    ids = await tokenize(tokenizer, Conversation([{"role": "user", "content": "Hi"}]))
    assert bytes(ids.tolist()) == b"user: Hi\nassistant: "


async def test_case_27_tokenize_refuses_a_long_text_by_its_number_of_ids() -> None:
    check = partial(check_length, max_model_len=64, capacity=128)
    assert len(await tokenize(ByteTokenizer(), "x" * 63, check=check)) == 63
    with pytest.raises(ContextTooLong, match=r"65 tokens.*limit is 64"):
        await tokenize(ByteTokenizer(), "x" * 65, check=check)


async def test_case_26_tokenize_refuses_text_without_ids() -> None:
    check = partial(check_length, max_model_len=64, capacity=128)
    with pytest.raises(InvalidRequest, match="empty"):
        await tokenize(ByteTokenizer(), "", check=check)
    assert (await tokenize(ByteTokenizer(add_bos=True), "", check=check)).tolist() == [256]


async def test_tokenize_refuses_before_it_encodes() -> None:
    with pytest.raises(InvalidRequest) as caught:
        await tokenize(ByteTokenizer(), "\udc00")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest) as caught:
        await tokenize(ByteTokenizer(), Conversation([{"role": "user", "content": "\udc00"}]))
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequest) as caught:
        await tokenize(ByteTokenizer(), Conversation([]))
    assert caught.value.param == "messages"
