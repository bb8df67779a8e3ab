"""Answer each line of a file: `python examples/batch_job.py PROMPTS ANSWERS [MODEL]`."""

import asyncio
import json
import sys
from pathlib import Path

from rich.progress import Progress

import aneuron


async def main(source: str, target: str, model: str = "smollm2-135m") -> None:
    text = Path(source).read_text(encoding="utf-8")  # noqa: ASYNC240  before anything runs
    prompts = [line for line in text.splitlines() if line.strip()]
    with Path(target).open("w", encoding="utf-8") as file, Progress() as progress:  # noqa: ASYNC230
        bar = progress.add_task("answering", total=len(prompts))
        async with aneuron.Engine(model) as engine:
            answers = engine.generate_many(prompts, max_tokens=32, temperature=0)
            async for index, completion in answers:  # as they finish
                print(json.dumps({"prompt": index, "answer": completion.text}), file=file)
                progress.advance(bar)


if not 3 <= len(sys.argv) <= 4:
    sys.exit(__doc__)
asyncio.run(main(*sys.argv[1:]))
