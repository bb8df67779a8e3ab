"""What `aneuron bench peers` asks of other engines, on stand-ins for their libraries."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aneuron.cli.bench.processor import engines
from aneuron.cli.bench.processor.engines import LlamaCpp, OpenVINO, Unavailable, Wanted
from aneuron.models.catalog import BUILTIN

VOCAB_SIZE = 32
NUM_CELLS = 8  # of a batch


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("ANEURON_CACHE_DIR", str(path))
    return path


def wanted(path: Path, *, quantization: str | None = None, gguf: Path | None = None) -> Wanted:
    path.mkdir(exist_ok=True)
    if not (path / "model.safetensors").exists():
        (path / "model.safetensors").write_bytes(b"weights")
    return Wanted(
        path, "bfloat16", quantization, gguf, max_num_seqs=4, max_model_len=300, num_threads=3
    )


# ── llama.cpp ───────────────────────────────────────────────────────────────────────────


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


class Llama:
    """A model that counts: after token n comes n + 1."""

    LLAMA_FTYPE_MOSTLY_BF16 = 32
    LLAMA_FTYPE_MOSTLY_Q8_0 = 7

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int, int, bool]]] = []
        self.made: list[tuple[int, bool]] = []
        self.settings = SimpleNamespace()
        self.status = 0
        self.num_clears = 0
        self._kept: list[Any] = []
        self._logits: Any = None

    def llama_n_batch(self, context: str) -> int:
        return NUM_CELLS

    def llama_batch_init(self, num_cells: int, embedding: int, num_sequences: int) -> Batch:
        assert (embedding, num_sequences) == (0, 1)
        one = ctypes.POINTER(ctypes.c_int32)
        rows = [(ctypes.c_int32 * 1)() for _ in range(num_cells)]
        self._kept.append(rows)
        numbers = [(ctypes.c_int32 * num_cells)() for _ in range(3)]
        ids = (one * num_cells)(*(ctypes.cast(row, one) for row in rows))
        return Batch(0, *numbers, ids, (ctypes.c_int8 * num_cells)())

    def llama_get_memory(self, context: str) -> str:
        return f"memory of {context}"

    def llama_memory_clear(self, memory: str, data: bool) -> None:
        assert (memory, data) == ("memory of context", True)
        self.num_clears += 1

    def llama_decode(self, context: str, batch: Batch) -> int:
        cells = [
            (batch.token[i], batch.pos[i], batch.seq_id[i][0], bool(batch.logits[i]))
            for i in range(batch.n_tokens)
        ]
        self.batches.append(cells)
        rows = np.zeros((len(cells), VOCAB_SIZE), np.float32)
        last = [token for token, *_, is_wanted in cells if is_wanted]
        rows[range(len(last)), [token + 1 for token in last]] = 1
        self._logits = np.ctypeslib.as_ctypes(rows)
        return self.status

    def llama_get_logits(self, context: str) -> Any:
        return ctypes.cast(self._logits, ctypes.POINTER(ctypes.c_float))

    def llama_backend_init(self) -> None: ...

    def llama_model_default_params(self) -> None: ...

    def llama_model_load_from_file(self, file: bytes, settings: None) -> str:
        return "model" if Path(file.decode()).read_bytes() == b"made" else ""

    def llama_context_default_params(self) -> SimpleNamespace:
        return self.settings

    def llama_init_from_model(self, model: str, settings: Any) -> str:
        return "context"

    def llama_model_get_vocab(self, model: str) -> str:
        return "vocab"

    def llama_vocab_n_tokens(self, vocab: str) -> int:
        return VOCAB_SIZE

    def llama_model_quantize_default_params(self) -> SimpleNamespace:
        return SimpleNamespace(ftype=None, allow_requantize=False)

    def llama_model_quantize(self, source: bytes, target: bytes, settings: Any) -> int:
        Path(target.decode()).write_bytes(b"made")
        self.made.append((settings.ftype, settings.allow_requantize))
        return self.status


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> Llama:
    library = Llama()
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    return library


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = tmp_path / "model.Q4_1.gguf"
    file.write_bytes(b"weights")
    return file


def test_llama_decodes_all_sequences_in_each_batch(
    llama: Llama, tmp_path: Path, gguf: Path
) -> None:
    generate = LlamaCpp().load(wanted(tmp_path / "model", gguf=gguf))
    assert generate([[1, 2, 3, 4, 5], [11, 12, 13, 14, 15]], 3) > 0
    prompts = [(n, n - 1, 0, n == 5) for n in range(1, 6)]
    prompts += [(n, n - 11, 1, n == 15) for n in range(11, 16)]
    assert llama.batches == [
        prompts[:NUM_CELLS],
        prompts[NUM_CELLS:],
        [(6, 5, 0, True), (16, 5, 1, True)],
        [(7, 6, 0, True), (17, 6, 1, True)],
    ]
    generate([[1]], 2)
    assert llama.batches[4:] == [[(1, 0, 0, True)], [(2, 1, 0, True)]]
    assert llama.num_clears == 2, "each call starts with empty memory"


def test_llama_gets_room_for_all_sequences(llama: Llama, tmp_path: Path, gguf: Path) -> None:
    LlamaCpp().load(wanted(tmp_path / "model", gguf=gguf))
    settings = llama.settings
    assert (settings.n_seq_max, settings.n_ctx) == (4, 4 * 512)
    assert settings.n_threads == settings.n_threads_batch == 3


def test_llama_converts_once_per_kind(
    llama: Llama, tmp_path: Path, gguf: Path, cache: Path
) -> None:
    for _ in range(2):
        for quantization in (None, "int8"):
            LlamaCpp().load(wanted(tmp_path / "model", quantization=quantization, gguf=gguf))
    assert llama.made == [(32, True), (7, True)]
    made = sorted(path.name for path in (cache / "peers").glob("*/*.gguf"))
    assert made == ["BF16.gguf", "Q8_0.gguf"]


def test_llama_that_fails_is_told(llama: Llama, tmp_path: Path, gguf: Path) -> None:
    generate = LlamaCpp().load(wanted(tmp_path / "model", gguf=gguf))
    llama.status = 1
    with pytest.raises(RuntimeError, match="status 1"):
        generate([[1]], 2)
    with pytest.raises(Unavailable, match=r"cannot make Q8_0 of model\.Q4_1\.gguf"):
        LlamaCpp().load(wanted(tmp_path / "model", quantization="int8", gguf=gguf))


def test_llama_needs_a_file(llama: Llama, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="--gguf"):
        LlamaCpp().load(wanted(tmp_path / "model"))


def test_where_the_gguf_file_is(tmp_path: Path) -> None:
    name, model = next(iter(BUILTIN.items()))
    digest = model.member_sha256[:12]
    made, source = tmp_path / f"{name}-{digest}-v1", tmp_path / f"{name}-gguf-{digest}"
    assert engines.gguf_of(name, made) is None
    source.mkdir()
    (source / model.file_name).touch()
    assert engines.gguf_of(name.upper(), made) == source / model.file_name
    assert engines.gguf_of("x/my.GGUF", made) == Path("x/my.GGUF")
    assert engines.gguf_of(str(made), made) is None


# ── OpenVINO ────────────────────────────────────────────────────────────────────────────


class Pipeline:
    """Answers with as many tokens as it is asked for, or `short` fewer."""

    short = 0

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.asked: list[tuple[list[Any], list[Any]]] = []

    def generate(self, ids: list[Any], configs: list[Any]) -> list[SimpleNamespace]:
        self.asked.append((ids, configs))
        return [
            SimpleNamespace(m_generation_ids=[[7] * (config.max_new_tokens - self.short)])
            for config in configs
        ]


class Exporter:
    """In place of `subprocess.run`: writes what an export would, or fails."""

    def __init__(self, error: str = "") -> None:
        self.commands: list[list[str]] = []
        self.error = error

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        (Path(command[-1]) / "openvino_model.xml").touch()
        return subprocess.CompletedProcess(command, bool(self.error), "", self.error)


@pytest.fixture
def pipelines(monkeypatch: pytest.MonkeyPatch) -> list[Pipeline]:
    opened: list[Pipeline] = []

    def opens(*arguments: Any) -> Pipeline:
        opened.append(Pipeline(*arguments))
        return opened[-1]

    library: Any = SimpleNamespace(
        ContinuousBatchingPipeline=opens,
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=SimpleNamespace,
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", library)
    tensors: Any = SimpleNamespace(Tensor=lambda values: values)
    monkeypatch.setitem(sys.modules, "openvino", tensors)
    return opened


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch) -> Exporter:
    exporter = Exporter()
    monkeypatch.setattr(subprocess, "run", exporter)
    return exporter


def test_openvino_gives_all_tokens_of_all_prompts(
    pipelines: list[Pipeline], export: Exporter, tmp_path: Path
) -> None:
    generate = OpenVINO().load(wanted(tmp_path / "model"))
    assert generate([[1, 2], [3, 4]], 5) >= 0
    (pipeline,) = pipelines
    ((ids, configs),) = pipeline.asked
    assert [one.tolist() for one in ids] == [[[1, 2]], [[3, 4]]]
    for config in configs:
        assert config.max_new_tokens == config.min_new_tokens == 5
        assert config.ignore_eos
        assert not config.do_sample
    folder, scheduler, device, properties = pipeline.arguments
    assert (Path(folder) / "openvino_model.xml").exists()
    assert device == "CPU"
    assert scheduler.max_num_seqs == 4
    assert not scheduler.enable_prefix_caching
    assert properties == {"INFERENCE_NUM_THREADS": 3, "INFERENCE_PRECISION_HINT": "bf16"}
    pipeline.short = 1
    with pytest.raises(RuntimeError, match="4"):
        generate([[1, 2]], 5)


def test_openvino_is_exported_once_per_kind(
    pipelines: list[Pipeline], export: Exporter, tmp_path: Path
) -> None:
    for _ in range(2):
        for quantization in (None, "int8", "int4"):
            OpenVINO().load(wanted(tmp_path / "model", quantization=quantization))
    formats = [one[one.index("--weight-format") + 1] for one in export.commands]
    assert formats == ["fp16", "int8", "int4"]
    assert ["--group-size" in one for one in export.commands] == [False, False, True]
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    OpenVINO().load(wanted(tmp_path / "model"))
    assert len(export.commands) == 4, "other weights are exported anew"


def test_an_export_that_fails_is_told_and_not_kept(
    pipelines: list[Pipeline], export: Exporter, tmp_path: Path, cache: Path
) -> None:
    export.error = "Traceback\nModuleNotFoundError: No module named 'optimum'"
    with pytest.raises(Unavailable, match="No module named 'optimum'"):
        OpenVINO().load(wanted(tmp_path / "model"))
    assert [path for path in (cache / "peers").iterdir() if path.is_dir()] == []
    assert pipelines == []
