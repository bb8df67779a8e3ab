"""`/v1/responses`: items in, items out, whole or as events with names; nothing is stored.

Comes in: a body. Goes out: one token stream, and what speaks it. To the engine it is a chat; what
comes back is told as items: a message, reasoning, a call of a function each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol
from uuid import uuid4

from aneuron.errors import InvalidRequest, RequestError
from aneuron.outputs import FinishReason
from aneuron.server.asked import Asked
from aneuron.server.call import Endpoint
from aneuron.server.http.errors import ApiError, api_error
from aneuron.server.http.sse import event
from aneuron.server.tools import CallArguments, CallBegun, CallEnded, Content, Reasoning
from aneuron.server.wire.common import encode
from aneuron.server.wire.decoding import decode
from aneuron.server.wire.logprobs import TokenLogprob, chat_logprobs
from aneuron.server.wire.responses import ResponsesRequest, field_name, renamed
from aneuron.server.wire.responses import answer as wire
from aneuron.server.wire.sampling import field_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aneuron.outputs import Completion, Token, Usage
    from aneuron.server.call import Call
    from aneuron.server.tools import Piece
    from aneuron.stream import TokenStream

__all__ = ["ResponsesEndpoint"]

_Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponsesEndpoint(Endpoint):
    """Answers conversations, item by item."""

    name, prefix = "responses", "resp_"

    async def submit(
        self, call: Call, body: bytes
    ) -> tuple[list[TokenStream], ResponseSpeaker, bool]:
        """Return the stream of a conversation, what speaks it, and whether as events."""
        request, state = decode(ResponsesRequest, body), self.state
        state.check(request.model)
        chat = request.as_chat()
        names = {"messages": "messages", **field_names(chat)}
        call.names = {ours: field_name(theirs) for ours, theirs in names.items()}
        try:
            asked = await Asked.of(chat, state)
        except (ApiError, InvalidRequest) as error:
            raise renamed(api_error(error, names)) from error
        spell = await state.spelling.load() if request.wants_logprobs else None
        speaker = ResponseSpeaker(call, request, asked, spell)
        call.received(1, asked.sampling, is_stream=bool(request.stream))
        try:
            stream = state.engine.chat(asked.messages, **asked.template, **asked.sampling)
        except RequestError as error:
            raise renamed(api_error(error, names)) from error
        return [stream], speaker, bool(request.stream)


class _Tell(Protocol):
    """Tells an event, where the answer is a stream of them."""

    def __call__(self, name: str, /, **fields: Any) -> None: ...


class _Text:
    """A message, or reasoning, that is coming."""

    def __init__(self, tell: _Tell, index: int, *, is_reasoning: bool) -> None:
        self.is_reasoning = is_reasoning
        self._tell = tell
        prefix, self._name = ("rs", "reasoning_text") if is_reasoning else ("msg", "output_text")
        self._id = f"{prefix}_{uuid4().hex}"
        self._at = {"item_id": self._id, "output_index": index, "content_index": 0}
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        tell("response.output_item.added", output_index=index, item=self._item("in_progress", []))
        tell("response.content_part.added", **self._at, part=self._part())

    def grow(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Add text, and what is told of its tokens."""
        self._texts.append(text)
        self._logprobs += logprobs
        more = {} if self.is_reasoning else {"logprobs": logprobs}
        self._tell(f"response.{self._name}.delta", **self._at, delta=text, **more)

    def item(self, status: Literal["completed", "incomplete"]) -> wire.OutputItem:
        """Return the whole of it so far."""
        return self._item(status, [self._part()])

    def end(self, status: Literal["completed", "incomplete"]) -> wire.OutputItem:
        """Tell that it ended."""
        item, part, text = self.item(status), self._part(), "".join(self._texts)
        more = {} if self.is_reasoning else {"logprobs": self._logprobs}
        self._tell(f"response.{self._name}.done", **self._at, text=text, **more)
        self._tell("response.content_part.done", **self._at, part=part)
        index = self._at["output_index"]
        self._tell("response.output_item.done", output_index=index, item=item)
        return item

    def _part(self) -> wire.ReasoningText | wire.OutputText:
        text = "".join(self._texts)
        if self.is_reasoning:
            return wire.ReasoningText(text=text)
        return wire.OutputText(text=text, logprobs=self._logprobs)

    def _item(
        self, status: Literal["in_progress", "completed", "incomplete"], parts: list[Any]
    ) -> wire.OutputItem:
        kind = wire.OutputReasoning if self.is_reasoning else wire.OutputMessage
        return kind(id=self._id, status=status, content=parts)


class _Call:
    """A call of a function that is coming."""

    def __init__(self, tell: _Tell, index: int, begun: CallBegun) -> None:
        self._tell, self._begun = tell, begun
        self._id = f"fc_{uuid4().hex}"
        self._index = index
        self._arguments: list[str] = []
        item = self._item("in_progress")
        tell("response.output_item.added", output_index=index, item=item)

    def grow(self, text: str) -> None:
        """Add a piece of the arguments."""
        self._arguments.append(text)
        self._tell(
            "response.function_call_arguments.delta",
            item_id=self._id, output_index=self._index, delta=text,
        )  # fmt: skip

    def item(self, status: Literal["completed", "incomplete"]) -> wire.OutputItem:
        """Return the whole of it so far."""
        return self._item(status)

    def end(self, status: Literal["completed", "incomplete"]) -> wire.OutputItem:
        """Tell that it ended."""
        item = self._item(status)
        self._tell(
            "response.function_call_arguments.done",
            item_id=self._id, output_index=self._index,
            name=item.name, arguments=item.arguments,
        )  # fmt: skip
        self._tell("response.output_item.done", output_index=self._index, item=item)
        return item

    def _item(self, status: Literal["in_progress", "completed", "incomplete"]) -> wire.OutputCall:
        arguments = "".join(self._arguments)
        return wire.OutputCall(
            id=self._id, status=status, call_id=self._begun.call_id, name=self._begun.name,
            arguments=arguments,
        )  # fmt: skip


class _Output:
    """The items of an answer: one at a time is coming, those before it have ended.

    Attributes:
        num_calls: of functions.
    """

    def __init__(self, tell: _Tell) -> None:
        self.num_calls = 0
        self._tell = tell
        self._ended: list[wire.OutputItem] = []
        self._coming: _Text | _Call | None = None

    @property
    def items(self) -> list[wire.OutputItem]:
        """All of them, the one that is coming as incomplete."""
        coming = [] if self._coming is None else [self._coming.item("incomplete")]
        return [*self._ended, *coming]

    def add(self, piece: Piece, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Take the next piece in; `logprobs` are of the tokens of a text."""
        match piece:
            case Content(text):
                self._text(is_reasoning=False).grow(text, logprobs)
            case Reasoning(text):
                self._text(is_reasoning=True).grow(text)
            case CallBegun():
                self._end()
                self.num_calls += 1
                self._coming = _Call(self._tell, len(self._ended), piece)
            case CallArguments(_, text):
                assert isinstance(self._coming, _Call)
                self._coming.grow(text)
            case CallEnded(_, is_complete):
                self._end(is_complete=is_complete)

    @property
    def is_in_message(self) -> bool:
        """Whether a message is coming."""
        return isinstance(self._coming, _Text) and not self._coming.is_reasoning

    def add_logprobs(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Take in what is told of tokens without text, at the end of a message."""
        if logprobs and self.is_in_message:
            self._text(is_reasoning=False).grow("", logprobs)

    def finish(self, *, is_complete: bool) -> None:
        """End what is coming; an answer without any item is an empty message."""
        if not self._ended and self._coming is None:
            self._text(is_reasoning=False)
        self._end(is_complete=is_complete)

    def _text(self, *, is_reasoning: bool) -> _Text:
        if isinstance(self._coming, _Text) and self._coming.is_reasoning == is_reasoning:
            return self._coming
        self._end()
        self._coming = _Text(self._tell, len(self._ended), is_reasoning=is_reasoning)
        return self._coming

    def _end(self, *, is_complete: bool = True) -> None:
        if self._coming is not None:
            self._ended.append(self._coming.end("completed" if is_complete else "incomplete"))
            self._coming = None


def _of_text(told: list[TokenLogprob], text: str) -> list[TokenLogprob]:
    """Return those of the tokens that spell a text: others, in front, were of a tag."""
    spelled = b"".join([bytes(one.bytes) for one in told])
    begin, end = spelled.rfind(text.encode()), 0
    for at, one in enumerate(told):
        end += len(one.bytes)
        if end > begin:
            return told[at:]
    return told


class ResponseSpeaker:
    """Says a response."""

    ends_with_done = False

    def __init__(
        self,
        call: Call,
        request: ResponsesRequest,
        asked: Asked,
        spell: Callable[[int], bytes] | None,
    ) -> None:
        """Speak to a call; `spell` gives an id's bytes, for log probabilities."""
        state = call.state
        self._now_s = state.now_s
        self._facts: dict[str, Any] = {
            **request.echo, "id": call.response_id, "created_at": state.now_s(),
        }  # fmt: skip
        self._is_stream, self._spell = bool(request.stream), spell
        self._reader = asked.make_reader()
        self._output = _Output(self._tell)
        self._num_events = 0
        self._events: list[bytes] = []
        self._held: list[TokenLogprob] = []  # of tokens whose text is held back
        self._is_whole = True

    def _tell(self, name: str, /, **fields: Any) -> None:
        if self._is_stream:
            told = {"type": name, "sequence_number": self._num_events, **fields}
            self._events.append(event(encode(told), name.encode()))
            self._num_events += 1

    def _told(self) -> bytes:
        told = b"".join(self._events)
        self._events.clear()
        return told

    def delta(self, prompt: int, items: list[Token], usage: Usage) -> bytes:
        """Return the events of some tokens."""
        if self._is_stream and not self._num_events:
            self._tell("response.created", response=self._response("in_progress"))
            self._tell("response.in_progress", response=self._response("in_progress"))
        if self._spell is None:
            self._add(items)
        else:  # one by one: each has its own
            for item in items:
                self._add([item])
        if (reason := items[-1].finish_reason) is not None:
            self._is_whole = reason is not FinishReason.LENGTH
            self._output.add_logprobs(self._held)
            self._output.finish(is_complete=self._is_whole)
        return self._told()

    def _add(self, items: list[Token]) -> None:
        told, has_text = self._logprobs(items), any(item.text for item in items)
        self._held += told if has_text else []
        for piece in self._reader.read(items):
            if type(piece) is Content:
                if not self._output.is_in_message:
                    self._held = _of_text(self._held, piece.text)
                self._output.add(piece, self._held)
            else:  # nobody asks for those of reasoning, or of a call
                self._output.add(piece)
            self._held = []
        self._held += [] if has_text else told

    def _logprobs(self, items: list[Token]) -> list[TokenLogprob]:
        if self._spell is None:
            return []
        told = [one for one in items if one.token_id is not None and one.logprobs is not None]
        ids = [one.token_id for one in told if one.token_id is not None]
        return chat_logprobs(
            ids, [one.logprobs for one in told if one.logprobs], self._spell
        ).content

    def end(self, completions: list[Completion]) -> bytes:
        """Return the last event, which has all of it."""
        status: _Status = "completed" if self._is_whole else "incomplete"
        self._tell(f"response.{status}", response=self._response(status, completions[0].usage))
        return self._told()

    def failed(self, error: ApiError) -> bytes:
        """Return the event of an error; it has what came before."""
        fault = wire.ResponseFault(type=error.code, message=error.message)
        self._tell("response.failed", response=self._response("failed", fault=fault))
        return self._told()

    async def whole(self, completions: list[Completion]) -> bytes:
        """Return the answer in one."""
        status: _Status = "completed" if self._is_whole else "incomplete"
        return encode(self._response(status, completions[0].usage))

    def _response(
        self,
        status: _Status,
        usage: Usage | None = None,
        *,
        fault: wire.ResponseFault | None = None,
    ) -> wire.Response:
        return wire.Response(
            **self._facts, status=status, output=self._output.items, error=fault,
            completed_at=self._now_s() if status == "completed" else None,
            incomplete_details=wire.IncompleteDetails() if status == "incomplete" else None,
            usage=None if usage is None else wire.ResponsesUsage.of(
                usage.prompt_tokens, usage.completion_tokens, cached=usage.cached_tokens,
                reasoning=self._reader.num_reasoning,
            ),
        )  # fmt: skip

    def reasons(self, completions: list[Completion]) -> list[str]:
        """Return why it ended, by the names that metrics have."""
        if not self._is_whole:
            return ["length"]
        return ["tool_calls" if self._output.num_calls else "stop"]
