"""Greedy output equals `transformers` `generate`, token for token, through the engine."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from aneuron import Engine
from aneuron.models.catalog import resolve
from aneuron.testing import ByteTokenizer, no_leaks
from tests.support import CARRIES, every_carry

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.tiny

NEAR = 1e-4  # logits closer than this: either id is right
VOCAB = 300
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    """One loop is enough here: the engine's own tests run on all of them."""
    return "asyncio", {"use_uvloop": True}


def reference(model: Any, prompt: list[int], count: int) -> list[int]:
    tensor = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids


def near_ties(model: Any, prompt: list[int], ids: list[int]) -> int:
    """Return how often `ids` took the other of two equal logits; fail where it is wrong.

    What has the highest logit behind all ids before it, at each place, is what `generate` gives;
    one pass says so of all places.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    best = logits.max(dim=-1)
    chosen = logits[torch.arange(len(ids)), torch.tensor(ids)]
    gaps = best.values - chosen
    assert gaps.max() < NEAR, f"wrong id at {int(gaps.argmax())}: {gaps.max():.2e} below the best"
    return int((best.indices != torch.tensor(ids)).sum())


async def run_together(engine: Engine, prompts: list[list[int]], count: int) -> list[list[int]]:
    options: dict[str, Any] = {"max_tokens": count, "temperature": 0, "ignore_eos": True}
    answers = await asyncio.gather(
        *(engine.generate(prompt_token_ids=prompt, **options) for prompt in prompts)
    )
    return [answer.token_ids for answer in answers]


async def run_one_by_one(engine: Engine, prompts: list[list[int]], count: int) -> list[list[int]]:
    return [(await run_together(engine, [prompt], count))[0] for prompt in prompts]


def sixteen_prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(16)
    lengths = [1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 65, 100, 127, 200, 257, 300]
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


@pytest.mark.timeout(900)
async def test_smollm2_equals_transformers(record_property: Any) -> None:
    path = await asyncio.to_thread(lambda: resolve("smollm2-135m").path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = sixteen_prompts(model.config.vocab_size)
    ties = num_ids = 0
    for carry, run, count in (
        (CARRIES["resident"], run_together, 48),
        (CARRIES["host"], run_one_by_one, 20),  # past the end of a block
    ):
        async with (
            Engine(
                "smollm2-135m",
                dtype="float32",
                **carry,
                max_num_seqs=16,
                max_model_len=512,
            ) as engine,
            no_leaks(engine),
        ):
            outputs = await run(engine, prompts, count)
        for prompt, ids in zip(prompts, outputs, strict=True):
            assert len(ids) == count
            ties += near_ties(model, prompt, ids)
            num_ids += count
    record_property("near_ties", ties)
    print(f"near ties within {NEAR}: {ties} of {num_ids} tokens")


FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": 40},
    "Qwen2": {},
    "Qwen3": {"head_dim": 24},
}


def tiny_model(family: str, into: Path) -> Any:
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**TINY, **FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.save_pretrained(into)
    return model


@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", list(FAMILIES))
async def test_tiny_models_equal_transformers(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, tmp_path)
    prompts = sixteen_prompts(VOCAB)
    expected = [reference(model, prompt, 48) for prompt in prompts]
    for carry in CARRIES.values():
        async with (
            Engine(
                str(tmp_path),
                dtype="float32",
                **carry,
                tokenizer=ByteTokenizer(),
                max_num_batched_tokens=128,
            ) as engine,
            no_leaks(engine),
        ):
            alone = [run_one_by_one] if carry is CARRIES["resident"] else []
            for run in (run_together, *alone):
                outputs = await run(engine, prompts, 48)
                for prompt, ids, wanted in zip(prompts, outputs, expected, strict=True):
                    assert len(ids) == 48
                    if ids != wanted:
                        near_ties(model, prompt, ids)


@pytest.mark.timeout(120)
@every_carry
async def test_case_81_buckets_change_no_output(carry: dict[str, Any], tmp_path: Path) -> None:
    tiny_model("Llama", tmp_path)
    rng = random.Random(81)
    lengths = [size + delta for size in (16, 32, 64) for delta in (-1, 0, 1)]
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]
    options: dict[str, Any] = {
        "dtype": "float32",
        "tokenizer": ByteTokenizer(),
        **carry,
        "max_num_seqs": 8,
        "max_model_len": 128,
    }
    exact: dict[str, Any] = dict.fromkeys(
        ("num_seqs_buckets", "num_tokens_buckets", "num_blocks_buckets"), ()
    )
    async with Engine(str(tmp_path), **options, **exact) as engine:
        alone = await run_one_by_one(engine, prompts, 12)
    buckets: dict[str, Any] = {
        "num_seqs_buckets": (1, 2, 4, 8),
        "num_tokens_buckets": (16, 32, 64),
    }
    async with Engine(str(tmp_path), **options, **buckets) as engine, no_leaks(engine):
        sizes = range(1, 9) if carry is CARRIES["resident"] else (1, 3, 8)
        for size in sizes:
            for first in range(len(prompts)):
                chosen = [(first + at) % len(prompts) for at in range(size)]
                outputs = await run_together(engine, [prompts[at] for at in chosen], 12)
                assert outputs == [alone[at] for at in chosen]


@every_carry
async def test_a_seeded_request_repeats_alone_and_in_any_batch(
    carry: dict[str, Any], tmp_path: Path
) -> None:
    tiny_model("Llama", tmp_path)
    options: dict[str, Any] = {"dtype": "float32", "tokenizer": ByteTokenizer(), **carry}
    asked: dict[str, Any] = {"prompt_token_ids": [5, 6, 7], "seed": 42, "temperature": 0.8}
    async with Engine(str(tmp_path), **options) as engine:
        alone = (await engine.generate(**asked, max_tokens=16)).token_ids
        company: list[dict[str, Any]] = [
            {"temperature": 1.0},
            {"temperature": 0.5, "seed": 7},
            {"top_p": 0.5},
        ]
        for beside in company:
            other = engine.generate(prompt_token_ids=[9, 9], max_tokens=30, **beside)
            assert (await engine.generate(**asked, max_tokens=16)).token_ids == alone
            await other
        assert len(set(alone)) > 4, "temperature 0.8 on a random model is not greedy"


@every_carry
async def test_case_95_a_slots_next_owner_has_opposite_parameters(
    carry: dict[str, Any], tmp_path: Path
) -> None:
    """Greedy and hot rows, filters on and off, in turns on two seats; tight, so preempted."""
    tiny_model("Llama", tmp_path)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.5, "seed": 1},
        {"temperature": 1.5, "seed": 2, "top_k": 3},
        {"temperature": 0.0, "seed": 3},
        {"temperature": 1.5, "seed": 4, "top_p": 0.4},
        {"temperature": 1.5, "seed": 5, "min_p": 0.5},
    ]
    asked: list[dict[str, Any]] = [
        {"prompt_token_ids": [n, 2 * n, 7], "max_tokens": 1 + 5 * (n % 4), **kinds[n % 6]}
        for n in range(24)
    ]
    options: dict[str, Any] = {"dtype": "float32", "tokenizer": ByteTokenizer(), "block_size": 4}
    async with Engine(str(tmp_path), **options, **CARRIES["host"]) as engine:
        alone = [(await engine.generate(**one)).token_ids for one in asked]
    async with (
        Engine(str(tmp_path), **options, **carry, max_num_seqs=3, num_kv_blocks=8) as engine,
        no_leaks(engine),
    ):
        streams = [engine.generate(**one) for one in asked]
        assert [(await stream).token_ids for stream in streams] == alone
        assert engine.stats().preemptions >= 1


async def test_a_directory_may_be_a_path(tmp_path: Path) -> None:
    """`Engine(Path(...))` is `Engine(str(...))`."""
    await asyncio.to_thread(tiny_model, "Llama", tmp_path)
    answers = []
    for model in (tmp_path, str(tmp_path)):
        async with (
            Engine(model, dtype="float32", tokenizer=ByteTokenizer()) as engine,
            no_leaks(engine),
        ):
            answers += await run_together(engine, [[5, 6, 7]], 8)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 8
