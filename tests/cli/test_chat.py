from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from aneuron.device.sim import Fault, SimDevice
from aneuron.models.tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from tests.cli.conftest import Command

needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX terminal")

# ── over a pipe ─────────────────────────────────────────────────────────────────────────


def test_each_line_is_a_turn(aneuron: Command) -> None:
    result = aneuron("chat", "sim:script", stdin="one\n\ntwo\nthree")
    assert (result.status, result.out, result.err) == (0, "Hello!\n" * 3, "")


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the prompts that the model is given."""
    seen: list[str] = []
    render = ByteTokenizer.render_chat

    def spy(self: ByteTokenizer, messages: Any, **options: Any) -> str:
        seen.append(render(self, messages, **options))
        return seen[-1]

    monkeypatch.setattr(ByteTokenizer, "render_chat", spy)
    return seen


def test_history_is_kept(aneuron: Command, prompts: list[str]) -> None:
    aneuron("chat", "sim:script", "--system", "Be kind", stdin="one\ntwo\n")
    assert prompts == [
        "system: Be kind\nuser: one\nassistant: ",
        "system: Be kind\nuser: one\nassistant: Hello!\nuser: two\nassistant: ",
    ]


def test_reset_forgets(aneuron: Command, prompts: list[str]) -> None:
    result = aneuron("chat", "sim:script", stdin="one\n/reset\ntwo\n")
    assert prompts[-1] == "user: two\nassistant: "
    assert "starts anew" in result.err


def test_exit_ends(aneuron: Command, prompts: list[str]) -> None:
    result = aneuron("chat", "sim:script", stdin="one\n/exit\ntwo\n")
    assert (result.status, len(prompts)) == (0, 1)


def test_help_and_unknown_commands_are_not_turns(aneuron: Command, prompts: list[str]) -> None:
    result = aneuron("chat", "sim:script", stdin="/help\n/nope\n/etc/hosts, what is it?\n")
    assert "/reset forgets the conversation" in result.err
    assert "unknown command /nope" in result.err
    assert prompts == ["user: /etc/hosts, what is it?\nassistant: "]


def test_oldest_turns_are_dropped_when_the_context_is_full(
    aneuron: Command, prompts: list[str]
) -> None:
    lines = "".join(f"question {number}\n" for number in range(6))
    result = aneuron("chat", "sim:script", "--max-model-len=80", stdin=lines)
    assert (result.status, result.out) == (0, "Hello!\n" * 6)
    assert "the oldest turn was dropped" in result.err
    assert prompts[-1].startswith("user: question 4\n")


def test_an_answer_cut_off_by_the_context_is_told(aneuron: Command, prompts: list[str]) -> None:
    result = aneuron("chat", "sim:script", "--max-model-len=24", stdin="one\none\n")
    assert (result.status, result.out) == (0, "Hel\nHel\n")
    assert result.err.count("the answer was cut off") == 2
    assert prompts[-1] == "user: one\nassistant: "


def test_the_pool_may_be_what_is_too_small(aneuron: Command) -> None:
    options = ["--num-kv-blocks=2", "--max-num-batched-tokens=16", "--no-enable-prefix-caching"]
    result = aneuron("chat", "sim:script", *options, stdin=f"{'x' * 50}\nhi\n")
    assert (result.status, result.out) == (2, "Hello!\n")
    assert "error: the prompt has" in result.err


def test_a_turn_that_never_fits_is_an_error_and_the_next_is_taken(aneuron: Command) -> None:
    result = aneuron("chat", "sim:script", "--max-model-len=40", stdin=f"{'x' * 50}\nhi\n")
    assert (result.status, result.out) == (2, "Hello!\n")
    assert "error: the prompt has" in result.err


def test_a_failed_step_ends_its_turn_alone(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = partial(SimDevice, faults=[Fault(step=3, status=2)])
    monkeypatch.setattr("aneuron.device.sim.SimDevice", faulty)
    result = aneuron("chat", "sim:script", stdin="one\ntwo\n")
    assert (result.status, result.out) == (2, "He\nHello!\n")
    assert result.err.count("error: ") == 1


def test_a_lost_device_ends_the_conversation(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = partial(SimDevice, faults=[Fault(step=3, status=101)])
    monkeypatch.setattr("aneuron.device.sim.SimDevice", faulty)
    result = aneuron("chat", "sim:script", stdin="one\ntwo\n")
    assert (result.status, result.out) == (1, "He\n")
    assert result.err.count("error: ") == 1


def test_a_model_without_a_template_is_refused(
    aneuron: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "chat_template", None, raising=False)
    result = aneuron("chat", "sim:script", stdin="one\n")
    assert (result.status, result.out) == (2, "")
    assert "has no chat template: use `aneuron run`" in result.err


def test_wrong_values_are_told_before_loading(aneuron: Command) -> None:
    result = aneuron("chat", "no-such-model", "--temperature=-1")
    assert result.status == 2
    assert "--temperature must be in 0..100" in result.err


@needs_posix
def test_lines_are_answered_as_they_come(process: Any) -> None:
    with process("chat", "sim:script", stdin=subprocess.PIPE) as child:
        for _ in range(3):
            child.stdin.write(b"hi\n")
            child.stdin.flush()
            assert child.stdout.read(7) == b"Hello!\n"
        child.stdin.write(b"\xff\nhi")
        out, err = child.communicate()
    assert out == b"Hello!\n"
    assert b"error: stdin is not UTF-8" in err
    assert child.returncode == 2


@needs_posix
def test_ctrl_c_while_a_pipe_is_silent_ends(process: Any) -> None:
    with process("chat", "sim:script", stdin=subprocess.PIPE) as child:
        child.stdin.write(b"hi\n")
        child.stdin.flush()
        assert child.stdout.read(7) == b"Hello!\n"
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)  # it waits for the next line
        child.send_signal(signal.SIGINT)
        assert child.wait(10) == 130


@needs_posix
def test_a_reader_that_leaves_is_no_error(process: Any) -> None:
    with process("chat", "sim:count", "--max-tokens=32000", stdin=subprocess.PIPE) as child:
        child.stdin.write(b"hi\n")
        child.stdin.flush()
        assert child.stdout.read(5)
        child.stdout.close()
        assert child.wait(10) == 0


# ── at a terminal ───────────────────────────────────────────────────────────────────────

CTRL_C, CTRL_D = "\x03", "\x04"


@needs_posix
def test_ctrl_d_at_the_prompt_ends(terminal: Any) -> None:
    with terminal("chat", "sim:script") as shown:
        shown.wait_for("> ")
        shown.type("hi\r")
        shown.wait_for("Hello!\r\n> ")
        shown.type(CTRL_D)
        assert shown.wait_exit() == 0
        assert "sim:script on sim. /reset forgets" in shown.shown


@needs_posix
def test_ctrl_c_at_the_prompt_ends(terminal: Any) -> None:
    with terminal("chat", "sim:script") as shown:
        shown.wait_for("> ")
        shown.type(CTRL_C)
        assert shown.wait_exit() == 130
        assert "Traceback" not in shown.shown


@needs_posix
def test_ctrl_c_ends_the_answer_and_the_conversation_goes_on(terminal: Any) -> None:
    with terminal("chat", "sim:count", "--max-tokens=32000", "--temperature=0") as shown:
        shown.wait_for("> ")
        shown.type("hi\r")
        shown.wait_for("<300>")
        shown.type(CTRL_C)
        shown.wait_for("\r\n> ", count=2)
        assert "<32000>" not in shown.shown
        shown.type("/reset\r")
        shown.wait_for("starts anew\r\n> ")
        shown.type("/exit\r")
        assert shown.wait_exit() == 0
        assert "Traceback" not in shown.shown


@needs_posix
def test_ctrl_c_twice_ends(terminal: Any) -> None:
    with terminal("chat", "sim:count", "--max-tokens=32000") as shown:
        shown.wait_for("> ")
        shown.type("hi\r")
        shown.wait_for("<300>")
        shown.type(CTRL_C)
        shown.wait_for("\r\n> ", count=2)
        shown.type(CTRL_C)
        assert shown.wait_exit() == 130


@needs_posix
def test_an_ended_answer_is_kept_as_far_as_it_came(
    aneuron: Command, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from aneuron.cli import chat as chat_module
    from aneuron.stream import TokenStream

    next_token = TokenStream.__anext__

    async def interrupt_at_2(self: TokenStream) -> Any:
        token = await next_token(self)
        if token.index == 2 and token.finish_reason is None:
            conversations[0]._interrupt(None)
        return token

    conversations: list[Any] = []
    run = chat_module.Conversation.run

    async def note_run(self: Any) -> int:
        conversations.append(self)
        return await run(self)

    monkeypatch.setattr(chat_module, "_TWICE_S", 0.0)
    monkeypatch.setattr(chat_module.Conversation, "run", note_run)
    monkeypatch.setattr(TokenStream, "__anext__", interrupt_at_2)
    result = aneuron("chat", "sim:script", stdin="one\ntwo\n")
    assert result.status == 0
    first = result.out.split("\n")[0]
    assert "Hello!".startswith(first)
    assert len(first) >= 3
    assert prompts[1] == f"user: one\nassistant: {first}\nuser: two\nassistant: "
