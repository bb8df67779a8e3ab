"""`grammar` and `logits_processors` of a request: what the call makes of them, and refuses."""

from __future__ import annotations

import json
import pickle
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aneuron import Grammar, InvalidRequest, SamplingParams
from aneuron.params import takes_prompt

if TYPE_CHECKING:
    import numpy as np

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"null"}}}'


def grammar(form: Any) -> Grammar | None:
    made = SamplingParams(grammar=form).grammar
    assert made is None or isinstance(made, Grammar)
    return made


def refusal(**params: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**params)
    [name] = params
    assert caught.value.param == name
    assert name in str(caught.value)
    return str(caught.value)


class Pydantic:
    """What a class of pydantic's offers."""

    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return SCHEMA


@pytest.mark.parametrize(
    ("form", "kind", "text"),
    [
        ({"json": SCHEMA}, "json", TEXT),
        ({"json": MappingProxyType(SCHEMA)}, "json", TEXT),
        ({"json": json.dumps(SCHEMA, indent=2)}, "json", TEXT),
        ({"json": Pydantic}, "json", TEXT),
        ({"json": True}, "json", "true"),
        ({"json": {}}, "json", "{}"),
        ({"json": {"enum": ("é", 1.5, None)}}, "json", '{"enum":["é",1.5,null]}'),
        ({"regex": "[ab]+"}, "regex", "[ab]+"),
        ({"choice": ("yes", "no")}, "choice", '["yes","no"]'),
        ({"lark": 'start: "a"'}, "lark", 'start: "a"'),
        ({"type": "json_object"}, "json", '{"type":"object"}'),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}},
            "json",
            TEXT,
        ),
    ],
)
def test_every_form_becomes_a_grammar(form: Any, kind: str, text: str) -> None:
    made = grammar(form)
    assert made == Grammar(kind, text)
    assert grammar(made) is made
    assert hash(made) == hash(Grammar(kind, text))
    assert pickle.loads(pickle.dumps(made)) == made


def test_text_is_no_grammar() -> None:
    assert grammar({"type": "text"}) is None
    assert Grammar.from_response_format({"type": "text"}) is None
    assert Grammar.json_object() == grammar({"type": "json_object"})


def test_a_grammar_is_a_copy() -> None:
    schema: dict[str, Any] = {"enum": ["a"]}
    params = SamplingParams(grammar={"json": schema})
    schema["enum"].append("b")
    assert params.grammar == Grammar("json", '{"enum":["a"]}')
    assert hash(params) == hash(SamplingParams(grammar={"json": {"enum": ["a"]}}, seed=None))


def schema_form(inner: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": inner}


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (schema_form("text"), "json_schema must be an object"),
        (schema_form([1]), "json_schema must be an object"),
        (schema_form(None), "json_schema must be an object.*missing"),
        (schema_form({}), "json_schema.schema must be an object.*missing"),
        (schema_form({"schema": "text"}), "json_schema.schema must be an object"),
        (schema_form({"schema": [1]}), "json_schema.schema must be an object"),
        (schema_form({"schema": {"enum": [{1}]}}), "json_schema.schema holds {1}"),
        ({"type": "object"}, "type must be one of text, json_object, json_schema.*'object'"),
        ({"type": ["json_object"]}, "type must be one of"),
        ({"json": "text"}, "json is no JSON"),
        ({"json": '"text"'}, "json must be a schema"),
        ({"json": [1]}, "json must be a schema"),
        ({"json": None}, "json must be a schema"),
        ({"json": False}, "json must be a schema"),
        ({"json": {"minimum": float("nan")}}, "json holds nan"),
        ({"json": '{"minimum": NaN}'}, "json is no JSON: NaN"),
        ({"json": {"enum": [{1: 2}]}}, "json holds a key that is no string"),
        ({"json": {"enum": [b"a"]}}, "json holds b'a'"),
        ({"json": {"maximum": 10**5000}}, "json is no JSON"),
        ({"json": {"title": "\ud800"}}, "json holds half a surrogate pair"),
        ({"json": "[" * 60_000}, "json is nested too deeply"),
        ({"json": {"title": "a" * 2**16}}, "json has .* characters"),
        ({"regex": ""}, "regex is empty"),
        ({"regex": b"a"}, "regex must be a string"),
        ({"regex": "a" * 8193}, "regex has 8193 characters; at most 8192"),
        ({"regex": "\udc00"}, "regex holds half a surrogate pair"),
        ({"lark": "a" * 8193}, "lark has 8193 characters; at most 8192"),
        ({"lark": {}}, "lark must be a string"),
        ({"choice": []}, "choice must hold 1..1024"),
        ({"choice": ["a"] * 1025}, "choice must hold 1..1024"),
        ({"choice": "yes"}, "choice must be a list"),
        ({"choice": ["yes", 1]}, "choice must be a list of strings"),
        ({"choice": [""]}, "choice: a string is empty"),
        ({"choice": ["\ud83d"]}, "choice: a string holds half"),
        ({"choice": ["a" * 9000] * 8}, "choice has .* characters"),
        ({}, "this one has nothing"),
        ({"regex": "a", "lark": "b"}, "this one has 'regex', 'lark'"),
        ({"xml": "a"}, "this one has 'xml'"),
        ("[ab]+", "not str"),
        ([1], "not list"),
        (Grammar, "not type"),
    ],
)
def test_what_is_no_grammar_is_refused_at_the_call(form: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        SamplingParams(grammar=form)
    assert caught.value.param == "grammar"
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("kind", "text"), [("json", "text"), ("choice", "[1]"), ("choice", "{"), ("xml", "a")]
)
def test_a_grammar_made_by_hand_is_checked_too(kind: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=kind):
        Grammar(kind, text)


def test_depth_is_bounded_without_a_recursion_error() -> None:
    schema: Any = {}
    for _ in range(64):
        schema = {"not": schema}
    assert grammar({"json": schema}) is not None
    assert "nested deeper than 64 levels" in refusal(grammar={"json": {"not": schema}})
    for _ in range(100_000):
        schema = [schema]
    assert "nested deeper" in refusal(grammar={"json": {"enum": schema}})
    ring: dict[str, Any] = {}
    ring["not"] = ring
    assert "nested deeper" in refusal(grammar={"json": ring})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("aé\n\"'\\"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
)


@given(VALUES)
def test_schemas_keep_their_values(value: Any) -> None:
    schema = {"const": value}
    if "Infinity" in (text := json.dumps(schema)):
        assert "no JSON value" in refusal(grammar={"json": schema})
        return
    made = grammar({"json": schema})
    assert made is not None
    assert json.loads(made.text) == json.loads(text)
    assert grammar({"json": made.text}) == made


# ── hooks ───────────────────────────────────────────────────────────────────────────────


def two(output_ids: list[int], logits: np.ndarray) -> np.ndarray:
    return logits


def three(prompt_ids: list[int], output_ids: list[int], logits: np.ndarray) -> np.ndarray:
    return logits


class Hook:
    """An object that can be called; its option does not count."""

    def __call__(self, output_ids: list[int], logits: np.ndarray, scale: float = 2.0) -> None:
        logits *= scale


def test_hooks_become_a_tuple() -> None:
    assert SamplingParams().logits_processors == ()
    assert SamplingParams(logits_processors=None) == SamplingParams()
    assert SamplingParams(logits_processors=two).logits_processors == (two,)
    several: Any = [two, three]
    params = SamplingParams(logits_processors=several)
    assert params.logits_processors == (two, three)
    assert hash(params) == hash(SamplingParams(logits_processors=(two, three)))
    assert not takes_prompt(two)
    assert takes_prompt(three)
    assert not takes_prompt(Hook())


@pytest.mark.parametrize(
    ("hooks", "says"),
    [
        (5, "must be a callable or a list"),
        ([two, 5], "must be a callable or a list"),
        ({two}, "must be a callable or a list"),
        (lambda logits: logits, "must take"),
        (lambda *args: args, "must take"),
        (lambda a, b, *, c: a, "must take"),
        (int, "has no signature"),
        ([two] * 17, "over 16"),
    ],
)
def test_what_cannot_be_a_hook_is_refused(hooks: Any, says: str) -> None:
    assert says in refusal(logits_processors=hooks)


def test_what_guides_and_what_needs_logits() -> None:
    plain, guided = SamplingParams(), SamplingParams(grammar={"regex": "a"})
    hooked = SamplingParams(logits_processors=two)
    assert [one.is_guided for one in (plain, guided, hooked)] == [False, True, True]
    needs = [one.needs_logits for one in (plain, guided, hooked)]
    assert needs == [None, "grammar", "logits_processors"]
    assert not guided.has_rules
    assert not hooked.has_rules
