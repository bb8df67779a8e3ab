"""`aneuron doctor --probe` on played runtimes, whose times are modelled far above the noise.

A busy machine makes everything slower, never faster: what is measured is at least what was
modelled.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest

from aneuron import ConfigError
from aneuron.cli.doctor import probe as probe_module
from aneuron.cli.doctor.findings import Copies, Depth, Events, Findings, Gil, Timing
from aneuron.cli.doctor.probe import probe
from aneuron.cli.doctor.report import as_profile, markdown
from aneuron.cli.doctor.rig import Rig, Size
from aneuron.device.neuron import NeuronDevice
from aneuron.device.neuron import device as device_module
from aneuron.device.profile_files import load_profile, save_profile
from aneuron.errors import DeviceError, DeviceLost
from aneuron.testing.fakes import FakeCompiler, FakeNative, FakeNxd, Fault, Times, Violation
from tests.neuron.test_native_events import Early, Without

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

SMALL = Size(
    hidden=32, intermediate=64, num_layers=1, num_heads=4, vocab=512, max_model_len=64,
    tokens=(16, 64), rows=2,
)  # fmt: skip
TIMES = Times(
    enqueue_s=0.001, decode_s=0.04, decode_row_s=0.01, prefill_s=0.01, prefill_token_s=3e-3,
    read_s=0.004,
)  # fmt: skip
EARLY = "does a launch return before its program ends"
FULL = "nrt status 7"
QUICK: dict[str, Any] = {"size": SMALL, "repeats": 2, "steps": 3}


def silent(_stage: str, _done: int, _total: int | None) -> None:
    """Told how far it is."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANEURON_CACHE_DIR", str(tmp_path / "cache"))


def native(made: list[Any], kind: Callable[..., Any] = FakeNative, **options: Any) -> NeuronDevice:
    def connect() -> Any:
        made.append(kind(times=TIMES, queue_depth=3, **options))
        return made[-1]

    return NeuronDevice(connect, kind="native")


@pytest.fixture
def rig_of() -> Iterator[Callable[..., Rig]]:
    """Make a rig on a device that is given back at the end."""
    with ExitStack() as stack:

        def make(kind: Callable[..., Any], **options: Any) -> Rig:
            device = native([], kind, **options)
            stack.callback(device.disconnect)
            return Rig(device, SMALL, silent)

        yield make


def nxd(made: list[Any], **options: Any) -> NeuronDevice:
    def connect() -> Any:
        made.append(FakeNxd(times=TIMES, **options))
        return made[-1]

    return NeuronDevice(connect, kind="nxd", compiler=FakeCompiler())


@pytest.mark.timeout(60)
def test_native_launches_are_measured() -> None:
    made: list[Any] = []
    told = probe(native(made), silent, **QUICK)
    assert (told.kind, told.version, told.queue_depth) == ("native", "fake", 3)
    assert told.returns_early
    one, two, short, long = told.timings
    assert [one.size, two.size, short.size, long.size] == [1, 2, 16, 64]
    for timing in told.timings:
        assert timing.launch_s >= TIMES.enqueue_s
    assert one.total_s >= TIMES.decode(1)
    assert two.total_s >= TIMES.decode(2)
    assert long.total_s >= TIMES.prefill(64)
    assert told.sync_step_s >= TIMES.decode(2) + TIMES.read_s
    assert told.async_step_s >= TIMES.decode(2)
    assert told.copy_s >= TIMES.read_s
    assert told.events == Events(False, "this runtime has no events", "this runtime has no events")
    assert told.gil.read is not None
    assert told.gil.read > 0.05  # a read that holds the GIL gives nothing
    depth = told.depth
    assert len(depth.launches_s) == 3
    assert "nrt status 7" in depth.refusal
    assert depth.reads == ("right",) * 3
    assert depth.can_tell
    (fake,) = made
    assert not fake.violations
    assert fake.core.is_closed


@pytest.mark.timeout(60)
def test_traced_launches_are_measured() -> None:
    made: list[Any] = []
    told = probe(nxd(made), silent, **QUICK)
    assert (told.kind, told.version, told.queue_depth) == ("nxd", "fake-1", None)
    assert told.returns_early
    assert [one.size for one in told.timings] == [2, 16, 64]
    assert told.longest.is_decode  # a prefill is read before its launch returns
    assert told.async_step_s >= TIMES.decode(2)
    assert told.depth.reads[:2] == ("right", "right")
    assert told.depth.can_tell
    assert not made[0].violations
    assert made[0].core.is_closed


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [native, nxd])
def test_launches_that_block_are_told(make: Callable[..., NeuronDevice]) -> None:
    told = probe(make([], true_async=False), silent, **QUICK)
    assert not told.returns_early
    assert told.longest.launch_s >= TIMES.decode(2)
    assert "**no**" in markdown(told, "")


class Holding(FakeNative):
    """A runtime whose reads hold the GIL, as a kernel written in Python would."""

    def to_host(self, tensor: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        host = super().to_host(tensor, non_blocking=non_blocking)
        ctypes.PyDLL(None).usleep(400_000)
        return host


def test_a_read_that_holds_the_gil_is_told(rig_of: Callable[..., Rig]) -> None:
    rig = rig_of(Holding)
    ids = rig.begin(2)
    launched = rig.decode(0, 2, ids)
    launched_too = rig.decode(0, 2, ids)
    _ = launched_too.read()  # both have ended: what is left of the first is its copy
    _, count, took_s = probe_module._counted(launched.read)
    assert took_s >= 0.4
    _, alone, alone_s = probe_module._counted(lambda: probe_module._NEVER.wait(0.1))
    assert count / took_s < 0.5 * alone / alone_s


class Event:
    """An event as TorchNeuron's, which says whether it is over."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def query(self) -> bool:
        return bool(self.event.last.entry.has_ended)


class WithEvents(FakeNative):
    """A runtime whose events can be asked."""

    def record_event(self) -> Any:
        return Event(super().record_event())

    def synchronize(self, event: Any) -> None:
        super().synchronize(event.event)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (WithEvents, ("False", "True")),
        (FakeNative, ("the event has no query()", "the event has no query()")),
    ],
)
def test_events_are_asked(rig_of: Callable[..., Rig], kind: Any, told: tuple[str, str]) -> None:
    rig = rig_of(kind, has_events=True)
    assert probe_module._events(rig, 2) == Events(True, *told)


def test_whether_a_read_waits_for_the_next_launch_is_measured(rig_of: Callable[..., Rig]) -> None:
    lite = probe_module._copies(rig_of(FakeNative), 2, 3)
    assert lite.first_s < 0.75 * lite.both_s
    assert (lite.plain_s, lite.queued_s) == (None, None)
    events = probe_module._copies(rig_of(FakeNative, has_events=True, index=1), 2, 3)
    assert events.first_s < 0.75 * events.both_s
    assert events.plain_s is not None
    assert events.plain_s > 0.75 * events.both_s  # work is done in order
    assert events.queued_s is not None
    assert events.queued_s < 0.5 * events.first_s


@pytest.mark.parametrize(
    ("kind", "told"),
    [(Early, "ValueError: behind its event, the"), (Without, "NotImplementedError: non_blocking")],
)
def test_queued_copies_that_do_not_work_are_a_finding(
    rig_of: Callable[..., Rig], kind: Any, told: str
) -> None:
    rig = rig_of(kind, has_events=True)
    found = probe_module._copies(rig, 2, 2)
    assert found.told.startswith(told)
    assert f"| queueing a copy to the host | {told}" in markdown(findings(copies=found), "")


class Overwriting(FakeNative):
    """A runtime that gives a newer launch's ids for an older one that was not read in time."""

    def to_host(self, tensor: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        host = super().to_host(tensor, non_blocking=non_blocking)
        return (host + 1) % SMALL.vocab if self.core.in_flight >= 2 else host


def test_ids_of_another_launch_are_told(rig_of: Callable[..., Rig]) -> None:
    rig = rig_of(Overwriting)
    depth = probe_module._depth(rig, 2)
    assert "other ids" in depth.reads
    assert depth.reads[-1] == "right"


def test_a_program_that_fails_is_a_typed_error_and_gives_the_cores_back() -> None:
    made: list[Any] = []
    with pytest.raises(DeviceError, match="101"):
        probe(native(made, faults=[Fault(101, step=3)]), silent, **QUICK)
    assert made[0].core.is_closed


@pytest.mark.parametrize(
    ("step", "limit_s", "what"), [(1, 0.2, "launches and reads"), (15, 4.0, "chains of decodes")]
)
def test_what_hangs_is_a_typed_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, step: int, limit_s: float, what: str
) -> None:
    made: list[Any] = []
    device = native(made)
    monkeypatch.setattr(device_module, "CLOSE_S", 0.2)

    def begun(stage: str, _done: int, _total: int | None) -> None:
        if stage == "measure":
            monkeypatch.setattr(probe_module, "MEASURE_S", limit_s)
            made[0].core.inject(Fault("hang", step=step))

    try:
        with pytest.raises(DeviceLost, match=f"the probe hangs in {what}") as caught:
            probe(device, begun, **QUICK)
        assert caught.value.device == "neuron"
    finally:
        made[0].core.let_go()
        with suppress(Violation):  # of what the thread that was left behind has launched
            made[0].close()


def test_a_model_that_does_not_compile_is_a_finding_too() -> None:
    compiler = FakeCompiler(faults=[Fault("compile")])
    device = NeuronDevice(FakeNxd, kind="nxd", compiler=compiler)
    with pytest.raises(ConfigError, match="NCC_EBVF030"):
        probe(device, silent, **QUICK)


# ── what goes out ───────────────────────────────────────────────────────────────────────


def findings(**changes: Any) -> Findings:
    given: dict[str, Any] = {
        "kind": "native",
        "version": "torch-2.12",
        "queue_depth": 8,
        "timings": (
            Timing("decode[1 rows]", 1, True, 0.0001, 0.0064),
            Timing("decode[8 rows]", 8, True, 0.0001, 0.0099),
            Timing("prefill[128 tokens]", 128, False, 0.0001, 0.0249),
            Timing("prefill[512 tokens]", 512, False, 0.0001, 0.0441),
        ),
        "sync_step_s": 0.0104,
        "async_step_s": 0.01,
        "copy_s": 0.00005,
        "copied_ids": 8,
        "gil": Gil(0.97, None),
        "events": Events(True, "False", "True"),
        "copies": Copies(0.0441, 0.0881, 0.0881, 0.00002),
        "depth": Depth((0.0001,) * 8, f"RuntimeError: {FULL}", ("right",) * 8, True),
        "total_s": 312.0,
    }
    return Findings(**{**given, **changes})


def test_a_report_answers_every_open_question() -> None:
    text = markdown(findings(), "TorchNeuron (torch-neuronx 2.12), 16 devices")
    for line in (
        "* TorchNeuron (torch-neuronx 2.12), 16 devices",
        "* took 312 s, compiling included",
        f"| {EARLY} | yes: 0.1 ms of 44.2 ms (prefill[512 tokens]) |",
        f"| launches unread | 8 made, then RuntimeError: {FULL}; the queue is said to hold 8 |",
        "| their ids, read at last | all are right |",
        "| events | query() says False behind a launch, True when it was read |",
        "| do ids come while the next launch runs | yes: 44.1 ms of 88.1 ms for both |",
        "| do they by a blocking copy | **no**: 88.1 ms of 88.1 ms for both |",
        "| queueing a copy to the host | 0.02 ms |",
        "| does a read let the GIL go | yes: a thread counts at 97% |",
        "| does a launch let the GIL go | too short to tell |",
        "| copy of 8 ids to the host | 0.05 ms |",
        "| a launch, at the least | 0.1 ms (decode[1 rows]) |",
        "| a step with a read each, and launched ahead | 10.4 ms, 10 ms: a gap of 0.4 ms |",
        "| decode[8 rows] | 0.1 ms | 9.9 ms | 10 ms |",
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"depth": Depth((0.1,) * 3, "", ("other ids", "right", "RuntimeError: x"), True)},
            "launch 1: other ids; launch 3: RuntimeError: x",
        ),
        ({"depth": Depth((0.1,), "", ("right",), False)}, "all look right, but the ids repeat"),
        ({"depth": Depth((0.1,), "", ("right",), True)}, "1 made, none refused"),
        ({"depth": Depth((), "RuntimeError: no", (), True)}, "| RuntimeError: no |"),
        ({"copies": Copies(0.8, 1.0)}, "launch runs | **no**: 800 ms of 1e+03 ms for both |"),
        ({"gil": Gil(0.01, 0.5)}, "**no**: a thread counts at 1%"),
        ({"events": Events(False, "it has none", "")}, "| events | it has none |"),
    ],
)
def test_a_report_says_what_is_wrong(changes: dict[str, Any], said: str) -> None:
    assert said in markdown(findings(**changes), "")


def test_a_profile_is_what_was_measured(tmp_path: Path) -> None:
    profile = as_profile(findings(), "mine")
    assert profile.decode_row.ms == pytest.approx((10.0 - 6.5) / 7)
    assert profile.decode_s(8) == pytest.approx(0.010)  # launched ahead
    assert profile.gap.ms == pytest.approx(0.4)
    assert profile.prefill_token.ms == pytest.approx((44.2 - 25.0) / 384)
    assert profile.prefill_s(128) == pytest.approx(0.025 - 0.0004)
    assert all("measured" in figure.source for _, figure in profile.figures() if figure.ms)
    assert profile.skew.is_inferred
    save_profile(profile, tmp_path / "chip.json")
    assert load_profile(tmp_path / "chip.json") == profile


def test_a_profile_of_one_number_of_rows_says_so() -> None:
    told = findings(kind="nxd")
    profile = as_profile(findings(kind="nxd", timings=told.timings[1:]), "mine")
    assert (profile.decode_row.ms, profile.decode_row.is_inferred) == (0.0, True)
    assert profile.decode.ms == pytest.approx(10.0)
