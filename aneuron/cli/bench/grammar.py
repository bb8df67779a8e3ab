"""`aneuron bench grammar`: what a JSON schema costs a step, and whether every answer is valid.

Comes in: a latency profile, a number of sequences, a model. Goes out: milliseconds per decode
step on the simulated device, free and with a schema, in turns of one engine; and how many
answers of the real model parse and are as the schema has them. The tokenizer, and so the
vocabulary of the masks, is the real model's in both.
"""

from __future__ import annotations

import asyncio
import json
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from aneuron.cli.bench.common import (
    JsonFlag,
    ProfileName,
    check_kept,
    check_number,
    default_loop,
    run_on,
    show_json,
    show_table,
    tell,
)
from aneuron.cli.bench.rig.workload import open_profile, steady_windows

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.engine import Engine
    from aneuron.prompt import Tokenizer

__all__ = ["grammar"]

_WARMUP = 8
_PROMPT_TOKENS = 16
_MS = 1e3
_MAX_TOKENS = 200
# Long enough never to end while steps are measured.
_ENDLESS = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "age", "tags", "ok"],
        "additionalProperties": False,
    },
}


def _is_person(value: Any) -> bool:
    return (
        list(value) == ["name", "age", "home"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 20
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and value["home"] in ("city", "village")
    )


def _is_list(value: Any) -> bool:
    return (
        isinstance(value, list)  # an object would be looked at by its keys
        and 1 <= len(value) <= 4
        and all(one in ("red", "green", "blue") for one in value)
    )


def _is_point(value: Any) -> bool:
    numbers = value["at"]
    return (
        list(value) == ["at", "seen"]
        and len(numbers) == 2
        and all(type(one) is int and -99 <= one <= 99 for one in numbers)
        and type(value["seen"]) is bool
    )


# What is asked for, its schema, and whether an answer is as the schema has it.
_TASKS: list[tuple[str, dict[str, Any], Callable[[Any], bool]]] = [
    (
        "Describe a person as JSON: ",
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "home": {"enum": ["city", "village"]},
            },
            "required": ["name", "age", "home"],
            "additionalProperties": False,
        },
        _is_person,
    ),
    (
        "A JSON list of colours: ",
        {
            "type": "array",
            "items": {"enum": ["red", "green", "blue"]},
            "minItems": 1,
            "maxItems": 4,
        },
        _is_list,
    ),
    (
        "A point on the map as JSON: ",
        {
            "type": "object",
            "properties": {
                "at": {
                    "type": "array",
                    "items": {"type": "integer", "minimum": -99, "maximum": 99},
                    "minItems": 2,
                    "maxItems": 2,
                },
                "seen": {"type": "boolean"},
            },
            "required": ["at", "seen"],
            "additionalProperties": False,
        },
        _is_point,
    ),
]


def grammar(
    *,
    profile: ProfileName = "trn1-llama3-8b",
    num_seqs: int = 8,
    steps: int = 60,
    rounds: int = 5,
    model: str = "smollm2-135m",
    answers: int = 24,
    as_json: JsonFlag = False,
) -> None:
    """Measure a decode step with and without a JSON schema, and check answers of a real model.

    Args:
        profile: A latency profile; its programs' times.
        num_seqs: Number of sequences.
        steps: Steps of a round.
        rounds: Rounds of each; the medians count.
        model: Whose tokenizer the masks are for, and whose answers are checked.
        answers: How many answers to check, half of them sampled.
        as_json: Print one JSON object in place of the table.
    """
    check_number("--num-seqs", num_seqs, at_most=256)
    check_number("--steps", steps, at_least=10)
    check_number("--rounds", rounds)
    check_number("--answers", answers, at_most=1000)
    case = _Case(profile, num_seqs, steps, rounds, model, answers)
    check_kept("--steps", case.max_model_len)
    loop = default_loop()
    result = run_on(loop, _measure(case))
    if as_json:
        show_json(result)
    else:
        _show(case, result, loop)


class _Case(NamedTuple):
    profile: str
    num_seqs: int
    steps: int
    rounds: int
    model: str
    answers: int

    @property
    def max_tokens(self) -> int:
        """Tokens of an answer: until the last prompt is in, the first ones decode alone."""
        return _WARMUP + self.steps + 2 * self.num_seqs + 8

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens, and more than the steps of a round."""
        return _PROMPT_TOKENS + self.max_tokens


async def _measure(case: _Case) -> dict[str, Any]:
    from aneuron.engine import Engine

    device = open_profile(case.profile)
    async with Engine(case.model, kv_cache_bytes=2**28) as engine:
        tell(f"{case.answers} answers of {case.model}")
        valid = await _count_valid(engine, case.answers)
        tokenizer, spec = engine.tokenizer, engine.spec
    tell(f"{case.rounds} rounds of {case.steps} steps")
    step_ms = await _step_ms(case, device, tokenizer, spec.vocab_size, spec.eos_token_ids)
    return {
        "step_ms": step_ms,
        "grammar_over_free": step_ms["grammar"] / step_ms["free"],
        "valid": valid,
        "total": case.answers,
    }


# ── a step ──────────────────────────────────────────────────────────────────────────────


async def _step_ms(
    case: _Case, device: Any, tokenizer: Tokenizer, vocab_size: int, end_ids: tuple[int, ...]
) -> dict[str, float]:
    """Return the medians of a step's time on the modelled timeline, by kind."""
    from aneuron.cli.bench.rig.wander import Wander
    from aneuron.engine import Engine

    asked: dict[str, dict[str, Any]] = {"free": {}, "grammar": {"grammar": {"json": _ENDLESS}}}
    times: dict[str, list[float]] = {kind: [] for kind in asked}
    async with Engine(
        Wander(vocab_size, end_ids), device=device, tokenizer=tokenizer,
        max_num_seqs=case.num_seqs, timeline=True,
    ) as engine:  # fmt: skip
        for number in range(case.rounds + 1):
            for kind, params in asked.items():
                took_ms = await _round_ms(engine, case, params)
                if number:  # the first one compiles
                    times[kind].append(took_ms)
    return {kind: median(took) for kind, took in times.items()}


async def _round_ms(engine: Engine, case: _Case, params: dict[str, Any]) -> float:
    """Return milliseconds per step of steady decode with all sequences, in one window."""
    seen = engine.timeline.steps
    last_id = seen[-1].step_id if seen else 0
    streams = [
        engine.generate(
            prompt_token_ids=[number] * _PROMPT_TOKENS, max_tokens=case.max_tokens,
            temperature=0.0, ignore_eos=True, **params,
        )
        for number in range(case.num_seqs)
    ]  # fmt: skip
    await asyncio.gather(*streams)
    await engine.wait_idle()
    records = [one for one in engine.timeline.steps if one.step_id > last_id]
    window = steady_windows(records, case.num_seqs, warmup=_WARMUP, every=case.steps)[0]
    return (window[-1].device_end_s - window[0].device_end_s) / case.steps * _MS


# ── answers ─────────────────────────────────────────────────────────────────────────────


async def _count_valid(engine: Engine, total: int) -> int:
    """Return how many answers parse and are as their schema has them."""
    asked = [_TASKS[number % len(_TASKS)] for number in range(total)]
    done = await asyncio.gather(
        *(
            engine.generate(
                prompt, max_tokens=_MAX_TOKENS, temperature=float(number % 2), seed=number,
                grammar={"json": schema},
            )
            for number, (prompt, schema, _) in enumerate(asked)
        )
    )  # fmt: skip
    return sum(_is_valid(one.text, check) for one, (_, _, check) in zip(done, asked, strict=True))


def _is_valid(text: str, check: Callable[[Any], bool]) -> bool:
    try:
        return check(json.loads(text))
    except (ValueError, TypeError, KeyError, LookupError):
        return False


def _show(case: _Case, result: dict[str, Any], loop: str) -> None:
    rows = list(result["step_ms"].items())
    facts = [
        f"grammar over free {result['grammar_over_free']:.3f}; {case.rounds} rounds of each",
        f"{result['valid']} of {result['total']} answers of {case.model} are valid",
    ]
    title = f"JSON schemas, sim:{case.profile}, {case.num_seqs} sequences"
    show_table(title, ("decode step", "ms"), rows, loop=loop, facts=facts)
