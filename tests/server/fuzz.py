"""Schemathesis against a server of its own: `nox -s schemathesis`.

The model is NOISE on the simulated device: it has logits, so that log probabilities and grammars
are reached as well. Each answer is checked against the server's own `/openapi.json`; a 5xx is a
fault whatever the document says, for the server neither drains nor is overloaded. The second run
asks for nothing but streams, which few bodies of the first one do.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import uvloop

from aneuron import Engine
from aneuron.device.sim import SimDevice
from aneuron.server import ServerConfig, build_app
from aneuron.server.http.serving import serve
from tests.server.scripted import PLAIN, Noise, byte_level

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Calls = Mapping[str, Counter[int | None]]

MAX_MODEL_LEN = 256  # so that a request that names no length ends soon
STOP_S = 30
# No document can say that an id is in the vocabulary, or that a chosen tool is one of the tools.
OPTIONS = (
    "--checks=all", "--exclude-checks=positive_data_acceptance", "--continue-on-failure",
    "--seed=7", "--generation-database=none", "--max-examples=60",
    "--request-timeout=60", "--max-response-time=60",  # 1,024 prompts on a busy machine
)  # fmt: skip
STREAMED = ("ChatRequest", "CompletionRequest", "ResponsesRequest")
ONLY_STREAMS = ("--phases=fuzzing", "--mode=positive", "--include-path-regex=^/v1/(c|r)")


async def run_server() -> None:
    """Serve until SIGTERM; say the URL."""
    model, tokenizer = Noise(), byte_level(PLAIN)
    async with Engine(
        model, device=SimDevice(), tokenizer=tokenizer, max_model_len=MAX_MODEL_LEN
    ) as engine:
        app = build_app(engine, ServerConfig(tool_parser="hermes"))
        await serve(app, port=0, on_started=lambda url: print(url, flush=True))


def write_streamed(url: str, path: Path) -> None:
    """Write the server's document as one of a server that only streams."""
    with urlopen(f"{url}/openapi.json") as answer:
        document = json.load(answer)
    for name in STREAMED:
        schema = document["components"]["schemas"][name]
        schema["properties"]["stream"] = {"const": True}
        schema["required"].append("stream")
    path.write_text(json.dumps(document))


def calls_of(report: Path) -> Iterator[tuple[str, str, int | None]]:
    """Each call's operation, type of answer and status; no status if there was no answer."""
    with report.open(encoding="utf-8") as lines:
        events = [json.loads(line).get("ScenarioFinished") for line in lines]
    for recorder in [event["recorder"] for event in events if event]:
        for name, call in recorder.get("interactions", {}).items():
            case, answer = recorder["cases"][name]["value"], call.get("response") or {}
            kind = answer.get("headers", {}).get("content-type", [""])[0]
            yield f"{case['method']} {case['path']}", kind, answer.get("status_code")


def fuzz(url: str, folder: Path, more: list[str]) -> list[str]:
    """Run schemathesis twice; print what was called, and return what is wrong."""
    streamed, report = folder / "streamed.json", folder / "report.ndjson"
    write_streamed(url, streamed)
    faults = []
    calls: defaultdict[str, Counter[int | None]] = defaultdict(Counter)
    for options in ([f"{url}/openapi.json"], [str(streamed), f"--url={url}", *ONLY_STREAMS]):
        command = ["schemathesis", "run", *options, *OPTIONS, *more]
        command += ["--report=ndjson", f"--report-ndjson-path={report}"]
        if subprocess.run(command, cwd=folder, check=False).returncode != 0:
            faults.append("schemathesis has found something")
        for operation, kind, status in calls_of(report):
            calls[operation][status] += 1
            if kind.startswith("text/event-stream"):
                calls[f"{operation} (streams)"][status] += 1
    return faults + tell(calls, json.loads(streamed.read_text()))


def tell(calls: Calls, document: dict[str, Any]) -> list[str]:
    """Print how often each operation gave which status; return what is wrong with that."""
    methods = {path: [*operations] for path, operations in document["paths"].items()}
    wanted = {f"{one.upper()} {path}" for path, told in methods.items() for one in told}
    wanted.remove("GET /openapi.json")  # which schemathesis reads, and does not test
    wanted |= {
        f"POST /v1/{name} (streams)" for name in ("chat/completions", "completions", "responses")
    }
    print(f"\n{'operation':42} calls  statuses")
    for operation in sorted(wanted):
        found = calls.get(operation, Counter())
        told = ", ".join(f"{status}: {count}" for status, count in found.most_common())
        print(f"{operation:42} {found.total():5}  {told}")
    others = sum((found for name, found in calls.items() if name not in wanted), Counter())
    told = ", ".join(f"{status}: {count}" for status, count in others.most_common())
    print(f"{'other methods':42} {others.total():5}  {told}")
    succeeded = {one for one, found in calls.items() if found[200]}
    faults = [f"{one} never succeeded" for one in sorted(wanted - succeeded)]
    for operation, found in calls.items():
        bad = {status: count for status, count in found.items() if (status or 500) >= 500}
        faults += [f"{operation} answered {status}, {count} times" for status, count in bad.items()]
    return faults


def main() -> int:
    """Serve, or fuzz a child that serves; arguments go to schemathesis."""
    if sys.argv[1:] == ["serve"]:
        uvloop.run(run_server())
        return 0
    own = (sys.executable, "-m", "tests.server.fuzz", "serve")
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(own, stdout=subprocess.PIPE, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            faults = fuzz(server.stdout.readline().strip(), Path(folder), sys.argv[1:])
        finally:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(STOP_S)
            server.kill()
    if server.returncode != 0:
        faults.append(f"the server ended with {server.returncode}")
    print(*faults or ["no fault"], sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
