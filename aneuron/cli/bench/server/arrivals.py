"""What is sent, and when: drawn from a seed, so that every server meets the same load.

Comes in: a rate and the shape of requests. Goes out: arrival times in seconds from the start, and
the JSON of each request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Shape", "arrival_times"]

# Short and common: about a token each in most vocabularies.
_TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one had
by word but not what all were we when your can said there use an each which she do how their if
will up other about out many then them these so some her would make like him
"""
_WORDS = _TEXT.split()


def arrival_times(
    num_prompts: int, request_rate: float, burstiness: float, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Draw when requests arrive: the times between them are of a gamma distribution.

    Args:
        num_prompts: how many arrive.
        request_rate: how many a second, on average; infinite: all at once.
        burstiness: shape of the distribution. 1 is a Poisson process; less comes in bursts, more
            is more even.
        rng: draws.

    Returns:
        [num_prompts], seconds from the start, ascending. The first comes after a gap as well.
    """
    if np.isinf(request_rate):
        return np.zeros(num_prompts)
    gaps = rng.gamma(burstiness, 1.0 / (request_rate * burstiness), num_prompts)
    return np.cumsum(gaps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What requests are like.

    Attributes:
        endpoint: path of the endpoint; that of chat gets messages, else there are token ids.
        model: its name in requests.
        input_len: token ids of a prompt, or words of a message.
        output_len: `max_tokens`.
        ignore_eos: go on after an end id; servers that do not know this may refuse it.
        token_ids: the range [first, last) that token ids are drawn from.
    """

    endpoint: str
    model: str
    input_len: int
    output_len: int
    ignore_eos: bool
    token_ids: tuple[int, int]

    @property
    def is_chat(self) -> bool:
        """Whether requests have messages."""
        return self.endpoint.rstrip("/").endswith("/chat/completions")

    def body(self, rng: np.random.Generator, output_len: int | None = None) -> bytes:
        """Return the JSON of a request with a prompt of its own.

        Args:
            rng: draws the prompt.
            output_len: in place of the shape's.
        """
        tokens = output_len or self.output_len
        request: dict[str, Any] = {"model": self.model, **self._prompt(rng)}
        request["max_completion_tokens" if self.is_chat else "max_tokens"] = tokens
        request |= {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            request["ignore_eos"] = True
        return msgspec.json.encode(request)

    def _prompt(self, rng: np.random.Generator) -> dict[str, Any]:
        if not self.is_chat:
            return {"prompt": rng.integers(*self.token_ids, self.input_len).tolist()}
        text = " ".join(_WORDS[at] for at in rng.integers(0, len(_WORDS), self.input_len))
        return {"messages": [{"role": "user", "content": text}]}
