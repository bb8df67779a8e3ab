"""Models that say what a test of the server wants, and readers of what came over the wire."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from aneuron.models.simulated import LogitsModel
from aneuron.models.tokenizer import HFTokenizer
from aneuron.server import ServerConfig
from aneuron.testing import Count

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager

    from openai.types.chat import ChatCompletionChunk

    from aneuron.plans import ModelInput
    from tests.server.conftest import Served

    Serve = Callable[..., AbstractAsyncContextManager[Served]]

__all__ = [
    "CALLS", "FORMATS", "HERMES", "PLAIN", "TOOLS", "Heard", "Noise", "Noted", "Spoken", "Told",
    "both_ways", "byte_level", "chat", "events", "parsed", "tool", "user",
]  # fmt: skip

VOCAB, END = 258, 257
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
HERMES = ServerConfig(tool_parser="hermes")


class Noise(LogitsModel):
    """Logits that look random, and are a function of the context read through the cache."""

    name = "noise"

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"vocab_size": VOCAB, "eos_token_ids": (END,), **options})

    def logits(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        context, counts = self._context(inputs)
        weights = np.where(counts, np.arange(1, context.shape[1] + 1), 0)
        sums = (context.astype(np.int64) * weights).sum(axis=1) & 0xFFFF
        mixed = (sums[:, None] * 40503 + np.arange(self.spec.vocab_size) * 30011) % 65521
        rows: np.ndarray = (mixed / 65521.0).astype(np.float32) * 6
        return rows


class Spoken(LogitsModel):
    """A script, as SCRIPT has it, whose ids are the likeliest of logits."""

    name = "spoken"

    def __init__(self, script: Sequence[int] | bytes, **options: Any) -> None:
        super().__init__(**{"vocab_size": VOCAB, "eos_token_ids": (END,), **options})
        self._script = np.array([*script, END])

    def logits(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        at = inputs.positions[inputs.logits_indices]
        told = np.clip(at + 1 - inputs.prompt_lens, 0, len(self._script) - 1)
        noise = (at[:, None] * 31 + np.arange(self.spec.vocab_size) * 17) % 101 / 50.0
        rows: np.ndarray = noise.astype(np.float32)
        rows[np.arange(len(at)), self._script[told]] = 9.0
        return rows


class Noted(Count):
    """COUNT, which notes each context that it samples from."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.contexts: list[list[int]] = []  # shared by its copies

    def next_ids(self, ids: np.ndarray, inputs: ModelInput) -> np.ndarray:
        context, counts = self._context(inputs)
        self.contexts += [row[own].tolist() for row, own in zip(context, counts, strict=True)]
        return super().next_ids(ids, inputs)


def byte_level(chat_template: str | None = None) -> HFTokenizer:
    """256 bytes, `<s>` (256, put before plain prompts) and `</s>` (257, the end)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(pieces)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 256)])
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return HFTokenizer(inner, special_tokens=names, chat_template=chat_template)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def events(server: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream; each is one line of JSON, and the last event is `[DONE]`."""
    asked = {"model": server.model, "stream": True, **body}
    async with server.http.stream("POST", path, json=asked) as response:
        whole = (await response.aread()).decode()
        assert response.status_code == 200, whole
        assert response.headers["content-type"].startswith("text/event-stream")
    *told, done, rest = whole.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    lines = [one.removeprefix("data: ") for one in told if not one.startswith(":")]
    assert not [one for one in lines if "\n" in one or "\r" in one]
    return [json.loads(one) for one in lines]


@dataclass
class Told:
    """One answer of a chat, whole, or put together from its chunks.

    Attributes:
        calls: name and arguments of each, in order.
        tokens: of the log probabilities.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    tokens: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, choice: Any) -> Told:
        """The same of a choice that was not streamed."""
        message = choice.message
        calls = [[one.function.name, one.function.arguments] for one in message.tool_calls or ()]
        assert all(one.type == "function" for one in message.tool_calls or ())
        reasoning = getattr(message, "reasoning", None) or ""
        tokens = [] if choice.logprobs is None else choice.logprobs.content
        return cls(
            message.content or "", reasoning, calls, choice.finish_reason, choice.stop_reason,
            list(tokens),
        )  # fmt: skip

    def add(self, choice: Any) -> None:
        """Take in what a chunk says."""
        assert self.finish_reason is None, "nothing comes after the finish"
        delta = choice.delta
        self.content += delta.content or ""
        self.reasoning += getattr(delta, "reasoning", None) or ""
        for one in delta.tool_calls or ():
            if one.id is not None:  # the first of this call
                assert (one.index, one.type) == (len(self.calls), "function")
                self.calls.append([one.function.name, ""])
            assert one.index == len(self.calls) - 1
            self.calls[-1][1] += one.function.arguments or ""
        if choice.logprobs is not None:
            self.tokens += choice.logprobs.content
        if choice.finish_reason is not None:
            self.finish_reason, self.stop_reason = choice.finish_reason, choice.stop_reason


class Heard:
    """A stream of chat chunks, read by the `openai` client."""

    def __init__(self, chunks: Iterable[ChatCompletionChunk]) -> None:
        self.chunks = list(chunks)
        self.choices: dict[int, Told] = {}
        self.call_ids: list[str] = []
        for choice in (choice for chunk in self.chunks for choice in chunk.choices):
            if choice.index not in self.choices:
                assert choice.delta.role == "assistant"
                self.choices[choice.index] = Told()
            else:
                assert choice.delta.role is None
            self.choices[choice.index].add(choice)
            self.call_ids += [one.id for one in choice.delta.tool_calls or () if one.id]
        assert len(set(self.call_ids)) == len(self.call_ids)

    @classmethod
    async def of(cls, stream: AsyncIterator[ChatCompletionChunk]) -> Heard:
        """Read it to its end."""
        return cls([chunk async for chunk in stream])


async def chat(server: Served, **body: Any) -> Any:
    create: Any = server.openai.chat.completions.create
    return await create(**{"model": server.model, "messages": [user("hi")], **body})


async def both_ways(server: Served, **body: Any) -> Told:
    """Ask for the whole and for a stream; both must say the same, in each choice."""
    whole = await chat(server, **body)
    heard = await Heard.of(await chat(server, **body, stream=True))
    told = [Told.of(choice) for choice in whole.choices]
    assert [one.index for one in whole.choices] == list(range(len(told)))
    assert [heard.choices[at] for at in sorted(heard.choices)] == told
    return told[0]


def parsed(calls: list[list[str]]) -> list[Any]:
    return [[name, json.loads(arguments)] for name, arguments in calls]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("f", x={"type": "integer"}), tool("g", day={"enum": ["today", "never"]})]
ONE = '{"name": "f", "arguments": {"x": 1}}'
TWO = '{"name": "g", "arguments": {"day": "never"}}'
CALLS = [["f", {"x": 1}], ["g", {"day": "never"}]]
# Format → what the model says with one call, and with two.
FORMATS = {
    "hermes": (
        f"<tool_call>\n{ONE}\n</tool_call>",
        f"Let me see.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>",
    ),
    "llama3_json": (
        ONE.replace("arguments", "parameters"),
        f"{ONE}; {TWO}".replace("arguments", "parameters"),
    ),
    "mistral": (f"[TOOL_CALLS][{ONE}]", f"[TOOL_CALLS] [{ONE}, {TWO}]"),
}
