"""What is said where blocking code is written for what must be awaited.

Comes in: `with`, `for` or an attribute where `async with`, `async for` or `await` is meant. Goes
out: an error that says what to write. Type checkers see none of this, and go on refusing such code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

__all__ = ["AnswersIterated", "AsyncEntered", "TokensAwaited"]


class _Later:
    """An attribute that is there only once a stream has been awaited.

    A descriptor a name: a `__getattr__` would slow down every attribute of a stream.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        taken = "" if self._name == "result" else f"; then `completion.{self._name}`"
        raise AttributeError(f"no {self._name!r} yet: write `completion = await stream`{taken}")


class AsyncEntered:
    """Base of what `async with` enters."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            raise TypeError("entering and leaving are awaited: write `async with`, not `with`")

        __exit__ = __enter__  # `with` looks for both before it calls one


class TokensAwaited(AsyncEntered):
    """Base of the stream of one request's tokens."""

    __slots__ = ()

    if not TYPE_CHECKING:
        abort_reason = _Later()
        choices = _Later()
        finish_reason = _Later()
        prompt_logprobs = _Later()
        result = _Later()
        stop_reason = _Later()
        text = _Later()
        timing = _Later()
        token_ids = _Later()

        def __iter__(self) -> NoReturn:
            raise TypeError("tokens are awaited: `async for token in stream`, or `await stream`")


class AnswersIterated(AsyncEntered):
    """Base of the stream of many prompts' answers."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            raise TypeError(
                "answers are awaited, one by one: `async for index, completion in "
                "engine.generate_many(...)`"
            )

        __await__ = __iter__
