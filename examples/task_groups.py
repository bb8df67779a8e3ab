"""anyio task groups and cancel scopes: `python examples/task_groups.py [MODEL]`."""

import sys

import anyio

import aneuron


async def race(engine: aneuron.Engine, prompts: list[str]) -> aneuron.Completion:
    """Return the first answer; the others end with the group."""
    first: list[aneuron.Completion] = []

    async def run(prompt: str, max_tokens: int) -> None:
        first.append(await engine.generate(prompt, max_tokens=max_tokens))
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for number, prompt in enumerate(prompts, 1):
            group.start_soon(run, prompt, 20 * number)
    return first[0]


async def main(model: str) -> None:
    async with aneuron.Engine(model) as engine:
        winner = await race(engine, ["Red is", "Green is", "Blue is"])
        print(f"{len(winner.token_ids)} tokens won")

        with anyio.move_on_after(0.05) as scope:
            await engine.generate("Once upon a time", max_tokens=5000)
        print("out of time:", scope.cancelled_caught)
        await engine.wait_idle()
        print("left:", engine.stats().running)


anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
