"""`SlotRules`: what one request does to its logits before a token is drawn.

Comes in: a row of float32 logits, each token that the request is given. Goes out: the same row,
changed in place. Only requests that ask for something have rules, and all but `allowed_token_ids`
touch only the ids that they are about (penalties: those that have occurred), so the size of the
vocabulary does not matter. Used by executables, so on the device's thread alone, in queue order;
a request that resumes brings its tokens along, and its rules are built from them again.

Order and formulas are vLLM's: allowed ids, bad words, min_tokens, bias, then penalties
(repetition as in Keskar et al. 2019, frequency and presence as OpenAI documents them).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aneuron.plans import RuleWrite

__all__ = ["SlotRules"]


class SlotRules:
    """The rules of one request, and the tokens that they depend on."""

    def __init__(self, write: RuleWrite) -> None:
        """Build them from what the request asks for and has been given so far."""
        params = write.params
        prompt, output = write.token_ids[: write.prompt_len], write.token_ids[write.prompt_len :]
        self._size = 0  # of the vocabulary; known with the first row
        self._allowed = _ids(params.allowed_token_ids)
        self._bad_words = [(tuple(word[:-1]), word[-1]) for word in write.bad_word_ids]
        longest = max((len(begin) for begin, _ in self._bad_words), default=0)
        self._last: deque[int] = deque(output[-longest:].tolist() if longest else (), longest)
        self._ends = _ids(sorted({*write.end_ids, *params.stop_token_ids}))
        self._min_tokens = params.min_tokens
        self._num_tokens = len(output)
        bias = dict(params.logit_bias or ())
        self._biased = _ids(bias)
        self._bias = np.fromiter(bias.values(), np.float32, len(bias))
        self._penalties = _Penalties(params, prompt, output) if params.has_penalties else None

    def note(self, token: int) -> None:
        """Take a token that the request was given."""
        self._num_tokens += 1
        self._last.append(token)
        if self._penalties is not None:
            self._penalties.note(token)

    def apply(self, row: np.ndarray) -> None:
        """Change a row of logits, float32 [V], in place."""
        if len(row) != self._size:
            self._fit(len(row))
        kept = None
        if self._allowed is not None:
            kept = row[self._allowed]
            row[:] = -np.inf
            row[self._allowed] = kept
        self._ban(row)
        if kept is not None and np.isneginf(row[self._allowed]).all():
            row[self._allowed] = kept  # bans left nothing of what is allowed: allowed wins
        if self._biased is not None:
            row[self._biased] += self._bias
        if self._penalties is not None:
            self._penalties.apply(row)

    def _fit(self, size: int) -> None:
        """Forget ids that the model does not have: it never gives them."""
        self._size = size
        self._bad_words = [one for one in self._bad_words if one[1] < size]
        if self._ends is not None:
            self._ends = self._ends[self._ends < size]

    def _ban(self, row: np.ndarray) -> None:
        if self._bad_words:
            told = tuple(self._last)
            for begin, end in self._bad_words:
                if not begin or told[-len(begin) :] == begin:
                    row[end] = -np.inf
        if self._num_tokens < self._min_tokens and self._ends is not None:
            row[self._ends] = -np.inf


class _Penalties:
    """Ids that have occurred, how often in the output, and what that costs them."""

    def __init__(self, params: Any, prompt: np.ndarray, output: np.ndarray) -> None:
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._repetition = params.repetition_penalty
        # The prompt counts for repetition alone.
        seen = prompt if self._repetition != 1 else prompt[:0]
        ids, places = np.unique(np.concatenate([output, seen]), return_inverse=True)
        counts = np.bincount(places[: len(output)], minlength=len(ids))
        self._place = {token: place for place, token in enumerate(ids.tolist())}
        self._ids = np.zeros(max(64, 2 * len(ids)), np.int64)
        self._ids[: len(ids)] = ids
        self._counts = np.zeros(len(self._ids), np.float32)
        self._counts[: len(ids)] = counts

    def note(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += 1

    def apply(self, row: np.ndarray) -> None:
        num = len(self._place)
        ids, counts = self._ids[:num], self._counts[:num]
        values = row[ids]
        if self._repetition != 1:
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._frequency * counts + self._presence * (counts > 0)
        row[ids] = values


def _ids(tokens: Iterable[int] | None) -> np.ndarray | None:
    """Return ids as an index, int64 [n]; None if there are none."""
    ids = np.fromiter(tokens or (), np.int64)
    return ids if len(ids) else None
