"""Background workers that read from a queue: `python examples/queue_worker.py [MODEL]`."""

import asyncio
import sys

import aneuron

Job = tuple[str, asyncio.Future[str]]


async def work(engine: aneuron.Engine, jobs: asyncio.Queue[Job]) -> None:
    while True:
        prompt, done = await jobs.get()
        try:
            answer = await engine.generate(prompt, max_tokens=16, temperature=0)
            if not done.done():  # who asked may have given up
                done.set_result(answer.text)
        except aneuron.RequestError as error:  # this job's fault: the worker goes on
            if not done.done():
                done.set_exception(error)
        finally:
            jobs.task_done()


async def main(model: str = "smollm2-135m") -> None:
    jobs: asyncio.Queue[Job] = asyncio.Queue(maxsize=100)
    async with aneuron.Engine(model) as engine, asyncio.TaskGroup() as group:
        workers = [group.create_task(work(engine, jobs)) for _ in range(8)]  # that many at once
        results: list[asyncio.Future[str]] = []
        for prompt in ["One, two,", "Un, deux,", "", "Eins, zwei,"]:
            results.append(asyncio.get_running_loop().create_future())
            await jobs.put((prompt, results[-1]))
        await jobs.join()
        for result in results:
            print(result.exception() or repr(result.result()))
        for worker in workers:
            worker.cancel()


asyncio.run(main(*sys.argv[1:]))
