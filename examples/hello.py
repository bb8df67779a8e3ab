"""Stream one answer: `python examples/hello.py [MODEL]`."""

import asyncio
import sys

import aneuron


async def main(model: str = "smollm2-135m") -> None:
    async with aneuron.Engine(model) as engine:
        messages = [{"role": "user", "content": "What is the capital of Japan?"}]
        async for token in engine.chat(messages, max_tokens=64, temperature=0):
            print(token, end="", flush=True)
        print()


asyncio.run(main(*sys.argv[1:]))
