"""How a body becomes a request: one way for all of them.

Comes in: a body. Goes out: a frozen request, or an `ApiError` 400 that names the field at fault as
the client wrote it. Pure; runs in the handler's task. Fields are scanned without building their
values, and read once, so that a hostile body costs little more than its length.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from aneuron.params.sizes import MOST_VALUES, holds_more
from aneuron.server.http.errors import ApiError, api_error
from aneuron.server.wire.fields import Fields  # noqa: TC001 (msgspec reads it)
from aneuron.server.wire.nulls import forgiving

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Limits", "Request", "decode", "refuse"]

_MAX_DEPTH = 64  # templates and grammar compilers recurse
_MAX_FIELD_BYTES = 2**20  # of a field that has no limit of its own
_MAX_NEUTRAL_BYTES = 1024  # of a refused field: what asks for nothing is short

Limits = dict[str, int | None]
_R = TypeVar("_R", bound="Request")


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
    scanned = msgspec.structs.asdict(_scanner(kind).decode(body))
    given = {name: bytes(raw) for name, raw in scanned.items() if raw is not UNSET}
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
