"""Nulls where nothing is known: clients with one type for all messages send fields of the others.

Comes in: a decoder that is strict, and JSON. Goes out: what it makes of it, also where members
that it does not know are null. Pure; costs nothing until there is such a member.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import msgspec

from aneuron.params.sizes import holds_more

__all__ = ["forgiving"]

_Out_co = TypeVar("_Out_co", covariant=True)

_MOST_FORGIVEN = 2**16  # values of a body in which nulls are looked for
_USERS_OWN = frozenset((  # members that hold JSON of the client's, where a null is a value
    "cache_control", "chat_template_kwargs", "json", "logit_bias", "metadata", "parameters",
    "prompt_cache_breakpoint", "schema",
))  # fmt: skip


class _Decoder(Protocol[_Out_co]):
    def decode(self, raw: bytes, /) -> _Out_co: ...


def forgiving(decoder: _Decoder[_Out_co], raw: bytes) -> _Out_co:
    """Return what a decoder makes of JSON; members that it does not know may be null.

    Clients with one type for all messages send the fields of the others as nulls.

    Raises:
        msgspec.ValidationError: the JSON is wrong otherwise.
    """
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        if "unknown field" not in str(error) or holds_more(bytes(raw), _MOST_FORGIVEN):
            raise
        value = msgspec.json.decode(raw)
        if not _drop_nulls(value):
            raise
    return decoder.decode(msgspec.json.encode(value))


def _drop_nulls(value: Any) -> bool:
    """Take members that are null out of an object, and of those inside; return if there were."""
    found = False
    if type(value) is dict:
        for name in [name for name, one in value.items() if one is None]:
            del value[name]
            found = True
        value = [one for name, one in value.items() if name not in _USERS_OWN]
    for one in value:
        if type(one) in (dict, list):
            found = _drop_nulls(one) or found
    return found
