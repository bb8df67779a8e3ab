"""The decoder and its executables equal transformers, whatever shares the launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

from aneuron.models.torch_model import TorchModel
from aneuron.plans import ModelInput

if TYPE_CHECKING:
    from pathlib import Path

    from aneuron.models.executables import TorchExecutable

pytestmark = pytest.mark.tiny

VOCAB = 199
EOS = VOCAB - 1
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": EOS,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 64}
SLIDING = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2-sliding": ("Qwen2", SLIDING),
    "qwen3": ("Qwen3", {"head_dim": 20}),
    "qwen3-sliding": ("Qwen3", {**SLIDING, "head_dim": 8, "attention_bias": True}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
}
BLOCK = 4


@dataclass
class Reference:
    """A model of transformers and the directory it was saved to."""

    model: Any
    path: Path

    def logits(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[0]  # type: ignore[no-any-return]

    def generate(self, ids: list[int], num: int) -> list[int]:
        with torch.inference_mode():
            tensor = torch.tensor([ids])
            out = self.model.generate(
                tensor,
                attention_mask=torch.ones_like(tensor),
                max_new_tokens=num,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[0, len(ids) :].tolist()  # type: ignore[no-any-return]


@dataclass
class Sequence:
    """Known tokens, how many of them are in the cache, and the blocks of the row."""

    ids: list[int]
    params: dict[str, float] = field(default_factory=dict)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class Driver:
    """Builds launches by hand: shuffled blocks, padding of every kind."""

    def __init__(self, path: Path, *, num_blocks: int = 160, dtype: str = "float32") -> None:
        self.model = TorchModel.load(path, dtype=dtype, name="tiny")
        self.model.allocate_kv(num_blocks, BLOCK)
        self.free = list(np.random.default_rng(0).permutation(num_blocks) + 1)

    def inputs(
        self,
        rows: list[Sequence],
        nums: list[int],
        *,
        is_decode: bool = False,
        pad_rows: int = 0,
        pad_tokens: int = 0,
        pad_blocks: int = 0,
    ) -> ModelInput:
        """Plan the next `nums` tokens of each row as one launch."""
        for seq, num in zip(rows, nums, strict=True):
            while len(seq.blocks) * BLOCK < seq.computed + num:
                seq.blocks.append(int(self.free.pop()))
        num_rows, num_tokens = len(rows) + pad_rows, sum(nums)
        size = num_rows if is_decode else num_tokens + pad_tokens
        table = np.zeros((num_rows, pad_blocks + max(len(s.blocks) for s in rows)), np.int32)
        ids, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        slots, start = np.full(size, -1, np.int32), np.full(num_rows + 1, num_tokens, np.int32)
        lens, last = np.ones(num_rows, np.int32), np.zeros(num_rows, np.int32)
        at = 0
        for row, (seq, num) in enumerate(zip(rows, nums, strict=True)):
            here, end = np.arange(seq.computed, seq.computed + num), at + num
            table[row, : len(seq.blocks)] = seq.blocks
            ids[at:end], positions[at:end] = np.array(seq.ids)[here], here
            slots[at:end] = np.array(seq.blocks)[here // BLOCK] * BLOCK + here % BLOCK
            start[row], lens[row], last[row] = at, here[-1] + 1, end - 1
            at = end
        temperature = self.column(rows, num_rows, "temperature", 0.0)
        top_k = self.column(rows, num_rows, "top_k", 0.0).astype(np.int32)
        top_p = self.column(rows, num_rows, "top_p", 1.0)
        return ModelInput(
            is_decode=is_decode,
            num_reqs=len(rows),
            num_samples=len(rows),
            num_tokens=num_tokens,
            max_query_len=1 if is_decode else max(nums) + pad_tokens % 3,
            all_greedy=not any(seq.params.get("temperature") for seq in rows),
            input_ids=ids,
            positions=positions,
            slot_mapping=slots,
            query_start=start,
            block_table=table,
            context_lens=lens,
            logits_indices=last,
            prompt_lens=lens.copy(),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=self.column(rows, num_rows, "min_p", 0.0),
            seed=self.column(rows, num_rows, "seed", 0.0).astype(np.int64),
        )

    @staticmethod
    def column(rows: list[Sequence], num: int, name: str, default: float) -> np.ndarray:
        values = [row.params.get(name, default) for row in rows]
        return np.array(values + [default] * (num - len(rows)), np.float32)

    def logits(self, rows: list[Sequence], nums: list[int], **options: Any) -> torch.Tensor:
        """Run a step and return the real rows' logits."""
        inputs = self.inputs(rows, nums, **options)
        with torch.inference_mode():
            logits: torch.Tensor = self.model.split(inputs).forward(inputs, None).values
        self.advance(rows, nums)
        return logits[: len(rows)]

    def run(self, rows: list[Sequence], nums: list[int], **options: Any) -> torch.Tensor:
        """Run a step, append the sampled tokens and return them."""
        inputs = self.inputs(rows, nums, **options)
        sampled = self.model.executable(inputs)(inputs, None)
        assert isinstance(sampled, torch.Tensor)
        assert sampled.dtype == torch.int32
        assert len(sampled) == inputs.num_sampled
        self.advance(rows, nums)
        for seq, token in zip(rows, sampled.tolist(), strict=False):
            if seq.computed == len(seq.ids):
                seq.ids.append(token)
        return sampled

    def decode(self, rows: list[Sequence], num_steps: int, **options: Any) -> None:
        for _ in range(num_steps):
            self.run(rows, [1] * len(rows), is_decode=True, **options)

    @staticmethod
    def advance(rows: list[Sequence], nums: list[int]) -> None:
        for seq, num in zip(rows, nums, strict=True):
            seq.computed += num

    def poison(self, value: float = float("nan")) -> None:
        """Fill the whole cache, the null block too, with garbage."""
        for cache in (*self.model.k_caches, *self.model.v_caches):
            cache.fill_(value)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(1000 * seed + length)
    return [int(token) for token in rng.integers(0, VOCAB, length)]


def save_tiny(family: str, path: Path) -> Reference:
    kind, changes = FAMILIES[family]
    torch.manual_seed(sum(map(ord, family)))
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # initialised to constants
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path)
    return Reference(model, path)


@pytest.fixture(scope="module", params=FAMILIES)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)


def test_prefill_and_decode_logits_equal_transformers(reference: Reference) -> None:
    driver = Driver(reference.path)
    driver.poison()
    prompts = [prompt(length) for length in (1, 7, 16, 33, 20)]
    known = [ids + prompt(4, seed=9) for ids in prompts]
    rows = [Sequence(ids) for ids in known]
    logits = driver.logits(
        rows, [len(ids) for ids in prompts], pad_rows=3, pad_tokens=11, pad_blocks=2
    )
    expected = [reference.logits(ids) for ids in known]
    for row, ids in enumerate(prompts):
        close(logits[row], expected[row][len(ids) - 1])
    for step in range(4):
        logits = driver.logits(rows, [1] * 5, is_decode=True, pad_rows=step, pad_blocks=1)
        for row, ids in enumerate(prompts):
            close(logits[row], expected[row][len(ids) + step])


def test_greedy_tokens_equal_generate(reference: Reference) -> None:
    driver = Driver(reference.path)
    prompts = [prompt(length, seed=1) for length in (1, 5, 18, 40)]
    rows = [Sequence(list(ids)) for ids in prompts]
    driver.run(rows, [len(ids) for ids in prompts], pad_rows=4, pad_tokens=3)
    driver.decode(rows, 23, pad_rows=4)
    for seq, ids in zip(rows, prompts, strict=True):
        assert seq.ids[len(ids) :] == reference.generate(ids, 24)


def test_chunked_prefill_equals_whole_prefill(reference: Reference) -> None:
    driver = Driver(reference.path)
    driver.poison()
    one, two = Sequence(prompt(37)), Sequence(prompt(22))
    chunks = [(5, 9), (1, 1), (13, 7), (18, 5)]
    for nums in chunks:
        logits = driver.logits([one, two], list(nums), pad_rows=1, pad_tokens=2)
    close(logits[0], reference.logits(one.ids)[-1])
    close(logits[1], reference.logits(two.ids)[-1])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e38])
def test_garbage_in_unwritten_slots_changes_no_bit(llama: Reference, garbage: float) -> None:
    results = []
    for fill in (0.0, garbage):
        driver = Driver(llama.path)
        driver.poison(fill)
        rows = [Sequence(prompt(5)), Sequence(prompt(9))]
        options = {"pad_rows": 2, "pad_blocks": 3}
        first = driver.logits(rows, [4, 8], pad_tokens=5, **options)
        results.append((first, driver.logits(rows, [1, 1], is_decode=True, **options)))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


def test_loud_neighbours_change_no_bit(llama: Reference) -> None:
    results = []
    for loud in (False, True):
        driver = Driver(llama.path)
        rows = [Sequence(prompt(30, seed=2)), Sequence(prompt(11)), Sequence(prompt(4))]
        nums = [29, 10, 3]
        driver.logits(rows, nums)
        if loud:  # the neighbours' keys and values, and their own garbage
            for cache in (*driver.model.k_caches, *driver.model.v_caches):
                cache[[0, *rows[0].blocks, *rows[2].blocks]] = float("nan")
        results.append(driver.logits(rows, [1] * 3, is_decode=True, pad_rows=1))
    assert torch.equal(results[0][1], results[1][1])
    assert results[1][0].isnan().all()


def test_row_equals_itself_alone(llama: Reference) -> None:
    alone, crowd = Driver(llama.path), Driver(llama.path)
    single = Sequence(prompt(12))
    others = [Sequence(prompt(length, seed=5)) for length in (50, 2, 31)]
    same = Sequence(prompt(12))
    expected = alone.logits([single], [11])
    actual = crowd.logits([*others, same], [49, 1, 30, 11], pad_rows=4, pad_tokens=36)
    close(actual[3], expected[0])
    expected = alone.logits([single], [1], is_decode=True)
    actual = crowd.logits([*others, same], [1] * 4, is_decode=True, pad_rows=4)
    close(actual[3], expected[0])


def test_sampled_row_equals_itself_alone(llama: Reference) -> None:
    hot = {"temperature": 1.3, "seed": 11, "top_k": 20}
    alone, crowd = Driver(llama.path), Driver(llama.path)
    single, same = Sequence(prompt(12), hot), Sequence(prompt(12), hot)
    others = [
        Sequence(prompt(9), {"temperature": 0.7, "top_p": 0.5, "seed": 3}),
        Sequence(prompt(17)),
    ]
    alone.run([single], [12])
    alone.decode([single], 30)
    crowd.run([others[0], same, others[1]], [9, 12, 17], pad_rows=1)
    crowd.decode([others[0], same, others[1]], 30, pad_rows=5)
    assert single.ids == same.ids
    assert others[1].ids[17:] == llama.generate(prompt(17), 31)


def test_resumed_row_samples_what_it_would_have(llama: Reference) -> None:
    hot = {"temperature": 1.0, "seed": 5}
    driver = Driver(llama.path)
    seq = Sequence(prompt(6), hot)
    driver.run([seq], [6])
    driver.decode([seq], 12)
    resumed = Sequence(seq.ids[:14], hot)
    driver.run([resumed], [10])
    driver.run([resumed], [4])
    assert resumed.ids == seq.ids[:15]


def test_device_value_takes_the_place_of_input_ids(llama: Reference) -> None:
    driver = Driver(llama.path)
    rows = [Sequence(prompt(3)), Sequence(prompt(8))]
    driver.run(rows, [3, 8])
    inputs = driver.inputs(rows, [1, 1], is_decode=True, pad_rows=2)
    executable = driver.model.executable(inputs)
    expected: Any = executable(inputs, None)
    fed = torch.from_numpy(inputs.input_ids.copy())
    inputs.input_ids = None
    assert len(expected) == 4
    again: Any = executable(inputs, fed)
    assert torch.equal(again, expected)


def executables(driver: Driver, *params: dict[str, float]) -> TorchExecutable:
    rows = [Sequence(prompt(2), row) for row in params]
    inputs = driver.inputs(rows, [1] * len(rows), is_decode=True, pad_blocks=2)
    return driver.model.executable(inputs)


def test_one_executable_per_bucket(llama: Reference) -> None:
    driver = Driver(llama.path)
    cold: dict[str, float] = {}
    hot = {"temperature": 1.0}
    assert executables(driver, cold, cold) is executables(driver, cold, cold)
    assert executables(driver, cold).name == "decode[r1,b3]"
    assert executables(driver, cold).sampled_dtype == "int32"
    # What rows ask for is no shape: it makes no other program.
    assert executables(driver, hot) is executables(driver, cold)
    assert executables(driver, hot, {**hot, "top_p": 0.9}).name == "decode[r2,b3]"


def test_bfloat16_stays_near_float32(llama: Reference) -> None:
    driver = Driver(llama.path, dtype="bfloat16")
    ids = prompt(25)
    logits = driver.logits([Sequence(ids)], [25])
    assert logits.dtype == torch.float32
    expected = llama.logits(ids)[-1]
    assert torch.nn.functional.cosine_similarity(logits[0], expected, dim=0) > 0.995


def test_decode_step_can_be_exported(llama: Reference) -> None:
    driver = Driver(llama.path, num_blocks=24)
    rows = [Sequence(prompt(6)), Sequence(prompt(9))]
    driver.logits(rows, [5, 8])
    inputs = driver.inputs(rows, [1, 1], is_decode=True, pad_rows=2)
    names = ("input_ids", "positions", "slot_mapping", "query_start", "block_table")
    columns = (*names, "context_lens", "logits_indices")
    model = driver.model
    arguments: tuple[Any, ...] = (
        *(torch.from_numpy(getattr(inputs, column)) for column in columns),
        [cache.clone() for cache in model.k_caches],
        [cache.clone() for cache in model.v_caches],
    )
    with torch.no_grad():
        program = torch.export.export(model.decoder, arguments, {"max_query_len": 1})
        logits = program.module()(*arguments, max_query_len=1)
    close(logits[:2], driver.logits(rows, [1, 1], is_decode=True, pad_rows=2))
    # The export writes the caches in place, as the eager step does.
    close(arguments[-1][3][1:], model.v_caches[3][1:])
