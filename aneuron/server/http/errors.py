"""What went wrong → what a client is told: one table, one envelope.

Comes in: any exception of a handler. Goes out: an `ApiError` (status, type, code, field), and the
response that says it. What a client did wrong is told in full; what broke inside is named by its
kind alone. Pure but for the response class; runs in the handler's task.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from aneuron.errors import (
    ContextTooLong,
    DeviceError,
    DeviceLost,
    EngineClosed,
    Overloaded,
    RequestError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ApiError",
    "api_error",
    "body_too_large",
    "error_body",
    "error_response",
    "invalid_api_key",
    "model_not_found",
    "unavailable",
]

_MAX_MESSAGE_CHARS = 1000  # it may quote what the client sent
_MAX_PARAM_CHARS = 200
_MAX_RETRY_S = 3600.0
_RETRY_S = 1.0  # where nobody knows better

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
_INSIDE = "the server failed; its log says why"

# What msgspec says: "Expected `int`, got `str` - at `$.a[0].b`"; keys are "at `key` in `$.a`".
_PLACE = re.compile(r" - at (?:`key` in )?`(?:key` in `)?\$?([^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


class ApiError(Exception):
    """What a client is told instead of an answer.

    Attributes:
        status: of HTTP.
        message: for people.
        type: OpenAI's kind of error; by default what belongs to the status.
        param: the field at fault, as the client wrote it.
        code: a stable name for programs.
        retry_after_s: seconds after which trying again may help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,  # noqa: A002 (the wire's name)
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.status = status
        self.message = _cut(message, _MAX_MESSAGE_CHARS)
        self.type = type or _type_of(status)
        self.param = None if param is None else _cut(param, _MAX_PARAM_CHARS)
        self.code = code
        self.retry_after_s = retry_after_s
        super().__init__(self.message)


def _type_of(status: int) -> str:
    return _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def api_error(error: BaseException, rename: Mapping[str, str] | None = None) -> ApiError:
    """Return what to tell the client of an exception.

    Args:
        error: what a handler, the engine, msgspec or starlette raised.
        rename: our names of fields → those that the client used.

    Raises:
        BaseException: `error` itself, where it is no `Exception`: cancellation is not an answer.
    """
    match error:
        case ApiError():
            told = error
        case RequestError():
            told = _request_error(error, rename or {})
        case DeviceError():
            told = _device_error(error)
        case EngineClosed():
            told = unavailable("the engine is not open")
        case msgspec.DecodeError():
            told = _decode_error(error)
        case HTTPException(status_code=status):
            told = ApiError(status, str(error.detail), code=_CODES.get(status))
        case Exception():
            told = ApiError(500, _INSIDE, code="internal_error")
        case _:
            raise error
    return told


def _request_error(error: RequestError, rename: Mapping[str, str]) -> ApiError:
    if isinstance(error, Overloaded):
        return ApiError(429, str(error), code=error.code, retry_after_s=error.retry_after_s)
    ours, message = error.param, str(error)
    param = ours if ours is None else rename.get(ours, ours)
    if ours is not None and param is not None:
        # Messages begin with the field; what follows may be English that looks like one.
        message = re.sub(rf"^{re.escape(ours)}\b", lambda _: param, message)
    code = ContextTooLong.code if isinstance(error, ContextTooLong) else "invalid_value"
    return ApiError(400, message, param=param, code=code)


def _device_error(error: DeviceError) -> ApiError:
    what = "is lost" if isinstance(error, DeviceLost) else "failed while it computed this request"
    return ApiError(500, f"the device {what}; the server's log says more", code="device_error")


def _decode_error(error: msgspec.DecodeError) -> ApiError:
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"the body is not valid JSON: {text}", code="invalid_value")
    found = _PLACE.search(text)
    place = found.group(1).replace("[...]", "").lstrip(".") if found else ""
    reason = text[: found.start()] if found else text
    if missing := _MISSING.fullmatch(reason):
        place, reason = _join(place, missing.group(1)), "is required"
    elif unknown := _UNKNOWN.fullmatch(reason):
        place, reason = _join(place, unknown.group(1)), "is no field that this server knows"
    else:
        reason = f"is wrong: {reason[0].lower()}{reason[1:]}".replace("`", "")
    where = _cut(place, _MAX_PARAM_CHARS) or "the body"
    return ApiError(400, f"{where} {reason}", param=place or None, code="invalid_value")


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def model_not_found(name: str) -> ApiError:
    """Return what to say of a model that is not served here."""
    message = f"the model {_cut(name, _MAX_PARAM_CHARS)!r} is not served here; see /v1/models"
    return ApiError(404, message, param="model", code="model_not_found")


def invalid_api_key(*, missing: bool = False) -> ApiError:
    """Return what to say where the key is wrong, or there is none."""
    message = "an API key is needed: Authorization: Bearer KEY" if missing else "wrong API key"
    return ApiError(401, message, code="invalid_api_key")


def body_too_large(max_body_bytes: int) -> ApiError:
    """Return what to say of a body over the limit."""
    message = f"the body is too large: at most {max_body_bytes} bytes are taken"
    return ApiError(413, message, code="request_too_large")


def unavailable(message: str, *, retry_after_s: float = _RETRY_S) -> ApiError:
    """Return what to say while the server takes no work: it drains, or has no engine."""
    return ApiError(503, message, code="engine_unavailable", retry_after_s=retry_after_s)


def error_body(error: ApiError) -> bytes:
    """Return the envelope as JSON: `{"error": {"message", "type", "param", "code"}}`."""
    told = {name: _sound(getattr(error, name)) for name in ("message", "type", "param", "code")}
    return msgspec.json.encode({"error": told})


def _sound(text: str | None) -> str | None:
    """Return text that has an encoding: half a surrogate pair has none."""
    return text if text is None else text.encode("utf-8", "replace").decode()


def error_response(error: ApiError) -> Response:
    """Return the response; `Retry-After` is in whole seconds, 1 at least."""
    headers = {}
    if error.retry_after_s is not None:
        wait_s = error.retry_after_s
        wait_s = min(max(wait_s, 0.0), _MAX_RETRY_S) if math.isfinite(wait_s) else _RETRY_S
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(wait_s * 1000)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    body = error_body(error)
    return Response(body, error.status, headers=headers, media_type="application/json")
