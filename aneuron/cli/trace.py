"""`aneuron trace`: one prompt, and a timeline of the steps that answered it.

Comes in: a model's name and a prompt, as in `aneuron run`. Goes out: a Chrome trace, an SVG
picture or both, as files; a summary on stderr, or with `--json` on stdout. The answer's text is
not shown.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path  # noqa: TC003  (the command line reads the annotation)
from typing import TYPE_CHECKING, Any

from aneuron.cli.loading import opened
from aneuron.cli.options import EngineSettings, Flag, JsonFlag, SeveralSampling
from aneuron.cli.run import read_prompt, submit
from aneuron.cli.terminal import check_writable, note, show_json
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from aneuron.timeline import Timeline

__all__ = ["trace"]

_ENGINE = EngineSettings()
_SAMPLING = SeveralSampling()


async def trace(
    model: str,
    prompt: str | None = None,
    /,
    *,
    out: Path | None = None,
    svg: Path | None = None,
    last: int = 24,
    num_seqs: int = 1,
    system: str | None = None,
    raw: Flag = False,
    quiet: Flag = False,
    as_json: JsonFlag = False,
    sampling: SeveralSampling = _SAMPLING,
    engine: EngineSettings = _ENGINE,
) -> None:
    """Answer a prompt, and write down when each step reached each stage.

    Args:
        model: A built-in name, a directory, a .gguf file, a Hugging Face id, or sim:count.
        prompt: The prompt. What is piped in is put below it, or is the prompt.
        out: File for a Chrome trace of the last 4096 steps; open it at ui.perfetto.dev.
        svg: File for a picture of the last steps.
        last: How many steps the picture shows.
        num_seqs: Submit the prompt this many times at once.
        system: A system message before the prompt.
        raw: Give the prompt to the model as it is, without its chat template.
        quiet: Show neither how far fetching and loading are, nor the summary.
        as_json: Print the summary as one JSON object; then no file need be written.
        sampling: How tokens are chosen.
        engine: How the model runs.
    """
    if out is None and svg is None and not as_json:
        raise ConfigError("there is nowhere to write to: give --out, --svg or both", param="out")
    await asyncio.to_thread(_check, out, svg, last=last, num_seqs=num_seqs)
    params = sampling.params()
    text = await read_prompt(prompt)
    timeline: Timeline | None = None
    try:
        async with opened(
            model, _Traced(**asdict(engine)), quiet=quiet or as_json
        ) as opened_engine:
            timeline = opened_engine.timeline
            send = partial(submit, opened_engine, text, params, system=system, raw=raw)
            for stream in [send() for _ in range(num_seqs)]:
                await stream
            await opened_engine.wait_idle()
    except BaseException:
        # Steps that failed, and an answer that Ctrl-C cut short, are worth a look, too.
        if timeline is not None and timeline.steps:
            problems = await asyncio.to_thread(_write, timeline, out, svg, last)
            for problem in problems:
                note(problem)  # what went wrong first is what the status tells
            if not (quiet or as_json):
                _tell_written(out, svg, problems)
        raise
    problems = await asyncio.to_thread(_write, timeline, out, svg, last)
    if as_json:
        show_json(_told(model, timeline, out, svg))
    elif not quiet:
        note(timeline.summary())
        _tell_written(out, svg, problems)
    if problems:
        raise ConfigError("; ".join(problems))


def _tell_written(out: Path | None, svg: Path | None, problems: list[str]) -> None:
    for path, what in ((out, "open it at ui.perfetto.dev"), (svg, "open it in a browser")):
        if path is not None and not problems:
            note(f"wrote {path}: {what}")


def _told(model: str, timeline: Timeline, out: Path | None, svg: Path | None) -> dict[str, Any]:
    metrics = timeline.metrics()
    files = {"out": None if out is None else str(out), "svg": None if svg is None else str(svg)}
    return {"model": model, **files, **asdict(metrics), "idle_share": metrics.idle_share}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced(EngineSettings):
    """An engine that keeps its timeline."""

    timeline: bool = True


def _check(out: Path | None, svg: Path | None, *, last: int, num_seqs: int) -> None:
    """Find what is wrong before a model is loaded."""
    for flag, number in (("--last", last), ("--num-seqs", num_seqs)):
        if number < 1:
            raise ConfigError(f"{flag} must be at least 1, not {number}")
    for path in (out, svg):
        if path is not None:
            check_writable(path)
    if out is not None and svg is not None and os.path.realpath(out) == os.path.realpath(svg):
        raise ConfigError(f"--out and --svg must be two files, not both {out}", param="out")


def _write(timeline: Timeline, out: Path | None, svg: Path | None, last: int) -> list[str]:
    """Write each file that was asked for; return what went wrong, if anything did."""
    problems = []
    files = ((out, timeline.save_chrome_trace), (svg, partial(timeline.save_svg, last=last)))
    for path, save in files:
        if path is not None:
            try:
                save(path)
            except OSError as error:
                problems.append(f"cannot write {path}: {error.strerror}")
    return problems
