"""`Conversation`: messages, and what else a chat template gets, as a value.

Comes in: what the caller gave to `Engine.chat`. Goes out: a copy, checked. Pure; runs in the
caller's task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from aneuron.errors import InvalidRequest
from aneuron.params.sizes import MOST_VALUES, measure

__all__ = ["Conversation", "Messages", "validate_messages"]

Messages = Sequence[Mapping[str, Any]]

# Chat templates are Python: 1,000 messages take 5 to 8 ms, a million characters 40 ms (measured
# on 2 cores). Long ones are rendered in a thread, where the loop gets its turn every 5 ms. Values
# inside of messages, tools and variables are copied one by one before: 65,536 take 30 to 80 ms.
_MAX_MESSAGES = 1024
_MAX_CHARS = 2**20
_MAX_VALUES = 2**16
_MOST_ON_LOOP = 16  # messages, KiB of characters, and 64 times as many values
_OURS = frozenset((
    "add_generation_prompt", "chat_template", "continue_final_message", "conversations",
    "documents", "messages", "return_assistant_tokens_mask", "self", "tools",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and what else the chat template gets."""

    messages: Messages
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return one; arguments are those of `Engine.chat`.

        Raises:
            InvalidRequest: one is wrong; `param` names it.
        """
        _check_shape(messages)
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt=False",
                param="continue_final_message",
            )
        kwargs = _own_variables(chat_template_kwargs)
        _check_size({"tools": tools, "chat_template_kwargs": kwargs, "messages": messages})
        kwargs["add_generation_prompt"] = add_generation_prompt
        kwargs |= {"continue_final_message": True} if continue_final_message else {}
        kwargs |= {"tools": [dict(tool) for tool in tools]} if tools else {}
        return cls([dict(message) for message in messages], kwargs)

    @property
    def is_long(self) -> bool:
        """Rendering takes long enough to be felt."""
        if len(self.messages) > _MOST_ON_LOOP:
            return True
        most = 64 * _MOST_ON_LOOP
        chars, count = measure([_sized(self.messages), self.template_kwargs], most=most)
        return chars > _MOST_ON_LOOP * 2**10 or count > most


def validate_messages(messages: object) -> None:
    """Check that a conversation is a list of dicts with a role and a content, of limited size.

    Raises:
        InvalidRequest: it is not; the message names the first entry at fault.
    """
    _check_shape(messages)
    _check_size({"messages": messages})


def _check_shape(messages: object) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest(
            'messages must be a list such as [{"role": "user", "content": "Hi"}]',
            param="messages",
        )
    if len(messages) > _MAX_MESSAGES:
        raise InvalidRequest(
            f"messages has {len(messages)} entries; at most {_MAX_MESSAGES} are allowed",
            param="messages",
        )
    for index, message in enumerate(messages):
        fault = _message_fault(message)
        if fault is not None:
            raise InvalidRequest(f"messages[{index}] {fault}", param="messages")


def _check_size(parts: Mapping[str, Any]) -> None:
    """Check how much there is in what a template gets, all of it together.

    Raises:
        InvalidRequest: too much; `param` is the part with which it is.
    """
    chars = count = 0
    for param, part in parts.items():
        if not part:
            continue
        most = MOST_VALUES if param == "chat_template_kwargs" else _MAX_VALUES
        given = _sized(part) if param == "messages" else part
        own_chars, own_count = measure(given, most=most)
        chars, count = chars + own_chars, count + own_count
        verb = "holds" if param == "chat_template_kwargs" else "hold"
        if own_count > most or count > _MAX_VALUES:
            message = f"{param} {verb} more than {most} values, those inside of others among them"
            raise InvalidRequest(message, param=param)
        if chars > _MAX_CHARS:
            beside = "" if own_chars > _MAX_CHARS else ", with what is beside"
            raise InvalidRequest(
                f"{param} {verb} {chars} characters{beside}; at most {_MAX_CHARS} are allowed",
                param=param,
            )


def _sized(messages: Messages) -> list[Any]:
    """Return what counts of messages: all but their roles, and reasoning once."""
    return [
        value
        for message in messages
        for key, value in message.items()
        if key != "role" and not (key == "reasoning_content" and value is message.get("reasoning"))
    ]


def _own_variables(kwargs: Any) -> dict[str, Any]:
    """Return the caller's own variables of a chat template.

    Raises:
        InvalidRequest: they are no mapping of names, or one is not theirs to set.
    """
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise InvalidRequest(
            "chat_template_kwargs must be a mapping of names", param="chat_template_kwargs"
        )
    for name in kwargs:
        if name in _OURS or name.endswith("_token") or not name.isidentifier():
            message = f"chat_template_kwargs may not have {name!r}"
            raise InvalidRequest(message, param="chat_template_kwargs")
    return dict(kwargs)


def _message_fault(message: object) -> str | None:
    if not isinstance(message, Mapping):
        return f"must be a dict, not {type(message).__name__}"
    if not isinstance(message.get("role"), str):
        return 'needs a "role" that is a string'
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return None  # an assistant's turn may consist of calls alone
    if isinstance(content, list):
        sound = all(
            isinstance(part, Mapping) and isinstance(part.get("text", ""), str) for part in content
        )
        content = "" if sound else None
    return None if isinstance(content, str) else 'needs a "content" that is a string or parts'
