"""A clock for the simulated device."""

from __future__ import annotations

import threading

import pytest

from aneuron.device import sim, thread
from tests.device.steps import FOREIGN, Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sim, "monotonic", clock.monotonic)
    monkeypatch.setattr(sim, "sleep", clock.sleep)
    monkeypatch.setattr(thread, "monotonic", clock.monotonic)
    return clock


@pytest.fixture(autouse=True)
def threads_of_others() -> None:
    """Leave out of `threads_of` what other tests left behind."""
    FOREIGN.clear()
    FOREIGN.update(threading.enumerate())
