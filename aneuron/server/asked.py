"""A conversation of either wire format → what it asks of the engine, and how its answer is read.

Comes in: a chat request; those of Responses are made into one. Goes out: the arguments of
`engine.chat`, and a reader for each answer, which takes its tokens apart. Runs in the endpoint's
task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aneuron.params.messages import Conversation
from aneuron.server import tools as calling
from aneuron.server.tools import Content, Reasoning
from aneuron.server.tools.templates import template_name
from aneuron.server.wire.decoding import refuse
from aneuron.server.wire.messages import plain_messages
from aneuron.server.wire.sampling import sampling_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aneuron.outputs import Token
    from aneuron.server.app import ServerState
    from aneuron.server.tools import OutputParser, Piece
    from aneuron.server.wire.chat import ChatRequest

__all__ = ["AnswerReader", "Asked", "check_template"]

_NO_TEMPLATE = (
    "make no prompt: this model has no chat template; put its chat_template.jinja beside its "
    "tokenizer.json, or use /v1/completions"
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks of the engine, and how its answer is read.

    Attributes:
        messages, template, sampling: arguments of `engine.chat`; those by name are in two parts.
        make_reader: gives a reader for each choice.
    """

    messages: list[dict[str, Any]]
    template: dict[str, Any]
    sampling: dict[str, Any]
    make_reader: Callable[[], AnswerReader]

    @classmethod
    async def of(cls, request: ChatRequest, state: ServerState) -> Asked:
        """Return what a request asks for.

        Raises:
            ApiError, InvalidRequest: a field is wrong; `param` names it as chat has it.
        """
        tokenizer, name = state.engine.tokenizer, state.config.tool_parser
        tools = calling.validate_tools(request.plain_tools)
        choice = calling.validate_tool_choice(request.plain_tool_choice, tools)
        callable_ = [one for one in tools if one["function"]["name"] in choice.names]
        messages = calling.template_messages(plain_messages(request.messages))
        template: dict[str, Any] = {
            "add_generation_prompt": request.begins_turn,
            "continue_final_message": bool(request.continue_final_message),
        }
        check_template(tokenizer)
        Conversation.of(messages, **template, chat_template_kwargs=request.template_kwargs)
        if (load_renderer := getattr(tokenizer, "load_renderer", None)) is not None:
            await load_renderer()
        # The form of an answer leaves no room for reasoning; a forced call does.
        has_form = request.has_form and choice.mode != "required"
        follows = "" if name is None or has_form else calling.answer_follows(
            tokenizer, messages, **template, **request.template_kwargs
        )  # fmt: skip
        forced = calling.forced_grammar(
            None if name is None else template_name(name, tokenizer), tools, choice,
            allows_parallel=request.parallel_tool_calls is not False,
            begins_in_reasoning=calling.opens_reasoning(follows), tokenizer=tokenizer,
        )  # fmt: skip
        sampling = sampling_of(request, forced=forced)

        def make_parser() -> OutputParser | None:
            if name is None:
                return None
            # An answer that is forced has our form, whatever the checkpoint says of its own.
            form = name if forced is None else template_name(name, tokenizer)
            return calling.parser_for(form, tools=callable_, tokenizer=tokenizer, follows=follows)

        parser = make_parser()
        if parser is not None and parser.needs_special_tokens:
            sampling["skip_special_tokens"] = False
        template["chat_template_kwargs"] = request.template_kwargs
        template["tools"] = callable_ or None
        most = None if request.parallel_tool_calls is not False else 1

        def make_reader() -> AnswerReader:
            return AnswerReader(make_parser(), max_calls=most)

        return cls(messages, template, sampling, make_reader)


def check_template(tokenizer: object) -> None:
    """Check that there is a template to make a prompt of messages with.

    Raises:
        ApiError: 400, with what to do about it.
    """
    if getattr(tokenizer, "chat_template", "") is None:
        refuse("messages", _NO_TEMPLATE)


class AnswerReader:
    """Takes one answer apart as its tokens come, and counts those of reasoning.

    Attributes:
        num_reasoning: tokens up to the last that reasons, tags among them.
    """

    def __init__(self, parser: OutputParser | None, *, max_calls: int | None = None) -> None:
        """Read with a parser; without one all text is content. Calls beyond `max_calls` go."""
        self.num_reasoning = 0
        self._parser, self._max_calls = parser, max_calls
        self._may_reason = parser is not None  # nothing but reasoning came so far
        self._num_tokens = 0  # while that is so

    def read(self, items: Sequence[Token]) -> Sequence[Piece]:
        """Return the pieces that some tokens complete."""
        pieces: list[Piece] = []
        while self._may_reason and items:  # one by one: readers of any speed count alike
            found = self._parse(items[:1])
            items, self._num_tokens = items[1:], self._num_tokens + 1
            if any(type(one) is Reasoning for one in found):
                self.num_reasoning = self._num_tokens
            self._may_reason = all(type(one) is Reasoning for one in found)
            pieces += found
        if not items:
            return _joined(pieces)
        return [*_joined(pieces), *self._parse(items)] if pieces else self._parse(items)

    def _parse(self, items: Sequence[Token]) -> Sequence[Piece]:
        text, is_end = "".join([item.text for item in items]), items[-1].finish_reason is not None
        if self._parser is None:
            return (Content(text),) if text else ()
        pieces = self._parser.feed(text) if text else []
        if is_end:
            pieces += self._parser.close()
        if (most := self._max_calls) is None:
            return pieces
        return [one for one in pieces if isinstance(one, Content | Reasoning) or one.index < most]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Return pieces in which neighbours of reasoning are one."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + piece.text)
        else:
            joined.append(piece)
    return joined
