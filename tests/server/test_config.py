"""`ServerConfig`, `build_app`'s own checks, and which names and paths are served."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from aneuron.errors import ConfigError
from aneuron.server import ServerConfig, build_app
from aneuron.testing import count_engine

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    Serve = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("served_model_names", ("",)),
        ("served_model_names", "one"),
        ("api_keys", ("",)),
        ("api_keys", ("two words",)),
        ("api_keys", ("line\n",)),
        ("api_keys", "key"),
        ("cors_origins", (1,)),
        ("max_body_bytes", 0),
        ("max_body_bytes", True),
        ("max_body_bytes", 1.5),
        ("drain_s", -1),
        ("stall_s", math.nan),
        ("ping_s", math.inf),
        ("ping_s", True),
        ("reasoning_field", "thoughts"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: object) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=name) as caught:
        ServerConfig(**settings)
    assert caught.value.param == name


async def test_a_parser_that_there_is_not(serve_engine: Serve) -> None:
    async with count_engine() as engine:
        with pytest.raises(ConfigError, match="tool_parser") as caught:
            build_app(engine, ServerConfig(tool_parser="yaml"))
    assert caught.value.param == "tool_parser"


async def test_an_answer_says_the_name_that_was_asked_for(serve_engine: Serve) -> None:
    config = ServerConfig(served_model_names=("first", "second"))
    async with count_engine() as engine, serve_engine(engine, config) as server:
        for name in ("first", "second"):
            told = await server.openai.completions.create(model=name, prompt=[5], max_tokens=2)
            assert told.model == name
        assert [one.id async for one in server.openai.models.list()] == ["first", "second"]
        page = (await server.http.get("/metrics")).text
    assert 'model_name="first"' in page
    assert 'model_name="second"' not in page


async def test_no_path_is_another_with_a_slash(serve_engine: Serve) -> None:
    async with count_engine() as engine, serve_engine(engine) as server:
        answer = await server.http.post("/v1/completions/", json={"model": server.model})
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"
