"""Sessions that set everything up by themselves: `nox -l` lists them.

Each has a virtual environment of its own under .nox/, kept between runs; it is filled anew
only when pyproject.toml or this file changed. What to install stands in pyproject.toml.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.sessions = ["lint", "types", "tests"]

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
TORCH = "torch==2.13.0"
MODEL = "smollm2-135m"
ELSEWHERE = "device or soak or browser"  # marks of tests that have sessions of their own
# Workers that run out take from the others: files differ in length by far.
WORKERS = ("-n", "auto", "--maxprocesses", "4", "--dist", "worksteal")
# Where a branch that no test takes would be a step lost or a stream that hangs.
CORE = ("scheduler/*", "runner.py", "carry.py", "core.py", "futures.py", "stream/*")


def set_up(
    session: nox.Session, *groups: str, package: bool = True, constraints: tuple[str, ...] = ()
) -> None:
    """Install the package and dependency groups, once per state of the project files."""
    wanted = [
        requirement
        for group in groups
        for requirement in nox.project.dependency_groups(PROJECT, group)
    ]
    wanted += ["-e", "."] if package else []
    limits = [TORCH, *constraints]
    files = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "noxfile.py")]
    state = hashlib.sha256(b"\0".join([*files, repr((wanted, limits)).encode()])).hexdigest()
    stamp = Path(session.virtualenv.location) / "aneuron-set-up"
    if stamp.exists() and stamp.read_text() == state:
        session.debug("nothing to install: the project files are as at the last run")
        return
    limits_file = Path(session.create_tmp()) / "constraints.txt"
    limits_file.write_text("\n".join(limits) + "\n")
    session.install("--constraint", str(limits_file), *wanted)
    stamp.write_text(state)


@nox.session
def demo(session: nox.Session) -> None:
    """Let a real model answer through the asynchronous engine (first run: 93 MB download)."""
    set_up(session)
    question = "What is the capital of Japan?"
    session.run("aneuron", "run", MODEL, question, "--stats", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests on all cores; with arguments after `--`, pytest alone, with those."""
    set_up(session, "test")
    if session.posargs:
        session.run("pytest", *session.posargs)
        return
    session.run("pytest", *WORKERS, "-m", f"not (alone or {ELSEWHERE})")
    session.run("pytest", "-m", f"alone and not ({ELSEWHERE})")


@nox.session
def soak(session: nox.Session) -> None:
    """Look for interleavings that break the flow, with ten times the examples (an hour)."""
    set_up(session, "test")
    session.env["HYPOTHESIS_PROFILE"] = "soak"
    files = ("tests/test_properties.py", "tests/neuron/test_properties_fakes.py")
    session.run("pytest", *files, "--timeout=7200", *session.posargs)


@nox.session
def schemathesis(session: nox.Session) -> None:
    """Look for requests that break the server (minutes); arguments go to schemathesis."""
    set_up(session, "schemathesis")
    session.run("python", "-m", "tests.server.fuzz", *session.posargs)


@nox.session
def guidellm(session: nox.Session) -> None:
    """Load a server of the demo model with GuideLLM, which must see no request fail."""
    set_up(session, "guidellm")
    session.run("python", "-m", "tests.server.guide", *session.posargs)


@nox.session(venv_backend="none")
def page(session: nox.Session) -> None:
    """Use the server's web page in a headless Chromium, which must be there (a minute)."""
    session.run(sys.executable, "-m", "tests.server.browser", external=True)  # says what to install
    session.notify("tests", ["-m", "browser", "tests/server", *session.posargs])


@nox.session
def load(session: nox.Session) -> None:
    """Put 500 clients on a server, a third of which leave amid their answer (minutes)."""
    set_up(session, "test")
    session.run("pytest", "tests/server/test_cases_load.py", "-m", "soak", *session.posargs)


@nox.session
def coverage(session: nox.Session) -> None:
    """Fail where tests reach too little: all of the core, 95 % of the whole, by branches.

    Tests that measure are not in it: a traced program is slow. Arguments go to pytest.
    """
    set_up(session, "test")
    session.env["HYPOTHESIS_PROFILE"] = "dev"
    marks = f"not (alone or {ELSEWHERE})"
    options = ("--cov", "--cov-report=", "--timeout=120", "-m", marks)
    session.run("pytest", *WORKERS, *options, *session.posargs)
    session.run("coverage", "report")  # pyproject.toml has the limit
    core = ",".join(f"aneuron/{path}" for path in CORE)
    session.run("coverage", "report", f"--include={core}", "--fail-under=100")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format and the direction of imports."""
    set_up(session, "lint", package=False)
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    session.run("lint-imports", "--no-logo")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the package, the tests and the examples."""
    set_up(session, "types")
    session.run("mypy", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error."""
    set_up(session, "docs", package=False)
    session.run("sphinx-build", "-W", "--keep-going", "-q", "docs", "docs/_build/html")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the engine (docs/benchmarks.md), then the demo model, sync and async in turns."""
    set_up(session)
    for name in (
        "host",
        "floor",
        "overlap",
        "churn",
        "prefix",
        "longprompt",
        "sampling",
        "grammar",
        "lookup",
    ):
        session.run("aneuron", "bench", name)
    story = "Tell me a long story about a lighthouse keeper."
    options = ("--max-tokens", "128", "--temperature", "0", "--stats", *session.posargs)
    for _ in range(3):
        for scheduling in ((), ("--no-async-scheduling",)):
            session.run("aneuron", "run", MODEL, story, *options, *scheduling)


@nox.session
def build(session: nox.Session) -> None:
    """Build sdist and wheel, and import the package from the wheel alone."""
    session.install("build")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", "dist", silent=True)
    (wheel,) = (ROOT / "dist").glob("*.whl")
    session.install("--no-deps", "--force-reinstall", str(wheel))
    session.chdir(session.create_tmp())  # so that the checkout is not what gets imported
    session.run("python", "-c", CHECK_WHEEL)


CHECK_WHEEL = """\
import importlib.metadata, pathlib, aneuron
folder = pathlib.Path(aneuron.__file__).parent
assert "site-packages" in folder.parts, folder
assert (folder / "py.typed").exists(), "py.typed is missing"
print("aneuron", importlib.metadata.version("aneuron"), "imports from the wheel")
"""


@nox.session
def minimums(session: nox.Session) -> None:
    """Run the tests that need no model with the lowest versions that pyproject.toml allows."""
    lowest = []
    project = PROJECT["project"]
    for line in [*project["dependencies"], *project["optional-dependencies"]["grammar"]]:
        requirement = Requirement(line)
        (bound,) = requirement.specifier
        if requirement.name != "torch":  # torch stays at the version the sessions share
            lowest.append(f"{requirement.name}=={bound.version}")
    set_up(session, "test", constraints=tuple(lowest))
    session.run("pytest", "-m", "not (tiny or device or soak or browser)", *session.posargs)
