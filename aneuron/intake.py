"""`Intake`: a request from the call to the scheduler's queue, and its name until it ends.

Comes in: requests, from the engine's front door. Goes out: requests whose prompt is known, to
the scheduler. Here is what bounds them: how many there may be, until when each may run, and the
stop strings that end one. Runs on the loop; preparing prompts are tasks of the engine's TaskGroup.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from aneuron.errors import AneuronError, InternalError, InvalidRequest, Overloaded
from aneuron.outputs import AbortReason, FinishReason
from aneuron.request import RequestState

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Iterable

    import numpy as np

    from aneuron.request import Request, TextWatch
    from aneuron.scheduler import Scheduler

    Preparation = Callable[[], Coroutine[Any, Any, None]]

__all__ = ["Intake"]

_RETRY_AFTER_S = 1.0  # while nothing has ended yet
_LEAST_RETRY_S = 0.001
_SMOOTHING = 0.2  # weight of the answer that ended last


class Intake:
    """Names, limits and deadlines of requests, and prompts on their way to ids.

    Attributes:
        requests: choice 0 of each, by the caller's name, until all its choices have ended.
        num_preparing: prompts that are being turned into ids.
        num_watched: choices in the scheduler's hands whose text is looked at for stop strings.
        num_prompt_tokens: of requests admitted so far.
        num_generated: tokens given out so far; the core counts them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        max_waiting: int | None,
        can_fork: bool = True,
        loop: asyncio.AbstractEventLoop,
        notify: Callable[[], None],
    ) -> None:
        """Make an empty intake.

        Args:
            scheduler: takes over.
            max_waiting: how many may be in beyond those that can run; None is any number.
            can_fork: whether choices of a request share the step that computes their prompt.
            loop: whose time counts.
            notify: called after each change.
        """
        self.requests: dict[str, Request] = {}
        self.num_preparing = self.num_watched = 0
        self.num_prompt_tokens = self.num_generated = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self._scheduler = scheduler
        self._max_waiting = max_waiting
        self._can_fork = can_fork
        self._loop = loop
        self._notify = notify
        self._group: asyncio.TaskGroup | None = None
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._num_live = 0  # choices that have not ended
        self._num_left: dict[str, int] = {}  # of each request, by name
        self._service_s: float | None = None  # from schedule to end, smoothed

    def start(self, group: asyncio.TaskGroup) -> None:
        """Run preparations in this group from now on."""
        self._group = group

    # ── coming in ───────────────────────────────────────────────────────────────────────

    def register(self, request: Request, *, deadline_s: float | None = None) -> None:
        """Take a request on, with all its choices; `admit` or `prepare` follows.

        Raises:
            InvalidRequest: its name is in use.
            Overloaded: too many wait already.
        """
        name, num_choices = request.name, len(request.choices)
        if name in self.requests:
            raise InvalidRequest(
                f"request_id {name!r} is in use by a request that has not ended",
                param="request_id",
                request_id=name,
            )
        most = self._scheduler.max_num_seqs + (self._max_waiting or 0)
        if self._max_waiting is not None and self._num_live + num_choices > most:
            retry_after_s = self._retry_after_s()
            raise Overloaded(
                f"no room for {num_choices} more: {self._num_live} of at most {most} run or wait "
                f"(max_num_seqs and max_waiting); try again in {retry_after_s:.3g} s",
                retry_after_s=retry_after_s,
                request_id=name,
            )
        self.requests[name] = request
        self._num_live += num_choices
        self._num_left[name] = num_choices
        for one in request.choices:
            one.on_finish.append(partial(self._ended, request))
        if deadline_s is not None:
            expire = partial(self.end, request, FinishReason.ABORT, AbortReason.DEADLINE)
            self._deadlines[name] = self._loop.call_later(deadline_s, expire)

    def prepare(self, request: Request, preparation: Preparation) -> None:
        """Run a preparation, which turns the prompt into ids and admits the request."""
        assert self._group is not None, "start() comes first"
        body = self._prepare(request, preparation)
        try:
            task = self._group.create_task(body, name=f"aneuron-prompt-{request.name}")
        except RuntimeError:  # the group is failing: abandon() will end this request, too
            body.close()
            return
        self.num_preparing += 1
        self.tasks.add(task)
        task.add_done_callback(self._prepared)

    async def _prepare(self, request: Request, preparation: Preparation) -> None:
        """Run a preparation; its fault is this request's alone."""
        error: AneuronError
        try:
            await preparation()
        except AneuronError as fault:
            error = fault
        except Exception as fault:  # noqa: BLE001  the body of a task
            error = InternalError(f"preparing the prompt failed: {fault}")
            error.__cause__ = fault
        else:
            return
        if request.state is RequestState.NEW:
            self._finish_new(request, FinishReason.ERROR, error=error)

    def _prepared(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.num_preparing -= 1
        self._notify()

    def admit(self, request: Request, prompt_ids: np.ndarray) -> None:
        """Queue a request whose prompt is known; int32 [tokens]."""
        for one in request.choices:
            one.prompt_ids = prompt_ids
            self.num_watched += one.watch is not None
        self.num_prompt_tokens += len(prompt_ids)
        alone = () if self._can_fork else request.forks
        if alone:
            request.unforked = ()
        for one in (request, *alone):
            self._scheduler.add(one)
        self._notify()

    # ── ending ──────────────────────────────────────────────────────────────────────────

    def end(self, request: Request, reason: FinishReason, abort_reason: AbortReason) -> None:
        """End a request from outside; no token of it is given out after this."""
        given = abort_reason if reason is FinishReason.ABORT else None
        if request.state is RequestState.NEW:
            self._finish_new(request, reason, abort_reason=given)
        for one in request.choices:
            self._scheduler.finish(one, reason, abort_reason=given)
        self._notify()

    def look_for_stops(self, requests: Iterable[Request]) -> None:
        """End those whose text now has a stop string; each has been given one more token."""
        for request in requests:
            if request.watch is not None and not request.last_is_end_id:
                self._watch(request, request.watch)

    def _watch(self, request: Request, watch: TextWatch) -> None:
        finish = partial(self._scheduler.finish, request)
        try:
            match = watch.feed(request.output_ids[-1])
        except Exception as fault:  # noqa: BLE001  a tokenizer's bug is this request's alone
            error = InternalError(f"decoding failed: {fault}")
            error.__cause__ = fault
            finish(FinishReason.ERROR, error=error)
            request.amend(FinishReason.ERROR, error=error)
        else:
            if match is not None:
                finish(FinishReason.STOP, stop_reason=match)
                request.amend(FinishReason.STOP, stop_reason=match)

    def abandon(self, error: AneuronError) -> None:
        """Fail every request that the scheduler does not have yet."""
        for request in list(self.requests.values()):
            if request.state is RequestState.NEW:
                self._finish_new(request, FinishReason.ERROR, error=error.copy())

    def leave_to_parent(self, error: AneuronError) -> None:
        """End every request in a forked child, where nothing will ever come of it.

        Only in what streams read: the parent's loop may have been anywhere when it forked.
        """
        for request in list(self.requests.values()):
            for one in request.choices:
                one.on_finish.clear()
                one.waiter = None  # that is to wake the loop
                one.finish(FinishReason.ERROR, now_s=one.arrival_s, error=error.copy())
                one.is_released = True
        self.requests.clear()

    def _finish_new(self, request: Request, reason: FinishReason, **facts: Any) -> None:
        for one in request.choices:
            one.finish(reason, now_s=self._scheduler.clock(), **facts)
            one.release()

    def _ended(self, request: Request, one: Request) -> None:
        self._num_live -= 1
        self._num_left[request.name] -= 1
        self.num_watched -= one.watch is not None and one.prompt_ids is not None
        self._note_service(one)
        if not self._num_left[request.name]:
            del self.requests[request.name], self._num_left[request.name]
            if request.name in self._deadlines:
                self._deadlines.pop(request.name).cancel()

    def _note_service(self, one: Request) -> None:
        if one.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return  # it ended before its time
        if one.finished_s is not None and one.first_scheduled_s is not None:
            taken_s, mean_s = one.finished_s - one.first_scheduled_s, self._service_s
            self._service_s = (
                taken_s if mean_s is None else mean_s + _SMOOTHING * (taken_s - mean_s)
            )

    def _retry_after_s(self) -> float:
        """Return in how many seconds a place may be free: when the next answer should end.

        By how long answers took lately and how long those that run have been at it; if one of
        them takes longer than most, by how often one ends when their ends are spread evenly.
        """
        if self._service_s is None:
            return _RETRY_AFTER_S
        now_s = self._scheduler.clock()
        begun_s = [one.first_scheduled_s or now_s for one in self._scheduler.running()]
        left_s = self._service_s - (now_s - min(begun_s, default=0.0))
        return max(left_s, self._service_s / max(1, len(begun_s)), _LEAST_RETRY_S)
