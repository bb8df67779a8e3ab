"""Items of a Responses input → the turns of a conversation, as chat completions have them.

Comes in: each item as JSON. Goes out: messages. Items of the assistant in a row, which are its
reasoning, what it said and what it called, become one turn again. Nothing that an item names is
fetched, nor looked up: nothing was stored. Pure.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from aneuron.params.sizes import MOST_VALUES, holds_more
from aneuron.server.http.errors import ApiError, api_error
from aneuron.server.wire.common import FunctionName, Strict
from aneuron.server.wire.decoding import refuse
from aneuron.server.wire.messages import (
    AssistantMessage,
    CalledFunction,
    DeveloperMessage,
    FunctionCall,
    RefusalPart,
    SystemMessage,
    TextPart,
    ToolMessage,
    UserMessage,
)
from aneuron.server.wire.nulls import forgiving

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aneuron.server.wire.messages import Message

__all__ = [
    "ITEMS",
    "FunctionCallItem",
    "FunctionOutputItem",
    "InputText",
    "MessageItem",
    "OutputTextPart",
    "ReasoningItem",
    "ReasoningTextPart",
    "RefusalText",
    "SummaryText",
    "messages_of",
]

_Status = Literal["in_progress", "completed", "incomplete"]
_PART_TYPE = re.compile(r"(.*\.(?:content|output)\[\d+\])\.type")


class InputText(Strict, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    """A text; a hint to a cache has no effect."""

    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class OutputTextPart(Strict, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """A text of the assistant's, as an answer had it; only the text has an effect."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None  # the official client's own, which it sends back


class RefusalText(Strict, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    """A text of the assistant that said no."""

    refusal: str


class MessageItem(Strict, frozen=True, kw_only=True):
    """What somebody said; `id`, `status` and `phase` have no effect."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputTextPart | RefusalText]
    type: Literal["message"] | None = None
    id: str | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Strict, frozen=True, kw_only=True):
    """A function that the assistant called; the arguments are the JSON of an object."""

    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: Annotated[str, Meta(max_length=2**20)]
    id: str | None = None
    status: _Status | None = None
    caller: None = None
    namespace: None = None


class FunctionOutputItem(Strict, frozen=True, kw_only=True):
    """What a called function gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    name: FunctionName | None = None
    status: _Status | None = None
    caller: None = None
    namespace: None = None


class SummaryText(Strict, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    """A summary of reasoning."""

    text: str


class ReasoningTextPart(Strict, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Reasoning."""

    text: str


class ReasoningItem(Strict, frozen=True, kw_only=True):
    """What the assistant thought: its content, or the summary where there is none."""

    type: Literal["reasoning"]
    summary: list[SummaryText] | None = None
    content: list[ReasoningTextPart] | None = None
    id: str | None = None
    status: _Status | None = None
    encrypted_content: None = None  # nobody here could read it

    @property
    def text(self) -> str:
        """All of it."""
        parts: Sequence[SummaryText | ReasoningTextPart] = self.content or self.summary or ()
        return "\n".join(part.text for part in parts)


Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem
ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
}


class _Kind(msgspec.Struct):
    type: str | None = None  # that of a message may be left out


_KIND = msgspec.json.Decoder(_Kind)
_DECODERS = {name: msgspec.json.Decoder(kind) for name, kind in ITEMS.items()}


def messages_of(
    given: str | Sequence[msgspec.Raw], instructions: str | None = None
) -> list[Message]:
    """Return a conversation.

    Args:
        given: a text of the user's, or items.
        instructions: that go before it.

    Raises:
        ApiError: an item is wrong, or of a kind that is not taken; `param` is its path.
    """
    start = [] if instructions is None else [SystemMessage(content=instructions)]
    if isinstance(given, str):
        return [*start, UserMessage(content=given)]
    items = [_decode(raw, f"input[{index}]") for index, raw in enumerate(given)]
    return [*start, *_turns(items)]


def _decode(raw: msgspec.Raw, where: str) -> Item:
    try:
        name = _KIND.decode(raw).type or "message"
        if name in _DECODERS:
            item: Item = forgiving(_DECODERS[name], raw)
            if isinstance(item, FunctionCallItem):
                _check_arguments(item.arguments, f"{where}.arguments")
            return item
    except msgspec.DecodeError as error:
        raise _placed(api_error(error), where) from None
    except RecursionError:
        refuse(where, "is nested too deeply")
    if name == "item_reference":
        refuse(where, "refers to an item, and nothing is stored: send the item itself")
    return refuse(f"{where}.type", f"is {name!r:.100}; taken are {', '.join(ITEMS)}")


def _placed(fault: ApiError, where: str) -> ApiError:
    """Return a fault inside an item with its path in the body."""
    param = where if fault.param is None else f"{where}.{fault.param}"
    text = param + fault.message.removeprefix(fault.param or "the body")
    if found := _PART_TYPE.fullmatch(param):
        param = found.group(1)
        text = (
            f"{param} is no text part: images, sound and files are refused, and nothing is fetched"
        )
    return ApiError(400, text, param=param, code=fault.code)


def _check_arguments(arguments: str, where: str) -> None:
    if holds_more(arguments.encode(), MOST_VALUES):
        refuse(where, f"holds more than {MOST_VALUES} JSON values")
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        refuse(where, "must be the JSON of an object")


@dataclass(slots=True)
class _Turn:
    """The assistant's turn, as its items come."""

    reasoning: list[str] = field(default_factory=list)
    content: str | list[TextPart | RefusalPart] | None = None
    calls: list[FunctionCall] = field(default_factory=list)

    def takes(self, item: Item) -> bool:
        """Return whether an item can be a part of it: they come in this order."""
        if isinstance(item, ReasoningItem):
            return self.content is None and not self.calls
        if isinstance(item, MessageItem):
            return self.content is None and not self.calls and item.role == "assistant"
        return isinstance(item, FunctionCallItem)

    def add(self, item: Item) -> None:
        match item:
            case ReasoningItem():
                self.reasoning.append(item.text)
            case MessageItem():
                self.content = _content(item)
            case FunctionCallItem():
                function = CalledFunction(name=item.name, arguments=item.arguments)
                self.calls.append(FunctionCall(id=item.call_id, function=function))

    @property
    def message(self) -> AssistantMessage:
        reasoning = "\n".join(self.reasoning) if self.reasoning else None
        content = "" if self.content is None else self.content
        return AssistantMessage(content=content, reasoning=reasoning, tool_calls=self.calls or None)


def _turns(items: Sequence[Item]) -> list[Message]:
    turns: list[Message | _Turn] = []
    for item in items:
        if isinstance(item, FunctionOutputItem):
            turns.append(_output(item))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            turns.append(_message(item))
        else:
            last = turns[-1] if turns else None
            if not isinstance(last, _Turn) or not last.takes(item):
                turns.append(last := _Turn())
            last.add(item)
    return [turn.message if isinstance(turn, _Turn) else turn for turn in turns]


def _output(item: FunctionOutputItem) -> ToolMessage:
    given = item.output
    text = given if isinstance(given, str) else "\n".join(part.text for part in given)
    return ToolMessage(content=text, tool_call_id=item.call_id, name=item.name)


def _message(item: MessageItem) -> Message:
    content = _content(item)
    text = content if isinstance(content, str) else [
        part if isinstance(part, TextPart) else TextPart(text=part.refusal) for part in content
    ]  # fmt: skip
    match item.role:
        case "system":
            return SystemMessage(content=text)
        case "developer":
            return DeveloperMessage(content=text)
    return UserMessage(content=text)


def _content(item: MessageItem) -> str | list[TextPart | RefusalPart]:
    if isinstance(item.content, str):
        return item.content
    return [
        RefusalPart(refusal=part.refusal)
        if isinstance(part, RefusalText)
        else TextPart(text=part.text)
        for part in item.content
    ]
