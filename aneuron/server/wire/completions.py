"""Completions: the request with its four forms of prompts, the answer, the chunks of a stream.

Comes in: `decode(CompletionRequest, body)`. Goes out: types whose JSON is what the `openai`
client reads, and a `CompletionWriter` for streams. Pure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, UnsetType

from aneuron.errors import ContextTooLong
from aneuron.params.sizes import holds_more
from aneuron.prompt import check_length
from aneuron.server.http.errors import ApiError, api_error
from aneuron.server.wire.common import Body, GenerationRequest, TokenId, Usage, encode
from aneuron.server.wire.decoding import Limits, refuse
from aneuron.server.wire.fields import COMPLETIONS, Fields
from aneuron.server.wire.logprobs import (  # msgspec reads them
    CompletionLogprobs,  # noqa: TC001
    PromptLogprob,  # noqa: TC001
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MAX_PROMPTS",
    "CompletionBody",
    "CompletionChoice",
    "CompletionRequest",
    "CompletionWriter",
    "PromptItem",
]

MAX_PROMPTS = 1024
_MAX_IDS = 2**22  # of all prompts: to make them takes 0.06 s
_MANY_IDS = 2**17
_FIRST = re.compile(rb"\s*\[\s*(.)")
_Top = Annotated[int, Meta(ge=0, le=20)]
PromptItem = str | TokenId | list[TokenId]
FinishReason = Literal["stop", "length"]


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of a completion."""

    fields: ClassVar[Fields] = COMPLETIONS
    long: ClassVar[tuple[str, ...]] = (*GenerationRequest.long, "prompt")
    most_values: ClassVar[Limits] = {
        **GenerationRequest.most_values, "prompt": None,
    }  # fmt: skip

    prompt: str | list[PromptItem]
    logprobs: _Top | None = None
    prompt_logprobs: _Top | None = None
    echo: bool | None = None

    @classmethod
    def check_raw(cls, given: Mapping[str, bytes], max_model_len: int | None) -> None:
        """Check that prompts are neither too many nor too long, as far as ids go."""
        _check_sizes(given.get("prompt", b""), max_model_len)

    def check(self) -> None:
        """Check the fields that lean on others, and that the prompts are of one form."""
        super().check()
        _check_prompts(self.prompt)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or ids."""
        prompt: Any = self.prompt
        one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if one else prompt

    @classmethod
    def explain(cls, fault: ApiError) -> ApiError:
        """Say more of a limit of 0, which OpenAI allows for an echo alone."""
        if fault.param == "max_tokens":
            message = f"{fault.message}; an echo without new tokens is not supported"
            return ApiError(400, message, param=fault.param, code=fault.code)
        return fault


def _check_sizes(raw: bytes, max_model_len: int | None) -> None:
    """Check prompts by their JSON: 2 million small lists would hold the loop for seconds."""
    if (found := _FIRST.match(raw)) is None:
        return  # a text
    if found.group(1) == b'"':
        if holds_more(raw, MAX_PROMPTS):
            refuse("prompt", f"holds more than {MAX_PROMPTS} prompts")
        return
    if (num_lists := raw.count(b"[") - 1) > MAX_PROMPTS:
        refuse("prompt", f"holds more than {MAX_PROMPTS} prompts")
    # No comma stands in ids but between them, and one before each list but the first.
    sizes = [one.count(b",") + (not at) for at, one in enumerate(raw.split(b"]", MAX_PROMPTS + 1))]
    if max_model_len is not None and sum(sizes) > _MANY_IDS:  # else the engine says it
        try:
            at = sizes.index(most := max(sizes))
            where = f"prompt[{at}]" if num_lists > 1 else "prompt"
            check_length(
                max(1, most), max_model_len=max_model_len, capacity=max_model_len, param=where
            )
        except ContextTooLong as error:
            raise api_error(error) from error
    if sum(sizes) > _MAX_IDS:
        refuse("prompt", f"holds {sum(sizes)} ids; at most {_MAX_IDS} are taken in one body")


def _check_prompts(prompt: str | list[PromptItem]) -> None:
    if isinstance(prompt, str):
        return
    if not prompt:
        refuse("prompt", "is empty")
    kind = type(prompt[0])
    if set(map(type, prompt)) != {kind}:
        at = next(i for i, item in enumerate(prompt) if type(item) is not kind)
        refuse(f"prompt[{at}]", "is of another kind than those before: give texts, ids or lists")
    if kind is int:
        return
    if len(prompt) > MAX_PROMPTS:
        refuse("prompt", f"holds {len(prompt)} prompts; at most {MAX_PROMPTS} are taken")
    if [] in prompt:
        refuse(f"prompt[{prompt.index([])}]", "is empty")


class CompletionChoice(Body, frozen=True, kw_only=True):
    """An answer, or what a chunk adds to it; choices of one prompt follow each other."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class CompletionBody(Body, frozen=True, kw_only=True):
    """A whole answer, and an event of a stream: they look alike."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


_TEXT_END = b',"logprobs":null,"finish_reason":null}]'


class CompletionWriter:
    """Writes the chunks of one stream, each as one line of JSON.

    Args:
        response_id: of the answer, the same in all chunks.
        created: unix time, in seconds.
        model: as the answer names it.
        system_fingerprint: of weights and settings.
        with_usage: whether chunks have a usage, null where `usage` is not given.
    """

    def __init__(
        self, *, response_id: str, created: int, model: str, system_fingerprint: str | None = None,
        with_usage: bool = False,
    ) -> None:  # fmt: skip
        self._facts: dict[str, Any] = {
            "id": response_id, "created": created, "model": model,
            "system_fingerprint": system_fingerprint,
        }  # fmt: skip
        self._no_usage: UnsetType | None = None if with_usage else UNSET
        empty = encode(CompletionBody(**self._facts, choices=[]))
        self._head = empty[: -len(b"]}")] + b'{"index":'
        self._end = _TEXT_END + (b',"usage":null}' if with_usage else b"}")

    def text(self, choice: int, text: str) -> bytes:
        """Return a chunk of text, and nothing else."""
        return b'%b%d,"text":%b%b' % (self._head, choice, encode(text), self._end)

    def chunk(self, choice: CompletionChoice, *, usage: Usage | None = None) -> bytes:
        """Return a chunk of any kind, with the usage so far or without."""
        return self._chunk([choice], usage)

    def finish(
        self, choice: int, reason: FinishReason, stop_reason: str | int | None = None,
        *, usage: Usage | None = None,
    ) -> bytes:  # fmt: skip
        """Return the last chunk of a choice, which has no text."""
        last = CompletionChoice(
            index=choice, text="", finish_reason=reason, stop_reason=stop_reason
        )
        return self._chunk([last], usage)

    def usage(self, usage: Usage) -> bytes:
        """Return the last chunk of the stream: no choices, the totals."""
        return self._chunk([], usage)

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None) -> bytes:
        told = self._no_usage if usage is None else usage
        return encode(CompletionBody(**self._facts, choices=choices, usage=told))
