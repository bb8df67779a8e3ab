"""A GGUF file's vocabulary, as the tokenizer files that transformers and we read.

Stage: before the engine opens. Comes in: the metadata of a GGUF file. Goes out: tokenizer.json
and tokenizer_config.json. Run by the worker thread that resolves a model. A GGUF file names its
way of splitting text (`tokenizer.ggml.pre`) and keeps no rule for it; a way that is not in the
table here is refused, because a near miss gives wrong ids and no error.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["end_token_ids", "write_tokenizer"]

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPECIAL_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Control tokens that end a turn or a text, whatever the file's one `eos_token_id` says.
_END_TEXTS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>")

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe", "smaug-bpe", "falcon3", "pixtral", "dbrx")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen", "megrez")
_SPLITS = (
    dict.fromkeys(_LLAMA3_NAMES, _LLAMA3)
    | dict.fromkeys(_QWEN2_NAMES, _QWEN2)
    | {"tekken": _TEKKEN}
)
_GPT2_NAMES = ("gpt-2", "gpt2")
_DIGIT_NAMES = ("smollm", "starcoder", "refact", "codeshell", "command-r")
# llama.cpp begins a text with BOS here where the file does not say (`add_bos_token`).
_BOS_NAMES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")


def write_tokenizer(metadata: dict[str, Any], into: Path) -> int:
    """Write tokenizer.json and tokenizer_config.json; return the number of tokens.

    Raises:
        ConfigError: the vocabulary is damaged or of a kind that is not known.
    """
    vocabulary = _Vocabulary(metadata)
    tokenizer = vocabulary.tokenizer()
    tokenizer.save(str(into / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _context_length(metadata),
        **vocabulary.special_texts(),
    }
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (into / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return len(vocabulary.tokens)


def end_token_ids(metadata: dict[str, Any]) -> list[int]:
    """Return the ids that end a generation, the file's own EOS first."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    ids = [token_id for token_id in named if isinstance(token_id, int)]
    vocabulary = _Vocabulary(metadata)
    # A text that the file uses as BOS or as the unknown token has another job there.
    taken = {metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "unknown")}
    control = [token_id for token_id in vocabulary.ids_of_kind(_CONTROL) if token_id not in taken]
    ids += [token_id for token_id in control if vocabulary.tokens[token_id] in _END_TEXTS]
    return list(dict.fromkeys(ids))


def _context_length(metadata: dict[str, Any]) -> int:
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return length if isinstance(length, int) else 2048


def _refuse(message: str) -> ConfigError:
    return ConfigError(f"cannot build the tokenizer of this GGUF file: {message}", param="model")


class _Vocabulary:
    """The tokenizer part of the metadata."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata
        self.tokens = self._list("tokens", str)
        self.model = str(self._get("model"))
        self.pre = str(self._get("pre", "default"))
        if not self.tokens:
            raise _refuse("it holds no tokenizer.ggml.tokens")
        if len(set(self.tokens)) != len(self.tokens):
            raise _refuse("tokenizer.ggml.tokens has the same token twice")

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _flag(self, key: str, *, default: bool) -> bool:
        return bool(self._get(key, default))

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self._get(key, [])
        if not isinstance(values, list) or not all(isinstance(item, kind) for item in values):
            raise _refuse(f"tokenizer.ggml.{key} is not a list of {kind.__name__}")
        return values

    def tokenizer(self) -> Tokenizer:
        builders = {"gpt2": self._byte_level, "llama": self._sentencepiece}
        if self.model not in builders:
            raise _refuse(
                f"tokenizer.ggml.model is {self.model!r}; known are {', '.join(builders)}"
            )
        tokenizer = builders[self.model]()
        self._add_special(tokenizer)
        self._add_begin_and_end(tokenizer)
        return tokenizer

    def ids_of_kind(self, *kinds: int) -> list[int]:
        pairs = enumerate(self._list("token_type", int)[: len(self.tokens)])
        return [token_id for token_id, kind in pairs if kind in kinds]

    def special_texts(self) -> dict[str, str]:
        texts = {name: self._special_text(key) for name, key in _SPECIAL_NAMES.items()}
        return {name: text for name, text in texts.items() if text is not None}

    def _special_text(self, key: str) -> str | None:
        token_id = self._get(key)
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise _refuse(f"tokenizer.ggml.{key} is {token_id!r}, outside the vocabulary")
        text: str = self.tokens[token_id]
        return text

    def _ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    def _byte_level(self) -> Tokenizer:
        merges = [tuple(merge.split(" ")) for merge in self._list("merges", str)]
        if not all(len(pair) == 2 for pair in merges):
            raise _refuse("tokenizer.ggml.merges has an entry that is not a pair")
        # The tables with a split of their own were made for vocabularies that take a whole
        # word that they know before they look at the merges.
        whole_words = self.pre in _SPLITS and self.pre not in _QWEN2_NAMES
        tokenizer = Tokenizer(self._bpe(merges, ignore_merges=whole_words))
        if self.pre in _QWEN2_NAMES:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(self._splitting())
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _bpe(self, merges: list[Any], **options: Any) -> models.BPE:
        try:
            return models.BPE(vocab=self._ids(), merges=merges, **options)
        except Exception as error:  # tokenizers raises bare Exception
            raise _refuse(str(error)) from error

    def _splitting(self) -> list[Any]:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if self.pre in _GPT2_NAMES:
            return [words]
        if self.pre in _DIGIT_NAMES:
            return [pre_tokenizers.Digits(individual_digits=True), words]
        if self.pre in _SPLITS:
            split = pre_tokenizers.Split(Regex(_SPLITS[self.pre]), behavior="isolated")
            return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        known = ", ".join(sorted([*_GPT2_NAMES, *_DIGIT_NAMES, *_SPLITS]))
        raise _refuse(f"tokenizer.ggml.pre is {self.pre!r}; known are {known}")

    def _sentencepiece(self) -> Tokenizer:
        unknown = self._special_text("unknown_token_id")
        tokenizer = Tokenizer(
            self._bpe(self._scored_merges(), unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        steps: list[Any] = [normalizers.Replace(" ", "▁")]
        undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._flag("add_space_prefix", default=True):
            steps.insert(0, normalizers.Prepend("▁"))
            undo.append(decoders.Strip(" ", 1, 0))
        tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.decoder = decoders.Sequence(undo)
        return tokenizer

    def _scored_merges(self) -> list[tuple[str, str]]:
        # SentencePiece keeps no merges: any two pieces whose join is a piece may merge, and
        # the join with the best score first.
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise _refuse("tokenizer.ggml.scores does not match tokenizer.ggml.tokens")
        ids = self._ids()
        merges: list[tuple[float, int, int, str, str]] = []
        for token, score in zip(self.tokens, scores, strict=True):
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in ids and right in ids:
                    merges.append((-score, ids[left], ids[right], left, right))
        return [(left, right) for *_, left, right in sorted(merges)]

    def _add_special(self, tokenizer: Tokenizer) -> None:
        special = [self.tokens[token_id] for token_id in self.ids_of_kind(_CONTROL, _UNKNOWN)]
        plain = [self.tokens[token_id] for token_id in self.ids_of_kind(_USER_DEFINED)]
        texts = dict.fromkeys([*special, *self.special_texts().values()])
        tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in texts])
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain])

    def _add_begin_and_end(self, tokenizer: Tokenizer) -> None:
        by_default = self.model == "llama" or self.pre in _BOS_NAMES
        wanted = (
            ("bos_token_id", self._flag("add_bos_token", default=by_default), "{0} {1}"),
            ("eos_token_id", self._flag("add_eos_token", default=False), "{1} {0}"),
        )
        template, used = "$A", []
        for key, is_wanted, layout in wanted:
            text = self._special_text(key)
            if is_wanted and text is not None:
                template = layout.format(text, template)
                used.append((text, self._get(key)))
        if used:
            pair = template.replace("$A", "$A $B")
            tokenizer.post_processor = processors.TemplateProcessing(
                single=template, pair=pair, special_tokens=used
            )
