"""Engines on the simulated device, in one line.

They check at the end that nothing leaked, so a test that uses one also tests that.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aneuron.device.sim import Fault, SimDevice
from aneuron.engine import Engine
from aneuron.models.simulated import Count, SimModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from aneuron.plans import ModelInput

__all__ = ["count_engine", "sim_engine"]


@asynccontextmanager
async def sim_engine(
    model: SimModel,
    *,
    latency: float | Callable[[ModelInput], float] = 0.0,
    faults: Sequence[Fault] = (),
    **engine_options: Any,
) -> AsyncIterator[Engine]:
    """Open an engine that runs `model` on a simulated device.

    Args:
        model: COUNT, SUM, CONST, SCRIPT, or one of your own.
        latency: of each program, in seconds, or a function of its inputs.
        faults: what the device does wrong, by step.
        engine_options: see `aneuron.Engine`.

    Yields:
        The open engine; `engine.device` is its `SimDevice`, which counts steps and rows.
    """
    device = SimDevice(latency=latency, faults=faults)
    async with Engine(model, device=device, **engine_options) as engine:
        yield engine


@asynccontextmanager
async def count_engine(
    *,
    latency: float | Callable[[ModelInput], float] = 0.0,
    faults: Sequence[Fault] = (),
    **engine_options: Any,
) -> AsyncIterator[Engine]:
    """Open an engine on the simulated device with COUNT: the next id is the last + 1.

    Args:
        latency: of each program, in seconds, or a function of its inputs.
        faults: what the device does wrong, by step.
        engine_options: see `aneuron.Engine`.

    Yields:
        The open engine.
    """
    async with sim_engine(Count(), latency=latency, faults=faults, **engine_options) as engine:
        yield engine
