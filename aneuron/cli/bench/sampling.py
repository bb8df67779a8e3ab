"""`aneuron bench sampling`: what a decode step costs from logits to ids.

Comes in: sizes of vocabularies, numbers of rows. Goes out: microseconds of the executable after
its forward pass, for rows that ask for little or much, and for all of them in one batch. The
executables are those of the engine, over a decoder whose logits were made before; what they are
launched with is prepared by an `InputBatch`, as for the carry `resident`.
"""

from __future__ import annotations

from functools import partial
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from aneuron.cli.bench.common import (
    JsonFlag,
    check_number,
    parse_counts,
    show_json,
    show_table,
    tell,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.models.torch_model import TorchModel
    from aneuron.plans import NewRequest, SchedulerOutput

__all__ = ["sampling"]

_KINDS: dict[str, dict[str, Any]] = {  # what a row asks for, beside its kind's name
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "penalties": {
        "temperature": 0.0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
    },
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}
_PROMPT_TOKENS, _KNOWN_TOKENS = 250, 500  # of a prompt; and with the answer so far
_MAX_MODEL_LEN = 512
_MAX_VOCAB_SIZE, _MAX_ROWS = 500_000, 256  # logits of 0.5 GB, twice
_SEED = 0


def sampling(
    *,
    vocab_size: str = "49152,151936",
    num_seqs: str = "1,8,32",
    rounds: int = 40,
    as_json: JsonFlag = False,
) -> None:
    """Measure a decode step from logits to ids, in microseconds.

    Args:
        vocab_size: Sizes of vocabularies, separated by commas.
        num_seqs: Numbers of rows, separated by commas; from 4 on there is a mixed batch.
        rounds: Rounds, of one step of each kind; the medians count.
        as_json: Print one JSON object in place of the table.
    """
    sizes = parse_counts("--vocab-size", vocab_size, at_most=_MAX_VOCAB_SIZE)
    check_number("--vocab-size", min(sizes), at_least=_KNOWN_TOKENS)
    counts = parse_counts("--num-seqs", num_seqs, at_most=_MAX_ROWS)
    check_number("--rounds", rounds, at_least=2)
    rows = []
    for size in sizes:
        for count in counts:
            tell(f"vocabulary {size}, {count} sequences")
            rows.append(_row(size, count, _measure(size, count, rounds)))
    import torch

    threads = torch.get_num_threads()
    if as_json:
        show_json({"threads": threads, "rows": rows})
    else:
        _show(rows, rounds, f"torch {torch.__version__}, {threads} threads")


# ── what is launched ────────────────────────────────────────────────────────────────────


def _batches(num_seqs: int) -> dict[str, list[dict[str, Any]]]:
    """Return what each row of each batch asks for; a mixed one has rows of all kinds."""
    batches = {kind: [asked] * num_seqs for kind, asked in _KINDS.items()}
    kinds = list(_KINDS.values())
    if num_seqs >= len(kinds):
        batches["mixed"] = [kinds[row % len(kinds)] for row in range(num_seqs)]
    return batches


def _decode_of(model: TorchModel, rows: list[dict[str, Any]]) -> Callable[[], Any]:
    """Return a decode step of these rows, which may be run any number of times.

    The model's slots are its own; the step before this one, run here, has written them.
    """
    from aneuron.batch import InputBatch
    from aneuron.config import BatchShape, EngineConfig

    config = EngineConfig(max_num_seqs=len(rows), max_num_batched_tokens=max(512, len(rows)))
    shape = BatchShape.of(config, _MAX_MODEL_LEN)
    width = _MAX_MODEL_LEN // shape.block_size
    model = model.with_kv(len(rows) * width, shape.block_size, shape.num_slots)
    batch = InputBatch(shape, slots_on_device=True, tokens_on_device=True)
    new = [_request(slot, asked, width, model.spec.vocab_size) for slot, asked in enumerate(rows)]
    prefill, decode = _plans(tuple(new))
    batch.update(prefill)
    inputs = batch.prepare(prefill).inputs
    model.executable(inputs)(inputs, None)
    batch.advance(prefill)
    batch.update(decode)
    inputs = batch.prepare(decode).inputs
    return partial(model.executable(inputs), inputs, None)


def _request(slot: int, asked: dict[str, Any], width: int, vocab_size: int) -> NewRequest:
    """Return a request that resumes: all that is known of it but one token is computed."""
    import numpy as np

    from aneuron.params import SamplingParams
    from aneuron.plans import NewRequest

    known = np.random.default_rng((_SEED, slot)).integers(vocab_size, size=_KNOWN_TOKENS)
    return NewRequest(
        request_id=slot,
        slot=slot,
        token_ids=known.astype(np.int32),
        prompt_len=_PROMPT_TOKENS,
        block_ids=np.arange(1 + slot * width, 1 + (slot + 1) * width, dtype=np.int32),
        params=SamplingParams(**asked),
        seed=slot,
        num_computed=_KNOWN_TOKENS - 1,
    )


def _plans(new: tuple[NewRequest, ...]) -> list[SchedulerOutput]:
    """Return the step that the requests join with, and a decode of all of them."""
    import numpy as np

    from aneuron.plans import SchedulerOutput

    slots, none = np.arange(len(new)), np.zeros(0, np.int64)
    return [
        SchedulerOutput(
            step_id=step_id,
            is_decode=is_decode,
            request_ids=slots,
            slots=slots,
            num_scheduled=np.ones(len(new), np.int32),
            new_requests=() if is_decode else new,
            removed_slots=(),
            ending_slots=(),
            forks=(),
            block_slots=none,
            block_columns=none,
            block_ids=none.astype(np.int32),
        )
        for step_id, is_decode in ((1, False), (2, True))
    ]


# ── measuring ───────────────────────────────────────────────────────────────────────────


def _measure(vocab_size: int, num_seqs: int, rounds: int) -> dict[str, list[float]]:
    """Return microseconds of each kind of step, and of argmax alone, a round each."""
    import torch

    from aneuron.cli.bench.rig.logits import LogitsClock, falling_logits, logits_model

    # As many as are computed: rows are padded, at most to twice their number.
    model = logits_model(falling_logits(2 * num_seqs, vocab_size), _MAX_MODEL_LEN)
    clock = model.decoder
    assert isinstance(clock, LogitsClock)
    hidden = torch.zeros(num_seqs, model.config.hidden_size)

    def argmax() -> torch.Tensor:
        with torch.inference_mode():
            return clock.logits(hidden).argmax(dim=-1).to(torch.int32)

    steps = {kind: _decode_of(model, rows) for kind, rows in _batches(num_seqs).items()}
    steps["argmax"] = argmax
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(rounds):
        for kind, step in steps.items():
            step()  # as in steady decode, where a step follows another of its kind
            times[kind].append(clock.us_after(step))
    return times


def _row(vocab_size: int, num_seqs: int, times: dict[str, list[float]]) -> dict[str, Any]:
    kinds = {kind: _spread(took) for kind, took in times.items()}
    medians = {kind: spread["median_us"] for kind, spread in kinds.items()}
    dearest_us = max(medians[kind] for kind in _KINDS)
    return {
        "vocab_size": vocab_size,
        "num_seqs": num_seqs,
        "kinds": kinds,
        "mixed_over_dearest": medians["mixed"] / dearest_us if "mixed" in medians else None,
        "greedy_extra": {
            "us": medians["greedy"] - medians["argmax"],
            "ratio": medians["greedy"] / medians["argmax"],
        },
    }


def _spread(times_us: list[float]) -> dict[str, float]:
    low_us, _, high_us = quantiles(times_us, n=4, method="inclusive")
    return {"median_us": median(times_us), "p25_us": low_us, "p75_us": high_us}


def _show(rows: list[dict[str, Any]], rounds: int, engine: str) -> None:
    """Print one line for each kind of step."""
    lines: list[tuple[Any, ...]] = []
    for row in rows:
        case: tuple[Any, ...] = (row["vocab_size"], row["num_seqs"])
        for kind, spread in row["kinds"].items():
            over = {"mixed": row["mixed_over_dearest"], "greedy": row["greedy_extra"]["ratio"]}
            lines.append((*case, kind, *spread.values(), over.get(kind, "")))
            case = ("", "")
    columns = ("vocabulary", "rows", "asks for", "median us", "p25", "p75", "ratio")
    facts = [
        f"{rounds} rounds of each",
        "ratio: mixed over the dearest kind; greedy over argmax alone",
    ]
    show_table("From logits to ids, in a decode step", columns, lines, loop=engine, facts=facts)
