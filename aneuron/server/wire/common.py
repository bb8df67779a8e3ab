"""What all request bodies share: one way to decode them, common fields, common parts of answers.

Comes in: the bytes of a body. Goes out: a frozen request whose fields have been checked one by
one, or an `ApiError` 400 that names the field as the client wrote it. Pure; runs in the
handler's task. A body is scanned once for its fields, without building their values, and read
once into the request's type, so that a hostile body costs little more than its length.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, NoReturn, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from aneuron.params.sizes import MOST_VALUES, holds_more
from aneuron.server.http.errors import ApiError, api_error
from aneuron.server.http.nulls import forgiving
from aneuron.server.wire.fields import Fields  # noqa: TC001 (msgspec reads it)

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    "Limits",
    "ModelName",
    "PromptTokensDetails",
    "Request",
    "ResponseFormat",
    "SamplingRequest",
    "StreamOptions",
    "Strict",
    "StructuredOutputs",
    "TextFormat",
    "TokenId",
    "Usage",
    "decode",
    "encode",
    "refuse",
]

_MAX_DEPTH = 64  # templates and grammar compilers recurse
_MAX_FIELD_BYTES = 2**20  # of a field that has no limit of its own
_MAX_NEUTRAL_BYTES = 1024  # of a refused field: what asks for nothing is short

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
Limits = dict[str, int | None]

encode = msgspec.json.Encoder().encode


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object inside a body: a field that it does not know is refused."""


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """An object of an answer; a field that is `UNSET` is left out, one that is None is null."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request body: the fields that count are its own; `decode` knows the others.

    Attributes:
        fields: what is honoured, ignored and refused.
        free_form: fields that hold JSON of any depth, up to 64.
        long: fields that only the limit on bodies limits.
        most_values: limits of JSON values in fields, where they are not 20,000; None is none.
    """

    fields: ClassVar[Fields]
    free_form: ClassVar[tuple[str, ...]] = ()
    long: ClassVar[tuple[str, ...]] = ()
    most_values: ClassVar[Limits] = {}

    @classmethod
    def check_raw(cls, given: Mapping[str, bytes], max_model_len: int | None) -> None:
        """Check fields before they are read, where that would cost too much.

        Args:
            given: their JSON.
            max_model_len: see `decode`.

        Raises:
            ApiError: one is too large.
        """

    def check(self) -> None:
        """Check what no field's type can say.

        Raises:
            ApiError: fields do not go together.
        """

    @classmethod
    def explain(cls, fault: ApiError) -> ApiError:
        """Return what to say of a wrong field, where more can be said than its type."""
        return fault


_R = TypeVar("_R", bound=Request)


def refuse(param: str, fault: str) -> NoReturn:
    """Refuse a field.

    Raises:
        ApiError: always, 400; the message is the field and its fault.
    """
    raise ApiError(400, f"{param} {fault}", param=param, code="invalid_value")


def decode(kind: type[_R], body: bytes, *, max_model_len: int | None = None) -> _R:
    """Return a body as a request.

    Types are strict (no number in a string, no whole float for an integer, no truth value for a
    number), null is as good as absent but where a field is required, and of a field that comes
    twice the last counts.

    Args:
        kind: of the request.
        body: as it came.
        max_model_len: the longest context, in tokens, if it is known.

    Raises:
        ApiError: 400; `param` is the path of the field at fault.
    """
    try:
        request = forgiving(_Reader(kind, max_model_len), body)
    except msgspec.DecodeError as error:
        raise kind.explain(api_error(error)) from None
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8: {error.reason}"
        raise ApiError(400, message, code="invalid_value") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_value") from None
    request.check()
    return request


class _Reader(Generic[_R]):
    """Decodes a body, in two steps."""

    def __init__(self, kind: type[_R], max_model_len: int | None) -> None:
        self._kind, self._max_model_len = kind, max_model_len

    def decode(self, body: bytes) -> _R:
        """Look at the fields, then read them."""
        _check_fields(self._kind, body, self._max_model_len)
        request: _R = _decoder(self._kind).decode(body)
        return request


@cache
def _decoder(kind: type[_R]) -> msgspec.json.Decoder[_R]:
    return msgspec.json.Decoder(kind)


@cache
def _scanner(kind: type[Request]) -> msgspec.json.Decoder[Any]:
    """Return a decoder that keeps all known fields as they are and refuses unknown ones."""
    lists = kind.fields
    known = [*lists.honoured, *lists.ignored, *lists.refused]
    columns = [(name, msgspec.Raw | UnsetType, UNSET) for name in known]
    return msgspec.json.Decoder(msgspec.defstruct("Given", columns, forbid_unknown_fields=True))


def _check_fields(kind: type[Request], body: bytes, max_model_len: int | None) -> None:
    scanned = _scanner(kind).decode(body)
    names = scanned.__struct_fields__
    values = ((name, getattr(scanned, name)) for name in names)
    given = {name: bytes(raw) for name, raw in values if raw is not UNSET}
    for name, raw in given.items():
        if len(raw) > _MAX_FIELD_BYTES and name not in kind.long:
            refuse(name, f"has {len(raw)} bytes; at most {_MAX_FIELD_BYTES} are taken")
        if name in kind.fields.refused:
            _check_refused(kind.fields, name, given)
        elif name in kind.fields.ignored:
            raw.decode()  # nobody else reads it
        elif (most := kind.most_values.get(name, MOST_VALUES)) and holds_more(raw, most):
            refuse(name, f"holds more than {most} JSON values, those inside of others among them")
        elif name in kind.free_form and _is_too_deep(raw):
            refuse(name, f"is nested deeper than {_MAX_DEPTH} levels")
    kind.check_raw(given, max_model_len)


def _check_refused(fields: Fields, name: str, given: dict[str, bytes]) -> None:
    refused = fields.refused[name]
    value = _small(given[name])
    if refused.same_as and value == _small(given.get(refused.same_as, b"1")):
        return
    if not refused.allows(value):
        refuse(name, f"is not supported: {refused.why}")


def _small(raw: bytes) -> Any:
    """Return a value, if it is one that could be neutral; others are not built."""
    return msgspec.json.decode(raw) if len(raw) <= _MAX_NEUTRAL_BYTES else UNSET


def _is_too_deep(raw: bytes) -> bool:
    """Return whether JSON is nested deeper than 64 levels; `decode` catches what this raises."""
    if raw.count(b"[") + raw.count(b"{") <= _MAX_DEPTH:
        return False
    level = [msgspec.json.decode(raw)]
    for _ in range(_MAX_DEPTH):
        inner = (one.values() if type(one) is dict else one for one in level)
        level = [child for one in inner for child in one if type(child) in (dict, list)]
        if not level:
            return False
    return True


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
