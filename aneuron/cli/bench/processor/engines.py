"""The engines that `aneuron bench peers` runs beside this one, where they are installed.

Comes in: a model's directory, and the kind of weights that this engine runs. Goes out: of each
peer a function that answers prompts of token ids, greedily and with the same number of new tokens
each, and returns the seconds. A peer is imported when it is loaded; what it must convert first is
kept in the cache directory. Blocking.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from aneuron.models.catalog import BUILTIN
from aneuron.models.files.cache import ensure
from aneuron.models.files.weight_files import weight_files

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["PEERS", "Generate", "Peer", "Unavailable", "Wanted", "gguf_of", "installed"]

_LLAMA_ROUNDS_TO = 256


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a peer is asked to load.

    Attributes:
        path: the model's directory, in Hugging Face layout.
        dtype: "float32" or "bfloat16".
        quantization: "int8", "int4" or None, of this engine; a peer takes what is nearest.
        gguf: a file with the same weights, for those that read no other; None if there is none.
        max_num_seqs: the most prompts at once.
        max_model_len: the most tokens of a prompt and its answer.
        num_threads: that compute.
    """

    path: Path
    dtype: str
    quantization: str | None
    gguf: Path | None
    max_num_seqs: int
    max_model_len: int
    num_threads: int


class Unavailable(Exception):
    """A peer is installed and cannot run this model; the message says why."""


class Generate(Protocol):
    """A loaded model."""

    def __call__(self, prompts: list[list[int]], max_tokens: int, /) -> float:
        """Answer prompts, all of one length, with so many new tokens each; return the seconds."""


class Peer(Protocol):
    """An engine of others."""

    name: str
    package: str  # the distribution that it comes with

    def kind(self, wanted: Wanted) -> str:
        """Return what the peer calls the weights that it runs."""

    def load(self, wanted: Wanted) -> Generate:
        """Load the model, converted if need be.

        Raises:
            ImportError: its package is not whole.
            Unavailable: it cannot run this model, or a package that converts it is missing.
            ConfigError: the cache cannot be written.
        """


def installed(peer: Peer) -> str | None:
    """Return the version of a peer's package; None if it is not installed."""
    try:
        return version(peer.package)
    except PackageNotFoundError:
        return None


def gguf_of(model: str, path: Path) -> Path | None:
    """Return the GGUF file that a model's directory was made of, if it is still there.

    Args:
        model: as it was asked for.
        path: what it resolved to.
    """
    if model.lower().endswith(".gguf"):
        return Path(model).expanduser()
    builtin = BUILTIN.get(model.strip().lower())
    if builtin is None:
        return None
    return next(path.parent.glob(f"*-{builtin.member_sha256[:12]}/{builtin.file_name}"), None)


class Transformers:
    """`generate` of transformers: a static batch, in 16 or 32 bits."""

    name = "transformers"
    package = "transformers"

    def kind(self, wanted: Wanted) -> str:
        """Return the dtype: its quantisers want packages of their own."""
        return wanted.dtype

    def load(self, wanted: Wanted) -> Generate:
        """Load the model as it lies there."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(wanted.num_threads)
        dtype = getattr(torch, wanted.dtype)
        model = AutoModelForCausalLM.from_pretrained(wanted.path, dtype=dtype).eval()

        def generate(prompts: list[list[int]], max_tokens: int) -> float:
            ids = torch.tensor(prompts)
            started_s = perf_counter()
            with torch.inference_mode():
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens,
                    min_new_tokens=max_tokens, do_sample=False, pad_token_id=0,
                )  # fmt: skip
            return perf_counter() - started_s

        return generate


class OpenVINO:
    """Continuous batching of OpenVINO GenAI, on a model that optimum exported.

    Keys and values are in its default, 8 bits.
    """

    name = "openvino"
    package = "openvino-genai"

    def kind(self, wanted: Wanted) -> str:
        """Return the format of weights, in the words of `optimum-cli export openvino`."""
        return wanted.quantization or {"bfloat16": "fp16", "float32": "fp32"}[wanted.dtype]

    def load(self, wanted: Wanted) -> Generate:
        """Load the model, exported if need be."""
        path = self._exported(wanted)
        genai = import_module(self.package.replace("-", "_"))  # has no types to check against
        tensor = import_module("openvino").Tensor
        import numpy as np

        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = wanted.max_num_seqs
        scheduler.enable_prefix_caching = False
        precision = {"bfloat16": "bf16", "float32": "f32"}[wanted.dtype]
        properties = {
            "INFERENCE_NUM_THREADS": wanted.num_threads, "INFERENCE_PRECISION_HINT": precision
        }  # fmt: skip
        pipeline = genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", properties)

        def generate(prompts: list[list[int]], max_tokens: int) -> float:
            ids = [tensor(np.array([prompt])) for prompt in prompts]
            config = genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = max_tokens
            config.ignore_eos, config.do_sample = True, False
            started_s = perf_counter()
            answers = pipeline.generate(ids, [config] * len(ids))
            took_s = perf_counter() - started_s
            _check_lengths((len(one.m_generation_ids[0]) for one in answers), max_tokens)
            return took_s

        return generate

    def _exported(self, wanted: Wanted) -> Path:
        kind = self.kind(wanted)
        command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
        command += ["--model", str(wanted.path), "--task", "text-generation-with-past"]
        command += ["--weight-format", kind]
        # The smallest groups that it has for the CPU, as in this engine's int4 and in Q4_1: they
        # divide the width of more models than its default does.
        command += ["--group-size", "32", "--ratio", "1.0"] if kind == "int4" else []

        def build(into: Path) -> None:
            done = subprocess.run(  # noqa: S603  (arguments are ours; no shell)
                [*command, str(into)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                last = done.stderr.strip().rpartition("\n")[2]
                raise Unavailable(f"optimum-intel cannot export the model: {last}")

        return ensure(_entry(self, kind, wanted.path, weight_files(wanted.path)), build)


class LlamaCpp:
    """llama.cpp through llama-cpp-python, all sequences in one batch.

    Its Python class answers one prompt at a time, so this is a loop on the C functions.
    """

    name = "llama.cpp"
    package = "llama-cpp-python"

    def kind(self, wanted: Wanted) -> str:
        """Return the type of the tensors."""
        kinds = {"int8": "Q8_0", "int4": "Q4_1", "bfloat16": "BF16", "float32": "F32"}
        return kinds[wanted.quantization or wanted.dtype]

    def load(self, wanted: Wanted) -> Generate:
        """Load the GGUF file, made of the given one by llama.cpp's own quantisation."""
        import logging

        logging.getLogger(self.package).setLevel(logging.ERROR)  # else it tells each tensor
        library = import_module("llama_cpp")  # not known to the type checker
        file = self._quantised(library, wanted)
        library.llama_backend_init()
        model = library.llama_model_load_from_file(
            str(file).encode(), library.llama_model_default_params()
        )
        if not model:
            raise Unavailable(f"it does not load {file.name}")
        settings = library.llama_context_default_params()
        settings.n_seq_max = wanted.max_num_seqs
        # It rounds each sequence's share up to this, and says so on stderr if it has to.
        share = -(-wanted.max_model_len // _LLAMA_ROUNDS_TO) * _LLAMA_ROUNDS_TO
        settings.n_ctx = wanted.max_num_seqs * share
        settings.n_threads = settings.n_threads_batch = wanted.num_threads
        context = library.llama_init_from_model(model, settings)
        if not context:
            raise Unavailable(f"no context of {settings.n_ctx} tokens")
        vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        return _LlamaBatches(library, context, vocab_size).generate

    def _quantised(self, library: Any, wanted: Wanted) -> Path:
        source = wanted.gguf
        if source is None or not source.is_file():
            raise Unavailable("it needs the model as a GGUF file: --gguf FILE")
        kind = self.kind(wanted)
        prefix = "LLAMA_FTYPE_ALL" if kind == "F32" else "LLAMA_FTYPE_MOSTLY"

        def build(into: Path) -> None:
            settings = library.llama_model_quantize_default_params()
            settings.ftype = getattr(library, f"{prefix}_{kind}")
            settings.allow_requantize = True
            target = into / f"{kind}.gguf"
            if library.llama_model_quantize(str(source).encode(), str(target).encode(), settings):
                raise Unavailable(f"llama.cpp cannot make {kind} of {source.name}")

        return ensure(_entry(self, kind, source, [source]), build) / f"{kind}.gguf"


class _LlamaBatches:
    """Greedy decoding of several sequences with llama.cpp's C functions.

    One cell of a batch is (token id, position, sequence, whether its logits are wanted).
    """

    def __init__(self, library: Any, context: Any, vocab_size: int) -> None:
        self._library = library
        self._context = context
        self._vocab_size = vocab_size
        self._num_cells = library.llama_n_batch(context)
        self._batch = library.llama_batch_init(self._num_cells, 0, 1)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Answer the prompts; return the seconds."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)  # noqa: FBT003  (C)
        answers: list[list[int]] = [[] for _ in prompts]
        started_s = perf_counter()
        length = len(prompts[0])
        cells = [
            (token, position, sequence, position + 1 == length)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for position in range(length, length + max_tokens):
            tokens = self._decode(cells)
            for answer, token in zip(answers, tokens, strict=True):
                answer.append(token)
            cells = [(token, position, sequence, True) for sequence, token in enumerate(tokens)]
        took_s = perf_counter() - started_s
        _check_lengths(map(len, answers), max_tokens)
        return took_s

    def _decode(self, cells: list[tuple[int, int, int, bool]]) -> list[int]:
        """Return the likeliest token after each cell whose logits are wanted."""
        import numpy as np

        tokens: list[int] = []
        for start in range(0, len(cells), self._num_cells):
            part = cells[start : start + self._num_cells]
            self._fill(part)
            if status := self._library.llama_decode(self._context, self._batch):
                raise RuntimeError(f"llama_decode failed with status {status}")
            if num_rows := sum(is_wanted for *_, is_wanted in part):
                logits = self._library.llama_get_logits(self._context)
                rows = np.ctypeslib.as_array(logits, (num_rows, self._vocab_size))
                tokens += rows.argmax(-1).tolist()
        return tokens

    def _fill(self, cells: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(cells)
        for index, (token, position, sequence, is_wanted) in enumerate(cells):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = is_wanted


PEERS: tuple[Peer, ...] = (Transformers(), OpenVINO(), LlamaCpp())


def _entry(peer: Peer, kind: str, source: Path, files: Iterable[Path]) -> str:
    """Return the name in the cache of what a peer makes of these files."""
    digest = sha256(f"{installed(peer)}\0{source.resolve()}".encode())
    for file in files:
        facts = file.stat()
        digest.update(f"{file.name}\0{facts.st_size}\0{facts.st_mtime_ns}".encode())
    return f"peers/{source.stem}-{peer.name}-{kind}-{digest.hexdigest()[:12]}"


def _check_lengths(found: Iterable[int], expected: int) -> None:
    """Check that all answers have the same number of tokens; else rates say nothing."""
    if others := set(found) - {expected}:
        raise RuntimeError(f"an answer has {others} tokens in place of {expected}")
