"""Text, messages or ids → checked prompt ids: the first stage of a request.

Comes in: what the caller gave to `generate` or `chat`. Goes out: int32 ids that fit the
model and the KV pool, or an error that names the field. The checks are pure and run at
the call; `tokenize` is awaited by the task that admits the request. What a tokenizer must
offer stands here; the ones that ship are in `models/tokenizer.py`.
"""

from __future__ import annotations

import asyncio
import numbers
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from aneuron.errors import ContextTooLong, InvalidRequest

if TYPE_CHECKING:
    from aneuron.params.messages import Conversation, Messages

__all__ = [
    "Check",
    "Ids",
    "StreamDecoder",
    "Tokenizer",
    "Turns",
    "check_choices",
    "check_length",
    "check_vocabulary",
    "spell_bad_words",
    "tokenize",
    "validate_text",
    "validate_token_ids",
]

Ids = Sequence[int] | npt.NDArray[np.integer]
Check = Callable[..., None]  # (num_tokens, *, at_least=False)

_IDS = "prompt_token_ids"


class StreamDecoder(Protocol):
    """Turns ids into text one by one; made by `Tokenizer.decode_stream`."""

    def step(self, token_id: int) -> str | None:
        """Return the text that this id completes, or None where it completes none."""

    def flush(self) -> str:
        """Return what incomplete characters are held back, as `decode` spells them."""


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer.

    Grammars ask for one thing more, `spell_vocabulary() -> (texts, special_ids) | None`, once and
    from a thread: the bytes that each id spells, in order, and which ids are special tokens
    (their bytes are their names). Without it, requests with a grammar are refused.

    Attributes:
        eos_token_ids: the ids that end an answer, as far as the tokenizer knows.
        vocab_size: how many ids there are.
    """

    eos_token_ids: tuple[int, ...]
    vocab_size: int

    async def encode(self, text: str, *, check: Check | None = None) -> npt.NDArray[np.int32]:
        """Return the ids of a plain prompt, with the special tokens it starts with.

        `check` is called with their number before they are copied out, and may raise. It may also
        be called with a smaller number and `at_least=True`, before a long text is encoded.
        """

    async def encode_rendered(
        self, text: str, *, check: Check | None = None
    ) -> npt.NDArray[np.int32]:
        """Return the ids of a rendered chat, which carries its special tokens as text."""

    def render_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str:
        """Return the prompt text for a conversation.

        Raises:
            InvalidRequest: the messages are malformed, or there is no template for them.
        """

    def encode_word(self, text: str) -> list[int]:
        """Return the ids of a short text, without special tokens; asked for bad words alone."""

    def decode(self, ids: Ids, *, skip_special_tokens: bool = True) -> str:
        """Return the text of whole ids; broken characters become U+FFFD."""

    def decode_stream(self, prompt_ids: Ids, *, skip_special_tokens: bool = True) -> StreamDecoder:
        """Return a decoder of the ids that follow `prompt_ids`.

        The joined text is `decode(prompt + new)` less what it has in common with
        `decode(prompt)`: where the prompt ends inside a character that the new ids
        complete, that character counts as new.
        """


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


class Turns:
    """So many at a time, on each event loop: a tokenizer may serve several.

    Args:
        at_once: how many.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._of: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._of = WeakKeyDictionary()

    def here(self) -> asyncio.Semaphore:
        """Return what those on the running loop wait for."""
        loop = asyncio.get_running_loop()
        if (found := self._of.get(loop)) is None:
            found = self._of[loop] = asyncio.Semaphore(self._at_once)
        return found


# Each has the GIL for 5 ms when its turn comes, and the loop waits for all of them.
_RENDERING = Turns(1)


def check_length(
    num_tokens: int,
    *,
    max_model_len: int,
    capacity: int,
    param: str = "prompt",
    at_least: bool = False,
) -> None:
    """Check that the prompt and at least one new token fit.

    Args:
        num_tokens: of the prompt.
        max_model_len: the length limit, prompt and answer together.
        capacity: tokens that the whole KV pool holds.
        param: the field that an error names.
        at_least: there may be more tokens.

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
    number = f"at least {num_tokens}" if at_least else num_tokens
    raise ContextTooLong(
        f"the prompt has {number} tokens, but {where} {limit} tokens, "
        f"of which the answer needs at least one",
        param=param,
    )


def check_choices(num_tokens: int, num_choices: int, *, block_size: int, num_blocks: int) -> None:
    """Check that all choices of a request can begin at the same time.

    Args:
        num_tokens: of the prompt, which they share.
        num_choices: each with a block of its own where the prompt does not fill its last one.
        block_size: tokens in a block.
        num_blocks: of the KV pool.

    Raises:
        InvalidRequest: they cannot.
    """
    own = num_choices - 1 if num_tokens % block_size else 0
    if -(-num_tokens // block_size) + own > num_blocks:
        raise InvalidRequest(
            f"a prompt of {num_tokens} tokens and {num_choices} choices need more blocks than the "
            f"KV pool's {num_blocks}",
            param="n",
        )


def check_vocabulary(ids: npt.NDArray[np.int32], *, vocab_size: int, param: str = "prompt") -> None:
    """Check that the tokenizer gave ids, and that the model knows every one.

    Raises:
        InvalidRequest: it did not; tokenizer and model do not belong together.
    """
    if not len(ids):
        raise InvalidRequest("the prompt is empty; at least one token is needed", param=param)
    for token_id in (int(ids.min()), int(ids.max())):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"the tokenizer gave id {token_id}, outside the model's vocabulary of {vocab_size}",
                param=param,
            )


async def tokenize(
    tokenizer: Tokenizer,
    prompt: str | Conversation,
    *,
    check: Check | None = None,
) -> npt.NDArray[np.int32]:
    """Return the ids of a text, or of messages put through the chat template.

    Args:
        tokenizer: the model's.
        prompt: text, or a conversation.
        check: called with the number of ids; what it raises comes out. With it
            (`check_length`) a far too long prompt is refused before it costs the loop time.

    Raises:
        InvalidRequest: the text or the messages are malformed, or there is no template.
    """
    if isinstance(prompt, str):
        return await tokenizer.encode(validate_text(prompt), check=check)
    if (load_renderer := getattr(tokenizer, "load_renderer", None)) is not None:
        await load_renderer()
    messages, kwargs = prompt.messages, prompt.template_kwargs
    if prompt.is_long:
        async with _RENDERING.here():
            text = await asyncio.to_thread(tokenizer.render_chat, messages, **kwargs)
    else:
        text = tokenizer.render_chat(messages, **kwargs)
    return await tokenizer.encode_rendered(validate_text(text, param="messages"), check=check)


def spell_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ids that spell bad words: without leading space, and behind one.

    The second counts where it takes as many ids, as vLLM has it: else it would ban the space. A
    word of spaces alone is spelled as it is.

    Raises:
        InvalidRequest: the tokenizer cannot say.
    """
    encode = getattr(tokenizer, "encode_word", None)
    if encode is None:
        if not words:
            return ()
        raise InvalidRequest(
            "this tokenizer has no encode_word(), which bad_words need", param="bad_words"
        )
    spelled: list[tuple[int, ...]] = []
    for word in words:
        text = word.lstrip() or word
        bare, spaced = tuple(encode(text)), tuple(encode(" " + text))
        if not bare:
            raise InvalidRequest(f"no tokens spell the bad word {word!r}", param="bad_words")
        spelled.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            spelled.append(spaced)
    return tuple(spelled)
