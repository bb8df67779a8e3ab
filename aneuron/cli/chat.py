"""`aneuron chat`: a conversation at the terminal, or over a pipe, one line a turn.

Comes in: lines of stdin. Goes out: answers on stdout as they come, all else on stderr.
Ctrl-C during an answer ends the answer; at the prompt it ends the conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from typing import TYPE_CHECKING, Any

from aneuron.cli.loading import opened
from aneuron.cli.options import ChatSampling, EngineSettings, Flag
from aneuron.cli.run import show
from aneuron.cli.stdin import Stdin
from aneuron.cli.terminal import describe, note
from aneuron.cli.ticker import StatsSettings
from aneuron.errors import (
    AneuronError,
    ConfigError,
    ContextTooLong,
    InvalidRequest,
    LaunchFailed,
    OutOfMemory,
    RequestError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aneuron.engine import Engine
    from aneuron.outputs import Completion
    from aneuron.params import SamplingParams
    from aneuron.stream import TokenStream

__all__ = ["Conversation", "chat"]

_ENGINE = EngineSettings()
_SAMPLING = ChatSampling()
_STATS = StatsSettings()
_COMMAND = re.compile(r"/[a-z]+")  # and nothing else on the line
_HELP = "/reset forgets the conversation, /exit ends it, /help shows this; Ctrl-C ends an answer"
_TWICE_S = 1.0  # a second Ctrl-C within this time ends the conversation


async def chat(
    model: str,
    /,
    *,
    system: str | None = None,
    quiet: Flag = False,
    stats: StatsSettings = _STATS,
    sampling: ChatSampling = _SAMPLING,
    engine: EngineSettings = _ENGINE,
) -> int:
    """Talk with a model; /help shows the commands. Piped in, each line is one turn.

    Args:
        model: A built-in name, a directory, a .gguf file, a Hugging Face id, or sim:count.
        system: A system message at the start.
        quiet: Do not show how far fetching and loading are, nor how to begin.
        stats: What is told of the engine.
        sampling: How tokens are chosen.
        engine: How the model runs.
    """
    params = sampling.params()
    stats.check()
    stdin = Stdin()
    async with opened(model, engine, quiet=quiet) as opened_engine:
        if getattr(opened_engine.tokenizer, "chat_template", "") is None:
            raise ConfigError(f"{model} has no chat template: use `aneuron run`", param="model")
        if stdin.is_terminal and not quiet:
            note(f"{model} on {opened_engine.device.name}. {_HELP}.")
        conversation = Conversation(opened_engine, params, stdin, system=system)
        with conversation.interruptible(), stats.ticker(opened_engine):
            return await conversation.run()


class Conversation:
    """The turns so far, and the answer that is being given."""

    def __init__(
        self, engine: Engine, params: SamplingParams, stdin: Stdin, *, system: str | None = None
    ) -> None:
        """Begin one, with a system message or without."""
        self._engine = engine
        self._params = params
        self._stdin = stdin
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[tuple[dict[str, str], dict[str, str]]] = []  # question, answer
        self._stream: TokenStream | None = None  # while an answer is given
        self._interrupted_s = float("-inf")
        self._has_failed = False

    async def run(self) -> int:
        """Take turns until the input ends; return the status to exit with."""
        while (line := await self._next_line()) is not None:
            if line in {"/exit", "/quit"}:
                break
            try:
                await self._take(line)
            except (RequestError, LaunchFailed, OutOfMemory) as error:  # of this turn alone
                self._fail(error)
        return 2 if self._has_failed and not self._stdin.is_terminal else 0

    async def _next_line(self) -> str | None:
        if self._stdin.is_terminal:
            note("> ", end="")
        while True:
            try:
                line = await self._stdin.readline()
            except InvalidRequest as error:
                self._fail(error)
            else:
                break
        if line is None and self._stdin.is_terminal:
            note("")
        return line

    def _fail(self, error: AneuronError) -> None:
        self._has_failed = True
        note(f"error: {describe(error)}")

    async def _take(self, line: str) -> None:
        if line == "/reset":
            self._turns.clear()
            note("the conversation starts anew")
        elif _COMMAND.fullmatch(line):
            note(_HELP if line == "/help" else f"unknown command {line}; {_HELP}")
        elif line.strip():
            await self._answer({"role": "user", "content": line})

    async def _answer(self, question: dict[str, str]) -> None:
        while True:
            try:
                completion = await self._show(question)
            except ContextTooLong:
                if not self._drop_oldest():
                    raise
            else:
                break
        if completion.text:
            self._turns.append((question, {"role": "assistant", "content": completion.text}))
        wanted, given = self._params.max_tokens, completion.usage.completion_tokens
        if completion.finish_reason == "length" and given != wanted:
            note("(the context is full: the answer was cut off)")
            self._drop_oldest()

    async def _show(self, question: dict[str, str]) -> Completion:
        turns = [message for turn in self._turns for message in turn]
        self._stream = self._engine.chat([*self._system, *turns, question], self._params)
        try:
            return await show(self._stream)
        finally:
            self._stream = None

    def _drop_oldest(self) -> bool:
        """Forget the oldest turn to make room; return whether there was one."""
        if not self._turns:
            return False
        del self._turns[0]
        note("(the context is full: the oldest turn was dropped)")
        return True

    # ── Ctrl-C ──────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let Ctrl-C end the answer rather than the process, as far as the platform can."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        try:
            loop.add_signal_handler(signal.SIGINT, self._interrupt, task)
        except (NotImplementedError, RuntimeError, ValueError):  # Windows; not the main thread
            yield
            return
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    def _interrupt(self, task: asyncio.Task[Any]) -> None:
        now_s = self._engine.loop.time()
        is_second = now_s - self._interrupted_s < _TWICE_S
        self._interrupted_s = now_s
        if self._stream is not None and not is_second:
            self._stream.stop()
        else:
            note("")
            task.cancel()
