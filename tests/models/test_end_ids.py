"""End ids of a model: those of its generation config, and of its tokenizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import Engine
from tests.support import every_carry
from tests.test_detokenize import byte_level
from tests.test_equality import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.tiny


@every_carry
async def test_end_ids_of_files(tmp_path: Path, carry: dict[str, Any]) -> None:
    """Of generation_config.json, a list, and of the tokenizer, whose `<|end|>` is id 1."""
    tiny_model("Llama", tmp_path)
    byte_level().tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    async with Engine(str(tmp_path), dtype="float32", max_model_len=64, **carry) as engine:
        for end in (7, 8, 1):
            bias = {end: 100.0}
            answer = await engine.generate(prompt_token_ids=[5], logit_bias=bias, max_tokens=12)
            assert (end, answer.token_ids, answer.finish_reason) == (end, [end], "stop")
            assert answer.text == ""
            ignored = await engine.generate(
                prompt_token_ids=[5], logit_bias=bias, max_tokens=12, ignore_eos=True
            )
            assert (ignored.token_ids, ignored.finish_reason) == ([end] * 12, "length")
