from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

import aneuron as package
from aneuron.cli.loading import _Reporter, opened
from aneuron.cli.terminal import describe
from aneuron.errors import ConfigError, InternalError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from aneuron import Engine
    from tests.cli.conftest import Command

run_module = import_module("aneuron.cli.run")
needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and pipes of POSIX")

# ── the answer ──────────────────────────────────────────────────────────────────────────


def test_only_the_answer_goes_to_stdout(aneuron: Command) -> None:
    result = aneuron("run", "sim:count", "abc", "--max-tokens", "10")
    assert (result.status, result.out, result.err) == (0, "defghijklm\n", "")


def test_an_end_token_ends_the_answer_and_is_not_shown(aneuron: Command) -> None:
    assert aneuron("run", "sim:script", "hi").out == "Hello!\n"


def test_both_schedulers_give_the_same(aneuron: Command) -> None:
    for options in (["--no-async-scheduling"], ["--async-scheduling", "--token-carry=handoff"]):
        result = aneuron("run", "sim:sum", "abc", "--max-tokens=20", *options)
        assert result.out == aneuron("run", "sim:sum", "abc", "--max-tokens=20").out


def test_stop_may_be_given_several_times(aneuron: Command) -> None:
    assert aneuron("run", "sim:count", "abc", "--stop", "zz", "--stop", "gh").out == "def\n"


def test_sampling_repeats_with_a_seed(aneuron: Command) -> None:
    options = ["--temperature=100", "--max-tokens=20", "--seed"]
    first, again, other = (
        aneuron("run", "sim:const", "x", *options, seed, "--json").out for seed in "112"
    )
    ids = [json.loads(text)["token_ids"] for text in (first, again, other)]
    assert ids[0] == ids[1] != ids[2]


def test_ignore_eos_goes_on_to_max_tokens(aneuron: Command) -> None:
    out = aneuron("run", "sim:script", "x", "--ignore-eos", "--max-tokens=9", "--json").out
    assert len(json.loads(out)["token_ids"]) == 9


# ── several answers ─────────────────────────────────────────────────────────────────────

SEVERAL = ["run", "sim:const", "x", "--temperature=100", "--max-tokens=20"]


def test_several_answers_have_a_blank_line_between_and_headings_on_stderr(
    aneuron: Command,
) -> None:
    command = ("run", "sim:count", "abc", "--n=3", "--max-tokens=4")
    result = aneuron(*command)
    headings = "".join(f"== choice {index} ==\n" for index in range(3))
    assert (result.status, result.out, result.err) == (0, "defg\n\ndefg\n\ndefg\n", headings)
    quiet = aneuron(*command, "--quiet")
    assert (quiet.out, quiet.err) == (result.out, "")


@pytest.mark.parametrize("command", [("run",), ("trace", "--json")])
def test_more_answers_than_fit_cost_no_model(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr("aneuron.engine.load", None)  # which would fail
    result = aneuron(*command, "sim:count", "abc", "--n=65")
    assert (result.status, result.out) == (2, "")
    assert result.err == "error: --n must be at most 64, not 65\n"


def test_each_of_several_has_its_seed(aneuron: Command) -> None:
    several = json.loads(aneuron(*SEVERAL, "--seed=5", "--n=3", "--json").out)
    alone = [json.loads(aneuron(*SEVERAL, f"--seed={seed}", "--json").out) for seed in (5, 6, 7)]
    ids = [choice["token_ids"] for choice in several["choices"]]
    assert ids == [answer["token_ids"] for answer in alone]
    assert ids[0] != ids[1] != ids[2]
    assert several["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize("n", [1, 2])
def test_json_tells_the_first_choice_and_all(aneuron: Command, n: int) -> None:
    answer = json.loads(aneuron(*SEVERAL, f"--n={n}", "--json").out)
    assert [choice["index"] for choice in answer["choices"]] == list(range(n))
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "length"
        assert choice["stop_reason"] is choice["abort_reason"] is None
    for name in ("text", "token_ids", "finish_reason", "stop_reason"):
        assert answer[name] == answer["choices"][0][name]


def test_stats_of_several_tell_each_end(aneuron: Command) -> None:
    result = aneuron("run", "sim:count", "abc", "--n=2", "--max-tokens=4", "--stats")
    assert "new tokens           8 (length, length)\n" in result.err
    result = aneuron("run", "sim:count", "abc", "--n=2", "--max-tokens=1", "--stats")
    assert "decoding             -" in result.err


# ── the prompt ──────────────────────────────────────────────────────────────────────────


def test_prompt_comes_from_stdin(aneuron: Command) -> None:
    assert aneuron("run", "sim:count", "--max-tokens=3", stdin="xyabc\n").out == "def\n"


def test_stdin_is_put_below_the_prompt(aneuron: Command) -> None:
    result = aneuron("run", "sim:count", "one", "--max-tokens=3", "--json", stdin="two\nabc\n")
    answer = json.loads(result.out)
    assert answer["text"] == "def"
    assert answer["usage"]["prompt_tokens"] == len("one\n\ntwo\nabc")


@pytest.mark.parametrize("stdin", ["", "\n\n", None])
def test_no_prompt_is_an_error(aneuron: Command, stdin: str | None) -> None:
    result = aneuron("run", "sim:count", stdin=stdin)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("error: there is no prompt")


@needs_posix
def test_a_stdin_that_stays_silent_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from aneuron.cli import main

    monkeypatch.setattr(run_module, "_PATIENCE_S", 0.05)
    ours, theirs = os.pipe()
    with os.fdopen(ours) as stdin, os.fdopen(theirs, "w"):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["run", "sim:count", "abc", "--max-tokens=3"]) == 0
    out, err = capsys.readouterr()
    assert out == "def\n"
    assert "going on with the prompt alone" in err


@needs_posix
@pytest.mark.parametrize("raw", [b"\xff", b"ab\xffc\n"])
def test_stdin_that_is_no_text_is_an_error(process: Any, raw: bytes) -> None:
    with process("run", "sim:count", stdin=subprocess.PIPE) as child:
        out, err = child.communicate(raw)
    assert (child.returncode, out) == (2, b"")
    assert b"not UTF-8" in err


def test_stdin_may_be_a_file(process: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("é" * 70_000 + "abc\n", encoding="utf-8")
    with (
        path.open("rb") as file,
        process("run", "sim:count", "--max-tokens=3", "--max-model-len=32768", stdin=file) as child,
    ):
        _, err = child.communicate()
    assert child.returncode == 2
    assert "the prompt has 140003 tokens" in err.decode()


# ── statistics ──────────────────────────────────────────────────────────────────────────


def test_stats_go_to_stderr(aneuron: Command) -> None:
    result = aneuron("run", "sim:count", "abc", "--max-tokens=10", "--stats")
    assert result.out == "defghijklm\n"
    facts = dict(line.rsplit(maxsplit=1) for line in result.err.split("\n") if line.strip())
    assert facts["model"] == "sim:count"
    assert facts["device"] == "sim"
    assert (facts["steps"], facts["async_steps"], facts["sync_fallback_steps"]) == ("10", "9", "1")
    assert facts["decode_async_share"] == "1.000"
    for name in ("time to first token", "decoding", "whole call", "new tokens", "dtype", "breaks"):
        assert name in result.err


def test_stats_of_one_token_have_no_decoding(aneuron: Command) -> None:
    result = aneuron("run", "sim:count", "abc", "--max-tokens=1", "--stats")
    assert "decoding             -" in result.err


@contextlib.asynccontextmanager
async def warmed(*arguments: Any, **options: Any) -> AsyncIterator[Engine]:
    """Open an engine that has seen the prompt."""
    async with opened(*arguments, **options) as engine:
        await engine.generate("a" * 40, max_tokens=1)
        yield engine


@pytest.mark.parametrize(("flag", "cached"), [("", 32), ("no-", 0)])
def test_stats_tell_what_the_prefix_cache_saved(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch, flag: str, cached: int
) -> None:
    monkeypatch.setattr(run_module, "opened", warmed)
    options = [f"--{flag}enable-prefix-caching", "--max-tokens=3"]
    result = aneuron("run", "sim:count", "a" * 40, "--stats", *options)
    assert f"prompt tokens        40 ({cached} cached)\n" in result.err
    answer = json.loads(aneuron("run", "sim:count", "a" * 40, "--json", *options).out)
    assert answer["usage"]["cached_tokens"] == cached
    assert answer["stats"]["prefix_cache_hits"] == cached


def test_stats_tell_preemptions(aneuron: Command) -> None:
    options = ["--n=3", "--max-tokens=40"]
    for num_kv_blocks, preempted in (6, True), (16, False):
        blocks = f"--num-kv-blocks={num_kv_blocks}"
        result = aneuron("run", "sim:count", "a" * 16, blocks, *options, "--stats")
        told = int(result.err.split("preemptions")[1].split()[0])
        assert (told > 0) is preempted
        stats = json.loads(aneuron("run", "sim:count", "a" * 16, blocks, *options, "--json").out)
        assert stats["stats"]["preemptions"] == told
        assert stats["stats"]["num_blocks"] == num_kv_blocks


def test_a_long_prompt_is_cut_at_the_budget(aneuron: Command) -> None:
    options = ["--max-tokens=1", "--json"]
    for budget, steps in ("40", 1), ("16", 3):
        result = aneuron(
            "run", "sim:count", "a" * 40, f"--max-num-batched-tokens={budget}", *options
        )
        assert json.loads(result.out)["stats"]["steps"] == steps


def test_json_is_one_object(aneuron: Command) -> None:
    result = aneuron("run", "sim:count", "abc", "--max-tokens=4", "--json")
    assert (result.status, result.err) == (0, "")
    answer = json.loads(result.out)
    assert answer["text"] == "defg"
    assert answer["token_ids"] == [100, 101, 102, 103]
    assert answer["finish_reason"] == "length"
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 0, "total_tokens": 7}
    assert answer["usage"] == usage
    assert answer["timing"]["total_s"] >= 0
    assert answer["stats"]["steps"] == 4
    assert answer["stats"]["used_blocks"] == 0


# ── errors ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens=0"], "--max-tokens must be at least 1, not 0"),
        (["--max-tokens=5", "--min-tokens=9"], "--min-tokens 9 is over --max-tokens 5"),
        (["--temperature=nan"], "--temperature must be in 0..100"),
        (["--top-p=0"], "--top-p must be over 0"),
        (["--stop="], "--stop: a stop string must have"),
        (["--max-model-len=99999999"], "--max-model-len 99999999 is over the model's own"),
        (["--max-model-len=3"], "the prompt has 3 tokens"),
        (["--device=tpu"], "--device: unknown device 'tpu'"),
        (["--dtype=int4"], "--dtype must be one of"),
        (["--quantization=int2"], "--quantization must be one of int8, int4, or left out, not"),
        (["--token-carry=host"], "is the synchronous baseline: pass --no-async-scheduling"),
        (["--n=0"], "--n must be at least 1, not 0"),
        (["--num-kv-blocks=0"], "--num-kv-blocks must be a positive integer, not 0"),
        (["--max-num-batched-tokens=-1"], "--max-num-batched-tokens must be a positive integer"),
        (["--system=Be brief"], "--system needs a model with a chat template"),
        (["--raw", "--system=Be brief"], "--system excludes --raw"),
    ],
)
def test_wrong_values_are_named_as_flags(
    aneuron: Command, arguments: list[str], message: str
) -> None:
    result = aneuron("run", "sim:count", "abc", *arguments)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert message in result.err


def test_an_unknown_model_names_the_ones_there_are(aneuron: Command) -> None:
    result = aneuron("run", "smollm-135m", "abc")
    assert result.status == 2
    assert "Did you mean smollm2-135m?" in result.err


@pytest.mark.parametrize("arguments", [["run"], ["run", "m", "--nope"], ["nope"]])
def test_wrong_usage_has_status_2(aneuron: Command, arguments: list[str]) -> None:
    result = aneuron(*arguments)
    assert (result.status, result.out) == (2, "")
    assert "Error" in result.err


@pytest.mark.parametrize("failure", [RuntimeError, InternalError])
def test_our_own_bugs_show_where_they_are(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise failure("a bug")

    monkeypatch.setattr("aneuron.engine.load", fail)
    if failure is RuntimeError:
        with pytest.raises(RuntimeError, match="a bug"):
            aneuron("run", "sim:count", "abc")
        return
    result = aneuron("run", "sim:count", "abc")
    assert result.status == 1
    assert "error: a bug" in result.err
    assert "Traceback" in result.err


def test_messages_speak_of_flags() -> None:
    assert describe(ConfigError("no such thing", param="device")) == "--device: no such thing"
    assert describe(ConfigError("revision='x' is odd", param="revision")) == "--revision 'x' is odd"
    needs = ConfigError("it needs async_scheduling=True and max_tokens", param="kv_cache_bytes")
    assert describe(needs) == "it needs --async-scheduling and --max-tokens"
    assert describe(InvalidRequest("the prompt is empty", param="prompt")) == "the prompt is empty"


# ── the process ─────────────────────────────────────────────────────────────────────────


def test_version_and_help(aneuron: Command) -> None:
    assert aneuron("--version").out == f"{package.__version__}\n"
    assert "run" in aneuron("--help").out
    help_text = aneuron("run", "--help").out
    for flag in ("--max-tokens", "--stop", "--no-async-scheduling", "--json", "--ignore-eos"):
        assert flag in help_text


def test_the_command_line_loads_nothing_heavy() -> None:
    code = "import aneuron.__main__, aneuron.cli, sys; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(out.stdout.split())
    assert not {"torch", "numpy", "transformers", "aneuron.engine"} & loaded
    assert out.stderr == ""


def test_plain_asyncio_serves_where_there_is_no_uvloop(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert aneuron("run", "sim:script", "x").out == "Hello!\n"
    assert aneuron("chat", "sim:script", stdin="x\n").out == "Hello!\n"


def test_help_is_fast() -> None:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "aneuron", "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - started)
        if times[-1] < 0.5:
            return
    pytest.fail(f"aneuron --help takes {min(times):.2f} s")


@pytest.mark.parametrize(
    ("level", "names"), [("debug", {"core"}), ("INFO", {"core"}), ("WARNING", set()), ("", set())]
)
def test_log_level_comes_from_the_environment(process: Any, level: str, names: set[str]) -> None:
    with process("run", "sim:script", "x", env=os.environ | {"ANEURON_LOG": level}) as child:
        out, err = child.communicate()
    assert (child.returncode, out) == (0, b"Hello!\n")
    assert set(re.findall(r" INFO aneuron\.(\w+): ", err.decode())) == names
    assert bool(err) is bool(names)


def test_preemptions_are_logged(process: Any) -> None:
    arguments = ("run", "sim:count", "a" * 16, "--num-kv-blocks=6", "--n=3", "--max-tokens=40")
    with process(*arguments, "--json", env=os.environ | {"ANEURON_LOG": "debug"}) as child:
        out, err = child.communicate()
    told = re.findall(r"DEBUG aneuron\.scheduler: request \d+ \(.+\) is preempted; ", err.decode())
    assert len(told) == json.loads(out)["stats"]["preemptions"] > 0


def test_a_wrong_log_level_is_an_error(process: Any) -> None:
    with process("run", "sim:script", "x", env=os.environ | {"ANEURON_LOG": "loud"}) as child:
        out, err = child.communicate()
    assert (child.returncode, out) == (2, b"")
    said = "error: ANEURON_LOG must be one of debug, info, warning, error, not 'loud'\n"
    assert err.decode() == said


@needs_posix
def test_ctrl_c_ends_with_130_and_no_traceback(process: Any) -> None:
    with process("run", "sim:count", "abc", "--max-tokens=32000") as child:
        assert child.stdout.read(5) == b"defgh"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate()
    assert (child.returncode, err) == (130, b"")
    assert out.endswith(b"\n")


@needs_posix
def test_ctrl_c_while_stdin_is_read(process: Any) -> None:
    with process("run", "sim:count", stdin=subprocess.PIPE) as child:
        child.stdin.write(b"abc")
        child.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(1.5)  # it waits for the rest
        child.send_signal(signal.SIGINT)
        assert child.wait(10) == 130
        assert child.stderr.read() == b""


@needs_posix
def test_a_reader_that_leaves_is_no_error(process: Any) -> None:
    with process("run", "sim:count", "abc", "--max-tokens=32000") as child:
        assert child.stdout.read(5) == b"defgh"
        child.stdout.close()
        assert child.wait(10) == 0
        assert child.stderr.read() == b""


# ── fetching and loading ────────────────────────────────────────────────────────────────


def test_progress_is_a_line_per_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with _Reporter("tiny", quiet=False) as reporter:
        reporter("download", 0, 98_000_000)
        reporter("download", 50_000_000, 98_000_000)
        reporter("load", 0, None)
    assert capsys.readouterr() == ("", "tiny: download (98 MB)\ntiny: load\n")


def test_progress_is_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with _Reporter("tiny", quiet=False) as reporter:
        reporter("download", 0, 98_000_000)
        reporter("download", 50_000_000, 98_000_000)
        assert reporter._bar is not None
        assert reporter._bar.tasks[0].fields["size"] == "50 of 98 MB"
        reporter("load", 0, None)
        assert reporter._bar.tasks[0].description == "tiny: load"
    out, err = capsys.readouterr()
    assert out == ""
    assert "tiny: download" in err


def test_quiet_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with _Reporter("tiny", quiet=True) as reporter:
        reporter("load", 0, None)
    assert capsys.readouterr() == ("", "")


def test_ctrl_c_stops_a_download(capsys: pytest.CaptureFixture[str]) -> None:
    with _Reporter("tiny", quiet=True) as reporter:
        pass
    with pytest.raises(KeyboardInterrupt):
        reporter("download", 1, 2)


@pytest.mark.tiny
@pytest.mark.timeout(120)
def test_a_real_model_names_the_capital(aneuron: Command) -> None:
    # In bfloat16 two first words are nearer to each other than its rounding.
    question = "What is the capital of France?"
    result = aneuron("run", "smollm2-135m", question, "--stats", "--dtype", "float32")
    assert result.status == 0
    assert "Paris" in result.out
    assert "smollm2-135m: load" in result.err
    assert "decode_async_share" in result.err
