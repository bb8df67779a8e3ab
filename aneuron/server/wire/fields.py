"""Three lists for each endpoint: fields that count, that have no effect, that are refused.

Plain data. A field is in exactly one list; what is in none is refused as unknown. Nothing that
would change the text is ignored. `docs/serving-fields.md` says the same, and a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CHAT", "COMPLETIONS", "DETOKENIZE", "RESPONSES", "TOKENIZE", "Fields", "Refused"]


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is known and refused.

    Attributes:
        why: for the client, and the docs.
        neutral: values that ask for nothing, and are taken; null is one always.
        same_as: a field whose value (1 where it is absent) is neutral as well.
    """

    why: str
    neutral: tuple[Any, ...] = ()
    same_as: str | None = None

    def allows(self, value: Any) -> bool:
        """Return whether a value asks for nothing."""
        return any(
            value == one and isinstance(value, bool) == isinstance(one, bool)
            for one in (None, *self.neutral)
        )


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a request body, by name: what they do, or why they do nothing here."""

    honoured: Mapping[str, str]
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, Refused] = field(default_factory=dict)


_SAMPLING = {
    "temperature": "0 is greedy",
    "top_p": "nucleus sampling",
    "top_k": "0 or -1 keeps all",
    "min_p": "share of the likeliest token's probability",
    "n": "answers to one prompt",
    "seed": "the same seed gives the same answer; choice i has seed + i",
    "stop": "a string, or up to 16",
    "stop_token_ids": "ids that end the answer",
    "include_stop_str_in_output": "keep the matched stop string",
    "ignore_eos": "do not end at the model's end ids",
    "min_tokens": "no stop before so many new tokens",
    "presence_penalty": "on tokens in the answer so far",
    "frequency_penalty": "likewise, for each occurrence",
    "repetition_penalty": "on tokens in the prompt or the answer",
    "logit_bias": "token ids, as strings, to -100..100",
    "allowed_token_ids": "only these ids may be drawn",
    "bad_words": "texts that never appear",
    "skip_special_tokens": "leave special tokens out of the text",
    "response_format": "text, json_object or json_schema",
    "structured_outputs": "one of json, regex, choice, grammar (Lark), json_object",
    "stream": "server-sent events",
    "stream_options": "include_usage, continuous_usage_stats; include_obfuscation has no effect",
    "priority": "less is sooner, where the engine schedules by priority",
}

_IGNORED = {
    "user": "nothing is counted by user",
    "request_id": "answers have ids of their own; the header x-request-id names a request",
    "session_id": "requests are placed one by one",
    "stream_interval": "unread deltas merge by themselves",
    "truncation_side": "no effect without truncate_prompt_tokens, which is refused",
    "return_token_offsets": "asks the endpoints that render, which are not here",
    "return_mm_kwargs": "likewise",
    "mm_processor_kwargs": "there is no image or sound to process",
    "media_io_kwargs": "likewise",
}

_STRUCTURED = "give it in structured_outputs"
_VLLM_REFUSED = {
    "use_beam_search": Refused("there is no beam search", (False,)),
    "best_of": Refused("all n answers are given", (), "n"),
    "length_penalty": Refused("it belongs to beam search", (1.0,)),
    "watermarking": Refused("there is no watermark", (False,)),
    "spaces_between_special_tokens": Refused("tokens are joined as they are", (True,)),
    "truncate_prompt_tokens": Refused("a prompt is never shortened", (-1,)),
    "logprob_token_ids": Refused("log probabilities are those of the likeliest tokens"),
    "return_tokens_as_token_ids": Refused("tokens are told as text", (False,)),
    "return_token_ids": Refused("answers carry text, no ids", (False,)),
    "routed_experts_prompt_start": Refused("expert routing is not told", (0,)),
    "cache_salt": Refused("all requests share one prefix cache; run a server for each tenant"),
    "kv_transfer_params": Refused("prefill and decode run in one engine"),
    "ec_transfer_params": Refused("prefill and decode run in one engine"),
    "vllm_xargs": Refused("there are no extensions to take them", ({},)),
    "repetition_detection": Refused("answers are not watched for repetition"),
    "thinking_token_budget": Refused("reasoning has no limit of its own", (-1,)),
    "guided_json": Refused(_STRUCTURED),
    "guided_regex": Refused(_STRUCTURED),
    "guided_choice": Refused(_STRUCTURED),
    "guided_grammar": Refused(_STRUCTURED),
    "guided_whitespace_pattern": Refused("whitespace in JSON is fixed"),
    "guided_decoding_backend": Refused("there is one backend"),
    "structural_tag": Refused("use tools, or structured_outputs"),
}

CHAT = Fields(
    honoured={
        "model": "a name of /v1/models",
        "messages": "roles system, developer, user, assistant, tool; text alone",
        "max_completion_tokens": "most new tokens; null is up to the room left",
        "max_tokens": "the same under its old name; max_completion_tokens wins",
        **_SAMPLING,
        "logprobs": "give log probabilities",
        "top_logprobs": "of so many likeliest tokens at each, with logprobs",
        "tools": "functions that the model may call; strict has no effect",
        "tool_choice": "none, auto, required, a function, or allowed_tools",
        "parallel_tool_calls": "false: one call at most, others are left out",
        "reasoning_effort": "for the chat template; none also sets enable_thinking to false",
        "chat_template_kwargs": "more variables for the chat template",
        "add_generation_prompt": "begin the assistant's turn",
        "continue_final_message": "go on with the last message",
    },
    ignored={
        **_IGNORED,
        "safety_identifier": "nothing is counted by user",
        "metadata": "nothing is stored",
        "store": "nothing is stored",
        "service_tier": "there is one tier",
        "prompt_cache_key": "prompts are found in the prefix cache by their tokens",
        "prompt_cache_options": "likewise",
        "prompt_cache_retention": "likewise",
        "prediction": "it could make an answer sooner, never another one",
        "moderation": "nothing is moderated",
    },
    refused={
        **_VLLM_REFUSED,
        "verbosity": Refused("models here know no verbosity; say it in a message", ("medium",)),
        "modalities": Refused("answers are text", (["text"],)),
        "audio": Refused("answers are text"),
        "web_search_options": Refused("the server reads nothing from elsewhere"),
        "functions": Refused("use tools"),
        "function_call": Refused("use tool_choice"),
        "chat_template": Refused("templates are programs; only the operator may give one"),
        "documents": Refused("put them into a message", ([],)),
        "add_special_tokens": Refused("the chat template writes them", (False,)),
        "echo": Refused("use continue_final_message, or completions", (False,)),
        "prompt_logprobs": Refused("use completions"),
        "include_reasoning": Refused("reasoning is always told", (True,)),
        "return_prompt_text": Refused("the rendered prompt is not told", (False,)),
    },
)

_NOT_OF_RESPONSES = ("n", "response_format", "stream_options")
_NO_HISTORY = Refused("nothing is stored: send the whole conversation as input")

RESPONSES = Fields(
    honoured={
        "model": "a name of /v1/models",
        "input": "a text, or items: message, function_call, function_call_output, reasoning",
        "instructions": "a system message in front of the input",
        "max_output_tokens": "most new tokens; null is up to the room left",
        **{name: text for name, text in _SAMPLING.items() if name not in _NOT_OF_RESPONSES},
        "include": "message.output_text.logprobs gives log probabilities; others have no effect",
        "top_logprobs": "of so many likeliest tokens at each, with that include",
        "text": "format: text, json_object or json_schema",
        "tools": "functions that the model may call; strict has no effect",
        "tool_choice": "none, auto, required, a function, or allowed_tools",
        "parallel_tool_calls": "false: one call at most, others are left out",
        "reasoning": "effort, for the chat template; none also sets enable_thinking to false",
        "chat_template_kwargs": "more variables for the chat template",
        "metadata": "comes back with the answer",
    },
    ignored={
        **_IGNORED,
        "safety_identifier": "nothing is counted by user",
        "service_tier": "there is one tier",
        "prompt_cache_key": "prompts are found in the prefix cache by their tokens",
        "prompt_cache_options": "likewise",
        "prompt_cache_retention": "likewise",
        "moderation": "nothing is moderated",
        "access_programs": "nothing is moderated",
        "max_tool_calls": "it counts built-in tools, and there are none",
        "image": "there are no images",
        "stream_options": "nothing is padded, and the last event always has the usage",
        "truncation": "a conversation that is too long is refused, never shortened",
    },
    refused={
        **_VLLM_REFUSED,
        "store": Refused("nothing is stored; leave it out, or send false", (False,)),
        "previous_response_id": _NO_HISTORY,
        "conversation": _NO_HISTORY,
        "prompt": Refused("no prompts are stored: send input and instructions"),
        "background": Refused("an answer lives as long as its request", (False,)),
        "background_options": Refused("an answer lives as long as its request"),
        "context_management": Refused("a conversation is never shortened", ([],)),
        "messages": Refused("it is named input here"),
        "max_tokens": Refused("it is named max_output_tokens here"),
        "max_completion_tokens": Refused("it is named max_output_tokens here"),
        "response_format": Refused("it is named text.format here"),
        "n": Refused("there is one answer; chat completions give more", (1,)),
        "chat_template": CHAT.refused["chat_template"],
    },
)

COMPLETIONS = Fields(
    honoured={
        "model": "a name of /v1/models",
        "prompt": "a text, texts, token ids, or lists of them; at most 1024 prompts",
        "max_tokens": "most new tokens; null is up to the room left",
        **_SAMPLING,
        "logprobs": "of so many likeliest tokens at each, 0..20",
        "prompt_logprobs": "likewise, of the prompt's tokens",
        "echo": "begin the answer with the prompt",
    },
    ignored=_IGNORED,
    refused={
        **_VLLM_REFUSED,
        "suffix": Refused("there is no infilling", ("",)),
        "add_special_tokens": Refused("give token ids for a prompt without them", (True,)),
        "prompt_embeds": Refused("prompts are text or ids"),
    },
)

TOKENIZE = Fields(
    honoured={
        "model": "a name of /v1/models",
        "prompt": "a text; or give messages",
        "messages": "as in chat completions",
        "tools": "as in chat completions",
        "add_special_tokens": "true for a prompt, false for messages, unless given",
        "add_generation_prompt": "as in chat completions",
        "continue_final_message": "as in chat completions",
        "chat_template_kwargs": "as in chat completions",
        "return_token_strs": "give the tokens' texts as well",
    },
    refused={
        "chat_template": CHAT.refused["chat_template"],
        "mm_processor_kwargs": Refused("prompts are text"),
    },
)

DETOKENIZE = Fields(honoured={"model": "a name of /v1/models", "tokens": "token ids"})
