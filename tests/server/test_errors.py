"""What clients are told of errors: statuses, types, codes, fields, headers."""

from __future__ import annotations

import asyncio
import json
import math

import msgspec
import pytest
from starlette.exceptions import HTTPException

from aneuron import errors as own
from aneuron.server.http.errors import (
    ApiError,
    api_error,
    body_too_large,
    error_body,
    error_response,
    invalid_api_key,
    model_not_found,
    unavailable,
)

SECRET = "a path of the server's"
TABLE: list[tuple[Exception, int, str, str]] = [
    (own.InvalidRequest("n is wrong", param="n"), 400, "invalid_request_error", "invalid_value"),
    (own.RequestError("odd"), 400, "invalid_request_error", "invalid_value"),
    (own.ContextTooLong("100 > 64"), 400, "invalid_request_error", "context_length_exceeded"),
    (own.Overloaded("full", retry_after_s=3.0), 429, "rate_limit_error", "overloaded"),
    (own.EngineClosed(SECRET), 503, "server_error", "engine_unavailable"),
    (own.LaunchFailed(SECRET), 500, "server_error", "device_error"),
    (own.OutOfMemory(SECRET), 500, "server_error", "device_error"),
    (own.DeviceLost(SECRET), 500, "server_error", "device_error"),
    (own.InternalError(SECRET), 500, "server_error", "internal_error"),
    (own.ConfigError(SECRET), 500, "server_error", "internal_error"),
    (own.AneuronError(SECRET), 500, "server_error", "internal_error"),
    (RuntimeError(SECRET), 500, "server_error", "internal_error"),
    (ExceptionGroup(SECRET, [ValueError(SECRET)]), 500, "server_error", "internal_error"),
    (HTTPException(404), 404, "invalid_request_error", "not_found"),
    (HTTPException(405), 405, "invalid_request_error", "method_not_allowed"),
    (msgspec.DecodeError("odd"), 400, "invalid_request_error", "invalid_value"),
    (msgspec.ValidationError("odd"), 400, "invalid_request_error", "invalid_value"),
    (model_not_found("x"), 404, "invalid_request_error", "model_not_found"),
    (invalid_api_key(), 401, "authentication_error", "invalid_api_key"),
    (body_too_large(5), 413, "invalid_request_error", "request_too_large"),
    (unavailable("it stops"), 503, "server_error", "engine_unavailable"),
    (ApiError(403, "no"), 403, "permission_error", "None"),
]


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"), TABLE, ids=[repr(row[0])[:30] for row in TABLE]
)
def test_the_table(error: Exception, status: int, kind: str, code: str) -> None:
    told = api_error(error)
    assert (told.status, told.type, str(told.code)) == (status, kind, code)
    assert told.message
    assert SECRET not in told.message
    response = error_response(told)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert ("retry-after" in response.headers) == (status in {429, 503})
    assert json.loads(bytes(response.body)) == {
        "error": {
            "message": told.message,
            "type": kind,
            "param": told.param,
            "code": told.code,
        }
    }


def test_every_error_of_ours_is_in_the_table() -> None:
    ours = {getattr(own, name) for name in own.__all__ if isinstance(getattr(own, name), type)}
    assert ours <= {type(error) for error, *_ in TABLE} | {own.DeviceError}


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyboardInterrupt(), GeneratorExit()])
def test_cancellation_is_no_answer(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised:
        api_error(error)
    assert raised.value is error


def test_fields_are_named_as_the_client_did() -> None:
    rename = {
        "max_tokens": "max_completion_tokens",
        "grammar": "response_format.json_schema.schema",
    }
    error = own.InvalidRequest("max_tokens must be at least 1, not 0", param="max_tokens")
    told = api_error(error, rename)
    assert told.param == "max_completion_tokens"
    assert told.message == "max_completion_tokens must be at least 1, not 0"
    error = own.InvalidRequest("grammar: json: the grammar is too large", param="grammar")
    told = api_error(error, rename)
    assert told.message == "response_format.json_schema.schema: json: the grammar is too large"
    error = own.InvalidRequest("max_tokens_x is not it", param="max_tokens")
    assert api_error(error, rename).message == "max_tokens_x is not it"
    error = own.InvalidRequest(r"stop: \1", param="stop")
    assert api_error(error, {"stop": r"\g<9>"}).message == r"\g<9>: \1"
    assert api_error(own.InvalidRequest("odd", param="n")).param == "n"


@pytest.mark.parametrize(
    ("text", "param", "message"),
    [
        (
            "Expected `int`, got `str` - at `$.a[0].b`",
            "a[0].b",
            "a[0].b is wrong: expected int, got str",
        ),
        ("Expected `int` - at `$.a[...].b[...]`", "a.b", "a.b is wrong: expected int"),
        ("Expected `str` - at `key` in `$.a`", "a", "a is wrong: expected str"),
        ("Expected `str` - at `key` in `$.a[...]`", "a", "a is wrong: expected str"),
        ("Object missing required field `b` - at `$.a`", "a.b", "a.b is required"),
        ("Object missing required field `b`", "b", "b is required"),
        (
            "Object contains unknown field `x` - at `$.a[0]`",
            "a[0].x",
            "a[0].x is no field that this server knows",
        ),
        ("Expected `object`, got `array`", None, "the body is wrong: expected object, got array"),
    ],
)
def test_what_msgspec_says(text: str, param: str | None, message: str) -> None:
    told = api_error(msgspec.ValidationError(text))
    assert (told.param, told.message) == (param, message)


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    b: dict[str, int]


class Outer(msgspec.Struct):
    a: list[Inner]


def test_msgspec_says_it_so() -> None:
    for body, param in (
        (b'{"a":[{"b":{"x":"y"}}]}', "a[0].b"),
        (b'{"a":[{}]}', "a[0].b"),
        (b'{"a":[{"c":1}]}', "a[0].c"),
        (b"{}", "a"),
        (b"[]", None),
    ):
        with pytest.raises(msgspec.ValidationError) as raised:
            msgspec.json.decode(body, type=Outer)
        assert api_error(raised.value).param == param


@pytest.mark.parametrize(
    ("wait_s", "seconds", "milliseconds"),
    [(0.0, "1", "1"), (0.2, "1", "200"), (1.5, "2", "1500"), (1e9, "3600", "3600000"),
     (-1.0, "1", "1"), (math.inf, "1", "1000"), (math.nan, "1", "1000")],
)  # fmt: skip
def test_when_to_come_back(wait_s: float, seconds: str, milliseconds: str) -> None:
    headers = error_response(ApiError(429, "full", retry_after_s=wait_s)).headers
    assert headers["retry-after"] == seconds
    assert headers["retry-after-ms"] == milliseconds


def test_a_missing_key_asks_for_one() -> None:
    assert error_response(invalid_api_key(missing=True)).headers["www-authenticate"] == "Bearer"
    assert "Bearer" in invalid_api_key(missing=True).message


def test_long_messages_are_cut_and_broken_text_has_a_body() -> None:
    told = ApiError(400, "x" * 10_000, param="y" * 10_000)
    assert len(told.message) == 1000
    assert len(told.param or "") == 200
    assert json.loads(error_body(ApiError(404, "half \ud800")))["error"]["message"] == "half ?"
    assert len(model_not_found("z" * 10_000).message) < 300
