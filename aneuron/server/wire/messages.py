"""The turns of a conversation: as they come over the wire, and as chat templates take them.

Comes in: messages with a role each, whose content is a text or text parts. Goes out: plain dicts.
Nothing that a message names is fetched: parts of other kinds are refused. Pure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from aneuron.server.http.errors import ApiError
from aneuron.server.wire.common import FunctionName, Strict
from aneuron.server.wire.decoding import refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MOST_IN_MESSAGES",
    "AssistantMessage",
    "CalledFunction",
    "DeveloperMessage",
    "FunctionCall",
    "Message",
    "Messages",
    "RefusalPart",
    "SystemMessage",
    "TextPart",
    "ToolMessage",
    "UserMessage",
    "explain_part",
    "plain_messages",
]

# JSON values in all messages: 1024 turns with a dozen calls or thirty parts each.
MOST_IN_MESSAGES = 2**17
_PART_TYPE = re.compile(r"(messages\[\d+\]\.content\[\d+\])\.type")
_Anything = dict[str, Any] | None


class TextPart(Strict, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A text; hints to a cache have no effect."""

    text: str
    prompt_cache_breakpoint: _Anything = None
    cache_control: _Anything = None


class RefusalPart(Strict, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    """A text of the assistant that said no."""

    refusal: str


Content = str | list[TextPart]


class SystemMessage(Strict, frozen=True, kw_only=True, tag_field="role", tag="system"):
    """What holds for the whole conversation."""

    content: Content
    name: str | None = None


class DeveloperMessage(Strict, frozen=True, kw_only=True, tag_field="role", tag="developer"):
    """The same under its newer name."""

    content: Content
    name: str | None = None


class UserMessage(Strict, frozen=True, kw_only=True, tag_field="role", tag="user"):
    """A turn of the user."""

    content: Content
    name: str | None = None


class CalledFunction(Strict, frozen=True, kw_only=True):
    """A function that the assistant called, and its arguments as JSON."""

    name: FunctionName
    arguments: Annotated[str, Meta(max_length=2**20)]


class FunctionCall(Strict, frozen=True, kw_only=True):
    """A call of the assistant's; `index` is a remnant of a stream, without effect."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class AssistantMessage(Strict, frozen=True, kw_only=True, tag_field="role", tag="assistant"):
    """A turn of the assistant, as an earlier answer had it.

    `annotations`, `audio` and `function_call` are in what clients send back; they are empty.
    """

    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: list[FunctionCall] | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(Strict, frozen=True, kw_only=True, tag_field="role", tag="tool"):
    """What a called function gave."""

    content: Content
    tool_call_id: str
    name: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
Messages = Annotated[list[Message], Meta(min_length=1, max_length=1024)]


def explain_part(fault: ApiError) -> ApiError:
    """Return what to say of a part that is no text; other faults come back as they are."""
    if found := _PART_TYPE.fullmatch(fault.param or ""):
        part = found.group(1)
        text = (
            f"{part} is no text part: images, sound and files are refused, and nothing is fetched"
        )
        return ApiError(400, text, param=part, code=fault.code)
    return fault


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them.

    Text parts are joined by line ends, and "developer" becomes "system". The arguments of calls
    stay JSON text; `template_messages` of `server.tools` makes objects of them.

    Raises:
        ApiError: an assistant's turn is empty.
    """
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: Message, where: str) -> dict[str, Any]:
    if isinstance(message, AssistantMessage):
        return _plain_turn(message, where)
    plain: dict[str, Any] = {"role": "system", "content": _text(message.content)}
    if isinstance(message, UserMessage):
        plain["role"] = "user"
    elif isinstance(message, ToolMessage):
        plain |= {"role": "tool", "tool_call_id": message.tool_call_id}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _plain_turn(message: AssistantMessage, where: str) -> dict[str, Any]:
    content = message.refusal if message.content is None else message.content
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if content is None and reasoning is None and not message.tool_calls:
        refuse(f"{where}.content", "is required where there are no tool_calls")
    plain: dict[str, Any] = {"role": "assistant", "content": _text(content or "")}
    if message.name is not None:
        plain["name"] = message.name
    if reasoning is not None:  # templates know it by either name
        plain |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    return plain


def _text(content: str | Sequence[TextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def _call(call: FunctionCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}
