"""aneuron: LLM inference that lives on your event loop.

    async with aneuron.Engine("smollm2-135m") as engine:
        async for token in engine.generate("The capital of France is", max_tokens=32):
            print(token, end="", flush=True)

The flow, and the file of each stage:

    generate()          engine.py, submission.py    text or messages → ids, grammar → Request
      │                 intake.py                   names, limits, deadlines
    step loop           core.py                     while True: plan, launch, hand over
      ├ schedule()      scheduler/, kv_cache.py     who runs, which blocks → SchedulerOutput
      ├ execute_model() runner.py, batch/           prepare inputs; breaks of the flow
      │                 carry.py                    feed the last tokens as a device future
      ├ guidance        guidance.py, grammar.py     masks and hooks, while the forward pass runs
      ├ sample_tokens() inflight.py                 the sampling that waited; a step in flight
      └ launch          device/                     executor thread → DeviceFuture (futures.py)
      │
    materializer        core.py                     await the future, off the critical path
      ├ update          scheduler/                  append, stop, free
      └ deliver         stream/, detokenize.py      ids → Token → your `async for`

Importing this package loads neither torch nor numpy nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aneuron.engine import Engine
    from aneuron.errors import (
        AneuronError,
        ConfigError,
        ContextTooLong,
        DeviceError,
        DeviceLost,
        EngineClosed,
        InternalError,
        InvalidRequest,
        LaunchFailed,
        OutOfMemory,
        Overloaded,
        RequestError,
    )
    from aneuron.futures import DeviceFuture
    from aneuron.opening import open_engine as open  # noqa: A004  `aneuron.open` is its name
    from aneuron.outputs import (
        AbortReason,
        BreakStats,
        Choice,
        Completion,
        EngineStats,
        FinishReason,
        Timing,
        Token,
        TokenLogprobs,
        Usage,
    )
    from aneuron.params import Grammar, SamplingParams
    from aneuron.stream import TokenStream
    from aneuron.stream.many import CompletionStream

__all__ = [
    "AbortReason",
    "AneuronError",
    "BreakStats",
    "Choice",
    "Completion",
    "CompletionStream",
    "ConfigError",
    "ContextTooLong",
    "DeviceError",
    "DeviceFuture",
    "DeviceLost",
    "Engine",
    "EngineClosed",
    "EngineStats",
    "FinishReason",
    "Grammar",
    "InternalError",
    "InvalidRequest",
    "LaunchFailed",
    "OutOfMemory",
    "Overloaded",
    "RequestError",
    "SamplingParams",
    "Timing",
    "Token",
    "TokenLogprobs",
    "TokenStream",
    "Usage",
    "open",
]

__version__ = "0.1.0"

_ERRORS = (
    "AneuronError ConfigError ContextTooLong DeviceError DeviceLost EngineClosed InternalError "
    "InvalidRequest LaunchFailed OutOfMemory Overloaded RequestError"
)
_OUTPUTS = (
    "AbortReason BreakStats Choice Completion EngineStats FinishReason Timing Token "
    "TokenLogprobs Usage"
)
_HOME = {
    **dict.fromkeys(_ERRORS.split(), "aneuron.errors"),
    **dict.fromkeys(_OUTPUTS.split(), "aneuron.outputs"),
    "CompletionStream": "aneuron.stream.many",
    "DeviceFuture": "aneuron.futures",
    "Engine": "aneuron.engine",
    **dict.fromkeys(("Grammar", "SamplingParams"), "aneuron.params"),
    "TokenStream": "aneuron.stream",
    "open": "aneuron.opening",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that importing the package stays cheap."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), "open_engine" if name == "open" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
