"""The process `aneuron`, also as `python -m aneuron`: settings of the process, then cli/."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main() -> None:
    """Run the command line of this process, and exit with its status."""
    fault = _set_up_logging(os.environ.get("ANEURON_LOG", ""))
    if fault:
        sys.stderr.write(f"error: {fault}\n")
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # None without a console
            stream.reconfigure(errors="replace")  # an answer may not fit the terminal's encoding

    from aneuron.cli import main as run_command_line

    sys.exit(run_command_line())


def _set_up_logging(level: str) -> str | None:
    """Let aneuron's loggers write to stderr from this level on; return what is wrong with it."""
    import logging

    if not level:  # else logging's last resort would print what the command tells anyway
        logging.getLogger("aneuron").addHandler(logging.NullHandler())
        return None
    known = logging.getLevelNamesMapping()
    if level.upper() not in known:
        return f"ANEURON_LOG must be one of {', '.join(known)}, not {level!r}"
    logging.basicConfig(format=_LOG_FORMAT)
    logging.getLogger("aneuron").setLevel(level.upper())
    return None


if __name__ == "__main__":
    main()
