"""The process's own streams: closed, full, left by their reader, of another encoding."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aneuron.cli.terminal import call

needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="a shell and pipes of POSIX")
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device always full")
pytestmark = pytest.mark.timeout(60)
ANSWER = ("run", "sim:count", "abc", "--max-tokens=3")
ALL_CLOSED = "<&- >&- 2>&-"


def environment(**given: str) -> dict[str, str]:
    """Return this process's, as users have it: with buffers, and no log."""
    left_out = {"PYTHONUNBUFFERED", "ANEURON_LOG"}
    return {name: value for name, value in os.environ.items() if name not in left_out} | given


def shell(redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `aneuron` with what a shell does to its streams."""
    script = f'exec "$0" -m aneuron "$@" {redirection}'
    command = ["sh", "-c", script, sys.executable, *arguments]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        env=environment(),
    )  # fmt: skip


def into(stdout: Any, *arguments: str, **given: str) -> subprocess.CompletedProcess[str]:
    """Run `aneuron` with this stdout."""
    return subprocess.run(
        [sys.executable, "-m", "aneuron", *arguments],
        stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False,
        env=environment(**given),
    )  # fmt: skip


# ── closed ──────────────────────────────────────────────────────────────────────────────


@needs_posix
@pytest.mark.parametrize(
    ("redirection", "out"), [("<&-", "def\n"), ("2>&-", "def\n"), (">&-", ""), (ALL_CLOSED, "")]
)
def test_a_closed_stream_is_an_empty_one(redirection: str, out: str) -> None:
    result = shell(redirection, *ANSWER)
    assert (result.returncode, result.stdout, result.stderr) == (0, out, "")


@needs_posix
@pytest.mark.parametrize("redirection", [">&-", ALL_CLOSED])
@pytest.mark.parametrize("arguments", [("models", "list", "--json"), ("models", "list")])
def test_a_result_that_nobody_reads_is_no_error(
    redirection: str, arguments: tuple[str, ...]
) -> None:
    result = shell(redirection, *arguments)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@needs_posix
def test_with_no_stdin_there_is_no_prompt() -> None:
    result = shell("<&-", "run", "sim:count")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: there is no prompt")
    assert shell("<&-", "chat", "sim:count").returncode == 0


@needs_posix
def test_children_have_standard_streams_as_well() -> None:
    program = """
import subprocess, sys
import aneuron.cli, aneuron.__main__ as process
look = "import os; [os.fstat(one) for one in range(3)]"
aneuron.cli.main = lambda: subprocess.run([sys.executable, "-c", look]).returncode
process.main()
"""
    script = f'exec "$0" -c "$1" {ALL_CLOSED}'
    subprocess.run(["sh", "-c", script, sys.executable, program], check=True)


# ── left ────────────────────────────────────────────────────────────────────────────────


@needs_posix
@pytest.mark.parametrize(
    "arguments",
    [
        (), ("--help",), ("run", "--help"), ("bench",), ("--version",), ("models", "list"),
        ("models", "list", "--json"), ("doctor",), ANSWER,
        ("simulate", "--arrivals=even:1", "--duration=1"),
    ],
)  # fmt: skip
def test_a_reader_that_has_left_is_no_error(arguments: tuple[str, ...]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    result = into(theirs, *arguments)
    os.close(theirs)
    assert (result.returncode, result.stderr) == (0, "")


# ── full ────────────────────────────────────────────────────────────────────────────────


@needs_full
@pytest.mark.parametrize(
    "arguments", [ANSWER, (*ANSWER, "--json"), ("models", "list"), ("--help",), ("--version",)]
)
def test_an_output_that_is_full_is_told(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        result = into(full, *arguments)
    said = "error: cannot write the output: No space left on device\n"
    assert (result.returncode, result.stderr) == (1, said)


def test_another_fault_of_the_system_is_ours() -> None:
    def fails() -> None:
        raise OSError(errno.EBADF, "a bug")

    with pytest.raises(OSError, match="a bug"):
        call(fails)


# ── what is written ─────────────────────────────────────────────────────────────────────


def test_an_answer_may_not_fit_the_encoding() -> None:
    arguments = ("run", "sim:count", "~", "--max-tokens=4")  # to bytes that are no text
    result = into(subprocess.PIPE, *arguments, PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stderr) == (0, "")
    assert "?" in result.stdout


def test_what_a_command_tells_itself_is_not_told_twice() -> None:
    program = """
import logging
import aneuron.cli, aneuron.__main__ as process
aneuron.cli.main = lambda: logging.getLogger("aneuron.core").error("told otherwise")
process.main()
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("", "")


# ── nobody hears what is said beside the answer ─────────────────────────────────────────


@needs_posix
@needs_full
@pytest.mark.parametrize(
    ("arguments", "status", "out"),
    [((*ANSWER, "--stats"), 0, "def\n"), (("run", "no-such-model", "x"), 2, "")],
)
def test_a_full_stderr_changes_no_answer(arguments: tuple[str, ...], status: int, out: str) -> None:
    result = shell("2>/dev/full", *arguments)
    assert (result.returncode, result.stdout) == (status, out)


@needs_posix
def test_a_stderr_whose_reader_has_left_changes_no_answer() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "aneuron", *ANSWER, "--stats"]
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=writer, text=True,
        check=False, env=environment(),
    )  # fmt: skip
    os.close(writer)
    assert (result.returncode, result.stdout) == (0, "def\n")


@needs_posix
def test_a_file_may_be_a_pipe() -> None:
    result = into(subprocess.PIPE, "trace", "sim:count", "abc", "--out=/dev/stdout")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["traceEvents"]
