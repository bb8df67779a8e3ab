"""`aneuron bench serve`: open-loop load on a server that speaks the OpenAI API.

Comes in: a URL, or what to start, and a load. Goes out: the figures of vLLM's `bench serve`, of
this server or of the floor beside it; servers that are compared take turns, run by run.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path  # noqa: TC003  (the command line reads the annotation)
from typing import TYPE_CHECKING, Any

from aneuron.cli.bench.common import (
    Flag,
    JsonFlag,
    default_loop,
    run_on,
    show_json,
    show_table,
    tell,
)
from aneuron.cli.bench.server.options import (
    LoadOptions,
    ReportOptions,
    RequestOptions,
    parse_goodput,
    parse_percentiles,
)
from aneuron.cli.bench.server.spawn import FLOOR, own_server, spawned
from aneuron.cli.http.http1 import BadAnswer
from aneuron.cli.http.trouble import REFUSALS, environment_key, refused, unreachable
from aneuron.cli.terminal import check_writable, missing_extra, note
from aneuron.errors import AneuronError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.cli.bench.server.arrivals import Shape
    from aneuron.cli.bench.server.client import Client, Target
    from aneuron.cli.bench.server.load import LoadRun
    from aneuron.cli.bench.server.stream import Outcome

__all__ = ["Unserved", "serve"]

_SERVER, _FLOOR = "server", "floor"
_FILES = 65_536  # that a process is allowed to open where the system grants that
_SPARE_FILES = 64  # that it has open beside its connections


class Unserved(AneuronError):
    """The server under test is not there, or answers no request at all."""

    code = "unserved"


def serve(
    url: str | None = None,
    *,
    spawn: str | None = None,
    floor: Flag = False,
    load: LoadOptions = LoadOptions(),  # noqa: B008  (frozen)
    request: RequestOptions = RequestOptions(),  # noqa: B008
    report: ReportOptions = ReportOptions(),  # noqa: B008
    save_result: Path | None = None,
    as_json: JsonFlag = False,
) -> int:
    """Send requests to a server as they would arrive, and measure what its users see.

    The status is 1 if most of them failed.

    Args:
        url: Of a server that speaks the OpenAI API, like http://127.0.0.1:8000.
        spawn: Start `aneuron serve` with these arguments, and compare it with the floor.
        floor: Take turns with a bare Starlette app that is started here; alone, measure that.
        load: How much is sent, and how fast.
        request: What requests are like.
        report: What is told.
        save_result: Also write the JSON object to this file.
        as_json: Print one JSON object in place of the table.
    """
    load.check()
    request.check(load.num_prompts)
    report.check()
    if url is not None and spawn is not None:
        raise ConfigError("give a URL or --spawn, not both", param="--spawn")
    if url is None and spawn is None and not floor:
        raise ConfigError("give a URL, --spawn or --floor", param="url")
    if save_result is not None:
        check_writable(save_result)
    _check_installed()
    _make_room(load)
    loop = default_loop()
    bench = _Bench(load, request, report)
    result = run_on(loop, bench.measure(url, _words(spawn), floor=floor))
    result["config"] = _config(url, spawn, load, request, report)
    if as_json:
        show_json(result)
    else:
        _show(result, loop)
    if save_result is not None:  # behind the answer, which a full disk must not take along
        try:
            save_result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {save_result}: {error.strerror}") from error
    return _status(result)


def _status(result: dict[str, Any]) -> int:
    """Return the status to exit with: figures of the few that were answered are no measurement."""
    failed, total = result["failed"], result["failed"] + result["completed"]
    if 2 * failed <= total:
        return 0
    note(f"error: {failed} of {total} requests failed")
    return 1


def _words(spawn: str | None) -> list[str] | None:
    try:
        return None if spawn is None else shlex.split(spawn)
    except ValueError as error:
        raise ConfigError(f"--spawn {spawn!r}: {error}", param="--spawn") from None


def _check_installed() -> None:
    try:
        import msgspec  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as fault:
        raise missing_extra("bench serve", "serve", fault) from None


def _make_room(load: LoadOptions) -> None:
    """Let this process, and those it starts, open enough files; refuse what it cannot hold."""
    try:
        import resource
    except ImportError:  # not made for Windows
        return
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    at_once = load.num_prompts if math.isinf(load.request_rate) else 1
    at_once = max(min(load.max_concurrency or at_once, load.num_prompts), load.num_warmups)
    is_limited = most != resource.RLIM_INFINITY
    if is_limited and at_once + _SPARE_FILES > most:
        raise ConfigError(
            f"--max-concurrency: {at_once} requests at once are more connections than this "
            f"process may open ({most} files)",
            param="--max-concurrency",
        )
    wanted = max(_FILES, at_once + _SPARE_FILES)
    wanted = min(most, wanted) if is_limited else wanted
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _config(url: str | None, spawn: str | None, *options: Any) -> dict[str, Any]:
    """Return what was asked for, without the key."""
    told: dict[str, Any] = {"url": url, "spawn": spawn}
    for group in options:
        told |= asdict(group)
    told["request_rate"] = str(told["request_rate"])  # "inf" is no number in JSON
    del told["api_key"]
    return told


def _show(result: dict[str, Any], loop: str) -> None:
    from aneuron.cli.bench.server.report import lines

    targets = {result["name"]: result}
    facts = [f"{result['model']} at {result['target']}"]
    if _FLOOR in result:
        targets[_FLOOR] = result[_FLOOR]
        ratio = result["ratio"]
        facts.append(f"output_throughput over the floor's: {ratio and round(ratio, 3)}")
    if len(result["runs"]) > 1:
        facts.append(f"{len(result['runs'])} runs: medians; totals of counts and durations")
    for name, told in targets.items():
        for kind, error in told["errors"].items():
            facts.append(f"{name}: {error['count']} x {kind}: {error['first']}")
    asked = result["config"]
    title = f"Load: {asked['num_prompts']} requests, {asked['request_rate']} a second"
    show_table(title, ("figure", *targets), lines(targets), loop=loop, facts=facts)


# ── measuring ───────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Served:
    """One of the servers that take turns."""

    client: Client
    shape: Shape
    runs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class _Bench:
    """One call of the command."""

    load: LoadOptions
    request: RequestOptions
    report: ReportOptions

    async def measure(
        self, url: str | None, words: list[str] | None, *, floor: bool
    ) -> dict[str, Any]:
        """Start what is to be started, measure in turns, stop it; return the figures."""
        async with AsyncExitStack() as stack:
            addresses = {}
            if words is not None:
                tell(f"starting aneuron serve {' '.join(words)}")
                addresses[_SERVER] = await stack.enter_async_context(spawned(own_server(words)))
            elif url is not None:
                addresses[_SERVER] = url
            if floor or words is not None:
                tell("starting the floor")
                addresses[_FLOOR] = await stack.enter_async_context(spawned(FLOOR))
            served = {
                name: await self._reach(stack, address, is_floor=name == _FLOOR)
                for name, address in addresses.items()
            }
            for number in range(self.report.runs):
                for name, one in served.items():
                    said = f"{name}, run {number + 1} of {self.report.runs}"
                    tell(said)
                    one.runs.append(await self._run(one, seed=self.load.seed + number, said=said))
        return self._result(served)

    async def _reach(self, stack: AsyncExitStack, address: str, *, is_floor: bool) -> _Served:
        """Return a client of a server that has answered the first requests."""
        from aneuron.cli.bench.server.arrivals import Shape
        from aneuron.cli.bench.server.client import Client, Target

        api_key = None if is_floor else self.request.api_key or environment_key()
        target = Target(address, api_key)
        client = await stack.enter_async_context(Client(target, timeout_s=self.load.timeout_s))
        shape = Shape(
            endpoint=self.request.endpoint,
            model=await self._model(client, is_floor=is_floor),
            input_len=self.request.input_len,
            output_len=self.request.output_len,
            ignore_eos=self.request.ignore_eos,
            token_ids=self.request.token_ids,
        )
        served = _Served(client, shape)
        if self.load.num_warmups:
            await self._warm_up(served)
        return served

    async def _model(self, client: Client, *, is_floor: bool) -> str:
        if self.request.model is not None and not is_floor:
            return self.request.model
        try:
            models = await client.models()
        except OSError as error:
            raise unreachable(client.target.url, error) from error
        except BadAnswer as error:
            raise Unserved(f"{client.target.url}: {error}") from error
        if not models:
            raise Unserved(f"{client.target.url} lists no model; give --model")
        return models[0]

    async def _warm_up(self, served: _Served) -> None:
        """Send the first requests; if none is served, nothing that follows would be."""
        count = self.load.num_warmups
        load = replace(self.load, num_prompts=count, request_rate=math.inf)
        run = await _send(load, served, seed=self.load.seed)
        failed = [one for one in run.outcomes if one.error is not None]
        if len(failed) == count:
            raise _unserved(served.client.target, failed[0])

    async def _run(self, served: _Served, *, seed: int, said: str) -> dict[str, Any]:
        from aneuron.cli.bench.server.report import figures

        tell_ended = partial(_tell_ended, said, self.load.num_prompts)
        run = await _send(
            self.load, served, seed=seed, tell_ended=tell_ended if sys.stderr.isatty() else None
        )
        return figures(
            run,
            input_len=self.request.input_len,
            percentiles=parse_percentiles(self.report.percentiles),
            slo_ms=parse_goodput(self.report.goodput),
        )

    def _result(self, served: dict[str, _Served]) -> dict[str, Any]:
        """Return the figures of the server, or else of the floor, at the top, as vLLM has them."""
        told = {name: {"name": name, **_told(one)} for name, one in served.items()}
        result = told.pop(_SERVER, None) or told.pop(_FLOOR)
        if _FLOOR in told:
            beside = told[_FLOOR]
            throughputs = result["output_throughput"], beside["output_throughput"]
            result["ratio"] = throughputs[0] / throughputs[1] if throughputs[1] else None
            result[_FLOOR] = beside
        return result


def _unserved(target: Target, outcome: Outcome) -> AneuronError:
    """Return the error for a server that served no request, of the first that it did not."""
    if outcome.error == "connect":
        return unreachable(target.url, outcome.detail)
    if outcome.status in REFUSALS:
        return refused(target)
    return Unserved(f"{target.url}: {outcome.error}: {outcome.detail}")


def _tell_ended(said: str, num_prompts: int, num_ended: float) -> None:
    tell(f"{said}: {num_ended:.0f} of {num_prompts} requests have ended")


async def _send(
    load: LoadOptions,
    served: _Served,
    *,
    seed: int,
    tell_ended: Callable[[float], None] | None = None,
) -> LoadRun:
    from aneuron.cli.bench.server.load import Load

    wanted = Load(
        num_prompts=load.num_prompts,
        request_rate=load.request_rate,
        burstiness=load.burstiness,
        max_concurrency=load.max_concurrency,
        seed=seed,
    )
    return await wanted.run(served.client, served.shape, tell=tell_ended)


def _told(served: _Served) -> dict[str, Any]:
    from aneuron.cli.bench.server.report import middle

    return {
        "target": served.client.target.url,
        "model": served.shape.model,
        "num_connections": served.client.num_connections,
        **middle(served.runs),
        "runs": served.runs,
    }
