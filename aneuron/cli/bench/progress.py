"""How far something long is, told while it runs.

Comes in: a number that grows: a clock's time, a count. Goes out: calls with it, from a thread: a
timer on a loop of virtual time would be one more thing that happens in it.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["telling"]

_EVERY_S = 3.0


@contextlib.contextmanager
def telling(
    reached: Callable[[], float],
    tell: Callable[[float], None] | None,
    *,
    every_s: float = _EVERY_S,
) -> Iterator[None]:
    """Tell a number every few real seconds until the body has ended.

    Args:
        reached: returns it; called in another thread.
        tell: what is told, in that thread; None: nobody.
        every_s: real seconds between two calls; the first comes after as many.
    """
    if tell is None:
        yield
        return
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(every_s):
            tell(reached())

    thread = threading.Thread(target=run, name="aneuron-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
