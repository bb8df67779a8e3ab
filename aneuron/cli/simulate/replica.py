"""One replica: an engine on the simulated device, and the clients that send to it.

Comes in: a `Setup` and the replica's share of the load. Goes out: an `Outcome`. Scheduler,
runner and device are those of every engine; in `run` the loop's time is virtual. On a loop in
real time the same coroutine measures what the simulation predicts.
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from aneuron.cli.options import CARRIES
from aneuron.cli.terminal import telling
from aneuron.clock import VirtualClockLoop
from aneuron.device.profiles import profile
from aneuron.device.sim import SimDevice
from aneuron.engine import Engine
from aneuron.errors import AneuronError, ConfigError, InternalError, Overloaded
from aneuron.models.simulated import SimModel
from aneuron.outputs import FinishReason
from aneuron.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.cli.simulate.load import Load
    from aneuron.plans import ModelInput
    from aneuron.request import Request
    from aneuron.stream import TokenStream

__all__ = ["Outcome", "Setup", "run", "simulate"]

# What may run and wait at a time: 3 kB each, and 4 bytes a prompt token.
_MAX_LIVE = 2**18
_MAX_LIVE_TOKENS = 2**27


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What each replica is, and for how long it runs.

    Attributes:
        profile: a latency profile's name.
        carry: a key of `CARRIES`.
        duration_s: when it ends; None: when the last request has.
        max_model_len: the longest request, prompt and answer.
        num_seqs, max_num_batched_tokens, block_size, num_kv_blocks, max_waiting: of the engine.
    """

    profile: str
    carry: str
    duration_s: float | None
    max_model_len: int
    num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_blocks: int
    max_waiting: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a replica's requests; times in seconds.

    Attributes:
        submitted, completed, refused: requests.
        running, waiting: requests at the end.
        preemptions, steps: counts.
        tokens: given out, those of unfinished answers too.
        seconds: from the start to the end.
        busy_s: the device ran a program.
        idle_s: it ran none between two programs, while a request was there.
        ttft_s: float64 [completed], from arrival to first token.
        tpot_s: float64, per further token, of completed answers with more than one.
    """

    submitted: int
    completed: int
    refused: int
    running: int
    waiting: int
    preemptions: int
    steps: int
    tokens: int
    seconds: float
    busy_s: float
    idle_s: float
    ttft_s: np.ndarray
    tpot_s: np.ndarray


def run(setup: Setup, load: Load, *, tell_s: Callable[[float], None] | None = None) -> Outcome:
    """Simulate a replica on virtual time.

    Args:
        setup: what it is.
        load: its share.
        tell_s: called now and then, in another thread, with the seconds simulated so far.

    Raises:
        AneuronError: the engine failed, or more wait than memory is there for.
    """
    with (
        asyncio.Runner(loop_factory=VirtualClockLoop) as runner,
        telling(runner.get_loop().time, tell_s),
    ):
        return runner.run(simulate(setup, load))


async def simulate(setup: Setup, load: Load) -> Outcome:
    """Send the load to an engine of its own, on the running loop's time.

    Raises:
        AneuronError: the engine failed, or more wait than memory is there for.
    """
    latency = profile(setup.profile)
    engine = Engine(
        _Silent(setup.num_seqs, setup.max_model_len),
        device=SimDevice.of_profile(latency, checks_inputs=False),
        max_num_seqs=setup.num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        block_size=setup.block_size,
        num_kv_blocks=setup.num_kv_blocks,
        max_waiting=setup.max_waiting,
        enable_prefix_caching=False,  # each prompt is one of its own
        **CARRIES[setup.carry],
    )
    async with engine:
        traffic = _Traffic(
            engine, load, program_s=latency.decode_s(setup.num_seqs), num_seats=setup.num_seqs
        )
        seconds = await traffic.run(setup.duration_s)
        stats, totals = engine.stats(), engine.timeline.metrics()
    return Outcome(
        submitted=traffic.num_submitted,
        completed=len(traffic.ttft_s),
        refused=traffic.num_refused,
        running=stats.running,
        waiting=stats.waiting,
        preemptions=stats.preemptions,
        steps=totals.steps,
        tokens=stats.generation_tokens,
        seconds=seconds,
        busy_s=totals.busy_s,
        idle_s=totals.idle_s,
        ttft_s=np.array(traffic.ttft_s),
        tpot_s=np.array(traffic.tpot_s),
    )


# ── the clients ─────────────────────────────────────────────────────────────────────────


class _Traffic:
    """Sends a replica's requests in time, and notes how they end.

    Nobody reads a token. The figures are the times that the engine notes of every request.
    """

    def __init__(self, engine: Engine, load: Load, *, program_s: float, num_seats: int) -> None:
        self._engine = engine
        self._program_s = program_s
        self._num_seats = num_seats
        self._num_refused_now = 0  # clients that will ask again
        self._loop = engine.loop
        self._is_closed_loop = load.arrivals_s is None
        times_s: list[float] = [] if load.arrivals_s is None else load.arrivals_s.tolist()
        self._arrivals_s = times_s
        self._prompts, self._outputs = load.prompt_tokens.tolist(), load.output_tokens.tolist()
        self._num_clients = load.num_clients
        self._ids = np.zeros(max(self._prompts, default=1), np.int32)
        self._params: dict[int, SamplingParams] = {}
        # With the time at which each was due. Dropping a stream would cancel its request.
        self._streams: dict[str, tuple[TokenStream, float]] = {}
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._started_s = 0.0
        self._ends_with_last = False
        self._num_sent = self._live_tokens = 0
        self.num_submitted = self.num_refused = 0
        self.ttft_s, self.tpot_s = array("d"), array("d")

    async def run(self, duration_s: float | None) -> float:
        """Send everything; return the seconds until the end.

        Raises:
            AneuronError: the engine failed.
        """
        self._started_s = self._loop.time()
        self._ends_with_last = duration_s is None
        if duration_s is not None:
            self._loop.call_at(self._started_s + duration_s, self._end)
        if self._is_closed_loop:
            for _ in range(self._num_clients):
                self._send_next()
        else:
            self._await_arrival()
        await self._over
        return self._loop.time() - self._started_s

    def _end(self, error: AneuronError | None = None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    # ── sending ─────────────────────────────────────────────────────────────────────────

    def _await_arrival(self) -> None:
        """Set the one timer for the next arrival; or end, if nothing more can come of it."""
        if self._num_sent < len(self._arrivals_s):
            self._loop.call_at(self._next_arrival_s(), self._arrive)
        elif self._ends_with_last and not self._streams:
            self._end()

    def _arrive(self) -> None:
        if self._over.done():
            return
        now_s = self._loop.time()
        self._send(self._next_arrival_s())
        # Those of the same time come before the engine plans a step.
        while self._num_sent < len(self._arrivals_s) and self._next_arrival_s() <= now_s:
            self._send(self._next_arrival_s())
        self._await_arrival()

    def _next_arrival_s(self) -> float:
        return self._started_s + self._arrivals_s[self._num_sent]

    def _send_next(self) -> None:
        """Let a client send its next request, a refused one once it may ask again."""
        if self._over.done():
            return
        retry_after_s = self._send(self._loop.time())
        if retry_after_s is not None:
            self._num_refused_now += 1
            # A program frees each seat once at most. More tries than that would be in vain,
            # and with many clients the simulation would do nothing else.
            least_s = self._program_s * max(1.0, self._num_refused_now / self._num_seats)
            self._loop.call_later(max(retry_after_s, least_s), self._send_again)

    def _send_again(self) -> None:
        self._num_refused_now -= 1
        self._send_next()

    def _send(self, due_s: float) -> float | None:
        """Submit the next request; return after how many seconds to ask again if refused.

        Its wait counts from when it was due: loops in real time are up to 1 ms late.
        """
        index = self._num_sent % len(self._prompts)  # in a closed loop there is no last one
        self._num_sent += 1
        self.num_submitted += 1
        ids = self._ids[: self._prompts[index]]
        params = self._params_for(self._outputs[index])
        try:
            stream = self._engine.generate(params=params, prompt_token_ids=ids)
        except Overloaded as error:
            self.num_refused += 1
            return error.retry_after_s
        except AneuronError as error:
            self._end(error)
            return None
        self._streams[stream.request_id] = stream, due_s
        self._live_tokens += len(ids)
        if len(self._streams) > _MAX_LIVE or self._live_tokens > _MAX_LIVE_TOKENS:
            self._end(self._too_many())
        stream._request.on_finish.append(self._note)  # noqa: SLF001  a task each would cost more
        return None

    def _too_many(self) -> ConfigError:
        return ConfigError(
            f"--max-waiting: after {self._loop.time() - self._started_s:.0f} s a replica has "
            f"{len(self._streams)} requests with {self._live_tokens} prompt tokens; at most "
            f"{_MAX_LIVE} and {_MAX_LIVE_TOKENS} can be simulated. Set a limit to them, or more "
            "--replicas",
            param="--max-waiting",
        )

    def _params_for(self, num_tokens: int) -> SamplingParams:
        params = self._params.get(num_tokens)
        if params is None:
            params = self._params[num_tokens] = SamplingParams(
                max_tokens=num_tokens, ignore_eos=True, temperature=0.0, seed=0
            )
        return params

    # ── ending ──────────────────────────────────────────────────────────────────────────

    def _note(self, request: Request) -> None:
        _, due_s = self._streams.pop(request.name)
        assert request.prompt_ids is not None
        self._live_tokens -= len(request.prompt_ids)
        if self._over.done():  # what is aborted after the end
            return
        if request.finish_reason is not FinishReason.LENGTH:
            fault = f"{request!r} ended by {request.finish_reason}"
            self._end(request.error or InternalError(fault))
            return
        first_s, last_s = request.first_token_s, request.finished_s
        assert first_s is not None
        assert last_s is not None
        self.ttft_s.append(first_s - due_s)
        num_further = len(request.output_ids) - 1
        if num_further:
            self.tpot_s.append((last_s - first_s) / num_further)
        if self._is_closed_loop:
            self._loop.call_soon(self._send_next)  # the scheduler is in the middle of its update
        elif self._ends_with_last and self._num_sent == len(self._arrivals_s):
            self._await_arrival()


# ── the model ───────────────────────────────────────────────────────────────────────────


class _Silent(SimModel):
    """Computes nothing and keeps nothing: every token is id 0, and a program only takes time."""

    name = "silent"
    sampled_dtype = "int32"

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        super().__init__(max_model_len=max_model_len)
        self._tokens = np.zeros(num_rows, np.int32)

    def with_kv(self, num_blocks: int, block_size: int, num_slots: int = 0) -> Self:
        """Return itself: it has no cache and no slots."""
        return self

    def executable(self, inputs: ModelInput) -> Any:
        """Return itself: one program is enough."""
        return self

    def __call__(self, inputs: ModelInput, input_ids: Any) -> np.ndarray:
        """Return int32 [samples]; nobody writes to it."""
        return self._tokens[: inputs.num_sampled]
