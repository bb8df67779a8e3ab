"""What programs of fixed shape cannot do: the scheduler, the intake and the carry keep to it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aneuron import InvalidRequest
from aneuron.carry import Feed, HandoffCarry, Mismatch, make_carry
from aneuron.plans import BreakReason
from aneuron.testing import Count, sim_engine
from tests.support import after, both_async_carries, every_carry, start


def limited(**limits: Any) -> Count:
    model = Count()
    model.spec = replace(model.spec, **limits)
    return model


@every_carry
async def test_prompts_are_computed_one_a_step(carry: dict[str, Any]) -> None:
    seen: list[int] = []

    def note(inputs: Any) -> float:
        if not inputs.is_decode:
            seen.append(inputs.num_reqs)
        return 0.0

    async with sim_engine(limited(max_prompts=1), latency=note, **carry) as engine:
        streams = [start(engine, 1000 * n, 5) for n in range(1, 6)]
        assert [(await one).token_ids for one in streams] == [
            after(1000 * n, 5) for n in range(1, 6)
        ]
    assert seen == [1] * 5


@every_carry
@pytest.mark.parametrize("size", [3, 16])
async def test_choices_that_cannot_fork_compute_their_prompt_each(
    carry: dict[str, Any], size: int
) -> None:
    steps: list[Any] = []

    def note(inputs: Any) -> float:
        steps.append((inputs.is_decode, inputs.num_rows, len(inputs.logits_indices)))
        assert inputs.copies is None
        return 0.0

    model = limited(max_prompts=1, can_fork=False)
    async with sim_engine(model, latency=note, block_size=size, **carry) as engine:
        answer = await engine.generate(prompt_token_ids=[1, 2, 3, 4, 10], n=4, max_tokens=6)
        assert [one.token_ids for one in answer.choices] == [after(10, 6)] * 4
        assert answer.usage.prompt_tokens == 5
        stream = engine.generate(prompt_token_ids=[7, 500], n=3, max_tokens=50)
        await anext(stream)
        stream.cancel()
        await engine.wait_idle()
    prefills = [step for step in steps if not step[0]]
    assert len(prefills) >= 5
    assert all(rows == samples for _, rows, samples in steps)


@pytest.mark.parametrize(
    ("limits", "wanted", "param"),
    [
        ({"unsupported_params": ("seed", "min_p")}, {"seed": 3}, "seed"),
        ({"unsupported_params": ("seed", "min_p")}, {"min_p": 0.1}, "min_p"),
        ({"greedy_only": True}, {"temperature": 0.7}, "temperature"),
    ],
)
async def test_what_a_programs_sampling_does_not_know_is_refused_by_name(
    limits: dict[str, Any], wanted: dict[str, Any], param: str
) -> None:
    async with sim_engine(limited(**limits)) as engine:
        with pytest.raises(InvalidRequest, match=param) as raised:
            _ = start(engine, 10, 5, **wanted)
        assert raised.value.param == param
        assert (await start(engine, 10, 5, temperature=0.0)).token_ids == after(10, 5)


def decode(*context_lens: int) -> Any:
    rows = len(context_lens)
    inputs = SimpleNamespace(
        is_decode=True,
        num_rows=rows,
        num_reqs=rows,
        input_ids=np.zeros(rows, np.int32),
        context_lens=np.array(context_lens, np.int32),
    )
    return SimpleNamespace(request_ids=np.arange(rows), inputs=inputs)


@pytest.mark.parametrize(
    ("context_lens", "breaks"),
    [
        ((125,), False),
        ((126,), True),
        ((127, 3), True),
        ((3, 127), True),
        ((128,), False),
        ((254,), True),
        ((400,), False),
    ],
)
def test_rule_10_a_step_near_the_end_of_a_bucket_is_not_fed(
    context_lens: tuple[int, ...], breaks: bool
) -> None:
    carry = make_carry("handoff", bucket_edges=(128, 256))
    assert isinstance(carry, HandoffCarry)
    future = SimpleNamespace(shape=(len(context_lens),), dtype="int32")
    pending: Any = SimpleNamespace(
        request_ids=np.arange(len(context_lens)), sampled_token_ids=future, verifies_drafts=False
    )
    decision = carry.decide(decode(*context_lens), pending)
    assert decision == (Mismatch(BreakReason.BUCKET_EDGE) if breaks else Feed(future))  # type: ignore[arg-type]


@both_async_carries
async def test_the_flow_breaks_at_an_edge_and_goes_on_behind_it(carry: dict[str, Any]) -> None:
    model = limited(bucket_edges=(16, 32))
    async with sim_engine(model, latency=0.001, **carry) as engine:
        assert (await start(engine, 10, 40)).token_ids == after(10, 40)
        stats = engine.stats()
    edges = stats.breaks.get("bucket_edge")
    assert (0 if edges is None else edges.count) == (4 if carry["token_carry"] == "handoff" else 0)
