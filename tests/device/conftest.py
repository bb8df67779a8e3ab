"""A clock for the simulated device."""

from __future__ import annotations

import pytest

from aneuron.device import sim, thread
from tests.device.steps import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sim, "monotonic", clock.monotonic)
    monkeypatch.setattr(sim, "sleep", clock.sleep)
    monkeypatch.setattr(thread, "monotonic", clock.monotonic)
    return clock
