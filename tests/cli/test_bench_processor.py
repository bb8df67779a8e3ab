"""`aneuron bench throughput`, `quality` and `peers`, and `aneuron compile`, on a tiny model."""

from __future__ import annotations

import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from aneuron.cli.bench.processor import engines, quality
from aneuron.cli.bench.rig.words import word_tokenizer
from aneuron.engine import Engine

if TYPE_CHECKING:
    from aneuron.cli.bench.processor.engines import Generate, Wanted
    from tests.cli.conftest import Command

pytestmark = [pytest.mark.tiny, pytest.mark.timeout(90)]

SMALL = ("--concurrency=1,3", "--prompt-tokens=20,33", "--max-tokens=6", "--runs=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tokenizer = word_tokenizer()
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=64, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=1024, initializer_range=0.2, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.tokenizer.save(str(path / "tokenizer.json"))
    return str(path)


def json_of(aneuron: Command, *arguments: str) -> Any:
    result = aneuron(*arguments, "--json")
    assert result.status == 0, result.err
    return json.loads(result.out)


@pytest.mark.parametrize("extra", [(), ("--quantization=int8",), ("--enforce-eager",)])
def test_throughput(aneuron: Command, model: str, extra: tuple[str, ...]) -> None:
    told = json_of(aneuron, "bench", "throughput", "--model", model, *SMALL, *extra)
    cases = [(row["concurrency"], row["prompt_tokens"]) for row in told["rows"]]
    assert cases == [(1, 20), (3, 20), (1, 33), (3, 33)]
    for row in told["rows"]:
        assert row["total_tokens_per_s"] > 0
        assert row["decode_tokens_per_s"] > 0
        assert row["ttft_ms"] > 0
        assert 0 < row["itl_ms"]["p50"] <= row["itl_ms"]["p99"]
        assert row["peak_rss_mib"] > 10
        assert 0 < row["device_busy_share"] <= 1


def test_transformers_is_a_peer(aneuron: Command, model: str) -> None:
    options = ("--model", model, *SMALL, "--dtype=float32", "--peers=transformers")
    told = json_of(aneuron, "bench", "peers", *options)
    assert told["peers"] == {
        "transformers": {
            "package": "transformers", "version": transformers.__version__, "kind": "float32"
        }
    }  # fmt: skip
    assert told["missing"] == {}
    assert len(told["rows"]) == 4
    for row in told["rows"]:
        assert row["best"] == "transformers"
        assert row["ratio"] == pytest.approx(row["aneuron"] / row["transformers"])


Calls = list[tuple[str, list[list[int]], int]]


class FakePeer:
    """Answers in the given time; `package` decides whether it is installed."""

    def __init__(self, name: str, package: str, took_s: float, calls: Calls) -> None:
        self.name = name
        self.package = package
        self._took_s = took_s
        self._calls = calls

    def kind(self, wanted: Wanted) -> str:
        return f"Q-{wanted.quantization or wanted.dtype}"

    def load(self, wanted: Wanted) -> Generate:
        assert wanted.max_num_seqs == 3
        assert wanted.max_model_len == 33 + 6

        def generate(prompts: list[list[int]], max_tokens: int) -> float:
            self._calls.append((self.name, prompts, max_tokens))
            return self._took_s

        return generate


class BrokenPeer(FakePeer):
    def load(self, wanted: Wanted) -> Generate:
        raise self._error

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name, "numpy", 1.0, [])
        self._error = error


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Put peers of known speed in place of the real ones; return what they are asked."""
    seen: Calls = []
    peers = (
        FakePeer("slow", "numpy", 0.5, seen), FakePeer("fast", "torch", 0.25, seen),
        FakePeer("absent", "aneuron-has-no-such-peer", 0.1, seen),
        BrokenPeer("unfit", engines.Unavailable("it needs another file")),
        BrokenPeer("unsound", ImportError("its library is gone")),
    )  # fmt: skip
    monkeypatch.setattr(engines, "PEERS", peers)
    return seen


def test_peers_take_turns_on_the_same_prompts(aneuron: Command, model: str, calls: Calls) -> None:
    told = json_of(aneuron, "bench", "peers", "--model", model, *SMALL[:-1], "--runs=2")
    assert [name for name, _, _ in calls] == ["slow", "fast"] * 8
    for (_, slow, new), (_, fast, _) in zip(calls[::2], calls[1::2], strict=True):
        assert slow == fast
        assert new == 6
    shapes = [(len(prompts), len(prompts[0])) for _, prompts, _ in calls[::4]]
    assert shapes == [(1, 20), (3, 20), (1, 33), (3, 33)]
    assert calls[0][1] != calls[2][1], "each run has prompts of its own"
    for row in told["rows"]:
        assert row["slow"] == pytest.approx(row["concurrency"] * 6 / 0.5)
        assert row["fast"] == pytest.approx(row["concurrency"] * 6 / 0.25)
        assert row["best"] == "fast"
        assert row["ratio"] == pytest.approx(row["aneuron"] / row["fast"])


def test_peers_that_are_missing_are_told(aneuron: Command, model: str, calls: Calls) -> None:
    told = json_of(aneuron, "bench", "peers", "--model", model, *SMALL, "--quantization=int8")
    assert told["kind"] == "int8"
    assert list(told["peers"]) == ["slow", "fast"]
    assert told["peers"]["fast"] == {
        "package": "torch", "version": version("torch"), "kind": "Q-int8"
    }  # fmt: skip
    assert told["missing"] == {
        "absent": "aneuron-has-no-such-peer is not installed",
        "unfit": "it needs another file",
        "unsound": "its library is gone",
    }


def test_the_table_of_peers(aneuron: Command, model: str, calls: Calls) -> None:
    told = aneuron("bench", "peers", "--model", model, *SMALL)
    assert told.status == 0, told.err
    assert "Q-bfloat16" in told.out
    assert f"peers: numpy {version('numpy')}, torch {version('torch')}" in told.out
    assert "without absent: aneuron-has-no-such-peer is not installed" in told.out
    assert "without unfit: it needs another file" in told.out


def test_peers_can_be_chosen(aneuron: Command, model: str, calls: Calls) -> None:
    told = json_of(aneuron, "bench", "peers", "--model", model, *SMALL, "--peers=slow")
    assert {name for name, _, _ in calls} == {"slow"}
    assert told["missing"] == {}
    assert {row["best"] for row in told["rows"]} == {"slow"}
    assert all("fast" not in row for row in told["rows"])


@pytest.mark.parametrize("names", ["absent", "slow,absent", "slow,unfit", "slow,nobody", ""])
def test_a_peer_that_is_named_must_be_there(
    aneuron: Command, model: str, calls: Calls, names: str
) -> None:
    told = aneuron("bench", "peers", "--model", model, *SMALL, f"--peers={names}")
    assert told.status == 2
    assert "--peers" in told.err
    assert (names.rpartition(",")[2] or "slow") in told.err
    assert calls == []


def test_quality(aneuron: Command, model: str) -> None:
    arguments = ("--tokens=200", "--piece=64")
    told = json_of(aneuron, "bench", "quality", model, *arguments)
    found = {row["kind"]: row["perplexity"] for row in told["rows"]}
    assert list(found) == ["float32", "bfloat16", "int8", "int4"]
    assert told["rows"][0]["over_first"] == 0
    assert 0.5 < found["int8"] / found["float32"] < 2


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what engines are opened with from now on: the type of their keys and values."""
    seen: list[str] = []

    class Watched(Engine):
        def __init__(self, model: str, **options: Any) -> None:
            seen.append(options["kv_cache_dtype"])
            super().__init__(model, **options)

    monkeypatch.setattr("aneuron.engine.Engine", Watched)
    return seen


def test_quality_has_the_cache_that_is_asked_for(
    aneuron: Command, model: str, caches: list[str]
) -> None:
    """The first kind of weights too: it may be the only one."""
    arguments = ("--tokens=64", "--piece=64", "--kinds=bfloat16,int8", "--kv-cache-dtype=int8")
    json_of(aneuron, "bench", "quality", model, *arguments)
    assert caches == ["int8", "int8"]


def test_peers_run_beside_the_cache_that_is_asked_for(
    aneuron: Command, model: str, calls: Calls, caches: list[str]
) -> None:
    options = ("--model", model, *SMALL, "--peers=slow")
    told = json_of(aneuron, "bench", "peers", *options, "--kv-cache-dtype=int8")
    assert told["kv_cache_dtype"] == "int8"
    assert "int8 cache" in aneuron("bench", "peers", *options, "--kv-cache-dtype=int8").out
    assert json_of(aneuron, "bench", "peers", *options)["kv_cache_dtype"] == "auto"
    assert caches == ["int8", "int8", "auto"]


async def test_perplexity_is_that_of_a_forward_pass(model: str) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    ids = torch.randint(0, 300, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    costs: list[float] = []
    for piece in (ids[:32], ids[32:64], ids[64:]):
        with torch.inference_mode():
            logits = reference(torch.tensor([piece])).logits[0].log_softmax(-1)
        costs += [-float(logits[at, token]) for at, token in enumerate(piece[1:])]
    async with Engine(model, dtype="float32", enable_prefix_caching=False) as engine:
        told = await quality._perplexity(engine, ids, 32)
    assert told == pytest.approx(math.exp(sum(costs) / len(costs)), rel=1e-3)


def test_the_text_is_long_and_the_same_each_time() -> None:
    text = quality.documentation()
    assert len(text) > 100_000
    assert text == quality.documentation()


def test_compile(aneuron: Command, model: str) -> None:
    result = aneuron("compile", model, "--quantization=int4", "--dtype=bfloat16")
    assert result.status == 0, result.err
    assert "is ready after" in result.err


def test_what_cannot_be_compiled_is_told_before_anything_is(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aneuron.models.native.build.compile_library", None)  # which would fail
    result = aneuron("compile", "sim:count")
    assert (result.status, result.out) == (2, "")
    assert result.err == "error: sim:count is simulated: there is nothing to compile\n"
    assert aneuron("compile", "smollm-135m").err.startswith("error: unknown model 'smollm-135m'")


def test_compile_tells_machines(aneuron: Command, model: str) -> None:
    result = aneuron("compile", model, "--json")
    assert (result.status, result.err) == (0, "")
    told = json.loads(result.out)
    assert told["model"] == model
    assert Path(told["library"]).exists()
    assert told["total_s"] >= told["compile_s"] >= 0


def test_throughput_tells_what_the_engine_does_meanwhile(aneuron: Command, model: str) -> None:
    options = ["--concurrency=2", "--prompt-tokens=8", "--max-tokens=200", "--runs=3", "--json"]
    result = aneuron("bench", "throughput", f"--model={model}", "--stats-interval=0.05", *options)
    assert result.status == 0
    assert len(json.loads(result.out)["rows"]) == 1
    assert "running 2, waiting 0; tokens/s in" in result.err
    assert aneuron("bench", "throughput", "--stats-interval=0").status == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("throughput", "--concurrency=0"), "--concurrency"),
        (("throughput", "--prompt-tokens=x"), "--prompt-tokens"),
        (("throughput", "--max-tokens=1"), "--max-tokens"),
        (("throughput", "--runs=0"), "--runs"),
        (("peers", "--runs=0"), "--runs"),
        (("peers", "--dtype=float16"), "--dtype"),
        (("peers", "--quantization=int3"), "--quantization"),
        (("peers", "--kv-cache-dtype=int4"), "--kv-cache-dtype"),
        (("peers", "--gguf=none.gguf"), "--gguf"),
        (("quality", "--kinds=int3"), "--kinds"),
        (("quality", "--piece=4"), "--piece"),
        (("quality", "--tokens=10"), "--tokens"),
    ],
)
def test_a_bad_option_is_named(aneuron: Command, arguments: tuple[str, ...], named: str) -> None:
    result = aneuron("bench", *arguments)
    assert result.status == 2
    assert named in result.err


def test_the_tables_say_what_they_were_measured_on(aneuron: Command, model: str) -> None:
    told = aneuron("bench", "throughput", "--model", model, *SMALL)
    assert told.status == 0, told.err
    assert "processors" in told.out
    assert "Throughput" in told.out
