"""Bad input of every kind: a typed error that names the field, and nothing is lost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from aneuron import ConfigError, Engine, EngineClosed, InvalidRequest
from aneuron.testing import Count, count_engine, no_leaks, sim_engine
from tests.support import after, both_schedulings, start

NAN = math.nan
BAD_SAMPLING: list[tuple[str, dict[str, Any]]] = [
    *(("max_tokens", {"max_tokens": value}) for value in (0, -1, 1.5, "3", True, NAN)),
    *(("min_tokens", {"min_tokens": value}) for value in (-1, 0.5, None)),
    ("min_tokens", {"min_tokens": 5, "max_tokens": 2}),
    *(("temperature", {"temperature": value}) for value in (NAN, -0.1, math.inf, "hot", None)),
    *(("top_k", {"top_k": value}) for value in (-2, 1.0, None)),
    *(("top_p", {"top_p": value}) for value in (0, 1.1, NAN, -1)),
    *(("min_p", {"min_p": value}) for value in (-0.1, 1.1, NAN)),
    *(("seed", {"seed": value}) for value in (1.5, 2**64, "x")),
    *(("stop", {"stop": value}) for value in (5, [""], ["x"] * 17, [None], "x" * 2000)),
    *(("stop_token_ids", {"stop_token_ids": value}) for value in (5, [-1], ["a"], [2**31])),
    ("include_stop", {"include_stop": "yes"}),
    ("ignore_eos", {"ignore_eos": 1}),
    ("temprature", {"temprature": 1.0}),
    ("params", {"params": {"max_tokens": 1}}),
    ("request_id", {"request_id": ""}),
    ("request_id", {"request_id": 7}),
]
BAD_PROMPTS: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {}),
    ("prompt", {"prompt": "x", "prompt_token_ids": [1]}),
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": "\ud800"}),
    *(
        ("prompt_token_ids", {"prompt_token_ids": value})
        for value in ([], [-1], [1 << 20], [2**70], "abc", [1.5], [[1]], [True], 5, {1, 2})
    ),
]


async def test_bad_requests_are_refused_at_the_call() -> None:
    """Every wrong field: typed, named, before anything is scheduled; who runs stays exact."""
    async with count_engine(latency=0.001) as engine, no_leaks(engine):
        beside = start(engine, 1000)
        await anext(beside)
        calls = [
            *((param, {"prompt": "x", **options}) for param, options in BAD_SAMPLING),
            *BAD_PROMPTS,
        ]
        for param, options in calls:
            with pytest.raises(InvalidRequest) as caught:
                _ = engine.generate(**options)
            assert caught.value.param == param, options
            assert isinstance(caught.value, ValueError)
            stats = engine.stats()
            assert (stats.running, stats.waiting, engine._core.records()["names"]) == (1, 0, 1)
        for messages in ([], "hi", [{"role": "user"}], [{"content": "x"}], [5], None):
            with pytest.raises(InvalidRequest) as caught:
                _ = engine.chat(messages)  # type: ignore[arg-type]
            assert caught.value.param == "messages"
        assert (await beside).token_ids == after(1000, 50)


EXTREMES: list[dict[str, Any]] = [
    {"min_tokens": 2**31},
    {"min_tokens": 2**40, "max_tokens": 2**40},
    {"max_tokens": 10**30},
    {"top_k": 10**12},
    {"seed": 2**64 - 1},
    {"seed": -(2**63)},
    {"seed": np.int64(5)},
    {"seed": np.uint64(2**64 - 1)},
    {"max_tokens": np.int8(100)},
    {"min_tokens": np.int8(100)},
    {"temperature": 1e-300},
    {"temperature": np.float32(0)},
    {"top_p": 1e-300},
    {"stop_token_ids": [2**31 - 1]},
    {"stop_token_ids": {0}},
]


@pytest.mark.parametrize("options", EXTREMES, ids=repr)
async def test_extreme_values_harm_nobody(options: dict[str, Any]) -> None:
    """Values at the edge of what is valid: served, and those beside it are exact."""
    async with count_engine(max_model_len=220) as engine:
        beside = start(engine, 1000, 150)
        settings = {"temperature": 0.0, "max_tokens": None, **options}
        answer = await engine.generate(prompt_token_ids=[1] * 100, **settings)
        count = 100 if options.get("max_tokens") == 100 else 120
        assert answer.token_ids == after(1, count)
        assert (await beside).token_ids == after(1000, 150)


BAD_SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *(("max_num_seqs", {"max_num_seqs": value}) for value in (0, -1, 1.5, "4", True, None)),
    ("max_num_batched_tokens", {"max_num_batched_tokens": 0}),
    ("block_size", {"block_size": 0}),
    ("num_kv_blocks", {"num_kv_blocks": -5}),
    ("max_model_len", {"max_model_len": 0}),
    ("max_in_flight_steps", {"max_in_flight_steps": 0}),
    *(("step_timeout_s", {"step_timeout_s": value}) for value in (0, -1, NAN, math.inf, "1")),
    ("shutdown_s", {"shutdown_s": NAN}),
    *(("num_seqs_buckets", {"num_seqs_buckets": value}) for value in ([0], [1.5], "ab", 5, 0)),
    ("dtype", {"dtype": "float8"}),
    ("token_carry", {"token_carry": "magic"}),
    ("token_carry", {"token_carry": "host"}),
    ("token_carry", {"token_carry": "handoff", "async_scheduling": False}),
    ("async_scheduling", {"async_scheduling": "no"}),
    ("max_seqs", {"max_seqs": 5}),
]


@pytest.mark.parametrize(("param", "settings"), BAD_SETTINGS, ids=repr)
def test_bad_settings(param: str, settings: dict[str, Any]) -> None:
    """A wrong setting: ConfigError, a ValueError that names it, when the engine is made."""
    with pytest.raises(ConfigError) as caught:
        Engine("sim:count", **settings)
    assert caught.value.param == param
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("param", "model", "settings"),
    [
        ("model", "sim:nope", {}),
        ("device", "sim:count", {"device": "tpu"}),
        ("device", "sim:count", {"device": "cpu"}),
        ("device", "smollm2-135m", {"device": "sim"}),
        ("max_model_len", "sim:count", {"max_model_len": 10**6}),
        ("kv_cache_bytes", "sim:count", {"kv_cache_bytes": 1}),
    ],
)
async def test_models_and_devices_that_do_not_go(
    param: str, model: str, settings: dict[str, Any]
) -> None:
    """What loading finds wrong: ConfigError from open(), and the engine is not open."""
    engine = Engine(model, **settings)
    with pytest.raises(ConfigError) as caught:
        await engine.open()
    assert caught.value.param == param
    with pytest.raises(EngineClosed):
        _ = engine.generate("x")
    await engine.aclose()


@pytest.mark.parametrize("value", [5, None, 1.5, b"sim:count", ["sim:count"]], ids=repr)
@pytest.mark.parametrize("param", ["model", "device"])
def test_a_model_or_device_of_a_wrong_type(param: str, value: Any) -> None:
    """ConfigError that names the parameter, when the engine is made."""
    arguments: dict[str, Any] = {"model": "sim:count", param: value}
    with pytest.raises(ConfigError) as caught:
        Engine(**arguments)
    assert caught.value.param == param


@both_schedulings
async def test_a_tokenizer_that_does_not_belong_to_the_model(async_scheduling: bool) -> None:
    """It gives an id beyond the vocabulary: refused, for that request alone."""
    async with (
        sim_engine(
            Count(vocab_size=100), latency=0.001, async_scheduling=async_scheduling
        ) as engine,
        no_leaks(engine),
    ):
        beside = start(engine, 10, 40)
        await anext(beside)
        for stop in ((), ("x",)):
            refused = engine.generate("Az", stop=stop, request_id="z", max_tokens=3)
            for _ in range(2):
                with pytest.raises(InvalidRequest, match="id 122") as caught:
                    await refused
                assert caught.value.param == "prompt"
        chat = engine.chat([{"role": "user", "content": "A"}], max_tokens=3)  # "u" is 117
        with pytest.raises(InvalidRequest) as caught:
            await anext(chat)
        assert caught.value.param == "messages"
        assert (await engine.generate("A", max_tokens=2)).token_ids == [66, 67]
        assert (await beside).token_ids == after(10, 40)
