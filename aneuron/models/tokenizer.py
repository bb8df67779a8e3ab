"""Text ↔ ids: the two tokenizers that ship.

Comes in: a prompt's text or messages, later one token id at a time. Goes out: int32 ids,
later the text that each id completes. `encode` is awaited by the task that admits a
request and lets go of the GIL while Rust works; `StreamDecoder.step` runs in the task
that publishes tokens, once per token, and never waits.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from aneuron.detokenize import ByteStream, HFStream
from aneuron.errors import ConfigError, InvalidRequest, RequestError
from aneuron.models.files.bars import load_bars
from aneuron.models.spelling import ByteLevelPieces, BytePieces, spell_byte, speller
from aneuron.params.messages import Messages, validate_messages
from aneuron.prompt import Turns

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import tokenizers

    from aneuron.prompt import Check, Ids, StreamDecoder

__all__ = ["ByteTokenizer", "HFTokenizer"]

_MAX_RENDERED_CHARS = 2**21
# Rust keeps some 120 bytes for each token until it is done with a text: 0.8 GB for 7 MB of "a".
_ENCODES_AT_ONCE = 4
_PIECE = 2**16  # characters of a text that is probably too long, which are counted at a time
_CHARS_PER_TOKEN = 8  # more than texts have on average
_RENDERER = "transformers.utils.chat_template_utils"

# What untrusted template code may raise in the sandbox, beside jinja2's own errors.
_TEMPLATE_FAULTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class HFTokenizer:
    """A `tokenizers.Tokenizer` with the model's chat template.

    Args:
        tokenizer: it is changed in that truncation and padding are switched off.
        special_tokens: by name, such as `{"eos_token": "</s>"}`; a template sees them.
        chat_template: jinja2 source; it is rendered in transformers' sandbox.
        response_template: the checkpoint's own declaration of how answers are written.
        eos_token_ids: the ids that end an answer; by default that of `eos_token`.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        response_template: Mapping[str, Any] | None = None,
        eos_token_ids: tuple[int, ...] | None = None,
    ) -> None:
        from tokenizers import decoders

        # Both are often left over from training and would cut or pad prompts silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.response_template = response_template
        self.special_tokens = dict(special_tokens or {})
        self.vocab_size: int = tokenizer.get_vocab_size()
        if eos_token_ids is None:
            eos = tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))
            eos_token_ids = () if eos is None else (eos,)
        self.eos_token_ids = eos_token_ids
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._encodes = Turns(_ENCODES_AT_ONCE)
        self._pieces: dict[bool, ByteLevelPieces] = {}  # by skip_special_tokens
        if isinstance(tokenizer.decoder, decoders.ByteLevel):
            self._pieces[True] = ByteLevelPieces(tokenizer, self._special_ids)
            self._pieces[False] = ByteLevelPieces(tokenizer, frozenset())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the tokenizer of a model directory. Blocks: call it in a thread.

        Raises:
            ConfigError: `tokenizer.json` is missing, or a file cannot be read.
        """
        tokenizer = _read_tokenizer(path / "tokenizer.json")
        config = _read_json(path / "special_tokens_map.json")
        config |= _read_json(path / "tokenizer_config.json")
        template = _read_template(path, config)
        answers = config.get("response_template")
        return cls(
            tokenizer, special_tokens=_named_tokens(config), chat_template=template,
            response_template=answers if isinstance(answers, dict) else None,
        )  # fmt: skip

    async def encode(self, text: str, *, check: Check | None = None) -> npt.NDArray[np.int32]:
        """Return the ids of a plain prompt; the post-processor's special tokens are added."""
        return await self._encode(text, check, add_special_tokens=True)

    async def encode_rendered(
        self, text: str, *, check: Check | None = None
    ) -> npt.NDArray[np.int32]:
        """Return the ids of a rendered chat; nothing is added."""
        return await self._encode(text, check, add_special_tokens=False)

    async def _encode(
        self, text: str, check: Check | None, *, add_special_tokens: bool
    ) -> npt.NDArray[np.int32]:
        async with self._encodes.here():
            if check is not None and len(text) > _PIECE:
                await self._check_roughly(text, check)
            encoding = await self._encoded(text, add_special_tokens=add_special_tokens)
            try:
                if check is not None:
                    check(len(encoding))
            except BaseException:
                del encoding  # which the error's traceback would keep
                raise
            # A list of Python integers holds the loop 0.1 s per million; the only way out.
            return np.array(encoding.ids, dtype=np.int32)

    async def _encoded(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        # Plain encode() keeps the GIL: it froze the loop 1.4 s even from a thread. If this
        # await is cancelled, Rust works on to its end and the result is dropped.
        encoding: tokenizers.Encoding
        [encoding] = await self.tokenizer.async_encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return encoding

    async def _check_roughly(self, text: str, check: Check) -> None:
        """Refuse a text that is far too long before all of it is encoded.

        Where it is cut, pieces of it may have some tokens that the whole has not, so that half
        of what was counted is there for certain.
        """
        try:
            check(len(text) // _CHARS_PER_TOKEN, at_least=True)
        except RequestError:  # it fits only if its tokens are long ones
            num_tokens = 0
            for start in range(0, len(text), _PIECE):
                piece = text[start : start + _PIECE]
                num_tokens += len(await self._encoded(piece, add_special_tokens=False))
                check(max(1, num_tokens // 2), at_least=True)

    async def load_renderer(self) -> None:
        """Import what renders templates, off the loop: a second, at a process's first chat."""
        if self.chat_template is not None and _RENDERER not in sys.modules:
            await asyncio.to_thread(_import_renderer)

    def render_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str:
        """Return the prompt text that the model's template makes of a conversation.

        Raises:
            InvalidRequest: malformed messages, no template, or the template refuses them.
        """
        validate_messages(messages)
        if self.chat_template is None:
            raise InvalidRequest(
                "this model has no chat template: write the prompt yourself and use "
                "generate(), or take an instruct model",
                param="messages",
            )
        variables: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        variables |= self.special_tokens | template_kwargs
        text = _render(self.chat_template, messages, variables)
        if len(text) > _MAX_RENDERED_CHARS:
            raise InvalidRequest(
                f"the rendered chat has {len(text)} characters; "
                f"at most {_MAX_RENDERED_CHARS} are allowed",
                param="messages",
            )
        return text

    def encode_word(self, text: str) -> list[int]:
        """Return the ids of a short text, without special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def spell_vocabulary(self) -> tuple[list[bytes], frozenset[int]] | None:
        """Return what each id spells, and the special ids; 0.1 s for 50,000: in a thread."""
        spell = speller(self.tokenizer)
        if spell is None:
            return None
        tokens = map(self.tokenizer.id_to_token, range(self.vocab_size))
        return [spell(token) if token else b"" for token in tokens], self._special_ids

    def decode(self, ids: Ids, *, skip_special_tokens: bool = True) -> str:
        """Return the text of whole ids."""
        items = ids.tolist() if isinstance(ids, np.ndarray) else ids
        return self.tokenizer.decode(items, skip_special_tokens=skip_special_tokens)

    def decode_stream(self, prompt_ids: Ids, *, skip_special_tokens: bool = True) -> StreamDecoder:
        """Return a decoder of the ids that follow the prompt."""
        if self._pieces:
            return ByteStream(prompt_ids, self._pieces[skip_special_tokens])
        skipped = self._special_ids if skip_special_tokens else frozenset()
        return HFStream(self.tokenizer, prompt_ids, skipped)


def _import_renderer() -> None:
    load_bars()
    import_module(_RENDERER)


def _render(template: str, messages: Messages, variables: dict[str, Any]) -> str:
    import jinja2

    load_bars()
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template([list(messages)], chat_template=template, **variables)
    except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
        raise InvalidRequest(
            f"the chat template refused the messages: {error}", param="messages"
        ) from error
    return str(texts[0])


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    if not path.is_file():
        raise ConfigError(
            f"{path} is missing; a model without it needs to be saved again with "
            "transformers' AutoTokenizer",
            param="model",
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(f"{path} is not a tokenizer: {error}", param="model") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the file's object; nothing where there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="model") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object", param="model")
    return content


def _read_template(path: Path, config: dict[str, Any]) -> str | None:
    """Return the chat template; a file of its own goes before the configuration."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}", param="model") from error
    file = path / "chat_template.json"
    own = _read_json(file)
    if not own:
        file, own = path / "tokenizer_config.json", config
    template = own.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        template = _default_template(template)
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{file} holds a chat_template that is no string", param="model")
    return template


def _default_template(entries: list[Any]) -> Any:
    for entry in entries:
        if not isinstance(entry, dict):
            return entry  # which the caller refuses
        if entry.get("name") == "default":
            return entry.get("template")
    return None


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token` and so on; each is a string or a dict of one."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


class ByteTokenizer:
    """A tokenizer without a vocabulary: ids 0 to 255 are bytes, 256 starts, 257 ends.

    Args:
        add_bos: let plain prompts start with id 256.
        vocab_size: of the model; ids from 258 on have texts such as `<258>`.
    """

    BOS = 256
    EOS = 257
    _SPECIAL = frozenset((BOS, EOS))
    _PIECES = (BytePieces(frozenset()), BytePieces(_SPECIAL))  # by skip_special_tokens

    def __init__(self, *, add_bos: bool = False, vocab_size: int = 258) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids: tuple[int, ...] = (self.EOS,)
        self._start = (self.BOS,) if add_bos else ()

    async def encode(self, text: str, *, check: Check | None = None) -> npt.NDArray[np.int32]:
        """Return the bytes of the text."""
        return self._encode(text, check, self._start)

    async def encode_rendered(
        self, text: str, *, check: Check | None = None
    ) -> npt.NDArray[np.int32]:
        """Return the bytes of the text, without a start token."""
        return self._encode(text, check, ())

    def _encode(
        self, text: str, check: Check | None, start: tuple[int, ...]
    ) -> npt.NDArray[np.int32]:
        spelled = np.frombuffer(text.encode(), dtype=np.uint8)
        if check is not None:
            check(len(start) + len(spelled))
        return np.concatenate([np.array(start, dtype=np.int32), spelled], dtype=np.int32)

    def encode_word(self, text: str) -> list[int]:
        """Return the bytes of the text."""
        return list(text.encode())

    def spell_vocabulary(self) -> tuple[list[bytes], frozenset[int]]:
        """Return what each id spells, nothing from 258 on, and the special ids."""
        return [spell_byte(token_id) for token_id in range(258)], self._SPECIAL

    def render_chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,  # the protocol's; this template takes none
    ) -> str:
        """Return a line `role: content` for each message, and where an answer begins.

        With `add_generation_prompt` the last line is `assistant:` and a space, without an end.

        Raises:
            InvalidRequest: malformed messages.
        """
        validate_messages(messages)
        lines = [f"{message['role']}: {_plain(message.get('content'))}\n" for message in messages]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")

    def decode(self, ids: Ids, *, skip_special_tokens: bool = True) -> str:
        """Return the text of the bytes; broken characters become U+FFFD."""
        skipped = self._SPECIAL if skip_special_tokens else frozenset[int]()
        spelled = (spell_byte(int(token_id)) for token_id in ids if token_id not in skipped)
        return b"".join(spelled).decode("utf-8", "replace")

    def decode_stream(self, prompt_ids: Ids, *, skip_special_tokens: bool = True) -> StreamDecoder:
        """Return a decoder of the ids that follow the prompt."""
        return ByteStream(prompt_ids, self._PIECES[skip_special_tokens])


def _plain(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""
