"""What a simulation found, for people: a table with what was simulated below it, a picture.

Comes in: the outcomes of each carry. Goes out: text on stdout, an SVG file.
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aneuron.cli.bench.common import show_table
from aneuron.cli.simulate.fleet import num_processes
from aneuron.cli.simulate.picture import Curves, picture
from aneuron.cli.terminal import check_writable
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from aneuron.cli.simulate.replica import Outcome, Setup

__all__ = ["Report", "writable"]

_MANY = 16  # replicas


class Report(NamedTuple):
    """What was simulated, and what came of it.

    Attributes:
        load: the load, in words.
        setup: of each replica; the carry is one of several.
        outcomes: by carry, one per replica.
        took_s: real seconds.
    """

    load: str
    setup: Setup
    outcomes: Mapping[str, Sequence[Outcome]]
    took_s: float

    @property
    def num_replicas(self) -> int:
        """Replicas of the fleet."""
        return len(next(iter(self.outcomes.values())))

    @property
    def title(self) -> str:
        """One line on the fleet and its load."""
        count = self.num_replicas
        replicas = "1 replica" if count == 1 else f"{count} replicas"
        return (
            f"{replicas}, profile {self.setup.profile}, num_seqs {self.setup.num_seqs}, {self.load}"
        )

    def show(self, result: Mapping[str, Mapping[str, Any]]) -> None:
        """Print the figures as a table, a column for each carry: rows would be too wide.

        Args:
            result: as `--json` has it.
        """
        every = list(result.values())
        counts = [name for name in ("submitted", "completed", "refused") if name in every[0]]
        rows = [(name, *(one[name] for one in every)) for name in counts]
        for kind, p in product(("ttft_ms", "tpot_ms"), ("p50", "p99")):
            rows.append((f"{kind[:4]} {p} ms", *(_or_dash(one[kind][p]) for one in every)))
        for label, name, shown in (
            ("tokens/s", "tokens_per_s", _or_dash),
            ("idle", "idle_share", _percent),
        ):
            rows.append((label, *(shown(one[name]) for one in every)))
            spreads = [one["per_replica"][name] for one in every]
            rows.extend(
                (f"  replica {p}", *(shown(one[p]) for one in spreads)) for p in self._spread
            )
        show_table(self.title, ("", *result), rows, loop="virtual time", facts=self._facts())

    @property
    def _spread(self) -> tuple[str, ...]:
        """What is shown of how replicas differ: of few the ends, of many what is common."""
        if self.num_replicas == 1:
            return ()
        return ("min", "max") if self.num_replicas < _MANY else ("p50", "p99")

    def _facts(self) -> Iterator[str]:
        setup, every = self.setup, [one for row in self.outcomes.values() for one in row]
        yield (
            f"each replica: {setup.num_kv_blocks} KV blocks of {setup.block_size}, at most "
            f"{setup.max_num_batched_tokens} prompt tokens a step, no prefix caching"
        )
        for carry, row in self.outcomes.items():
            if left := sum(one.waiting for one in row):
                yield f"{carry}: waiting for a seat at the end: {left}"
            if preempted := sum(one.preemptions for one in row):
                yield f"{carry}: preemptions: {preempted}"
        seconds, processes = sum(one.seconds for one in every), num_processes(len(every))
        yield (
            f"{sum(one.steps for one in every)} steps, {seconds:.0f} simulated seconds, took "
            f"{self.took_s:.1f} s in {processes} process{'es' if processes > 1 else ''}"
        )

    def save_picture(self, path: Path) -> None:
        """Write the distributions as SVG.

        Raises:
            ConfigError: it cannot be written.
        """
        pooled = [
            Curves(
                title,
                {
                    carry: np.concatenate([getattr(one, name) for one in row])
                    for carry, row in self.outcomes.items()
                },
            )
            for title, name in (
                ("time to first token", "ttft_s"),
                ("time per output token", "tpot_s"),
            )
        ]
        try:
            path.write_text(picture(self.title, pooled), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--svg: cannot write {path}: {error.strerror}") from error


def writable(name: str) -> Path:
    """Return the picture's path; find out before the simulation whether it can be written.

    Args:
        name: as typed: a path would not show that it names a folder, as `pictures/` does.

    Raises:
        ConfigError: it cannot.
    """
    path = Path(name)
    try:
        if os.path.basename(name) in ("", ".", ".."):  # noqa: PTH119
            raise ConfigError(f"cannot write {name}: it names a folder")
        check_writable(path)
    except ConfigError as error:
        raise ConfigError(f"--svg: {error}", param="--svg") from error
    return path


def _or_dash(value: float | None) -> float | str:
    return "-" if value is None else value


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"
