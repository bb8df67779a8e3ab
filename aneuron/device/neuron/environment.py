"""The environment variables of AWS Neuron: what they do, and whether anything still reads them.

A table, with advice on those that do nothing, or not what their name says. `aneuron doctor` shows
which of them are set; docs/neuron-environment.md is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["VARIABLES", "Variable"]

_RUNTIME = "runtime"  # all generations
_NXD = "NxD"
_LITE = "lite"
_TORCH = "TorchNeuron"
_VLLM = "vLLM's plugin"
_COMPILER = "compiler"


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable.

    Attributes:
        name: of the variable.
        what: it does.
        reader: what reads it: the runtime or the compiler of all generations, NxD, the lite
            runtime of native PyTorch, TorchNeuron, or vLLM's plugin, which aneuron does without.
        default: where it is not set; "" where that is not published.
        since: the SDK that brought it; "" where that is not published.
        until: the last SDK in which it does this; "" if it still does.
        advice: what to do where it is set; "" where that is no fault.
    """

    name: str
    what: str
    reader: str
    default: str = ""
    since: str = ""
    until: str = ""
    advice: str = ""

    @property
    def is_stale(self) -> bool:
        """Whether today's SDKs no longer do what it says."""
        return bool(self.until)


VARIABLES = {
    one.name: one
    for one in (
        # ── which cores ─────────────────────────────────────────────────────────────────
        Variable(
            "NEURON_RT_VISIBLE_CORES",
            "the NeuronCores of this process, a list or a range; wins over NEURON_RT_NUM_CORES. "
            "vLLM's plugin refuses it and wants NEURON_VISIBLE_DEVICES",
            _RUNTIME,
            "all that are free",
        ),
        Variable("NEURON_RT_NUM_CORES", "how many NeuronCores this process takes", _RUNTIME, "all"),
        Variable(
            "NEURON_VISIBLE_DEVICES",
            "the devices that vLLM's plugin takes",
            _VLLM,
            "all",
            since="2.31",
        ),
        Variable(
            "NEURON_LOGICAL_NC_CONFIG",
            "physical cores in a logical one (LNC); programs run only with the value that they "
            "were compiled for, so it is part of the key of compiled artifacts",
            _RUNTIME,
            "as the chip has it",
        ),
        Variable(
            "NEURON_RT_VIRTUAL_CORE_SIZE", "the same, by its older name", _RUNTIME, "as the chip"
        ),
        Variable(
            "NEURON_RT_ROOT_COMM_ID", "address and port of the first node, of several", _RUNTIME
        ),
        # ── launches ────────────────────────────────────────────────────────────────────
        Variable(
            "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS",
            "launches that return before their program ends (implicit async), how many at most; "
            "advice is 2 to 3, the limit 63. aneuron sets 2, as NxDI does",
            _NXD,
            "2",
            until="2.30",
            advice="from SDK 2.31 on it only gives a warning: programs run one by one. "
            "`aneuron doctor --probe` tells whether launches return early",
        ),
        Variable(
            "NEURON_RT_IO_RING_CACHE_SIZE",
            "buffers that a program's outputs take turns in. aneuron sets 2, as NxDI does",
            _NXD,
            "2",
        ),
        Variable(
            "NEURON_RT_XU_COMPUTE_MAX_QUEUED_REQUESTS",
            "launches that the queue of explicit async holds; vLLM's plugin sets 32, and 63 is "
            "the most. aneuron keeps one fewer unread",
            _RUNTIME,
            "8",
        ),
        Variable(
            "NEURON_LAUNCH_BLOCKING",
            "1: every launch waits for its end; for debugging",
            _TORCH,
            "0",
            advice="launches wait for their end, which async scheduling exists to avoid: unset it",
        ),
        Variable("TORCH_NEURONX_ENABLE_ASYNC_NRT", "explicit async of the runtime", _TORCH),
        Variable(
            "NEURON_RT_EXEC_TIMEOUT",
            "seconds after which a program has failed (status 5); NxDI sets 600 for long contexts",
            _RUNTIME,
            "30, or 2: its page says both",
        ),
        Variable("NEURON_COMBINE_KV_ALLOCATIONS", "one allocation for all of the KV cache", _NXD),
        # ── compiling ───────────────────────────────────────────────────────────────────
        Variable("NEURON_CC_FLAGS", "more flags for the compiler; part of the key", _COMPILER),
        Variable(
            "NEURON_COMPILE_CACHE_URL",
            "where compiled programs are kept, a folder or an s3 address",
            _COMPILER,
            "/var/tmp/neuron-compile-cache",  # noqa: S108  (what the compiler does)
        ),
        Variable(
            "NEURON_PLATFORM_TARGET_OVERRIDE",
            "compile for this chip (trn2, …), also where there is none; part of the key",
            _COMPILER,
            "the chip that is there",
        ),
        Variable(
            "NEURON_COMPILED_ARTIFACTS",
            "where vLLM's plugin up to 0.5 kept artifacts",
            _VLLM,
            until="2.30",
            advice="aneuron does not read it: pass the folder as the model",
        ),
        Variable("TORCH_NEURONX_NEFF_CACHE_DIR", "where compiled programs are kept", _TORCH),
        Variable(
            "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS",
            "operations run on the host only where the device has none, and not after an error",
            _TORCH,
        ),
        Variable(
            "NEURON_LIBTORCH_COMPILATION_TIMEOUT",
            "seconds that the compile of one graph may take. aneuron waits as long for a bucket "
            "that it warms up, and 600 s at the least, before it counts the device as lost",
            _LITE,
            "600",
        ),
        Variable(
            "NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", "graphs compiled at a time", _LITE, "8"
        ),
        # ── looking into it ─────────────────────────────────────────────────────────────
        Variable("NEURON_RT_LOG_LEVEL", "level of the runtime's log", _RUNTIME, "ERROR"),
        Variable(
            "NEURON_RT_DBG_DUMP_INPUTS_ON_ERR",
            "write the inputs of a program that failed to files",
            _RUNTIME,
            "0",
        ),
        Variable(
            "NEURON_RT_INSPECT_ENABLE",
            "1: profile every program",
            _RUNTIME,
            "0",
            advice="profiling costs time: unset it where that counts",
        ),
        Variable("NEURON_RT_INSPECT_OUTPUT_DIR", "where the profile goes", _RUNTIME),
        Variable(
            "NXD_CPU_MODE",
            "1: NxDI computes on the host",
            _NXD,
            "0",
            advice="NxDI leaves the NeuronCores alone: unset it",
        ),
        # ── of vLLM's plugin alone ──────────────────────────────────────────────────────
        Variable(
            "VLLM_NEURON_BACKEND",
            "neuron_native takes another compile backend than vllm_neuron",
            _VLLM,
            "vllm_neuron",
            since="2.31",
        ),
        Variable("VLLM_NEURON_CPU_MODE", "1: compute on the host", _VLLM, "0", since="2.31"),
        Variable(
            "VLLM_NEURON_CPU_COMPILE", "1: compile with no device there", _VLLM, "0", since="2.31"
        ),
        Variable(
            "VLLM_NEURON_DISABLE_WARMUP_COMPILE",
            "1: compile at the first request",
            _VLLM,
            "0",
            since="2.31",
        ),
    )
}
