"""A tiny GGUF file, written with the `gguf` package as llama.cpp's converter would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, CONTEXT = 32, 2, 4, 2, 64, 128
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_vocabulary() -> tuple[list[str], list[str]]:
    """Return the tokens and merges of a small byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in printable]
    letters += [chr(256 + index) for index in range(256 - len(printable))]
    merges = ["1 2", "12 3", "h e", "l l", "he ll", "hell o", "Ġ hello"]
    return [*SPECIAL, *letters, *(merge.replace(" ", "") for merge in merges)], merges


def tiny_weights(arch: str = "llama", *, tied: bool = True) -> dict[str, NDArray[np.float32]]:
    """Return random weights under the names that a GGUF file gives them."""
    rng = np.random.default_rng(0)
    vocab, kv = len(byte_vocabulary()[0]), HIDDEN * KV_HEADS // HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, HIDDEN), "output_norm": (HIDDEN,)}
    if not tied:
        shapes["output"] = (vocab, HIDDEN)
    for index in range(LAYERS):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }
        if arch == "qwen3":
            layer |= {"attn_q_norm": (HIDDEN // HEADS,), "attn_k_norm": (HIDDEN // HEADS,)}
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    weights = {
        f"{name}.weight": rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    if arch == "qwen2":
        for index in range(LAYERS):
            for name, size in (("attn_q", HIDDEN), ("attn_k", kv), ("attn_v", kv)):
                bias = rng.normal(size=size).astype(np.float32)
                weights[f"blk.{index}.{name}.bias"] = bias
    return weights


def write_gguf(
    path: Path,
    weights: dict[str, NDArray[np.float32]] | None = None,
    *,
    arch: str = "llama",
    pre: str = "smollm",
    quantise: dict[str, gguf.GGMLQuantizationType] | None = None,
    also: Callable[[Any], object] | None = None,
) -> Path:
    """Write a GGUF file; `also` may add to the writer or change what was added."""
    weights = tiny_weights(arch) if weights is None else weights
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokens, merges = byte_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    if also is not None:
        also(writer)
    for name, values in weights.items():
        if kind := (quantise or {}).get(name):
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class TinyGGUF:
    """What a test needs to write GGUF files of its own."""

    write = staticmethod(write_gguf)
    weights = staticmethod(tiny_weights)
    heads = (HEADS, KV_HEADS)
    num_tokens = len(byte_vocabulary()[0])


@pytest.fixture
def tiny_gguf() -> type[TinyGGUF]:
    """Give the writer of tiny GGUF files."""
    return TinyGGUF


@pytest.fixture
def model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point the model cache at a directory of the test's own."""
    path = tmp_path / "cache"
    monkeypatch.setenv("ANEURON_CACHE_DIR", str(path))
    return path
