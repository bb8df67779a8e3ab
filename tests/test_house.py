"""The house rules of docs/contributing.md, measured on the source itself."""

from __future__ import annotations

import ast
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import aneuron

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(aneuron.__file__).parent
ROOT = Path(__file__).parent.parent
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
SCREEN = 40  # lines

Function = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str, str]]:
    """Each call with what it is called on and its name: `a.b().c()` gives `a.b()` and `c`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr=name)):
                yield node, ast.unparse(owner), name
            case ast.Call(func=ast.Name(id=name)):
                yield node, "", name


def where(name: str, node: ast.expr | ast.stmt) -> str:
    return f"aneuron/{name}:{node.lineno}"


# ── size ────────────────────────────────────────────────────────────────────────────────


def test_few_modules_each_short() -> None:
    for folder in {path.parent for path in FILES.values()}:
        limit = 22 if folder == PACKAGE else 12
        assert len(list(folder.glob("*.py"))) <= limit, f"more than {limit} modules in {folder}"
    lines = {name: len(path.read_text("utf-8").splitlines()) for name, path in FILES.items()}
    assert not {name: count for name, count in lines.items() if count > 400}
    assert statistics.median(count for count in lines.values() if count > 5) <= 180


def body_lines(function: Function) -> int:
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 1


def test_functions_are_short() -> None:
    lengths = {
        f"{where(name, function)} {function.name}": body_lines(function)
        for name, tree in TREES.items()
        for function in functions(tree)
    }
    assert not {at: length for at, length in lengths.items() if length > 60}
    assert statistics.median(lengths.values()) <= 10
    assert statistics.quantiles(lengths.values(), n=10)[-1] <= 30


def screen_lines(function: Function) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def test_step_loop_and_materializer_fit_one_screen_each() -> None:
    coroutines = [f for f in functions(TREES["core.py"]) if isinstance(f, ast.AsyncFunctionDef)]
    assert not {f.name: screen_lines(f) for f in coroutines if screen_lines(f) > SCREEN}
    endless = [f.name for f in coroutines if "while True:" in ast.unparse(f)]
    assert len(endless) >= 2, f"the two loops are not in core.py: {endless}"


def test_step_coroutine_fits_one_screen() -> None:
    (step,) = (f for f in functions(TREES["runner.py"]) if f.name == "execute_model")
    assert isinstance(step, ast.AsyncFunctionDef)
    assert screen_lines(step) <= SCREEN


# ── docstrings ──────────────────────────────────────────────────────────────────────────


def public_definitions(tree: ast.Module | ast.ClassDef) -> Iterator[ast.stmt]:
    for node in tree.body:
        if not isinstance(node, DEFINITIONS) or node.name.startswith("_"):
            continue
        decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
        if not decorators & {"overload", "override", "setter"}:
            yield node
        if isinstance(node, ast.ClassDef):
            yield from public_definitions(node)


def test_everything_public_has_a_docstring() -> None:
    missing = [f"aneuron/{name}" for name, tree in TREES.items() if not ast.get_docstring(tree)]
    missing += [
        f"{where(name, node)} {node.name}"
        for name, tree in TREES.items()
        for node in public_definitions(tree)
        if isinstance(node, DEFINITIONS) and not ast.get_docstring(node)
    ]
    assert not missing


# ── async discipline ────────────────────────────────────────────────────────────────────


def test_nothing_sleeps_to_wait() -> None:
    sleeps = [
        f"{where(name, call)} {ast.unparse(call)}"
        for name, tree in TREES.items()
        if name != "device/sim.py"  # it models latency
        for call, owner, function in calls(tree)
        if function == "sleep" and f"{owner}.{ast.unparse(call)}".split(".")[-1] != "sleep(0)"
    ]
    assert not sleeps


def test_every_task_has_an_owner() -> None:
    bare = [
        f"{where(name, call)} {ast.unparse(call)}"
        for name, tree in TREES.items()
        for call, owner, function in calls(tree)
        if (function == "create_task" and re.search(r"(^|asyncio|loop|loop\(\))$", owner))
        or function in {"ensure_future", "run_coroutine_threadsafe"}
    ]
    assert len(bare) == 1, bare  # the supervisor; all others belong to a TaskGroup
    assert bare[0].startswith("aneuron/engine.py:")


def test_device_threads_reach_the_loop_in_one_place() -> None:
    crossings = {
        name
        for name, tree in TREES.items()
        for _, _, function in calls(tree)
        if function == "call_soon_threadsafe"
    }
    # The stream: a finaliser may run in any thread, and posts a cancel. The loop of virtual
    # time has a method of this name.
    assert crossings <= {"futures.py", "stream/__init__.py", "clock.py"}


def test_nothing_imports_testing() -> None:
    users = [
        f"{where(name, node)} {ast.unparse(node)}"
        for name, tree in TREES.items()
        if not name.startswith("testing/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and re.search(r"aneuron\.testing|from aneuron import .*\btesting\b", ast.unparse(node))
    ]
    assert not users


# ── import ──────────────────────────────────────────────────────────────────────────────


def python(code: str, cwd: Path) -> str:
    # Not -I: coverage and the like may hook in through the environment.
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


def best_s(code: str, cwd: Path, runs: int) -> float:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        python(code, cwd)
        times.append(time.perf_counter() - started)
    return min(times)


@pytest.mark.timeout(60)
def test_import_is_fast(tmp_path: Path) -> None:
    python("import aneuron", tmp_path)  # writes the bytecode
    limit_s = 0.150
    for runs in (3, 7, 15):  # more only where the machine is busy
        extra_s = best_s("import aneuron", tmp_path, runs) - best_s("pass", tmp_path, runs)
        if extra_s < limit_s:
            return
    pytest.fail(f"import aneuron costs {extra_s * 1000:.0f} ms")


def test_import_has_no_side_effects(tmp_path: Path) -> None:
    code = """
import aneuron, json, sys, threading
asyncio = sys.modules.get("asyncio")
facts = {
    "heavy": sorted({"torch", "numpy", "transformers"} & set(sys.modules)),
    "threads": threading.active_count(),
    "policy": repr(asyncio and asyncio.events._event_loop_policy),
}
aneuron.Engine, aneuron.open  # modules that the import alone leaves for later
ours = ("aneuron.testing.fakes", "aneuron.device.neuron", "aneuron.models.neuron",
        "aneuron.cli.doctor")
print(json.dumps(facts | {"ours": [name for name in sys.modules if name.startswith(ours)]}))
"""
    facts = json.loads(python(code, tmp_path))
    assert facts == {"heavy": [], "threads": 1, "policy": "None", "ours": []}


def test_exports_are_what_all_says() -> None:
    names = set(aneuron.__all__)
    assert len(names) == len(aneuron.__all__)
    assert {name for name in names if not hasattr(aneuron, name)} == set()
    assert names <= set(dir(aneuron))
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(aneuron, "no_such_name")  # noqa: B009 (mypy knows that it is not there)


def test_type_checkers_see_the_same_exports() -> None:
    tree = TREES["__init__.py"]
    seen = {
        alias.asname or alias.name
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aneuron")
        for alias in node.names
    }
    assert seen == set(aneuron.__all__) - {"__version__"}


def test_the_readme_names_every_file_at_the_top() -> None:
    listed = set(re.findall(r"`([\w.]+/?)`", (ROOT / "README.md").read_text("utf-8")))
    there = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    there |= {path.name for path in PACKAGE.glob("*.py")}
    assert there - listed == set()


# ── what must not be in the tree ────────────────────────────────────────────────────────


def own_files() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.is_file())
    for folder in (".ci", "aneuron", "docs", "examples", "tests"):
        yield from (path for path in (ROOT / folder).rglob("*") if path.is_file())


def test_no_machine_paths_and_no_index_hosts() -> None:
    unwanted = re.compile(
        r"(?<![\w.-])/(?:work|farm|root|opt/pypi)/"
        r"|pypi[.]org|pythonhosted[.]org|download[.]pytorch[.]org|repos[.]neuron[.]amazonaws"
    )
    found = []
    for path in own_files():
        if {"__pycache__", "_build", ".coverage"} & set(path.parts):
            continue
        if path.suffix in {".pyc", ".safetensors"}:
            continue
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
            if unwanted.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not found
