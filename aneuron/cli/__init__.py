"""The command line `aneuron`: one module, or package, for each command.

Comes in: the arguments of a process. Goes out: token text on stdout, everything else on
stderr, and a status: 0, 1 for a fault of the device or of aneuron, 2 for a wrong argument or
request, 130 after Ctrl-C. Nothing here loads torch or numpy before a command runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cyclopts import App, CycloptsError

from aneuron import __version__
from aneuron.cli import chat, run
from aneuron.cli.terminal import call, stdout_console

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["app", "main"]

_REAL = "a built-in name (smollm2-135m), a directory, a .gguf file"

app = App(
    name="aneuron",
    help="Run language models on the asyncio-native inference engine.",
    version=__version__,
    help_epilogue=f"A MODEL is {_REAL}, a Hugging Face id (org/name) or a simulated model "
    "(sim:count).",
)
app.command(run.run)
app.command(chat.chat)
# By path: whoever runs something else does not pay for importing them.
app.command(
    "aneuron.cli.trace:trace",
    name="trace",
    help="Answer a prompt, and write down when each step reached each stage.",
)
app.command(
    "aneuron.cli.compile:compile_model",
    name="compile",
    help="Compile a model's steps for this processor, ahead of the first answer.",
    help_epilogue=f"A MODEL is {_REAL} or a Hugging Face id (org/name).",  # none that is simulated
)
app.command(
    "aneuron.cli.serve:serve",
    name="serve",
    help="Serve a model over HTTP, as OpenAI's clients expect.",
)
app.command(
    "aneuron.cli.models:models",
    name="models",
    help="See, fetch, describe and remove models.",
)
app.command(
    "aneuron.cli.doctor:doctor",
    name="doctor",
    help="Tell what this machine can run, and why not.",
    help_epilogue="",  # it takes no MODEL
)
app.command(
    "aneuron.cli.top:top",
    name="top",
    help="Watch a running server: requests, tokens, KV cache, latencies, breaks, lag.",
    help_epilogue="",  # it takes no MODEL
)
app.command("aneuron.cli.bench:bench", name="bench", help="Measure the engine.")
app.command(
    "aneuron.cli.simulate:simulate",
    name="simulate",
    help="Tell what a fleet would give its users, on virtual time.",
    help_epilogue="",  # it takes no MODEL
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of this process.

    Returns:
        The status to exit with.
    """
    try:
        command, bound, _ = app.parse_args(arguments, exit_on_error=False)
    except CycloptsError:  # it is printed
        return 2
    if "console" in bound.arguments:  # of help and version, which have one of cyclopts' own
        bound.arguments["console"] = stdout_console(highlight=True)
    return call(command, *bound.args, **bound.kwargs)
