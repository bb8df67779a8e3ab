"""The answer to a Responses request: its items, its usage, and what it was asked with.

Types whose JSON is what the `openai` client reads, whole or in events. Pure.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from aneuron.server.wire.common import Body
from aneuron.server.wire.logprobs import TokenLogprob  # noqa: TC001 (msgspec reads it)

__all__ = [
    "IncompleteDetails",
    "OutputCall",
    "OutputItem",
    "OutputMessage",
    "OutputReasoning",
    "OutputText",
    "ReasoningText",
    "Response",
    "ResponseFault",
    "ResponsesUsage",
]

_Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Body, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """A text of a message."""

    text: str
    annotations: list[None] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)


class OutputMessage(Body, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """What the model said."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: _Status
    content: list[OutputText]


class OutputCall(Body, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A function that the model called; its arguments are meant to be JSON."""

    id: str
    status: _Status
    call_id: str
    name: str
    arguments: str


class ReasoningText(Body, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Reasoning."""

    text: str


class OutputReasoning(Body, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought; nobody summarises it."""

    id: str
    status: _Status
    summary: list[None] = msgspec.field(default_factory=list)
    content: list[ReasoningText]


OutputItem = OutputMessage | OutputCall | OutputReasoning


class InputTokensDetails(Body, frozen=True, kw_only=True):
    """Of the input's tokens, those found in the prefix cache, and those put there."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Body, frozen=True, kw_only=True):
    """Of the new tokens, those of reasoning."""

    reasoning_tokens: int


class ResponsesUsage(Body, frozen=True, kw_only=True):
    """Token counts of a request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, prompt: int, new: int, *, cached: int, reasoning: int) -> ResponsesUsage:
        """Return what was counted."""
        return cls(
            input_tokens=prompt, input_tokens_details=InputTokensDetails(cached_tokens=cached),
            output_tokens=new, total_tokens=prompt + new,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning),
        )  # fmt: skip


class ResponseFault(Body, frozen=True, kw_only=True):
    """Why a response failed amid its stream; OpenAI has a list of codes, `type` is ours."""

    code: Literal["server_error"] = "server_error"
    message: str
    type: str | None


class IncompleteDetails(Body, frozen=True, kw_only=True):
    """Why an answer is not whole."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Response(Body, frozen=True, kw_only=True):
    """The answer, and what it was asked with."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponsesUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, str | None]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    store: Literal[False] = False
    service_tier: Literal["default"] = "default"
    safety_identifier: None = None
    prompt_cache_key: None = None
