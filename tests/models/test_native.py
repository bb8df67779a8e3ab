"""Steps in C++: equal to the eager decoder, row by row the same in any company, and swapped in."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

from aneuron.config import BatchShape, EngineConfig
from aneuron.errors import ConfigError
from aneuron.models.native import build, store, switch
from aneuron.models.native.library import load_library
from aneuron.models.native.packing import KINDS, Packed, pack
from aneuron.models.native.program import NativeDecoder, NativeSteps, packed_weights, part_kind
from aneuron.models.torch_model import TorchModel
from aneuron.models.weights import kv_width
from aneuron.plans import BlockCopies, ModelInput

if TYPE_CHECKING:
    from pathlib import Path

    from aneuron.models.decoder import Decoder
    from aneuron.models.native.library import Library

pytestmark = [pytest.mark.tiny, pytest.mark.timeout(120)]

SIZES: dict[str, Any] = {
    "vocab_size": 199,  # no multiple of a panel
    "hidden_size": 60,  # nor of 8
    "intermediate_size": 72,  # nor of 16
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": 198,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 50}),
    "qwen2": ("Qwen2", {"head_dim": 16}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-sliding": ("Qwen3", {**SLIDING, "head_dim": 48}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "one-head": ("Llama", {"hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 1}),
}
BLOCK = 16
NUM_BLOCKS = 120


@pytest.fixture(scope="session")
def library() -> Library:
    path = build.compile_library()
    if path is None:
        pytest.fail("no compiler: install g++ to test what most users run")
    return load_library(path)


def make_model(family: str, into: Path, dtype: str = "float32") -> TorchModel:
    torch.manual_seed(3)
    name, extra = FAMILIES[family]
    sizes = {**SIZES, **extra}
    if name == "SmolLM3":
        sizes["hidden_size"], sizes["head_dim"] = 96, 16
    config = getattr(transformers, f"{name}Config")(**sizes)
    getattr(transformers, f"{name}ForCausalLM")(config).eval().save_pretrained(into)
    model = TorchModel.load(into, dtype=dtype, enforce_eager=True)
    model.allocate_kv(NUM_BLOCKS, BLOCK, 8)
    return model


def native_steps(
    library: Library,
    decoder: Decoder,
    kind: str,
    *,
    num_threads: int = 2,
    cells: torch.dtype | None = None,
) -> tuple[NativeSteps, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Steps over a cache whose every cell holds garbage: NaN, with 8 bits as scales."""
    config = decoder.config
    weights = NativeDecoder(config, kind, packed_weights(decoder, kind))
    cells = cells or weights.dtype
    shape = (NUM_BLOCKS + 1, BLOCK, config.num_kv_heads, kv_width(config, cells))
    garbage = 255 if cells == torch.uint8 else np.nan
    caches = [
        (torch.full(shape, garbage, dtype=cells), torch.full(shape, garbage, dtype=cells))
        for _ in range(config.num_layers)
    ]
    return NativeSteps(weights, library, caches, BLOCK, num_threads), caches


class Rows:
    """Rows of one batch, each with blocks of its own, in an order of their own."""

    def __init__(self, lengths: list[int], *, seed: int = 0, block: int = BLOCK) -> None:
        self.size = block
        rng = np.random.default_rng(seed)
        self.ids = [rng.integers(0, 199, size=length + 40).tolist() for length in lengths]
        free = (rng.permutation(NUM_BLOCKS) + 1).tolist()
        self.blocks = [[free.pop() for _ in range(-(-(n + 40) // block))] for n in lengths]
        self.computed = [0] * len(lengths)

    def step(self, counts: dict[int, int]) -> ModelInput:
        """The next tokens of some rows, in this order."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        start, last, table = [0], [], []
        width = max(len(self.blocks[row]) for row in counts)
        for row, count in counts.items():
            for position in range(self.computed[row], self.computed[row] + count):
                ids.append(self.ids[row][position])
                positions.append(position)
                slots.append(
                    self.blocks[row][position // self.size] * self.size + position % self.size
                )
            self.computed[row] += count
            start.append(len(ids))
            last.append(len(ids) - 1)
            table.append(self.blocks[row] + [0] * (width - len(self.blocks[row])))
        num = len(counts)
        columns = {"input_ids": ids, "positions": positions, "slot_mapping": slots}
        zeros = np.zeros(num, np.float32)
        arrays: dict[str, Any] = {name: np.array(one, np.int32) for name, one in columns.items()}
        return ModelInput(
            is_decode=False, num_reqs=num, num_samples=num, num_tokens=len(ids),
            max_query_len=max(2, *counts.values()), all_greedy=True,
            **arrays,
            query_start=np.array(start, np.int32), block_table=np.array(table, np.int32),
            context_lens=np.array([self.computed[row] for row in counts], np.int32),
            logits_indices=np.array(last, np.int32), prompt_lens=np.zeros(num, np.int32),
            temperature=zeros, top_k=np.zeros(num, np.int32), top_p=zeros + 1, min_p=zeros,
            seed=np.zeros(num, np.int64),
        )  # fmt: skip


# A chunk, the rest of it beside another's beginning, decodes, and a long one beside short ones.
SCRIPT: list[dict[int, int]] = [
    {0: 7}, {0: 26, 1: 3}, {1: 30, 2: 150}, {0: 1, 1: 1, 2: 1}, {2: 1, 0: 1}, {1: 5, 3: 1, 0: 1},
]  # fmt: skip
LENGTHS = [33, 33, 150, 1]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_float32_equals_the_eager_decoder(library: Library, family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path)
    steps, _ = native_steps(library, model.decoder, "float32")
    rows, twin = Rows(LENGTHS), Rows(LENGTHS)
    for counts in SCRIPT:
        inputs = rows.step(counts)
        expected = model.split(inputs).forward(inputs, None).values
        again = twin.step(counts)
        told = torch.from_numpy(steps.run(again, again.input_ids)[: len(counts)].copy())
        torch.testing.assert_close(told, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["llama-bias", "qwen3"])  # the output layer is its own
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_fewer_bits_stay_near(library: Library, family: str, kind: str, tmp_path: Path) -> None:
    """Near a decoder in float32 with the same rounded weights: what is left are activations."""
    model = make_model(family, tmp_path, "bfloat16")
    steps, _ = native_steps(library, model.decoder, kind)
    exact = make_model(family, tmp_path / "exact")
    for name, module in exact.decoder.named_modules():
        if isinstance(module, torch.nn.Linear):
            columns, depth = module.weight.shape
            part = part_kind(kind, name.rpartition(".")[2])
            rounded = pack(module.weight.bfloat16(), part)
            module.weight.copy_(unpack(rounded)[:columns, :depth])
    rows, twin = Rows(LENGTHS), Rows(LENGTHS)
    for counts in SCRIPT:
        inputs, again = rows.step(counts), twin.step(counts)
        expected = exact.split(inputs).forward(inputs, None).values
        told = torch.from_numpy(steps.run(again, again.input_ids)[: len(counts)].copy())
        assert torch.nn.functional.cosine_similarity(told, expected).min() > 0.99


def with_loud_tokens(decoder: Decoder) -> None:
    """Make what nine tokens bring 300 to 3,000 times as large, down to the cache."""
    decoder.embed.weight[190:].mul_(3000)
    for layer in decoder.layers:
        layer.input_norm.weight[5] = 300  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("kind", [*KINDS, "int8 cache"])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_is_the_same_in_any_company(
    library: Library, kind: str, num_threads: int, tmp_path: Path
) -> None:
    """To the last bit: alone, beside up to 12 others, loud ones too, and cut into chunks."""
    cells = torch.uint8 if kind == "int8 cache" else None
    kind = kind.removesuffix(" cache")
    model = make_model("llama", tmp_path, "float32" if kind == "float32" else "bfloat16")
    with_loud_tokens(model.decoder)
    lengths = [21, *range(3, 15)]
    alone: list[np.ndarray] = []
    rows = Rows(lengths)
    quiet = [max(ids[:length]) < 190 for ids, length in zip(rows.ids, lengths, strict=True)]
    assert 3 < sum(quiet) < len(quiet) - 3
    for row, length in enumerate(lengths):
        steps, _ = native_steps(library, model.decoder, kind, num_threads=1, cells=cells)
        inputs = rows.step({row: length})
        alone.append(steps.run(inputs, inputs.input_ids)[0].copy())
    steps, _ = native_steps(library, model.decoder, kind, num_threads=num_threads, cells=cells)
    for company in range(1, len(lengths) + 1):
        rows = Rows(lengths)
        inputs = rows.step({row: lengths[row] for row in range(company)})
        told = steps.run(inputs, inputs.input_ids)
        for row in range(company):
            np.testing.assert_array_equal(told[row], alone[row])
    rows = Rows(lengths)
    for begin in range(0, 21, 3):
        inputs = rows.step({0: 3, **({1: 3} if begin == 0 else {})})
        told = steps.run(inputs, inputs.input_ids)
    np.testing.assert_array_equal(told[0], alone[0])


def test_prompts_have_logits_of_any_token(library: Library, tmp_path: Path) -> None:
    model = make_model("llama", tmp_path)
    steps, _ = native_steps(library, model.decoder, "float32")
    inputs = Rows([20]).step({0: 20})
    last = steps.run(inputs, inputs.input_ids)[0].copy()
    told = steps.logits_of(np.arange(20)).copy()
    np.testing.assert_array_equal(told[19], last)
    for count in (1, 7, 19):
        rows = Rows([20])
        part = rows.step({0: count})
        np.testing.assert_array_equal(steps.run(part, part.input_ids)[0], told[count - 1])


def test_a_running_model_changes_over_between_two_steps(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in ("float32", "bfloat16", "float32, 8 bits"):
        dtype, _, bits = case.partition(",")
        cells = torch.uint8 if bits else None
        model = make_model("qwen3", tmp_path / case, dtype)
        source = switch.WeightSource(
            tmp_path / case, model.config, model.decoder.embed.weight.dtype
        )
        changing = TorchModel(model.spec, model.config, source, kv_dtype=cells)
        changing.allocate_kv(NUM_BLOCKS, BLOCK, 8)
        rows, twin = Rows(LENGTHS), Rows(LENGTHS)
        for number, counts in enumerate(SCRIPT):
            if number == 3:
                path = build.built_library()
                assert path is not None
                assert source._pack(path)
            inputs, again = rows.step(counts), twin.step(counts)
            expected = model.split(inputs).forward(inputs, None).values
            told = changing.split(again).forward(again, None).values
            assert (changing._steps is not None) == (number >= 3)
            if case == "float32":
                torch.testing.assert_close(told[: len(counts)], expected, rtol=2e-4, atol=2e-4)
            else:
                near = torch.nn.functional.cosine_similarity(told[: len(counts)], expected)
                assert near.min() > 0.997


def test_the_gil_is_free_while_a_step_runs(library: Library, tmp_path: Path) -> None:
    model = make_model("llama", tmp_path)
    steps, _ = native_steps(library, model.decoder, "float32", num_threads=1)
    stop, worst_s = threading.Event(), 0.0

    def run() -> None:
        while not stop.is_set():
            inputs = Rows([300]).step({0: 300})
            steps.run(inputs, inputs.input_ids)

    thread = threading.Thread(target=run)
    thread.start()
    last_s = time.perf_counter()
    for _ in range(200):
        time.sleep(0)
        now_s = time.perf_counter()
        worst_s, last_s = max(worst_s, now_s - last_s), now_s
    stop.set()
    thread.join()
    assert worst_s < 0.1


def unpack(packed: Packed) -> torch.Tensor:
    """The matrix that is stored, float32 [N padded, K padded]; the slow way."""
    rows = []
    for panel in range(len(packed.data)):
        for lane in range(32):
            row = packed.data[panel, :, lane]
            if packed.kind == "int4":
                assert packed.scales is not None
                assert packed.zeros is not None
                both = torch.stack([row & 15, row >> 4], dim=1).flatten().float()
                scale = packed.scales[panel, :, lane].float().repeat_interleave(packed.group)
                zero = packed.zeros[panel, :, lane].float().repeat_interleave(packed.group)
                rows.append(both * scale - zero)
            elif packed.kind == "int8":
                assert packed.scales is not None
                scale = packed.scales[panel, :, lane].repeat_interleave(packed.group)
                rows.append((row.flatten().float() - 128) * scale)
            else:
                rows.append(row.flatten().float())
    return torch.stack(rows)


@pytest.mark.parametrize("kind", list(KINDS))
def test_packing_keeps_the_weights(kind: str) -> None:
    """What is stored is the matrix, to the kind's precision; read back here the slow way."""
    weight = torch.randn(70, 100, generator=torch.Generator().manual_seed(0))
    packed = pack(weight, kind, torch.arange(70.0))
    rebuilt = unpack(packed)
    tolerance = {"float32": 0.0, "bfloat16": 0.02, "int8": 0.02, "int4": 0.9}[kind]
    torch.testing.assert_close(rebuilt[:70, :100], weight, rtol=0, atol=tolerance)
    assert not rebuilt[70:].any()
    assert packed.bias is not None
    assert packed.bias.tolist() == [*range(70), *[0] * 26]


def test_packed_weights_are_kept_and_mapped(
    library: Library, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("ANEURON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_LEAST_BYTES", 0)
    model = make_model("llama", tmp_path / "model")
    file = store.packed_file(tmp_path / "model", "int8", "float32")
    tensors = packed_weights(model.decoder, "int8")
    store.save_packed(file, tensors, "int8")
    again = store.load_packed(file)
    assert again is not None
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    file.write_bytes(file.read_bytes()[:100])
    assert store.load_packed(file) is None  # it is made again
    assert store.load_packed(tmp_path / "nothing") is None
    other = store.packed_file(tmp_path / "model", "int4", "float32")
    assert other != file
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text() + "\n")
    newer = store.packed_file(tmp_path / "model", "int8", "float32")
    assert newer != file
    store.save_packed(newer, tensors, "int8")
    assert newer.exists()
    assert not file.exists(), "the same model's, before it was changed"


def test_packed_weights_of_others_are_left(tmp_path: Path, monkeypatch: Any) -> None:
    """Another dtype, and another directory of the same name: they may be used in turns."""
    monkeypatch.setenv("ANEURON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_LEAST_BYTES", 0)
    make_model("llama", tmp_path / "model")
    make_model("llama", tmp_path / "other" / "model")
    tensors = {"one": torch.zeros(3)}
    files = [
        store.packed_file(folder, kind, dtype)
        for folder in (tmp_path / "model", tmp_path / "other" / "model")
        for kind, dtype in (("int8", "float32"), ("int8", "bfloat16"), ("bfloat16", "bfloat16"))
    ]
    for file in files:
        store.save_packed(file, tensors, file.name.split("-")[1])
    assert all(file.exists() for file in files)
    assert len(set(files)) == 6


def test_without_a_compiler_there_is_no_library(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("ANEURON_NATIVE_DIR", str(tmp_path))
    for name, path in (("CXX", "/nowhere"), ("PATH", str(tmp_path))):
        monkeypatch.setenv(name, path)
    assert build.built_library() is None
    assert build.compile_library() is None


def test_a_compiler_that_fails_is_told(monkeypatch: Any, tmp_path: Path, caplog: Any) -> None:
    monkeypatch.setenv("ANEURON_NATIVE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'raise SystemExit(3)'")
    assert build.compile_library() is None
    assert "compiling failed" in caplog.text
    assert not list(tmp_path.glob("*.so"))
    assert not list(tmp_path.glob("compiling-*"))


def test_a_folder_that_cannot_be_is_told_in_one_line(
    monkeypatch: Any, tmp_path: Path, caplog: Any
) -> None:
    folder = tmp_path / ("x" * 300)  # longer than names may be
    monkeypatch.setenv("ANEURON_NATIVE_DIR", str(folder))
    assert build.built_library() is None
    assert build.compile_library() is None
    said = f"compiling failed, models run eagerly: cannot write {folder}: File name too long"
    assert caplog.messages[-1] == said


def test_a_library_that_others_can_write_is_not_used(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("ANEURON_NATIVE_DIR", str(tmp_path))
    path = build._path()
    path.write_bytes(b"")
    path.chmod(0o755)
    assert build.built_library() == path
    path.chmod(0o777)
    assert build.built_library() is None


def test_a_processor_without_kernels_compiles_nothing(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("ANEURON_NATIVE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "has_kernels", lambda: False)
    assert build.compile_library() is None


@pytest.mark.parametrize("block", [16, 48, 80, 144, 256])
def test_blocks_of_other_sizes(library: Library, block: int, tmp_path: Path) -> None:
    """A chunk of keys may begin, or end, inside a block."""
    model = make_model("llama", tmp_path)
    model.allocate_kv(NUM_BLOCKS, block, 4)
    config = model.config
    weights = NativeDecoder(config, "float32", packed_weights(model.decoder, "float32"))
    shape = (NUM_BLOCKS + 1, block, config.num_kv_heads, config.head_dim)
    caches = [
        (torch.full(shape, np.nan), torch.full(shape, np.nan)) for _ in range(config.num_layers)
    ]
    steps = NativeSteps(weights, library, caches, block, 2)
    rows, twin = Rows([300], block=block), Rows([300], block=block)
    for count in (299, 1, 1, 1):
        inputs, again = rows.step({0: count}), twin.step({0: count})
        expected = model.split(inputs).forward(inputs, None).values
        told = torch.from_numpy(steps.run(again, again.input_ids)[:1].copy())
        torch.testing.assert_close(told, expected, rtol=2e-4, atol=2e-4)


def test_a_change_over_knows_of_copied_blocks(library: Library, tmp_path: Path) -> None:
    """Copied in the last eager step, and in no table before."""
    model = make_model("llama", tmp_path)
    source = switch.WeightSource(tmp_path, model.config, torch.float32)
    changing = TorchModel(model.spec, model.config, source)
    changing.allocate_kv(NUM_BLOCKS, BLOCK, 8)
    rows, twin = Rows([40]), Rows([40])
    copies = BlockCopies(np.array([rows.blocks[0][2]]), np.array([NUM_BLOCKS]))
    for one, these in ((model, rows), (changing, twin)):
        inputs = these.step({0: 40})
        inputs.copies = copies
        one.split(inputs).forward(inputs, None)
        these.blocks[0][2] = NUM_BLOCKS
    assert source._pack(build._path())
    inputs, again = rows.step({0: 1}), twin.step({0: 1})
    expected = model.split(inputs).forward(inputs, None).values
    torch.testing.assert_close(
        changing.split(again).forward(again, None).values, expected, rtol=2e-4, atol=2e-4
    )
    assert changing._steps is not None


@pytest.mark.parametrize("kind", [*KINDS, "float32 cache"])
def test_nan_stays_nan(library: Library, kind: str, tmp_path: Path) -> None:
    cells = torch.uint8 if kind == "float32 cache" else None
    kind = kind.removesuffix(" cache")
    model = make_model("llama-bias", tmp_path, "float32" if kind == "float32" else "bfloat16")
    steps, _ = native_steps(library, model.decoder, kind, cells=cells)
    inputs = Rows([9, 9]).step({0: 9, 1: 9})
    inputs.input_ids[3] = 150
    others = inputs.input_ids[9:]
    others[others == 150] = 151
    steps._decoder.tensors["embedding"][150, 5] = np.nan
    told = steps.run(inputs, inputs.input_ids)
    assert np.isnan(told[0]).any()
    assert np.isfinite(told[1]).all()


def test_ids_outside_the_vocabulary_are_refused(library: Library, tmp_path: Path) -> None:
    model = make_model("llama", tmp_path)
    steps, _ = native_steps(library, model.decoder, "float32")
    for bad in (-1, 199, 2**31 - 1):
        inputs = Rows([9]).step({0: 9})
        inputs.input_ids[4] = bad
        with pytest.raises(IndexError):
            steps.run(inputs, inputs.input_ids)


def test_settings_name_what_is_wrong() -> None:
    wrong = {"quantization": "int3", "kv_cache_dtype": "fp8", "num_threads": 0, "enforce_eager": 1}
    for name, value in wrong.items():
        options: dict[str, Any] = {name: value}
        with pytest.raises(ConfigError) as caught:
            EngineConfig.build(options)
        assert caught.value.param == name
    assert BatchShape.of(EngineConfig(), 64).num_draft_tokens == 0


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_cache_of_8_bits_stays_near(library: Library, family: str, tmp_path: Path) -> None:
    """The eager decoder's too, which reads the same cells; and both take about half the memory."""
    model = make_model(family, tmp_path)
    small = TorchModel.load(tmp_path, dtype="float32", kv_cache_dtype="int8", enforce_eager=True)
    small.allocate_kv(NUM_BLOCKS, BLOCK, 8)
    width = model.config.head_dim
    assert small.k_caches[0].shape[-1] == width + 4
    told_bytes = small.spec.kv_bytes_per_token
    assert told_bytes / model.spec.kv_bytes_per_token == (width + 4) / (4 * width)
    assert small.k_caches[0].nbytes * 2 * model.config.num_layers == (
        told_bytes * (NUM_BLOCKS + 1) * BLOCK
    )
    steps, _ = native_steps(library, model.decoder, "float32", cells=torch.uint8)
    rows, twin, third = Rows(LENGTHS), Rows(LENGTHS), Rows(LENGTHS)
    near = torch.nn.functional.cosine_similarity
    for counts in SCRIPT:
        inputs, again, last = rows.step(counts), twin.step(counts), third.step(counts)
        expected = model.split(inputs).forward(inputs, None).values
        eager = small.split(again).forward(again, None).values
        native = torch.from_numpy(steps.run(last, last.input_ids)[: len(counts)].copy())
        assert near(eager, expected).min() > 0.995
        assert near(native, expected).min() > 0.99
        assert not torch.equal(native, expected)


@pytest.mark.soak
@pytest.mark.parametrize("kind", [*KINDS, "float32 cache"])
def test_plain_loops_give_nearly_the_same(
    library: Library, kind: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What processors without AVX-512 run; compiled here without asking for this one's vectors."""
    target = tmp_path_factory.getbasetemp() / "plain.so"
    if not target.exists():
        flags = [one for one in build._FLAGS if one not in ("-march=native", "-O3")]
        command = [*build.compilers()[0], "-O1", *flags, str(build._FOLDER / build._MAIN)]
        subprocess.run([*command, "-o", str(target)], check=True, timeout=110)
    plain = load_library(target)
    assert not plain.has_avx512
    cells = torch.uint8 if kind == "float32 cache" else None
    kind = kind.removesuffix(" cache")
    model = make_model("llama", tmp_path, "float32" if kind == "float32" else "bfloat16")
    fast, _ = native_steps(library, model.decoder, kind, cells=cells)
    slow, _ = native_steps(plain, model.decoder, kind, cells=cells)
    rows, twin = Rows(LENGTHS), Rows(LENGTHS)
    for counts in SCRIPT:
        inputs, again = rows.step(counts), twin.step(counts)
        one = torch.from_numpy(fast.run(inputs, inputs.input_ids)[: len(counts)].copy())
        other = torch.from_numpy(slow.run(again, again.input_ids)[: len(counts)].copy())
        assert torch.nn.functional.cosine_similarity(one, other).min() > 0.999
