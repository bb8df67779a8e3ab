"""Keys and values in 8 bits: block sizes, forks and preemption change no bit of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from aneuron import Engine
from aneuron.models.native import build
from aneuron.testing import ByteTokenizer, no_leaks

if TYPE_CHECKING:
    from pathlib import Path

    from aneuron import Completion

pytestmark = [pytest.mark.tiny, pytest.mark.timeout(120)]

# The library computes blocks of a multiple of 16; the eager decoder any others.
SIZES = [5, 7, 16, 24, 48]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert build.compile_library() is not None, "else nothing here runs compiled"
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.4, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def engine_of(model: Path, block_size: int, **options: Any) -> Engine:
    given = {"dtype": "float32", "kv_cache_dtype": "int8", "tokenizer": ByteTokenizer()}
    return Engine(model, block_size=block_size, **{**given, **options})


PROMPTS = [[(11 * n + 3 * at) % 256 for at in range(9 + 5 * n)] for n in range(6)]
ASKED: list[dict[str, Any]] = [
    {
        "prompt_token_ids": prompt, "max_tokens": 30, "ignore_eos": True, "logprobs": 2,
        "temperature": 0.8 * (number % 2), "seed": number,
    }
    for number, prompt in enumerate(PROMPTS)
]  # fmt: skip


def told(answer: Completion) -> list[tuple[list[int], list[float]]]:
    """Ids of each choice, and the log probability of each to its last bit."""
    return [
        (choice.token_ids, [one.logprob for one in choice.logprobs or ()])
        for choice in answer.choices
    ]


@pytest.mark.parametrize("block_size", SIZES)
async def test_preempted_answers_are_those_of_a_request_alone(model: Path, block_size: int) -> None:
    async with engine_of(model, block_size) as engine:
        alone = [told(await engine.generate(**one)) for one in ASKED]
    blocks = -(-240 // block_size)
    async with engine_of(model, block_size, num_kv_blocks=blocks) as engine, no_leaks(engine):
        streams = [engine.generate(**one) for one in ASKED]
        together = [told(await stream) for stream in streams]
        assert engine.stats().preemptions >= 1
    assert [[ids for ids, _ in one] for one in together] == [
        [ids for ids, _ in one] for one in alone
    ]
    if block_size % 16 == 0:
        assert together == alone


@pytest.mark.parametrize("block_size", SIZES)
async def test_choices_that_share_a_block_are_those_of_requests_alone(
    model: Path, block_size: int
) -> None:
    """Their prompt ends inside a block, of which each choice but one gets a copy."""
    prompt = PROMPTS[0] + PROMPTS[1][:2]
    assert len(prompt) % block_size
    asked: dict[str, Any] = {**ASKED[1], "prompt_token_ids": prompt}
    async with engine_of(model, block_size, enable_prefix_caching=False) as engine:
        alone = told(await engine.generate(**asked))
    async with engine_of(model, block_size) as engine, no_leaks(engine):
        both = engine.generate(**asked, n=3), engine.generate(**ASKED[2], n=2)
        three, two = [told(await stream) for stream in both]
    assert three[0][0] == alone[0][0]
    assert three[1] != three[0] != three[2], "each draws with a seed of its own"
    assert [ids for ids, _ in two] == [two[0][0]] * 2
    if block_size % 16 == 0:
        assert three[0] == alone[0]
