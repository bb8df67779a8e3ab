"""Every example runs, on a simulated model, and none is longer than it should be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = {
    "hello.py": [],
    "many_streams.py": [],
    "batch_job.py": [str(EXAMPLES / "hello.py")],
    "cancel_and_deadline.py": [],
    "overloaded.py": [],
}
SAYS = {
    "hello.py": ["!"],  # COUNT goes on from the template's last character, a space
    "many_streams.py": ["Two plus two is"],
    "batch_job.py": ["0\tlength"],
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


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONUTF8": "1"},
    )


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", list(SCRIPTS))
def test_it_runs(name: str) -> None:
    done = run(str(EXAMPLES / name), *SCRIPTS[name], "sim:count")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for text in SAYS[name]:
        assert text in done.stdout


@pytest.mark.timeout(90)
def test_the_user_suite_passes() -> None:
    done = run("-m", "pytest", "-q", "-p", "no:randomly", str(EXAMPLES / "user_suite.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_each_is_run_and_at_most_forty_lines() -> None:
    files = {path.name: path for path in EXAMPLES.glob("*.py")}
    assert set(files) == {*SCRIPTS, "user_suite.py"}
    for name, path in files.items():
        assert len(path.read_text().splitlines()) <= 40, name
