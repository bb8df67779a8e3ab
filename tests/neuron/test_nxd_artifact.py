"""What an artifact's files say, what is refused of them, and what an engine makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aneuron import ConfigError
from aneuron.config import BatchShape, EngineConfig
from aneuron.models.neuron.artifact import Artifact, write_artifact
from aneuron.models.neuron.program import Bucket, padding_inputs
from aneuron.models.neuron.settings import program_shape
from tests.neuron.artifacts import BATCH, KINDS, LENGTH, MODEL, VOCAB, finish, shape_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.neuron.artifacts import Kind

ROWS = {
    "batch_size": 4,
    "ctx_batch_size": 1,
    "is_continuous_batching": True,
    "seq_len": 1000,
    "on_device_sampling_config": {"do_sample": True, "dynamic": True},
}
BLOCKS = {
    **ROWS,
    "is_block_kv_layout": True,
    "is_prefix_caching": True,
    "seq_len": 1024,
    "pa_num_blocks": 41,
    "pa_block_size": 64,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read(tmp_path: Path, kind: Kind) -> None:
    shape = shape_of(kind)
    weights = [{"embed.weight": torch.full((2, 2), float(rank))} for rank in range(2)]
    finish(tmp_path, shape, weights, MODEL)
    artifact = Artifact.read(tmp_path, name="tiny")
    assert artifact.shape == shape
    assert (artifact.ranks, artifact.start_rank, artifact.spec.name) == (2, 0, "tiny")
    found = [one["decoder.embed.weight"].tolist() for one in artifact.weights()]
    assert found == [[[0.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_engine_is_told(tmp_path: Path, kind: Kind) -> None:
    finish(tmp_path, shape_of(kind), [{}], {**MODEL, "eos_token_id": [7, VOCAB]})
    spec = Artifact.read(tmp_path).spec
    assert (spec.vocab_size, spec.max_model_len, spec.eos_token_ids) == (VOCAB, LENGTH, (7,))
    assert (spec.max_prompts, spec.can_fork, spec.bucket_edges) == (1, False, (16, 32, LENGTH))
    assert spec.kv_bytes_per_token == 2 * 2 * 6 * 4 * 4  # K and V, layers, heads, cells, float32
    assert spec.has_slots == (kind in ("blocks", "rows"))
    assert spec.on_device_sampling == (kind != "nxdi logits")
    assert spec.sampled_dtype == ("float32" if kind == "nxdi logits" else "int32")
    assert spec.greedy_only == (kind == "nxdi greedy")
    unsupported = ("min_p", "seed") if kind in ("nxdi blocks", "nxdi rows") else ()
    assert spec.unsupported_params == unsupported


def test_tokenizer_and_configs_of_the_checkpoint_are_copied(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "artifact"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(MODEL))
    (source / "generation_config.json").write_text('{"eos_token_id": 3}')
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"")
    write_artifact(folder, shape_of("blocks"), [{}], model=MODEL, source=source)
    names = {one.name for one in folder.iterdir()}
    copied = {"config.json", "generation_config.json", "tokenizer.json"}
    assert names == {*copied, "neuron_config.json", "weights"}
    assert Artifact.read(folder).spec.eos_token_ids == (3,)


def test_nxdi_s_defaults() -> None:
    shape = program_shape({}, None)
    assert (shape.batch_size, shape.max_model_len, shape.num_blocks) == (1, 128, 1)
    assert (shape.context_buckets, shape.token_buckets) == ((128,), (128,))
    assert (shape.sampling, shape.dtype, shape.is_block_kv) == ("none", "bfloat16", False)
    auto = program_shape({**ROWS, "enable_bucketing": True}, None)
    assert auto.token_buckets == auto.context_buckets == (128, 256, 512, 1000)
    assert (auto.num_blocks, auto.block_size, auto.num_slots) == (4, 1000, 0)
    assert auto.sampling_columns == 3
    rows = program_shape({**ROWS, "kv_cache_batch_size": 6}, None)
    assert rows.num_blocks == 6


def test_blocks_of_nxdi() -> None:
    auto = {**BLOCKS, "enable_bucketing": True, "seq_len": 2048, "pa_block_size": 32}
    shape = program_shape(auto, None)
    assert shape.prefix_buckets == (0, 512, 1024, 2048)
    assert shape.context_buckets == (512, 1024, 2048)
    assert shape.token_buckets == (128, 256, 512, 1024, 2048)
    assert (shape.block_size, shape.num_blocks) == (32, 40)  # one is the null block
    assert shape.block_padding == 0
    kernel = program_shape({**auto, "attn_tkg_nki_kernel_enabled": True}, None)
    decode = padding_inputs(kernel, Bucket(is_decode=True, size=128))
    assert decode[12].tolist() == [[-1] * 4] * 4


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"speculation_length": 4}, "speculation_length"),
        ({"enable_fused_speculation": True}, "enable_fused_speculation"),
        ({"enable_eagle_speculation": True}, "enable_eagle_speculation"),
        ({"is_eagle3": True}, "is_eagle3"),
        ({"is_medusa": True}, "is_medusa"),
        ({"is_chunked_prefill": True}, "is_chunked_prefill"),
        ({"chunked_prefill_config": {"max_num_seqs": 4}}, "chunked_prefill_config"),
        ({"lora_config": {"max_loras": 2}}, "lora_config"),
        ({"is_prefill_stage": False}, "is_prefill_stage"),
        ({"pp_degree": 2}, "pp_degree"),
        ({"ep_degree": 2}, "ep_degree"),
        ({"cp_degree": 2}, "cp_degree"),
        ({"ctx_batch_size": 4}, "ctx_batch_size"),
        ({"ctx_batch_size": None}, "ctx_batch_size"),
        ({"is_continuous_batching": False}, "is_continuous_batching"),
        ({"padding_side": "left"}, "padding_side"),
        ({"tp_degree": 8, "local_ranks_size": 4}, "local_ranks_size"),
        ({"max_context_length": 512}, "max_context_length"),
        ({"kv_cache_batch_size": 2}, "kv_cache_batch_size"),
        ({"is_block_kv_layout": True}, "is_prefix_caching"),
        ({"is_prefix_caching": True}, "is_block_kv_layout"),
        ({"on_device_sampling_config": {"do_sample": True}}, "dynamic"),
        ({"on_device_sampling_config": True}, "on_device_sampling_config"),
        ({"torch_dtype": "float8"}, "torch_dtype"),
        ({"batch_size": "four"}, "batch_size"),
        ({"seq_len": 0}, "seq_len"),
        ({"enable_bucketing": True, "context_encoding_buckets": [64]}, "context_encoding_buckets"),
        ({"enable_bucketing": True, "token_generation_buckets": [64]}, "token_generation_buckets"),
        ({"enable_bucketing": True, "token_generation_buckets": 64}, "token_generation_buckets"),
        ({"tensor_replacement_config": {"ref_dir": "a"}}, "tensor_replacement_config"),
        ({"async_mode": True, "on_device_sampling_config": None}, "async_mode"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(settings: dict[str, Any], name: str) -> None:
    program_shape(ROWS, None)
    with pytest.raises(ConfigError, match=name) as told:
        program_shape({**ROWS, **settings}, None)
    assert told.value.param == name


@pytest.mark.parametrize("name", ["logical_nc_config", "logical_neuron_cores"])
def test_programs_of_another_core_size_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("NEURON_RT_VIRTUAL_CORE_SIZE", raising=False)
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    program_shape({**ROWS, name: 2}, None)  # the chip's own, which nobody has said
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    program_shape({**ROWS, name: 2}, None)
    with pytest.raises(ConfigError, match=name) as told:
        program_shape({**ROWS, name: 1}, None)
    assert told.value.param == name


@pytest.mark.parametrize("base", [ROWS, BLOCKS])
def test_what_is_inside_the_programs_changes_nothing(base: dict[str, Any]) -> None:
    inside = {
        "async_mode": True,
        "quantized": True,
        "quantization_dtype": "int8",
        "kv_cache_quant": True,
        "sliding_window": 512,
        "attention_chunk_size": 512,
        "output_logits": True,
    }
    assert program_shape({**base, **inside}, None) == program_shape(base, None)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"token_generation_batches": [1, 4]}, "token_generation_batches"),
        ({"pa_num_blocks": 1}, "pa_num_blocks"),
        ({"enable_bucketing": True, "prefix_buckets": [256]}, "prefix_buckets"),
        ({"enable_bucketing": True, "prefix_buckets": [200, 1024]}, "prefix_buckets"),
        (
            {"enable_bucketing": True, "token_generation_buckets": [96, 1024]},
            "token_generation_buckets",
        ),
    ],
)
def test_what_is_not_done_with_blocks_is_refused_by_name(
    settings: dict[str, Any], name: str
) -> None:
    program_shape(BLOCKS, None)
    with pytest.raises(ConfigError, match=name) as told:
        program_shape({**BLOCKS, **settings}, None)
    assert told.value.param == name


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"fused_spec_config": {}}, "fused_spec_config"),
        ({"aneuron": {"version": 0}}, "version"),
        ({"vocab_size": None}, "vocab_size"),
        ({"neuron_config": 3}, "neuron_config"),
    ],
)
def test_a_file_that_says_something_else_is_refused(
    tmp_path: Path, change: dict[str, Any], name: str
) -> None:
    finish(tmp_path, shape_of("blocks"), [{}], MODEL)
    (tmp_path / "config.json").unlink()
    file = tmp_path / "neuron_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError) as told:
        Artifact.read(tmp_path)
    assert told.value.param == name


def test_settings_that_are_not_nested_are_read(tmp_path: Path) -> None:
    told = {**ROWS, "vocab_size": 9, "tp_degree": 4, "start_rank_id": 4}
    (tmp_path / "neuron_config.json").write_text(json.dumps(told))
    artifact = Artifact.read(tmp_path)
    assert (artifact.ranks, artifact.start_rank, artifact.spec.vocab_size) == (4, 4, 9)


# ── the engine's settings ───────────────────────────────────────────────────────────────


def read(folder: Path, kind: Kind, **changes: Any) -> Artifact:
    finish(folder, replace(shape_of(kind), **changes), [{}, {}], MODEL)
    return Artifact.read(folder)


@pytest.mark.parametrize("kind", ["blocks", "nxdi blocks"])
def test_an_engine_takes_the_sizes_of_blocks(tmp_path: Path, kind: Kind) -> None:
    config = read(tmp_path, kind).adapt(EngineConfig())
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (BATCH, LENGTH)
    assert (config.block_size, config.num_kv_blocks) == (4, 64)
    assert (config.tensor_parallel_size, config.enable_prefix_caching) == (2, True)
    shape = BatchShape.of(config, LENGTH)
    assert shape.rows.sizes == (BATCH,)
    assert shape.tokens.sizes == (8, 16, LENGTH)
    assert shape.blocks.sizes == (4, 8, 16)


@pytest.mark.parametrize("kind", ["rows", "nxdi rows"])
def test_an_engine_takes_the_sizes_of_rows(tmp_path: Path, kind: Kind) -> None:
    config = read(tmp_path, kind).adapt(EngineConfig())
    assert (config.block_size, config.num_kv_blocks) == (LENGTH, BATCH)
    assert config.enable_prefix_caching is False
    assert config.interleaved_prefill_tokens == config.max_num_batched_tokens == LENGTH
    assert BatchShape.of(config, LENGTH).blocks.sizes == (1,)


def test_an_engine_takes_all_rows_of_a_large_batch(tmp_path: Path) -> None:
    assert (
        read(tmp_path, "nxdi rows", batch_size=100, num_blocks=100)
        .adapt(EngineConfig())
        .max_num_seqs
        == 100
    )


def test_an_engine_may_take_less(tmp_path: Path) -> None:
    artifact = read(tmp_path, "blocks")
    config = artifact.adapt(
        EngineConfig(
            max_num_seqs=2, num_kv_blocks=9, max_num_batched_tokens=16, max_model_len=32,
            enable_prefix_caching=False, tensor_parallel_size=2, dtype="float32",
        )
    )  # fmt: skip
    assert (config.max_num_seqs, config.num_kv_blocks, config.max_model_len) == (2, 9, 32)
    assert (config.max_num_batched_tokens, config.enable_prefix_caching) == (16, False)
    rows = artifact.folder / "rows"
    whole = read(rows, "rows").adapt(EngineConfig(max_model_len=20, max_num_batched_tokens=20))
    assert whole.max_num_batched_tokens == 20


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("blocks", {"max_num_seqs": 5}),
        ("blocks", {"num_kv_blocks": 65}),
        ("blocks", {"max_num_batched_tokens": 65}),
        ("blocks", {"block_size": 8}),
        ("blocks", {"dtype": "bfloat16"}),
        ("blocks", {"tensor_parallel_size": 4}),
        ("blocks", {"quantization": "int8"}),
        ("blocks", {"kv_cache_dtype": "int8"}),
        ("blocks", {"kv_cache_bytes": 10**6}),
        ("blocks", {"num_seqs_buckets": (1, 2)}),
        ("blocks", {"num_tokens_buckets": (8,)}),
        ("blocks", {"num_blocks_buckets": (8,)}),
        ("blocks", {"max_in_flight_steps": 3}),
        ("rows", {"max_num_batched_tokens": 32}),
        ("nxdi rows", {"interleaved_prefill_tokens": 32}),
    ],
)
def test_what_the_programs_cannot_do_is_refused_by_name(
    tmp_path: Path, kind: Kind, options: dict[str, Any]
) -> None:
    artifact = read(tmp_path, kind)
    (name,) = options
    with pytest.raises(ConfigError, match=name) as told:
        artifact.adapt(EngineConfig(**options))
    assert told.value.param == name
