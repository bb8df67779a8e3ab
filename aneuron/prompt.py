"""Text, messages or ids → checked prompt ids: the first stage of a request.

Comes in: what the caller gave to `generate` or `chat`. Goes out: int32 ids that fit the
model and the KV pool, or an error that names the field. The checks are pure and run at
the call; `tokenize` is awaited by the task that admits the request.
"""

from __future__ import annotations

import numbers
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aneuron.errors import ContextTooLong, InvalidRequest

if TYPE_CHECKING:
    from aneuron.tokenizer import Check, Messages, Tokenizer

__all__ = ["check_length", "tokenize", "validate_text", "validate_token_ids"]

_IDS = "prompt_token_ids"


def validate_token_ids(ids: object, *, vocab_size: int) -> npt.NDArray[np.int32]:
    """Return a copy of the caller's ids as int32.

    Raises:
        InvalidRequest: no ids, not a flat list of integers, or one outside the vocabulary.
    """
    if isinstance(ids, np.ndarray | array):
        column = np.asarray(ids)
    elif isinstance(ids, list | tuple | range):
        column = _column(ids)
    else:
        raise InvalidRequest(
            f"{_IDS} must be a list of integers, not {type(ids).__name__}", param=_IDS
        )
    if column.ndim != 1 or (column.dtype.kind not in "iu" and len(column)):
        raise InvalidRequest(
            f"{_IDS} must be a flat list of integers, not of shape {column.shape} "
            f"and type {column.dtype}",
            param=_IDS,
        )
    if not len(column):
        raise InvalidRequest(f"{_IDS} is empty; at least one id is needed", param=_IDS)
    if column.min() < 0 or column.max() >= vocab_size:
        position = int(np.argmax((column < 0) | (column >= vocab_size)))
        raise _outside(position, column[position], vocab_size)
    return column.astype(np.int32)


def _column(ids: list[Any] | tuple[Any, ...] | range) -> npt.NDArray[np.int64]:
    # numpy would take booleans and whole floats; the set of types is 10x a loop's speed.
    if not set(map(type, ids)) <= {int}:
        for position, item in enumerate(ids):
            if isinstance(item, bool | np.bool_) or not isinstance(item, numbers.Integral):
                raise InvalidRequest(f"{_IDS}[{position}] is {item!r}, not an integer", param=_IDS)
    try:
        return np.fromiter(ids, dtype=np.int64, count=len(ids))
    except OverflowError:
        limit = 2**63
        position = next(i for i, item in enumerate(ids) if not -limit <= item < limit)
        raise InvalidRequest(
            f"{_IDS}[{position}] is {ids[position]}, outside any vocabulary", param=_IDS
        ) from None


def _outside(position: int, value: object, vocab_size: int) -> InvalidRequest:
    return InvalidRequest(
        f"{_IDS}[{position}] is {value}, outside the vocabulary 0..{vocab_size - 1}", param=_IDS
    )


def validate_text(prompt: object, *, param: str = "prompt") -> str:
    """Return the prompt if it is text that can be encoded.

    Raises:
        InvalidRequest: it is not a string, or it holds half of a surrogate pair.
    """
    if not isinstance(prompt, str):
        raise InvalidRequest(f"{param} must be a string, not {type(prompt).__name__}", param=param)
    if not prompt.isascii():
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{param} holds half a surrogate pair at character {error.start}", param=param
            ) from None
    return prompt


def validate_messages(messages: object) -> None:
    """Check that a conversation is a list of dicts with a role and a content.

    Raises:
        InvalidRequest: it is not; the message names the first entry at fault.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest(
            'messages must be a list such as [{"role": "user", "content": "Hi"}]',
            param="messages",
        )
    for index, message in enumerate(messages):
        fault = _message_fault(message)
        if fault is not None:
            raise InvalidRequest(f"messages[{index}] {fault}", param="messages")


def _message_fault(message: object) -> str | None:
    if not isinstance(message, Mapping):
        return f"must be a dict, not {type(message).__name__}"
    if not isinstance(message.get("role"), str):
        return 'needs a "role" that is a string'
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return None  # an assistant's turn may consist of calls alone
    if isinstance(content, list):
        content = "" if all(isinstance(part, Mapping) for part in content) else None
    return None if isinstance(content, str) else 'needs a "content" that is a string or parts'


def check_length(
    num_tokens: int, *, max_model_len: int, capacity: int, param: str = "prompt"
) -> None:
    """Check that the prompt and at least one new token fit.

    Args:
        num_tokens: of the prompt.
        max_model_len: the length limit, prompt and answer together.
        capacity: tokens that the whole KV pool holds.
        param: the field that an error names.

    Raises:
        InvalidRequest: the prompt is empty.
        ContextTooLong: it does not fit; the message names both numbers.
    """
    if num_tokens == 0:
        raise InvalidRequest("the prompt is empty; at least one token is needed", param=param)
    limit = min(max_model_len, capacity)
    if num_tokens < limit:
        return
    where = "the KV pool holds" if capacity < max_model_len else "the length limit is"
    raise ContextTooLong(
        f"the prompt has {num_tokens} tokens, but {where} {limit} tokens, "
        f"of which the answer needs at least one",
        param=param,
    )


async def tokenize(
    tokenizer: Tokenizer,
    prompt: str | Messages,
    *,
    check: Check | None = None,
    **template_kwargs: Any,
) -> npt.NDArray[np.int32]:
    """Return the ids of a text, or of messages put through the chat template.

    Args:
        tokenizer: the model's.
        prompt: text, or messages.
        check: called with the number of ids; what it raises comes out. With it
            (`check_length`) a far too long prompt is refused before it costs the loop time.
        template_kwargs: for the chat template.

    Raises:
        InvalidRequest: the text or the messages are malformed, or there is no template.
    """
    if isinstance(prompt, str):
        return await tokenizer.encode(validate_text(prompt), check=check)
    text = tokenizer.render_chat(prompt, **template_kwargs)
    return await tokenizer.encode_rendered(validate_text(text, param="messages"), check=check)
