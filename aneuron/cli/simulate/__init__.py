"""`aneuron simulate`: the same scheduler and runner on virtual time, to plan a fleet.

Comes in: a latency profile, a load, a number of replicas. Goes out: percentiles of time to
first token and time per output token, throughput and idle share, for each token carry, as a
table or JSON, and a picture. See docs/capacity.md for what is modelled.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from time import monotonic

from aneuron.cli.bench.common import JsonFlag, ProfileName, check_number, show_json, tell
from aneuron.cli.simulate.fleet import figures, run_all
from aneuron.cli.simulate.options import LoadOptions, ReplicaOptions, Whole, parse_carry
from aneuron.cli.simulate.report import Report, writable

__all__ = ["simulate"]

_MAX_REPLICAS = 1024
_LOAD = LoadOptions()
_REPLICA = ReplicaOptions()


def simulate(
    *,
    profile: ProfileName = "micro",
    replicas: Whole = 1,
    carry: str = "resident",
    svg: str | None = None,
    as_json: JsonFlag = False,
    load: LoadOptions = _LOAD,
    engine: ReplicaOptions = _REPLICA,
) -> None:
    """Tell what a fleet would give its users, from a profile's times, on virtual time.

    Args:
        profile: A latency profile; its programs' times.
        replicas: Engines that requests are dealt to in turn.
        carry: How tokens travel from step to step: resident, handoff, host or all.
        svg: File for a picture of the distributions.
        as_json: Print one JSON object in place of the table.
        load: What comes to the fleet.
        engine: The settings of each replica's engine.
    """
    started_s = monotonic()
    check_number("--replicas", replicas, at_most=_MAX_REPLICAS)
    carries = parse_carry(carry)
    picture = None if svg is None else writable(svg)
    requests = load.load()
    setup = engine.setup(profile, requests, carry=carries[0], duration_s=load.duration_s)
    jobs = [
        (replace(setup, carry=one), requests.share(number, replicas))
        for one in carries
        for number in range(replicas)
    ]
    tell(f"simulating {load}")
    tell_s = partial(_tell_time, setup.duration_s) if sys.stderr.isatty() else None
    wait_s = partial(_tell_wait, len(jobs)) if sys.stderr.isatty() else None
    tell_done = partial(_tell_done, len(jobs))
    done = iter(run_all(jobs, done=tell_done, tell_s=tell_s, wait_s=wait_s))
    outcomes = {one: [next(done) for _ in range(replicas)] for one in carries}
    report = Report(str(load), setup, outcomes, monotonic() - started_s)
    counts_refused = engine.max_waiting is not None
    result = {one: figures(row, counts_refused=counts_refused) for one, row in outcomes.items()}
    if picture is not None:
        report.save_picture(picture)
    if as_json:
        show_json(result)
    else:
        report.show(result)


def _tell_done(num_jobs: int, number: int) -> None:
    tell(f"{number} of {num_jobs} simulations have ended")


def _tell_wait(num_jobs: int, elapsed_s: float) -> None:
    tell(f"{num_jobs} simulations, {elapsed_s:.0f} s so far")


def _tell_time(duration_s: float | None, time_s: float) -> None:
    end = "" if duration_s is None else f" of {duration_s:.0f}"
    tell(f"{time_s:.0f}{end} s simulated")
