"""Stop early, in five ways: `python examples/cancel_and_deadline.py [MODEL [DEVICE]]`."""

import asyncio
import sys

import aneuron


async def main(model: str = "smollm2-135m", device: str = "auto") -> None:
    async with aneuron.Engine(model, device=device) as engine:
        async with engine.generate("Once upon a time", max_tokens=500) as stream:
            async for token in stream:
                if token.index == 9:
                    break  # the request ends with the block

        stream = engine.generate("Once upon a time", max_tokens=500)
        await anext(stream)
        stream.cancel()  # from any task; what there is can still be had
        print("cancelled:", (await stream).finish_reason)

        stream = engine.generate("Once upon a time", max_tokens=500)
        await anext(stream)
        stream.stop()  # the same, but it counts as a finished answer
        print("stopped:", (await stream).finish_reason)

        try:
            async with asyncio.timeout(0.05):  # cancels the wait, and the request with it
                await engine.generate("Once upon a time", max_tokens=5000)
        except TimeoutError:
            print("too late")

        answer = await engine.generate("Once upon a time", max_tokens=5000, deadline_s=0.5)
        print(f"{answer.abort_reason}: {len(answer.token_ids)} tokens")  # those are returned
        await engine.wait_idle()
        print("left:", engine.stats().running)


asyncio.run(main(*sys.argv[1:]))
