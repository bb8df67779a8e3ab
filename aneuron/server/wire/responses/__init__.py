"""Responses: the request, which is a chat with other names.

Comes in: `decode(ResponsesRequest, body)`. Goes out: the chat request that asks for the same, and
the way back for names of fields. `items` are those of the input, `answer` is the answer. Pure.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from aneuron.server.http.errors import ApiError
from aneuron.server.wire import chat
from aneuron.server.wire.common import (
    Count,
    FunctionName,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
    SamplingRequest,
    Strict,
    TextFormat,
)
from aneuron.server.wire.decoding import Limits, refuse
from aneuron.server.wire.fields import RESPONSES, Fields
from aneuron.server.wire.messages import MOST_IN_MESSAGES
from aneuron.server.wire.responses.items import messages_of

__all__ = [
    "MAX_ITEMS",
    "ResponsesRequest",
    "field_name",
    "renamed",
]

MAX_ITEMS = 1024
_LOGPROBS = "message.output_text.logprobs"
_Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]


class FunctionTool(chat.FunctionDefinition, frozen=True, kw_only=True):
    """The same as chat has, in one object."""

    type: Literal["function"]


class ChosenFunction(Strict, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """The function that must be called."""

    name: FunctionName


class AllowedFunction(chat.NamedFunction, frozen=True, kw_only=True):
    """One of the functions that may be called."""

    type: Literal["function"]


class AllowedFunctions(Strict, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Some of the functions, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], Meta(min_length=1, max_length=128)]


class NamedSchemaFormat(Strict, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that a schema describes; only the schema has an effect."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Strict, frozen=True, kw_only=True):
    """The form of the answer; models here know no verbosity but the usual."""

    format: TextFormat | JsonObjectFormat | NamedSchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Strict, frozen=True, kw_only=True):
    """How much to think; summaries have no effect, all reasoning is told."""

    effort: chat.Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


_MetadataKey = Annotated[str, Meta(max_length=64)]
_MetadataValue = Annotated[str, Meta(max_length=512)]


class ResponsesRequest(SamplingRequest, frozen=True, kw_only=True):
    """The body of a request for a response."""

    fields: ClassVar[Fields] = RESPONSES
    free_form: ClassVar[tuple[str, ...]] = (
        *SamplingRequest.free_form,
        "chat_template_kwargs",
        "text",
        "tools",
    )
    long: ClassVar[tuple[str, ...]] = (*SamplingRequest.long, "input", "instructions")
    most_values: ClassVar[Limits] = {
        **SamplingRequest.most_values, "input": MOST_IN_MESSAGES,
    }  # fmt: skip

    input: str | Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    include: Annotated[list[_Include], Meta(max_length=16)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | AllowedFunctions | None = (
        None
    )
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: chat.TemplateKwargs | None = None
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Meta(max_length=16)] | None = None

    def check(self) -> None:
        """Check the fields that lean on others."""
        super().check()
        if self.top_logprobs and not self.wants_logprobs:
            refuse("top_logprobs", f'needs "{_LOGPROBS}" in include')
        has_format = not isinstance(self._format, TextFormat | None)
        if self.structured_outputs is not None and has_format:
            refuse("structured_outputs", "and text.format do not go together: give one")
        if self.tools and self._may_call() and (has_format or self.structured_outputs is not None):
            refuse(
                "text.format" if has_format else "structured_outputs",
                "leaves no room for calls of tools: set tool_choice to none, required or a tool",
            )

    def _may_call(self) -> bool:
        choice = self.tool_choice
        if isinstance(choice, AllowedFunctions):
            return choice.mode == "auto"
        return choice in (None, "auto")

    @classmethod
    def explain(cls, fault: ApiError) -> ApiError:
        """Return what to say of a tool that is no function."""
        if re.fullmatch(r"tools\[\d+\]\.type", fault.param or ""):
            text = f"{fault.param} is not function: there are no built-in tools"
            return ApiError(400, text, param=fault.param, code=fault.code)
        return fault

    @property
    def _format(self) -> TextFormat | JsonObjectFormat | NamedSchemaFormat | None:
        return None if self.text is None else self.text.format

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities were asked for."""
        return _LOGPROBS in (self.include or ())

    def as_chat(self) -> chat.ChatRequest:
        """Return the chat completion that asks for the same.

        Raises:
            ApiError: an item of the input is wrong.
        """
        same = {name: getattr(self, name) for name in SamplingRequest.__struct_fields__}
        tools = [chat.Tool(type="function", function=one) for one in self.tools or ()]
        return chat.ChatRequest(
            **same, messages=messages_of(self.input, self.instructions),
            max_completion_tokens=self.max_output_tokens, logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs, tools=tools or None,
            tool_choice=self._chat_tool_choice(), parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            chat_template_kwargs=self.chat_template_kwargs, response_format=self._chat_format(),
        )  # fmt: skip

    def _chat_format(self) -> ResponseFormat | None:
        if isinstance(self._format, NamedSchemaFormat):
            return JsonSchemaFormat(json_schema=JsonSchema(schema=self._format.schema))
        return self._format

    def _chat_tool_choice(self) -> chat.ToolChoice | None:
        match self.tool_choice:
            case ChosenFunction(name=name):
                return chat.NamedTool(function=chat.NamedFunction(name=name))
            case AllowedFunctions(mode=mode, tools=tools):
                some = [chat.OneOfTools(type="function", function=one) for one in tools]
                allowed = chat.AllowedTools(mode=mode, tools=some)
                return chat.AllowedToolChoice(allowed_tools=allowed)
            case choice:
                return choice

    @property
    def echo(self) -> dict[str, Any]:
        """What comes back with the answer, as arguments of `Response`."""
        text, reasoning = self.text or TextConfig(), self.reasoning or ReasoningConfig()
        told = msgspec.to_builtins
        return {
            "model": self.model, "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens, "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": told(text.format or TextFormat())},
            "tool_choice": "auto" if self.tool_choice is None else told(self.tool_choice),
            "tools": told(self.tools or []), "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
        }  # fmt: skip


_CHAT_NAMES = (
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"^messages(\[\d+\].*)?"), "input"),
    (re.compile(r"^max_completion_tokens$"), "max_output_tokens"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"^logprobs$"), "include"),
)


def field_name(name: str) -> str:
    """Return the name of a chat completion's field in a request for a response."""
    for pattern, ours in _CHAT_NAMES:
        name = pattern.sub(ours, name)
    return name


def renamed(fault: ApiError) -> ApiError:
    """Return what to say of a fault that was found in the chat completion."""
    if fault.param is None or fault.status != 400:
        return fault
    param = field_name(fault.param)
    message = param + fault.message.removeprefix(fault.param)
    if not fault.message.startswith(fault.param):
        message = fault.message
    return ApiError(400, message, type=fault.type, param=param, code=fault.code)
