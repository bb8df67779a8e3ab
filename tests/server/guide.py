"""GuideLLM against a server of its own: `nox -s guidellm`.

`aneuron serve` runs the demo model; GuideLLM loads it as it is, and must see no request fail.
The model's folder in the cache has the tokenizer too, so nothing else is fetched.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from aneuron.cli.bench.server.spawn import own_server, spawned
from aneuron.models.catalog import resolve

MODEL = "smollm2-135m"
# Load, and the endpoint that takes it.
RUNS = (
    ("kind=synchronous", "/v1/completions"),
    ("kind=synchronous", "/v1/responses"),
    ("kind=concurrent,streams=4", "/v1/chat/completions"),
    ("kind=poisson,rate=2", "/v1/chat/completions"),
)
SECONDS = 15
TOKENS = 16  # of each answer
DATA = f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


async def load(url: str, profile: str, path: str, tokenizer: Path, report: Path) -> dict[str, Any]:
    """Run one benchmark; return what GuideLLM says of it."""
    command = [
        "run", f"--backend=kind=openai_http,target={url},request_format={path}",
        f"--profile={profile}", f"--constraint=kind=max_duration,seconds={SECONDS}",
        f"--tokenizer=kind=huggingface_auto,model={tokenizer}", f"--data={DATA}",
        f"--output=kind=json,path={report}", "--disable-console-interactive", *sys.argv[1:],
    ]  # fmt: skip
    guide = await asyncio.create_subprocess_exec("guidellm", *command, env=os.environ | OFFLINE)
    if code := await guide.wait():
        sys.exit(f"guidellm ended with {code}")
    benchmark: dict[str, Any]
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    return benchmark


def tell(profile: str, path: str, benchmark: dict[str, Any]) -> list[str]:
    """Print the figures of one benchmark; return what is wrong with it."""
    metrics = benchmark["metrics"]
    counts, length = metrics["request_totals"], metrics["output_token_count"]["successful"]
    ttft = metrics["time_to_first_token_ms"]["successful"]["percentiles"]
    rate = metrics["output_tokens_per_second"]["total"]["mean"]
    print(
        f"{profile} {path}: {counts['successful']} succeeded, {counts['errored']} failed, "
        f"{counts['incomplete']} cut off at the end; {rate:.1f} tokens/s, "
        f"TTFT {ttft['p50']:.0f} ms (p95 {ttft['p95']:.0f})"
    )
    faults = []
    if counts["errored"] or not counts["successful"]:
        faults.append(f"{profile} {path}: requests failed, or none succeeded")
    elif not length["min"] == length["max"] == TOKENS:
        faults.append(f"{profile} {path}: answers had {length['min']} to {length['max']} tokens")
    return faults


async def main() -> int:
    """Load the server in each way; arguments go to GuideLLM."""
    tokenizer = resolve(MODEL).path  # fetches the model, if that was never done
    told = []
    with tempfile.TemporaryDirectory() as folder:
        async with spawned(own_server((MODEL,))) as url:
            for at, (profile, path) in enumerate(RUNS):
                report = Path(folder, f"{at}.json")
                told.append((profile, path, await load(url, profile, path, tokenizer, report)))
    print()
    faults = [fault for one in told for fault in tell(*one)]
    print(*faults or ["no fault"], sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
