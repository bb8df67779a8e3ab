"""What host and device did, by step: `python examples/timeline_picture.py SVG [MODEL [DEVICE]]`."""

import asyncio
import sys

import aneuron


async def main(picture: str, model: str = "sim:count", device: str = "sim:micro") -> None:
    engine = aneuron.Engine(model, device=device, timeline=True, max_num_seqs=4)
    async with engine:
        prompts = ["a", "bc", "def", "ghij", "klmno"]
        async for _ in engine.generate_many(prompts, max_tokens=12):
            pass
        await engine.wait_idle()
        timeline = engine.timeline
        timeline.save_svg(picture, last=16)  # for a browser; .save_chrome_trace for Perfetto
        print(timeline.summary())


if not 2 <= len(sys.argv) <= 4:
    sys.exit(__doc__)
asyncio.run(main(*sys.argv[1:]))
