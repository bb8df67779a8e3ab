from __future__ import annotations

import json
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from aneuron.cli.bench.rig.logits import LogitsClock, falling_logits, logits_model

if TYPE_CHECKING:
    from tests.cli.conftest import Command

sampling_module = import_module("aneuron.cli.bench.sampling")

SAMPLING = ("bench", "sampling", "--vocab-size=600,1000", "--num-seqs=1,5", "--rounds=3")
KINDS = ["greedy", "top_p", "penalties", "logprobs"]


def test_sampling_gives_a_row_for_each_vocabulary_and_number_of_sequences(
    aneuron: Command,
) -> None:
    ran = aneuron(*SAMPLING, "--json")
    assert (ran.status, ran.err) == (0, "")
    result = json.loads(ran.out)
    assert set(result) == {"threads", "rows"}
    assert result["threads"] == torch.get_num_threads()
    cases = [(row["vocab_size"], row["num_seqs"]) for row in result["rows"]]
    assert cases == [(600, 1), (600, 5), (1000, 1), (1000, 5)]
    for row in result["rows"]:
        mixed = ["mixed"] if row["num_seqs"] == 5 else []
        assert list(row["kinds"]) == [*KINDS, *mixed, "argmax"]
        for spread in row["kinds"].values():
            assert set(spread) == {"median_us", "p25_us", "p75_us"}
            assert 0 < spread["p25_us"] <= spread["median_us"] <= spread["p75_us"]


def test_sampling_compares_medians_within_a_row() -> None:
    times = {"greedy": 4.0, "top_p": 80.0, "penalties": 40.0, "logprobs": 7.0, "argmax": 2.5}
    row = sampling_module._row(600, 1, {kind: [us, us, 9 * us] for kind, us in times.items()})
    assert row["kinds"]["top_p"] == {"median_us": 80.0, "p25_us": 80.0, "p75_us": 400.0}
    assert row["mixed_over_dearest"] is None
    assert row["greedy_extra"] == {"us": 1.5, "ratio": 1.6}
    times["mixed"] = 88.0
    row = sampling_module._row(600, 4, {kind: [us, us] for kind, us in times.items()})
    assert row["mixed_over_dearest"] == pytest.approx(1.1)


# ── what is launched ────────────────────────────────────────────────────────────────────


def decodes(num_seqs: int, vocab_size: int = 600) -> dict[str, Any]:
    """By kind, a decode step: called, it runs; its first argument are its inputs."""
    model = logits_model(falling_logits(2 * num_seqs, vocab_size), 512)
    batches = sampling_module._batches(num_seqs)
    return {kind: sampling_module._decode_of(model, rows) for kind, rows in batches.items()}


def test_sampling_launches_what_the_rows_ask_for() -> None:
    steps = decodes(8)
    inputs = {kind: step.args[0] for kind, step in steps.items()}
    assert all(one.is_decode and one.num_reqs == 8 for one in inputs.values())
    assert all(one.positions.tolist() == [500] * 8 for one in inputs.values())
    assert [kind for kind, one in inputs.items() if not one.all_greedy] == ["top_p", "mixed"]
    asked = {
        kind: [
            None if samples is None else samples.tolist()
            for samples in (one.rule_samples, one.logprob_samples)
        ]
        for kind, one in inputs.items()
    }
    every = list(range(8))
    assert asked == {
        "greedy": [None, None],
        "top_p": [None, None],
        "penalties": [every, None],
        "logprobs": [None, every],
        "mixed": [[2, 6], [3, 7]],
    }
    tokens, told, _ = steps["mixed"]()
    assert len(tokens) == 8
    assert told.ids.shape == (2, 5)


def test_sampling_steps_may_be_run_again() -> None:
    steps = decodes(4)
    best = falling_logits(8, 600)[:4].argmax(dim=-1).tolist()
    for _ in range(3):
        assert steps["greedy"]().tolist() == best
        steps["penalties"]()  # changes its logits in place: a copy
        assert steps["logprobs"]().token_ids.tolist() == best


def test_sampling_counts_the_tokens_of_prompt_and_answer() -> None:
    """After a few hundred likely tokens, penalties leave the likeliest one that is new."""
    prepared = torch.linspace(9.0, -9.0, 1000).repeat(2, 1)
    model = logits_model(prepared, 512)
    (kind,) = (one for one in sampling_module._batches(1)["penalties"])
    request = sampling_module._request(0, kind, 32, 1000)
    step = sampling_module._decode_of(model, [kind])
    past, answer = set(request.token_ids.tolist()), request.token_ids[250:]
    assert len(request.token_ids) == 500
    token = int(step())
    logits = prepared[0].numpy().copy()
    seen = np.array(sorted(past))
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.1, logits[seen] * 1.1)
    counts = np.bincount(answer, minlength=1000)
    # The step before gave a token as well, by the same rule.
    first = int((logits - 0.5 * counts - 0.5 * (counts > 0)).argmax())
    if first not in past:
        logits[first] /= 1.1
    counts[first] += 1
    assert token == int((logits - 0.5 * counts - 0.5 * (counts > 0)).argmax())


# ── logits made before ──────────────────────────────────────────────────────────────────


def test_the_clock_starts_when_logits_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = logits_model(falling_logits(2, 600), 512).decoder
    assert isinstance(clock, LogitsClock)
    now_s = iter([5.0, 7.5])
    counter = SimpleNamespace(perf_counter=lambda: next(now_s))
    monkeypatch.setattr("aneuron.cli.bench.rig.logits.time", counter)
    assert clock.us_after(lambda: clock.logits(torch.zeros(1, 2))) == 2.5e6


def test_logits_fall_as_those_of_a_model() -> None:
    logits = falling_logits(3, 49_152)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, falling_logits(3, 49_152))
    assert len(set(logits.argmax(dim=-1).tolist())) == 3
    values = logits.sort(dim=-1, descending=True).values
    assert torch.equal(values[0], values[2])
    assert (values[0, 0] - values[0, 99]).item() == pytest.approx(7.39)
    weights = (values[0] / 0.8).softmax(dim=-1).cumsum(dim=-1)
    assert 5 <= int((weights < 0.95).sum()) <= 50  # a model's: 11 in the median


def test_small_vocabularies_have_the_same_ends() -> None:
    values = falling_logits(1, 600).sort(dim=-1, descending=True).values[0]
    assert (values[0] - values[-1]).item() == pytest.approx(36.71)
    assert (values[0] - values[1]).item() == pytest.approx(0.82)


# ── the command ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--vocab-size=499",), "--vocab-size must be at least 500, not 499"),
        (("--vocab-size=500001",), "--vocab-size must be at most 500000, not 500001"),
        (("--vocab-size=large",), "--vocab-size"),
        (("--num-seqs=1,0",), "--num-seqs"),
        (("--num-seqs=257",), "--num-seqs must be at most 256, not 257"),
        (("--rounds=1",), "--rounds must be at least 2, not 1"),
    ],
)
def test_a_bad_option_is_named(aneuron: Command, arguments: tuple[str, ...], named: str) -> None:
    result = aneuron("bench", "sampling", *arguments)
    assert result.status == 2
    assert named in result.err + result.out
    assert "Traceback" not in result.err


def test_the_table_says_what_it_was_measured_on(aneuron: Command) -> None:
    out = aneuron(*SAMPLING).out
    assert out.startswith("From logits to ids")
    assert "3 rounds of each" in out
    assert f"{torch.get_num_threads()} threads; load" in out.replace("\n", " ")
