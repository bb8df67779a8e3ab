"""`aneuron models`: the list, fetching ahead, what a model is, removing."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from aneuron.cli.models.info import stored_tensors
from aneuron.cli.models.listing import gathered, size_text
from aneuron.cli.models.removal import targets
from aneuron.errors import ConfigError
from aneuron.models.catalog import BUILTIN, ResolvedModel
from aneuron.models.files.cache import ensure
from aneuron.models.files.inventory import Entry, HubModel
from aneuron.models.native import build

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Command

SHA = BUILTIN["smollm2-135m"].member_sha256[:12]
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64,
    "intermediate_size": 96, "vocab_size": 300, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and none of the hub's."""
    monkeypatch.setenv("ANEURON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


def write_model(folder: Path, *, template: str | None = None, **config: Any) -> Path:
    """A model directory that says what it is, and whose weights are too few to run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    heads = {
        "a": {"dtype": "F32", "shape": [10, 4], "data_offsets": [0, 160]},
        "b": {"dtype": "BF16", "shape": [5], "data_offsets": [160, 170]},
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **heads}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(170)
    (folder / "model.safetensors").write_bytes(data)
    Tokenizer(BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(folder / "tokenizer.json"))
    own = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    return folder


def cached(name: str = f"smollm2-135m-{SHA}-v1") -> Path:
    def fill(into: Path) -> None:
        (into / "weights").write_bytes(bytes(1000))

    return ensure(name, fill)


# ── list ────────────────────────────────────────────────────────────────────────────────


def test_a_fresh_machine_lists_what_is_built_in(aneuron: Command, cache: Path) -> None:
    result = aneuron("models", "list")
    assert (result.status, result.err) == (0, "")
    assert "smollm2-135m" in result.out
    assert "not here" in result.out
    told = json.loads(aneuron("models", "list", "--json").out)
    assert told["cache_dir"] == str(cache)
    assert told["num_bytes"] == 0
    (model,) = told["models"]
    assert model["to_fetch"] == BUILTIN["smollm2-135m"].num_bytes
    assert (model["path"], model["packed"]) == (None, [])
    assert not cache.exists()


def test_the_list_tells_what_is_here(aneuron: Command) -> None:
    path = cached()
    told = json.loads(aneuron("models", "list", "--json").out)
    (model,) = told["models"]
    assert (model["path"], model["to_fetch"]) == (str(path), None)
    assert model["num_bytes"] == told["num_bytes"] > 1000
    assert "kB" in aneuron("models", "list").out


def test_rows_put_together_what_belongs_together(tmp_path: Path) -> None:
    commit = "c" * 40
    found = [
        Entry("smollm2-135m", "source", "", tmp_path / "s", 5),
        Entry("smollm2-135m", "converted", "", tmp_path / "c", 50),
        Entry("smollm2-135m", "packed", "int8", tmp_path / "p", 20),
        Entry("q4", "packed", "int4", tmp_path / "qp", 1),
        Entry("q4", "converted", "", tmp_path / "q", 2),
        Entry("folder", "packed", "int8", tmp_path / "f", 3),
        Entry(commit, "packed", "int8", tmp_path / "h", 4),
        Entry("peer", "other", "", tmp_path / "o", 6),
    ]
    hub = [HubModel("Org/M", tmp_path, (tmp_path / commit,), 100)]
    rows = gathered(BUILTIN, found, hub)
    assert [(row.name, row.source, row.kind, row.num_bytes) for row in rows] == [
        ("smollm2-135m", "built in", "safetensors", 75),
        ("folder", "directory", "", 3),
        ("Org/M", "Hugging Face", "safetensors", 104),
        ("peer", "other programs", "other", 6),
        ("q4", ".gguf file", "safetensors", 3),
    ]
    assert [one["as"] for one in rows[2].packed] == ["int8"]
    assert json.dumps(rows[2].as_json())


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (92_871_040, "92.9 MB"), (7e12, "7 TB")],
)
def test_sizes_are_for_people(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text


# ── pull ────────────────────────────────────────────────────────────────────────────────


def test_pull_prints_where_it_is(aneuron: Command, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine")
    result = aneuron("models", "pull", str(folder))
    assert (result.status, result.out) == (0, f"{folder}\n")
    told = json.loads(aneuron("models", "pull", str(folder), "--json").out)
    assert told["was_here"] is True
    assert told["num_bytes"] == sum(file.stat().st_size for file in folder.iterdir())


@pytest.mark.parametrize("option", ["", "--quiet", "--json"])
def test_pull_tells_how_far_it_is(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    folder = write_model(tmp_path / "mine")

    def fetch(model: str, **options: Any) -> ResolvedModel:
        options["progress"]("download", 1_000_000, 5_000_000)
        return ResolvedModel(model, folder)

    monkeypatch.setattr("aneuron.cli.models.pull.resolve", fetch)
    result = aneuron("models", "pull", "smollm2-135m", *filter(None, [option]))
    assert result.err == ("" if option else "smollm2-135m: download (5 MB)\n")
    if option == "--json":
        assert json.loads(result.out)["was_here"] is False


def test_there_is_nothing_to_pull_of_a_simulated_model(aneuron: Command) -> None:
    result = aneuron("models", "pull", "sim:count")
    assert (result.status, result.out) == (2, "")
    assert "nothing to fetch" in result.err


# ── info ────────────────────────────────────────────────────────────────────────────────


def test_info_tells_what_a_model_is(aneuron: Command, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine", template="{{ messages }}<tool_call>")
    options = ["--dtype=float32", "--json"]
    told = json.loads(aneuron("models", "info", str(folder), *options).out)
    expected = {
        "model": "mine", "path": str(folder), "architecture": "LlamaForCausalLM",
        "num_parameters": 45, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
        "hidden_size": 64, "vocab_size": 300, "max_model_len": 128, "chat_template": True,
        "tools": "hermes",
    }  # fmt: skip
    assert {name: told[name] for name in expected} == expected
    size = (folder / "model.safetensors").stat().st_size
    assert told["weights"] == {"num_bytes": size, "parameters_by_dtype": {"F32": 40, "BF16": 5}}
    cache = told["kv_cache"]
    assert cache["bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, floats
    assert cache["num_tokens"] == cache["budget_bytes"] // (256 * 2 * 16) * 16
    assert told["runs"]["device"] == "cpu"
    assert told["runs"]["dtype"] == "float32"


def test_info_is_for_people_too(aneuron: Command, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine")
    result = aneuron("models", "info", str(folder), "--kv-cache-dtype=int8")
    assert (result.status, result.err) == (0, "")
    lines = dict(line.split("  ", 1) for line in result.out.splitlines())
    assert lines["KV cache"].strip() == "160 bytes per token, int8"  # with scales
    assert lines["chat template"].strip() == "no"
    assert "4 heads of 16, 2 for keys" in lines["layers"]


def test_heads_that_cannot_be_compiled_for_are_told(aneuron: Command, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine", head_dim=24)
    told = json.loads(aneuron("models", "info", str(folder), "--json").out)
    assert told["runs"]["steps"] == "eager: heads of 24 are not a multiple of 16"


def test_info_of_a_simulated_model(aneuron: Command) -> None:
    told = json.loads(aneuron("models", "info", "sim:count", "--json").out)
    assert told["runs"]["device"] == "sim"
    assert aneuron("models", "info", "sim:count").status == 0


@pytest.mark.parametrize(
    ("kernels", "library", "compilers", "said"),
    [
        (False, None, [["c++"]], "eager: this processor lacks AVX-512 with VNNI and BF16"),
        (True, "x.so", [], "compiled"),
        (True, None, [["c++"]], "compiled at its first run, or by `aneuron compile`"),
        (True, None, [], "eager: no C++ compiler is installed"),
    ],
)
def test_how_steps_would_run_is_told(
    aneuron: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kernels: bool,
    library: str | None,
    compilers: list[list[str]],
    said: str,
) -> None:
    monkeypatch.setattr(build, "has_kernels", lambda: kernels)
    monkeypatch.setattr(build, "built_library", lambda: library)
    monkeypatch.setattr(build, "compilers", lambda: compilers)
    folder = write_model(tmp_path / "mine")
    told = json.loads(aneuron("models", "info", str(folder), "--json").out)
    assert told["runs"]["steps"] == said


def test_info_needs_no_extra(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "mine", template="{{ messages }}<tool_call>")
    monkeypatch.setitem(sys.modules, "aneuron.server.tools", None)
    told = json.loads(aneuron("models", "info", str(folder), "--json").out)
    assert (told["chat_template"], told["tools"]) == (True, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["smollm2-135m"], "is not here: fetch it with `aneuron models pull smollm2-135m`"),
        (["sim:count", "--kv-cache-dtype=int4"], "--kv-cache-dtype must be auto or int8"),
    ],
)
def test_info_fetches_nothing(aneuron: Command, words: list[str], said: str) -> None:
    result = aneuron("models", "info", *words)
    assert (result.status, result.out) == (2, "")
    assert said in result.err


def test_an_unknown_family_and_a_damaged_file_are_told(aneuron: Command, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine", model_type="mamba")
    result = aneuron("models", "info", str(folder))
    assert (result.status, result.out) == (2, "")
    assert "mamba" in result.err
    (folder / "model.safetensors").write_bytes(b"\x10" + bytes(7) + b"no JSON at all")
    with pytest.raises(ConfigError, match="no sound safetensors"):
        stored_tensors(folder)


# ── rm ──────────────────────────────────────────────────────────────────────────────────


def test_rm_tells_what_it_freed(aneuron: Command, cache: Path) -> None:
    path = cached()
    before = json.loads(aneuron("models", "list", "--json").out)["num_bytes"]
    told = json.loads(aneuron("models", "rm", "SmolLM2-135M", "--yes", "--json").out)
    assert told == {"model": "SmolLM2-135M", "freed_bytes": before, "removed": [str(path)]}
    assert json.loads(aneuron("models", "list", "--json").out)["num_bytes"] == 0
    cached()
    assert aneuron("models", "rm", "smollm2-135m", "-y").out.endswith("kB freed\n")


def test_rm_does_not_remove_unasked(aneuron: Command) -> None:
    path = cached()
    result = aneuron("models", "rm", "smollm2-135m", stdin="y\n")
    assert (result.status, result.out) == (2, "")
    assert "pass --yes" in result.err
    assert path.exists()


def test_rm_takes_no_answer_for_a_no(aneuron: Command) -> None:
    path = cached()
    result = aneuron("models", "rm", "smollm2-135m", stdin=None)
    assert (result.status, result.out) == (0, "")
    assert str(path) in result.err
    assert result.err.endswith("Remove this? [y/N] nothing is removed\n")
    assert path.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")
@pytest.mark.parametrize(("answer", "goes"), [("y", True), ("", False), ("no", False)])
def test_rm_asks_at_a_terminal(terminal: Any, answer: str, goes: bool) -> None:
    path = cached()
    with terminal("models", "rm", "smollm2-135m") as opened:
        opened.wait_for("Remove this? [y/N] ")
        assert str(path) in opened.shown.replace("\r\n", "")
        opened.type(f"{answer}\n")
        assert opened.wait_exit() == 0
    assert path.exists() is not goes


def test_rm_never_touches_what_is_not_ours(aneuron: Command, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "smollm2-135m")  # named as one that is in the cache
    path = cached()
    gguf = tmp_path / "mine.gguf"
    gguf.write_bytes(b"GGUF")
    for name in (str(folder), str(gguf)):
        result = aneuron("models", "rm", name, "--yes")
        assert (result.status, result.out) == (2, "")
        assert "files of your own are not removed here" in result.err
    assert folder.exists()
    assert gguf.exists()
    assert path.exists()


def test_rm_leaves_hugging_face_s_cache(aneuron: Command, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--Org--M" / "snapshots" / ("c" * 40)
    write_model(snapshot)
    result = aneuron("models", "rm", "org/m", "--yes")
    assert (result.status, result.out) == (2, "")
    assert "`hf cache rm model/Org/M`" in result.err
    assert snapshot.exists()


def test_targets_are_found_by_every_name(tmp_path: Path) -> None:
    commit = "c" * 40

    def packed(folder: str) -> Entry:
        file = tmp_path / f"{folder}-int8-0123456789abcdef0123.safetensors"
        return Entry(folder, "packed", "int8", file, 1)

    gguf = Entry("my-model", "converted", "", tmp_path / "my-model-0-v1", 2)
    mine, of_hub = packed("my-folder"), packed(commit)
    found = [gguf, mine, of_hub]
    hub = [HubModel("Org/M", tmp_path, (tmp_path / commit,), 100)]
    assert targets("my-model", found, hub) == [gguf]
    assert targets("some/where/My Model.gguf", found, hub) == [gguf]
    assert targets("./models/my-folder/", found, hub) == [mine]
    assert targets("my-folder", found, hub) == [mine]
    assert targets("org/m", found, hub) == [of_hub]
    with pytest.raises(ConfigError, match="see `aneuron models list`"):
        targets("else", found, hub)
