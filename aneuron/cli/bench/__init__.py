"""`aneuron bench`: what the host costs, what of it is hidden, and what scheduling saves.

Comes in: the options of a benchmark. Goes out: a table on stdout, or with `--json` one JSON
object and nothing else. See docs/benchmarks.md for what each measures and how.
"""

from __future__ import annotations

from cyclopts import App

from aneuron.cli.bench.churn import churn
from aneuron.cli.bench.floor import floor
from aneuron.cli.bench.host import host
from aneuron.cli.bench.longprompt import longprompt
from aneuron.cli.bench.overlap import overlap
from aneuron.cli.bench.prefix import prefix

__all__ = ["bench"]

bench = App(name="bench", help="Measure the engine; docs/benchmarks.md says what and how.")
bench.command(host)
bench.command(floor)
bench.command(overlap)
bench.command(churn)
bench.command(prefix)
bench.command(longprompt)
