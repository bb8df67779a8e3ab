"""`aneuron doctor`: judged from facts of machines that this is not, and asked of this one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aneuron.cli.doctor import facts as facts_module
from aneuron.cli.doctor.checks import Check, diagnose
from aneuron.cli.doctor.facts import EXTRAS, Facts, Probe, gather
from aneuron.device import limits
from aneuron.device.neuron.found import Found
from aneuron.models.native import build

if TYPE_CHECKING:
    from tests.cli.conftest import Command

NATIVE = frozenset({"avx512f", "avx512_vnni", "avx512_bf16"})
PACKAGES = ("aneuron", "torch", "transformers", "tokenizers", "safetensors", "anyio", "numpy")
GOOD = Facts(
    python=(3, 12, 1),
    implementation="CPython",
    system="Linux 6.1 x86_64",
    machine="x86_64",
    versions={
        **dict.fromkeys(PACKAGES, "9.0"),
        **{name: "1.0" for names in EXTRAS.values() for name in names},
        "uvloop": "0.22",
    },
    known_devices=("cpu", "sim"),
    cpu_model="Big CPU",
    cpu_flags=NATIVE | {"avx2", "amx_bf16"},
    native_flags=NATIVE,
    cores=64,
    usable_cores=64,
    memory_bytes=256 * 10**9,
    memory_free_bytes=200 * 10**9,
    compilers=("/usr/bin/c++",),
    library="/cache/native/aneuron-1.so",
    cache_dir="/cache",
    cache_bytes=10**9,
    disk_free_bytes=10**12,
    torch=Probe(
        threads=64, neuron=Found(None, {}, (), (), "no Neuron runtime is installed", "install it")
    ),
    open_files=(1024, 1_000_000),
)


def check(name: str, **changes: Any) -> Check:
    (found,) = (one for one in diagnose(replace(GOOD, **changes)) if one.name == name)
    return found


def without(*names: str) -> dict[str, str | None]:
    return {**GOOD.versions, **dict.fromkeys(names)}


def test_a_good_machine_has_nothing_to_do() -> None:
    checks = diagnose(GOOD)
    assert {one.status for one in checks} == {"ok", "note"}
    assert not [one for one in checks if one.advice]
    assert len({one.name for one in checks}) == len(checks)
    assert [one.name for one in checks if one.status == "note"] == ["device cuda", "device neuron"]


@pytest.mark.parametrize(
    ("name", "changes", "status", "found", "advice"),
    [
        ("python", {"python": (3, 10, 9)}, "no", "CPython 3.10.9", "3.11 or newer"),
        ("packages", {"versions": without("torch")}, "no", "missing: torch", "pip install torch"),
        ("uvloop", {"versions": without("uvloop")}, "warning", "asyncio's own", "pip install uvl"),
        ("processor", {"cpu_flags": None}, "note", "Big CPU; this system does not say", ""),
        ("processor", {}, "ok", "Big CPU: AVX2, AVX-512, VNNI, BF16, AMX", ""),
        ("processor", {"cpu_flags": frozenset()}, "ok", "no vector units", ""),
        ("cores", {}, "ok", "64 of 64 cores", ""),
        ("cores", {"usable_cores": 1}, "warning", "1 of 64", "share one core"),
        ("cores", {"core_quota": 1.5}, "warning", "1.5 cores' worth", "share one core"),
        ("cores", {"core_quota": 8.0}, "ok", "8.0 cores' worth", ""),
        ("cores", {"cores": None, "usable_cores": None}, "warning", "1 of ? cores", "share"),
        ("memory", {"memory_bytes": None}, "note", "does not say", ""),
        ("memory", {"memory_free_bytes": None}, "ok", "256 GB", ""),
        ("memory", {"memory_free_bytes": 10**9}, "warning", "1 GB free", "--quantization int8"),
        ("memory", {"memory_limit_bytes": 4 * 10**9}, "ok", "4 GB of 256 GB in this cont", ""),
        ("compiled steps", {}, "ok", "up to date", ""),
        ("compiled steps", {"library": None}, "note", "not compiled yet", "aneuron compile"),
        ("compiled steps", {"library": None, "compilers": ()}, "warning", "no C++", "g++ or clang"),
        ("cache", {"cache_error": "/ is not writable"}, "warning", "/cache: /", "ANEURON_CACHE_DI"),
        ("cache", {"disk_free_bytes": 10**9}, "warning", "1 GB free", "make room"),
        ("cache", {"disk_free_bytes": None}, "ok", "/cache, 1 GB", ""),
        ("open files", {"open_files": (256, 1024)}, "warning", "256, up to 1024", "ulimit -n"),
        ("open files", {"open_files": (9000, 9000)}, "ok", "9000 at most", ""),
        ("open files", {"open_files": (1024, -1)}, "ok", "1024, up to any", ""),
    ],
)
def test_what_is_wrong_is_told_with_what_to_do(
    name: str, changes: dict[str, Any], status: str, found: str, advice: str
) -> None:
    told = check(name, **changes)
    assert told.status == status
    assert found in told.found
    assert advice in told.advice
    assert bool(advice) is bool(told.advice)


def test_an_older_processor_runs_eagerly() -> None:
    told = check("compiled steps", library=None, cpu_flags=frozenset({"avx2", "avx512f"}))
    assert told.status == "note"
    assert "lacks avx512_bf16, avx512_vnni" in told.found
    assert check("compiled steps", library=None, cpu_flags=None).status == "note"


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_a_missing_extra_says_how_to_install_it(extra: str) -> None:
    assert check(f"extra {extra}").status == "ok"
    told = check(f"extra {extra}", versions=without(EXTRAS[extra][0]))
    assert (told.status, told.advice) == ("note", f'pip install "aneuron[{extra}]"')


def test_extras_are_those_of_the_package() -> None:
    import tomllib

    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {
        extra: tuple(line.partition(">")[0] for line in lines)
        for extra, lines in project["optional-dependencies"].items()
        if extra not in ("all", "neuron")
    }
    assert declared == EXTRAS


def test_no_limit_of_files_is_no_check() -> None:
    assert not [one for one in diagnose(replace(GOOD, open_files=None)) if one.name == "open files"]


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("OMP_NUM_THREADS", "1", "one thread of 64 cores"),
        ("OMP_NUM_THREADS", "128", "more threads than the 64 cores"),
        ("OMP_NUM_THREADS", "8", ""),
        ("MKL_NUM_THREADS", "1", "one thread of"),
        ("OMP_PROC_BIND", "close", "in the event loop's way"),
        ("OMP_PROC_BIND", "false", ""),
        ("PYTHONASYNCIODEBUG", "1", "slow"),
        ("HF_HUB_OFFLINE", "1", ""),
    ],
)
def test_variables_that_slow_down_are_pointed_out(name: str, value: str, advice: str) -> None:
    told = check(name, variables={name: value})
    assert value in told.found
    assert told.status == ("warning" if advice else "note")
    assert advice in told.advice


# ── devices ─────────────────────────────────────────────────────────────────────────────

GPU = {"nvidia_files": ("/dev/nvidia0",), "known_devices": ("cpu", "cuda", "sim")}


@pytest.mark.parametrize(
    ("changes", "status", "found"),
    [
        ({}, "ok", "can run models, compiled, 64 threads"),
        ({"library": None}, "ok", "eagerly"),
        ({"python": (3, 9, 0)}, "no", "too old"),
        ({"versions": without("torch", "numpy")}, "no", "torch, numpy missing"),
        ({"torch": Probe(error="OSError: libgomp")}, "no", "cannot be imported: OSError: libgomp"),
    ],
)
def test_the_processor(changes: dict[str, Any], status: str, found: str) -> None:
    told = check("device cpu", **changes)
    assert told.status == status
    assert found in told.found


@pytest.mark.parametrize(
    ("changes", "status", "found", "advice"),
    [
        ({}, "note", "this version has no such device", ""),
        ({"known_devices": ("cpu", "cuda", "sim")}, "note", "no NVIDIA GPU is seen", ""),
        ({"nvidia_files": ("/dev/nvidia0",)}, "note", "this version has no such device", ""),
        (GPU, "warning", "torch is built without CUDA", "CUDA build of torch"),
        ({**GPU, "torch": Probe(cuda="13.0")}, "warning", "torch sees none", "nvidia-smi"),
        ({**GPU, "torch": Probe(error="OSError: x")}, "no", "cannot be imported", ""),
        ({**GPU, "torch": Probe(cuda="13.0", devices=("H200",))}, "ok", "on H200, CUDA 13.0", ""),
    ],
)
def test_gpus(changes: dict[str, Any], status: str, found: str, advice: str) -> None:
    told = check("device cuda", **changes)
    assert told.status == status
    assert found in told.found
    assert advice in told.advice


def test_a_variable_that_hides_the_gpus_is_pointed_out() -> None:
    told = check("CUDA_VISIBLE_DEVICES", variables={"CUDA_VISIBLE_DEVICES": "-1"}, **GPU)
    assert told.advice == "it hides all GPUs"


NO_NEURON = Found(None, {}, (), (), "no Neuron runtime is installed", "install it")
PLACEHOLDER = replace(
    NO_NEURON,
    versions={"torch-neuronx": "1.0"},
    placeholders=("torch-neuronx",),
    why_not="torch-neuronx 1.0 is a placeholder",
)
CHIP = Found("nxd", {"torch-neuronx": "2.9"}, (), ("/dev/neuron0",), "", "")


@pytest.mark.parametrize(
    ("found", "status", "said", "advice"),
    [
        (None, "note", "it cannot be found out: nobody has looked", ""),
        ("OSError: libnrt", "note", "it cannot be found out: OSError: libnrt", ""),
        (NO_NEURON, "note", "cannot: no Neuron runtime is installed", ""),
        (PLACEHOLDER, "note", "cannot: torch-neuronx 1.0 is a placeholder", "install it"),
        (
            replace(NO_NEURON, device_files=("/dev/neuron0",)),
            "warning", "cannot: no Neuron runtime is installed (1 devices)", "install it",
        ),
        (
            replace(CHIP, device_files=(), why_not="no /dev/neuron*", advice="the driver"),
            "warning", "cannot: no /dev/neuron*", "the driver",
        ),
        (CHIP, "ok", "can run models: NxD on torch-xla (torch-neuronx 2.9), 1 devices", ""),
    ],
)  # fmt: skip
def test_neuron(found: Found | str | None, status: str, said: str, advice: str) -> None:
    told = check("device neuron", torch=Probe(neuron=found))
    assert (told.status, told.found, told.advice) == (status, said, advice)


def test_variables_of_neuron_that_do_nothing_are_pointed_out() -> None:
    name = "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"
    stale = check(name, variables={name: "2"})
    assert (stale.status, stale.found) == ("warning", "is set to '2'")
    assert "from SDK 2.31 on" in stale.advice
    off = check("NEURON_LAUNCH_BLOCKING", variables={"NEURON_LAUNCH_BLOCKING": "0"})
    assert (off.status, off.advice) == ("note", "")


def test_neuron_is_looked_for_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = set(sys.modules)
    told = facts_module._end_probe(facts_module._start_probe())
    assert isinstance(told.neuron, Found)
    assert told.neuron.generation is None
    assert not {"torch_neuronx", "libtorch_neuronx_lite"} & (set(sys.modules) - here)
    broken = facts_module._PROBE.replace("import find", "import nothing")
    wrong = probed(broken, monkeypatch)
    assert wrong.error is None
    assert isinstance(wrong.neuron, str)
    assert wrong.neuron.startswith("ImportError: cannot import name 'nothing'")


def test_the_simulated_device_works_anywhere() -> None:
    broken = replace(GOOD, versions={}, python=(3, 8, 0), torch=Probe(error="x"), cpu_flags=None)
    (told,) = (one for one in diagnose(broken) if one.name == "device sim")
    assert told.status == "ok"


# ── this machine ────────────────────────────────────────────────────────────────────────


@pytest.mark.timeout(60)
def test_this_machine(aneuron: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANEURON_CACHE_DIR", str(tmp_path / "not" / "there"))
    result = aneuron("doctor", "--json")
    told = json.loads(result.out)
    assert (result.status, result.err, told["works"]) == (0, "", True)
    assert told["facts"]["python"] == list(sys.version_info[:3])
    assert told["facts"]["torch"]["error"] is None
    assert told["facts"]["cache_error"] is None
    assert told["facts"]["usable_cores"] >= 1
    assert {one["name"] for one in told["checks"]} >= {
        f"device {name}" for name in ("cpu", "cuda", "neuron", "sim")
    }
    assert not (tmp_path / "not").exists()  # asking changes nothing


def test_the_table_and_the_status(aneuron: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aneuron.cli.doctor.gather", lambda: GOOD)
    result = aneuron("doctor")
    assert (result.status, result.err) == (0, "")
    assert "device cpu" in result.out
    broken = replace(GOOD, torch=Probe(error="[red]OSError"))
    monkeypatch.setattr("aneuron.cli.doctor.gather", lambda: broken)
    result = aneuron("doctor")
    assert (result.status, result.err) == (1, "")
    assert "[red]OSError" in result.out  # text of others is no markup
    assert "→ install torch again" in result.out


def test_a_cache_that_cannot_be_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(facts_module, "_start_probe", lambda: "not asked")
    file = tmp_path / "file"
    file.write_text("x")
    monkeypatch.setenv("ANEURON_CACHE_DIR", str(file / "cache"))
    told = gather()
    assert told.cache_error is not None
    assert "directory" in told.cache_error
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("ANEURON_CACHE_DIR", str(tmp_path / "cache"))
    assert gather().cache_error == f"{tmp_path} is not writable"
    assert gather().torch.error == "not asked"


# ── torch, elsewhere ────────────────────────────────────────────────────────────────────


def probed(program: str, monkeypatch: pytest.MonkeyPatch) -> Probe:
    monkeypatch.setattr(facts_module, "_PROBE", program)
    return facts_module._end_probe(facts_module._start_probe())


def test_a_torch_that_crashes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = probed("import os; os.abort()", monkeypatch)
    assert told.error is not None
    assert "ends the process with status -6" in told.error


def test_a_torch_that_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    program = facts_module._PROBE.replace("import torch", 'raise OSError("libgomp.so is missing")')
    assert probed(program, monkeypatch).error == "OSError: libgomp.so is missing"


def test_a_torch_that_takes_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "_PROBE_S", 0.05)
    told = probed("import threading; threading.Event().wait()", monkeypatch)
    assert told.error is not None
    assert "its import takes over" in told.error


def test_no_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "find_spec", lambda _: None)
    told = facts_module._end_probe(facts_module._start_probe())
    assert told.error == "it is not installed"

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(facts_module, "find_spec", lambda _: object())
    monkeypatch.setattr(subprocess, "Popen", refuse)
    told = facts_module._end_probe(facts_module._start_probe())
    assert told.error == "no more processes"


def test_broken_metadata_is_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> str:
        raise ValueError("metadata")

    monkeypatch.setattr(metadata, "version", broken)
    assert facts_module._version("torch") is None
    assert facts_module._version("aneuron")


def fails(*_: object, **__: object) -> Any:
    raise OSError("the system refuses")


def test_a_system_that_refuses_everything_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "_start_probe", lambda: "not asked")
    monkeypatch.setattr(build, "built_library", fails)
    monkeypatch.setattr(facts_module, "cache_dir", fails)
    monkeypatch.setattr(shutil, "disk_usage", fails)
    monkeypatch.setattr(Path, "read_text", fails)
    monkeypatch.setattr(Path, "glob", fails)
    monkeypatch.setattr(Path, "exists", fails)
    monkeypatch.setattr(os, "sysconf", fails)
    monkeypatch.setattr(limits, "_CGROUP", Path("/no/such/folder"))
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setitem(sys.modules, "resource", None)
    told = gather()
    unknown = ("library", "cpu_flags", "memory_bytes", "open_files", "disk_free_bytes")
    assert {name for name in unknown if getattr(told, name) is not None} == set()
    assert told.cache_dir == "~/.cache/aneuron"
    assert told.cache_error == "it cannot be found: the system refuses"
    assert told.usable_cores == told.cores
    assert told.neuron_files == told.nvidia_files == ()
    assert diagnose(told)


def test_a_probe_that_is_interrupted_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "_PROBE", "import threading; threading.Event().wait()")
    process = facts_module._start_probe()
    assert not isinstance(process, str)

    def interrupted(**_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        facts_module._end_probe(process)
    assert process.returncode is not None
