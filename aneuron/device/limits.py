"""How much of a machine this process may use: cores and memory, with a container's limits.

Comes in: /proc and /sys of Linux, as far as they are there. Goes out: numbers, or None. Both
versions of control groups are read, those around this process's own included: the least counts.
Texts are parsed by pure functions.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Memory",
    "Processor",
    "core_quota",
    "memory",
    "parse_cpuinfo",
    "parse_groups",
    "parse_limit",
    "parse_meminfo",
    "parse_quota",
    "processor",
    "usable_cores",
]

_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_NO_LIMIT = 2**60  # version 1 says a number as large as this where there is none


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor's name and what it can do; None where nobody tells."""

    model: str | None = None
    flags: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the machine, of the container if it has a limit, and what is left of the lesser."""

    total: int | None = None
    limit: int | None = None
    free: int | None = None


def processor() -> Processor:
    """Return what the processor is."""
    return parse_cpuinfo(_read(Path("/proc/cpuinfo")) or "")


def parse_cpuinfo(text: str) -> Processor:
    """Return what /proc/cpuinfo says of its first processor."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, mark, value = line.partition(":")
        if mark:
            found.setdefault(key.strip(), value.strip())
    flags = found.get("flags", found.get("Features"))
    return Processor(found.get("model name"), None if flags is None else frozenset(flags.split()))


def usable_cores() -> int | None:
    """Return on how many cores this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def core_quota() -> float | None:
    """Return how many cores' worth of time the container has; None is no limit."""
    quotas = (_quota(folder) for folder in _groups("cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path) -> float | None:
    if (text := _read(folder / "cpu.max")) is not None:
        return parse_quota(text)
    quota, period = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return None if quota is None or period is None else parse_quota(f"{quota} {period}")


def parse_quota(text: str) -> float | None:
    """Return cores' worth of time, of a text with quota and period; None is no limit."""
    try:
        quota, period = text.split()
        found = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max" is no number
        return None
    return found if found > 0 else None


def memory() -> Memory:
    """Return how much memory there is."""
    total, available = parse_meminfo(_read(Path("/proc/meminfo")) or "")
    if total is None:
        try:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):  # not a POSIX system
            total = None
    limits, left = [], [] if available is None else [available]
    for folder in _groups("memory"):
        limit = parse_limit(_first(folder / "memory.max", folder / "memory.limit_in_bytes"))
        used = parse_limit(_first(folder / "memory.current", folder / "memory.usage_in_bytes"))
        if limit is not None and (total is None or limit < total):
            limits.append(limit)
            left += [] if used is None else [limit - used]
    return Memory(total, min(limits, default=None), max(0, min(left)) if left else None)


def parse_meminfo(text: str) -> tuple[int | None, int | None]:
    """Return total and available bytes, of /proc/meminfo."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            found[words[0].rstrip(":")] = int(words[1]) * 1024
    return found.get("MemTotal"), found.get("MemAvailable")


def parse_limit(text: str | None) -> int | None:
    """Return the bytes of a control group's file; None is no limit."""
    text = (text or "").strip()
    if not text.isdecimal() or int(text) >= _NO_LIMIT:
        return None
    return int(text)


def _groups(controller: str) -> Iterator[Path]:
    """Return the folders of this process's control groups, from its own to the outermost.

    A container sees its own group as the outermost, whatever the path in `_OWN_GROUPS` says.
    """
    tops = {"": _CGROUP, controller: _CGROUP / controller}
    paths = parse_groups(_read(_OWN_GROUPS) or "")
    for name, top in tops.items():
        inner = paths.get(name, "").strip("/")
        while inner and ".." not in inner.split("/"):
            yield top / inner
            inner = inner.rpartition("/")[0]
        yield top


def parse_groups(text: str) -> dict[str, str]:
    """Return the paths of /proc/self/cgroup by controller; by "" that of version 2."""
    found = {}
    for line in text.splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        found.update(dict.fromkeys(names.split(","), path))
    return found


def _first(*paths: Path) -> str | None:
    return next((text for path in paths if (text := _read(path)) is not None), None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return None
