"""One HTTP request on its way to an answer: what follows it, and how it is submitted.

Comes in: a request. Goes out: its `Answer`. Endpoints say how their requests become token streams,
and how those are spoken.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from msgspec import Raw

from aneuron.clock import clock_of
from aneuron.errors import InternalError, RequestError
from aneuron.outputs import AbortReason, Usage
from aneuron.server.answer import Answer
from aneuron.server.http.errors import api_error
from aneuron.server.wire.common import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from starlette.types import Receive, Scope, Send

    from aneuron.outputs import Completion
    from aneuron.server.answer import Speaker
    from aneuron.server.app import ServerState
    from aneuron.server.http.errors import ApiError
    from aneuron.server.watch.metrics import RequestMeter
    from aneuron.stream import TokenStream

_logger = logging.getLogger("aneuron.server")

__all__ = ["Call", "Endpoint", "encode_each", "submit_all"]

_AT_ONCE = 32  # prompts that are submitted in one turn of the loop: a millisecond
_LARGE = 2**16  # bytes of JSON


class Call:
    """One request, as metrics, traces and the log see it.

    Attributes:
        state: of the app.
        response_id: that the client sees.
        names: of fields, ours to the client's.
        answer: to it.
        is_cut_off: the server stops, and waits for it no more.
        has_ended: it is noted how; what is noted later does not count.
    """

    def __init__(self, state: ServerState, scope: Scope, endpoint: str, response_id: str) -> None:
        """Follow a request from here on."""
        self.state = state
        self.response_id = response_id
        self.names: Mapping[str, str] = {}
        self.answer: Answer | None = None
        self.is_cut_off = self.has_ended = False
        self._scope, self._endpoint = scope, endpoint
        self._clock = clock_of(asyncio.get_running_loop())
        self._begun_s = self._clock()
        self._meters: list[RequestMeter] = []
        self._span: Any = None

    def cut_off(self) -> None:
        """End it with an error: the server stops."""
        self.is_cut_off = True
        if self.answer is not None:
            self.answer.cut_off()

    def received(self, num_prompts: int, params: Mapping[str, Any], *, is_stream: bool) -> None:
        """Note that it is about to be submitted."""
        n, most = params.get("n") or 1, params.get("max_tokens")
        metrics = self.state.metrics
        self._meters = [
            metrics.received(self._endpoint, n=n, max_tokens=most) for _ in range(num_prompts)
        ]
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in self._scope["headers"]
        }
        self._span = self.state.tracing.begin(
            self._endpoint, self.state.model_names[0], headers, {**params, "stream": is_stream}
        )

    def note_delta(self, prompt: int, before_s: float | None) -> float:
        """Note a prompt's tokens that came now; those before them came at `before_s`."""
        now_s = self._clock()
        if before_s is None:
            self._meters[prompt].observe_first(now_s - self._begun_s)
            self._span.first_token()
        else:
            self._meters[prompt].observe_gap(now_s - before_s)
        return now_s

    def finished(self, completions: Sequence[Completion], reasons: Sequence[str]) -> None:
        """Note a whole answer; `reasons` are the wire's, of all choices in order."""
        self.has_ended, at = True, 0
        for meter, completion in zip(self._meters, completions, strict=True):
            meter.finished(completion, reasons[at])
            at += len(completion.choices)
        usage = Usage(
            sum(one.usage.prompt_tokens for one in completions),
            sum(one.usage.completion_tokens for one in completions),
            sum(one.usage.cached_tokens for one in completions),
        )
        all_of_it = replace(
            completions[0], choices=[one for of in completions for one in of.choices], usage=usage
        )
        self._span.finished(all_of_it, response_id=self.response_id, reasons=reasons)
        told = self._scope.setdefault("state", {})
        told["prompt_tokens"] = usage.prompt_tokens
        told["completion_tokens"] = usage.completion_tokens

    def error_of(self, error: RequestError, prompt: int) -> ApiError:
        """Return what to tell of a refused prompt: which it was, where there are several."""
        names = dict(self.names)
        if len(self._meters) > 1:
            names |= dict.fromkeys(("prompt", "prompt_token_ids"), f"prompt[{prompt}]")
        return api_error(error, names)

    def failed(self, error: Exception) -> ApiError:
        """Note that it was refused, or failed; return what to tell the client."""
        told = api_error(error, self.names)
        if told.code == InternalError.code:
            _logger.error("request %s failed", self.response_id, exc_info=error)
        for one in self._followers():
            one.failed(told)
        return told

    def aborted(self, reason: str = AbortReason.CLIENT) -> None:
        """Note that the client left, or the server stops."""
        for one in self._followers():
            one.aborted(reason)

    def _followers(self) -> list[Any]:
        if self.has_ended:
            return []
        self.has_ended = True
        return [*self._meters, *([self._span] if self._span is not None else [])]


class Endpoint:
    """An ASGI app that generates; subclasses say how a body becomes streams.

    Attributes:
        name: of the endpoint, for metrics.
        prefix: of response ids.
    """

    name: str
    prefix: str

    def __init__(self, state: ServerState) -> None:
        """Serve an engine."""
        self.state = state

    async def submit(self, call: Call, body: bytes) -> tuple[list[TokenStream], Speaker, bool]:
        """Return the streams of a request, what speaks them, and whether as events.

        Raises:
            ApiError, AneuronError: the request cannot be served; nothing of it runs.
        """
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        call = Call(self.state, scope, self.name, f"{self.prefix}{uuid4().hex}")
        with self.state.open_call(call):
            message = await receive()  # whole: `BodyLimit` has read it
            answer = call.answer = Answer(call, receive, send)
            try:
                # The body is nobody's once it is decoded: answers take long.
                await answer.run(lambda: self.submit(call, message.pop("body", b"")))
            finally:
                call.aborted()  # where nothing else was noted: this task was cancelled
                call.answer = None  # no cycle is left: collecting many would hold the loop


async def submit_all(call: Call, submits: Iterable[Callable[[], TokenStream]]) -> list[TokenStream]:
    """Return the streams of several prompts: of all of them, or of none; in turns with the loop.

    Raises:
        ApiError: one was refused.
        AneuronError: the engine takes none.
    """
    streams: list[TokenStream] = []
    try:
        for submit in submits:
            if len(streams) % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
            streams.append(submit())
    except BaseException as error:
        for stream in streams:
            stream.cancel()
        if isinstance(error, RequestError):
            raise call.error_of(error, len(streams)) from error
        raise
    return streams


async def encode_each(parts: Iterable[Any]) -> Any:
    """Return each part as JSON, to put into a whole; the loop gets in between large ones."""
    encoded = []
    for part in parts:
        encoded.append(Raw(encode(part)))
        if len(encoded[-1]) > _LARGE:
            await asyncio.sleep(0)
    return encoded
