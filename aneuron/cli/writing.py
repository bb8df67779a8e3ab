"""Whether a file can be written, found out before what goes into it is measured."""

from __future__ import annotations

import os
from pathlib import Path

from aneuron.errors import ConfigError

__all__ = ["check_writable"]


def check_writable(path: Path) -> None:
    """Find out whether a file can be written, and leave it as it is.

    Raises:
        ConfigError: it cannot.
    """
    try:
        file = Path(os.path.realpath(path))  # where a link points to
        is_new = not file.exists()
        if is_new or not (file.is_fifo() or file.is_char_device()):  # a pipe may block
            file.open("ab").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
