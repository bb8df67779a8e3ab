"""What a process may use of its machine: processor, cores, memory, and limits of containers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aneuron.device import limits
from aneuron.device.cpu import CpuDevice
from aneuron.models.torch_model import default_threads

if TYPE_CHECKING:
    from pathlib import Path


def test_cpuinfo_is_read() -> None:
    text = "processor\t: 0\nmodel name\t: One\nflags\t\t: fpu avx2\n\nmodel name : Two\nflags : x\n"
    assert limits.parse_cpuinfo(text) == limits.Processor("One", frozenset({"fpu", "avx2"}))
    arm = limits.parse_cpuinfo("Features\t: fp asimd bf16\n")
    assert arm == limits.Processor(None, frozenset({"fp", "asimd", "bf16"}))
    assert limits.parse_cpuinfo("") == limits.Processor()


@pytest.mark.parametrize(
    ("text", "cores"),
    [("200000 100000", 2.0), ("max 100000", None), ("-1 100000", None), ("", None), ("1 0", None)],
)
def test_quotas_are_read(text: str, cores: float | None) -> None:
    assert limits.parse_quota(text) == cores


@pytest.mark.parametrize(
    ("text", "limit"),
    [("1000\n", 1000), ("max", None), ("9223372036854771712", None), (None, None), ("", None)],
)
def test_limits_are_read(text: str | None, limit: int | None) -> None:
    assert limits.parse_limit(text) == limit


def test_meminfo_is_read() -> None:
    text = "MemTotal:       2048 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\nHugePages_Total: 0\n"
    assert limits.parse_meminfo(text) == (2048 * 1024, 1024 * 1024)
    assert limits.parse_meminfo("nonsense") == (None, None)


GROUPS = {
    1: ("memory/{}memory.limit_in_bytes", "memory/{}memory.usage_in_bytes", "cpu/{}cpu.cfs_{}_us"),
    2: ("{}memory.max", "{}memory.current", "{}cpu.max"),
}
OWN = {
    1: "9:name=systemd:/x\n4:memory:/outer/inner\n3:cpuacct,cpu:/outer/inner\n0::/\n",
    2: "0::/outer/inner\n",
}


def put(top: Path, version: int, group: str, *, limit: object, used: int, quota: object) -> None:
    """Write what a control group says, its name ending in a slash, or empty."""
    limit_name, used_name, quota_name = GROUPS[version]
    files = {limit_name.format(group): str(limit), used_name.format(group): str(used)}
    if version == 1:
        files[quota_name.format(group, "quota")] = str(quota)
        files[quota_name.format(group, "period")] = "100000"
    else:
        files[quota_name.format(group)] = f"{quota} 100000"
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)


@pytest.fixture(name="top")
def top_fixture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of control groups; /proc/self/cgroup is a file in it, or is not there."""
    monkeypatch.setattr(limits, "_CGROUP", tmp_path)
    monkeypatch.setattr(limits, "_OWN_GROUPS", tmp_path / "own")
    return tmp_path


@pytest.mark.parametrize("own", [None, "0::/../elsewhere", "4:memory:/gone\n3:cpu:/gone\n", "x"])
@pytest.mark.parametrize("version", [1, 2])
def test_both_versions_of_control_groups(top: Path, version: int, own: str | None) -> None:
    put(top, version, "", limit=1_000_000, used=400_000, quota=150_000)
    if own is not None:
        (top / "own").write_text(own)
    assert limits.core_quota() == 1.5
    told = limits.memory()
    assert (told.limit, told.free) == (1_000_000, 600_000)


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_of_nested_control_groups_counts(top: Path, version: int) -> None:
    none = 2**63 - 4096 if version == 1 else "max"
    put(top, version, "", limit=none, used=1_900_000, quota="-1" if version == 1 else "max")
    put(top, version, "outer/", limit=2_000_000, used=1_900_000, quota=150_000)
    put(top, version, "outer/inner/", limit=1_000_000, used=400_000, quota=400_000)
    put(top, version, "outer/other/", limit=5, used=5, quota=5)
    assert limits.core_quota() is None
    assert limits.memory().limit is None
    (top / "own").write_text(OWN[version])
    assert limits.core_quota() == 1.5
    told = limits.memory()
    assert (told.limit, told.free) == (1_000_000, 100_000)


def test_no_control_groups_are_no_limit(top: Path) -> None:
    assert not list(top.iterdir())
    assert limits.core_quota() is None
    assert limits.memory().limit is None


@pytest.mark.parametrize(
    ("quota", "cores", "threads"), [(None, 3, 3), (2.5, 3, 2), (0.5, 3, 1), (None, None, 8)]
)
def test_threads_are_as_many_as_may_run(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int | None, threads: int
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    monkeypatch.setattr(limits, "core_quota", lambda: quota)
    monkeypatch.setattr(limits, "usable_cores", lambda: cores)
    assert default_threads() == threads


@pytest.mark.parametrize(
    ("memory", "budget"),
    [
        (limits.Memory(2**33, 2**31, 1), 2**29),
        (limits.Memory(2**33, None, 1), 2**31),
        (limits.Memory(), 2**30),
    ],
)
def test_the_kv_pool_takes_a_quarter_of_what_there_is(
    monkeypatch: pytest.MonkeyPatch, memory: limits.Memory, budget: int
) -> None:
    monkeypatch.setattr(limits, "memory", lambda: memory)
    assert CpuDevice().memory_budget() == budget
