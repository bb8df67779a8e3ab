"""Every example runs, on a simulated model, and none is longer than it should be."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import nbformat
import pytest
from nbclient import NotebookClient
from starlette.testclient import TestClient

import aneuron
from aneuron import Engine

if TYPE_CHECKING:
    from types import ModuleType

    import httpx2

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS: dict[str, list[str]] = {  # with their arguments
    "hello.py": ["sim:count"],
    "many_streams.py": ["sim:count"],
    "batch_job.py": [str(EXAMPLES / "hello.py"), "answers.jsonl", "sim:count"],
    "cancel_and_deadline.py": ["sim:count", "sim:micro"],  # slow enough for its deadline
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
        "deadline: ",  # and some tokens, which is looked at below
        "left: 0",
    ],
    "overloaded.py": [
        "'This is urgent:' has 16 tokens",
        *(f"'Item {number} of the list:' has 16 tokens" for number in range(6)),
        *(f"'Item {number} of the list:' is refused; again in" for number in (3, 4, 5)),
    ],
}


def run(*command: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "PYTHONUTF8": "1", **env},
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
    if name == "cancel_and_deadline.py":
        assert re.search("deadline: [1-9]", done.stdout)


@pytest.mark.timeout(90)
def test_the_batch_job_reads_utf8_wherever_it_runs(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("Où est-il ?\n", encoding="utf-8")
    batch = [str(EXAMPLES / "batch_job.py"), "prompts", "answers", "sim:count"]
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "POSIX"}
    done = run(*batch, cwd=tmp_path, **ascii_only)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "answers").read_text())["answer"].startswith("@AB")


@pytest.mark.parametrize("name", ["batch_job.py", "timeline_picture.py"])
def test_it_says_what_it_needs(name: str) -> None:
    done = run(str(EXAMPLES / name))
    assert done.returncode == 1
    assert f"python examples/{name} " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's, with both files copied into it."""
    for name in ("user_suite.py", "user_noxfile.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # else that of a folder above counts
    return tmp_path


@pytest.mark.timeout(90)
def test_the_user_suite_passes(project: Path) -> None:
    plain = ["-p", "no:randomly", "-p", "no:timeout"]  # what not every project has
    done = run("-m", "pytest", "-q", *plain, "user_suite.py", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.timeout(90)
def test_the_users_nox_file_runs_that_suite(project: Path) -> None:
    """In this environment: what it would install is there."""
    nox = ["-m", "nox", "-f", "user_noxfile.py", "--no-venv", "--no-install"]
    done = run(*nox, "-s", "tests(loop='uvloop')", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_users_nox_file_installs_from_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name would be taken from an index, where anyone may have it."""
    module, session = load("user_noxfile", monkeypatch), Mock(posargs=[])
    for task in (partial(module.tests.func, loop="asyncio"), module.smoke.func):
        task(session)
        assert session.install.call_args.args[0] == module.ANEURON
    assert module.ANEURON.startswith("../")


def ask(client: TestClient, text: str) -> httpx2.Response:
    return client.post("/ask", json=[{"role": "user", "content": text}])


def test_the_fastapi_app(monkeypatch: pytest.MonkeyPatch) -> None:
    app = load("fastapi_app", monkeypatch).app
    with TestClient(app) as client:
        answer = ask(client, "What?")
        assert (answer.status_code, answer.text[:5], len(answer.text)) == (200, '!"#$%', 64)
        refused = ask(client, "x" * 40_000)
        assert refused.status_code == 400
        assert "the prompt has" in refused.json()["error"]
        refused = client.post("/ask", json=[])
        assert refused.status_code == 400
        assert ask(client, "What?").text == answer.text


def test_the_fastapi_app_says_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    app = load("fastapi_app", monkeypatch).app
    options: Any = {"device": "sim:micro", "max_num_seqs": 1, "max_waiting": 0}
    monkeypatch.setattr(aneuron, "Engine", lambda model, **_: Engine(model, **options))
    with TestClient(app) as client:
        assert client.portal is not None
        engine = client.app_state["engine"]
        # In a list: the portal would await the stream.
        (running,) = client.portal.call(lambda: [engine.generate("a", max_tokens=50_000)])
        refused = ask(client, "What?")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        client.portal.call(running.aclose)
        assert ask(client, "What?").status_code == 200


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, loaded and not run."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["queue_worker.py"])
        patch.setattr(asyncio, "run", lambda main: main.close())
        return load("queue_worker", patch)


async def test_a_caller_of_the_queue_worker_may_give_up(worker: ModuleType) -> None:
    loop, jobs = asyncio.get_running_loop(), asyncio.Queue[Any]()
    async with Engine("sim:count") as engine:
        working = asyncio.create_task(worker.work(engine, jobs))
        for prompt in ("abc", ""):  # one has an answer, the other an error
            gone = loop.create_future()
            gone.cancel()
            jobs.put_nowait((prompt, gone))
        kept = loop.create_future()
        jobs.put_nowait(("abc", kept))
        waiting = asyncio.create_task(jobs.join())
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert not working.done(), working
        assert kept.result().startswith("def")
        working.cancel()


@pytest.mark.parametrize("lifespan", ["first", "second"])
def test_the_starlette_app(lifespan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = load("starlette_mount", monkeypatch).app
    if lifespan == "second":
        with TestClient(app):
            pass
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
