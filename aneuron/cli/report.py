"""What `aneuron run` tells beside the text: how fast it was, and all of it as JSON.

Comes in: a `Completion` and the engine that made it. Goes out: dicts for `--json`, and lines
on stderr for `--stats`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from aneuron.cli.terminal import note

if TYPE_CHECKING:
    from aneuron.engine import Engine
    from aneuron.outputs import Completion

__all__ = ["answer", "facts", "print_stats"]


def facts(model: str, engine: Engine, completion: Completion, load_s: float) -> dict[str, Any]:
    """Return what ran, how long it took, and the counts of the engine."""
    stats = engine.stats()
    return {
        "model": model,
        "device": engine.device.name,
        "dtype": engine.spec.dtype,
        "timing": {"load_s": load_s, **asdict(completion.timing), **_rates(completion)},
        "stats": {
            **asdict(stats),
            "used_blocks": stats.used_blocks,
            "decode_async_share": stats.decode_async_share,
        },
    }


def _rates(completion: Completion) -> dict[str, float | None]:
    """Return tokens per second: over decoding (from first to last token), and over the call."""
    num_tokens, timing = completion.usage.completion_tokens, completion.timing
    decode_s = timing.total_s - (timing.ttft_s or 0.0)
    num_decoded = num_tokens - len(completion.choices)  # each has its first from the prompt
    has_decoded = num_decoded > 0 and decode_s > 0
    return {
        "decode_tokens_per_s": num_decoded / decode_s if has_decoded else None,
        "tokens_per_s": num_tokens / timing.total_s if timing.total_s > 0 else None,
    }


def answer(completion: Completion) -> dict[str, Any]:
    """Return the answer: the first choice's at the top, and all in `choices`."""
    usage = completion.usage
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "choices": [asdict(choice) for choice in completion.choices],
        "usage": {**asdict(usage), "total_tokens": usage.total_tokens},
    }


def print_stats(completion: Completion, told: dict[str, Any]) -> None:
    """Tell on stderr what `facts` returned, a line each."""
    timing, stats, usage = told["timing"], told["stats"], completion.usage
    ends = ", ".join(choice.finish_reason for choice in completion.choices)
    breaks = [
        f"{reason} {entry['count']} ({entry['seconds']:.3f} s)"
        for reason, entry in stats["breaks"].items()
    ]
    lines = {
        "model": told["model"],
        "device": told["device"],
        "dtype": told["dtype"],
        "load": f"{timing['load_s']:.2f} s",
        "prompt tokens": f"{usage.prompt_tokens} ({usage.cached_tokens} cached)",
        "new tokens": f"{usage.completion_tokens} ({ends})",
        "time to first token": _number(timing["ttft_s"], "s", digits=3),
        "decoding": _number(timing["decode_tokens_per_s"], "tokens/s", digits=1),
        "whole call": _number(timing["tokens_per_s"], "tokens/s", digits=1),
        **{name: stats[name] for name in ("steps", "async_steps", "sync_fallback_steps")},
        "decode_async_share": f"{stats['decode_async_share']:.3f}",
        "breaks": ", ".join(breaks) or "none",
        "preemptions": stats["preemptions"],
    }
    note("\n" + "\n".join(f"{name:<20} {value}" for name, value in lines.items()))


def _number(value: float | None, unit: str, *, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f} {unit}"
