"""`aneuron bench lookup`: what drafts by prompt lookup save, on text that repeats itself.

Comes in: a model, how many tokens to draft. Goes out: tokens per second with and without, and
whether the ids are the same. Two engines are open, and take turns round by round on the same
prompts, one request at a time.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from aneuron.cli.bench.common import (
    JsonFlag,
    check_number,
    default_loop,
    run_on,
    show_json,
    show_table,
    tell,
)
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from aneuron.engine import Engine

__all__ = ["lookup"]

# Something to copy, and the beginning of the copy: models of any size go on with it.
_PROMPT = """Here is a list of stations, and then the same list once more.

List:
1. Harbour Street, by the old customs house
2. Market Square, opposite the town hall
3. Library and museum, at the north gate
4. University hospital, main entrance
5. Botanical garden, at the glass house
6. Stadium, east stand and car park
7. Airport road, by the petrol station

The same list:
1. Harbour Street, by the old customs house
2."""


def lookup(
    *,
    model: str = "smollm2-135m",
    num_tokens: int = 4,
    max_tokens: int = 128,
    rounds: int = 3,
    dtype: str = "float32",
    as_json: JsonFlag = False,
) -> None:
    """Measure tokens per second with and without drafts by prompt lookup; one greedy stream.

    Args:
        model: A built-in name, a directory, a .gguf file or a Hugging Face id.
        num_tokens: Tokens to draft for a step.
        max_tokens: Tokens of an answer.
        rounds: Rounds of each, after one that does not count; the medians count.
        dtype: float32 or bfloat16; in bfloat16 ids may differ.
        as_json: Print one JSON object in place of the table.
    """
    check_number("--num-tokens", num_tokens, at_most=16)
    check_number("--max-tokens", max_tokens, at_least=2)
    check_number("--rounds", rounds)
    loop = default_loop()
    plain, drafted = run_on(loop, _measure(_Case(model, dtype, num_tokens, max_tokens), rounds))
    result = _summary(plain, drafted)
    if as_json:
        show_json(result)
    else:
        _show(model, plain, drafted, result, loop)


class _Case(NamedTuple):
    model: str
    dtype: str
    num_tokens: int
    max_tokens: int

    def engine(self, *, drafts: bool) -> Engine:
        """Return an engine, not open yet."""
        from aneuron.engine import Engine

        speculative = {"method": "ngram", "num_tokens": self.num_tokens} if drafts else None
        return Engine(self.model, dtype=self.dtype, speculative=speculative, kv_cache_bytes=2**28)


class _Side(NamedTuple):
    """What an engine did: rates and ids of the rounds that count, counts of all rounds."""

    tokens_per_s: list[float]
    token_ids: list[tuple[int, ...]]
    draft_tokens: int
    accepted: int
    steps: int


async def _measure(case: _Case, rounds: int) -> tuple[_Side, _Side]:
    """Return what the plain engine did, and the one that drafts."""
    async with AsyncExitStack() as stack:
        engines = []
        for drafts in (False, True):
            tell(f"loading {case.model}")
            engines.append(await stack.enter_async_context(case.engine(drafts=drafts)))
        told: list[list[tuple[float, tuple[int, ...]]]] = [[], []]
        for number in range(rounds + 1):
            for engine, answers in zip(engines, told, strict=True):
                tell(f"round {number} of {rounds}")
                answers.append(await _ask(engine, case.max_tokens))
        sides = []
        for engine, answers in zip(engines, told, strict=True):
            rates, ids = zip(*answers[1:], strict=True)
            stats = engine.stats()
            counts = stats.draft_tokens, stats.accepted_draft_tokens, stats.steps
            sides.append(_Side(list(rates), list(ids), *counts))
        return sides[0], sides[1]


async def _ask(engine: Engine, max_tokens: int) -> tuple[float, tuple[int, ...]]:
    """Return tokens per second from the first token on, and the ids."""
    stream = engine.generate(_PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    await anext(stream)
    started_s = monotonic()
    completion = await stream
    took_s = monotonic() - started_s
    await engine.wait_idle()
    ids = tuple(completion.token_ids)
    if len(ids) < max_tokens:
        raise ConfigError(
            f"--max-tokens {max_tokens}: behind the prompt there is room for {len(ids)}",
            param="--max-tokens",
        )
    return (max_tokens - 1) / took_s, ids


def _summary(plain: _Side, drafted: _Side) -> dict[str, Any]:
    share = drafted.accepted / drafted.draft_tokens if drafted.draft_tokens else 0.0
    return {
        "speedup": median(drafted.tokens_per_s) / median(plain.tokens_per_s),
        "identical": plain.token_ids == drafted.token_ids,
        "accepted_share": share,
        "tokens_per_s": {
            "plain": median(plain.tokens_per_s),
            "lookup": median(drafted.tokens_per_s),
        },
    }


def _show(model: str, plain: _Side, drafted: _Side, result: dict[str, Any], loop: str) -> None:
    rows = [
        (
            name,
            median(side.tokens_per_s),
            min(side.tokens_per_s),
            max(side.tokens_per_s),
            side.steps,
        )
        for name, side in (("one token a step", plain), ("prompt lookup", drafted))
    ]
    facts = [
        f"lookup over plain {result['speedup']:.2f}; ids identical: {result['identical']}",
        f"{drafted.accepted} of {drafted.draft_tokens} drafted tokens came true, all rounds",
    ]
    columns = ("", "tokens/s", "least", "most", "steps")
    show_table(f"Prompt lookup, {model}, one greedy stream", columns, rows, loop=loop, facts=facts)
