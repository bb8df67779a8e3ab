"""Loading: every tensor is used, owned and of the right shape, or it is named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from aneuron.errors import ConfigError, OutOfMemory
from aneuron.models import torch_model
from aneuron.models.torch_model import TorchModel

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.tiny

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def save(path: Path, *, max_shard_size: str = "5GB", **changes: Any) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 60,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "eos_token_id": 2,
            **changes,
        }
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


def load(path: Path, dtype: str = "float32") -> TorchModel:
    return TorchModel.load(path, dtype=dtype, name="tiny")


def refused(path: Path, *, says: str | None = None) -> str | None:
    with pytest.raises(ConfigError, match=says) as info:
        load(path)
    return info.value.param


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors; `__` stands for a dot."""
    state = load_file(path / SINGLE)
    for key, tensor in tensors.items():
        name = key.replace("__", ".")
        state.pop(name, None)
        if tensor is not None:
            state[name] = tensor
    save_file(state, path / SINGLE)


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def states_equal(one: TorchModel, two: TorchModel) -> bool:
    state = two.decoder.state_dict()
    return all(torch.equal(t, state[name]) for name, t in one.decoder.state_dict().items())


def test_shards_give_the_same_weights(tmp_path: Path) -> None:
    whole = load(save(tmp_path / "whole"))
    path = save(tmp_path / "shards", max_shard_size="10KB")
    assert (path / INDEX).exists()
    assert len(list(path.glob("*.safetensors"))) > 2
    assert states_equal(whole, load(path))


def test_weights_are_owned_and_of_the_dtype(tmp_path: Path) -> None:
    path = save(tmp_path)
    model = load(path, "bfloat16")
    before = model.decoder.embed.weight.clone()
    (path / SINGLE).write_bytes(b"\0" * (path / SINGLE).stat().st_size)
    assert torch.equal(model.decoder.embed.weight, before)
    assert {p.dtype for p in model.decoder.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad or p.is_meta for p in model.decoder.parameters())
    assert model.decoder.inv_freq.dtype == torch.float32
    assert model.spec.kv_bytes_per_token == 2 * 2 * 2 * 8 * 2


def test_float16_files_load(tmp_path: Path) -> None:
    path = save(tmp_path)
    state = {name: tensor.half() for name, tensor in load_file(path / SINGLE).items()}
    save_file(state, path / SINGLE)
    assert load(path).decoder.embed.weight.dtype == torch.float32


def test_spec_says_what_the_files_say(tmp_path: Path) -> None:
    path = save(tmp_path)
    spec = load(path).spec
    assert (spec.name, spec.vocab_size, spec.max_model_len) == ("tiny", 60, 2048)
    assert spec.eos_token_ids == (2,)
    rewrite(path / "generation_config.json", eos_token_id=[5, 7, 1000])
    assert load(path).spec.eos_token_ids == (5, 7)
    (path / "generation_config.json").unlink()
    assert load(path).spec.eos_token_ids == (2,)
    rewrite(path / "config.json", eos_token_id=None)
    assert load(path).spec.eos_token_ids == ()
    rewrite(path / "config.json", eos_token_id="</s>")
    assert refused(path) == "eos_token_id"


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    path = save(tmp_path)
    change(path, model__layers__1__mlp__up_proj__weight=None)
    assert refused(path) == "model.layers.1.mlp.up_proj.weight"


def test_unexpected_tensor_is_named(tmp_path: Path) -> None:
    path = save(tmp_path)
    change(path, model__layers__0__self_attn__q_proj__bias=torch.zeros(32))
    assert refused(path) == "model.layers.0.self_attn.q_proj.bias"


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    path = save(tmp_path)
    change(path, model__layers__0__self_attn__k_proj__weight=torch.zeros(32, 32))
    assert refused(path) == "model.layers.0.self_attn.k_proj.weight"


def test_integer_weights_are_named(tmp_path: Path) -> None:
    path = save(tmp_path)
    change(path, model__norm__weight=torch.ones(32, dtype=torch.int8))
    assert refused(path) == "model.norm.weight"


def test_old_rope_tensors_are_ignored(tmp_path: Path) -> None:
    path = save(tmp_path)
    change(path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    load(path)


def test_tied_head_may_be_there_if_it_is_the_embedding(tmp_path: Path) -> None:
    path = save(tmp_path, tie_word_embeddings=True)
    embedding = load_file(path / SINGLE)["model.embed_tokens.weight"]
    change(path, lm_head__weight=embedding.clone())
    assert load(path).decoder.lm_head is None
    change(path, lm_head__weight=embedding + 1)
    assert refused(path) == "lm_head.weight"


@pytest.mark.parametrize("garbage", [b"", b"not a tensor file", b"\xff" * 200])
def test_corrupt_file_is_named(tmp_path: Path, garbage: bytes) -> None:
    path = save(tmp_path)
    (path / SINGLE).write_bytes(garbage)
    assert refused(path) == SINGLE


def test_cut_file_is_named(tmp_path: Path) -> None:
    path = save(tmp_path)
    data = (path / SINGLE).read_bytes()
    (path / SINGLE).write_bytes(data[: len(data) // 2])
    assert refused(path) == SINGLE


def test_no_weights_at_all(tmp_path: Path) -> None:
    path = save(tmp_path)
    (path / SINGLE).rename(path / "pytorch_model.bin")
    assert refused(path) == "model"


def test_missing_shard_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, max_shard_size="10KB")
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    assert refused(path) == shard.name


@pytest.mark.parametrize(
    "index",
    ["", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b"}}'],
)
def test_corrupt_index_is_named(tmp_path: Path, index: str) -> None:
    path = save(tmp_path, max_shard_size="10KB")
    (path / INDEX).write_text(index)
    assert refused(path, says=INDEX) == "model"


@pytest.mark.parametrize("text", ["", "{", "[]", "\ud800"])
def test_corrupt_config_is_named(tmp_path: Path, text: str) -> None:
    path = save(tmp_path)
    (path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert refused(path) == "config.json"


def test_missing_directory(tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere") == "config.json"


def test_caches_are_tensors_of_their_own(tmp_path: Path) -> None:
    model = load(save(tmp_path))
    model.allocate_kv(10, 4)
    caches = [*model.k_caches, *model.v_caches]
    assert [tuple(cache.shape) for cache in caches] == [(11, 4, 2, 8)] * 4
    assert len({cache.untyped_storage().data_ptr() for cache in caches}) == 4
    model.discard()
    assert not model.k_caches
    for sizes, param in (((0, 4), "num_blocks"), ((4, 0), "block_size")):
        with pytest.raises(ConfigError) as info:
            model.allocate_kv(*sizes)
        assert info.value.param == param
    with pytest.raises(OutOfMemory):
        model.allocate_kv(2**40, 64)
    assert not model.k_caches


def test_dtype_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path)
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch_model, "_has_bfloat16", lambda native=native: native)
        assert load(path, "auto").decoder.embed.weight.dtype == expected
    with pytest.raises(ConfigError) as info:
        load(path, "float8")
    assert info.value.param == "dtype"
