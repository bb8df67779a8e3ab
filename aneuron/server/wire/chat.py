"""Chat completions: the request, the whole answer, and the chunks of a stream.

Comes in: `decode(ChatRequest, body)`. Goes out: types whose JSON is what the `openai` client
reads. A `ChatWriter` writes the chunks of one stream; the common ones, a piece of text each, are
put together from bytes that it made once. Pure.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from aneuron.server.wire.common import (
    Body,
    Count,
    FunctionName,
    GenerationRequest,
    Strict,
    Usage,
    encode,
)
from aneuron.server.wire.decoding import Limits, refuse
from aneuron.server.wire.fields import CHAT, Fields
from aneuron.server.wire.logprobs import ChatLogprobs  # noqa: TC001 (msgspec reads it)
from aneuron.server.wire.messages import MOST_IN_MESSAGES, Messages, explain_part

__all__ = [
    "AllowedToolChoice",
    "AllowedTools",
    "AnsweredCall",
    "AnsweredFunction",
    "CallDelta",
    "CalledFunctionDelta",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatMessage",
    "ChatRequest",
    "ChatWriter",
    "Delta",
    "FunctionDefinition",
    "NamedFunction",
    "NamedTool",
    "OneOfTools",
    "TemplateKwargs",
    "Tool",
    "ToolChoice",
    "Tools",
    "plain_tools",
]

FinishReason = Literal["stop", "length", "tool_calls"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionDefinition(Strict, frozen=True, kw_only=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict, frozen=True, kw_only=True):
    """A tool: a function, there are no others."""

    function: FunctionDefinition
    type: Literal["function"]


class NamedFunction(Strict, frozen=True, kw_only=True):
    """The name of a function."""

    name: FunctionName


class NamedTool(Strict, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """The tool that must be called."""

    function: NamedFunction


class OneOfTools(Strict, frozen=True, kw_only=True):
    """One of the tools that may be called."""

    function: NamedFunction
    type: Literal["function"]


class AllowedTools(Strict, frozen=True, kw_only=True):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[OneOfTools], Meta(min_length=1, max_length=128)]


class AllowedToolChoice(Strict, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    """A choice among some of the tools."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice
TemplateKwargs = Annotated[
    dict[Annotated[str, Meta(pattern=r"^(?!self$)[A-Za-z][A-Za-z0-9_]{0,63}$")], Any],
    Meta(max_length=64),
]
Tools = Annotated[list[Tool], Meta(max_length=128)]


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of a chat completion."""

    fields: ClassVar[Fields] = CHAT
    free_form: ClassVar[tuple[str, ...]] = (
        *GenerationRequest.free_form,
        "tools",
        "chat_template_kwargs",
    )
    long: ClassVar[tuple[str, ...]] = (*GenerationRequest.long, "messages")
    most_values: ClassVar[Limits] = {
        **GenerationRequest.most_values, "messages": MOST_IN_MESSAGES,
    }  # fmt: skip
    explain = staticmethod(explain_part)

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        """Check the fields that lean on others."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "is only allowed with logprobs: true")
        if self.add_generation_prompt and self.continue_final_message:
            refuse("continue_final_message", "and add_generation_prompt do not go together")
        if self.tools and self._may_call() and self.has_form:
            field = "response_format" if self.structured_outputs is None else "structured_outputs"
            refuse(
                field,
                "leaves no room for calls of tools: set tool_choice to none, required or a tool",
            )

    def _may_call(self) -> bool:
        choice = self.tool_choice
        if isinstance(choice, AllowedToolChoice):
            return choice.allowed_tools.mode == "auto"
        return choice in (None, "auto")

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the chat template, reasoning effort among them."""
        effort, given = self.reasoning_effort, self.chat_template_kwargs or {}
        if effort is None:
            return given
        return {"reasoning_effort": effort, "enable_thinking": effort != "none", **given}

    @property
    def plain_tools(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return plain_tools(self.tools)

    @property
    def plain_tool_choice(self) -> str | dict[str, Any] | None:
        """What must be called, as it came over the wire."""
        choice: str | dict[str, Any] | None = msgspec.to_builtins(self.tool_choice)
        return choice

    @property
    def begins_turn(self) -> bool:
        """Whether the prompt ends with the beginning of the assistant's turn."""
        given = self.add_generation_prompt
        return not self.continue_final_message if given is None else given


def plain_tools(tools: list[Tool] | None) -> list[dict[str, Any]]:
    """Return tools as chat templates take them; a function without parameters has none."""
    return [{"type": "function", "function": _plain_function(one.function)} for one in tools or ()]


def _plain_function(function: FunctionDefinition) -> dict[str, Any]:
    plain: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        plain["description"] = function.description
    given = function.parameters
    return {**plain, "parameters": _NO_PARAMETERS if given is None else given}


class CalledFunctionDelta(Body, frozen=True, kw_only=True):
    """The name of a called function, or a piece of its arguments, or both."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CallDelta(Body, frozen=True, kw_only=True):
    """A piece of a call; the first of each call has the id, the type and the name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunctionDelta | UnsetType = UNSET


class AnsweredFunction(Body, frozen=True, kw_only=True):
    """A function that the model called; its arguments are meant to be JSON."""

    name: str
    arguments: str


class AnsweredCall(Body, frozen=True, kw_only=True):
    """A call of the model's."""

    id: str
    function: AnsweredFunction
    type: Literal["function"] = "function"


class ChatMessage(Body, frozen=True, kw_only=True):
    """A whole answer; the reasoning is under one of two names."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class ChatChoice(Body, frozen=True, kw_only=True):
    """One of n answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: str | int | None = None


class ChatCompletion(Body, frozen=True, kw_only=True):
    """The answer to a request that does not stream."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None


class Delta(Body, frozen=True, kw_only=True):
    """What a chunk adds to an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Body, frozen=True, kw_only=True):
    """What a chunk adds to one of n answers; `finish_reason` is on its last."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatChunk(Body, frozen=True, kw_only=True):
    """An event of a stream; `usage` is null in all but the last if it was asked for."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


_NOTHING = Delta()
_TEXT_END = b'},"logprobs":null,"finish_reason":null}]'


class ChatWriter:
    """Writes the chunks of one stream, each as one line of JSON.

    Args:
        response_id: of the answer, the same in all chunks.
        created: unix time, in seconds.
        model: as the answer names it.
        system_fingerprint: of weights and settings.
        with_usage: whether chunks have a usage, null where `usage` is not given.
        reasoning_field: "reasoning" or "reasoning_content".
    """

    def __init__(
        self, *, response_id: str, created: int, model: str, system_fingerprint: str | None = None,
        with_usage: bool = False, reasoning_field: str = "reasoning",
    ) -> None:  # fmt: skip
        self._facts: dict[str, Any] = {
            "id": response_id, "created": created, "model": model,
            "system_fingerprint": system_fingerprint,
        }  # fmt: skip
        self._no_usage: UnsetType | None = None if with_usage else UNSET
        self._reasoning_field = reasoning_field
        empty = encode(ChatChunk(**self._facts, choices=[]))
        self._head = empty[: -len(b"]}")] + b'{"index":'
        self._end = _TEXT_END + (b',"usage":null}' if with_usage else b"}")

    def role(self, choice: int, *, usage: Usage | None = None) -> bytes:
        """Return the first chunk of a choice."""
        return self.delta(choice, Delta(role="assistant", content=""), usage=usage)

    def content(self, choice: int, text: str) -> bytes:
        """Return a chunk of text, and nothing else."""
        return b'%b%d,"delta":{"content":%b%b' % (self._head, choice, encode(text), self._end)

    def reasoning(self, choice: int, text: str) -> bytes:
        """Return a chunk of reasoning, and nothing else."""
        return self.delta(choice, self.reasoning_delta(text))

    def reasoning_delta(self, text: str) -> Delta:
        """Return a delta of reasoning, under the name that the server gives it."""
        if self._reasoning_field == "reasoning":
            return Delta(reasoning=text)
        return Delta(reasoning_content=text)

    def finish(
        self, choice: int, reason: FinishReason, stop_reason: str | int | None = None,
        *, usage: Usage | None = None,
    ) -> bytes:  # fmt: skip
        """Return the last chunk of a choice, which has the reason alone."""
        last = ChatChunkChoice(
            index=choice, delta=_NOTHING, finish_reason=reason, stop_reason=stop_reason
        )
        return self._chunk([last], usage)

    def delta(
        self, choice: int, delta: Delta,
        *, logprobs: ChatLogprobs | None = None, usage: Usage | None = None,
    ) -> bytes:  # fmt: skip
        """Return a chunk of any kind, with log probabilities or the usage so far."""
        return self._chunk([ChatChunkChoice(index=choice, delta=delta, logprobs=logprobs)], usage)

    def usage(self, usage: Usage) -> bytes:
        """Return the last chunk of the stream: no choices, the totals."""
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> bytes:
        told = self._no_usage if usage is None else usage
        return encode(ChatChunk(**self._facts, choices=choices, usage=told))
