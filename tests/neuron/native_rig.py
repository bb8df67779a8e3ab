"""A played native runtime that each test closes, and graphs for it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aneuron.testing.fakes import FakeNative, Times, Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["counter", "fake", "held", "ids_of", "increment", "make"]


def increment(ids: torch.Tensor) -> torch.Tensor:
    return ids + 1


def ids_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make(request: pytest.FixtureRequest, **options: Any) -> FakeNative:
    """Return a runtime that is closed behind the test, whatever was left unread."""
    fake = FakeNative(times=Times(enqueue_s=0.0), **options)

    def close() -> None:
        fake.core.let_go()
        with suppress(Violation):
            fake.close()

    request.addfinalizer(close)
    return fake


@pytest.fixture
def fake(request: pytest.FixtureRequest) -> FakeNative:
    return make(request)


@pytest.fixture
def held(fake: FakeNative) -> Iterator[FakeNative]:
    """A runtime whose programs do not start before `go_on`."""
    fake.core.hold()
    yield fake
    fake.core.go_on()


def counter(fake: FakeNative) -> tuple[Any, Any]:
    """Return a graph that counts its calls in device state, and what has to be kept."""
    zeros = ids_of(0)
    state = fake.to_device(zeros)

    def count(step: torch.Tensor) -> torch.Tensor:
        return state.add_(step)

    return fake.compile(count), (zeros, state)
