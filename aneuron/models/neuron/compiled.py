"""From a model's name to one that runs on a NeuronCore; and the cache of what was compiled.

Comes in: a name, a device, an engine's settings. Goes out: the model, its folder, and the settings
as its programs allow them. An artifact folder is taken as it is; for a checkpoint the cache is
asked, under a key of all that programs depend on, and what it lacks is compiled. Blocking: the
engine calls it in a worker thread, `aneuron compile` by itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aneuron.device.neuron.status import as_config_error
from aneuron.errors import ConfigError
from aneuron.models.architecture import ModelConfig
from aneuron.models.catalog import resolve
from aneuron.models.decoder import Decoder
from aneuron.models.files.cache import MANIFEST, cache_dir, ensure, quiet
from aneuron.models.files.weight_files import weight_files
from aneuron.models.neuron.artifact import CONFIG_FILE, MODEL_FILES, Artifact, write_artifact
from aneuron.models.neuron.program import DTYPES, ProgramShape, traced_programs
from aneuron.models.neuron.sharding import rank_config, shard_state
from aneuron.models.torch_model import read_json
from aneuron.models.weights import kv_bytes_per_token, load_decoder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aneuron.config import EngineConfig
    from aneuron.device import Model
    from aneuron.device.neuron.device import NeuronDevice
    from aneuron.device.neuron.raw import NxdCompiler
    from aneuron.models.catalog import Progress, ResolvedModel

__all__ = ["compile_artifact", "load_neuron", "shape_for"]

_logger = logging.getLogger("aneuron.models")
_LEAST_BUCKET = 128  # tokens; NxDI's programs begin there too
_POOL_BYTES = 4 * 2**30  # of the KV cache of a rank, where nobody says how many blocks
_SAMPLE_BYTES = 1 << 20
_PACKAGE = Path(__file__).parents[2]
# Whose code is traced, or decides what is traced and written: a change in one is another artifact.
_SOURCES = (
    "device/neuron/nxd_runtime.py", "models/architecture.py", "models/decoder.py", "models/rope.py",
    "models/weights.py", "models/neuron/artifact.py", "models/neuron/compiled.py",
    "models/neuron/program.py", "models/neuron/sampler.py", "models/neuron/settings.py",
    "models/neuron/sharding.py",
)  # fmt: skip


def load_neuron(
    name: str,
    device: NeuronDevice,
    config: EngineConfig,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> tuple[Model, Path, EngineConfig]:
    """Load a model onto a device, compiled first where that was never done.

    Args:
        name: of an artifact's folder, or as `catalog.resolve` takes it.
        device: that runs it.
        config: of the engine.
        revision: branch, tag or commit; only with a Hugging Face id.
        progress: told how far fetching and compiling are.

    Returns:
        The model, the folder with its tokenizer, and the settings that it can run.

    Raises:
        ConfigError: no such model, a setting that its programs cannot have, or they do not
            compile; `param` names it.
        DeviceError: the runtime refuses.
    """
    folder = Path(name).expanduser()
    is_artifact = (folder / CONFIG_FILE).is_file()
    if device.kind == "native":
        if is_artifact:
            raise ConfigError(
                f"{folder} holds traced programs, and the runtime here is native PyTorch: "
                "pass the checkpoint",
                param="model",
            )
        return _load_native(name, device, config, revision, progress)
    from aneuron.models.neuron.nxd import NxdModel

    if is_artifact:
        artifact = Artifact.read(folder.absolute())
    else:
        artifact, config = _compiled(name, device.compiler, config, revision, progress)
    config = artifact.adapt(config)
    (progress or quiet)("load", 0, None)
    return NxdModel.load(artifact, device), artifact.folder, config


def compile_artifact(
    name: str,
    compiler: NxdCompiler,
    config: EngineConfig,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Artifact:
    """Return the compiled programs of a checkpoint, from the cache if they are there.

    Raises:
        ConfigError: as `load_neuron`.
    """
    return _compiled(name, compiler, config, revision, progress)[0]


def shape_for(config: EngineConfig, model: ModelConfig) -> ProgramShape:
    """Return the sizes of the programs for an engine's settings.

    With prefix caching the KV cache is in blocks and prompts may be cut; without, each request
    has a row as long as its longest context, and its prompt is one launch. `dtype` "auto" is
    bfloat16. Where no number of blocks is given there are enough for all requests at their
    longest, or for 4 GiB of each rank.

    Raises:
        ConfigError: a setting is wrong for traced programs; `param` names it.
    """
    _check(config, model)
    size, rows = config.block_size, config.max_num_seqs
    length = config.max_model_len or model.max_model_len
    length = -(-length // size) * size if length < model.max_model_len else length // size * size
    is_block_kv = config.enable_prefix_caching
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    longest = min(config.max_num_batched_tokens, length) if is_block_kv else length
    contexts = _given(config.num_tokens_buckets, longest) or _powers_of_two(longest)
    blocks = [count * size for count in config.num_blocks_buckets or ()]
    # A prompt may be cut behind any of its tokens.
    prefixes = (0, *_multiples(_powers_of_two(length), size))
    return ProgramShape(
        batch_size=rows,
        max_model_len=length,
        context_buckets=contexts,
        prefix_buckets=prefixes if is_block_kv else (0,),
        token_buckets=_given(blocks, length) or _multiples(_powers_of_two(length), size),
        is_block_kv=is_block_kv,
        block_size=size if is_block_kv else length,
        # Beside those that run, rows of requests that have ended and are still in flight.
        num_blocks=_num_blocks(config, model, length, dtype)
        if is_block_kv
        else rows * config.max_in_flight_steps,
        num_slots=rows * config.max_in_flight_steps,  # of the synchronous baseline, too
        dtype=dtype,
    )


def _load_native(
    name: str,
    device: NeuronDevice,
    config: EngineConfig,
    revision: str | None,
    progress: Progress | None,
) -> tuple[Model, Path, EngineConfig]:
    from aneuron.models.neuron.native import NativeModel
    from aneuron.models.neuron.native_buckets import adapt

    config = adapt(config)
    found = resolve(name, revision=revision, progress=progress)
    (progress or quiet)("load", 0, None)
    model = NativeModel.load(found.path, device, name=found.name, dtype=config.dtype)
    return model, found.path, config


def _compiled(
    name: str,
    compiler: NxdCompiler | None,
    config: EngineConfig,
    revision: str | None,
    progress: Progress | None,
) -> tuple[Artifact, EngineConfig]:
    """Return a checkpoint's programs, and the settings that are not in their sizes."""
    if compiler is None:
        raise ConfigError("this device has no compiler: pass a compiled artifact", param="model")
    found = resolve(name, revision=revision, progress=progress)
    model = ModelConfig.from_dict(read_json(found.path / "config.json"))
    shape, ranks = shape_for(config, model), config.tensor_parallel_size
    rank_config(model, ranks)  # refuses ranks that do not divide it
    build = _Build(found, model, shape, ranks, compiler, progress or quiet)
    folder = ensure(build.entry, build, progress=progress or quiet)
    left = replace(
        config,
        block_size=shape.block_size,
        kv_cache_bytes=None,
        num_tokens_buckets=None,
        num_blocks_buckets=None,
        max_num_batched_tokens=min(config.max_num_batched_tokens, shape.context_buckets[-1])
        if shape.is_block_kv
        else shape.max_model_len,
    )
    return Artifact.read(folder, name=found.name), left


class _Build:
    """Fills a folder of the cache with an artifact; its name has the key.

    Attributes:
        entry: the folder's name.
    """

    def __init__(
        self,
        found: ResolvedModel,
        model: ModelConfig,
        shape: ProgramShape,
        ranks: int,
        compiler: NxdCompiler,
        progress: Progress,
    ) -> None:
        self._found = found
        self._model = model
        self._shape = shape
        self._ranks = ranks
        self._compiler = compiler
        self._progress = progress
        stem = re.sub(r"[^\w.-]+", "-", found.name).strip("-").lower()[:60]
        self.entry = f"{stem}-neuron-{self._key()[:16]}"

    def __call__(self, folder: Path) -> None:
        """Compile, and write what goes with it; the lock of the entry is held."""
        if (cache_dir() / self.entry).is_dir():
            _logger.warning("%s in the cache is damaged: compiling it again", self.entry)
        model, ranks, path = self._model, self._ranks, self._found.path
        self._progress("load", 0, None)
        state = load_decoder(path, model, DTYPES[self._shape.dtype]).state_dict()
        part = rank_config(model, ranks)

        def decoder(rank: int) -> Decoder:
            with torch.device("meta"):
                made = Decoder(part, reduce=_alone if ranks > 1 else None)
            made.load_state_dict(shard_state(state, model, rank, ranks), assign=True)
            return made.eval().requires_grad_(requires_grad=False)

        programs = traced_programs(self._shape, decoder, num_layers=model.num_layers)
        try:
            self._compiler.compile(programs, folder, ranks=ranks, progress=self._progress)
        except RuntimeError as error:
            raise as_config_error(error, param="model") from error
        self._progress("weights", 0, None)
        shards = (shard_state(state, model, rank, ranks) for rank in range(ranks))
        config = read_json(path / "config.json")
        write_artifact(folder, self._shape, shards, model=config, source=path)

    def _key(self) -> str:
        """Return a digest of all that the artifact depends on."""
        parts = {
            "checkpoint": _checkpoint_key(self._found.path),
            "shape": asdict(self._shape),
            "ranks": self._ranks,
            "sources": _source_digest(),
            "compiler": self._compiler.version,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _alone(part: torch.Tensor) -> torch.Tensor:
    """Stand where the compiler puts the sum over the ranks."""
    return part


def _source_digest() -> str:
    """Return a digest of the code that an artifact depends on."""
    return _digest(_PACKAGE, _SOURCES)


def _digest(folder: Path, names: Iterable[str]) -> str:
    """Return a digest of files of a folder, and of which are there."""
    digest = hashlib.sha256()
    for name in names:
        if (folder / name).is_file():
            content = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()


def _checkpoint_key(path: Path) -> str:
    """Return a digest that changes with the checkpoint.

    It is of all files that go into an artifact. Of a folder of the cache its manifest has digests
    of the weights. Of another their sizes, times of change and both ends stand for them: to hash
    them whole would take longer than to load them.
    """
    digest = hashlib.sha256(_digest(path, MODEL_FILES).encode())
    manifest = path / MANIFEST
    if manifest.is_file():
        files = json.loads(manifest.read_bytes())["files"]
        told = {name: facts["sha256"] for name, facts in files.items()}
        digest.update(json.dumps(told, sort_keys=True).encode())
        return digest.hexdigest()
    for file in weight_files(path):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_SAMPLE_BYTES))
            opened.seek(max(0, stat.st_size - _SAMPLE_BYTES))
            digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _check(config: EngineConfig, model: ModelConfig) -> None:
    for name, none in (("quantization", None), ("kv_cache_dtype", "auto")):
        if getattr(config, name) != none:
            raise ConfigError(f"{name} is for the processor: leave it out", param=name)
    if config.num_seqs_buckets is not None:
        raise ConfigError(
            "a traced program has one number of rows, max_num_seqs: leave num_seqs_buckets out",
            param="num_seqs_buckets",
        )
    _check_prompts(config)
    for name in ("num_kv_blocks", "kv_cache_bytes"):
        if not config.enable_prefix_caching and getattr(config, name) is not None:
            raise ConfigError(
                f"without prefix caching each request has a row of the cache: leave {name} out",
                param=name,
            )
    limit = config.max_model_len
    if limit is not None and limit > model.max_model_len:
        raise ConfigError(
            f"max_model_len {limit} is over the model's own {model.max_model_len}",
            param="max_model_len",
        )
    if min(limit or model.max_model_len, model.max_model_len) < max(2, config.block_size):
        raise ConfigError(
            f"block_size {config.block_size} is over the longest context", param="block_size"
        )


def _check_prompts(config: EngineConfig) -> None:
    sizes = {"num_tokens_buckets": min(config.num_tokens_buckets or (2,))}
    if config.enable_prefix_caching:  # else no prompt is cut
        sizes["max_num_batched_tokens"] = config.max_num_batched_tokens
    for name, size in sizes.items():
        if size < 2:
            raise ConfigError(
                f"{name} must be 2 or more: a program of one token is a decode", param=name
            )


def _num_blocks(config: EngineConfig, model: ModelConfig, length: int, dtype: str) -> int:
    per_request = -(-length // config.block_size)
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    budget = config.kv_cache_bytes or _POOL_BYTES * config.tensor_parallel_size
    room = budget // (kv_bytes_per_token(model, DTYPES[dtype]) * config.block_size)
    if room < 1:
        raise ConfigError(
            f"{budget} bytes do not hold one block of the KV cache", param="kv_cache_bytes"
        )
    return int(min(room, config.max_num_seqs * per_request))


def _given(sizes: Any, longest: int) -> tuple[int, ...]:
    """Return sizes that were asked for, up to the longest, which is always one."""
    return tuple(sorted({*(size for size in sizes if size < longest), longest})) if sizes else ()


def _powers_of_two(longest: int) -> tuple[int, ...]:
    """Return 128, 256, … below `longest`, and that."""
    found, size = [], _LEAST_BUCKET
    while size < longest:
        found.append(size)
        size *= 2
    return (*found, longest)


def _multiples(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return them rounded up to multiples of a block's size."""
    return tuple(sorted({-(-one // size) * size for one in sizes}))
