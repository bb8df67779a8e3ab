"""Answer the lines of a file, as they finish: `python examples/batch_job.py FILE [MODEL]`."""

import asyncio
import sys
from pathlib import Path

import aneuron


async def main(file: str, model: str = "smollm2-135m") -> None:
    text = Path(file).read_text()  # noqa: ASYNC240  before anything runs
    lines = [line for line in text.splitlines() if line.strip()]
    async with aneuron.Engine(model) as engine:
        answers = engine.generate_many(lines, max_tokens=32, temperature=0)
        async for index, completion in answers:
            print(f"{index}\t{completion.finish_reason}\t{completion.text!r}")


asyncio.run(main(*sys.argv[1:]))
