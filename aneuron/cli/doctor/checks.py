"""What is judged of a machine: one `Check` for each thing, pure over `Facts`.

Comes in: facts, of this machine or of one that a test made up. Goes out: for each thing what was
found, whether that will do, and what to do if not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aneuron.cli.doctor.facts import EXTRAS, NEEDED, PACKAGES
from aneuron.cli.models.listing import size_text
from aneuron.device.neuron import environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aneuron.cli.doctor.facts import Facts

__all__ = ["WORST", "Check", "diagnose"]

WORST = "no"
_OLDEST_PYTHON = (3, 11)
_FEW_FILES = 4096  # connections of a server, one file each
_LITTLE_DISK = 2 * 10**9  # a small model, converted and packed
_LITTLE_MEMORY = 2 * 10**9
_SIMD = (
    ("AVX2", "avx2"), ("AVX-512", "avx512f"), ("VNNI", "avx512_vnni"), ("BF16", "avx512_bf16"),
    ("AMX", "amx_bf16"), ("NEON", "asimd"), ("SVE", "sve"), ("BF16", "bf16"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """What was found of one thing.

    Attributes:
        name: of the thing.
        status: "ok", "note" (good to know), "warning" (slower, or soon a fault) or "no".
        found: what there is.
        advice: what to do; "" where there is nothing.
    """

    name: str
    status: str
    found: str
    advice: str = ""


def diagnose(facts: Facts) -> list[Check]:
    """Return all checks, in the order in which they are shown."""
    return [
        _python(facts),
        *_packages(facts),
        *_extras(facts),
        _processor(facts),
        _cores(facts),
        _memory(facts),
        _kernels(facts),
        _cache(facts),
        *_open_files(facts),
        *_variables(facts),
        *_devices(facts),
    ]


def _python(facts: Facts) -> Check:
    version = ".".join(map(str, facts.python))
    found = f"{facts.implementation} {version} on {facts.system}"
    if facts.python < _OLDEST_PYTHON:
        return Check("python", WORST, found, "aneuron needs Python 3.11 or newer")
    return Check("python", "ok", found)


def _packages(facts: Facts) -> Iterator[Check]:
    there = [f"{name} {facts.versions[name]}" for name in PACKAGES if facts.versions.get(name)]
    missing = [name for name in NEEDED if not facts.versions.get(name)]
    if missing:
        advice = f"pip install {' '.join(missing)}"
        yield Check("packages", WORST, f"missing: {', '.join(missing)}", advice)
    else:
        yield Check("packages", "ok", ", ".join(there))
    if not facts.versions.get("uvloop"):
        advice = "" if facts.system.startswith("Windows") else "pip install uvloop"
        found = "not installed: commands run on asyncio's own loop, which is slower"
        yield Check("uvloop", "note" if not advice else "warning", found, advice)


def _extras(facts: Facts) -> Iterator[Check]:
    for extra, packages in EXTRAS.items():
        missing = [name for name in packages if not facts.versions.get(name)]
        if missing:
            advice = f'pip install "aneuron[{extra}]"'
            yield Check(f"extra {extra}", "note", f"missing: {', '.join(missing)}", advice)
        else:
            there = ", ".join(f"{name} {facts.versions[name]}" for name in packages)
            yield Check(f"extra {extra}", "ok", there)


# ── the machine ─────────────────────────────────────────────────────────────────────────


def _processor(facts: Facts) -> Check:
    model = facts.cpu_model or facts.machine or "unknown"
    if facts.cpu_flags is None:
        return Check("processor", "note", f"{model}; this system does not say what it can do")
    has = [name for name, flag in _SIMD if flag in facts.cpu_flags]
    return Check("processor", "ok", f"{model}: {', '.join(has) or 'no vector units that are used'}")


def _cores(facts: Facts) -> Check:
    usable = facts.usable_cores or facts.cores or 1
    found = f"{usable} of {facts.cores or '?'} cores"
    if facts.core_quota is not None:
        found += f", {facts.core_quota:.1f} cores' worth of time in this container"
    most = usable if facts.core_quota is None else min(usable, facts.core_quota)
    if most < 2:
        advice = "the event loop and the steps share one core: async scheduling saves little here"
        return Check("cores", "warning", found, advice)
    return Check("cores", "ok", found)


def _memory(facts: Facts) -> Check:
    if facts.memory_bytes is None:
        return Check("memory", "note", "this system does not say how much there is")
    found = size_text(facts.memory_bytes)
    if facts.memory_limit_bytes is not None:
        found = f"{size_text(facts.memory_limit_bytes)} of {found} in this container"
    if facts.memory_free_bytes is None:
        return Check("memory", "ok", found)
    found += f", {size_text(facts.memory_free_bytes)} free"
    if facts.memory_free_bytes < _LITTLE_MEMORY:
        advice = "smaller models, --quantization int8, or --num-kv-blocks for a smaller KV cache"
        return Check("memory", "warning", found, advice)
    return Check("memory", "ok", found)


def _kernels(facts: Facts) -> Check:
    if facts.library is not None:
        return Check("compiled steps", "ok", f"up to date: {facts.library}")
    lacking = facts.native_flags - (facts.cpu_flags or frozenset())
    if lacking:
        found = f"not for this processor, which lacks {', '.join(sorted(lacking))}"
        return Check("compiled steps", "note", f"{found}: models run eagerly")
    if not facts.compilers:
        advice = "install g++ or clang, or name a compiler in CXX"
        return Check("compiled steps", "warning", "no C++ compiler: models run eagerly", advice)
    found = f"not compiled yet; {facts.compilers[0]} can"
    return Check("compiled steps", "note", found, "aneuron compile MODEL, or wait at the first run")


def _cache(facts: Facts) -> Check:
    if facts.cache_error is not None:
        advice = "make it writable, or set ANEURON_CACHE_DIR to another directory"
        return Check("cache", "warning", f"{facts.cache_dir}: {facts.cache_error}", advice)
    found = f"{facts.cache_dir}, {size_text(facts.cache_bytes or 0)}"
    if facts.disk_free_bytes is None:
        return Check("cache", "ok", found)
    found += f"; {size_text(facts.disk_free_bytes)} free on the disk"
    if facts.disk_free_bytes < _LITTLE_DISK:
        advice = "make room (aneuron models list, rm), or set ANEURON_CACHE_DIR to another disk"
        return Check("cache", "warning", found, advice)
    return Check("cache", "ok", found)


def _open_files(facts: Facts) -> Iterator[Check]:
    if facts.open_files is None:
        return
    soft, hard = facts.open_files
    most = f"{soft} at most" if hard == soft else f"{soft}, up to {'any' if hard < 0 else hard}"
    found = f"{most}; a server's connections are one each"
    if 0 <= hard < _FEW_FILES:
        yield Check("open files", "warning", found, "raise the limit (ulimit -n) for a server")
    else:
        yield Check("open files", "ok", found)


def _variables(facts: Facts) -> Iterator[Check]:
    for name, value in sorted(facts.variables.items()):
        advice = _about(name, value, facts)
        yield Check(name, "warning" if advice else "note", f"is set to {value!r}", advice)


def _about(name: str, value: str, facts: Facts) -> str:
    """Say why a variable may be what is wrong; "" where it is not."""
    if name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        usable = facts.usable_cores or 1
        if value.isdecimal() and int(value) > usable:
            return f"more threads than the {usable} cores: unset it, or use --num-threads"
        if value == "1" and usable > 1:
            return f"one thread of {usable} cores computes: unset it, or use --num-threads"
    if name in ("KMP_AFFINITY", "OMP_PROC_BIND") and value.lower() not in ("", "false", "disabled"):
        return "threads that are bound to cores get in the event loop's way: unset it"
    if name == "PYTHONASYNCIODEBUG" and value:
        return "asyncio's debug mode is slow: unset it"
    if name == "CUDA_VISIBLE_DEVICES" and value in ("", "-1") and facts.nvidia_files:
        return "it hides all GPUs"
    neuron = environment.VARIABLES.get(name)
    return neuron.advice if neuron is not None and value not in ("", "0") else ""


# ── devices ─────────────────────────────────────────────────────────────────────────────


def _devices(facts: Facts) -> Iterator[Check]:
    yield _device_cpu(facts)
    yield _device_cuda(facts)
    yield _device_neuron(facts)
    yield Check("device sim", "ok", "can run simulated models (sim:count), on any machine")


def _device_cpu(facts: Facts) -> Check:
    missing = [name for name in NEEDED if not facts.versions.get(name)]
    if facts.python < _OLDEST_PYTHON:
        return Check("device cpu", WORST, "cannot: this Python is too old")
    if missing:
        return Check("device cpu", WORST, f"cannot: {', '.join(missing)} missing")
    if facts.torch.error is not None:
        found = f"cannot: torch cannot be imported: {facts.torch.error}"
        return Check("device cpu", WORST, found, "install torch again")
    how = "compiled" if facts.library is not None else "eagerly, or compiled as said above"
    threads = "" if facts.torch.threads is None else f", {facts.torch.threads} threads"
    return Check("device cpu", "ok", f"can run models, {how}{threads}; the default")


def _device_cuda(facts: Facts) -> Check:
    torch = facts.torch
    gpus = ", ".join(torch.devices or facts.nvidia_files)
    if "cuda" not in facts.known_devices:
        seen = f" ({gpus})" if gpus else ""
        return Check("device cuda", "note", f"cannot: this version has no such device{seen}")
    if not gpus:
        return Check("device cuda", "note", "cannot: no NVIDIA GPU is seen")
    if torch.error is not None:
        return Check("device cuda", WORST, f"cannot: torch cannot be imported: {torch.error}")
    if torch.cuda is None:
        advice = "install a CUDA build of torch"
        return Check("device cuda", "warning", "cannot: torch is built without CUDA", advice)
    if not torch.devices:
        advice = "look at the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        return Check("device cuda", "warning", f"cannot: torch sees none of {gpus}", advice)
    return Check("device cuda", "ok", f"can run models on {gpus}, CUDA {torch.cuda}")


def _device_neuron(facts: Facts) -> Check:
    found = facts.torch.neuron
    if found is None or isinstance(found, str):
        why = found or facts.torch.error or "nobody has looked"
        return Check("device neuron", "note", f"it cannot be found out: {why}")
    if found.why_not:
        # A note where there is nothing of it, which is no fault.
        status = "warning" if found.device_files or found.generation is not None else "note"
        seen = f" ({len(found.device_files)} devices)" if found.device_files else ""
        advice = found.advice if status == "warning" or found.placeholders else ""
        return Check("device neuron", status, f"cannot: {found.why_not}{seen}", advice)
    return Check("device neuron", "ok", f"can run models: {found}")
