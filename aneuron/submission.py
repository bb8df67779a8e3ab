"""`Submission`: from what the caller gave to a request that can be scheduled.

Comes in: parameters, and text, messages or ids. Goes out: requests that engine and model can do,
with ids, stop watches and grammars, to the intake. Ids alone go straight on; what takes the
tokenizer or the grammar compiler is a task of the engine's, and what is wrong there fails the
request. Runs on the caller's loop.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from aneuron.errors import InvalidRequest
from aneuron.grammar import GrammarCompiler
from aneuron.params import (
    Grammar,
    SamplingParams,
    check_deadline,
    check_priority,
    check_vocabulary_of,
)
from aneuron.prompt import check_choices, check_length, check_vocabulary, spell_bad_words, tokenize
from aneuron.request import make_request
from aneuron.stream import StopWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aneuron.config import EngineConfig
    from aneuron.intake import Intake
    from aneuron.kv_cache import KVCacheManager
    from aneuron.params.messages import Conversation
    from aneuron.plans import ModelSpec
    from aneuron.prompt import Tokenizer
    from aneuron.request import Request

__all__ = ["Submission", "check_request"]


def check_request(
    params: SamplingParams, *, priority: int, config: EngineConfig, spec: ModelSpec
) -> None:
    """Check what a request asks for against the engine and its model.

    Raises:
        InvalidRequest: they cannot do it; `param` names the field.
    """
    check_priority(priority, policy=config.scheduling_policy)
    if params.n > config.max_num_seqs:
        message = f"n {params.n} is over max_num_seqs {config.max_num_seqs}"
        raise InvalidRequest(message, param="n")
    field = params.needs_logits
    has_logits = spec.has_logits or (field == "grammar" and spec.has_masks)
    if field is not None and not (has_logits and spec.has_slots):
        raise InvalidRequest(
            f"{spec.name} shows no logits on this device, which {field} needs", param=field
        )
    if params.grammar is not None and not spec.has_masks:
        raise InvalidRequest(
            f"{spec.name} takes no masks on this device, which a grammar needs", param="grammar"
        )
    if spec.greedy_only and params.temperature > 0:
        raise InvalidRequest(
            f"{spec.name}'s programs only take the likeliest token: pass temperature=0",
            param="temperature",
        )
    if (field := _unsupported(params, spec)) is not None:
        raise InvalidRequest(
            f"{spec.name}'s programs sample on this device without {field}", param=field
        )
    if params.logits_processors and not spec.is_split:
        raise InvalidRequest(
            f"{spec.name} does not show its logits to the host on this device, which "
            "logits_processors need",
            param="logits_processors",
        )


def _unsupported(params: SamplingParams, spec: ModelSpec) -> str | None:
    """Return a field that the model's sampling does not know and the request sets, or None."""
    plain = SamplingParams()
    fields = spec.unsupported_params
    return next((name for name in fields if getattr(params, name) != getattr(plain, name)), None)


class Submission:
    """Makes and submits the requests of one open engine."""

    def __init__(
        self,
        intake: Intake,
        kv: KVCacheManager,
        tokenizer: Tokenizer,
        spec: ModelSpec,
        config: EngineConfig,
        *,
        max_model_len: int,
        ids: Iterator[int],
        clock: Callable[[], float],
    ) -> None:
        """Make one.

        Args:
            intake: takes over.
            kv: whose size bounds prompts.
            tokenizer: of the model.
            spec: of the model.
            config: of the engine.
            max_model_len: the engine's length limit.
            ids: internal ids to come.
            clock: the scheduler's, in seconds.
        """
        self._intake = intake
        self._kv = kv
        self._tokenizer = tokenizer
        self._spec = spec
        self._config = config
        self._max_model_len = max_model_len
        self._ids = ids
        self._clock = clock
        self._checked: SamplingParams | None = None
        self._bad_word_ids: tuple[tuple[int, ...], ...] = ()
        self._grammars = GrammarCompiler(tokenizer, spec.vocab_size, spec.eos_token_ids)

    def close(self) -> None:
        """Let the threads that compile grammars go."""
        self._grammars.close()

    def make(self, params: SamplingParams, name: str | None, priority: int) -> Request:
        """Return a request that nothing knows of yet, with its choices; `submit` follows.

        Raises:
            InvalidRequest: engine or model cannot do what it asks for, or its name is no name;
                `param` names the field.
        """
        bad_word_ids = self.check(params, priority)
        return make_request(
            self._ids, name, params, arrival_s=self._clock(), priority=priority,
            bad_word_ids=bad_word_ids,
        )  # fmt: skip

    def check(self, params: SamplingParams, priority: int) -> tuple[tuple[int, ...], ...]:
        """Check what a request asks for; return how tokens spell its bad words.

        Many prompts in a row have the same parameters, and lists in them may be long: these are
        held against the vocabulary once.

        Raises:
            InvalidRequest: engine or model cannot do it, an id is outside, or a word cannot be
                spelled; `param` names the field.
        """
        check_request(params, priority=priority, config=self._config, spec=self._spec)
        if params is not self._checked:
            check_vocabulary_of(params, self._spec.vocab_size)
            self._bad_word_ids = spell_bad_words(self._tokenizer, params.bad_words)
            self._checked = params
        return self._bad_word_ids

    def submit(
        self, request: Request, prompt: str | Conversation | np.ndarray, deadline_s: float | None
    ) -> None:
        """Take a request on; its prompt is text, a conversation, or ids int32 [tokens].

        Raises:
            InvalidRequest: its name is in use, or it has a stop string that cannot be watched.
            Overloaded: too many wait.
        """
        deadline_s, is_ready = check_deadline(deadline_s), request.params.grammar is None
        if is_ready and isinstance(prompt, np.ndarray):
            self._watch(request, prompt)  # may raise: before anything knows of it
            self._intake.register(request, deadline_s=deadline_s)
            self._intake.admit(request, prompt)
        else:
            self._intake.register(request, deadline_s=deadline_s)
            self._intake.prepare(request, partial(self._prepare, request, prompt))

    async def _prepare(self, request: Request, prompt: str | Conversation | np.ndarray) -> None:
        grammar, ids = request.params.grammar, prompt
        if not isinstance(ids, np.ndarray):
            ids = await self._tokenized(request.params, ids)
        if isinstance(grammar, Grammar) and not request.is_finished:
            matcher = await self._grammars.compile(grammar)
            for one in request.choices:
                one.matcher = matcher.copy()
        if not request.is_finished:
            self._watch(request, ids)
            self._intake.admit(request, ids)

    async def _tokenized(self, params: SamplingParams, prompt: str | Conversation) -> np.ndarray:
        param = "prompt" if isinstance(prompt, str) else "messages"
        check = partial(self.check_length, params=params, param=param)
        ids = await tokenize(self._tokenizer, prompt, check=check)
        check_vocabulary(ids, vocab_size=self._spec.vocab_size, param=param)
        return ids

    def _watch(self, request: Request, ids: np.ndarray) -> None:
        for one in request.choices if request.params.stop else ():
            one.watch = StopWatch.of(self._tokenizer, ids, request.params)

    def check_length(
        self, num_tokens: int, params: SamplingParams, *, param: str, at_least: bool = False
    ) -> None:
        """Check that a prompt fits, with all its choices; it may be longer if `at_least`.

        Raises:
            InvalidRequest, ContextTooLong: it does not; `param` is the field that they name.
        """
        kv, limit = self._kv, self._max_model_len
        check_length(
            num_tokens, max_model_len=limit, capacity=kv.capacity, param=param, at_least=at_least
        )
        check_choices(num_tokens, params.n, block_size=kv.block_size, num_blocks=kv.num_blocks)
