"""`SlotTable`: which request holds which slot, and from when on a slot is free again.

A slot, and the blocks of its request, are held from admission until the last step in flight
that holds it has been applied: a late token finds its own request, and a device that still
writes writes nobody else's memory. Used by the scheduler alone, on the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aneuron.scheduler.waiting import rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.plans import ModelRunnerOutput, PromptLogprobs
    from aneuron.request import Request

__all__ = ["SlotTable"]

_Receiver = tuple["Callable[[int], None]", "frozenset[int]", "Request"]


class SlotTable:
    """Slots 0..num_slots-1 and their holders; steps are applied in step order.

    Attributes:
        on_release: set by the owner; takes the blocks of a slot that comes free.
        guided: of the requests that `append` gave a token to, those with a grammar.
    """

    on_release: Callable[[int, Request], None]

    def __init__(self, num_slots: int) -> None:
        """Make a table of free slots."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._request_of: list[Request | None] = [None] * num_slots
        self._last_step = np.zeros(num_slots, np.int64)  # the latest that holds the slot
        self._applied_step = 0
        # The same slots are held step after step: written down when they change, or on demand.
        self._holding = np.zeros(0, np.int64), 0
        self.request_ids = np.zeros(num_slots, np.int64)
        self.leaving: list[int] = []  # finished or preempted, maybe still held
        self._stop_ids: list[frozenset[int]] = [frozenset()] * num_slots
        self._receivers_of: np.ndarray | None = None
        self._receivers: list[_Receiver] = []
        self._updated: list[Request] = []  # the same requests
        self.guided: list[Request] = []  # those of them with a grammar

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def applied_step(self) -> int:
        """The latest step that has been applied."""
        return self._applied_step

    @property
    def holders(self) -> list[Request]:
        """All requests that hold a slot."""
        return [request for request in self._request_of if request is not None]

    def take(self, request: Request) -> int:
        """Give a free slot to a request."""
        slot = self._free.pop()
        self._request_of[slot] = request
        self.request_ids[slot] = request.request_id
        request.slot = slot
        return slot

    def rank_of(self, slot: int) -> tuple[int, int]:
        """Return its request's place in line; see `rank`."""
        return rank(self[slot])

    def __getitem__(self, slot: int) -> Request:
        """Return the request that holds a slot."""
        request = self._request_of[slot]
        assert request is not None
        return request

    def hold(self, slots: np.ndarray, step_id: int) -> None:
        """Note that a step holds these slots, int64 [n]."""
        if slots is not self._holding[0]:
            self._write_down()
        self._holding = slots, step_id

    def _write_down(self) -> None:
        slots, step_id = self._holding
        self._last_step[slots] = step_id

    def applied(self, step_id: int) -> None:
        """Note that this step has been applied: slots that it was the last to hold come free."""
        self._applied_step = step_id
        if self.leaving:
            self.release_unheld()

    def leave(self, slot: int) -> None:
        """Note that the slot's request finished or was preempted."""
        self.leaving.append(slot)
        self.forget_receivers()

    def release_unheld(self) -> None:
        """Free what left and no step in flight holds."""
        self._write_down()
        leaving, self.leaving = self.leaving, []
        for slot, last_step in zip(leaving, self._last_step[leaving].tolist(), strict=True):
            if last_step > self._applied_step:
                self.leaving.append(slot)
            else:
                self._release(slot)

    def _release(self, slot: int) -> None:
        request = self[slot]
        self.on_release(slot, request)
        self._request_of[slot] = None
        self._free.append(slot)
        request.slot = -1
        if request.is_finished:
            request.release()

    # ── tokens ──────────────────────────────────────────────────────────────────────────

    def set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        """Note which ids end the request of a slot."""
        self._stop_ids[slot] = frozenset(stop_ids)

    def append(self, slots: np.ndarray, tokens: np.ndarray) -> tuple[list[Request], list[Request]]:
        """Append a step's tokens to its requests; those of surplus rows are dropped.

        Args:
            slots: int64 [n], held by the step.
            tokens: int32 [n].

        Returns:
            the requests that got one, a list not to be changed; and those that got a stop id.
        """
        if slots is not self._receivers_of:
            tokens = self._find_receivers(slots, tokens)
        stopped: list[Request] = []
        for (append, stop_ids, request), token in zip(
            self._receivers, tokens.tolist(), strict=True
        ):
            append(token)
            if token in stop_ids:
                stopped.append(request)
        return self._updated, stopped

    def take_logprobs(self, output: ModelRunnerOutput) -> None:
        """Give requests the log probabilities of a step; its tokens come behind them."""
        if output.logprobs is not None:
            slots, *columns = output.logprobs
            for slot, chosen, ids, values in zip(slots.tolist(), *columns, strict=True):
                request = self[slot]
                if request.logprobs is not None and request.finish_reason is None:
                    most = request.params.logprobs
                    request.logprobs.append(
                        (float(chosen), ids[:most].copy(), values[:most].copy())
                    )
        for slot, position, logprobs in output.prompt_logprobs:
            self._take_of_prompt(self[slot], position, logprobs)

    def _take_of_prompt(self, request: Request, position: int, logprobs: PromptLogprobs) -> None:
        """Give a request those of a part of its prompt; a resumed one gets the same again."""
        if request.is_finished or request.choice:
            return
        if request.prompt_logprobs is None:
            request.prompt_logprobs = [None] * request.prompt_len
        most = request.params.prompt_logprobs
        for index, (chosen, ids, values) in enumerate(zip(*logprobs, strict=True), position):
            request.prompt_logprobs[index] = float(chosen), ids[:most].copy(), values[:most].copy()

    def _find_receivers(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Look up who gets the tokens of these slots; return those that somebody gets."""
        holders = [self[slot] for slot in slots.tolist()]
        live = [request.finish_reason is None for request in holders]
        self._receivers_of = slots
        if not all(live):
            self._receivers_of, tokens = None, tokens[live]
            holders = [request for request in holders if request.finish_reason is None]
        self._updated = holders
        self.guided = [request for request in holders if request.matcher is not None]
        self._receivers = [
            (request.output_ids.append, self._stop_ids[request.slot], request)
            for request in holders
        ]
        return tokens

    def forget_receivers(self) -> None:
        """Look at who is live again; called when a request has ended."""
        self._receivers_of = None
