"""A prompt that is computed in chunks, and makes way just when its last chunk is planned."""

from __future__ import annotations

import numpy as np

from aneuron import SamplingParams
from aneuron.request import Request
from tests.support import Flow, after


async def test_preempted_as_its_last_chunk_is_planned() -> None:
    """The one seat goes to a request of more priority; both are answered, exact."""
    flow = Flow(max_num_seqs=1, max_num_batched_tokens=8)

    def submit(number: int, prompt: list[int], priority: int) -> Request:
        params = SamplingParams(max_tokens=3)
        request = Request(number, f"r{number}", params, arrival_s=0.0, priority=priority)
        request.prompt_ids = np.array(prompt, np.int32)
        flow.scheduler.add(request)
        return request

    slow = submit(1, list(range(12)), priority=1)
    first = flow.scheduler.schedule()
    assert first is not None
    assert first.num_scheduled.tolist() == [8]
    await flow.runner.execute_model(first)
    flow.in_flight.append(flow.runner.sample_tokens())
    soon = submit(2, [40], priority=0)
    await flow.run()
    assert soon.output_ids.tolist() == after(40, 3)
    assert slow.output_ids.tolist() == after(11, 3)
