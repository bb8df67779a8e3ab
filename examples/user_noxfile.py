"""A nox file of your own: `nox -f examples/user_noxfile.py`."""

import nox

SUITE = "user_suite.py"  # beside this file


@nox.session
@nox.parametrize("loop", ["asyncio", "uvloop"])
def tests(session: nox.Session, loop: str) -> None:
    """Run the suite on both event loops: `aneuron.testing` needs no model and no device."""
    session.install("aneuron", "pytest")
    session.run("pytest", "-q", SUITE, *session.posargs, env={"LOOP": loop})


@nox.session(default=False)
def smoke(session: nox.Session) -> None:
    """Let a real model answer, once."""
    session.install("aneuron")
    session.run("aneuron", "run", "smollm2-135m", "Name a river.", "--max-tokens", "16")
