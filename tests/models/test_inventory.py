"""What the cache directory holds, and that nothing of anybody else's is ever removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from aneuron.errors import ConfigError
from aneuron.models.catalog import BUILTIN, locate
from aneuron.models.files.cache import ensure
from aneuron.models.files.inventory import Entry, entries, hub_cache, hub_models, packed_of, remove

SHA = BUILTIN["smollm2-135m"].member_sha256[:12]
PACKED = "0123456789abcdef0123"


def made(name: str, **files: int) -> Path:
    """An entry of the cache, with files of so many bytes."""

    def build(into: Path) -> None:
        for file, size in files.items():
            (into / file).write_bytes(bytes(size))

    return ensure(name, build)


def packed(folder: str, kind: str, size: int, cache: Path) -> Path:
    file = cache / "native" / f"{folder}-{kind}-{PACKED}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(size))
    return file


def test_an_empty_cache_holds_nothing(model_cache: Path) -> None:
    assert entries() == []
    assert not model_cache.exists()


def test_entries_are_told_by_model_and_kind(model_cache: Path) -> None:
    made(f"smollm2-135m-gguf-{SHA}", gguf=10)
    made(f"smollm2-135m-{SHA}-v1", weights=100)
    made("my-model-q4_0-0123456789abcdef-v1", weights=50)
    made("peers/my-model-openvino-int8-0123456789ab", weights=7)
    packed(f"smollm2-135m-{SHA}-v1", "int8", 30, model_cache)
    packed("folder-of-mine", "bfloat16", 20, model_cache)
    told = [(one.model, one.kind, one.detail) for one in entries()]
    assert told == [
        ("folder-of-mine", "packed", "bfloat16"),
        ("my-model-openvino-int8-0123456789ab", "other", ""),
        ("my-model-q4_0", "converted", ""),
        ("smollm2-135m", "converted", ""),
        ("smollm2-135m", "packed", "int8"),
        ("smollm2-135m", "source", ""),
    ]
    sizes = {one.kind: one.num_bytes for one in entries() if one.model == "smollm2-135m"}
    assert sizes["packed"] == 30
    assert 100 < sizes["converted"] < 1000  # the manifest, too
    assert [one.path.name for one in packed_of(["folder-of-mine"])] == [
        f"folder-of-mine-bfloat16-{PACKED}.safetensors"
    ]


def test_what_is_not_ours_is_not_listed(model_cache: Path, tmp_path: Path) -> None:
    (model_cache / "native").mkdir(parents=True)
    (model_cache / "native" / "aneuron-0123.so").write_bytes(b"code")
    (model_cache / "native" / "notes.safetensors").write_bytes(b"x")
    (model_cache / "a-folder").mkdir()  # no manifest
    (model_cache / "file.txt").write_text("x")
    theirs = made("my-model-0123456789abcdef-v1", weights=5).rename(tmp_path / "elsewhere")
    (model_cache / "linked-0123456789abcdef-v1").symlink_to(theirs)
    (model_cache / "native" / f"x-int8-{PACKED}.safetensors").symlink_to(theirs / "weights")
    assert entries() == []


def test_removing_frees_what_was_told(model_cache: Path) -> None:
    path = made(f"smollm2-135m-{SHA}-v1", weights=1000)
    file = packed("mine", "int4", 77, model_cache)
    by_kind = {one.kind: one for one in entries()}
    assert remove(by_kind["converted"]) == by_kind["converted"].num_bytes > 1000
    assert remove(by_kind["packed"]) == 77
    assert not path.exists()
    assert not file.exists()
    assert entries() == []


def test_somebody_else_s_file_in_an_entry_stays(model_cache: Path) -> None:
    path = made("m-0123456789abcdef-v1", weights=10)
    (path / "my-notes.txt").write_text("keep me")
    (entry,) = entries()
    remove(entry)
    assert [one.name for one in path.iterdir()] == ["my-notes.txt"]
    assert entries() == []


def test_a_manifest_cannot_point_out_of_its_entry(model_cache: Path, tmp_path: Path) -> None:
    mine = tmp_path / "precious.txt"
    mine.write_text("mine")
    path = made("m-0123456789abcdef-v1", weights=10)
    names = [str(mine), "../../precious.txt", "..", "", "weights"]
    text = ", ".join(f'"{name}": {{}}' for name in names)
    (path / "aneuron-manifest.json").write_text(f'{{"files": {{{text}}}}}')
    (entry,) = entries()
    remove(entry)
    assert mine.read_text() == "mine"
    assert not path.exists()


def test_what_lies_elsewhere_is_refused(model_cache: Path, tmp_path: Path) -> None:
    made("m-0123456789abcdef-v1", weights=10)
    folder = tmp_path / "my-model"
    folder.mkdir()
    for kind in ("converted", "packed", "other"):
        with pytest.raises(ConfigError, match="not in the cache directory"):
            remove(Entry("my-model", kind, "", folder, 1))
    assert folder.exists()


def test_a_directory_without_a_manifest_is_refused(model_cache: Path) -> None:
    folder = model_cache / "mine-0123456789abcdef-v1"
    folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match="no manifest"):
        remove(Entry("mine", "converted", "", folder, 1))
    assert folder.exists()


def test_what_is_being_made_is_refused(model_cache: Path) -> None:
    path = made("m-0123456789abcdef-v1", weights=10)
    (entry,) = entries()
    with (
        FileLock(path.with_name(f"{path.name}.lock")),
        pytest.raises(ConfigError, match="another process is making m-0123456789abcdef-v1"),
    ):
        remove(entry)
    assert (path / "weights").exists()


def test_a_disk_that_refuses_is_told(model_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made("m-0123456789abcdef-v1", weights=10)
    (entry,) = entries()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ConfigError, match=r"cannot remove .*read-only file system"):
        remove(entry)


# ── Hugging Face's cache ────────────────────────────────────────────────────────────────


def hub_model(cache: Path, name: str, commit: str = "c" * 40) -> Path:
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    (folder / "blobs" / "weights").write_bytes(bytes(64))
    (snapshot / "model.safetensors").symlink_to(folder / "blobs" / "weights")
    return snapshot


def test_models_of_the_hub_client_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert hub_models() == []
    snapshot = hub_model(tmp_path, "Org/Some--Model")
    (tmp_path / "models--org--empty" / "snapshots" / "d").mkdir(parents=True)
    (tmp_path / "datasets--org--data").mkdir()
    (one,) = hub_models()
    assert (one.name, one.num_bytes, one.snapshots) == ("Org/Some--Model", 64, (snapshot,))


def test_the_hub_s_variables_are_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert hub_cache() == Path("~/.cache/huggingface/hub").expanduser()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub_cache() == tmp_path / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert hub_cache() == tmp_path / "home" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert hub_cache() == tmp_path / "hub"


def test_hub_models_are_proposed_for_a_misspelt_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    hub_model(tmp_path, "Org/Tiny-Lama")
    with pytest.raises(ConfigError, match=r"Did you mean Org/Tiny-Lama\?"):
        locate("tiny-lama")


def test_locate_finds_what_the_hub_client_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    folder = tmp_path / "snapshot"
    folder.mkdir()
    asked: list[dict[str, object]] = []

    def found(model: str, **options: object) -> str:
        asked.append({"model": model, **options})
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", found)
    assert locate("org/model") is None  # its weights are not here
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    told = locate("org/model", revision="main")
    assert told is not None
    assert (told.name, told.path) == ("org/model", folder)
    assert asked[1] == {"model": "org/model", "revision": "main", "local_files_only": True}


# ── found without fetching ──────────────────────────────────────────────────────────────


def test_locate_fetches_nothing(model_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(model_cache / "hub"))
    assert locate("smollm2-135m") is None
    assert locate("org/model") is None
    assert not model_cache.exists()
    path = made(f"smollm2-135m-{SHA}-v1", weights=1)
    found = locate("SmolLM2-135M")
    assert found is not None
    assert (found.name, found.path) == ("smollm2-135m", path)


def test_locate_knows_a_converted_gguf(model_cache: Path, tmp_path: Path) -> None:
    from aneuron.models import catalog

    file = tmp_path / "My Model.gguf"
    file.write_bytes(b"GGUF and so on")
    assert locate(str(file)) is None
    made(catalog._gguf_entry(file), weights=1)
    found = locate(str(file))
    assert found is not None
    assert found.name == "My Model"


@pytest.mark.parametrize("name", ["", "no-such-model", "./no/such/folder", "no.gguf"])
def test_locate_refuses_what_resolve_does(model_cache: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        locate(name)


def test_looking_costs_no_heavy_import(model_cache: Path) -> None:
    code = """
import sys
from aneuron.cli import main
assert main(["models", "list"]) == 0
assert main(["models", "rm", "nothing", "--yes"]) == 2
heavy = {"torch", "numpy", "transformers", "huggingface_hub", "gguf"} & set(sys.modules)
assert not heavy, heavy
"""
    env = {**os.environ, "ANEURON_CACHE_DIR": str(model_cache)}
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=env)
