"""Where the host's time goes: an engine's stages, timed call by call.

Comes in: an open engine, a tokenizer. Goes out: seconds by part, added up. The timers are put
on these objects alone, and cost time themselves (0.2 us a call), so what they are on is
measured in windows of its own.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.engine import Engine
    from aneuron.prompt import Ids, StreamDecoder

__all__ = ["ALL_PARTS", "ENGINE_PARTS", "PartClock", "time_decoding", "time_parts"]

ENGINE_PARTS = ("schedule", "prepare", "apply", "update")
ALL_PARTS = (*ENGINE_PARTS, "launch", "deliver", "detokenize")


class PartClock:
    """Adds up the time of calls, by part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, method: str, part: str) -> None:
        """Time a method of one object from now on."""
        setattr(owner, method, self.timed(getattr(owner, method), part))

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return the function, timed."""
        seconds, now = self.seconds, time.perf_counter

        def timed(*args: Any, **options: Any) -> Any:
            started_s = now()
            result = function(*args, **options)
            seconds[part] += now() - started_s
            return result

        return timed


def time_parts(engine: Engine, clock: PartClock, parts: tuple[str, ...]) -> None:
    """Time these parts of an engine from now on; "deliver" contains "update"."""
    core = engine._core  # noqa: SLF001  its stages are no part of the interface
    runner: Any = core.runner
    methods: dict[str, list[tuple[Any, str]]] = {
        "schedule": [(core.scheduler, "schedule")],
        "prepare": [(runner.batch, name) for name in ("update", "prepare", "advance")],
        "apply": [(runner.batch, "apply")],
        "update": [(core.scheduler, "update_from_output")],
        "launch": [(runner.device, "launch")],
        "deliver": [(core, "_take_in")],
    }
    for part in parts:
        for owner, method in methods.get(part, ()):
            clock.wrap(owner, method, part)


def time_decoding(tokenizer: Any, clock: PartClock) -> None:
    """Let the tokenizer's decoders of one request each be timed."""
    make = tokenizer.decode_stream

    def decode_stream(prompt_ids: Ids, **options: Any) -> StreamDecoder:
        return _TimedDecoder(make(prompt_ids, **options), clock)

    tokenizer.decode_stream = decode_stream


class _TimedDecoder:
    """A decoder whose steps are timed."""

    def __init__(self, inner: StreamDecoder, clock: PartClock) -> None:
        self.step = clock.timed(inner.step, "detokenize")
        self.flush = inner.flush
