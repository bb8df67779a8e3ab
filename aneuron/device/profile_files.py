"""Latency profiles in files: what `aneuron doctor --probe --profile` writes, and `sim` plays.

Comes in: a JSON file, or a profile. Goes out: the other one. Every field is checked, and named
where it is wrong.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from aneuron.device.profiles import FILE_SUFFIX, Figure, Profile
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_writable", "load_profile", "save_profile"]

_NEEDED = ("decode", "decode_row", "prefill_token", "gap", "skew")
_FIGURES = (*_NEEDED, "prefill")
_PARTS = {"ms", "source", "is_inferred"}


def load_profile(path: Path, *, param: str = "profile") -> Profile:
    """Return the profile that a file holds.

    Raises:
        ConfigError: it cannot be read, or a field is wrong; `param` is the setting that named it.
    """
    try:
        told = json.loads(path.read_bytes())
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"cannot read the latency profile {path}: {why}", param=param) from error
    except ValueError as error:  # no JSON, or no text at all
        message = f"the latency profile {path} is no JSON: {error}"
        raise ConfigError(message, param=param) from error
    try:
        return _profile(told, path.stem)
    except ValueError as error:
        raise ConfigError(f"the latency profile {path}: {error}", param=param) from error


def check_writable(path: Path) -> None:
    """Find out whether a profile can be written, before it takes minutes to measure.

    Raises:
        ConfigError: it cannot, or its name is none that `sim` takes.
    """
    if path.suffix != FILE_SUFFIX:
        raise ConfigError(f"the profile's name must end in {FILE_SUFFIX}", param="profile")
    if not path.parent.is_dir() or path.is_dir():
        what = path if path.is_dir() else path.parent
        raise ConfigError(f"cannot write the profile {path}: look at {what}", param="profile")


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile to a file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(json.dumps(asdict(profile), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"cannot write the profile {path}: {why}", param="profile") from error


def _profile(told: Any, stem: str) -> Profile:
    if not isinstance(told, dict):
        raise ValueError("it does not hold an object")  # noqa: TRY004  (of a file, like all)
    name = told.get("name", stem)
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be a text, not {name!r}")
    if unknown := sorted(set(told) - {"name", *_FIGURES}):
        known = ", ".join(("name", *_FIGURES))
        raise ValueError(f"unknown field {unknown[0]!r}; known are {known}")
    if missing := [one for one in _NEEDED if one not in told]:
        raise ValueError(f"{missing[0]} is missing")
    figures = {one: _figure(one, told[one]) for one in _NEEDED}
    prefill = told.get("prefill")
    return Profile(
        name=name, prefill=None if prefill is None else _figure("prefill", prefill), **figures
    )


def _figure(name: str, told: Any) -> Figure:
    if not isinstance(told, dict):
        raise ValueError(f"{name} must be an object, not {told!r}")  # noqa: TRY004  (likewise)
    if unknown := sorted(set(told) - _PARTS):
        raise ValueError(f"unknown field {name}.{unknown[0]}; known are ms, source, is_inferred")
    ms = told.get("ms")
    if isinstance(ms, bool) or not isinstance(ms, int | float) or not 0 <= ms < math.inf:
        raise ValueError(f"{name}.ms must be a number from 0, not {ms!r}")
    source = told.get("source", "")
    if not isinstance(source, str):
        raise ValueError(f"{name}.source must be a text, not {source!r}")  # noqa: TRY004
    is_inferred = told.get("is_inferred", False)
    if not isinstance(is_inferred, bool):
        raise ValueError(f"{name}.is_inferred must be true or false")  # noqa: TRY004
    return Figure(float(ms), source, is_inferred)
