"""What a model's name may be, and what is said when it is none of them."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from aneuron.errors import ConfigError
from aneuron.models import catalog
from aneuron.models.catalog import BUILTIN, ResolvedModel, locate, resolve
from aneuron.models.files import hub

ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A sound, if empty, model directory."""
    path = tmp_path / "my-model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return path


def refusal(model: str, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(model, **options)
    return caught.value


def test_a_directory_is_itself(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(directory)) == ResolvedModel("my-model", directory)
    monkeypatch.chdir(directory.parent)
    assert resolve("my-model").path == directory
    assert resolve("./my-model/").path == directory


def test_a_directory_named_like_a_hub_id_comes_first(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory.parent.parent)
    assert resolve(f"{directory.parent.name}/my-model").path == directory


@pytest.mark.parametrize("model", ["smollm2-135", "SmolLM2", "smollm-135m"])
def test_an_unknown_name_gets_the_close_one(model: str) -> None:
    error = refusal(model)
    assert error.param == "model"
    assert "Did you mean smollm2-135m?" in str(error)


def test_an_unknown_name_gets_the_list_and_the_other_forms() -> None:
    text = str(refusal("gpt-17"))
    assert "Did you mean" not in text
    for part in (*BUILTIN, "directory", ".gguf", "org/name"):
        assert part in text


@pytest.mark.parametrize("model", ["", "  "])
def test_an_empty_name_is_refused(model: str) -> None:
    assert "empty" in str(refusal(model))


def test_a_prompt_in_place_of_a_model_is_no_model() -> None:
    message = str(refusal("What is the capital of France? " * 100))
    assert message.startswith("unknown model 'What is the capital of France? ")
    assert len(message) < 400
    with pytest.raises(ConfigError, match="unknown model"):
        locate("What is the capital of France? " * 100)


def test_the_home_of_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(refusal("~nobody-of-that-name/m")).startswith("cannot find ~nobody-of-that-name/m: ")
    monkeypatch.setenv("ANEURON_CACHE_DIR", "~nobody-of-that-name/cache")
    assert str(refusal("smollm2-135m")).startswith("ANEURON_CACHE_DIR=~nobody-of-that-name/cache: ")


@pytest.mark.parametrize("fails_at", ["m", "config.json"])
def test_a_directory_that_cannot_be_read_is_told(
    directory: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    model = directory if fails_at == "config.json" else directory / "m"
    stat = Path.stat

    def refused(path: Path, **options: Any) -> Any:  # whom root is, no mode keeps out
        if path.name == fails_at:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refused)
    assert str(refusal(str(model))) == f"cannot read {model}: Permission denied"


@pytest.mark.parametrize("model", ["./nope", "/nope/x", "nope.gguf", "a/b/c", "~/no-such-folder"])
def test_a_path_that_is_not_there_is_said_to_be_a_path(model: str) -> None:
    assert f"no such file or directory: {model}" in str(refusal(model))


def test_a_directory_without_config_is_refused(directory: Path) -> None:
    (directory / "config.json").unlink()
    assert "holds no config.json" in str(refusal(str(directory)))
    (directory / "a.gguf").touch()
    assert f"pass the file instead: {directory / 'a.gguf'}" in str(refusal(str(directory)))


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_config_is_refused(content: str, directory: Path) -> None:
    (directory / "config.json").write_text(content)
    assert "config.json" in str(refusal(str(directory)))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_refused_by_its_key(name: str, directory: Path) -> None:
    (directory / name).write_text('{"auto_map": {"AutoConfig": "evil.Config"}}')
    assert "auto_map" in str(refusal(str(directory)))


def test_pickles_are_refused(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    text = str(refusal(str(directory)))
    assert "pickles" in text
    assert "pytorch_model.bin" in text


def test_no_weights_at_all_is_refused(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    assert "holds no *.safetensors" in str(refusal(str(directory)))


@pytest.mark.parametrize("length", [0, 5, 30, -1])
def test_safetensors_that_are_cut_off_are_refused(length: int, directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    assert "is not a sound safetensors file" in str(refusal(str(directory)))


def test_a_missing_shard_is_named(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    index = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-2.safetensors" in str(refusal(str(directory)))


def test_a_single_file_of_another_kind_is_refused(directory: Path) -> None:
    assert "pass the directory" in str(refusal(str(directory / "model.safetensors")))


def test_a_gguf_file_is_converted_once(tiny_gguf: Any, tmp_path: Path, model_cache: Path) -> None:
    source = tiny_gguf.write(tmp_path / "My Model.gguf")
    stages: list[str] = []
    first = resolve(str(source), progress=lambda stage, *_: stages.append(stage))
    assert first.name == "My Model"
    assert first.path.parent == model_cache
    assert set(stages) == {"convert"}
    stages.clear()
    assert resolve(str(source), progress=lambda stage, *_: stages.append(stage)) == first
    assert stages == []


def test_a_gguf_file_that_changed_is_converted_again(
    tiny_gguf: Any, tmp_path: Path, model_cache: Path
) -> None:
    source = tiny_gguf.write(tmp_path / "a.gguf")
    first = resolve(str(source))
    data = bytearray(source.read_bytes())
    data[-1] ^= 1
    source.write_bytes(data)
    assert resolve(str(source)).path != first.path


def test_a_damaged_gguf_file_is_refused_by_name(tmp_path: Path, model_cache: Path) -> None:
    source = tmp_path / "a.gguf"
    source.write_bytes(b"GGUF but no more")
    error = refusal(str(source))
    assert error.param == "model"
    assert str(source) in str(error)


@pytest.mark.parametrize("model", ["smollm2-135m", "."])
def test_a_revision_is_for_hub_ids_only(model: str) -> None:
    error = refusal(model, revision="main")
    assert error.param == "revision"


def test_built_in_names_ignore_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(catalog, "ensure", lambda *_args, **_options: tmp_path)
    assert resolve("SmolLM2-135M") == ResolvedModel("smollm2-135m", tmp_path)


# Hugging Face ids, without a network.


@pytest.fixture
def hub_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set what HF_HUB_OFFLINE=1 and HF_HUB_CACHE would have set before the import."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.usefixtures("hub_offline")
def test_a_hub_id_that_is_not_cached_says_that_it_is_offline() -> None:
    error = refusal("nobody/nothing")
    assert error.param == "model"
    assert "HF_HUB_OFFLINE" in str(error)
    assert "nobody/nothing" in str(error)


def test_a_hub_id_in_the_cache_is_found_offline(hub_offline: Path, directory: Path) -> None:
    commit = "0" * 40
    repo = hub_offline / "models--nobody--tiny"
    (repo / "snapshots").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    directory.rename(repo / "snapshots" / commit)
    found = resolve("nobody/tiny")
    assert found == ResolvedModel("nobody/tiny", repo / "snapshots" / commit)
    assert resolve("nobody/tiny", revision=commit) == found
    config = repo / "snapshots" / commit / "config.json"
    config.write_text('{"auto_map": {"AutoModel": "x.Y"}}')
    assert "auto_map" in str(refusal("nobody/tiny"))


def test_remote_code_is_refused_before_the_weights_are_downloaded(
    monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    import huggingface_hub

    calls: list[SimpleNamespace] = []

    def download(model: str, **options: Any) -> str:
        calls.append(SimpleNamespace(model=model, **options))
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve("nobody/tiny", revision="v1")
    assert [call.revision for call in calls] == ["v1", "v1"]
    assert not any("safetensors" in pattern for pattern in calls[0].allow_patterns)
    assert not any(".bin" in pattern or ".py" in pattern for pattern in calls[1].allow_patterns)
    (directory / "config.json").write_text('{"auto_map": {}}')
    calls.clear()
    refusal("nobody/tiny")
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (401, "", "it refuses HF_TOKEN, with status 401"),
        (403, "", "it refuses HF_TOKEN, with status 403"),
        (401, "RepoNotFound", "it is private and HF_TOKEN may not see it"),
        (500, "", r"500 .* \(is the machine offline\?\)"),
    ],
)
def test_a_hub_that_refuses_says_so(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str, said: str
) -> None:
    import huggingface_hub
    from huggingface_hub.utils._http import hf_raise_for_status

    def download(*_: Any, **__: Any) -> None:
        asked = httpx2.Request("GET", "https://hub/api/models/nobody/tiny/revision/main")
        message = "Invalid credentials in Authorization header"
        headers = {"X-Error-Code": code} if code else {"X-Error-Message": message}
        hf_raise_for_status(httpx2.Response(status, headers=headers, request=asked))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    message = str(refusal("nobody/tiny"))
    assert re.search(said, message)
    assert "\n" not in message


def test_a_token_that_no_header_takes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(*_: Any, **__: Any) -> None:
        "é".encode("ascii")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert "HF_TOKEN is no token" in str(refusal("nobody/tiny"))


def test_the_pages_tell_the_size_of_the_download() -> None:
    size = f"{BUILTIN['smollm2-135m'].num_bytes / 1e6:.0f}"
    for name in ("README.md", "noxfile.py"):
        text = (ROOT / name).read_text("utf-8")
        assert re.findall(r"\b(\d+) MB(?:, Apache-2\.0| download)", text) == [size]


def test_hub_progress_is_passed_on_and_nothing_is_drawn(capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, int, int | None]] = []
    bar_class = hub.bar_class(lambda *facts: seen.append(facts))
    with bar_class(total=10, unit="B", desc="Downloading") as bar:
        bar.update(10)
        bar.refresh()
    with bar_class(total=3, unit="it"):
        pass
    assert seen[-1] == ("download", 10, 10)
    assert capfd.readouterr() == ("", "")


# The real thing: fetched once per machine into the usual cache.

LATER_START = """
import sys, time
from aneuron.models.catalog import resolve
start = time.perf_counter()
model = resolve("smollm2-135m")
print(time.perf_counter() - start)
print([name for name in ("torch", "numpy", "transformers", "gguf") if name in sys.modules])
"""


@pytest.fixture(scope="module")
def smollm2() -> ResolvedModel:
    return resolve("smollm2-135m")


@pytest.mark.tiny
@pytest.mark.timeout(600)
def test_a_later_start_is_fast_and_loads_no_library(smollm2: ResolvedModel) -> None:
    command = [sys.executable, "-W", "error", "-c", LATER_START]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    seconds, loaded = done.stdout.splitlines()
    assert float(seconds) < 0.05
    assert loaded == "[]"


@pytest.mark.tiny
@pytest.mark.timeout(600)
def test_smollm2_tokenizer_gives_the_ids_of_the_original(smollm2: ResolvedModel) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.path)
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text).input_ids
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28]
    assert ids[: len(system)] == system
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [1, 2]
    assert tokenizer.eos_token_id == 2
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    for sample in (" a\n\n  b\t", "emoji 😀👍🏽 日本語", "x = 3.14;\r\n", text):
        assert tokenizer.decode(tokenizer(sample).input_ids) == sample


@pytest.mark.tiny
@pytest.mark.timeout(600)
def test_smollm2_names_paris(smollm2: ResolvedModel) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2.path)
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=16)[0]
    answer = tokenizer.decode(output[inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
