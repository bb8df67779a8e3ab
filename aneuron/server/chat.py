"""`/v1/chat/completions`: messages in, an answer out, whole or as chunks.

Comes in: a body. Goes out: one token stream, and what speaks it: text, reasoning and calls of
tools, told apart by a parser where the model has a form for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from aneuron import outputs
from aneuron.errors import RequestError
from aneuron.outputs import FinishReason
from aneuron.server.asked import Asked
from aneuron.server.call import Endpoint, encode_each
from aneuron.server.http.errors import api_error, error_body
from aneuron.server.http.sse import event
from aneuron.server.tools import CallArguments, CallBegun, Content, Reasoning
from aneuron.server.wire import chat as wire
from aneuron.server.wire.common import Usage, encode
from aneuron.server.wire.decoding import decode
from aneuron.server.wire.logprobs import ChatLogprobs, TokenLogprob, chat_logprobs
from aneuron.server.wire.sampling import field_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aneuron.outputs import Completion, Token
    from aneuron.server.asked import AnswerReader
    from aneuron.server.call import Call
    from aneuron.server.http.errors import ApiError
    from aneuron.server.tools import Piece
    from aneuron.stream import TokenStream

__all__ = ["ChatEndpoint"]


class ChatEndpoint(Endpoint):
    """Answers conversations."""

    name, prefix = "chat", "chatcmpl-"

    async def submit(self, call: Call, body: bytes) -> tuple[list[TokenStream], ChatSpeaker, bool]:
        """Return the stream of a conversation, what speaks it, and whether as events."""
        request, state = decode(wire.ChatRequest, body), self.state
        call.names = field_names(request)
        state.check(request.model)
        asked = await Asked.of(request, state)
        spell = await state.spelling.load() if request.logprobs else None
        speaker = ChatSpeaker(call, request, asked, spell)
        call.received(1, asked.sampling, is_stream=bool(request.stream))
        try:
            stream = state.engine.chat(asked.messages, **asked.template, **asked.sampling)
        except RequestError as error:
            raise api_error(error, call.names) from error
        return [stream], speaker, bool(request.stream)


@dataclass(slots=True)
class _Choice:
    """One answer so far."""

    index: int
    reader: AnswerReader
    has_begun: bool = False
    num_calls: int = 0
    # Kept only where the answer is not streamed.
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)  # id, name, arguments
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def keep(self, piece: Piece) -> None:
        """Add a piece to the whole."""
        match piece:
            case Content(text):
                self.content.append(text)
            case Reasoning(text):
                self.reasoning.append(text)
            case CallBegun(_, call_id, name):
                self.calls.append((call_id, name, []))
            case CallArguments(index, text):
                self.calls[index][2].append(text)

    def reason(self, reason: FinishReason) -> Literal["stop", "length", "tool_calls"]:
        """Return why it ended, as the wire says."""
        if reason is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.num_calls else "stop"


class ChatSpeaker:
    """Says a conversation's answer."""

    ends_with_done = True

    def __init__(
        self,
        call: Call,
        request: wire.ChatRequest,
        asked: Asked,
        spell: Callable[[int], bytes] | None,
    ) -> None:
        """Speak to a call; `spell` gives an id's bytes, for log probabilities."""
        state = call.state
        self._facts: dict[str, Any] = {
            "created": state.now_s(), "model": request.model, "system_fingerprint": None,
        }  # fmt: skip
        self._id, self._field = call.response_id, state.config.reasoning_field
        self._is_stream = bool(request.stream)
        self._wants_usage = request.wants_usage
        self._running = outputs.Usage(0, 0) if request.wants_running_usage else None
        self._spell = spell
        self._choices = [
            _Choice(index, asked.make_reader()) for index in range(request.num_choices)
        ]
        self._writer = wire.ChatWriter(
            response_id=self._id, with_usage=request.wants_usage,
            reasoning_field=self._field, **self._facts,
        )  # fmt: skip

    def delta(self, prompt: int, items: list[Token], usage: outputs.Usage) -> bytes:
        """Return the chunks of some tokens; of an answer that is not streamed, keep them."""
        if self._running is not None:
            num_told = self._running.completion_tokens + len(items)
            self._running = outputs.Usage(usage.prompt_tokens, num_told, usage.cached_tokens)
        if len(self._choices) == 1:
            return self._tell(self._choices[0], items)
        return b"".join(
            self._tell(choice, own)
            for choice in self._choices
            if (own := [item for item in items if item.choice == choice.index])
        )

    def _tell(self, choice: _Choice, items: list[Token]) -> bytes:
        reason = items[-1].finish_reason
        pieces = choice.reader.read(items)
        choice.num_calls += sum(type(piece) is CallBegun for piece in pieces)
        logprobs = self._logprobs(items)
        if not self._is_stream:
            for piece in pieces:
                choice.keep(piece)
            choice.logprobs += logprobs.content if logprobs is not None else []
            return b""
        events: list[bytes] = []
        if not choice.has_begun:
            events.append(self._writer.role(choice.index, usage=self._usage_so_far()))
        choice.has_begun = True
        events += self._chunks(choice.index, pieces, logprobs)
        if reason is not None:
            events.append(
                self._writer.finish(
                    choice.index, choice.reason(reason), items[-1].stop_reason,
                    usage=self._usage_so_far(),
                )
            )  # fmt: skip
        return b"".join(map(event, events))

    def _chunks(
        self, index: int, pieces: Sequence[Piece], logprobs: ChatLogprobs | None
    ) -> list[bytes]:
        if logprobs is None and self._running is None:
            if len(pieces) == 1 and type(pieces[0]) is Content:
                return [self._writer.content(index, pieces[0].text)]
            return [self._writer.delta(index, one) for one in self._deltas(pieces)]
        deltas = self._deltas(pieces)
        if not deltas and logprobs is not None and logprobs.content:
            deltas = [wire.Delta(content="")]  # what is held back has its probabilities now
        told = [logprobs, *[None] * len(deltas)]  # with the first
        usage = self._usage_so_far()
        return [
            self._writer.delta(index, one, logprobs=of, usage=usage)
            for one, of in zip(deltas, told, strict=False)
        ]

    def _deltas(self, pieces: Sequence[Piece]) -> list[wire.Delta]:
        found = (self._delta(piece) for piece in pieces)
        return [one for one in found if one is not None]

    def _delta(self, piece: Piece) -> wire.Delta | None:
        match piece:
            case Content(text):
                return wire.Delta(content=text)
            case Reasoning(text):
                return self._writer.reasoning_delta(text)
            case CallBegun(index, call_id, name):
                function = wire.CalledFunctionDelta(name=name, arguments="")
                call = wire.CallDelta(index=index, id=call_id, type="function", function=function)
                return wire.Delta(tool_calls=[call])
            case CallArguments(index, text):
                function = wire.CalledFunctionDelta(arguments=text)
                return wire.Delta(tool_calls=[wire.CallDelta(index=index, function=function)])
        return None

    def _logprobs(self, items: list[Token]) -> ChatLogprobs | None:
        if self._spell is None:
            return None
        told = [one for one in items if one.token_id is not None and one.logprobs is not None]
        ids = [one.token_id for one in told if one.token_id is not None]
        return chat_logprobs(ids, [one.logprobs for one in told if one.logprobs], self._spell)

    def _usage_so_far(self) -> Usage | None:
        return None if self._running is None else self._usage([self._running])

    def _usage(self, parts: Sequence[outputs.Usage]) -> Usage:
        num_reasoning = sum(choice.reader.num_reasoning for choice in self._choices)
        return Usage.of(*parts, reasoning_tokens=num_reasoning)

    def end(self, completions: list[Completion]) -> bytes:
        """Return the chunk with the totals, if it was asked for."""
        if not self._wants_usage:
            return b""
        return event(self._writer.usage(self._usage([one.usage for one in completions])))

    def failed(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return event(error_body(error))

    async def whole(self, completions: list[Completion]) -> bytes:
        """Return the answer in one."""
        told = completions[0]
        choices = await encode_each(
            wire.ChatChoice(
                index=kept.index, message=self._message(kept),
                logprobs=None if self._spell is None else ChatLogprobs(content=kept.logprobs),
                finish_reason=kept.reason(one.finish_reason), stop_reason=one.stop_reason,
            )
            for kept, one in zip(self._choices, told.choices, strict=True)
        )  # fmt: skip
        usage = self._usage([told.usage])
        return encode(wire.ChatCompletion(id=self._id, choices=choices, usage=usage, **self._facts))

    def _message(self, kept: _Choice) -> wire.ChatMessage:
        content: str | None = "".join(kept.content)
        more: dict[str, Any] = {self._field: "".join(kept.reasoning)} if kept.reasoning else {}
        if kept.calls:
            more["tool_calls"] = [
                wire.AnsweredCall(
                    id=call_id,
                    function=wire.AnsweredFunction(name=name, arguments="".join(arguments)),
                )
                for call_id, name, arguments in kept.calls
            ]
            content = content or None
        return wire.ChatMessage(content=content, **more)

    def reasons(self, completions: list[Completion]) -> list[str]:
        """Return why each choice ended."""
        ends = completions[0].choices
        return [
            kept.reason(one.finish_reason) for kept, one in zip(self._choices, ends, strict=True)
        ]
