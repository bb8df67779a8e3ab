"""What `aneuron doctor` asks the machine: plain values, gathered at the edge.

Comes in: the machine. Goes out: `Facts`, that `checks` judges. Nothing here raises: what cannot be
found out is None. torch is imported by a process of its own, which may crash, or take too long.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aneuron.device import DEVICE_NAMES, limits
from aneuron.device.neuron import environment
from aneuron.device.neuron.found import Found
from aneuron.models.files.cache import cache_dir
from aneuron.models.native import build

__all__ = ["EXTRAS", "NEEDED", "PACKAGES", "Facts", "Probe", "gather"]

EXTRAS = {
    "serve": ("msgspec", "starlette", "uvicorn"),
    "metrics": ("prometheus-client",),
    "grammar": ("llguidance",),
    "otel": ("opentelemetry-api",),
}
NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "anyio", "numpy")
PACKAGES = ("aneuron", *NEEDED, "uvloop")
_VARIABLES = (
    "ANEURON_CACHE_DIR", "ANEURON_LOG", "ANEURON_NATIVE_DIR", "CXX", "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE", "KMP_AFFINITY", "LD_PRELOAD", "MKL_NUM_THREADS", "OMP_NUM_THREADS",
    "OMP_PROC_BIND", "PYTHONASYNCIODEBUG", *environment.VARIABLES,
)  # fmt: skip
_PROBE_S = 20.0
_PROBE = """
import json, os
told = {"error": None, "cuda": None, "devices": [], "neuron": None, "threads": None}
try:
    import torch
    told["cuda"] = torch.version.cuda
    told["threads"] = torch.get_num_threads()
    if torch.version.cuda and torch.cuda.is_available():
        count = torch.cuda.device_count()
        told["devices"] = [torch.cuda.get_device_name(at) for at in range(count)]
except BaseException as error:
    told["error"] = f"{type(error).__name__}: {error}"[:300]
try:
    from dataclasses import asdict
    from aneuron.device.neuron.found import find
    told["neuron"] = asdict(find())
except BaseException as error:
    told["neuron"] = f"{type(error).__name__}: {error}"[:300]
print(json.dumps(told), flush=True)
os._exit(0)
"""


@dataclass(frozen=True, slots=True)
class Probe:
    """What torch said, in a process of its own.

    Attributes:
        error: why it cannot be imported; None if it can.
        cuda: the CUDA version that it is built for.
        devices: names of the GPUs that it sees.
        neuron: what there is of AWS Neuron; or why that cannot be found out.
        threads: that it computes with by default.
    """

    error: str | None = None
    cuda: str | None = None
    devices: tuple[str, ...] = ()
    neuron: Found | str | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A machine, and the Python on it, as far as they can be found out.

    Attributes:
        python: version, as a tuple of three.
        implementation: such as CPython.
        system: name, release and architecture.
        machine: architecture alone.
        versions: of packages, None where one is not installed.
        known_devices: that this version of aneuron has.
        cpu_model: the processor's name.
        cpu_flags: what it can do; None where nobody tells.
        native_flags: that compiled steps need.
        cores, usable_cores: of the machine, and that this process may run on.
        core_quota: cores' worth of time that the container has; None is no limit.
        memory_bytes, memory_limit_bytes, memory_free_bytes: of the machine, of the container, and
            what is left of the lesser.
        compilers: that could compile steps.
        library: compiled steps for this processor, if they are there.
        cache_dir: where models are kept.
        cache_error: why it cannot be written.
        cache_bytes: what is in it.
        disk_free_bytes: on its disk.
        torch: what that said.
        neuron_files: devices of AWS Neuron, such as /dev/neuron0.
        nvidia_files: of NVIDIA, such as /dev/nvidia0.
        open_files: the process' limit and the highest it may set itself.
        variables: of the environment, those that matter and are set.
    """

    python: tuple[int, int, int]
    implementation: str
    system: str
    machine: str
    versions: dict[str, str | None]
    known_devices: tuple[str, ...]
    cpu_model: str | None = None
    cpu_flags: frozenset[str] | None = None
    native_flags: frozenset[str] = frozenset()
    cores: int | None = None
    usable_cores: int | None = None
    core_quota: float | None = None
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory_free_bytes: int | None = None
    compilers: tuple[str, ...] = ()
    library: str | None = None
    cache_dir: str = ""
    cache_error: str | None = None
    cache_bytes: int | None = None
    disk_free_bytes: int | None = None
    torch: Probe = field(default_factory=Probe)
    neuron_files: tuple[str, ...] = ()
    nvidia_files: tuple[str, ...] = ()
    open_files: tuple[int, int] | None = None
    variables: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return them as `--json` has them."""
        told = asdict(self)
        for name in ("cpu_flags", "native_flags"):
            told[name] = None if told[name] is None else sorted(told[name])
        return told


def gather() -> Facts:
    """Return the facts of this machine; some two seconds, most of them torch's import."""
    probe = _start_probe()  # meanwhile, the rest
    cpu = limits.processor()
    memory = limits.memory()
    folder = _cache_dir()
    return Facts(
        python=sys.version_info[:3],
        implementation=platform.python_implementation(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        machine=platform.machine(),
        versions={name: _version(name) for name in (*PACKAGES, *_extra_packages())},
        known_devices=tuple(name.partition(":")[0] for name in DEVICE_NAMES),
        cpu_model=cpu.model,
        cpu_flags=cpu.flags,
        native_flags=frozenset(build.NEEDED_FLAGS),
        cores=os.cpu_count(),
        usable_cores=limits.usable_cores(),
        core_quota=limits.core_quota(),
        memory_bytes=memory.total,
        memory_limit_bytes=memory.limit,
        memory_free_bytes=memory.free,
        compilers=tuple(command[0] for command in build.compilers()),
        library=_library(),
        cache_dir=str(folder),
        cache_error=_write_error(folder),
        cache_bytes=_size_of(folder),
        disk_free_bytes=_disk_free(folder),
        torch=_end_probe(probe),
        neuron_files=_device_files("neuron"),
        nvidia_files=_device_files("nvidia"),
        open_files=_open_files(),
        variables={name: os.environ[name] for name in _VARIABLES if name in os.environ},
    )


def _extra_packages() -> list[str]:
    return [name for names in EXTRAS.values() for name in names]


def _version(name: str) -> str | None:
    if name == "aneuron":
        from aneuron import __version__

        return __version__
    try:
        return metadata.version(name)
    except Exception:  # noqa: BLE001  metadata may be broken in any way
        return None


def _library() -> str | None:
    try:
        found = build.built_library()
    except OSError:
        return None
    return None if found is None else str(found)


def _device_files(kind: str) -> tuple[str, ...]:
    try:
        found = Path("/dev").glob(f"{kind}[0-9]*")
        return tuple(sorted(str(path) for path in found))
    except OSError:
        return ()


def _open_files() -> tuple[int, int] | None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)


# ── the cache directory ─────────────────────────────────────────────────────────────────


def _cache_dir() -> Path:
    try:
        return cache_dir()
    except (OSError, RuntimeError):  # a user without a home
        return Path("~/.cache/aneuron")


def _write_error(folder: Path) -> str | None:
    """Return why nothing can be written there; it is not made for the question's sake."""
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            return f"{there} is no directory"
    except (OSError, StopIteration) as error:
        return f"it cannot be found: {error}"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"


def _size_of(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += (Path(parent) / name).lstat().st_size
    return total


def _disk_free(folder: Path) -> int | None:
    for path in (folder, *folder.parents):
        with suppress(OSError):
            return shutil.disk_usage(path).free
    return None


# ── torch and Neuron ────────────────────────────────────────────────────────────────────


def _start_probe() -> subprocess.Popen[str] | str:
    """Begin to import torch elsewhere; return the process, or why there is none."""
    try:
        if find_spec("torch") is None:
            return "it is not installed"
        return subprocess.Popen(  # noqa: S603  (this interpreter, and a program of ours)
            [sys.executable, "-P", "-c", _PROBE],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
    except (OSError, ValueError, ImportError) as error:
        return str(error)


def _end_probe(process: subprocess.Popen[str] | str) -> Probe:
    if isinstance(process, str):
        return Probe(error=process)
    with process:
        try:
            out, _ = process.communicate(timeout=_PROBE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return Probe(error=f"its import takes over {_PROBE_S:.0f} s")
        except BaseException:
            process.kill()
            raise
    try:
        told = json.loads(out.strip().split("\n")[-1])
        told["devices"] = tuple(told["devices"])
        if isinstance(told["neuron"], dict):
            told["neuron"] = _found(told["neuron"])
        return Probe(**told)
    except (ValueError, TypeError, KeyError):
        return Probe(error=f"its import ends the process with status {process.returncode}")


def _found(told: dict[str, Any]) -> Found:
    lists: Any = {name: tuple(one) for name, one in told.items() if isinstance(one, list)}
    return Found(**{**told, **lists})
