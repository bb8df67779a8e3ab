"""One step, looked at afterwards: when it reached each stage, and what stopped the flow.

Made with its plan; the timeline keeps it.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Break", "BreakReason", "StepRecord"]


class BreakReason(StrEnum):
    """Why a step was not simply fed with the device's own tokens."""

    COMPOSITION_CHANGED = "composition_changed"  # another set of requests than the future's
    SHAPE_MISMATCH = "shape_mismatch"
    DTYPE_MISMATCH = "dtype_mismatch"
    BUCKET_EDGE = "bucket_edge"  # the context comes to the end of a traced program's bucket
    REORDERED = "reordered"  # gathered on the device: a sync fallback, but no await
    GRAMMAR = "grammar"  # a mask needs the token before
    HOOK = "hook"  # code of the user's must see the token first
    SPECULATION = "speculation"  # the number of accepted tokens must be known
    DRAIN = "drain"  # nothing could be planned before a step in flight gave its room back


class Break(NamedTuple):
    """One stop of the flow; times of the loop's clock (`clock_of`), equal if nothing waited."""

    reason: BreakReason
    start_s: float
    end_s: float


class StepRecord:
    """When one step reached each stage, in seconds of the loop's clock (`clock_of`).

    Made with its plan and written by whoever does the stage. NaN: not reached. The device's
    own times are measured, or modelled on the simulated device.

    Attributes:
        step_id, is_decode: as in the plan.
        request_ids: int64 [n], internal ids: the plan's own column.
        num_scheduled: int32 [n], tokens of each: likewise.
        is_async: fed with device values; None where the carry tells no difference.
        begun_s, scheduled_s: `schedule()` was called, returned.
        prepared_s: the inputs were written.
        launched_s: the program was on the device's queue; of one in two parts, the first.
        device_start_s, device_end_s: the program ran, from first to last.
        forward_end_s, sampling_start_s: of one in two parts, its first part ended and its
            second began: the device may have waited for the host in between.
        read_s: its tokens were on the loop.
        applied_s: `update_from_output()` had taken them in.
        detokenized_s: stop strings had been looked for.
        delivered_s: its consumers had been woken.
        breaks: stops of the flow on the way to the launch, or to that of the second part.
        error: what the device reported, of a step that failed.
    """

    is_async: bool | None = None
    begun_s = math.nan
    scheduled_s = math.nan
    prepared_s = math.nan
    launched_s = math.nan
    device_start_s = math.nan
    device_end_s = math.nan
    forward_end_s = math.nan
    sampling_start_s = math.nan
    read_s = math.nan
    applied_s = math.nan
    detokenized_s = math.nan
    delivered_s = math.nan
    breaks: tuple[Break, ...] = ()
    error: str | None = None

    def __init__(
        self,
        step_id: int,
        is_decode: bool,  # noqa: FBT001  as in the plan
        request_ids: np.ndarray,
        num_scheduled: np.ndarray,
    ) -> None:
        """Make the record of a step that has been planned."""
        self.step_id = step_id
        self.is_decode = is_decode
        self.request_ids = request_ids
        self.num_scheduled = num_scheduled
