"""All replicas with all carries: as many processes as cores, and the figures of the whole.

Comes in: jobs, each a `Setup` and a load. Goes out: an `Outcome` of each, in their order, and
what they come to together.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from aneuron.cli.simulate.replica import run
from aneuron.cli.terminal import telling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.process import BaseProcess

    from aneuron.cli.simulate.load import Load
    from aneuron.cli.simulate.replica import Outcome, Setup

__all__ = ["figures", "num_processes", "percentiles_ms", "run_all"]


_SPREAD = ("min", "p50", "p99", "max")


def num_processes(num_jobs: int) -> int:
    """Return how many processes so many jobs are given: one per core, at most one per job."""
    allowed = getattr(os, "sched_getaffinity", None)  # not everywhere
    cores = len(allowed(0)) if allowed is not None else os.cpu_count() or 1
    return min(num_jobs, cores)


def run_all(
    jobs: Sequence[tuple[Setup, Load]],
    *,
    done: Callable[[int], None] = lambda _: None,
    tell_s: Callable[[float], None] | None = None,
    wait_s: Callable[[float], None] | None = None,
) -> list[Outcome]:
    """Simulate every job: several in other processes, a single one in this.

    Args:
        jobs: independent of each other.
        done: of several: called with the number of those that have ended.
        tell_s: of a single one: called now and then, in another thread, with the seconds
            simulated so far.
        wait_s: of several: likewise, with the seconds that they have taken so far.

    Raises:
        AneuronError: an engine failed.
        KeyboardInterrupt: Ctrl-C; the other processes are gone by then.
    """
    if len(jobs) == 1:
        return [run(*jobs[0], tell_s=tell_s)]
    started_s = monotonic()
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        num_processes(len(jobs)),
        mp_context=multiprocessing.get_context("spawn"),  # a fork would copy threads' locks
        initializer=_begin_worker,
    )
    try:
        with _deaf_children():
            futures = [pool.submit(run, *job) for job in jobs]
        with telling(lambda: monotonic() - started_s, wait_s):
            for number, one in enumerate(as_completed(futures), 1):
                one.result()  # an error ends the others now
                done(number)
    except BaseException:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()  # else closing the pool waits for what they do
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return [one.result() for one in futures]


@contextlib.contextmanager
def _deaf_children() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach, not even while they start.

    A blocked signal stays blocked in a child; here it comes through when all have started.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _begin_worker() -> None:
    """Leave Ctrl-C to the parent, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_follow, args=(parent,), name="aneuron-parent", daemon=True).start()


def _follow(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)  # in the middle of a simulation: nobody is there to take its result


def figures(outcomes: Sequence[Outcome], *, counts_refused: bool) -> dict[str, Any]:
    """Return what the replicas of one carry come to, as `--json` has it.

    Args:
        outcomes: one per replica.
        counts_refused: whether `refused` is among them.

    Returns:
        Beside the figures of the whole, `per_replica` has how they differ between replicas.
    """
    busy_s, idle_s = sum(one.busy_s for one in outcomes), sum(one.idle_s for one in outcomes)
    seconds = max(one.seconds for one in outcomes)
    result: dict[str, Any] = {
        "ttft_ms": percentiles_ms([one.ttft_s for one in outcomes]),
        "tpot_ms": percentiles_ms([one.tpot_s for one in outcomes]),
        "tokens_per_s": sum(one.tokens for one in outcomes) / seconds if seconds else None,
        "idle_share": idle_s / (busy_s + idle_s) if busy_s else None,
        "completed": sum(one.completed for one in outcomes),
        "submitted": sum(one.submitted for one in outcomes),
    }
    if counts_refused:
        result["refused"] = sum(one.refused for one in outcomes)
    result["per_replica"] = {
        "tokens_per_s": _spread([one.tokens / seconds for one in outcomes if seconds]),
        "idle_share": _spread(
            [one.idle_s / (one.busy_s + one.idle_s) for one in outcomes if one.busy_s]
        ),
    }
    return result


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(_SPREAD)
    low, middle, high, top = np.percentile(values, (0, 50, 99, 100))
    return {"min": float(low), "p50": float(middle), "p99": float(high), "max": float(top)}


def percentiles_ms(parts: Sequence[np.ndarray]) -> dict[str, float | None]:
    """Return p50 and p99 over all parts; None of nothing.

    Args:
        parts: float64 [n] each, seconds.
    """
    times_s = np.concatenate(parts)
    if not times_s.size:
        return {"p50": None, "p99": None}
    middle, high = np.percentile(times_s, (50, 99)) * 1e3
    return {"p50": float(middle), "p99": float(high)}
