"""Answers that can be parsed: `python examples/structured_output.py [MODEL]`."""

import asyncio
import json
import sys

import aneuron

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 100_000_000},
    },
    "required": ["name", "population"],
    "additionalProperties": False,
}


async def main(model: str = "smollm2-135m") -> None:
    async with aneuron.Engine(model) as engine:
        question = [{"role": "user", "content": "The largest city of France, as JSON."}]
        answer = await engine.chat(question, grammar={"json": CITY}, temperature=0)
        print(json.loads(answer.text))

        review = "Is this review positive? 'The food was cold.' Answer:"
        answer = await engine.generate(review, grammar={"choice": ["yes", "no"]}, temperature=0)
        print(answer.text)

        date = await engine.generate("Today is ", grammar={"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"})
        print(date.text)


asyncio.run(main(*sys.argv[1:]))
