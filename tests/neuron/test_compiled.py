"""What is compiled for NeuronCores, and the cache of it: keys, locks, damage, errors."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file, save_file

from aneuron import ConfigError, Engine
from aneuron.config import EngineConfig
from aneuron.device.neuron import NeuronDevice
from aneuron.models.architecture import ModelConfig
from aneuron.models.neuron import compiled as compiled_module
from aneuron.models.neuron.artifact import MODEL_FILES, Artifact
from aneuron.models.neuron.compiled import compile_artifact, load_neuron, shape_for
from aneuron.models.tokenizer import ByteTokenizer
from aneuron.testing.fakes import FakeCompiler, FakeNative, FakeNxd, Fault, Times
from tests.neuron.checkpoints import CONFIG, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

MODEL = ModelConfig.from_dict(CONFIG)
SMALL = EngineConfig(max_num_seqs=2, block_size=4, dtype="float32")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("ANEURON_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "Tiny Model")


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


# ── sizes ───────────────────────────────────────────────────────────────────────────────


def test_blocks_are_the_default_and_hold_every_request_at_its_longest() -> None:
    shape = shape_for(SMALL, MODEL)
    assert shape.is_block_kv
    assert (shape.batch_size, shape.block_size, shape.max_model_len) == (2, 4, 64)
    assert (shape.num_blocks, shape.num_slots, shape.dtype) == (2 * 64 // 4, 4, "float32")
    assert (shape.context_buckets, shape.prefix_buckets) == ((64,), (0, 64))
    assert shape.token_buckets == (64,)


def test_buckets_double_from_128_tokens_on() -> None:
    shape = shape_for(EngineConfig(), ModelConfig.from_dict({**CONFIG, **LONG}))
    assert shape.context_buckets == (128, 256, 512)
    assert shape.token_buckets == (128, 256, 512, 1024)
    assert shape.prefix_buckets == (0, 128, 256, 512, 1024)
    assert shape.dtype == "bfloat16"


LONG = {"max_position_embeddings": 1024}


def test_without_prefix_caching_each_request_has_a_row() -> None:
    shape = shape_for(replace(SMALL, enable_prefix_caching=False), MODEL)
    assert not shape.is_block_kv
    assert (shape.num_blocks, shape.block_size, shape.prefix_buckets) == (4, 64, (0,))
    assert shape.context_buckets == (64,)


def test_a_length_is_whole_blocks_and_no_more_than_the_model_s() -> None:
    long = ModelConfig.from_dict({**CONFIG, "max_position_embeddings": 66})
    assert shape_for(replace(SMALL, max_model_len=30), long).max_model_len == 32
    assert shape_for(replace(SMALL, max_model_len=66), long).max_model_len == 64
    assert shape_for(SMALL, long).max_model_len == 64


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [({"num_kv_blocks": 7}, 7), ({"kv_cache_bytes": 24 * 2 * 2 * 4 * 4 * 9}, 9)],
)
def test_the_pool_may_be_told(changes: dict[str, Any], blocks: int) -> None:
    assert shape_for(replace(SMALL, **changes), MODEL).num_blocks == blocks


def test_asked_buckets_are_taken() -> None:
    config = replace(SMALL, num_tokens_buckets=(8, 16), num_blocks_buckets=(4, 8))
    shape = shape_for(replace(config, max_num_batched_tokens=32), MODEL)
    assert (shape.context_buckets, shape.token_buckets) == ((8, 16, 32), (16, 32, 64))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"quantization": "int8"}, "quantization"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"num_seqs_buckets": (1, 2)}, "num_seqs_buckets"),
        ({"max_model_len": 65}, "max_model_len"),
        ({"block_size": 128}, "block_size"),
        ({"kv_cache_bytes": 10}, "kv_cache_bytes"),
        ({"num_kv_blocks": 9, "enable_prefix_caching": False}, "num_kv_blocks"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size"),
        ({"num_tokens_buckets": (1, 64)}, "num_tokens_buckets"),
        ({"max_num_batched_tokens": 1}, "max_num_batched_tokens"),
    ],
)
def test_what_programs_cannot_have_is_refused_before_anything_is_compiled(
    checkpoint: Path, changes: dict[str, Any], param: str
) -> None:
    compiler = FakeCompiler()
    with pytest.raises(ConfigError) as caught:
        compile_artifact(str(checkpoint), compiler, replace(SMALL, **changes))
    assert caught.value.param == param
    assert compiler.num_compiled == 0


# ── the cache ───────────────────────────────────────────────────────────────────────────


def test_what_was_compiled_is_found_again(checkpoint: Path, cache: Path) -> None:
    compiler, told = FakeCompiler(), []
    artifact = compile_artifact(
        str(checkpoint), compiler, SMALL, progress=lambda *news: told.append(news)
    )
    assert compiler.num_compiled == 2
    assert ("compile", 1, 2) in told
    assert entries(cache) == [artifact.folder.name]
    assert artifact.folder.name.startswith("tiny-model-neuron-")
    again = compile_artifact(str(checkpoint), compiler, SMALL)
    assert again.folder == artifact.folder
    assert compiler.num_compiled == 2
    assert not compiler.violations


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"max_num_seqs": 3},
        {"max_model_len": 32},
        {"num_kv_blocks": 9},
        {"tensor_parallel_size": 2},
        {"max_in_flight_steps": 3},
        {"enable_prefix_caching": False},
    ],
)
def test_other_sizes_are_another_entry(
    checkpoint: Path, cache: Path, changes: dict[str, Any]
) -> None:
    compile_artifact(str(checkpoint), FakeCompiler(), SMALL)
    compile_artifact(str(checkpoint), FakeCompiler(), replace(SMALL, **changes))
    assert len(entries(cache)) == 2


@pytest.mark.parametrize(
    "changes", [{"async_scheduling": False}, {"max_waiting": 3}, {"shutdown_s": 1.0}]
)
def test_what_programs_do_not_depend_on_is_the_same_entry(
    checkpoint: Path, cache: Path, changes: dict[str, Any]
) -> None:
    compile_artifact(str(checkpoint), FakeCompiler(), SMALL)
    compile_artifact(str(checkpoint), FakeCompiler(), replace(SMALL, **changes))
    assert len(entries(cache)) == 1


def test_another_compiler_checkpoint_or_program_is_another_entry(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_artifact(str(checkpoint), FakeCompiler(), SMALL)
    compile_artifact(str(checkpoint), FakeCompiler(version="fake-2"), SMALL)
    assert len(entries(cache)) == 2
    monkeypatch.setattr(compiled_module, "_source_digest", lambda: "later")
    compile_artifact(str(checkpoint), FakeCompiler(), SMALL)
    assert len(entries(cache)) == 3
    write_checkpoint(checkpoint, seed=1)
    compile_artifact(str(checkpoint), FakeCompiler(), SMALL)
    assert len(entries(cache)) == 4


def test_a_checkpoint_of_the_cache_is_known_by_its_manifest(checkpoint: Path) -> None:
    files = {"model.safetensors": {"sha256": "1" * 64}}
    (checkpoint / "aneuron-manifest.json").write_text(json.dumps({"files": files}))
    before = compiled_module._checkpoint_key(checkpoint)
    write_checkpoint(checkpoint)  # the same, at another time
    assert compiled_module._checkpoint_key(checkpoint) == before
    files["model.safetensors"]["sha256"] = "2" * 64
    (checkpoint / "aneuron-manifest.json").write_text(json.dumps({"files": files}))
    assert compiled_module._checkpoint_key(checkpoint) != before


def test_every_file_that_an_artifact_copies_is_part_of_the_key(checkpoint: Path) -> None:
    keys = [compiled_module._checkpoint_key(checkpoint)]
    for name in MODEL_FILES:
        for content in ("one", "other"):
            (checkpoint / name).write_text(content)
            keys.append(compiled_module._checkpoint_key(checkpoint))
    assert len(set(keys)) == 1 + 2 * len(MODEL_FILES)


def test_an_artifact_has_the_end_ids_and_the_chat_template_of_now(checkpoint: Path) -> None:
    for ids, template in (([3], "old"), ([3, 7], "new")):
        (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        (checkpoint / "chat_template.jinja").write_text(template)
        artifact = compile_artifact(str(checkpoint), FakeCompiler(), SMALL)
        assert artifact.spec.eos_token_ids == tuple(ids)
        assert (artifact.folder / "chat_template.jinja").read_text() == template


def test_every_source_that_shapes_a_program_is_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = compiled_module._SOURCES
    assert {one.rpartition("/")[2] for one in names} >= {
        "architecture.py", "artifact.py", "compiled.py", "decoder.py", "nxd_runtime.py",
        "program.py", "rope.py", "sampler.py", "settings.py", "sharding.py", "weights.py",
    }  # fmt: skip
    digests = {compiled_module._source_digest()}
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((compiled_module._PACKAGE / name).read_bytes())
    monkeypatch.setattr(compiled_module, "_PACKAGE", tmp_path)
    assert {compiled_module._source_digest()} == digests
    for name in names:
        with (tmp_path / name).open("a") as source:
            source.write("#")
        digests.add(compiled_module._source_digest())
    assert len(digests) == 1 + len(names)


@pytest.mark.parametrize("file", ["model.pt", "weights/tp1_sharded_checkpoint.safetensors"])
def test_a_damaged_entry_is_compiled_again_with_one_warning(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    config, compiler = replace(SMALL, tensor_parallel_size=2), FakeCompiler()
    with caplog.at_level(logging.WARNING, "aneuron"):
        artifact = compile_artifact(str(checkpoint), compiler, config)
        assert not caplog.records
        (artifact.folder / file).write_bytes(b"damaged")
        assert compile_artifact(str(checkpoint), compiler, config).folder == artifact.folder
        compile_artifact(str(checkpoint), compiler, config)
    assert compiler.num_compiled == 4
    (warning,) = caplog.messages
    assert warning == f"{artifact.folder.name} in the cache is damaged: compiling it again"
    assert len(load_file(artifact.folder / "weights/tp1_sharded_checkpoint.safetensors")) > 10


def test_two_that_want_the_same_compile_it_once(checkpoint: Path) -> None:
    compiler, found = FakeCompiler(Times(compile_s=0.05)), []
    threads = [
        threading.Thread(
            target=lambda: found.append(compile_artifact(str(checkpoint), compiler, SMALL))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.num_compiled == 2
    assert len({one.folder for one in found}) == 1
    assert len(found) == 3


def test_a_compiler_that_fails_says_what_to_do_and_leaves_nothing(
    checkpoint: Path, cache: Path
) -> None:
    compiler = FakeCompiler(faults=[Fault("compile", step=2)])
    with pytest.raises(ConfigError, match="take smaller buckets") as caught:
        compile_artifact(str(checkpoint), compiler, SMALL)
    assert caught.value.param == "model"
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert entries(cache) == []
    compile_artifact(str(checkpoint), compiler, SMALL)
    assert len(entries(cache)) == 1


def test_whoever_stops_it_leaves_nothing(checkpoint: Path, cache: Path) -> None:
    def stop(stage: str, done: int, total: int | None) -> None:
        if stage == "compile":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_artifact(str(checkpoint), FakeCompiler(), SMALL, progress=stop)
    assert entries(cache) == []


# ── loading ─────────────────────────────────────────────────────────────────────────────


def nxd_device(**options: Any) -> NeuronDevice:
    return NeuronDevice(FakeNxd, kind="nxd", **{"compiler": FakeCompiler(), **options})


async def ids_of(model: str, device: Any, **options: Any) -> list[list[int]]:
    settings = {"max_num_seqs": 2, "block_size": 4, "dtype": "float32", **options}
    async with Engine(model, device=device, tokenizer=ByteTokenizer(), **settings) as engine:
        streams = [
            engine.generate(
                prompt_token_ids=[at, 7, 9], max_tokens=6, ignore_eos=True, temperature=0
            )
            for at in (1, 2, 3)
        ]
        return [list((await one).token_ids) for one in streams]


@pytest.mark.parametrize(
    "options", [{}, {"enable_prefix_caching": False}, {"async_scheduling": False}]
)
async def test_a_checkpoint_is_compiled_and_answers_as_on_the_processor(
    checkpoint: Path, options: dict[str, Any]
) -> None:
    device = nxd_device()
    on_cpu = await ids_of(str(checkpoint), "cpu", enforce_eager=True)
    for ranks in (1, 2):
        told = await ids_of(str(checkpoint), device, tensor_parallel_size=ranks, **options)
        assert told == on_cpu


async def test_settings_that_are_compiled_in_are_taken(checkpoint: Path) -> None:
    """What decides the sizes of programs is no setting that their artifact refuses."""
    sizes = {"num_tokens_buckets": (8,), "num_blocks_buckets": (4,), "kv_cache_bytes": 2**20}
    told = await ids_of(str(checkpoint), nxd_device(), max_num_batched_tokens=16, **sizes)
    assert told == await ids_of(str(checkpoint), "cpu", enforce_eager=True)


@pytest.fixture
def artifact(checkpoint: Path) -> Path:
    """An artifact's folder, away from the cache."""
    found = compile_artifact(str(checkpoint), FakeCompiler(), SMALL)
    return found.folder.rename(checkpoint.parent / "moved")


async def test_an_artifact_s_folder_is_taken_as_it_is(checkpoint: Path, artifact: Path) -> None:
    told = await ids_of(str(artifact), nxd_device(compiler=None))
    assert told == await ids_of(str(checkpoint), "cpu", enforce_eager=True)


def test_without_a_compiler_a_checkpoint_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="no compiler") as caught:
        load_neuron(str(checkpoint), nxd_device(compiler=None), SMALL)
    assert caught.value.param == "model"


async def test_native_pytorch_takes_the_checkpoint(checkpoint: Path) -> None:
    device = NeuronDevice(FakeNative, kind="native")
    told = await ids_of(str(checkpoint), device)
    assert told == await ids_of(str(checkpoint), "cpu", enforce_eager=True)


@pytest.mark.parametrize("param", ["tensor_parallel_size", "model"])
def test_native_pytorch_refuses_what_is_for_traced_programs(
    checkpoint: Path, artifact: Path, param: str
) -> None:
    device = NeuronDevice(FakeNative, kind="native")
    model = str(artifact if param == "model" else checkpoint)
    config = replace(SMALL, tensor_parallel_size=2)
    with pytest.raises(ConfigError) as caught:
        load_neuron(model, device, config)
    assert caught.value.param == param


def test_an_artifact_has_each_rank_s_part(checkpoint: Path) -> None:
    config = replace(SMALL, tensor_parallel_size=3)
    artifact = compile_artifact(str(checkpoint), FakeCompiler(), config)
    assert Artifact.read(artifact.folder).ranks == 3
    whole = load_file(checkpoint / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    parts = [one["decoder.layers.0.mlp.down.weight"] for one in artifact.weights()]
    assert sum(part.shape[1] for part in parts) == whole.shape[1]
    save_file({}, checkpoint / "model.safetensors")  # the artifact has its own
    assert len(artifact.weights()) == 3
