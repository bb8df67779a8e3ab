"""How far a simulation is, told while it runs.

Comes in: a loop's clock. Goes out: calls with its time, from a thread: a timer on the loop
would be one more thing that happens in virtual time.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["telling"]

_EVERY_S = 10.0


@contextlib.contextmanager
def telling(
    time_s: Callable[[], float],
    tell_s: Callable[[float], None] | None,
    *,
    every_s: float = _EVERY_S,
) -> Iterator[None]:
    """Tell a clock's time every few real seconds until the body has ended.

    Args:
        time_s: the clock; called in another thread.
        tell_s: what is told, in that thread; None: nobody.
        every_s: real seconds between two calls; the first comes after as many.
    """
    if tell_s is None:
        yield
        return
    is_over = threading.Event()

    def tell() -> None:
        while not is_over.wait(every_s):
            tell_s(time_s())

    thread = threading.Thread(target=tell, name="aneuron-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
