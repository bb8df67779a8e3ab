"""The progress bars that Hugging Face's libraries load, loaded without their advice.

Called before one of those libraries is imported, by the thread that imports it.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from importlib import import_module

__all__ = ["load_bars"]


def load_bars() -> None:
    """Load the libraries' progress bars; in a notebook they would ask for ipywidgets.

    None of them is ever drawn here, so that nobody need install anything for them.
    """
    if "tqdm.auto" in sys.modules:
        return
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.filterwarnings("ignore", message="IProgress not found")
        import_module("tqdm.auto")
