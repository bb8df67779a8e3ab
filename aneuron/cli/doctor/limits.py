"""How much of a machine this process may use: cores and memory, with a container's limits.

Comes in: /proc and /sys of Linux, as far as they are there. Goes out: numbers, or None. Both
versions of control groups are read. Texts are parsed by pure functions.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Memory",
    "Processor",
    "core_quota",
    "memory",
    "parse_cpuinfo",
    "parse_limit",
    "parse_meminfo",
    "parse_quota",
    "processor",
    "usable_cores",
]

_CGROUP = Path("/sys/fs/cgroup")
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
    if (text := _read(_CGROUP / "cpu.max")) is not None:
        return parse_quota(text)
    quota = _read(_CGROUP / "cpu/cpu.cfs_quota_us")
    period = _read(_CGROUP / "cpu/cpu.cfs_period_us")
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
    limit = parse_limit(_first(_CGROUP / "memory.max", _CGROUP / "memory/memory.limit_in_bytes"))
    used = parse_limit(_first(_CGROUP / "memory.current", _CGROUP / "memory/memory.usage_in_bytes"))
    if limit is not None and total is not None and limit >= total:
        limit = None
    left = limit - used if limit is not None and used is not None else None
    known = [one for one in (available, left) if one is not None]
    return Memory(total, limit, max(0, min(known)) if known else None)


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


def _first(*paths: Path) -> str | None:
    return next((text for path in paths if (text := _read(path)) is not None), None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return None
