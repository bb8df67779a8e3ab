"""`Conversation`: messages, and what else a chat template gets, as a value.

Comes in: what the caller gave to `Engine.chat`. Goes out: a copy, checked. Pure; runs in the
caller's task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from aneuron.errors import InvalidRequest

__all__ = ["Conversation", "Messages", "validate_messages"]

Messages = Sequence[Mapping[str, Any]]

# Chat templates are Python: 1,000 messages take 5 to 8 ms, a million characters 40 ms (measured
# on 2 cores). Long ones are rendered in a thread, where the loop gets its turn every 5 ms.
_MAX_MESSAGES = 1024
_MAX_CHARS = 2**20
_MOST_ON_LOOP = 16  # messages, and KiB of characters
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
        validate_messages(messages)
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt=False",
                param="continue_final_message",
            )
        kwargs = _own_variables(chat_template_kwargs)
        kwargs["add_generation_prompt"] = add_generation_prompt
        kwargs |= {"continue_final_message": True} if continue_final_message else {}
        kwargs |= {"tools": [dict(tool) for tool in tools]} if tools else {}
        return cls([dict(message) for message in messages], kwargs)

    @property
    def is_long(self) -> bool:
        """Rendering takes long enough to be felt."""
        size = sum(_content_size(message.get("content")) for message in self.messages)
        size += sum(map(len, map(str, self.template_kwargs.get("tools") or ())))
        return len(self.messages) > _MOST_ON_LOOP or size > _MOST_ON_LOOP * 2**10


def validate_messages(messages: object) -> None:
    """Check that a conversation is a list of dicts with a role and a content, of limited size.

    Raises:
        InvalidRequest: it is not; the message names the first entry at fault.
    """
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
    num_chars = 0
    for index, message in enumerate(messages):
        fault = _message_fault(message)
        if fault is not None:
            raise InvalidRequest(f"messages[{index}] {fault}", param="messages")
        num_chars += _content_size(message.get("content"))
    if num_chars > _MAX_CHARS:
        raise InvalidRequest(
            f"messages hold {num_chars} characters; at most {_MAX_CHARS} are allowed",
            param="messages",
        )


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


def _content_size(content: object) -> int:
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = (part.get("text") for part in parts)
    return sum(len(text) for text in texts if isinstance(text, str))


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
