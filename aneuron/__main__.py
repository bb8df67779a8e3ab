"""The process `aneuron`, also as `python -m aneuron`: settings of the process, then cli/."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["main"]

_LEVELS = ("debug", "info", "warning", "error")
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main() -> None:
    """Run the command line of this process, and exit with its status."""
    _fill_streams()
    fault = _set_up_logging(os.environ.get("ANEURON_LOG", ""))
    if fault:
        sys.stderr.write(f"error: {fault}\n")
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not where a program put another object there
            stream.reconfigure(errors="replace")  # an answer may not fit the terminal's encoding

    from aneuron.cli import main as run_command_line

    sys.exit(run_command_line())


def _fill_streams() -> None:
    """Put nothing where a standard stream is closed, as in `aneuron run ... <&-`.

    Else the event loop would get its descriptor, and uvloop ends a process that closes one of
    these three.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # noqa: FBT003  the function takes it so
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def _set_up_logging(level: str) -> str | None:
    """Let aneuron's loggers write to stderr from this level on; return what is wrong with it."""
    import logging

    if not level:  # else logging's last resort would print what the command tells anyway
        logging.getLogger("aneuron").addHandler(logging.NullHandler())
        return None
    if level.lower() not in _LEVELS:
        return f"ANEURON_LOG must be one of {', '.join(_LEVELS)}, not {level!r}"
    logging.basicConfig(format=_LOG_FORMAT)
    logging.getLogger("aneuron").setLevel(level.upper())
    return None


if __name__ == "__main__":
    main()
