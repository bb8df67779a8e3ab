"""What users are promised: the public names, the reference that describes them, the errors page."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import aneuron
import aneuron.errors
import aneuron.server
import aneuron.testing
from aneuron.config import EngineConfig
from aneuron.errors import AneuronError
from tests.test_house import ROOT, TREES, python, where

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

PROMISED = [aneuron, aneuron.server, aneuron.testing]
DIRECTIVE = re.compile(r"^\.\. (currentmodule|auto\w+):: ([\w.]+)$", re.MULTILINE)


class Entry(NamedTuple):
    """A name in the reference."""

    page: str
    module: str
    name: str

    def value(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)


def entries() -> Iterator[Entry]:
    for path in sorted((ROOT / "docs" / "api").glob("*.md")):
        module = ""
        for kind, name in DIRECTIVE.findall(path.read_text("utf-8")):
            if kind == "currentmodule":
                module = name
            else:
                yield Entry(path.name, module, name)


REFERENCE = list(entries())
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
ELSEWHERE = re.compile(r"([Ss]ee|as in)\s`\w+(\.\w+)?`")  # where the same arguments are told of


# ── names ───────────────────────────────────────────────────────────────────────────────


async def test_an_unknown_argument_is_told_all_that_there_are() -> None:
    async with aneuron.Engine("sim:count") as engine:
        calls: list[Any] = [engine.generate, engine.chat, engine.generate_many]
        for call in calls:
            with pytest.raises(aneuron.InvalidRequest, match="unknown parameter 'nope'") as caught:
                call("a", nope=1)
            own = set(inspect.signature(call).parameters) - {"sampling"}
            fields = {one.name for one in dataclasses.fields(aneuron.SamplingParams)}
            assert names_in(caught.value) == own | fields
    with pytest.raises(aneuron.ConfigError, match="unknown setting 'nope'") as refused:
        aneuron.Engine("sim:count", nope=1)  # type: ignore[call-arg]
    settings = {one.name for one in dataclasses.fields(EngineConfig)}
    own = set(inspect.signature(aneuron.Engine).parameters) - {"options"}
    assert names_in(refused.value) == own | settings


def names_in(error: AneuronError) -> set[str]:
    """The names that a message lists at its end."""
    return set(str(error).partition("known are ")[2].split(", "))


@pytest.mark.parametrize("module", PROMISED, ids=lambda module: module.__name__)
def test_the_reference_has_every_public_name_once_and_no_other(module: ModuleType) -> None:
    described = sorted(one.name for one in REFERENCE if one.module == module.__name__)
    assert described == sorted(module.__all__)


def test_what_else_the_reference_describes_is_public_where_it_is() -> None:
    for entry in REFERENCE:
        assert entry.name in importlib.import_module(entry.module).__all__, entry


def exports(tree: ast.Module) -> set[str]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return set(ast.literal_eval(value))
    return set()


def test_modules_take_from_each_other_what_is_in_all() -> None:
    modules = {
        f"aneuron/{name}".removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree
        for name, tree in TREES.items()
    }
    offered = {module: exports(tree) | {"__version__"} for module, tree in modules.items()}
    taken = [
        f"{where(name, node)}: {alias.name} of {node.module}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in modules
        for alias in node.names
        if f"{node.module}.{alias.name}" not in modules and alias.name not in offered[node.module]
    ]
    assert not taken


def test_public_names_need_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """So the reference is made without them, and `import aneuron.testing` is quick."""
    wanted = sorted({(one.module, one.name) for one in REFERENCE})
    code = f"""
import importlib, sys
for module, name in {wanted!r}:
    getattr(importlib.import_module(module), name)
print(sorted({{"torch", "transformers", "tokenizers", "huggingface_hub"}} & set(sys.modules)))
"""
    assert python(code, tmp_path) == "[]\n"


# ── docstrings ──────────────────────────────────────────────────────────────────────────


def fields(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [one.name for one in dataclasses.fields(value)]
    return list(getattr(value, "_fields", ()))  # of a named tuple


def test_docstrings_tell_of_each_field() -> None:
    missing = [
        f"{entry.module}.{entry.name}: {name}"
        for entry in REFERENCE
        for name in fields(entry.value())
        if not name.startswith("_") and not names(entry.value().__doc__, name)
    ]
    assert not missing


def names(text: str | None, name: str) -> bool:
    return re.search(rf"\b{name}\b", text or "") is not None


def callables(value: Any) -> Iterator[Any]:
    """The function, or the public methods of the class that are written in it."""
    if not inspect.isclass(value):
        yield value
        return
    for name, one in vars(value).items():
        function = inspect.unwrap(getattr(one, "__func__", one))
        if inspect.isfunction(function) and not name.startswith("_"):
            yield function


def is_of_base_class(value: Any, function: Any) -> bool:
    bases = value.__mro__[1:] if inspect.isclass(value) else ()
    return any(hasattr(base, function.__name__) for base in bases)


def test_docstrings_tell_of_each_argument_where_there_are_several() -> None:
    missing = []
    for entry in REFERENCE:
        for function in callables(value := entry.value()):
            parameters = [
                one.name
                for one in inspect.signature(function).parameters.values()
                if one.kind not in VARIABLE and one.name not in ("self", "cls")
            ]
            if len(parameters) < 3 or is_of_base_class(value, function):
                continue
            text = function.__doc__ or ""
            if ELSEWHERE.search(text):
                continue
            missing += [
                f"{entry.module}.{entry.name}: {function.__name__}({one})"
                for one in parameters
                if not names(text, one)
            ]
    assert not missing


# ── pages ───────────────────────────────────────────────────────────────────────────────


def errors() -> Iterator[type[AneuronError]]:
    for name in aneuron.errors.__all__:
        value = getattr(aneuron.errors, name)
        if isinstance(value, type) and issubclass(value, AneuronError):
            yield value


def test_errors_are_told_one_by_one_with_their_code_and_what_to_do() -> None:
    text = (ROOT / "docs" / "errors.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.{10,}) \| (.{10,}) \|$", text, re.MULTILINE)
    assert sorted((name, code) for name, code, *_ in rows) == sorted(
        (error.__name__, error.code) for error in errors()
    )
    codes = [error.code for error in errors()]
    assert len(codes) == len(set(codes))


def test_errors_are_drawn_alike_in_the_docs_and_in_the_code() -> None:
    page = (ROOT / "docs" / "errors.md").read_text("utf-8")
    drawings = [
        re.findall(r"^ *(?:[│├└─ ]*)(\w+)(?: +\(also (\w+)\))?", text, re.MULTILINE)
        for text in (
            page.split("```text\n")[1].split("```")[0],
            (aneuron.errors.__doc__ or "").split("\n\n")[1],
        )
    ]
    assert drawings[0] == drawings[1]
    drawn = dict(drawings[0])
    assert set(drawn) == {error.__name__ for error in errors()}
    for error in errors():
        also = [base.__name__ for base in error.__bases__ if not issubclass(base, AneuronError)]
        if error is not AneuronError:
            assert drawn[error.__name__] == "".join(also)


def test_every_page_is_in_the_front_page() -> None:
    docs = ROOT / "docs"
    trees = re.findall(
        r"```{toctree}\n(?::[^\n]*\n)*\n(.*?)```", (docs / "index.md").read_text("utf-8"), re.DOTALL
    )
    listed = [name for tree in trees for name in tree.split()]
    pages = {
        str(path.relative_to(docs).with_suffix(""))
        for path in docs.rglob("*.md")
        if "_build" not in path.parts
    }
    assert sorted(listed) == sorted(pages - {"index"})
