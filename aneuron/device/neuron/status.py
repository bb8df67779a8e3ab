"""What the Neuron runtime and compiler report, as typed errors.

Failures surface in Python as `RuntimeError` whose text has a code: `NRT_STATUS` numbers of the
runtime (SDK documentation, neuron-runtime/api/nrt_status.rst), `NCC_…` codes of the compiler. The
classes that they fall into are those of docs/errors.md.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from aneuron.errors import ConfigError, DeviceError, DeviceLost, LaunchFailed, OutOfMemory

__all__ = [
    "COMPILER_CODES",
    "QUEUE_FULL",
    "STATUSES",
    "Status",
    "as_config_error",
    "classify",
    "status_of",
]

QUEUE_FULL = 7


class Status(NamedTuple):
    """One status of the runtime.

    Attributes:
        name: the constant's, without NRT_.
        meaning: in a few words.
        advice: what to do.
        error: what aneuron raises for it.
    """

    name: str
    meaning: str
    advice: str
    error: type[DeviceError]


_RESTART = "restart the process; if it comes back, look at neuron-top and dmesg"
STATUSES = {
    1: Status("FAILURE", "unspecified failure", _RESTART, DeviceLost),
    2: Status("INVALID", "an invalid argument", "please report it", LaunchFailed),
    3: Status("INVALID_HANDLE", "an invalid handle", "please report it", LaunchFailed),
    4: Status(
        "RESOURCE", "device memory is exhausted",
        "take fewer KV blocks (num_kv_blocks), a shorter max_model_len or more ranks", OutOfMemory,
    ),
    5: Status(
        "TIMEOUT", "a program did not end in time",
        "raise NEURON_RT_EXEC_TIMEOUT for long programs; else " + _RESTART, DeviceLost,
    ),
    6: Status("HW_ERROR", "a hardware error", _RESTART, DeviceLost),
    QUEUE_FULL: Status(
        "QUEUE_FULL", "the queue of launches is full",
        "nothing: aneuron reads what is due and launches again", LaunchFailed,
    ),
    9: Status(
        "LOAD_NOT_ENOUGH_NC", "too few NeuronCores",
        "lower tensor_parallel_size or num_ranks, or free cores (neuron-ls shows who has them)",
        DeviceLost,
    ),
    10: Status(
        "UNSUPPORTED_NEFF_VERSION", "compiled for another runtime",
        "compile again with the SDK that is installed", DeviceLost,
    ),
    11: Status("FAIL_HOST_MEM_ALLOC", "host memory is exhausted", "free host memory", OutOfMemory),
    13: Status("UNINITIALIZED", "the runtime was not initialised", "please report it", DeviceLost),
    14: Status("CLOSED", "the runtime was closed", "open the engine anew", DeviceLost),
    15: Status("QUEUE_EMPTY", "the queue of launches is empty", "please report it", DeviceLost),
    101: Status(
        "EXEC_UNIT_UNRECOVERABLE", "the cores are lost to this process", _RESTART, DeviceLost
    ),
    1002: Status("EXEC_BAD_INPUT", "a program got a bad input", "please report it", LaunchFailed),
    1003: Status(
        "EXEC_COMPLETED_WITH_NUM_ERR", "a program computed NaN",
        "compute in a wider dtype; look at the weights", DeviceError,
    ),
    1004: Status("EXEC_COMPLETED_WITH_ERR", "a program ended with an error", _RESTART, DeviceLost),
    1005: Status(
        "EXEC_NC_BUSY", "another process has the NeuronCores",
        "end it (neuron-ls shows it), or choose cores with NEURON_RT_VISIBLE_CORES", DeviceLost,
    ),
    1006: Status("EXEC_OOB", "an index out of bounds", "please report it", DeviceError),
    1100: Status("COLL_PENDING", "a collective is still pending", _RESTART, DeviceLost),
    **{
        code: Status("EXEC_HW_ERR", "a hardware or collective error", _RESTART, DeviceLost)
        for code in range(1200, 1207)
    },
}  # fmt: skip
COMPILER_CODES = {
    "NCC_EVRF009": "the model and its KV cache are too large for the device's memory: take fewer "
    "num_kv_blocks, a shorter max_model_len, or more tensor_parallel_size",
    "NCC_EBVF030": "a program has too many instructions: take smaller buckets or more "
    "tensor_parallel_size",
    "NCC_ITEN404": "an internal error of the compiler: take other buckets or another SDK",
    "NCC_INLA001": "an internal error of the compiler: take other buckets or another SDK",
    "NCC_EVRF051": "a dtype that the device lacks: pass another dtype",
    "NCC_ESPP004": "a dtype that the device lacks: pass another dtype",
}
# As the runtime writes it: "NRT_RESOURCE (4)", "status=4", "nrt status 4", "status_code: 4".
_TOLD = re.compile(
    r"\bNRT_(?:STATUS_)?(?P<name>[A-Z][A-Z_]*)(?:\s*[=:(]?\s*(?P<number>\d{1,4})\b)?"
    r"|(?i:(?<![a-z])(?<!exit[ _-])(?<!http )(?<!expected )status(?:[ _]?code)?\s*[=:(]?\s*)"
    r"(?P<code>\d{1,4})\b"
)
_COMPILER = re.compile(r"\bNCC_[A-Z]+\d+")
_CORES = re.compile(r"\bneuron[ -]?cores?\b", re.IGNORECASE)
_BY_NAME = {status.name: code for code, status in STATUSES.items() if code < 1200}
_BY_NAME["EXEC_HW_ERR"] = 1200
_LOG = "the compiler's log tells more"
_UNSPECIFIED = 1
_BUSY = 1005
_OUT_OF_MEMORY = 4
# What is told in words alone; the lite runtime says "execution queue full".
_WORDS = (
    (re.compile(r"\bqueue (?:is )?full\b", re.IGNORECASE), QUEUE_FULL),
    (re.compile(r"\bAllocation Failure\b"), _OUT_OF_MEMORY),
)
_NO_PROGRAM = ("ValueError", "KeyError")  # of a router in TorchScript, by its text


def status_of(error: BaseException) -> int | None:
    """Return the runtime's status code that an error's text has, or None.

    The first that says something, of several; what the compiler reports has none.
    """
    text = str(error)
    if _COMPILER.search(text) is not None:
        return None
    if _CORES.search(text) is not None and "not available" in text.lower():
        return _BUSY
    told = [code for match in _TOLD.finditer(text) if (code := _code_of(match)) is not None]
    told += [code for words, code in _WORDS if words.search(text) is not None]
    first = told[0] if told else None
    return next((code for code in told if code != _UNSPECIFIED), first)


def _code_of(match: re.Match[str]) -> int | None:
    """Return the code that a text tells by name, which may go on behind ours, or by number."""
    name = match["name"] or ""
    known = [one for one in _BY_NAME if name == one or name.startswith(f"{one}_")]
    if known:
        return _BY_NAME[max(known, key=len)]
    number = int(match["number"] or match["code"] or 0)
    return number if number in STATUSES else None


def classify(error: BaseException, label: str) -> DeviceError:
    """Return the typed error for what a runtime, or an adapter, raised.

    Args:
        error: what was raised.
        label: of the device.
    """
    text = f"device {label}: {type(error).__name__}: {error}"
    if (code := status_of(error)) is not None:
        status = STATUSES[code]
        message = f"{text}\nstatus {code} ({status.name}): {status.meaning}; {status.advice}"
        return status.error(message, device=label)
    if (advice := _compiler_advice(str(error))) is not None:
        return LaunchFailed(f"{text}\n{advice}", device=label)
    if isinstance(error, MemoryError):
        return OutOfMemory(text, device=label)
    if isinstance(error, FloatingPointError | IndexError):  # NaN, a bad index
        return DeviceError(text, device=label)
    if _is_no_program(error):
        return LaunchFailed(f"{text}\nno compiled program has these shapes", device=label)
    return DeviceLost(text, device=label)


def as_config_error(error: BaseException, *, param: str) -> ConfigError:
    """Return what to raise while a model is compiled, for what the compiler raised."""
    advice = _compiler_advice(str(error)) or _LOG
    return ConfigError(f"cannot compile: {error}\n{advice}", param=param)


def _compiler_advice(text: str) -> str | None:
    """Return what to do if it was the compiler that failed, which leaves the device as it is."""
    for code, told in COMPILER_CODES.items():
        if code in text:
            return f"{code}: {told}"
    return _LOG if _COMPILER.search(text) or "neuronx-cc" in text else None


def _is_no_program(error: BaseException) -> bool:
    """Whether a launch was refused for its shapes or arguments.

    A router in TorchScript raises `torch.jit.Error`, which is no RuntimeError, or RuntimeError;
    the text names what it was.
    """
    if isinstance(error, ValueError | KeyError | TypeError | AssertionError):
        return True
    text = str(error)
    return any(f"builtins.{name}" in text or f"{name}:" in text for name in _NO_PROGRAM)
