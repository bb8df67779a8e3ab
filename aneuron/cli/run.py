"""`aneuron run`: one prompt, one answer.

Comes in: a model's name, a prompt from the arguments, from stdin or from both. Goes out: the
answer's text on stdout as it comes, or one JSON object; statistics on stderr.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from aneuron.cli.options import EngineSettings, Sampling, opened
from aneuron.cli.stdin import Stdin
from aneuron.cli.terminal import note
from aneuron.errors import InvalidRequest

if TYPE_CHECKING:
    from aneuron.engine import Engine
    from aneuron.outputs import Completion
    from aneuron.params import SamplingParams
    from aneuron.stream import TokenStream

__all__ = ["Flag", "read_prompt", "run", "show", "submit"]

_PATIENCE_S = 5.0  # for a stdin that may have more of a prompt, or be open by accident
_ENGINE = EngineSettings()
_SAMPLING = Sampling()
Flag = Annotated[bool, Parameter(negative="")]


async def run(
    model: str,
    prompt: str | None = None,
    /,
    *,
    system: str | None = None,
    raw: Flag = False,
    stats: Flag = False,
    as_json: Annotated[Flag, Parameter(name="--json")] = False,
    quiet: Flag = False,
    sampling: Sampling = _SAMPLING,
    engine: EngineSettings = _ENGINE,
) -> None:
    """Answer one prompt; the text comes to stdout as it is made.

    Args:
        model: A built-in name, a directory, a .gguf file, a Hugging Face id, or sim:count.
        prompt: The prompt. What is piped in is put below it, or is the prompt.
        system: A system message before the prompt.
        raw: Give the prompt to the model as it is, without its chat template.
        stats: Say at the end, on stderr, how fast it was.
        as_json: Print one JSON object in place of the text.
        quiet: Do not show how far fetching and loading are.
        sampling: How tokens are chosen.
        engine: How the model runs.
    """
    params = sampling.params()
    text = await read_prompt(prompt)
    started_s = time.monotonic()
    async with opened(model, engine, quiet=quiet or as_json) as opened_engine:
        load_s = time.monotonic() - started_s
        stream = submit(opened_engine, text, params, system=system, raw=raw)
        completion = await (stream if as_json else show(stream))
        await opened_engine.wait_idle()
        facts = _facts(model, opened_engine, completion, load_s)
    if as_json:
        print(json.dumps(_answer(completion) | facts, ensure_ascii=False), flush=True)
    elif stats:
        _print_stats(completion, facts)


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


# ── what it did ─────────────────────────────────────────────────────────────────────────


def _facts(model: str, engine: Engine, completion: Completion, load_s: float) -> dict[str, Any]:
    stats = engine.stats()
    return {
        "model": model,
        "device": engine.device.name,
        "dtype": engine.spec.dtype,
        "timing": {"load_s": load_s, **asdict(completion.timing), **_rates(completion)},
        "stats": {**asdict(stats), "decode_async_share": stats.decode_async_share},
    }


def _rates(completion: Completion) -> dict[str, float | None]:
    """Return tokens per second: over decoding (from first to last token), and over the call."""
    num_tokens, timing = completion.usage.completion_tokens, completion.timing
    decode_s = timing.total_s - (timing.ttft_s or 0.0)
    has_decoded = num_tokens > 1 and decode_s > 0
    return {
        "decode_tokens_per_s": (num_tokens - 1) / decode_s if has_decoded else None,
        "tokens_per_s": num_tokens / timing.total_s if timing.total_s > 0 else None,
    }


def _answer(completion: Completion) -> dict[str, Any]:
    usage = completion.usage
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "usage": {**asdict(usage), "total_tokens": usage.total_tokens},
    }


def _print_stats(completion: Completion, facts: dict[str, Any]) -> None:
    timing, stats = facts["timing"], facts["stats"]
    breaks = [
        f"{reason} {entry['count']} ({entry['seconds']:.3f} s)"
        for reason, entry in stats["breaks"].items()
    ]
    lines = {
        "model": facts["model"],
        "device": facts["device"],
        "dtype": facts["dtype"],
        "load": f"{timing['load_s']:.2f} s",
        "prompt tokens": completion.usage.prompt_tokens,
        "new tokens": f"{completion.usage.completion_tokens} ({completion.finish_reason})",
        "time to first token": _number(timing["ttft_s"], "s", digits=3),
        "decoding": _number(timing["decode_tokens_per_s"], "tokens/s", digits=1),
        "whole call": _number(timing["tokens_per_s"], "tokens/s", digits=1),
        **{name: stats[name] for name in ("steps", "async_steps", "sync_fallback_steps")},
        "decode_async_share": f"{stats['decode_async_share']:.3f}",
        "breaks": ", ".join(breaks) or "none",
    }
    note("\n" + "\n".join(f"{name:<20} {value}" for name, value in lines.items()))


def _number(value: float | None, unit: str, *, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f} {unit}"
