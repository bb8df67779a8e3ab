"""For test suites, yours and ours: models that show every wrong token, and leak checks.

    from aneuron.testing import count_engine, wait_all_idle

    async def test_my_app() -> None:
        async with count_engine() as engine:
            answer = await engine.generate(prompt_token_ids=[41], max_tokens=3)
            assert answer.token_ids == [42, 43, 44]

Nothing in the product imports this package.
"""

from __future__ import annotations

from aneuron.clock import Deadlock, VirtualClockLoop, run_virtual
from aneuron.device.sim import Fault, Latency, SimDevice
from aneuron.models.simulated import Const, Count, Script, SimModel, Sum
from aneuron.models.tokenizer import ByteTokenizer
from aneuron.testing.engines import count_engine, sim_engine
from aneuron.testing.leaks import assert_idle, no_leaks, wait_all_idle

__all__ = [
    "ByteTokenizer",
    "Const",
    "Count",
    "Deadlock",
    "Fault",
    "Latency",
    "Script",
    "SimDevice",
    "SimModel",
    "Sum",
    "VirtualClockLoop",
    "assert_idle",
    "count_engine",
    "no_leaks",
    "run_virtual",
    "sim_engine",
    "wait_all_idle",
]
