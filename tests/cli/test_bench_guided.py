from __future__ import annotations

import json
import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from aneuron.cli.bench.rig.wander import Wander
from aneuron.cli.bench.rig.words import word_tokenizer
from aneuron.device.profiles import PROFILES
from aneuron.engine import Engine
from aneuron.errors import ConfigError
from aneuron.testing import Const, Count, SimDevice
from tests.test_grammar import compiler, form, next_ids, walk

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.plans import StepRecord
    from tests.cli.conftest import Command

grammar_module = import_module("aneuron.cli.bench.grammar")
lookup_module = import_module("aneuron.cli.bench.lookup")

GRAMMAR = (
    "bench", "grammar", "--profile=micro", "--num-seqs=3", "--steps=10", "--rounds=1",
    "--answers=6",
)  # fmt: skip
LOOKUP = ("bench", "lookup", "--max-tokens=96", "--rounds=2")
PERSON, COLOURS, POINT = grammar_module._TASKS


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    """The loop that the command takes."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory: Llama's shape, a byte-level BPE, and weights under which it repeats itself.

    Attention adds nothing, so that an id follows from the last one, and a circle closes soon.
    """
    path = tmp_path_factory.mktemp("model")
    tokenizer = word_tokenizer()
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    made = transformers.LlamaForCausalLM(config)
    for layer in made.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    made.save_pretrained(path)
    tokenizer.tokenizer.save(str(path / "tokenizer.json"))
    return str(path)


def json_of(aneuron: Command, *arguments: str) -> Any:
    """The one object on stdout; anything else there fails."""
    result = aneuron(*arguments, "--json")
    assert (result.status, result.err) == (0, "")
    return json.loads(result.out)


# ── grammar ─────────────────────────────────────────────────────────────────────────────


def test_grammar_times_steps_and_counts_answers(aneuron: Command, model: str) -> None:
    result = json_of(aneuron, *GRAMMAR, f"--model={model}")
    assert set(result) == {"step_ms", "grammar_over_free", "valid", "total"}
    assert set(result["step_ms"]) == {"free", "grammar"}
    program_ms = 1000 * PROFILES["micro"].decode_s(3)
    assert program_ms <= result["step_ms"]["free"] + 1e-6
    assert program_ms < result["step_ms"]["grammar"]  # one launch more
    ratio = result["step_ms"]["grammar"] / result["step_ms"]["free"]
    assert result["grammar_over_free"] == pytest.approx(ratio)
    assert (result["valid"], result["total"]) == (6, 6)


def test_grammar_counts_answers_that_were_cut_as_invalid(
    aneuron: Command, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_TOKENS", 3)
    result = json_of(aneuron, *GRAMMAR, f"--model={model}")
    assert (result["valid"], result["total"]) == (0, 6)


async def test_grammar_asks_for_each_schema_greedy_and_drawn(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first task's check refuses all: three of eight."""
    tasks = [(PERSON[0], PERSON[1], lambda _: False), COLOURS, POINT]
    monkeypatch.setattr(grammar_module, "_TASKS", tasks)
    asked: list[tuple[Any, float]] = []

    class Recorded(Engine):
        def generate(self, *args: Any, **params: Any) -> Any:
            asked.append((params["grammar"]["json"], params["temperature"]))
            return super().generate(*args, **params)

    async with Recorded(model) as engine:
        assert await grammar_module._count_valid(engine, 8) == 5
    schemas = [PERSON[1], COLOURS[1], POINT[1]]
    assert asked == [(schemas[number % 3], number % 2) for number in range(8)]


RIGHT: list[tuple[Any, Any]] = [
    (PERSON, {"name": "", "age": 0, "home": "city"}),
    (PERSON, {"name": "é" * 20, "age": 150, "home": "village"}),
    (COLOURS, ["blue"]),
    (COLOURS, ["red", "red", "green", "blue"]),
    (POINT, {"at": [-99, 99], "seen": True}),
    (POINT, {"at": [0, 0], "seen": False}),
]
WRONG: list[tuple[Any, Any]] = [
    (PERSON, {"name": "x" * 21, "age": 30, "home": "city"}),
    (PERSON, {"name": 7, "age": 30, "home": "city"}),
    (PERSON, {"name": "Ann", "age": -1, "home": "city"}),
    (PERSON, {"name": "Ann", "age": 151, "home": "city"}),
    (PERSON, {"name": "Ann", "age": 30.5, "home": "city"}),
    (PERSON, {"name": "Ann", "age": "30", "home": "city"}),
    (PERSON, {"name": "Ann", "age": True, "home": "city"}),
    (PERSON, {"name": "Ann", "age": 30, "home": "town"}),
    (PERSON, {"name": "Ann", "age": 30, "home": None}),
    (PERSON, {"name": "Ann", "age": 30}),
    (PERSON, {"name": "Ann", "age": 30, "home": "city", "more": 1}),
    (PERSON, {"age": 30, "name": "Ann", "home": "city"}),
    (PERSON, ["name", "age", "home"]),
    (PERSON, {}),
    (PERSON, None),
    (COLOURS, []),
    (COLOURS, ["red"] * 5),
    (COLOURS, ["red", "pink"]),
    (COLOURS, ["red", ["red"]]),
    (COLOURS, {"red": 1}),
    (COLOURS, "red"),
    (COLOURS, 3),
    (POINT, {"at": [1], "seen": True}),
    (POINT, {"at": [1, 2, 3], "seen": True}),
    (POINT, {"at": [-100, 0], "seen": True}),
    (POINT, {"at": [0, 100], "seen": True}),
    (POINT, {"at": [0, 1.5], "seen": True}),
    (POINT, {"at": [0, True], "seen": True}),
    (POINT, {"at": {"0": 1, "1": 2}, "seen": True}),
    (POINT, {"at": "12", "seen": True}),
    (POINT, {"at": [1, 2], "seen": 1}),
    (POINT, {"at": [1, 2], "seen": None}),
    (POINT, {"at": [1, 2]}),
    (POINT, {"seen": True, "at": [1, 2]}),
    (POINT, [1, 2]),
]


async def lets_through(schema: dict[str, Any], text: str) -> bool:
    """Whether the grammar of a schema has this text, to its end."""
    matcher = await compiler().compile(form(json=schema))
    for byte in text.encode():
        if byte not in await next_ids(matcher):
            return False
        matcher.advance(byte)
    return matcher.is_stopped


def named(one: Any) -> str:
    """A task by its prompt: its repr has an address, and workers must agree on names."""
    return one[0] if isinstance(one, tuple) else repr(one)


@pytest.mark.parametrize(("task", "value"), [*RIGHT, *WRONG], ids=named)
async def test_grammar_checks_as_the_schema_does(task: Any, value: Any) -> None:
    _, schema, check = task
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    is_right = any(task is one and value == other for one, other in RIGHT)
    assert grammar_module._is_valid(text, check) is is_right
    assert await lets_through(schema, text) is is_right


@pytest.mark.parametrize("text", ["", "[", '["red"', '["red"]]', "red", '["red",]', "NaN"])
def test_grammar_counts_what_does_not_parse_as_invalid(text: str) -> None:
    assert not any(grammar_module._is_valid(text, check) for _, _, check in grammar_module._TASKS)


@pytest.mark.parametrize("task", grammar_module._TASKS, ids=lambda task: task[2].__name__)
async def test_grammar_takes_whatever_the_schema_lets_through(task: Any) -> None:
    """And no answer is so long that it would be cut."""
    _, schema, check = task
    start = await compiler().compile(form(json=schema))
    for seed in range(20):
        ids = await walk(start.copy(), random.Random(seed))
        assert grammar_module._is_valid(bytes(ids).decode(), check)
        assert len(ids) <= grammar_module._MAX_TOKENS


def watched(monkeypatch: pytest.MonkeyPatch) -> list[list[StepRecord]]:
    """The windows that are measured from now on."""
    windows: list[list[StepRecord]] = []
    find: Callable[..., list[list[StepRecord]]] = grammar_module.steady_windows

    def steady_windows(*args: Any, **options: Any) -> list[list[StepRecord]]:
        found = find(*args, **options)
        windows.append(found[0])
        return found

    monkeypatch.setattr(grammar_module, "steady_windows", steady_windows)
    return windows


async def test_grammar_measures_decode_steps_with_all_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where each prompt needs a step, between which the first ones decode."""
    windows = watched(monkeypatch)
    case = grammar_module._Case("micro", 5, 12, 1, "", 1)
    device = SimDevice.of_profile(PROFILES["micro"])
    async with Engine(
        Count(), device=device, max_num_seqs=5, max_num_batched_tokens=16, timeline=True
    ) as engine:
        took_ms = [await grammar_module._round_ms(engine, case, {}) for _ in range(2)]
        records = engine.timeline.steps
    for window, ms in zip(windows, took_ms, strict=True):
        assert len(window) == 13
        assert all(one.is_decode for one in window)
        assert {len(one.request_ids) for one in window} == {5}
        assert {int(one.num_scheduled.sum()) for one in window} == {5}
        ids = [one.step_id for one in window]
        assert ids == list(range(ids[0], ids[0] + 13))
        before = [one for one in records if one.step_id < ids[0]]
        steady = [one for one in before if one.is_decode and len(one.request_ids) == 5]
        assert [one.step_id for one in steady[-8:]] == list(range(ids[0] - 8, ids[0]))
        span_s = window[-1].device_end_s - window[0].device_end_s
        assert ms == pytest.approx(span_s / 12 * 1000)
        assert ms >= 1000 * PROFILES["micro"].decode_s(5) - 1e-6
    of_each = [{int(one) for record in window for one in record.request_ids} for window in windows]
    assert [len(ids) for ids in of_each] == [5, 5]
    assert not of_each[0] & of_each[1]  # the second round is not measured by the first one's steps


async def test_grammar_masks_only_what_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free and with a schema in turns; the first round of each does not count."""
    windows, asked = watched(monkeypatch), []

    class Recorded(Engine):
        def generate(self, *args: Any, **params: Any) -> Any:
            asked.append("grammar" in params)
            return super().generate(*args, **params)

    monkeypatch.setattr("aneuron.engine.Engine", Recorded)
    case = grammar_module._Case("micro", 2, 10, 2, "", 1)
    tokenizer = word_tokenizer()
    device = SimDevice.of_profile(PROFILES["micro"])
    step_ms = await grammar_module._step_ms(case, device, tokenizer, tokenizer.vocab_size, ())
    assert asked == [False, False, True, True] * 3
    took = [(one[-1].device_end_s - one[0].device_end_s) * 100 for one in windows]
    assert step_ms["free"] == pytest.approx((took[2] + took[4]) / 2)
    assert step_ms["grammar"] == pytest.approx((took[3] + took[5]) / 2)


async def test_grammar_has_a_model_that_says_many_things() -> None:
    tokenizer = word_tokenizer()
    asked: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    async with Engine(Wander(tokenizer.vocab_size, ()), tokenizer=tokenizer) as engine:
        one, again, other = [
            await engine.generate(prompt_token_ids=[last] * 4, **asked) for last in (7, 7, 8)
        ]
        schema = {"json": grammar_module._ENDLESS}
        formed = await engine.generate(prompt_token_ids=[7] * 4, grammar=schema, **asked)
    assert one.token_ids == again.token_ids != other.token_ids
    assert len(set(one.token_ids)) > 20
    assert formed.text.startswith('[{"name":"')
    assert formed.finish_reason == "length"


async def test_grammar_has_room_for_the_most_steps() -> None:
    """The longest round that is let through lies in the timeline, whole."""
    case = grammar_module._Case("micro", 2, 4096 - 16 - 8 - 4 - 8, 1, "", 1)
    assert case.max_model_len == 4096
    device = SimDevice()
    async with Engine(Wander(300, ()), device=device, max_num_seqs=2, timeline=True) as engine:
        assert await grammar_module._round_ms(engine, case, {}) > 0


# ── lookup ──────────────────────────────────────────────────────────────────────────────


def test_lookup_compares_rates_and_ids(aneuron: Command, model: str) -> None:
    result = json_of(aneuron, *LOOKUP, f"--model={model}")
    assert set(result) == {"speedup", "identical", "accepted_share", "tokens_per_s"}
    rates = result["tokens_per_s"]
    assert set(rates) == {"plain", "lookup"}
    assert result["speedup"] == pytest.approx(rates["lookup"] / rates["plain"])
    assert min(rates.values()) > 0
    assert result["identical"] is True
    assert 0 < result["accepted_share"] <= 1


async def test_lookup_takes_fewer_steps_for_the_same_ids(model: str) -> None:
    plain, drafted = await lookup_module._measure(lookup_module._Case(model, "float32", 4, 96), 2)
    assert plain.token_ids == drafted.token_ids
    assert [len(ids) for ids in plain.token_ids] == [96, 96]  # the first round does not count
    assert len(plain.tokens_per_s) == len(drafted.tokens_per_s) == 2
    assert (plain.draft_tokens, plain.accepted) == (0, 0)
    assert 0 < drafted.accepted <= drafted.draft_tokens
    assert plain.steps >= 3 * 96
    assert drafted.steps <= plain.steps - drafted.accepted / 2


async def test_lookup_says_so_where_ids_differ() -> None:
    class Case(lookup_module._Case):  # type: ignore[misc,name-defined]
        def engine(self, *, drafts: bool) -> Engine:
            return Engine(Const([0.0, 1.0]) if drafts else Count())

    sides = await lookup_module._measure(Case("", "float32", 4, 8), 1)
    assert lookup_module._summary(*sides)["identical"] is False


def side(ids: list[tuple[int, int]], rates: list[float], drafts: int = 0, came: int = 0) -> Any:
    return lookup_module._Side(rates, ids, drafts, came, 10)


def test_lookup_compares_medians_and_every_round() -> None:
    ids = [(1, 2), (1, 2), (1, 2)]
    plain = side(ids, [10.0, 20.0, 90.0])
    result = lookup_module._summary(plain, side(list(ids), [30.0, 5.0, 99.0], 8, 6))
    assert result == {
        "speedup": 1.5,
        "identical": True,
        "accepted_share": 0.75,
        "tokens_per_s": {"plain": 20.0, "lookup": 30.0},
    }
    for at in range(3):
        other = [(1, 3) if number == at else one for number, one in enumerate(ids)]
        assert lookup_module._summary(plain, side(other, [30.0]))["identical"] is False
    assert lookup_module._summary(plain, side(ids[:2], [30.0]))["identical"] is False
    assert lookup_module._summary(plain, side(ids, [30.0]))["accepted_share"] == 0.0


async def test_lookup_refuses_answers_that_the_model_cuts() -> None:
    """A rate of tokens that nobody gave would be told."""
    room = 1000 - len(lookup_module._PROMPT.encode())
    async with Engine(Count(max_model_len=1000)) as engine:
        _, ids = await lookup_module._ask(engine, room)
        assert len(ids) == room
        with pytest.raises(ConfigError, match=f"--max-tokens {room + 1}: .* room for {room}"):
            await lookup_module._ask(engine, room + 1)


# ── both ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("grammar", "--profile=fast"), "--profile"),
        (("grammar", "--num-seqs=0"), "--num-seqs must be at least 1, not 0"),
        (("grammar", "--num-seqs=257"), "--num-seqs must be at most 256, not 257"),
        (("grammar", "--steps=9"), "--steps must be at least 10, not 9"),
        (("grammar", "--steps=4049"), "timeline keeps the last 4096"),
        (("grammar", "--rounds=0"), "--rounds"),
        (("grammar", "--answers=0"), "--answers must be at least 1, not 0"),
        (("grammar", "--answers=1001"), "--answers must be at most 1000, not 1001"),
        (("grammar", "--model=sim:count"), "sim:count shows no logits"),
        (("lookup", "--num-tokens=0"), "--num-tokens must be at least 1, not 0"),
        (("lookup", "--num-tokens=17"), "--num-tokens must be at most 16, not 17"),
        (("lookup", "--max-tokens=1"), "--max-tokens must be at least 2, not 1"),
        (("lookup", "--rounds=0"), "--rounds must be at least 1, not 0"),
        (("lookup", "--dtype=float8"), "dtype must be one of"),
        (("lookup", "--model=sim:none"), "sim:none"),
    ],
)
def test_a_bad_option_is_named(aneuron: Command, arguments: tuple[str, ...], named: str) -> None:
    result = aneuron("bench", *arguments)
    assert result.status == 2
    assert named in result.err + result.out  # the parser's own messages are on stdout
    assert "Traceback" not in result.err


def test_the_tables_say_what_they_were_measured_on(aneuron: Command, model: str) -> None:
    for command, title, fact in (
        (GRAMMAR, "JSON schemas, sim:micro, 3 sequences", "6 of 6 answers of"),
        (LOOKUP, f"Prompt lookup, {model}", "ids identical: True"),
    ):
        out = aneuron(*command, f"--model={model}").out.replace("\n", "")
        assert out.startswith(title)
        assert fact in " ".join(out.split())
        assert "loop; load" in out
