"""The small endpoints: models, tokenize, detokenize, version, and the body of errors.

Pure data, but for the check of what is to be tokenised.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from aneuron.server.wire.chat import TemplateKwargs, Tools, plain_tools
from aneuron.server.wire.common import Body, ModelName, TokenId
from aneuron.server.wire.decoding import Limits, Request, refuse
from aneuron.server.wire.fields import DETOKENIZE, TOKENIZE, Fields
from aneuron.server.wire.messages import MOST_IN_MESSAGES, Messages, explain_part

__all__ = [
    "MAX_TIMELINE_STEPS",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "ErrorBody",
    "ErrorDetail",
    "ModelCard",
    "ModelList",
    "Probe",
    "TimelineBreak",
    "TimelineNumbers",
    "TokenizeRequest",
    "TokenizeResponse",
    "Version",
]


MAX_TIMELINE_STEPS = 64  # of one picture: some 7 ms of work


class ModelCard(Body, frozen=True, kw_only=True):
    """A model that is served; `max_model_len` counts prompt and answer together, in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "aneuron"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(Body, frozen=True, kw_only=True):
    """All names of the model."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Probe(Body, frozen=True, kw_only=True):
    """What a probe is told."""

    status: Literal["ok", "unavailable"]
    reason: str


class Version(Body, frozen=True, kw_only=True):
    """The version of aneuron."""

    version: str


class TimelineBreak(Body, frozen=True, kw_only=True):
    """How often the flow broke for one reason, and the seconds it took."""

    count: int
    seconds: float


class TimelineNumbers(Body, frozen=True, kw_only=True):
    """What an engine does now; `window_` is over the last steps that are kept, asked by `steps`.

    The share of decode steps that were fed with the device's own tokens is null where there
    were none, or the carry tells no difference. Steps, tokens and `breaks`, by reason, are since
    the engine opened.
    """

    object: Literal["timeline"] = "timeline"
    kept_steps: int
    window_steps: int
    window_idle_share: float
    window_decode_async_share: float | None
    running: int
    waiting: int
    in_flight_steps: int
    num_blocks: int
    used_blocks: int
    steps: int
    prompt_tokens: int
    generation_tokens: int
    breaks: dict[str, TimelineBreak]


class ErrorDetail(Body, frozen=True, kw_only=True):
    """What went wrong; `param` is the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Body, frozen=True, kw_only=True):
    """The envelope of all errors."""

    error: ErrorDetail


class TokenizeRequest(Request, frozen=True, kw_only=True):
    """A text, or messages, to be made into ids."""

    fields: ClassVar[Fields] = TOKENIZE
    free_form: ClassVar[tuple[str, ...]] = ("tools", "chat_template_kwargs")
    long: ClassVar[tuple[str, ...]] = ("prompt", "messages")
    most_values: ClassVar[Limits] = {"messages": MOST_IN_MESSAGES}
    explain = staticmethod(explain_part)

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Check that there is one thing to tokenise, and only what belongs to it."""
        if self.prompt is not None and self.messages is not None:
            refuse("messages", "and prompt do not go together: give one")
        if self.prompt is None and self.messages is None:
            refuse("prompt", "is required, or messages")
        if self.add_generation_prompt and self.continue_final_message:
            refuse("continue_final_message", "and add_generation_prompt do not go together")
        for name in ("tools", "chat_template_kwargs", "continue_final_message"):
            if self.prompt is not None and getattr(self, name):
                refuse(name, "is only allowed with messages")

    @property
    def begins_turn(self) -> bool:
        """Whether the prompt ends with the beginning of the assistant's turn."""
        given = self.add_generation_prompt
        return not self.continue_final_message if given is None else given

    @property
    def plain_tools(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return plain_tools(self.tools)


class TokenizeResponse(Body, frozen=True, kw_only=True):
    """The ids, and the tokens' texts where they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Request, frozen=True, kw_only=True):
    """Ids to be made into text."""

    fields: ClassVar[Fields] = DETOKENIZE
    long: ClassVar[tuple[str, ...]] = ("tokens",)
    most_values: ClassVar[Limits] = {"tokens": 2**17}

    model: ModelName | None = None
    tokens: list[TokenId]


class DetokenizeResponse(Body, frozen=True, kw_only=True):
    """The text."""

    prompt: str
