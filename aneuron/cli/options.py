"""What `run` and `chat` have in common: options of engine and sampling, and opening a model.

Comes in: options, named as in vLLM where they mean the same. Goes out: an open engine and
`SamplingParams`. Values are checked by the engine, which names the option at fault.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Self

from cyclopts import Group, Parameter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rich.progress import Progress as Bar

    from aneuron.engine import Engine
    from aneuron.params import SamplingParams

__all__ = ["FLAGS", "ChatSampling", "EngineSettings", "Sampling", "opened"]


@Parameter(name="*", group=Group("Engine", sort_key=2))
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How the model runs.

    Attributes:
        device: What runs it: auto, cpu, sim, or sim with a profile such as sim:micro.
        dtype: Of weights and KV cache: auto, float32 or bfloat16.
        max_model_len: Longest context in tokens; the model's own by default.
        revision: Branch, tag or commit of a Hugging Face id.
        async_scheduling: Schedule one step ahead, or run the synchronous baseline.
        token_carry: How tokens travel from step to step: auto, host, handoff or resident.
    """

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    revision: str | None = None
    async_scheduling: bool = True
    token_carry: str = "auto"


@Parameter(name="*", group=Group("Sampling", sort_key=1))
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen, and when the answer ends.

    Attributes:
        max_tokens: Most new tokens.
        min_tokens: No end of any kind before this many new tokens.
        temperature: 0 takes the likeliest token, the same at every run.
        top_p: Keep the smallest set of tokens whose probability reaches this.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        min_p: Drop tokens less likely than this share of the likeliest.
        seed: The same seed gives the same answer.
        stop: A text that ends the answer; may be given several times.
        ignore_eos: Do not end at the model's own end token.
    """

    max_tokens: int = 512
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    ignore_eos: Annotated[bool, Parameter(negative="")] = False

    def params(self) -> SamplingParams:
        """Return them as the engine takes them.

        Raises:
            InvalidRequest: a value is out of range; `param` names it.
        """
        from aneuron.params import SamplingParams

        return SamplingParams(**asdict(self))


@Parameter(name="*", group=Group("Sampling", sort_key=1))
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSampling(Sampling):
    """As `Sampling`, but livelier by default."""

    temperature: float = 0.7


FLAGS = {
    field.name: f"--{field.name.replace('_', '-')}"
    for options in (EngineSettings, Sampling)
    for field in fields(options)
}


@contextlib.asynccontextmanager
async def opened(model: str, settings: EngineSettings, *, quiet: bool) -> AsyncIterator[Engine]:
    """Open an engine, telling on stderr how far it is, and close it at the end.

    Raises:
        ConfigError: a setting is wrong, or there is no such model.
    """
    from aneuron.engine import Engine

    with _Reporter(model, quiet=quiet) as reporter:
        engine = Engine(model, progress=reporter, **asdict(settings))
        await engine.open()
    try:
        yield engine
    finally:
        await engine.aclose()


class _Reporter:
    """Shows fetching and loading on stderr: a bar on a terminal, else a line per stage."""

    def __init__(self, model: str, *, quiet: bool) -> None:
        self._model = model
        self._quiet = quiet
        self._is_terminal = sys.stderr.isatty()  # asked once: the bar puts a proxy there
        self._stage = ""
        self._bar: Bar | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Take the news; called in the thread that loads."""
        if self._is_over:  # Ctrl-C: raising here is what stops a download
            raise KeyboardInterrupt
        if self._quiet:
            return
        is_new, self._stage = stage != self._stage, stage
        if self._is_terminal:
            self._draw(done, total, is_new=is_new)
        elif is_new:
            size = "" if total is None else f" ({total / 1e6:.0f} MB)"
            print(f"{self._model}: {stage}{size}", file=sys.stderr, flush=True)

    def _draw(self, done: int, total: int | None, *, is_new: bool) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress

            columns = ("{task.description}", BarColumn(), "{task.fields[size]}")
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        if is_new:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(f"{self._model}: {self._stage}", total=total, size="")
        size = "" if total is None else f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
        self._bar.update(self._bar.task_ids[0], completed=done, size=size)
