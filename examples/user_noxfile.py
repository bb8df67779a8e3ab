"""A nox file of your own. Copy it and `user_suite.py` into your project, and set ANEURON.

There it is `nox -f user_noxfile.py`; `nox -f user_noxfile.py -s smoke` asks a real model.
"""

import nox

ANEURON = "../aneuron"  # its checkout or wheel, seen from here: it is on no package index
SUITE = "user_suite.py"


@nox.session
@nox.parametrize("loop", ["asyncio", "uvloop"])
def tests(session: nox.Session, loop: str) -> None:
    """Run the suite on both event loops: `aneuron.testing` needs no model and no device."""
    session.install(ANEURON, "pytest")
    session.run("pytest", "-q", SUITE, *session.posargs, env={"LOOP": loop})


@nox.session(default=False)
def smoke(session: nox.Session) -> None:
    """Let a real model answer, once."""
    session.install(ANEURON)
    session.run("aneuron", "run", "smollm2-135m", "Name a river.", "--max-tokens", "16")
