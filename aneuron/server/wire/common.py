"""What requests and answers share: types of values, fields of all that generate, the usage.

Plain types that msgspec reads and writes. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from aneuron.server.wire.decoding import Limits, Request, refuse

if TYPE_CHECKING:
    from aneuron import outputs

__all__ = [
    "Body",
    "CompletionTokensDetails",
    "Count",
    "FunctionName",
    "GenerationRequest",
    "JsonObjectFormat",
    "JsonSchema",
    "JsonSchemaFormat",
    "ModelName",
    "PromptTokensDetails",
    "ResponseFormat",
    "SamplingRequest",
    "StreamOptions",
    "Strict",
    "StructuredOutputs",
    "TextFormat",
    "TokenId",
    "Usage",
    "encode",
]

_INT32 = 2**31 - 1
_INT64 = 2**63 - 1
Count = Annotated[int, Meta(ge=1, le=_INT32)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32)]
ModelName = Annotated[str, Meta(min_length=1, max_length=512)]
FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
_BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
_BiasKey = Annotated[str, Meta(pattern=r"^[0-9]{1,10}$")]
_Bias = Annotated[float, Meta(ge=-100, le=100)]
_Schema = dict[str, Any]

encode = msgspec.json.Encoder().encode


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object inside a body: a field that it does not know is refused."""


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """An object of an answer; a field that is `UNSET` is left out, one that is None is null."""


class StreamOptions(Strict, frozen=True, kw_only=True):
    """What a stream carries beside its deltas."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(Strict, frozen=True, kw_only=True):
    """The form that an answer must have, as vLLM says it: exactly one of these."""

    json: _Schema | str | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The fields that ask for something, by name."""
        values = msgspec.structs.asdict(self).items()
        return {name: value for name, value in values if value is not None and value is not False}


class TextFormat(Strict, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(Strict, frozen=True, kw_only=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(Strict, frozen=True, kw_only=True):
    """A schema with a name; only the schema has an effect."""

    schema: _Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Strict, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that a schema describes."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class SamplingRequest(Request, frozen=True, kw_only=True):
    """The fields that all endpoints which generate share, under one name."""

    free_form: ClassVar[tuple[str, ...]] = ("structured_outputs",)
    long: ClassVar[tuple[str, ...]] = ("allowed_token_ids",)
    most_values: ClassVar[Limits] = {"allowed_token_ids": 2**18}

    model: ModelName
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-_INT64 - 1, le=_INT64)] | None = None
    stop: _StopString | Annotated[list[_StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[_BiasKey, _Bias], Meta(max_length=1024)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=2**18)] | None = None
    bad_words: Annotated[list[_BadWord], Meta(max_length=64)] | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    priority: Annotated[int, Meta(ge=-_INT32 - 1, le=_INT32)] | None = None

    def check(self) -> None:
        """Check the fields that lean on others."""
        if self.structured_outputs is None:
            return
        if (count := len(self.structured_outputs.given)) != 1:
            refuse("structured_outputs", f"must have exactly one form, not {count}")


class GenerationRequest(SamplingRequest, frozen=True, kw_only=True):
    """The fields that chat and completions share."""

    free_form: ClassVar[tuple[str, ...]] = (*SamplingRequest.free_form, "response_format")

    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        """Check the fields that lean on others."""
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "is only allowed with stream: true")
        super().check()
        if self.structured_outputs is not None and not isinstance(
            self.response_format, TextFormat | None
        ):
            refuse("structured_outputs", "and response_format do not go together: give one")

    @property
    def num_choices(self) -> int:
        """How many answers each prompt gets."""
        return self.n or 1

    @property
    def has_form(self) -> bool:
        """Whether the answer must have a form of the client's."""
        asked = not isinstance(self.response_format, TextFormat | None)
        return asked or self.structured_outputs is not None

    @property
    def wants_usage(self) -> bool:
        """Whether a last chunk tells the usage, and all others a null."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether each chunk tells the usage so far."""
        return self.wants_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class PromptTokensDetails(Body, frozen=True, kw_only=True):
    """Of the prompt's tokens, those found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Body, frozen=True, kw_only=True):
    """Of the new tokens, those of reasoning."""

    reasoning_tokens: int


class Usage(Body, frozen=True, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, *parts: outputs.Usage, reasoning_tokens: int = 0) -> Usage:
        """Return the sum of what the engine counted, for each prompt one."""
        prompt = sum(part.prompt_tokens for part in parts)
        new = sum(part.completion_tokens for part in parts)
        cached = sum(part.cached_tokens for part in parts)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=new,
            total_tokens=prompt + new,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning_tokens),
        )
