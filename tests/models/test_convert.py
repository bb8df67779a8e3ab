"""GGUF to directory: values, names, tokenizers, and files that are damaged."""

from __future__ import annotations

import json
import random
import struct
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from aneuron.errors import ConfigError
from aneuron.models.files.convert import convert_gguf
from aneuron.models.files.gguf_tokenizer import end_token_ids, write_tokenizer
from aneuron.models.files.tensor_files import StoredTensor, read_gguf, write_safetensors

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

TEXTS = [
    "hello",
    " hello  world\n\n\tx = 3.14;\r\n",
    "emoji 😀👍🏽, 日本語, ß, a\u0301",
    "it's I'LL",
    "",
    "   ",
    "<|im_start|>user\nhello<|im_end|>\n",
]


def converted(source: Path, into: Path) -> Path:
    into.mkdir()
    convert_gguf(source, into)
    return into


def to_pairs(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Reorder rows as llama.cpp's converter does for its way of rotating."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def test_writes_a_directory_that_transformers_would_have_written(
    tiny_gguf: Any, tmp_path: Path
) -> None:
    out = converted(tiny_gguf.write(tmp_path / "a.gguf"), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["head_dim"], config["num_key_value_heads"]) == (32, 8, 2)
    assert config["rms_norm_eps"] == 1e-5
    assert config["vocab_size"] == tiny_gguf.num_tokens
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "float32"
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2}
    tokenizer = json.loads((out / "tokenizer_config.json").read_text())
    assert tokenizer["eos_token"] == "<|im_end|>"
    assert "im_start" in tokenizer["chat_template"]


def test_quantised_values_are_kept_exactly_and_put_in_halves(
    tiny_gguf: Any, tmp_path: Path
) -> None:
    kinds = {
        "blk.0.attn_q.weight": gguf.GGMLQuantizationType.Q4_1,
        "blk.1.attn_k.weight": gguf.GGMLQuantizationType.Q8_0,
        "blk.0.ffn_up.weight": gguf.GGMLQuantizationType.Q4_1,
    }
    source = tiny_gguf.write(tmp_path / "a.gguf", quantise=kinds)
    reader = gguf.GGUFReader(source)
    expected = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in reader.tensors
    }
    values = load_file(converted(source, tmp_path / "out") / "model.safetensors")
    heads, kv_heads = tiny_gguf.heads
    query = values["model.layers.0.self_attn.q_proj.weight"]
    assert np.array_equal(to_pairs(query, heads), expected["blk.0.attn_q.weight"])
    key = values["model.layers.1.self_attn.k_proj.weight"]
    assert np.array_equal(to_pairs(key, kv_heads), expected["blk.1.attn_k.weight"])
    up = values["model.layers.0.mlp.up_proj.weight"]
    assert np.array_equal(up, expected["blk.0.ffn_up.weight"])
    assert np.array_equal(values["model.embed_tokens.weight"], expected["token_embd.weight"])


def test_plain_half_precision_tensors_keep_their_type(tiny_gguf: Any, tmp_path: Path) -> None:
    weights = tiny_gguf.weights()
    weights["blk.0.ffn_up.weight"] = weights["blk.0.ffn_up.weight"].astype(np.float16)
    source = tiny_gguf.write(
        tmp_path / "a.gguf",
        weights,
        quantise={"token_embd.weight": gguf.GGMLQuantizationType.BF16},
    )
    out = converted(source, tmp_path / "out")
    head = (out / "model.safetensors").read_bytes()
    header = json.loads(head[8 : 8 + int.from_bytes(head[:8], "little")])
    assert header["model.layers.0.mlp.up_proj.weight"]["dtype"] == "F16"
    assert header["model.embed_tokens.weight"]["dtype"] == "BF16"
    assert header["model.norm.weight"]["dtype"] == "F32"
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_bfloat16_rounds_to_nearest_even(tmp_path: Path) -> None:
    bits = [0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF]
    values = np.array(bits, np.uint32).view(np.float32)
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [StoredTensor("x", "BF16", (5,), lambda: values)], lambda _: None)
    stored = np.frombuffer(path.read_bytes()[-10:], np.uint16).tolist()
    assert stored == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xBF80]


def test_progress_ends_at_the_total(tiny_gguf: Any, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    (tmp_path / "out").mkdir()
    source = tiny_gguf.write(tmp_path / "a.gguf")
    convert_gguf(source, tmp_path / "out", progress=lambda *facts: seen.append(facts))
    assert seen[-1][0] == "convert"
    assert seen[-1][1] == seen[-1][2]
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("gpt-2", ["123", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("tekken", ["1", "2", "3", "4"]),
    ],
)
def test_digits_are_split_as_the_vocabulary_was_learned(
    pre: str, expected: list[str], tiny_gguf: Any, tmp_path: Path
) -> None:
    write_tokenizer(read_gguf(tiny_gguf.write(tmp_path / "a.gguf", pre=pre)).metadata, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("1234").tokens == expected


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "tekken"])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_comes_back(pre: str, text: str, tiny_gguf: Any, tmp_path: Path) -> None:
    write_tokenizer(read_gguf(tiny_gguf.write(tmp_path / "a.gguf", pre=pre)).metadata, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_end|>").ids == [2]


def sentencepiece_metadata() -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = {"▁": -5.0, "h": -6.0, "i": -7.0, "hi": -2.0, "▁hi": -1.0, "▁▁": -3.0}
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *pieces],
        "tokenizer.ggml.scores": [0.0] * len(tokens) + list(pieces.values()),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    write_tokenizer(sentencepiece_metadata(), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("hi hi").tokens == ["<s>", "▁hi", "▁hi"]
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    for text in ("hi", "  hi é😀\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_declared_end_is_an_end_and_nothing_else(tiny_gguf: Any, tmp_path: Path) -> None:
    metadata = read_gguf(tiny_gguf.write(tmp_path / "a.gguf")).metadata
    assert end_token_ids(metadata) == [2]
    assert end_token_ids(metadata | {"tokenizer.ggml.eot_token_id": 7}) == [2, 7]
    without_unknown = metadata | {"tokenizer.ggml.unknown_token_id": None}
    assert end_token_ids(without_unknown) == [2, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "gemma3"}, "general.architecture is 'gemma3'"),
        ({"pre": "unheard-of"}, "tokenizer.ggml.pre is 'unheard-of'"),
        ({"also": lambda w: w.add_expert_count(8)}, "expert_count"),
        ({"also": lambda w: w.add_rope_dimension_count(4)}, "4 dimensions rotated"),
        (
            {
                "also": lambda w: (
                    w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
                    w.add_rope_scaling_factor(2.0),
                )
            },
            "rope.scaling.type is 'longrope'",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_its_key(
    changes: dict[str, Any], message: str, tiny_gguf: Any, tmp_path: Path
) -> None:
    source = tiny_gguf.write(tmp_path / "a.gguf", **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        converted(source, tmp_path / "out")
    assert caught.value.param == "model"
    assert str(source) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("blk.1.attn_v.weight", None, "1 tensors are missing, such as blk.1.attn_v.weight"),
        ("token_embd.weight", None, "token_embd.weight is missing"),
        ("blk.0.mystery.weight", np.ones(4, np.float32), "unknown tensor blk.0.mystery.weight"),
        ("blk.0.attn_norm.weight", np.ones(4, np.float32), "attn_norm.weight has the shape"),
        ("token_embd.weight", np.ones((5, 32), np.float32), "fewer rows than there are tokens"),
    ],
)
def test_missing_and_unknown_tensors_and_shapes_are_named(
    name: str, values: NDArray[Any] | None, message: str, tiny_gguf: Any, tmp_path: Path
) -> None:
    weights = tiny_gguf.weights() | {name: values}
    kept = {key: value for key, value in weights.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        converted(tiny_gguf.write(tmp_path / "a.gguf", kept), tmp_path / "out")


def test_a_file_cut_off_anywhere_is_refused_by_name(tiny_gguf: Any, tmp_path: Path) -> None:
    whole = tiny_gguf.write(tmp_path / "a.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    lengths = [0, 3, 4, 20, 100, *range(200, len(whole), len(whole) // 40), len(whole) - 1]
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf is not a sound GGUF file"):
            read_gguf(cut)


@pytest.mark.parametrize("depth", [2, 3, 100_000])
def test_arrays_of_arrays_are_refused(depth: int, tmp_path: Path) -> None:
    """However deep: by name, not by the interpreter's recursion limit."""
    path = tmp_path / "nested.gguf"
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sI", 1, b"a", 9)
    path.write_bytes(head + struct.pack("<IQ", 9, 1) * (depth - 1) + struct.pack("<IQI", 4, 1, 7))
    with pytest.raises(ConfigError, match=r"nested\.gguf is not a sound GGUF file") as caught:
        read_gguf(path)
    assert caught.value.param == "model"


def test_flipped_bytes_never_end_in_another_error(tiny_gguf: Any, tmp_path: Path) -> None:
    whole = tiny_gguf.write(tmp_path / "a.gguf").read_bytes()
    head = len(whole) - whole[::-1].index(b"mron_nff")  # up to the last tensor's name
    rng = random.Random(7)
    bad, out = tmp_path / "bad.gguf", tmp_path / "out"
    out.mkdir()
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 4])):
            data[rng.randrange(4, head)] = rng.choice([0, 1, 9, 127, 255])
        bad.write_bytes(data)
        try:
            convert_gguf(bad, out)
        except ConfigError as error:
            assert "bad.gguf" in str(error)  # noqa: PT017  (not refusing is right as well)


@pytest.mark.tiny
@pytest.mark.timeout(120)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "smollm3"])
def test_the_model_computes_what_it_did_before(arch: str, tiny_gguf: Any, tmp_path: Path) -> None:
    """transformers' model → GGUF as llama.cpp stores it → directory → the same logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    is_llama = arch == "llama"
    config = AutoConfig.for_model(
        arch,
        vocab_size=tiny_gguf.num_tokens,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0 if is_llama else 10000.0,
        rope_scaling=scaling if is_llama else None,
        tie_word_embeddings=not is_llama,
        pad_token_id=None,
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # norms and biases start as ones and zeros
        torch.nn.init.normal_(parameter, std=0.3)
    source = tiny_gguf.write(
        tmp_path / "a.gguf",
        gguf_weights(model, arch, tiny_gguf.heads),
        arch=arch,
        also=lambda writer: writer.add_rope_freq_base(config.rope_parameters["rope_theta"]),
    )
    again = AutoModelForCausalLM.from_pretrained(converted(source, tmp_path / "out")).eval()
    ids = torch.arange(40).reshape(1, -1) % tiny_gguf.num_tokens
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


def gguf_weights(model: Any, arch: str, heads: tuple[int, int]) -> dict[str, NDArray[np.float32]]:
    """Name and order a transformers model's weights as llama.cpp's converter does."""
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, 2)
    weights: dict[str, NDArray[np.float32]] = {}
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if arch in ("llama", "smollm3") and ("q_proj" in hf_name or "k_proj" in hf_name):
            values = to_pairs(values, heads["k_proj" in hf_name])
        weights[str(names.get_name(hf_name, try_suffixes=(".weight", ".bias")))] = values
    if arch == "llama":
        weights["rope_freqs.weight"] = rope_factors(model)
    return weights


def rope_factors(model: Any) -> NDArray[np.float32]:
    scaled = model.model.rotary_emb.inv_freq.double().numpy()
    plain = 500000.0 ** -(np.arange(0, 8, 2) / 8)
    factors: NDArray[np.float32] = (plain / scaled).astype(np.float32)
    return factors
