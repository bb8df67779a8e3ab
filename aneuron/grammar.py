"""Grammars: compiled off the loop, followed token by token, asked for masks.

Comes in: a checked `Grammar` and a tokenizer's vocabulary; later the tokens of an answer.
Goes out: a `GrammarMatcher` per choice, and bitmasks of the tokens that may come next.
`compile` is awaited by the task that prepares a request, `fill_bitmask` by the step loop;
`advance` is called on the loop, and takes microseconds. Here alone is `llguidance` used.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import OrderedDict
from functools import cached_property
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from aneuron.clock import VirtualClockLoop
from aneuron.errors import InvalidRequest
from aneuron.threads import DaemonExecutor

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from concurrent.futures import Executor

    import llguidance
    import numpy.typing as npt

    from aneuron.params import Grammar

__all__ = ["GrammarCompiler", "GrammarMatcher", "fill_bitmask"]

_MAX_COMPILED, _MAX_COMPILED_CHARS = 64, 2**18
_NUM_THREADS = 2  # that compile
# Compilers recurse as deep as rules refer to each other: with the usual 8 MiB a schema or a
# Lark source of 64 KiB could end the process. Pages that are not touched cost nothing.
_STACK_BYTES = 2**26
# What most tokens are inside a JSON string. Masks there take 20 us with it, 450 us without.
_SLICES = [r'[^"\\\x00-\x1F\x7F]+']
# Without it a mask may allow just one way to spell what must come, as the tokenizer would: the
# library would ask it, which takes the GIL, and what is banned may be all that is allowed.
_OPTIONS = '%llguidance {"no_forcing": true}'
_MAX_LINES = 5
_MAX_LINE_CHARS = 160


class GrammarMatcher:
    """One choice's place in its grammar.

    Attributes:
        is_stopped: nothing more can follow.
        error: what broke it (too complex, or a token that it does not allow), or None.
    """

    __slots__ = ("_matcher", "_vocabulary", "error", "is_stopped")

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: _Vocabulary) -> None:
        """Make one of a compiled grammar; `GrammarCompiler.compile` does."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self.is_stopped = False
        self.error: str | None = None
        self._look()

    def advance(self, token_id: int) -> None:
        """Take the next token of the answer; one that is not allowed sets `error`."""
        if self.error is not None:
            return
        if token_id in self._vocabulary.end_ids:
            token_id = self._vocabulary.size
        self._matcher.consume_token(token_id)
        self._look()

    def copy(self) -> GrammarMatcher:
        """Return another one at the same place, with a future of its own."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocabulary)

    def _look(self) -> None:
        """Note how it stands, so that nobody asks while a thread fills its mask."""
        self.is_stopped = self._matcher.is_stopped()
        if self._matcher.is_error():
            self.error = _shorten(self._matcher.get_error())


async def fill_bitmask(
    matchers: Sequence[GrammarMatcher], vocab_size: int, *, executor: Executor | None = None
) -> npt.NDArray[np.int32]:
    """Return which tokens may come next, found in a thread; several at once in several.

    Cancelled: it waits for the thread all the same, some milliseconds, since a matcher must not
    be used from two threads; they may be used or dropped afterwards.

    Args:
        matchers: all of one `GrammarCompiler`, each once. One that has stopped allows all: its
            request has ended. The same goes for one that broke, maybe just now: see `error`.
        vocab_size: of the model.
        executor: whose thread does it; the loop's own by default.

    Returns:
        int32 [matchers, ceil(vocab_size / 32)]: bit i of word w is 1 if id 32 w + i is allowed.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualClockLoop):  # which would not wait for a thread
        return _fill(tuple(matchers), vocab_size)
    filling = loop.run_in_executor(executor, _fill, tuple(matchers), vocab_size)
    try:
        return await asyncio.shield(filling)
    except asyncio.CancelledError:
        await asyncio.wait({filling})
        raise


def _fill(matchers: tuple[GrammarMatcher, ...], vocab_size: int) -> npt.NDArray[np.int32]:
    bitmask = np.full((len(matchers), -(-vocab_size // 32)), -1, np.int32)
    live = [i for i, one in enumerate(matchers) if not one.is_stopped and one.error is None]
    if live:
        vocabulary = matchers[live[0]]._vocabulary  # noqa: SLF001  its own kind
        assert vocab_size == vocabulary.size, "the masks of another model"
        rows = vocabulary.masks([matchers[i]._matcher for i in live])  # noqa: SLF001
        for i, row in zip(live, rows, strict=True):
            matchers[i]._look()  # noqa: SLF001
            if matchers[i].error is None:
                bitmask[i] = row
    return bitmask


class GrammarCompiler:
    """Compiles grammars for one model, each once, and keeps the last 64.

    Args:
        tokenizer: the model's; its vocabulary is asked for at the first `compile`.
        vocab_size: of the model; ids that the tokenizer does not have are never allowed.
        end_ids: that end an answer; allowed exactly where the grammar can end.
    """

    def __init__(self, tokenizer: object, vocab_size: int, end_ids: Collection[int]) -> None:
        self._source = _VocabularySource(tokenizer, vocab_size, frozenset(end_ids))
        self._compiled: OrderedDict[Grammar, asyncio.Future[GrammarMatcher | InvalidRequest]]
        self._compiled = OrderedDict()
        self._threads = cycle(
            DaemonExecutor(f"aneuron-grammar-{number}", stack_bytes=_STACK_BYTES)
            for number in range(_NUM_THREADS)
        )

    async def compile(self, grammar: Grammar) -> GrammarMatcher:
        """Return a matcher at the start of a grammar; threads do the work.

        Cancelled: the work goes on for who else waits for it, and its result is kept.

        Raises:
            InvalidRequest: it does not compile, allows nothing, or needs what is not there.
        """
        job = self._compiled.get(grammar)
        if job is None or (job.done() and (job.cancelled() or job.exception() is not None)):
            job = self._compiled[grammar] = self._start(grammar)
        self._compiled.move_to_end(grammar)
        self._forget()
        compiled = await asyncio.shield(job)
        if isinstance(compiled, InvalidRequest):
            raise compiled.copy()
        return compiled.copy()

    def _forget(self) -> None:
        """Drop the oldest beyond what is kept: by number, and by length, as memory goes."""
        num_chars = sum(len(one.text) for one in self._compiled)
        while len(self._compiled) > 1 and (
            len(self._compiled) > _MAX_COMPILED or num_chars > _MAX_COMPILED_CHARS
        ):
            num_chars -= len(self._compiled.popitem(last=False)[0].text)

    def _start(self, grammar: Grammar) -> asyncio.Future[GrammarMatcher | InvalidRequest]:
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualClockLoop):
            job = loop.create_future()
            job.set_result(_compile(self._source, grammar))
            return job
        return loop.run_in_executor(next(self._threads), _compile, self._source, grammar)

    def close(self) -> None:
        """Let the threads end; a compiler that runs is left behind."""
        for _ in range(_NUM_THREADS):
            next(self._threads).shutdown()


def _compile(source: _VocabularySource, grammar: Grammar) -> GrammarMatcher | InvalidRequest:
    """Return a compiled grammar, or why there is none: an error that several waiters copy."""
    try:
        vocabulary = source.vocabulary
    except InvalidRequest as fault:
        return fault
    matcher = vocabulary.matcher(_source_text(grammar))
    [mask] = _fill((matcher,), vocabulary.size)  # finds more faults, and warms its caches
    if (reason := matcher.error) is None:
        if mask.any():
            return matcher
        reason = "it allows no token of this model"
    if grammar.kind != "lark":  # what surrounds the text is ours
        reason = re.sub(r"^at \d+\(\d+\): ", "", reason)
        reason = re.split(r"\n +\d+ \| ", reason)[0]
    return InvalidRequest(f"grammar: {grammar.kind}: {reason}", param="grammar")


def _source_text(grammar: Grammar) -> str:
    """Return a grammar as Lark source for `llguidance`; the last line of options counts."""
    match grammar.kind:
        case "json":
            schema = json.loads(grammar.text)
            schema = {} if schema is True else schema
            # White space of any length is no form at all to a model that likes it.
            options = {"whitespace_flexible": False}
            own = schema.get("x-guidance", {})
            schema["x-guidance"] = options | own if isinstance(own, dict) else own
            body = f"start: %json {json.dumps(schema, ensure_ascii=False)}"
        case "regex":
            from llguidance import regex_to_lark

            body = f"start: /{regex_to_lark(grammar.text)}/"
        case "choice":
            body = f"start: /{'|'.join(map(_escape, json.loads(grammar.text)))}/"
        case _:
            body = grammar.text
    return f"{body}\n{_OPTIONS}\n"


def _escape(text: str) -> str:
    """Return a regex that matches a text alone, and that Lark reads as it is."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _shorten(fault: str) -> str:
    """Return the first lines of what the library says, without its internals."""
    if fault.startswith("NoExtension"):
        return "no token of this model can follow"
    lines = re.split(r"\n<", fault)[0].strip().splitlines()
    lines = [line for line in lines if _OPTIONS not in line][:_MAX_LINES]
    return "\n".join(line[:_MAX_LINE_CHARS] for line in lines)


# ── the vocabulary ──────────────────────────────────────────────────────────────────────


class _VocabularySource:
    """Makes the vocabulary when a thread first asks for it."""

    def __init__(self, tokenizer: object, size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._size = size
        self._end_ids = end_ids
        self._lock = threading.Lock()
        self._made: _Vocabulary | None = None

    @property
    def vocabulary(self) -> _Vocabulary:
        """The vocabulary; the first call takes long.

        Raises:
            InvalidRequest: the library is not installed, or the tokenizer cannot tell.
        """
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> _Vocabulary:
        try:
            import llguidance as library
        except ImportError as fault:
            raise InvalidRequest(
                f'grammar needs llguidance: pip install "aneuron[grammar]" ({fault})',
                param="grammar",
            ) from fault
        spell = getattr(self._tokenizer, "spell_vocabulary", None)
        spelled = None if spell is None else spell()
        if spelled is None:
            raise InvalidRequest(
                "grammar: this tokenizer cannot tell what its ids spell (spell_vocabulary)",
                param="grammar",
            )
        tokens, special_ids = spelled
        return _Vocabulary(library, tokens, special_ids, self._size, self._end_ids)


class _Wrapper:
    """What `llguidance` takes for a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special_token_ids: Sequence[int], eos_token_id: int
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id

    def __call__(self, text: object) -> list[int]:
        raise RuntimeError("a grammar asked for tokens in spite of no_forcing")


class _Vocabulary:
    """A vocabulary as `llguidance` has it, and masks over it.

    It has one id more than the model: that one stands for the end, and the model's own end ids,
    however many, spell nothing.
    """

    def __init__(
        self,
        library: Any,
        spelled: list[bytes],
        special_ids: Collection[int],
        size: int,
        end_ids: frozenset[int],
    ) -> None:
        self.size = size
        self.end_ids = frozenset(one for one in end_ids if one < size)
        self._library = library
        tokens = spelled[:size] + [b""] * (size + 1 - len(spelled[:size]))
        for end_id in self.end_ids:
            tokens[end_id] = b""
        special_ids = [one for one in special_ids if one < size and one not in end_ids]
        # Two calls that keep the GIL instead of one, which would keep it for the sum.
        plain = library.LLTokenizer(_Wrapper(tokens, special_ids, size), slices=[])
        self._tokenizer = plain.with_slices(_SLICES)
        self._limits = library.LLParserLimits(
            # By default an ambiguous grammar may take 60 ms for a token, on the loop; and an
            # automaton 500 MB.
            max_items_in_row=500, max_lexer_states=50_000, verbose_errors=False,
        )  # fmt: skip

    def matcher(self, text: str) -> GrammarMatcher:
        """Return a matcher; it has an `error` if the text does not compile."""
        matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        return GrammarMatcher(matcher, self)

    @cached_property
    def _executor(self) -> llguidance.LLExecutor:
        executor: llguidance.LLExecutor = self._library.LLExecutor()
        return executor

    def masks(self, matchers: list[llguidance.LLMatcher]) -> npt.NDArray[np.int32]:
        """Return what they allow, int32 [matchers, ceil(size / 32)]; one thread each.

        A matcher that breaks meanwhile says so by itself.
        """
        rows = np.zeros((len(matchers), self.size // 32 + 1), np.uint32)
        pairs = [(matcher, index) for index, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(
            pairs, rows.ctypes.data, rows.shape[1] * 4, len(pairs)
        )
        word, bit = divmod(self.size, 32)
        may_end = (rows[:, word] >> np.uint32(bit)) & np.uint32(1)
        rows[:, word] &= np.uint32(2**bit - 1)
        for end_id in self.end_ids:
            rows[:, end_id // 32] |= may_end << np.uint32(end_id % 32)
        return rows[:, : -(-self.size // 32)].view(np.int32)
