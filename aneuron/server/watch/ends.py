"""How a request ends, for those that follow it: the metrics and the trace.

Comes in: what was raised while it was served. Goes out: an abort, or a failure with its code.
"""

from __future__ import annotations

from asyncio import CancelledError
from typing import Self

from aneuron.outputs import AbortReason

__all__ = ["Followed", "code_of"]


def code_of(error: BaseException) -> str:
    """Return the stable code of an error of ours; of any other, that it is our bug."""
    return str(getattr(error, "code", None) or "internal_error")


class Followed:
    """Sees to that a request has an end: the first one that is told counts.

    As a context manager: what is raised inside is a failure, a cancellation is the client's
    doing, and so is leaving without having told an end.
    """

    __slots__ = ()

    def aborted(self, reason: str) -> None:
        """End it: "client", "deadline" or "shutdown"."""

    def failed(self, error: BaseException) -> None:
        """End it: refused, or with an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            self.failed(error)
        elif error is None or isinstance(error, CancelledError | GeneratorExit):
            self.aborted(AbortReason.CLIENT)
        else:
            self.aborted(AbortReason.SHUTDOWN)  # KeyboardInterrupt, SystemExit
