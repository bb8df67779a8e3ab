"""What the probe found, as Markdown for an issue, and as a latency profile for `sim`.

Comes in: `Findings`. Goes out: text, or a `Profile`. Pure.
"""

from __future__ import annotations

import platform
from statistics import median
from typing import TYPE_CHECKING

from aneuron import __version__
from aneuron.device.profiles import Figure, Profile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aneuron.cli.doctor.findings import Copies, Depth, Findings, Gil

__all__ = ["as_profile", "markdown"]

_IN_TIME = 0.75  # of the time of two launches: what takes longer has waited for the second
_HELD = 0.2  # a thread that counts less than this share did not run beside the call
_SOURCE = "measured by aneuron doctor --probe"


def markdown(findings: Findings, found: str) -> str:
    """Return the report.

    Args:
        findings: of the probe.
        found: what is installed, in words.
    """
    rows = [("question", "answer"), ("---", "---"), *_answers(findings)]
    lines = [
        "# aneuron doctor --probe",
        "",
        f"* aneuron {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"* {found}",
        f"* kind {findings.kind}, version `{findings.version}`",
        f"* took {findings.total_s:.0f} s, compiling included",
        "",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        "| program | launch | read | both |",
        "| --- | --- | --- | --- |",
    ]
    for one in findings.timings:
        times = (one.launch_s, one.read_s, one.total_s)
        lines.append(f"| {one.name} | {' | '.join(map(_ms, times))} |")
    return "\n".join(lines) + "\n"


def as_profile(findings: Findings, name: str) -> Profile:
    """Return the device's times as a latency profile; each figure says where it is from."""
    decodes = [one for one in findings.timings if one.is_decode]
    prefills = [one for one in findings.timings if not one.is_decode]
    least, most = decodes[0], decodes[-1]
    gap_ms = 1e3 * findings.gap_s
    row = _nothing("the programs have one number of rows")
    if most.size > least.size:
        ms = 1e3 * (most.total_s - least.total_s) / (most.size - least.size)
        row = Figure(max(0.0, ms), f"{_SOURCE}: decodes of {least.size} and {most.size} rows")
    base = 1e3 * findings.async_step_s - row.ms * (most.size - 1)
    short, long = prefills[0], prefills[-1]
    token = max(0.0, 1e3 * (long.total_s - short.total_s) / (long.size - short.size))
    prefill = max(0.0, 1e3 * short.total_s - gap_ms - token * short.size)
    tokens = f"{short.size} and {long.size} tokens"
    return Profile(
        name=name,
        decode=Figure(max(0.0, base), f"{_SOURCE}: steps launched ahead, {most.size} rows"),
        decode_row=row,
        prefill=Figure(prefill, f"{_SOURCE}: prefills of {tokens}, less the gap"),
        prefill_token=Figure(token, f"{_SOURCE}: prefills of {tokens}"),
        gap=Figure(gap_ms, f"{_SOURCE}: steps with a read each, less those launched ahead"),
        skew=_nothing("one core is measured, or ranks as one"),
    )


def _answers(findings: Findings) -> Iterator[tuple[str, str]]:
    longest = findings.longest
    early = "yes" if findings.returns_early else "**no**"
    yield (
        "does a launch return before its program ends",
        f"{early}: {_ms(longest.launch_s)} of {_ms(longest.total_s)} ({longest.name})",
    )
    yield from _of_depth(findings.depth, findings.queue_depth)
    events = findings.events
    yield (
        "events",
        f"query() says {events.before} behind a launch, {events.after} when it was read"
        if events.exist
        else events.before,
    )
    yield from _of_copies(findings.copies)
    yield from _of_gil(findings.gil)
    yield f"copy of {findings.copied_ids} ids to the host", _ms(findings.copy_s)
    small = min(findings.timings, key=lambda one: one.launch_s)
    yield "a launch, at the least", f"{_ms(small.launch_s)} ({small.name})"
    steps = f"{_ms(findings.sync_step_s)}, {_ms(findings.async_step_s)}"
    yield "a step with a read each, and launched ahead", f"{steps}: a gap of {_ms(findings.gap_s)}"


def _of_depth(depth: Depth, queue_depth: int | None) -> Iterator[tuple[str, str]]:
    told = "" if queue_depth is None else f"; the queue is said to hold {queue_depth}"
    made = len(depth.launches_s)
    if not made:
        yield "launches unread", depth.refusal
        return
    refused = f", then {depth.refusal}" if depth.refusal else ", none refused"
    yield "launches unread", f"{made} made{refused}{told}"
    yield (
        "seconds of a launch among them",
        f"{_ms(median(depth.launches_s))} in the middle, {_ms(max(depth.launches_s))} at most",
    )
    wrong = [f"launch {at}: {read}" for at, read in enumerate(depth.reads, 1) if read != "right"]
    right = "all are right" if depth.can_tell else "all look right, but the ids repeat"
    yield "their ids, read at last", "; ".join(wrong) or right


def _of_copies(copies: Copies) -> Iterator[tuple[str, str]]:
    both = f"of {_ms(copies.both_s)} for both"
    for question, first_s in (
        ("do ids come while the next launch runs", copies.first_s),
        ("do they by a blocking copy", copies.plain_s),
    ):
        if first_s is not None:
            answer = "yes" if first_s < _IN_TIME * copies.both_s else "**no**"
            yield question, f"{answer}: {_ms(first_s)} {both}"
    if copies.told or copies.queued_s is not None:
        yield "queueing a copy to the host", copies.told or _ms(copies.queued_s or 0.0)


def _of_gil(gil: Gil) -> Iterator[tuple[str, str]]:
    for name, share in (("read", gil.read), ("launch", gil.launch)):
        if share is None:
            answer = "too short to tell"
        else:
            answer = f"{'yes' if share > _HELD else '**no**'}: a thread counts at {share:.0%}"
        yield f"does a {name} let the GIL go", answer


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _nothing(why: str) -> Figure:
    return Figure(0.0, f"0: {why}", is_inferred=True)
