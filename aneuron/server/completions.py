"""`/v1/completions`: prompts in, their texts out, whole or as chunks.

Comes in: a body with one prompt or many. Goes out: a token stream for each prompt, and what
speaks them: choice c of prompt p has the index p * n + c.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from aneuron import outputs
from aneuron.errors import RequestError
from aneuron.outputs import FinishReason
from aneuron.params import SamplingParams
from aneuron.prompt import check_length
from aneuron.server.call import Endpoint, encode_each, submit_all
from aneuron.server.http.errors import api_error, error_body
from aneuron.server.http.sse import event
from aneuron.server.wire.common import Usage, encode
from aneuron.server.wire.completions import (
    MAX_PROMPTS,
    CompletionBody,
    CompletionChoice,
    CompletionRequest,
    CompletionWriter,
)
from aneuron.server.wire.decoding import decode, refuse
from aneuron.server.wire.logprobs import LogprobColumns, prompt_logprobs
from aneuron.server.wire.sampling import field_names, sampling_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from aneuron.outputs import Choice, Completion, Token, TokenLogprobs
    from aneuron.server.app import ServerState
    from aneuron.server.call import Call
    from aneuron.server.http.errors import ApiError
    from aneuron.server.wire.logprobs import CompletionLogprobs
    from aneuron.stream import TokenStream

__all__ = ["CompletionsEndpoint"]

_Prompt = str | list[int]
_SLICE = 128  # tokens, with up to 20 others each: some 4 ms


class CompletionsEndpoint(Endpoint):
    """Goes on with texts."""

    name, prefix = "completions", "cmpl-"

    async def submit(
        self, call: Call, body: bytes
    ) -> tuple[list[TokenStream], CompletionSpeaker, bool]:
        """Return a stream for each prompt, what speaks them, and whether as events."""
        state = self.state
        request = decode(CompletionRequest, body, max_model_len=state.max_model_len)
        call.names = field_names(request)
        state.check(request.model)
        sampling = sampling_of(request)
        prompts: list[_Prompt] = request.prompts
        num_choices = len(prompts) * request.num_choices
        if num_choices > MAX_PROMPTS:
            refuse("n", f"makes {num_choices} choices of all prompts; at most {MAX_PROMPTS} are")
        wants_logprobs = request.logprobs is not None or request.prompt_logprobs is not None
        spell = await state.spelling.load() if wants_logprobs else None
        if "prompt_logprobs" in sampling and request.stream:
            field = "echo" if request.prompt_logprobs is None else "prompt_logprobs"
            refuse(field, "with log probabilities of the prompt is not supported as a stream")
        call.received(len(prompts), sampling, is_stream=bool(request.stream))
        if "prompt_logprobs" in sampling:
            prompts = [await _ids_of(at, one, call) for at, one in enumerate(prompts)]
        try:
            params = SamplingParams.build(None, sampling)  # once for all: they may be large
        except RequestError as error:
            raise api_error(error, call.names) from error
        streams = await submit_all(call, (partial(_submit, state, one, params) for one in prompts))
        try:
            echoes = [await _echo(one, state) for one in request.prompts] if request.echo else []
            speaker = CompletionSpeaker(call, request, echoes, prompts, spell)
        except BaseException:  # nobody else has them yet
            for stream in streams:
                stream.cancel()
            raise
        return streams, speaker, bool(request.stream)


def _submit(state: ServerState, prompt: _Prompt, params: SamplingParams) -> TokenStream:
    if isinstance(prompt, str):
        return state.engine.generate(prompt, params)
    return state.engine.generate(prompt_token_ids=prompt, params=params)


async def _ids_of(at: int, prompt: _Prompt, call: Call) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    state = call.state
    most = state.max_model_len
    check = partial(check_length, max_model_len=most, capacity=most, param="prompt")
    try:
        encoded = await state.engine.tokenizer.encode(prompt, check=check)
    except RequestError as error:
        raise call.error_of(error, at) from error
    ids: list[int] = encoded.tolist()
    return ids


async def _echo(prompt: _Prompt, state: ServerState) -> str:
    """Return a prompt's text; its ids are no more than fit, as they were submitted."""
    if isinstance(prompt, str):
        return prompt
    await asyncio.sleep(0)  # many at once would hold the loop
    return state.engine.tokenizer.decode(prompt)


class CompletionSpeaker:
    """Says what goes on with prompts."""

    ends_with_done = True

    def __init__(
        self,
        call: Call,
        request: CompletionRequest,
        echoes: list[str],
        prompts: list[_Prompt],
        spell: Callable[[int], bytes] | None,
    ) -> None:
        """Speak to a call.

        Args:
            call: whose answer it is.
            request: that it answers.
            echoes: texts of the prompts, where they are to be said.
            prompts: as the engine got them: ids where their log probabilities are wanted.
            spell: gives an id's bytes, for log probabilities.
        """
        self._request, self._n = request, request.num_choices
        self._prompts, self._spell = prompts, spell
        shows_special = request.skip_special_tokens is False
        self._hidden = frozenset() if shows_special else call.state.spelling.special_ids
        self._echoes = echoes or [""] * len(prompts)
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

    async def whole(self, completions: list[Completion]) -> bytes:
        """Return all texts in one."""
        choices = await encode_each(
            [
                await self._choice(prompt, completion, choice)
                for prompt, completion in enumerate(completions)
                for choice in completion.choices
            ]
        )
        usage = Usage.of(*(one.usage for one in completions))
        return encode(CompletionBody(id=self._id, choices=choices, usage=usage, **self._facts))

    async def _choice(
        self, prompt: int, completion: Completion, choice: Choice
    ) -> CompletionChoice:
        more: dict[str, Any] = {}
        if self._request.prompt_logprobs is not None and self._spell is not None:
            ids, entries = self._prompts[prompt], completion.prompt_logprobs
            assert isinstance(ids, list)
            assert entries is not None
            more["prompt_logprobs"] = rows = []
            for own, told in _slices(ids, entries):
                rows += prompt_logprobs(own, told, self._spell)
                await asyncio.sleep(0)
        return CompletionChoice(
            index=prompt * self._n + choice.index, text=self._echoes[prompt] + choice.text,
            logprobs=await self._whole_logprobs(prompt, completion, choice),
            finish_reason=_said(choice.finish_reason), stop_reason=choice.stop_reason, **more,
        )  # fmt: skip

    async def _whole_logprobs(
        self, prompt: int, completion: Completion, choice: Choice
    ) -> CompletionLogprobs | None:
        if self._spell is None or choice.logprobs is None:
            return None
        ids: list[int] = list(choice.token_ids)
        entries: list[TokenLogprobs | None] = list(choice.logprobs)
        before = self._prompts[prompt]
        if self._request.echo and isinstance(before, list):
            known = completion.prompt_logprobs
            assert known is not None
            ids, entries = [*before, *ids], [*known, *entries]
        columns = LogprobColumns(self._spell, hidden=self._hidden)
        told = columns.add((), ())
        for own, facts in _slices(ids, entries):
            told.extend(columns.add(own, facts))
            await asyncio.sleep(0)
        return told

    def reasons(self, completions: list[Completion]) -> list[str]:
        """Return why each choice ended."""
        return [_said(choice.finish_reason) for one in completions for choice in one.choices]


def _slices(
    ids: list[int], entries: Sequence[TokenLogprobs | None]
) -> Iterator[tuple[list[int], Sequence[TokenLogprobs | None]]]:
    """Yield what of some tokens' log probabilities is told in one turn of the loop."""
    for at in range(0, len(ids), _SLICE):
        yield ids[at : at + _SLICE], entries[at : at + _SLICE]


def _said(reason: FinishReason) -> Literal["stop", "length"]:
    return "length" if reason is FinishReason.LENGTH else "stop"
