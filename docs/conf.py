from __future__ import annotations

import tomllib
from pathlib import Path

_project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]

project = _project["name"]
release = version = _project["version"]
author = "the aneuron authors"

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
