"""Bound the queue, let the urgent go first: `python examples/overloaded.py [MODEL]`."""

import asyncio
import sys

import aneuron


async def ask(engine: aneuron.Engine, prompt: str, *, priority: int = 0) -> None:
    while True:
        try:
            stream = engine.generate(prompt, priority=priority, max_tokens=16)
            break
        except aneuron.Overloaded as error:  # a server would answer 429 with a Retry-After
            print(f"{prompt!r} is refused; again in {error.retry_after_s:.2g} s")
            await asyncio.sleep(error.retry_after_s)
    completion = await stream
    print(f"{prompt!r} has {completion.usage.completion_tokens} tokens")


async def main(model: str = "smollm2-135m") -> None:
    engine = aneuron.Engine(
        model,
        max_num_seqs=2,  # run at a time
        max_waiting=2,  # beside them; the fifth is refused
        scheduling_policy="priority",
    )
    async with engine, asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(ask(engine, f"Item {number} of the list:"))
        # Lower goes first: one that runs makes way, and resumes later.
        group.create_task(ask(engine, "This is urgent:", priority=-1))
        for number in range(3, 6):
            group.create_task(ask(engine, f"Item {number} of the list:"))


asyncio.run(main(*sys.argv[1:]))
