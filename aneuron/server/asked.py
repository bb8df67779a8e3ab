"""A conversation of either wire format → what it asks of the engine, and of its answer's parser.

Comes in: a chat request; those of Responses are made into one. Goes out: the arguments of
`engine.chat`, and a parser of answers. Runs in the endpoint's task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aneuron.params.messages import Conversation
from aneuron.server import tools as calling
from aneuron.server.tools import Content
from aneuron.server.tools.templates import template_name
from aneuron.server.wire.common import refuse
from aneuron.server.wire.messages import plain_messages
from aneuron.server.wire.sampling import sampling_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aneuron.server.app import ServerState
    from aneuron.server.tools import OutputParser, Piece
    from aneuron.server.wire.chat import ChatRequest

__all__ = ["Asked", "check_template", "pieces_of"]

_NO_TEMPLATE = (
    "make no prompt: this model has no chat template; put its chat_template.jinja beside its "
    "tokenizer.json, or use /v1/completions"
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks of the engine, and of the parser of its answer.

    Attributes:
        messages, template, sampling: arguments of `engine.chat`; those by name are in two parts.
        make_parser: gives a parser for each choice, or None where all text is content.
    """

    messages: list[dict[str, Any]]
    template: dict[str, Any]
    sampling: dict[str, Any]
    make_parser: Callable[[], OutputParser | None]

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
        return cls(messages, template, sampling, make_parser)


def check_template(tokenizer: object) -> None:
    """Check that there is a template to make a prompt of messages with.

    Raises:
        ApiError: 400, with what to do about it.
    """
    if getattr(tokenizer, "chat_template", "") is None:
        refuse("messages", _NO_TEMPLATE)


def pieces_of(parser: OutputParser | None, text: str, *, is_end: bool) -> Sequence[Piece]:
    """Return the pieces that some text completes; the last of it completes all."""
    if parser is None:
        return (Content(text),) if text else ()
    pieces = parser.feed(text) if text else []
    return [*pieces, *parser.close()] if is_end else pieces
