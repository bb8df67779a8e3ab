"""Single fields of a request: what the call makes of them, and refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from aneuron import InvalidRequest, SamplingParams
from aneuron.params import checks

WHOLE = 151_936  # ids; a vocabulary in use


def refusal(**params: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**params)
    [name] = params
    assert caught.value.param == name
    assert name in str(caught.value)
    return str(caught.value)


# ── nothing, and arrays ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "bad_words", "logits_processors"])
@pytest.mark.parametrize("nothing", [None, (), []], ids=str)
def test_nothing_is_nothing(name: str, nothing: Any) -> None:
    params = SamplingParams(**{name: nothing})
    assert params == SamplingParams()
    assert getattr(params, name) == ()
    assert params.needs_logits is None
    assert not params.is_guided


@pytest.mark.parametrize(
    "name",
    ["stop", "stop_token_ids", "bad_words", "logits_processors", "allowed_token_ids", "logit_bias"],
)
@pytest.mark.parametrize(
    "array", [np.array([]), np.array([1]), np.array([1, 2]), np.array(["a"]), np.array(["a", "b"])],
    ids=str,
)  # fmt: skip
def test_arrays_are_refused_by_name(name: str, array: Any) -> None:
    assert "must " in refusal(**{name: array})


# ── logit_bias ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "bias",
    [{"50256": -100, "7": 1.5}, {7: 1.5, "50256": -100}, {np.int32(7): 1.5, "50256": -100}],
    ids=str,
)
def test_a_bias_may_have_its_ids_as_json_has_them(bias: Any) -> None:
    params = SamplingParams(logit_bias=bias)
    assert params.logit_bias == ((7, 1.5), (50256, -100.0))
    assert [type(one) for pair in params.logit_bias for one in pair] == [int, float] * 2
    assert params == SamplingParams(logit_bias=params.logit_bias)


@pytest.mark.parametrize(
    ("bias", "says"),
    [
        ({"": 1}, "must be an integer"),
        ({"a": 1}, "must be an integer"),
        ({"-1": 1}, "must be an integer"),
        ({" 1": 1}, "must be an integer"),
        ({"1.0": 1}, "must be an integer"),
        ({"1_0": 1}, "must be an integer"),
        ({"\u0661": 1}, "must be an integer"),  # a digit, in Arabic
        ({"\u00b2": 1}, "must be an integer"),  # a superscript
        ({"9" * 5000: 1}, "must be an integer"),
        ({"2147483648": 1}, "must be in 0..2147483647"),
        ({True: 1}, "must be an integer"),
        ({-1: 1}, "must be in 0.."),
        ({5: 1, "5": 2}, "names id 5 twice"),
        ({"5": 1, "05": 2}, "names id 5 twice"),
        ({"5": 101}, "must be in -100..100"),
        ({"5": "1"}, "must be a number"),
        (((1, 2, 3),), "must map ids to numbers"),
        (dict.fromkeys(range(1025), 1), "over 1024 ids"),
    ],
)
def test_what_is_no_bias_is_refused(bias: Any, says: str) -> None:
    assert says in refusal(logit_bias=bias)


# ── allowed_token_ids ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "ids",
    [
        [9, 2, 5],
        (2, 5, 9, 9, 2),
        {2, 5, 9},
        frozenset((2, 5, 9)),
        [np.int64(9), 5, np.uint8(2), np.int32(5)],
    ],
    ids=str,
)
def test_allowed_ids_are_sorted_each_once(ids: Any) -> None:
    allowed = SamplingParams(allowed_token_ids=ids).allowed_token_ids
    assert allowed == (2, 5, 9)
    assert {type(one) for one in allowed} == {int}


def test_allowed_ids_may_be_a_range() -> None:
    down: Any = range(9, 0, -2)
    assert SamplingParams(allowed_token_ids=down).allowed_token_ids == (1, 3, 5, 7, 9)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], "must hold 1..262144 ids"),
        (range(2**18 + 1), "must hold 1..262144 ids"),
        ("12", "must be a list of ids"),
        ({1: 2}, "must be a list of ids"),
        ([1, True], "must be an integer, not True"),
        ([1, np.True_], "must be an integer, not np.True_"),
        ([1, 2.0], "must be an integer, not 2.0"),
        ([1, None], "must be an integer, not None"),
        ([1, "2"], "must be an integer, not '2'"),
        ([1, [2]], "must be an integer, not [2]"),
        ([3, -1], "must be at least 0, not -1"),
        ([np.int64(3), np.int64(-1)], "must be at least 0, not -1"),
        ([3, 2**31], "must be in 0..2147483647, not 2147483648"),
        ([3, 10**30], "must be in 0..2147483647"),
        ([3, np.uint64(2**63)], "must be in 0..2147483647"),
    ],
    ids=str,
)
def test_what_are_no_allowed_ids_is_refused(ids: Any, says: str) -> None:
    assert says in refusal(allowed_token_ids=ids)


@pytest.mark.parametrize("kind", [int, np.int64])
def test_a_vocabulary_of_allowed_ids_is_not_checked_id_by_id(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    check_int = checks.check_int

    def counted(name: str, *args: Any, **options: Any) -> None:
        calls.append(name)
        check_int(name, *args, **options)

    monkeypatch.setattr(checks, "check_int", counted)
    ids = [kind(one) for one in reversed(range(WHOLE))]
    assert checks.check_allowed(ids) == tuple(range(WHOLE))
    assert len(calls) <= 2


# ── params of a call laid over others ───────────────────────────────────────────────────


def test_fields_that_a_call_leaves_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(
        allowed_token_ids=(3, 1), logit_bias={4: 1}, grammar={"regex": "a"}, stop=("x",),
        logits_processors=lambda output_ids, logits: logits, temperature=0.5,
    )  # fmt: skip
    for name in ("check_allowed", "check_bias"):
        monkeypatch.setattr(f"aneuron.params.{name}", lambda _: pytest.fail("it was checked"))
    made = SamplingParams.build(params, {"max_tokens": 5})
    assert made.max_tokens == 5
    assert params.max_tokens is None
    for name in SamplingParams.__dataclass_fields__:
        if name != "max_tokens":
            assert getattr(made, name) == getattr(params, name), name
    assert made.allowed_token_ids is params.allowed_token_ids
    assert made.logit_bias is params.logit_bias
    assert made.grammar is params.grammar


@pytest.mark.parametrize(
    ("laid", "kept"),
    [
        ({"allowed_token_ids": [7, 6]}, ((6, 7), ((4, 1.0),))),
        ({"allowed_token_ids": None}, (None, ((4, 1.0),))),
        ({"logit_bias": {"8": 2}}, ((1, 3), ((8, 2.0),))),
        ({"logit_bias": None}, ((1, 3), None)),
        ({"logit_bias": {}, "allowed_token_ids": (2,)}, ((2,), None)),
    ],
    ids=str,
)
def test_a_call_may_change_or_drop_a_field(laid: dict[str, Any], kept: tuple[Any, Any]) -> None:
    params = SamplingParams(allowed_token_ids=(3, 1), logit_bias={4: 1})
    made = SamplingParams.build(params, laid)
    assert (made.allowed_token_ids, made.logit_bias) == kept
    assert (params.allowed_token_ids, params.logit_bias) == ((1, 3), ((4, 1.0),))


@pytest.mark.parametrize(
    "laid", [{"allowed_token_ids": [-1]}, {"logit_bias": {"a": 1}}, {"min_tokens": 9}], ids=str
)
def test_what_a_call_lays_over_is_checked(laid: dict[str, Any]) -> None:
    params = SamplingParams(allowed_token_ids=(3, 1), logit_bias={4: 1}, max_tokens=3)
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.build(params, laid)
    assert caught.value.param == next(iter(laid))


# ── hooks ───────────────────────────────────────────────────────────────────────────────


async def late(output_ids: list[int], logits: np.ndarray) -> np.ndarray:
    return logits


class Late:
    async def __call__(self, output_ids: list[int], logits: np.ndarray) -> None: ...


@pytest.mark.parametrize(
    "hook", [late, Late(), partial(late, []), Late().__call__],
    ids=["function", "object", "partial", "method"],
)  # fmt: skip
def test_hooks_that_are_async_are_refused(hook: Any) -> None:
    assert "is async" in refusal(logits_processors=hook)
    assert "is async" in refusal(logits_processors=[lambda output_ids, logits: logits, hook])
