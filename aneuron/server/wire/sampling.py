"""A request's fields → the keyword arguments of `engine.generate` and `engine.chat`.

Comes in: a decoded request. Goes out: what it asks for under the engine's names, and the way
back: which field of the client's each of those names is, for errors. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aneuron.errors import InvalidRequest
from aneuron.params import Grammar
from aneuron.server.http.errors import api_error
from aneuron.server.wire.chat import ChatRequest
from aneuron.server.wire.common import GenerationRequest, JsonObjectFormat, JsonSchemaFormat
from aneuron.server.wire.completions import CompletionRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RENAMED", "field_names", "sampling_of"]

# Fields of the engine's whose name is another one on the wire, whatever the request.
RENAMED: Mapping[str, str] = {
    "include_stop": "include_stop_str_in_output",
    "prompt_token_ids": "prompt",
    "grammar": "response_format",
}

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "priority",
)


def sampling_of(request: GenerationRequest, *, forced: Grammar | None = None) -> dict[str, Any]:
    """Return what a request asks for, as keyword arguments of the engine.

    Only what the client gave is in it, `priority` included; the engine has the defaults.

    Args:
        request: of chat or completions.
        forced: the grammar of a call that `tool_choice` forces; it goes before a form of the
            answer, which is that call.

    Raises:
        ApiError: the form of the answer is none; `param` is the field as the client wrote it.
    """
    asked = {name: getattr(request, name) for name in _SAME}
    asked["include_stop"] = request.include_stop_str_in_output
    asked["max_tokens"] = request.max_tokens
    asked["grammar"] = _grammar_of(request) if forced is None else forced
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            asked["max_tokens"] = request.max_completion_tokens
        asked["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    elif isinstance(request, CompletionRequest):
        asked["logprobs"] = request.logprobs
        asked["prompt_logprobs"] = request.prompt_logprobs
        if request.echo and request.prompt_logprobs is None:
            asked["prompt_logprobs"] = request.logprobs
    return {name: value for name, value in asked.items() if value is not None}


def field_names(request: GenerationRequest) -> dict[str, str]:
    """Return the engine's names of fields → those in this request, for `api_error`."""
    names = dict(RENAMED)
    if (form := _form_of(request)) is not None:
        names["grammar"] = form[0]
    if isinstance(request, ChatRequest):
        names |= {"prompt": "messages", "prompt_token_ids": "messages"}
        if request.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if request.top_logprobs:
            names["logprobs"] = "top_logprobs"
        if form is None and request.tool_choice is not None:
            names["grammar"] = "tool_choice"
    elif isinstance(request, CompletionRequest) and request.prompt_logprobs is None:
        names["prompt_logprobs"] = "logprobs"
    return names


def _grammar_of(request: GenerationRequest) -> Grammar | None:
    form = _form_of(request)
    if form is None:
        return None
    try:
        return Grammar.of(form[1])
    except InvalidRequest as error:
        raise api_error(error, {"grammar": form[0]}) from error


def _form_of(request: GenerationRequest) -> tuple[str, dict[str, Any]] | None:
    """Return the field that asks for a form, and the form as `Grammar.of` takes it."""
    match request.response_format:
        case JsonObjectFormat():
            return "response_format", {"type": "json_object"}
        case JsonSchemaFormat(json_schema=named):
            return "response_format.json_schema.schema", {"json": named.schema}
    if request.structured_outputs is None:
        return None
    [(kind, content)] = request.structured_outputs.given.items()
    where = f"structured_outputs.{kind}"
    if kind == "json_object":
        return where, {"type": "json_object"}
    return where, {"lark" if kind == "grammar" else kind: content}
