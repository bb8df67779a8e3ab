"""Every example runs, on a simulated model, and none is longer than it should be."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import pytest
from nbclient import NotebookClient
from starlette.testclient import TestClient

if TYPE_CHECKING:
    from types import ModuleType

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS: dict[str, list[str]] = {  # with their arguments
    "hello.py": ["sim:count"],
    "many_streams.py": ["sim:count"],
    "batch_job.py": [str(EXAMPLES / "hello.py"), "answers.jsonl", "sim:count"],
    "cancel_and_deadline.py": ["sim:count"],
    "overloaded.py": ["sim:count"],
    "structured_output.py": ["sim:const"],
    "custom_device.py": [],
    "timeline_picture.py": ["trace.svg"],
    "task_groups.py": ["sim:count"],
    "queue_worker.py": ["sim:count"],
}
OTHERS = {"user_suite.py", "user_noxfile.py", "fastapi_app.py", "starlette_mount.py"}
SAYS = {
    "hello.py": ["!"],  # COUNT goes on from the template's last character, a space
    "many_streams.py": ["Two plus two is"],
    "batch_job.py": ["100%"],
    "structured_output.py": ["{'name': ", "no\n"],
    "custom_device.py": ["defgh in 5 programs"],
    "timeline_picture.py": ["decode_async_share   1.000"],
    "task_groups.py": ["20 tokens won", "out of time: True", "left: 0"],
    "queue_worker.py": ["'-./01", "the prompt is empty"],
    "cancel_and_deadline.py": [
        "cancelled: abort",
        "stopped: stop",
        "too late",
        "deadline: ",
        "left: 0",
    ],
    "overloaded.py": [
        "'This is urgent:' has 16 tokens",
        *(f"'Item {number} of the list:' has 16 tokens" for number in range(6)),
        *(f"'Item {number} of the list:' is refused; again in" for number in (3, 4, 5)),
    ],
}


def run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONUTF8": "1"},
    )


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An app, as uvicorn would import it; it takes its model from the environment."""
    monkeypatch.setenv("MODEL", "sim:count")
    spec = spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # for FastAPI, which looks types up
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", list(SCRIPTS))
def test_it_runs(name: str, tmp_path: Path) -> None:
    done = run(str(EXAMPLES / name), *SCRIPTS[name], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for text in SAYS[name]:
        assert text in done.stdout
    if name == "batch_job.py":
        lines = (tmp_path / "answers.jsonl").read_text().splitlines()
        answers = [json.loads(line) for line in lines]
        told = [line for line in (EXAMPLES / "hello.py").read_text().splitlines() if line]
        assert sorted(one["prompt"] for one in answers) == list(range(len(told)))
    if name == "timeline_picture.py":
        assert (tmp_path / "trace.svg").read_text().startswith("<svg")


@pytest.mark.timeout(90)
def test_the_user_suite_passes() -> None:
    done = run("-m", "pytest", "-q", "-p", "no:randomly", str(EXAMPLES / "user_suite.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.timeout(90)
def test_the_users_nox_file_runs_that_suite(tmp_path: Path) -> None:
    """In this environment: what it would install is there."""
    nox = ["-m", "nox", "-f", str(EXAMPLES / "user_noxfile.py"), "--envdir", str(tmp_path)]
    done = run(*nox, "--no-venv", "--no-install", "-s", "tests(loop='uvloop')")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_fastapi_app(monkeypatch: pytest.MonkeyPatch) -> None:
    app = load("fastapi_app", monkeypatch).app
    with TestClient(app) as client:
        answer = client.post("/ask", json={"text": "What?", "max_tokens": 5})
        assert (answer.status_code, answer.text) == (200, '!"#$%')
        refused = client.post("/ask", json={"text": "What?", "max_tokens": 0})
        assert refused.status_code == 400
        assert "max_tokens" in refused.json()["error"]


def test_the_starlette_app(monkeypatch: pytest.MonkeyPatch) -> None:
    app = load("starlette_mount", monkeypatch).app
    with TestClient(app) as client:
        assert client.get("/").text == "0 running, 0 waiting"
        asked = {"model": "sim-count", "prompt": "abc", "max_tokens": 3}
        asked["model"] = client.get("/ai/v1/models").json()["data"][0]["id"]
        answer = client.post("/ai/v1/completions", json=asked).json()
        assert answer["choices"][0]["text"] == "def"
        assert client.get("/ai/health").status_code == 200


@pytest.mark.timeout(90)
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    path = EXAMPLES / "notebook.ipynb"
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert len("\n".join(code).splitlines()) <= 40
    for cell in notebook.cells:
        cell.source = cell.source.replace("smollm2-135m", "sim:count")
    asyncio.run(NotebookClient(notebook, timeout=20, kernel_name="python3").async_execute())
    shown: dict[str, Any] = {cell.id: cell.get("outputs") for cell in notebook.cells}
    assert "<b>sim:count" in shown["open"][0].data["text/html"]
    assert "".join(one.text for one in shown["chat"]).startswith("!")
    state, texts = shown["live"]
    tokens = re.search("tokens.*?<span[^>]*>([0-9]+)", state.data["text/html"])
    assert tokens is not None
    assert int(tokens[1]) == 64 + 8 * 24  # as it was at the end, in the place of the first
    assert "1 is a number that" in texts.data["text/plain"]
    assert "<svg" in shown["timeline"][0].data["text/html"]


def test_each_is_run_and_at_most_forty_lines() -> None:
    files = {path.name: path for path in EXAMPLES.glob("*.py")}
    assert set(files) == {*SCRIPTS, *OTHERS}
    for name, path in files.items():
        assert len(path.read_text().splitlines()) <= 40, name
