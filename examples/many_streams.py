"""Many streams at once on one engine: `python examples/many_streams.py [MODEL]`."""

import asyncio
import sys

import aneuron

PROMPTS = ["The sea is", "A good breakfast is", "Snow falls when", "Two plus two is"]


async def tell(engine: aneuron.Engine, prompt: str) -> None:
    text = ""
    async for token in engine.generate(prompt, max_tokens=24, temperature=0.7, seed=1):
        text += token.text
    print(f"{prompt}{text!r}")


async def main(model: str = "smollm2-135m") -> None:
    async with aneuron.Engine(model) as engine, asyncio.TaskGroup() as group:
        for prompt in PROMPTS:
            group.create_task(tell(engine, prompt))


asyncio.run(main(*sys.argv[1:]))
