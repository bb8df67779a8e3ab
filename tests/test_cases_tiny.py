"""Drawing tokens on TINY, on every carry: cases 33, 39, 41 to 44, 51 to 53 and 95.

TINY has Llama's shape and random weights, and computes in float32.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aneuron import Engine, InvalidRequest
from aneuron.testing import ByteTokenizer, no_leaks
from tests.support import CARRIES, every_carry, items_of
from tests.test_cases_sampling import SMALL, Carry, all_of, ids_of, told_of
from tests.test_equality import VOCAB, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from aneuron import TokenStream

pytestmark = pytest.mark.tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """TINY: where it lies, and the same in transformers."""
    path = tmp_path_factory.mktemp("tiny")
    return path, tiny_model("Llama", path)


def tiny_engine(tiny: tuple[Path, Any], carry: Carry, **options: Any) -> Engine:
    given: dict[str, Any] = {"dtype": "float32", "tokenizer": ByteTokenizer(), **SMALL, **carry}
    return Engine(str(tiny[0]), **{**given, **options})


@every_carry
@pytest.mark.parametrize("temperature", [0.7, 2.0])
async def test_case_39_top_k_from_none_to_more_than_there_are(
    tiny: tuple[Path, Any], carry: Carry, temperature: float
) -> None:
    """-1, 0 and ten times the vocabulary are one: all; the greedy row beside them is as alone."""
    asked: dict[str, Any] = {"prompt_token_ids": [5, 6, 7], "max_tokens": 16}
    drawn: dict[str, Any] = {**asked, "seed": 3, "temperature": temperature}
    async with tiny_engine(tiny, carry) as engine, no_leaks(engine):
        alone = await engine.generate(**asked, temperature=0)
        for top_p in (1.0, 0.5):
            greedy, five, *alike = await all_of(
                engine.generate(**asked, temperature=0),
                engine.generate(**drawn, top_k=5),
                *(
                    engine.generate(**drawn, top_k=top_k, top_p=top_p)
                    for top_k in (-1, 0, 10 * VOCAB, VOCAB, 2**31, 10**12)
                ),
            )
            assert greedy.token_ids == alone.token_ids
            assert len(five.token_ids) == 16
            assert [one.token_ids for one in alike] == [alike[0].token_ids] * 6
            for top_k in (-1, 0, 10 * VOCAB):  # no neighbour that has more looked at
                one = await engine.generate(**drawn, top_k=top_k, top_p=top_p)
                assert one.token_ids == alike[0].token_ids
            assert alike[0].token_ids != alone.token_ids


@every_carry
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_case_41_next_to_nothing_is_greedy(
    tiny: tuple[Path, Any], dtype: str, carry: Carry
) -> None:
    """A temperature, or a top_p, of 1e-4, or both."""
    asked: dict[str, Any] = {"prompt_token_ids": [9, 1, 7], "max_tokens": 16}
    async with tiny_engine(tiny, carry, dtype=dtype) as engine, no_leaks(engine):
        greedy = await engine.generate(**asked, temperature=0)
        narrow: list[dict[str, Any]] = [
            {"temperature": 1e-4}, {"top_p": 1e-4}, {"temperature": 1e-4, "top_p": 1e-4},
            {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-30, "top_p": 1e-30},
        ]  # fmt: skip
        for n, answer in enumerate(
            await all_of(*(engine.generate(**asked, seed=n, **one) for n, one in enumerate(narrow)))
        ):
            assert answer.token_ids == greedy.token_ids, narrow[n]
        assert len(set(greedy.token_ids)) > 3


@every_carry
async def test_case_42_ids_beyond_the_vocabulary(tiny: tuple[Path, Any], carry: Carry) -> None:
    """Refused by name, at the call; an id that the tokenizer lacks and the model has is fine."""
    refused: list[tuple[str, dict[str, Any]]] = [
        ("logit_bias", {"prompt_token_ids": [1], "logit_bias": {VOCAB: 5}}),
        ("logit_bias", {"prompt_token_ids": [1], "logit_bias": {-1: 5}}),
        ("allowed_token_ids", {"prompt_token_ids": [1], "allowed_token_ids": [-1, 3]}),
        ("allowed_token_ids", {"prompt_token_ids": [1], "allowed_token_ids": [3, VOCAB]}),
        ("prompt_token_ids", {"prompt_token_ids": [VOCAB]}),
        ("prompt_token_ids", {"prompt_token_ids": [-1]}),
    ]
    async with tiny_engine(tiny, carry) as engine, no_leaks(engine):
        one: dict[str, Any] = {"prompt_token_ids": [7, 8], "max_tokens": 12, "temperature": 0}
        other: dict[str, Any] = {**one, "temperature": 1.0, "seed": 4}
        alone = [await engine.generate(**one), await engine.generate(**other)]
        beside = [engine.generate(**one), engine.generate(**other)]
        for name, options in refused:
            with pytest.raises(InvalidRequest) as caught:
                _ = engine.generate(**options)
            assert (caught.value.param, isinstance(caught.value, ValueError)) == (name, True)
        last = VOCAB - 1
        accepted = engine.generate(
            prompt_token_ids=[last, 258], max_tokens=3, logit_bias={last: 100}
        )
        assert (await accepted).token_ids == [last] * 3
        assert [answer.token_ids for answer in await all_of(*beside)] == [
            answer.token_ids for answer in alone
        ]


@every_carry
async def test_case_33_end_ids_of_generation_config(
    tiny: tuple[Path, Any], tmp_path: Path, carry: Carry
) -> None:
    """Each of its list ends an answer and shows no text; ignored, there are 12 tokens."""
    shutil.copytree(tiny[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [65, 258]}')
    async with tiny_engine((tmp_path, None), carry) as engine, no_leaks(engine):
        asked: dict[str, Any] = {"prompt_token_ids": [5], "max_tokens": 12, "min_tokens": 4}
        for end in (65, 258):
            # Held back for as long as it must not come, then sure to come.
            ended = await engine.generate(**asked, logit_bias={end: 100})
            assert ended.token_ids.index(end) == len(ended.token_ids) - 1 == 4
            assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
            assert "A" not in ended.text[-1:]
            ignored = await engine.generate(**asked, logit_bias={end: 100}, ignore_eos=True)
            assert (ignored.token_ids, ignored.finish_reason) == ([end] * 12, "length")


# ── seeds ───────────────────────────────────────────────────────────────────────────────

SEEDED: dict[str, Any] = {
    "prompt_token_ids": [5, 6, 7], "seed": 42, "temperature": 0.8, "max_tokens": 16,
}  # fmt: skip
# In turns beside it: each alone changes which executables run, or the rows' order.
COMPANY: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 1.0}, {"seed": 7, "temperature": 0.5},
    {"seed": 42, "temperature": 0.8, "top_k": 3}, {"top_p": 0.5, "n": 3}, {"logprobs": 2},
    {"repetition_penalty": 1.3, "seed": 1}, {"prompt_logprobs": 1, "max_tokens": 1},
    {"stop": "zz", "min_p": 0.1}, {"logit_bias": {3: 9.0}, "frequency_penalty": 0.5},
]  # fmt: skip


@pytest.fixture(scope="module")
async def seeded_alone(tiny: tuple[Path, Any]) -> list[int]:
    """What the seeded request says at depth 1, without a prefix cache, alone."""
    async with tiny_engine(tiny, CARRIES["host"], enable_prefix_caching=False) as engine:
        return (await engine.generate(**SEEDED)).token_ids


@every_carry
async def test_case_43_a_seeded_request_repeats(
    tiny: tuple[Path, Any], seeded_alone: list[int], carry: Carry
) -> None:
    """Ten times each: alone, beside an unseeded one, beside a seeded one."""
    beside: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 7}]
    assert len(set(seeded_alone)) > 4, "temperature 0.8 on a random model is not greedy"
    async with tiny_engine(tiny, carry) as engine, no_leaks(engine):
        for round_ in range(30):
            others = [
                engine.generate(prompt_token_ids=[9, round_], max_tokens=20, **one)
                for one in beside[round_ % 3 : round_ % 3 + 1]
                if one
            ]
            assert (await engine.generate(**SEEDED)).token_ids == seeded_alone
            await all_of(*others)


@every_carry
@pytest.mark.parametrize("pool", [{}, {"block_size": 4, "num_kv_blocks": 24}], ids=["", "tight"])
async def test_case_43_in_a_batch_of_all_kinds(
    tiny: tuple[Path, Any], seeded_alone: list[int], pool: dict[str, Any], carry: Carry
) -> None:
    """At every place of the batch, with others that come and go, preempted and resumed."""
    async with tiny_engine(tiny, carry, **pool) as engine, no_leaks(engine):
        seeded = []
        for n, one in enumerate(COMPANY * 2):
            others = [
                engine.generate(
                    **{"prompt_token_ids": [n] * (1 + n % 6), "max_tokens": 1 + 5 * n % 17, **one}
                )
            ]
            seeded.append(engine.generate(**SEEDED))
            if n % 4 == 3:
                await all_of(*others)
        assert [answer.token_ids for answer in await all_of(*seeded)] == [seeded_alone] * 20
        assert bool(engine.stats().preemptions) == bool(pool)


@every_carry
async def test_case_44_choices_repeat_and_are_those_of_the_next_seeds(
    tiny: tuple[Path, Any], carry: Carry
) -> None:
    """n=4, seed=7, streamed twice: not all equal, every choice with its last token and end."""
    asked: dict[str, Any] = {"prompt_token_ids": [5, 6], "temperature": 1.0, "max_tokens": 12}
    # Stop ids that are drawn often, so that choices end at different times.
    asked["stop_token_ids"] = list(range(0, VOCAB, 12))
    async with tiny_engine(tiny, carry) as engine, no_leaks(engine):
        runs = [await items_of(engine.generate(**asked, n=4, seed=7)) for _ in range(2)]
        told = [[[one for one in run if one.choice == n] for n in range(4)] for run in runs]
        assert told[0] == told[1]
        ids = [ids_of(items) for items in told[0]]
        assert len({tuple(one) for one in ids}) > 1
        assert len({len(one) for one in ids}) > 1
        for n, items in enumerate(told[0]):
            alone = await engine.generate(**asked, seed=7 + n)
            assert ids[n] == alone.token_ids
            assert items[-1].finish_reason == alone.finish_reason
            assert all(item.finish_reason is None for item in items[:-1])


@every_carry
async def test_case_95_all_kinds_side_by_side_on_tiny(tiny: tuple[Path, Any], carry: Carry) -> None:
    """The same on compiled executables, which sample all rows of a step together."""
    asked: list[dict[str, Any]] = [
        {
            "prompt_token_ids": [n] * (1 + n % 6), "max_tokens": 1 + (5 * n) % 17, "seed": n,
            "ignore_eos": True, **one,
        }
        for n, one in enumerate(COMPANY * 3)
    ]  # fmt: skip
    async with tiny_engine(tiny, CARRIES["host"], enable_prefix_caching=False) as engine:
        alone = [told_of(await engine.generate(**one)) for one in asked]
    options: dict[str, Any] = {"max_num_seqs": 4, "block_size": 4, "num_kv_blocks": 10}
    async with tiny_engine(tiny, carry, **options) as engine, no_leaks(engine):
        together = await all_of(*(engine.generate(**one) for one in asked))
        for answer, expected in zip(together, alone, strict=True):
            for mine, (ids, text, reason, stop, _) in zip(answer.choices, expected, strict=True):
                told = mine.token_ids, mine.text, mine.finish_reason, mine.stop_reason
                assert told == (ids, text, reason, stop)
        assert engine.stats().preemptions >= 1


# ── log probabilities ───────────────────────────────────────────────────────────────────


@every_carry
@pytest.mark.parametrize("ends", [{}, {"stop": "\ufffd"}, {"n": 3, "temperature": 1.0}], ids=str)
async def test_case_51_logprobs_streamed_late_and_awaited(
    tiny: tuple[Path, Any], ends: dict[str, Any], carry: Carry
) -> None:
    """Entry by entry the same: token, logprob, alternatives; each is the model's own.

    Of one request to the last bit; of two, which ran in different batches, but for rounding.
    """
    options: dict[str, Any] = {
        "prompt_token_ids": [9, 4], "max_tokens": 30, "temperature": 0, "logprobs": 3, "seed": 5,
        **ends,
    }  # fmt: skip
    model = tiny[1]
    async with tiny_engine(tiny, carry) as engine, no_leaks(engine):
        streams = [engine.generate(**options) for _ in range(3)]
        early = await items_of(streams[0])
        await engine.wait_idle()
        late = await items_of(streams[1])
        for items, stream in ((early, streams[0]), (late, streams[1])):
            for choice in (await stream).choices:
                mine = [item for item in items if item.choice == choice.index]
                assert ids_of(mine) == choice.token_ids
                assert [item.logprobs for item in mine] == choice.logprobs
        for choice in (await streams[2]).choices:
            mine = [item for item in early if item.choice == choice.index]
            assert ids_of(mine) == choice.token_ids
            assert choice.logprobs is not None
            assert [one.logprob for one in choice.logprobs] == pytest.approx(
                [item.logprobs.logprob for item in mine if item.logprobs], abs=1e-5
            )
            with torch.inference_mode():
                logits = model(torch.tensor([[9, 4, *choice.token_ids]])).logits[0, 1:-1]
            for token, one, row in zip(
                choice.token_ids, choice.logprobs, logits.double().log_softmax(-1), strict=True
            ):
                assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
                values = row.topk(3).values.tolist()
                assert [value for _, value in one.top] == pytest.approx(values, abs=1e-4)


@every_carry
@pytest.mark.parametrize("budget", [7, 64])
@pytest.mark.parametrize("n", [1, 3])
async def test_case_52_logprobs_of_a_prompt(
    tiny: tuple[Path, Any], budget: int, n: int, carry: Carry
) -> None:
    """20 entries, the first None; each is that of a plain forward pass, cached or not."""
    chance = random.Random(9)
    prompt = [chance.randrange(VOCAB) for _ in range(20)]
    with torch.inference_mode():
        rows = tiny[1](torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    async with (
        tiny_engine(tiny, carry, max_num_batched_tokens=budget, block_size=4) as engine,
        no_leaks(engine),
    ):
        await engine.generate(prompt_token_ids=prompt, max_tokens=1)  # cached from now on
        for _ in range(2):
            beside = engine.generate(prompt_token_ids=prompt[:9], max_tokens=9)
            answer = await engine.generate(
                prompt_token_ids=prompt, max_tokens=2, prompt_logprobs=1, n=n
            )
            told = answer.prompt_logprobs
            assert told is not None
            assert len(told) == 20
            assert told[0] is None
            for before, (token, one) in enumerate(zip(prompt[1:], told[1:], strict=True)):
                assert one is not None
                assert one.logprob == pytest.approx(float(rows[before, token]), abs=1e-4)
                assert [at for at, _ in one.top] == [int(rows[before].argmax())]
                assert one.top[0][1] == pytest.approx(float(rows[before].max()), abs=1e-4)
            await beside


# ── text ────────────────────────────────────────────────────────────────────────────────


@every_carry
async def test_case_53_fifty_prompts_streamed_and_awaited(
    tiny: tuple[Path, Any], carry: Carry
) -> None:
    """Bytes of a random model are mostly broken characters; all readers see the same text."""
    chance = random.Random(53)

    async def slowly(stream: TokenStream, first: int) -> str:
        text = ""
        async for token in stream:
            text += token.text
            if token.index == first:
                await engine.wait_idle()
        return text

    async with tiny_engine(tiny, carry, max_num_seqs=16) as engine, no_leaks(engine):
        asked: list[dict[str, Any]] = [
            {
                "prompt_token_ids": [chance.randrange(VOCAB) for _ in range(chance.randint(1, 24))],
                "max_tokens": chance.randint(1, 16), "temperature": 0,
                "stop": chance.choice([(), "\ufffd\ufffd", ["a", "2", " "], "<29"]),
                "skip_special_tokens": chance.random() < 0.5,
            }
            for _ in range(50)
        ]  # fmt: skip
        texts = [
            await asyncio.gather(*(slowly(engine.generate(**one), first) for one in asked))
            for first in (-1, 0, 3)  # -1: as soon as they come
        ]
        answers = await all_of(*(engine.generate(**one) for one in asked))
        late = [engine.generate(**one) for one in asked]
        await engine.wait_idle()
        whole_texts = [answer.text for answer in answers]
        assert [*texts, [answer.text for answer in await all_of(*late)]] == [whole_texts] * 4
        assert len(set(whole_texts)) > 40
        reasons = {answer.finish_reason for answer in answers}
        assert reasons == {"stop", "length"}
