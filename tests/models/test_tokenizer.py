"""Text → ids: loading, chat templates, and that the loop stays free (case 26 has the rest)."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from aneuron.cli.bench.rig.words import word_tokenizer
from aneuron.errors import ConfigError, InvalidRequest
from aneuron.models.tokenizer import ByteTokenizer, HFTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from aneuron.prompt import Tokenizer as AnyTokenizer

CHAT = [{"role": "user", "content": "the cat"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "special": True},
    "chat_template": TEMPLATE,
    "add_bos_token": True,
    "model_max_length": 2048,
}


@lru_cache
def trained() -> str:
    """Return a small byte-level BPE, as JSON, that puts <s> before a plain prompt."""
    return train(["the cat sat on the mat, then the rat"] * 3, vocab_size=300).to_str()


def train(lines: list[str], *, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    return tokenizer


def hf_tokenizer(**options: Any) -> HFTokenizer:
    return HFTokenizer(Tokenizer.from_str(trained()), **options)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(trained())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def longest_gap(times: list[float]) -> float:
    return max(b - a for a, b in pairwise(times))


# encoding


async def test_encode_adds_the_start_token_and_encode_rendered_does_not() -> None:
    tokenizer = hf_tokenizer()
    plain = await tokenizer.encode("the cat")
    rendered = await tokenizer.encode_rendered("<s>the cat")
    assert plain.dtype == rendered.dtype == np.int32
    assert plain.tolist() == rendered.tolist()
    assert plain[0] == 0
    assert (plain == 0).sum() == 1


async def test_encode_of_many_at_once_keeps_them_apart() -> None:
    tokenizer = hf_tokenizer()
    texts = [f"the cat {number}" for number in range(40)]
    found = await asyncio.gather(*map(tokenizer.encode, texts))
    assert [tokenizer.decode(ids) for ids in found] == texts


async def test_encode_neither_cuts_nor_pads() -> None:
    """Settings left over in tokenizer.json from training must not change a prompt."""
    inner = Tokenizer.from_str(trained())
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    ids = await HFTokenizer(inner).encode("the cat sat on the mat")
    assert HFTokenizer(inner).decode(ids) == "the cat sat on the mat"
    assert len(await HFTokenizer(inner).encode_rendered("a")) == 1


@pytest.mark.alone
async def test_encode_of_5_mb_leaves_the_loop_free() -> None:
    """Plain `encode` held the GIL and froze the loop 1.4 s, from a thread too."""
    source = random.Random(0)
    words = ["".join(source.choices("abcdefghij", k=source.randint(2, 9))) for _ in range(500)]
    text = " ".join(source.choices(words, k=800_000))
    assert len(text) > 5_000_000
    tokenizer = HFTokenizer(train([" ".join(words)], vocab_size=3_000))
    encoding = asyncio.ensure_future(tokenizer.encode(text))
    beats = [time.monotonic()]
    while not encoding.done():
        await asyncio.sleep(0.005)
        beats.append(time.monotonic())
    assert len(await encoding) >= 800_000
    assert longest_gap(beats) < 0.2


@pytest.mark.parametrize("tokenizer", [hf_tokenizer(), ByteTokenizer(add_bos=True)])
async def test_encode_checks_the_number_before_it_copies(tokenizer: AnyTokenizer) -> None:
    seen: list[int] = []
    ids = await tokenizer.encode("the cat", check=seen.append)
    rendered = await tokenizer.encode_rendered("the cat", check=seen.append)
    assert seen == [len(ids), len(rendered)] == [len(ids), len(ids) - 1]


async def test_encode_cancelled_returns_at_once_and_later_calls_work() -> None:
    tokenizer = hf_tokenizer()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await tokenizer.encode("the cat " * 300_000)
    assert time.monotonic() - started < 0.3
    assert tokenizer.decode(await tokenizer.encode("a mat")) == "a mat"


# loading


def test_load_reads_the_model_directory(model_dir: Path) -> None:
    tokenizer = HFTokenizer.load(model_dir)
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.vocab_size == Tokenizer.from_str(trained()).get_vocab_size()
    assert tokenizer.render_chat(CHAT) == "<s>user:the cat</s>assistant:"


def test_load_prefers_a_template_file(model_dir: Path) -> None:
    (model_dir / "chat_template.json").write_text('{"chat_template": "json"}')
    assert HFTokenizer.load(model_dir).render_chat(CHAT) == "json"
    (model_dir / "chat_template.jinja").write_text("jinja")
    assert HFTokenizer.load(model_dir).render_chat(CHAT) == "jinja"


def test_load_takes_the_default_of_named_templates(model_dir: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert HFTokenizer.load(model_dir).render_chat(CHAT) == "d"


def test_load_without_configuration_has_neither_end_nor_template(model_dir: Path) -> None:
    (model_dir / "tokenizer_config.json").unlink()
    tokenizer = HFTokenizer.load(model_dir)
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", b""),
        ("tokenizer.json", b'{"version": "1.0"}'),
        ("tokenizer_config.json", b'{"eos_token": '),
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"chat_template": [5]}'),
        ("special_tokens_map.json", b"\xff\xfe"),
        ("chat_template.json", b"{"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_load_of_a_missing_or_corrupt_file_names_it(
    model_dir: Path, name: str, content: bytes | None
) -> None:
    if content is None:
        (model_dir / name).unlink()
    else:
        (model_dir / name).write_bytes(content)
    with pytest.raises(ConfigError, match=str(model_dir)) as caught:
        HFTokenizer.load(model_dir)
    assert caught.value.param == "model"
    assert name in str(caught.value)


# chat templates


def test_render_chat_options_reach_the_template() -> None:
    tokenizer = hf_tokenizer(chat_template="{{ x }}{{ add_generation_prompt }}{{ tools[0].name }}")
    text = tokenizer.render_chat(CHAT, add_generation_prompt=False, x=1, tools=[{"name": "f"}])
    assert text == "1Falsef"


@pytest.mark.parametrize("tokenizer", [hf_tokenizer(chat_template=TEMPLATE), ByteTokenizer()])
@pytest.mark.parametrize(
    ("messages", "at"),
    [
        ("Hi", "messages must be a list"),
        ([], "messages must be a list"),
        ({"role": "user", "content": "Hi"}, "messages must be a list"),
        (["Hi"], r"messages\[0\]"),
        ([*CHAT, {"content": "Hi"}], r"messages\[1\]"),
        ([{"role": 1, "content": "Hi"}], r"messages\[0\]"),
        ([{"role": "user"}], r"messages\[0\]"),
        ([{"role": "user", "content": 3}], r"messages\[0\]"),
        ([{"role": "user", "content": ["Hi"]}], r"messages\[0\]"),
    ],
)
def test_render_chat_refuses_malformed_messages(
    tokenizer: AnyTokenizer, messages: Any, at: str
) -> None:
    with pytest.raises(InvalidRequest, match=at) as caught:
        tokenizer.render_chat(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ messages[0]['content'] + 1 }}", "str"),
        ("{% for m in messages %}", "endfor"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{% for i in range(2000) %}{{ '%9999d' % i }}{% endfor %}", "at most"),
    ],
)
def test_render_chat_passes_on_what_the_template_says(template: str | None, says: str) -> None:
    """The sandbox holds, too: nothing changes the messages or reaches Python's insides."""
    with pytest.raises(InvalidRequest, match=says) as caught:
        hf_tokenizer(chat_template=template).render_chat(CHAT)
    assert caught.value.param == "messages"
    assert CHAT == [{"role": "user", "content": "the cat"}]


# bytes


async def test_byte_tokenizer_ids_are_bytes() -> None:
    tokenizer = ByteTokenizer()
    ids = await tokenizer.encode("né")
    assert ids.dtype == np.int32
    assert ids.tolist() == list("né".encode())
    assert tokenizer.decode(ids) == "né"
    assert (await tokenizer.encode("")).tolist() == []
    assert tokenizer.eos_token_ids == (257,)


async def test_byte_tokenizer_start_token_is_an_option() -> None:
    tokenizer = ByteTokenizer(add_bos=True, vocab_size=1000)
    assert (await tokenizer.encode("a")).tolist() == [256, 97]
    assert (await tokenizer.encode_rendered("a")).tolist() == [97]
    assert tokenizer.vocab_size == 1000


def test_byte_tokenizer_chat() -> None:
    messages: list[dict[str, Any]] = [
        *CHAT,
        {"role": "tool", "content": [{"type": "text", "text": "part"}]},
    ]
    text = ByteTokenizer().render_chat(messages)
    assert text == "user: the cat\ntool: part\nassistant: "
    calls: list[dict[str, Any]] = [{"role": "assistant", "content": None, "tool_calls": [{}]}]
    assert ByteTokenizer().render_chat(calls, add_generation_prompt=False) == "assistant: \n"


def test_transformers_is_imported_at_the_first_chat(tmp_path: Path) -> None:
    """It takes a second and 30 MB; who never chats goes without."""
    word_tokenizer().tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    script = """if True:
        import asyncio, sys
        from pathlib import Path
        from aneuron.models.tokenizer import HFTokenizer
        from aneuron.params.messages import Conversation
        from aneuron.prompt import tokenize
        made = HFTokenizer.load(Path(sys.argv[1]))
        asyncio.run(tokenize(made, " the of"))
        assert "transformers" not in sys.modules
        chat = Conversation([{"role": "user", "content": " the of"}])
        told = asyncio.run(tokenize(made, chat))
        assert "transformers" in sys.modules
        print(len(told))
    """
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("2\n", 0), done.stderr
