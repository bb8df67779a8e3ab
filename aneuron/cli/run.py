"""`aneuron run`: one prompt, one answer or several.

Comes in: a model's name, a prompt from the arguments, from stdin or from both. Goes out: the
answer's text on stdout as it comes, several with a blank line between, or one JSON object;
headings and statistics on stderr.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from aneuron.cli.loading import opened
from aneuron.cli.options import EngineSettings, Flag, JsonFlag, SeveralSampling
from aneuron.cli.report import answer, facts, print_stats
from aneuron.cli.stdin import Stdin
from aneuron.cli.terminal import note
from aneuron.cli.ticker import StatsSettings
from aneuron.errors import InvalidRequest

if TYPE_CHECKING:
    from aneuron.engine import Engine
    from aneuron.outputs import Completion
    from aneuron.params import SamplingParams
    from aneuron.stream import TokenStream

__all__ = ["read_prompt", "run", "show", "submit"]

_PATIENCE_S = 5.0  # for a stdin that may have more of a prompt, or be open by accident
_ENGINE = EngineSettings()
_SAMPLING = SeveralSampling()
_STATS = StatsSettings()


async def run(
    model: str,
    prompt: str | None = None,
    /,
    *,
    system: str | None = None,
    raw: Flag = False,
    stats: StatsSettings = _STATS,
    as_json: JsonFlag = False,
    quiet: Flag = False,
    sampling: SeveralSampling = _SAMPLING,
    engine: EngineSettings = _ENGINE,
) -> None:
    """Answer one prompt; the text comes to stdout as it is made.

    Of several answers (--n) it comes when all have ended, with a blank line between.

    Args:
        model: A built-in name, a directory, a .gguf file, a Hugging Face id, or sim:count.
        prompt: The prompt. What is piped in is put below it, or is the prompt.
        system: A system message before the prompt.
        raw: Give the prompt to the model as it is, without its chat template.
        stats: What is told of the engine.
        as_json: Print one JSON object in place of the text.
        quiet: Do not show how far fetching and loading are, nor headings.
        sampling: How tokens are chosen.
        engine: How the model runs.
    """
    params = sampling.params()
    stats.check()
    text = await read_prompt(prompt)
    started_s = time.monotonic()
    async with opened(model, engine, quiet=quiet or as_json) as opened_engine:
        load_s = time.monotonic() - started_s
        with stats.ticker(opened_engine):
            stream = submit(opened_engine, text, params, system=system, raw=raw)
            # Of several, the tokens come mixed: they are shown when all have ended.
            completion = await (stream if as_json or params.n > 1 else show(stream))
            await opened_engine.wait_idle()
        told = facts(model, opened_engine, completion, load_s)
    if as_json:
        print(json.dumps(answer(completion) | told, ensure_ascii=False), flush=True)
        return
    if params.n > 1:
        _print_choices(completion, quiet=quiet)
    if stats.stats:
        print_stats(completion, told)


async def read_prompt(argument: str | None) -> str:
    """Return the prompt: the argument, what is piped in, or both with a blank line between.

    Raises:
        InvalidRequest: there is neither.
    """
    stdin = Stdin()
    piped = ""
    if not stdin.is_terminal:
        try:
            piped = await stdin.read(patience_s=None if argument is None else _PATIENCE_S)
        except TimeoutError:
            note(f"nothing on stdin for {_PATIENCE_S:.0f} s: going on with the prompt alone")
    parts = [part for part in (argument, piped.rstrip("\r\n")) if part]
    if not parts:
        raise InvalidRequest(
            "there is no prompt: give it as an argument, or pipe it in", param="prompt"
        )
    return "\n\n".join(parts)


def submit(
    engine: Engine, prompt: str, params: SamplingParams, *, system: str | None, raw: bool
) -> TokenStream:
    """Submit a prompt: as a user's message where the model has a template, unless `raw`.

    Raises:
        InvalidRequest: a system message where no template takes it, or a wrong value.
    """
    # The simulated models' tokenizer has no template, so they are given plain text.
    if raw or getattr(engine.tokenizer, "chat_template", None) is None:
        if system is not None:
            reason = "excludes --raw" if raw else "needs a model with a chat template"
            raise InvalidRequest(f"--system {reason}", param="system")
        return engine.generate(prompt, params)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return engine.chat([*messages, {"role": "user", "content": prompt}], params)


async def show(stream: TokenStream) -> Completion:
    """Write the answer's text to stdout as it comes, and end its line."""
    has_begun = False
    try:
        async with stream:
            async for token in stream:
                print(token, end="", flush=True)
                has_begun = True
    finally:
        if has_begun:
            print(flush=True)
    return await stream


def _print_choices(completion: Completion, *, quiet: bool) -> None:
    for one in completion.choices:
        if one.index:
            print(flush=True)
        if not quiet:
            note(f"== choice {one.index} ==")
        print(one.text, flush=True)
