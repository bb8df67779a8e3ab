"""What each id spells, as bytes, for log probabilities: asked for once, off the loop.

Comes in: the engine's tokenizer. Goes out: a function from ids to bytes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from aneuron.prompt import Tokenizer

__all__ = ["Spelling"]


class Spelling:
    """The vocabulary of one tokenizer, once somebody asks for it.

    Attributes:
        special_ids: that texts leave out; known once it is loaded.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Note whose; nothing is read yet."""
        self._tokenizer = tokenizer
        self._texts: list[bytes] | None = None
        self.special_ids: frozenset[int] = frozenset()

    async def load(self) -> Callable[[int], bytes]:
        """Return the function; the first time takes a thread 0.1 s for 50,000 ids."""
        if self._texts is None:
            spell = getattr(self._tokenizer, "spell_vocabulary", None)
            found = None if spell is None else await asyncio.to_thread(spell)
            self._texts, self.special_ids = ([], frozenset()) if found is None else found
        return self._spell

    def _spell(self, token_id: int) -> bytes:
        texts = self._texts or []
        if token_id < len(texts) and texts[token_id]:
            return texts[token_id]
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
