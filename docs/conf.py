from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
# The reference imports the package from the checkout. Its public names need neither torch nor
# transformers (tests/test_public.py), so neither is installed here, and nothing is mocked.
sys.path.insert(0, str(ROOT))

_project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

project = _project["name"]
release = version = _project["version"]
author = "the aneuron authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "py:obj"  # `names` in docstrings link to what they name, where that is here
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [
    (f"Raises ({where})", "params_style")
    for where in ("from iterating", "from iterating and awaiting alike")
]
python_use_unqualified_type_names = True

SECTION = re.compile(r"[A-Z]\w*( \(.*\))?:$")
TICKED = re.compile(r"(?<![`:])`([^`]+)`(?!`)")
NAME = re.compile(r"[A-Za-z_][\w.]*(\(\))?")
MADE_BY_US = {"aneuron.CompletionStream", "aneuron.DeviceFuture", "aneuron.TokenStream"}


def mark_code(_app: Sphinx, what: str, _name: str, _of: Any, _opts: Any, lines: list[str]) -> None:
    """Make reST of a docstring: what is indented, or in backticks and no name, is code."""
    marked = ["..", ""] if what == "property" else []  # else what is before a colon is its type
    text, in_block = "", False  # the last line of text, and whether it is indented
    for line in lines:
        if line.strip():
            if line.startswith("    ") and not in_block and not SECTION.match(text):
                marked += ["::", ""]
            in_block = line.startswith("    ")
            text = text if in_block else line
        marked.append(line)
    lines[:] = TICKED.sub(_as_code, "\n".join(marked)).split("\n")


def _as_code(match: re.Match[str]) -> str:
    return match[0] if NAME.fullmatch(match[1]) else f"``{match[1]}``"


def hide_init(_app: Sphinx, _what: str, name: str, of: Any, *_: Any) -> tuple[str, str] | None:
    """Leave out the arguments of what users do not make themselves."""
    return ("", "") if name in MADE_BY_US or getattr(of, "_is_protocol", False) else None


def find_public(app: Sphinx, env: Any, node: Any, content: Any) -> Any:
    """Resolve a class by the module that defines it to its public name, `aneuron.Engine`."""
    target = node.get("reftarget", "")
    if not target.startswith("aneuron."):
        return None
    domain, name = env.domains["py"], target.rsplit(".", 1)[1]
    for module in ("aneuron", "aneuron.testing", "aneuron.server"):
        public = f"{module}.{name}"
        if public != target and public in domain.objects:
            at = node["refdoc"]
            return domain.resolve_xref(env, at, app.builder, "obj", public, node, content)
    return None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", mark_code, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", hide_init)
    app.connect("missing-reference", find_public)
