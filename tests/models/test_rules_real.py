"""Greedy output with rules equals that of `transformers` with its logits processors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers

from aneuron import Engine
from aneuron.models.catalog import resolve

pytestmark = [pytest.mark.tiny, pytest.mark.timeout(180)]
COUNT = 24


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    """One loop is enough here."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
def model() -> Any:
    """The reference; read outside of any event loop."""
    path = resolve("smollm2-135m").path
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


class Occurrences(transformers.LogitsProcessor):  # type: ignore[misc]
    """Presence and frequency penalties as OpenAI documents them; transformers has none."""

    def __init__(self, prompt_len: int, presence: float, frequency: float) -> None:
        self.prompt_len, self.presence, self.frequency = prompt_len, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self.prompt_len :], minlength=scores.shape[-1])
        return scores - self.frequency * counts - self.presence * (counts > 0)


def expected(
    model: Any, prompt: list[int], processors: list[Any], **options: Any
) -> tuple[list[int], list[float]]:
    """Return the ids, and by how much each was ahead of the next best."""
    tensor = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=COUNT, do_sample=False,
            eos_token_id=None, pad_token_id=0, output_scores=True, return_dict_in_generate=True,
            logits_processor=transformers.LogitsProcessorList(processors), **options,
        )  # fmt: skip
    ids: list[int] = out.sequences[0, len(prompt) :].tolist()
    best = [scores[0].topk(2).values for scores in out.scores]
    return ids, [float(one[0] - one[1]) for one in best]


async def test_smollm2_with_rules_equals_transformers(model: Any) -> None:
    chance, num_changed = random.Random(4), 0
    async with Engine("smollm2-135m", dtype="float32", max_model_len=256) as engine:
        for length, presence, frequency, repetition in (
            (5, 0.0, 0.0, 1.3), (40, 0.7, 0.0, 1.0), (17, 0.0, 0.9, 1.0), (30, 0.4, 0.3, 1.1),
        ):  # fmt: skip
            prompt = [chance.randrange(1000, 40000) for _ in range(length)]
            plain, _ = expected(model, prompt, [])
            bias = {plain[0]: -3.0, plain[1]: 1.5}
            banned = plain[2]
            # transformers adds its own processors in front: repetition, then bias. Ours has
            # the bias first, so one of them at a time.
            rules: dict[str, Any] = {"repetition_penalty": repetition}
            theirs: dict[str, Any] = {"repetition_penalty": repetition}
            if repetition == 1.0:
                rules |= {"logit_bias": {**bias, banned: -100.0}}
                sequence_bias = {(one,): value for one, value in bias.items()}
                theirs |= {"sequence_bias": {**sequence_bias, (banned,): -100.0}}
            ids, ahead = expected(
                model, prompt, [Occurrences(length, presence, frequency)], **theirs
            )
            told = await engine.generate(
                prompt_token_ids=prompt, max_tokens=COUNT, temperature=0, ignore_eos=True,
                presence_penalty=presence, frequency_penalty=frequency, **rules,
            )  # fmt: skip
            clear = next((i for i, gap in enumerate(ahead) if gap < 1e-3), COUNT)
            assert clear >= 8, "too many near ties to say anything"
            assert told.token_ids[:clear] == ids[:clear]
            num_changed += ids != plain
        assert num_changed >= 2


async def test_logprobs_are_those_of_a_forward_pass(model: Any) -> None:
    prompt = [504, 3575, 282, 4649, 314]
    async with Engine("smollm2-135m", dtype="float32", max_model_len=64) as engine:
        answer = await engine.generate(
            prompt_token_ids=prompt, max_tokens=12, temperature=0.7, seed=3, logprobs=5,
            repetition_penalty=1.2, ignore_eos=True,
        )  # fmt: skip
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.double().log_softmax(-1)
    told = answer.choices[0].logprobs
    assert told is not None
    for token, one, row in zip(answer.token_ids, told, logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(5)
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("budget", [7, 64])
async def test_case_52_logprobs_of_a_prompt_are_those_of_a_forward_pass(
    model: Any, budget: int
) -> None:
    chance = random.Random(9)
    prompt = [chance.randrange(1000, 40000) for _ in range(20)]
    with torch.inference_mode():
        rows = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    async with Engine(
        "smollm2-135m", dtype="float32", max_model_len=64, max_num_batched_tokens=budget
    ) as engine:
        for _ in range(2):  # cached the second time, and computed all the same
            answer = await engine.generate(prompt_token_ids=prompt, max_tokens=1, prompt_logprobs=1)
            told = answer.prompt_logprobs
            assert told is not None
            assert len(told) == 20
            assert told[0] is None
            for before, (token, one) in enumerate(zip(prompt[1:], told[1:], strict=True)):
                assert one is not None
                assert one.logprob == pytest.approx(float(rows[before, token]), abs=1e-4)
                assert one.top[0][1] == pytest.approx(float(rows[before].max()), abs=1e-4)
