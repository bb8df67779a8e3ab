"""`aneuron bench`: what host, sampling and server cost, what is hidden, what scheduling saves.

Comes in: the options of a benchmark. Goes out: a table on stdout, or with `--json` one JSON
object and nothing else. See docs/benchmarks.md for what each measures and how.
"""

from __future__ import annotations

from cyclopts import App

from aneuron.cli.bench.churn import churn
from aneuron.cli.bench.floor import floor
from aneuron.cli.bench.grammar import grammar
from aneuron.cli.bench.host import host
from aneuron.cli.bench.longprompt import longprompt
from aneuron.cli.bench.lookup import lookup
from aneuron.cli.bench.overlap import overlap
from aneuron.cli.bench.prefix import prefix
from aneuron.cli.bench.processor.peers import peers
from aneuron.cli.bench.processor.quality import quality
from aneuron.cli.bench.processor.throughput import throughput
from aneuron.cli.bench.sampling import sampling
from aneuron.cli.bench.server.serve import serve

__all__ = ["bench"]

bench = App(name="bench", help="Measure the engine; docs/benchmarks.md says what and how.")
bench.command(host)
bench.command(floor)
bench.command(overlap)
bench.command(churn)
bench.command(prefix)
bench.command(longprompt)
bench.command(sampling)
bench.command(grammar)
bench.command(lookup)
bench.command(throughput)
bench.command(quality)
bench.command(peers)
bench.command(serve)
