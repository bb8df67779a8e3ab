"""What `aneuron doctor --probe` finds out of a Neuron device. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Copies", "Depth", "Events", "Findings", "Gil", "Timing"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians of one program, in seconds.

    Attributes:
        name: of it, such as `decode[8 rows]`.
        size: rows of a decode, tokens of a prefill.
        is_decode: which of the two it is.
        launch_s: until the launch returned.
        read_s: until its ids were on the host after that.
    """

    name: str
    size: int
    is_decode: bool
    launch_s: float
    read_s: float

    @property
    def total_s(self) -> float:
        """Seconds of both."""
        return self.launch_s + self.read_s


@dataclass(frozen=True, slots=True)
class Gil:
    """How fast a thread of Python counted beside a call, as a share of what it does alone.

    Attributes:
        read: beside a blocking read; None if that is too short.
        launch: beside a launch, likewise.
    """

    read: float | None
    launch: float | None


@dataclass(frozen=True, slots=True)
class Events:
    """What events are there.

    Attributes:
        exist: whether the runtime has them.
        before: what `query()` said right behind a launch; why not, if it did not.
        after: what it said when that had been read.
    """

    exist: bool
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Copies:
    """How ids come to the host while another launch runs; seconds from behind the second launch.

    Attributes:
        first_s: until the ids of the first were there, as the adapter reads them.
        both_s: until those of the second were, too.
        plain_s: the first's again, by a blocking copy; None if reads are that already.
        queued_s: what it takes to queue a copy behind a launch; likewise.
        told: what went wrong with those two; "" if nothing did.
    """

    first_s: float
    both_s: float
    plain_s: float | None = None
    queued_s: float | None = None
    told: str = ""


@dataclass(frozen=True, slots=True)
class Depth:
    """What came of launches that nobody read, each fed by the one before.

    Attributes:
        launches_s: seconds of each launch that was made.
        refusal: what the launch behind them raised; "" if none did.
        reads: of each, in order: "right", "other ids", or what its read raised.
        can_tell: whether the right ids of any two launches differ, so that one in the place of
            another would show.
    """

    launches_s: tuple[float, ...]
    refusal: str
    reads: tuple[str, ...]
    can_tell: bool


@dataclass(frozen=True, slots=True)
class Findings:
    """All that was found out.

    Attributes:
        kind, version: of the runtime.
        queue_depth: that it says; None if it does not.
        timings: of each program.
        sync_step_s: a decode of the most rows, each read before the next is launched.
        async_step_s: the same with one launched ahead.
        copy_s: reading ids, long after their program ended.
        copied_ids: how many they are.
        gil, events, copies, depth: see there.
        total_s: that it took, compiling included.
    """

    kind: str
    version: str
    queue_depth: int | None
    timings: tuple[Timing, ...]
    sync_step_s: float
    async_step_s: float
    copy_s: float
    copied_ids: int
    gil: Gil
    events: Events
    copies: Copies
    depth: Depth
    total_s: float

    @property
    def longest(self) -> Timing:
        """The program whose launches tell most: of traced programs a prefill is always read."""
        told = [one for one in self.timings if one.is_decode or self.kind == "native"]
        return max(told, key=lambda one: one.total_s)

    @property
    def returns_early(self) -> bool:
        """Whether a launch returns before its program has ended."""
        return self.longest.launch_s < self.longest.read_s

    @property
    def gap_s(self) -> float:
        """Seconds that a step costs beyond its program when the host waits for it."""
        return max(0.0, self.sync_step_s - self.async_step_s)
