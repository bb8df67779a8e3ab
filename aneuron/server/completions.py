"""`/v1/completions`: prompts in, their texts out, whole or as chunks.

Comes in: a body with one prompt or many. Goes out: a token stream for each prompt, and what
speaks them: choice c of prompt p has the index p * n + c.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from aneuron import outputs
from aneuron.errors import RequestError
from aneuron.outputs import FinishReason
from aneuron.server.call import Endpoint, submit_all
from aneuron.server.http.errors import api_error, error_body
from aneuron.server.http.sse import event
from aneuron.server.wire.common import Usage, decode, encode, refuse
from aneuron.server.wire.completions import (
    CompletionBody,
    CompletionChoice,
    CompletionRequest,
    CompletionWriter,
)
from aneuron.server.wire.logprobs import LogprobColumns, prompt_logprobs
from aneuron.server.wire.sampling import field_names, sampling_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.outputs import Choice, Completion, Token
    from aneuron.server.app import ServerState
    from aneuron.server.call import Call
    from aneuron.server.http.errors import ApiError
    from aneuron.server.wire.logprobs import CompletionLogprobs
    from aneuron.stream import TokenStream

__all__ = ["CompletionsEndpoint"]

_Prompt = str | list[int]


class CompletionsEndpoint(Endpoint):
    """Goes on with texts."""

    name, prefix = "completions", "cmpl-"

    async def submit(
        self, call: Call, body: bytes
    ) -> tuple[list[TokenStream], CompletionSpeaker, bool]:
        """Return a stream for each prompt, what speaks them, and whether as events."""
        request, state = decode(CompletionRequest, body), self.state
        call.names = field_names(request)
        state.check(request.model)
        sampling = sampling_of(request)
        prompts: list[_Prompt] = request.prompts
        wants_logprobs = request.logprobs is not None or request.prompt_logprobs is not None
        spell = await state.spelling.load() if wants_logprobs else None
        if "prompt_logprobs" in sampling:
            if request.stream:
                field = "echo" if request.prompt_logprobs is None else "prompt_logprobs"
                refuse(field, "with log probabilities of the prompt is not supported as a stream")
            prompts = [await _ids_of(prompt, state) for prompt in prompts]
        speaker = CompletionSpeaker(call, request, request.prompts, prompts, spell)
        call.received(len(prompts), sampling, is_stream=bool(request.stream))
        try:
            streams = submit_all(partial(_submit, state, one, sampling) for one in prompts)
        except RequestError as error:
            raise api_error(error, call.names) from error
        return streams, speaker, bool(request.stream)


def _submit(state: ServerState, prompt: _Prompt, sampling: dict[str, Any]) -> TokenStream:
    if isinstance(prompt, str):
        return state.engine.generate(prompt, **sampling)
    return state.engine.generate(prompt_token_ids=prompt, **sampling)


async def _ids_of(prompt: _Prompt, state: ServerState) -> list[int]:
    if isinstance(prompt, str):
        ids: list[int] = (await state.engine.tokenizer.encode(prompt)).tolist()
        return ids
    return prompt


class CompletionSpeaker:
    """Says what goes on with prompts."""

    ends_with_done = True

    def __init__(
        self,
        call: Call,
        request: CompletionRequest,
        given: list[_Prompt],
        prompts: list[_Prompt],
        spell: Callable[[int], bytes] | None,
    ) -> None:
        """Speak to a call.

        Args:
            call: whose answer it is.
            request: that it answers.
            given: the prompts as the client gave them.
            prompts: as the engine got them: ids where their log probabilities are wanted.
            spell: gives an id's bytes, for log probabilities.
        """
        self._request, self._n = request, request.num_choices
        self._prompts, self._spell = prompts, spell
        shows_special = request.skip_special_tokens is False
        self._hidden = frozenset() if shows_special else call.state.spelling.special_ids
        decoder = call.state.engine.tokenizer.decode
        self._echoes = [
            "" if not request.echo else one if isinstance(one, str) else decoder(one)
            for one in given
        ]
        self._facts: dict[str, Any] = {
            "created": call.state.now_s(), "model": request.model, "system_fingerprint": None,
        }  # fmt: skip
        self._id = call.response_id
        self._columns: dict[int, LogprobColumns] = {}
        self._begun: set[int] = set()
        self._usages = [outputs.Usage(0, 0)] * len(prompts)
        self._writer = CompletionWriter(
            response_id=self._id, with_usage=request.wants_usage, **self._facts
        )

    # ── events ──────────────────────────────────────────────────────────────────────────

    def delta(self, prompt: int, items: list[Token], usage: outputs.Usage) -> bytes:
        """Return the chunks of a prompt's next tokens."""
        if not self._request.stream:
            return b""
        if self._request.wants_running_usage:
            num_told = self._usages[prompt].completion_tokens + len(items)
            told = outputs.Usage(usage.prompt_tokens, num_told, usage.cached_tokens)
            self._usages[prompt] = told
        if self._n == 1:
            return self._tell(prompt, 0, items)
        return b"".join(
            self._tell(prompt, choice, own)
            for choice in range(self._n)
            if (own := [item for item in items if item.choice == choice])
        )

    def _tell(self, prompt: int, choice: int, items: list[Token]) -> bytes:
        index, text = prompt * self._n + choice, "".join([item.text for item in items])
        if index not in self._begun:
            self._begun.add(index)
            text = self._echoes[prompt] + text
        events, usage = [], self._usage_so_far()
        logprobs = self._logprobs(index, items)
        if logprobs is None and usage is None:
            events += [self._writer.text(index, text)] if text else []
        elif text or (logprobs is not None and logprobs.tokens):
            told = CompletionChoice(index=index, text=text, logprobs=logprobs)
            events.append(self._writer.chunk(told, usage=usage))
        if (reason := items[-1].finish_reason) is not None:
            last = self._writer.finish(index, _said(reason), items[-1].stop_reason, usage=usage)
            events.append(last)
        return b"".join(map(event, events))

    def _logprobs(self, index: int, items: list[Token]) -> CompletionLogprobs | None:
        if self._spell is None or self._request.logprobs is None:
            return None
        told = [one for one in items if one.token_id is not None and one.logprobs is not None]
        ids = [one.token_id for one in told if one.token_id is not None]
        columns = self._columns.setdefault(index, LogprobColumns(self._spell, hidden=self._hidden))
        return columns.add(ids, [one.logprobs for one in told])

    def _usage_so_far(self) -> Usage | None:
        return Usage.of(*self._usages) if self._request.wants_running_usage else None

    def end(self, completions: list[Completion]) -> bytes:
        """Return the chunk with the totals, if it was asked for."""
        if not self._request.wants_usage:
            return b""
        return event(self._writer.usage(Usage.of(*(one.usage for one in completions))))

    def failed(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return event(error_body(error))

    # ── whole ───────────────────────────────────────────────────────────────────────────

    def whole(self, completions: list[Completion]) -> bytes:
        """Return all texts in one."""
        choices = [
            self._choice(prompt, completion, choice)
            for prompt, completion in enumerate(completions)
            for choice in completion.choices
        ]
        usage = Usage.of(*(one.usage for one in completions))
        return encode(CompletionBody(id=self._id, choices=choices, usage=usage, **self._facts))

    def _choice(self, prompt: int, completion: Completion, choice: Choice) -> CompletionChoice:
        more: dict[str, Any] = {}
        if self._request.prompt_logprobs is not None and self._spell is not None:
            ids, entries = self._prompts[prompt], completion.prompt_logprobs
            assert isinstance(ids, list)
            assert entries is not None
            more["prompt_logprobs"] = prompt_logprobs(ids, entries, self._spell)
        return CompletionChoice(
            index=prompt * self._n + choice.index, text=self._echoes[prompt] + choice.text,
            logprobs=self._whole_logprobs(prompt, completion, choice),
            finish_reason=_said(choice.finish_reason), stop_reason=choice.stop_reason, **more,
        )  # fmt: skip

    def _whole_logprobs(
        self, prompt: int, completion: Completion, choice: Choice
    ) -> CompletionLogprobs | None:
        if self._spell is None or choice.logprobs is None:
            return None
        ids, entries = list(choice.token_ids), list(choice.logprobs)
        columns = LogprobColumns(self._spell, hidden=self._hidden)
        before = self._prompts[prompt]
        if self._request.echo and isinstance(before, list):
            known = completion.prompt_logprobs
            assert known is not None
            return columns.add([*before, *ids], [*known, *entries])
        return columns.add(ids, entries)

    def reasons(self, completions: list[Completion]) -> list[str]:
        """Return why each choice ended."""
        return [_said(choice.finish_reason) for one in completions for choice in one.choices]


def _said(reason: FinishReason) -> Literal["stop", "length"]:
    return "length" if reason is FinishReason.LENGTH else "stop"
