"""`Submission`: from what the caller gave to a request that can be scheduled.

Comes in: requests that nothing knows of yet, with text, messages or ids. Goes out: requests
with ids, stop watches and grammars, to the intake. Ids alone go straight on; what takes the
tokenizer or the grammar compiler is a task of the engine's, and what is wrong there fails the
request. Runs on the caller's loop.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from aneuron.grammar import GrammarCompiler
from aneuron.params import Grammar, check_deadline, check_vocabulary_of
from aneuron.prompt import check_choices, check_length, check_vocabulary, spell_bad_words, tokenize
from aneuron.stream import StopWatch

if TYPE_CHECKING:
    from aneuron.intake import Intake
    from aneuron.kv_cache import KVCacheManager
    from aneuron.params import SamplingParams
    from aneuron.params.messages import Conversation
    from aneuron.plans import ModelSpec
    from aneuron.prompt import Tokenizer
    from aneuron.request import Request

__all__ = ["Submission"]


class Submission:
    """Submits requests of one open engine."""

    def __init__(
        self,
        intake: Intake,
        kv: KVCacheManager,
        tokenizer: Tokenizer,
        spec: ModelSpec,
        *,
        max_model_len: int,
    ) -> None:
        """Make one.

        Args:
            intake: takes over.
            kv: whose size bounds prompts.
            tokenizer: of the model.
            spec: of the model.
            max_model_len: the engine's length limit.
        """
        self._intake = intake
        self._kv = kv
        self._tokenizer = tokenizer
        self._spec = spec
        self._max_model_len = max_model_len
        self._checked: SamplingParams | None = None
        self._bad_word_ids: tuple[tuple[int, ...], ...] = ()
        self._grammars = GrammarCompiler(tokenizer, spec.vocab_size, spec.eos_token_ids)

    def close(self) -> None:
        """Let the threads that compile grammars go."""
        self._grammars.close()

    def check(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Check parameters against the model's vocabulary; return how tokens spell the bad words.

        Many prompts in a row have the same parameters, and lists in them may be long: it is done
        once.

        Raises:
            InvalidRequest: an id is outside, or a word cannot be spelled; `param` names the field.
        """
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
