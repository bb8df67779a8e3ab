"""The timeline: mostly from records made by hand, so that every time in it is known."""

from __future__ import annotations

import asyncio
import json
import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aneuron.errors import DeviceError
from aneuron.plans import Break, BreakReason, StepRecord
from aneuron.testing import Fault, count_engine
from aneuron.timeline import RING_STEPS, Gap, Timeline
from aneuron.timeline.spans import known_times
from tests.support import await_it, both_schedulings, start

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

PROGRAM_S, TURN_S = 0.0025, 0.0001
SVG = "{http://www.w3.org/2000/svg}"
HOST = ("begun_s", "scheduled_s", "prepared_s", "launched_s")
OUTPUT = ("read_s", "applied_s", "detokenized_s", "delivered_s")
STAGES = {"schedule", "prepare", "launch", "apply", "detokenize", "deliver"}


def record(step_id: int, requests: Sequence[int] = (1, 2), *, is_decode: bool = True) -> StepRecord:
    tokens = np.ones(len(requests), np.int32)
    return StepRecord(step_id, is_decode, np.asarray(requests, np.int64), tokens)


def fill(one: StepRecord, begun_s: float, start_s: float, program_s: float = PROGRAM_S) -> float:
    """Give a step all of its times; return when its program ended."""
    for number, name in enumerate(HOST):
        setattr(one, name, begun_s + number * TURN_S)
    one.device_start_s, one.device_end_s = start_s, start_s + program_s
    for number, name in enumerate(OUTPUT, 1):
        setattr(one, name, one.device_end_s + number * TURN_S)
    return one.device_end_s


def flow(num_steps: int, *, gap_s: float = 0.0, keep: int = RING_STEPS) -> Timeline:
    """Steps that each start `gap_s` after the one before has ended; the first is a prefill."""
    timeline = Timeline(keep)
    end_s = 1000.0
    for step_id in range(num_steps):
        one = record(step_id, is_decode=step_id > 0)
        one.is_async = step_id > 1
        timeline.add(one)
        start_s = end_s + gap_s if step_id else end_s
        end_s = fill(one, start_s - PROGRAM_S, start_s)
        timeline.finish(one)
    return timeline


def eventful() -> Timeline:
    """A break, a rest, a step that failed, one that is being planned, one that hangs."""
    timeline = flow(6, gap_s=0.0004)
    broken = record(6, (1, 3))
    broken.is_async = False
    timeline.add(broken)
    end_s = timeline.steps[5].device_end_s
    fill(broken, end_s - 0.001, end_s + 0.0009)
    broken.breaks = (
        Break(BreakReason.COMPOSITION_CHANGED, broken.scheduled_s + 1e-5, end_s + 0.0002),
        Break(BreakReason.REORDERED, end_s + 0.0003, end_s + 0.0003),
    )
    broken.prepared_s, broken.launched_s = end_s + 0.0005, end_s + 0.0008
    timeline.finish(broken)
    timeline.rest()
    failed = record(7, (4,), is_decode=False)
    timeline.add(failed)
    failed.begun_s = broken.device_end_s + 60.0
    failed.scheduled_s = failed.begun_s + TURN_S
    timeline.finish(failed)
    resumed = record(8, (4,), is_decode=False)
    timeline.add(resumed)
    fill(resumed, failed.begun_s + 0.001, failed.begun_s + 0.002)
    timeline.finish(resumed)
    hanging = record(9, (4,))
    timeline.add(hanging)
    hanging.begun_s, hanging.scheduled_s = resumed.device_start_s, resumed.device_start_s + TURN_S
    hanging.breaks = (Break(BreakReason.SHAPE_MISMATCH, hanging.scheduled_s, math.nan),)
    timeline.add(record(10, (4,)))
    return timeline


@pytest.fixture(params=["flow", "idle", "eventful", "one step", "nothing", "off"])
def timeline(request: pytest.FixtureRequest) -> Timeline:
    match request.param:
        case "flow":
            return flow(40)
        case "idle":
            return flow(40, gap_s=0.0004)
        case "eventful":
            return eventful()
        case "one step":
            return flow(1)
        case "nothing":
            return Timeline()
    return flow(40, gap_s=0.0004, keep=0)


# ── what is kept, and what is counted ───────────────────────────────────────────────────


def test_the_ring_keeps_the_last_steps_and_no_more() -> None:
    timeline = flow(RING_STEPS + 100)
    assert [one.step_id for one in timeline.steps] == list(range(100, RING_STEPS + 100))
    assert timeline.metrics().steps == RING_STEPS + 100


def test_what_ends_a_rest_is_forgotten_with_the_ring() -> None:
    timeline = Timeline(8)
    for step_id in range(100):
        timeline.rest()
        timeline.add(record(step_id))
    assert len(timeline._first_after_rest) == 8


def test_off_says_how_to_switch_it_on() -> None:
    off = flow(4, keep=0)
    hint = "no steps are kept: open the engine with timeline=True"
    assert hint in off.to_svg()
    assert hint in off.summary()
    for on in (flow(4), Timeline()):
        assert "timeline=True" not in on.to_svg() + on.summary()


def test_off_keeps_nothing_but_the_totals() -> None:
    off, kept = flow(40, gap_s=0.0004, keep=0), flow(40, gap_s=0.0004)
    assert off.steps == []
    assert off.idle_gaps() == []
    assert off.idle_share() == 0.0
    assert off.metrics().steps == 40
    assert off.metrics().idle_s == kept.metrics().idle_s == pytest.approx(39 * 0.0004)
    assert off.metrics().busy_s == pytest.approx(40 * PROGRAM_S)
    assert off.metrics().medians_s == {}


def test_a_step_can_be_seen_before_it_has_run() -> None:
    timeline = Timeline()
    hanging = record(3)
    timeline.add(hanging)
    hanging.begun_s, hanging.scheduled_s = 5.0, 5.1
    assert timeline.steps == [hanging]
    assert timeline.metrics().medians_s == {"schedule": pytest.approx(0.1)}
    assert timeline.metrics().steps == 0
    assert "step 3 has not run" in timeline.to_svg()
    assert "has not run" not in "".join(timeline.svg_pieces(in_flight=False))


def test_totals_and_ring_agree() -> None:
    for timeline in (flow(40), flow(40, gap_s=0.0004), eventful()):
        metrics = timeline.metrics()
        assert metrics.idle_share == pytest.approx(timeline.idle_share())
        assert metrics.busy_s + metrics.idle_s == pytest.approx(timeline.elapsed_s())


def test_idle_share_of_a_known_flow() -> None:
    assert flow(40).idle_share() == 0.0
    gaps, elapsed_s = 39 * 0.0004, 40 * PROGRAM_S + 39 * 0.0004
    timeline = flow(40, gap_s=0.0004)
    assert timeline.idle_share() == pytest.approx(gaps / elapsed_s)
    # A window counts the gaps in it, not the one before it.
    window = timeline.steps[10:20]
    assert timeline.idle_share(window) == pytest.approx(9 * 0.0004 / (10 * PROGRAM_S + 9 * 0.0004))


def test_breaks_are_counted_by_reason() -> None:
    breaks = eventful().metrics().breaks
    assert {name: entry.count for name, entry in breaks.items()} == {
        "composition_changed": 1,
        "reordered": 1,
    }
    assert breaks["composition_changed"].seconds == pytest.approx(0.0012 - TURN_S - 1e-5)
    assert breaks["reordered"].seconds == 0.0


def test_medians_are_those_of_the_stages() -> None:
    timeline = flow(9)
    medians = timeline.metrics().medians_s
    assert set(medians) == STAGES | {"program"}
    assert medians["program"] == pytest.approx(PROGRAM_S)
    assert [medians[name] for name in sorted(STAGES)] == [pytest.approx(TURN_S)] * 6


def test_a_break_is_no_host_work() -> None:
    timeline = Timeline()
    one = record(0)
    timeline.add(one)
    one.scheduled_s, one.prepared_s = 1.0, 1.5
    one.breaks = (Break(BreakReason.HOOK, 1.1, 1.4),)
    assert timeline.metrics().medians_s["prepare"] == pytest.approx(0.2)


# ── from an engine ──────────────────────────────────────────────────────────────────────


@both_schedulings
async def test_an_engine_notes_every_stage_in_order(async_scheduling: bool) -> None:
    async with count_engine(
        latency=0.002, timeline=True, async_scheduling=async_scheduling
    ) as engine:
        await asyncio.gather(*(await_it(start(engine, 10 * n, 4 + n)) for n in range(1, 5)))
        await engine.wait_idle()
        steps = engine.timeline.steps
        assert len(steps) == engine.stats().steps == engine.timeline.metrics().steps
        assert [one.step_id for one in steps] == sorted({one.step_id for one in steps})
        for one in steps:
            times = [getattr(one, name) for name in (*HOST, *OUTPUT)]
            assert times == sorted(times)
            assert one.begun_s <= one.device_start_s < one.device_end_s <= one.read_s
        breaks = engine.timeline.metrics().breaks
        assert breaks == engine.stats().breaks
        assert sum(len(one.breaks) for one in steps) == sum(b.count for b in breaks.values())
        assert engine.timeline.metrics().idle_share == pytest.approx(engine.timeline.idle_share())


async def test_the_trace_of_an_engine_that_drains_is_nested() -> None:
    pool: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 2}  # for one request
    async with count_engine(latency=0.002, timeline=True, **pool) as engine:
        prompts = [[1, 2, 3, 4, 10 * n] for n in range(1, 6)]
        streams = [engine.generate(prompt_token_ids=one, max_tokens=2) for one in prompts]
        await asyncio.gather(*map(await_it, streams))
        await engine.wait_idle()
        timeline = engine.timeline
        drains = timeline.metrics().breaks["drain"].count
        assert 1 <= drains <= 4, "at each successor, unless the step had ended before anyone looked"
        complete = events(timeline, "X")
        assert len([e for e in complete if e["name"] == "break: drain"]) == drains
        for tid in tracks(timeline):
            assert_nested([event for event in complete if event["tid"] == tid])


async def test_a_step_that_failed_shows_its_error() -> None:
    faults = [Fault(3, 1003)]  # not a number, found once it has run
    async with count_engine(latency=0.002, timeline=True, faults=faults) as engine:
        with pytest.raises(DeviceError):
            await start(engine, max_tokens=20)
        await engine.wait_idle()
        failed = [one for one in engine.timeline.steps if one.error is not None]
        assert failed[0].step_id == 3
        svg = engine.timeline.to_svg()
        title = marked(svg, "failed")[0].findtext(f"{SVG}title")
        assert title == f"step 3 failed: {failed[0].error}"


async def test_an_engine_at_rest_does_not_idle() -> None:
    async with count_engine(latency=0.002, timeline=True) as engine:
        for _ in range(2):
            await start(engine, max_tokens=3)
            await engine.wait_idle()
            await asyncio.sleep(0.2)
        timeline = engine.timeline
        rests = [gap for gap in timeline.idle_gaps() if gap.is_rest]
        assert [gap.step_id for gap in rests] == [timeline.steps[3].step_id]
        assert rests[0].seconds > 0.19
        assert timeline.metrics().idle_s < 0.1


async def test_an_engine_keeps_no_records_unless_asked() -> None:
    async with count_engine() as engine:
        await start(engine, max_tokens=3)
        await engine.wait_idle()
        assert engine.timeline.steps == []
        assert engine.timeline.metrics().steps == 3


# ── gaps ────────────────────────────────────────────────────────────────────────────────


def test_a_rest_is_not_idle() -> None:
    timeline = flow(5)
    last = timeline.steps[-1]
    timeline.rest()
    timeline.rest()
    one = record(5)
    timeline.add(one)
    fill(one, last.device_end_s + 7.0, last.device_end_s + 7.001)
    timeline.finish(one)
    assert timeline.metrics().idle_s == 0.0
    assert timeline.idle_share() == 0.0
    assert timeline.elapsed_s() == pytest.approx(6 * PROGRAM_S)
    (gap,) = timeline.idle_gaps()
    assert gap == Gap(last.device_end_s, one.device_start_s, 5, None, is_rest=True)
    later = record(6)
    timeline.add(later)
    fill(later, one.device_end_s, one.device_end_s + 0.5)
    timeline.finish(later)
    assert timeline.metrics().idle_s == pytest.approx(0.5)  # the rest was over


def test_a_rest_lasts_until_a_program_has_run() -> None:
    timeline = eventful()
    (rest,) = (gap for gap in timeline.idle_gaps() if gap.is_rest)
    assert rest.step_id == 8
    assert rest.seconds == pytest.approx(60.002)
    assert timeline.metrics().idle_s < 0.01


def test_a_gap_names_the_break_that_it_is_due_to() -> None:
    reasons = {gap.step_id: gap.reason for gap in eventful().idle_gaps()}
    assert reasons == {
        **dict.fromkeys(range(1, 6)),
        6: BreakReason.COMPOSITION_CHANGED,
        8: None,
    }


def test_a_break_that_ended_before_the_device_idled_is_not_the_cause() -> None:
    timeline = flow(3, gap_s=0.001)
    one = timeline.steps[2]
    before_s = timeline.steps[1].device_end_s
    one.breaks = (
        Break(BreakReason.HOOK, before_s - 0.002, before_s - 0.001),
        Break(BreakReason.REORDERED, before_s + 0.0005, before_s + 0.0005),
    )
    assert timeline.idle_gaps()[-1].reason is None


# ── the Chrome trace ────────────────────────────────────────────────────────────────────


def events(timeline: Timeline, phase: str) -> list[dict[str, Any]]:
    return [e for e in timeline.to_chrome_trace()["traceEvents"] if e["ph"] == phase]


def tracks(timeline: Timeline) -> dict[int, str]:
    names = [e for e in events(timeline, "M") if e["name"] == "thread_name"]
    return {e["tid"]: e["args"]["name"] for e in names}


def test_every_event_is_well_formed(timeline: Timeline) -> None:
    trace = timeline.to_chrome_trace()
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    for event in trace["traceEvents"]:
        assert event["ph"] in set("XMistf")
        assert event["name"]
        assert event["pid"] == 1
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0
        assert event["tid"] in tracks(timeline)
        assert event["cat"]
        assert ("dur" in event) is (event["ph"] == "X")
        assert event.get("dur", 0) >= 0


def test_the_first_event_is_at_zero() -> None:
    for timeline in (flow(40), eventful()):
        assert min(event["ts"] for event in events(timeline, "X")) == 0


def test_the_tracks_have_their_stages() -> None:
    timeline = flow(4)
    names = tracks(timeline)
    assert sorted(names.values()) == ["device", "launch thread", "materializer", "step loop"]
    seen: dict[str, set[str]] = {}
    for event in events(timeline, "X"):
        seen.setdefault(names[event["tid"]], set()).add(event["name"])
    assert seen == {
        "step loop": {"schedule", "prepare", "launch"},
        "launch thread": {"queued"},
        "device": {"prefill", "decode"},
        "materializer": {"apply", "detokenize", "deliver"},
    }
    assert [e["name"] for e in events(timeline, "M")].count("process_name") == 1


def test_events_say_which_step_they_belong_to() -> None:
    timeline = flow(4)
    (program,) = (e for e in events(timeline, "X") if e["tid"] == 3 and e["args"]["step"] == 2)
    assert program["args"] == {
        "step": 2,
        "kind": "decode",
        "rows": 2,
        "tokens": 2,
        "async": True,
        "request_ids": [1, 2],
    }
    assert program["dur"] == pytest.approx(PROGRAM_S * 1e6, abs=0.01)


def failed(error: str) -> Timeline:
    """Three steps that ran, the last one in vain, and one that was refused."""
    timeline = flow(3)
    timeline.steps[2].error = error
    refused = record(3)
    refused.begun_s, refused.scheduled_s = 1000.0, 1000.1
    refused.error = error
    timeline.add(refused)
    return timeline


def test_events_of_a_step_that_failed_have_its_error() -> None:
    timeline = failed("bad index")
    complete = [*events(timeline, "X"), *events(timeline, "i")]
    errors = {event["args"]["step"]: event["args"].get("error") for event in complete}
    assert errors == {0: None, 1: None, 2: "bad index", 3: "bad index"}


def test_a_break_that_outlasts_its_stage_is_cut() -> None:
    timeline = flow(2)
    one = timeline.steps[1]  # as with ranks: another one's wait went on
    start_s = one.scheduled_s + TURN_S / 4
    one.breaks = (Break(BreakReason.COMPOSITION_CHANGED, start_s, one.launched_s + TURN_S),)
    complete = events(timeline, "X")
    for tid in tracks(timeline):
        assert_nested([event for event in complete if event["tid"] == tid])
    (cut,) = (event for event in complete if event["cat"] == "break")
    assert cut["dur"] == pytest.approx(0.75 * TURN_S * 1e6, abs=0.01)
    assert cut["args"]["lasted_us"] == pytest.approx(2.75 * TURN_S * 1e6, abs=0.01)


def test_breaks_and_gaps_have_a_name_and_a_reason() -> None:
    timeline = eventful()
    names = tracks(timeline)
    breaks = [e for e in events(timeline, "X") if e["cat"] == "break"]
    assert [e["name"] for e in breaks] == ["break: composition_changed", "break: reordered"]
    assert {names[e["tid"]] for e in breaks} == {"step loop"}
    gaps = [e for e in events(timeline, "X") if e["cat"] in ("idle", "rest")]
    assert [(e["args"]["step"], e["cat"], e["args"]["reason"]) for e in gaps] == [
        *((step_id, "idle", None) for step_id in range(1, 6)),
        (6, "idle", "composition_changed"),
        (8, "rest", None),
    ]
    notes = [e["name"] for e in events(timeline, "i")]
    assert notes == ["step 7 has not run", "step 9 has not run"]  # 10 has no time at all


def test_arrows_join_the_programs_of_a_request() -> None:
    timeline = eventful()
    arrows: dict[int, list[dict[str, Any]]] = {}
    for event in timeline.to_chrome_trace()["traceEvents"]:
        if event["ph"] in "stf":
            arrows.setdefault(event["id"], []).append(event)
    # Request 3 was in one program only, and 4 in one that ran.
    assert {name: [e["ph"] for e in arrow] for name, arrow in arrows.items()} == {
        1: ["s", *"ttttt", "f"],
        2: ["s", *"tttt", "f"],
    }
    programs = {e["args"]["step"]: e for e in events(timeline, "X") if "request_ids" in e["args"]}
    for step_id, event in enumerate(arrows[1]):
        program = programs[step_id]
        assert event["tid"] == program["tid"]
        assert program["ts"] < event["ts"] < program["ts"] + program["dur"]
        assert event.get("bp") == (None if event["ph"] == "s" else "e")


def assert_nested(track: list[dict[str, Any]]) -> None:
    """Complete events of one track lie in or beside each other, or a viewer drops some."""
    open_until: list[int] = []
    for event in track:
        start = round(event["ts"] * 1e3)
        end = start + round(event["dur"] * 1e3)
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1], event
        open_until.append(end)


times = st.floats(0, 1e-3)
holes = st.sets(st.sampled_from([*HOST, *OUTPUT, "device_start_s", "device_end_s"]), max_size=3)


@st.composite
def half_filled(draw: st.DrawFn) -> list[StepRecord]:
    """Steps of two loops and a queue, each in order, with times missing here and there."""
    loop_s = device_s = output_s = draw(st.floats(0, 1e6))
    records = []
    for step_id in range(draw(st.integers(0, 6))):
        one = record(step_id, draw(st.lists(st.integers(1, 3), max_size=3, unique=True)))
        for name in HOST:
            loop_s += draw(times)
            setattr(one, name, loop_s)
        wait_s = draw(times)
        if wait_s < one.prepared_s - one.scheduled_s:
            end_s = one.scheduled_s + wait_s
            one.breaks = (Break(BreakReason.GRAMMAR, one.scheduled_s, end_s),)
        one.device_start_s = max(device_s, loop_s)
        one.device_end_s = device_s = one.device_start_s + draw(times)
        for name in OUTPUT:
            output_s = max(output_s, device_s) + draw(times)
            setattr(one, name, output_s)
        one.read_s = device_s  # also while the materializer is busy with the step before
        for name in draw(holes):
            setattr(one, name, math.nan)
        records.append(one)
    return records


@settings(max_examples=60, deadline=None)
@given(half_filled(), st.sets(st.integers(0, 6)))
def test_any_half_filled_timeline_can_be_exported(
    records: list[StepRecord], rests: set[int]
) -> None:
    timeline = Timeline()
    for one in records:
        if one.step_id in rests:
            timeline.rest()
        timeline.add(one)
        timeline.finish(one)
    assert 0.0 <= timeline.idle_share() <= 1.0
    assert math.isfinite(timeline.metrics().idle_s)
    complete = events(timeline, "X")
    assert json.dumps(timeline.to_chrome_trace(), allow_nan=False)
    for tid in tracks(timeline):
        assert_nested([event for event in complete if event["tid"] == tid])
    assert_idle_adds_up(timeline, len(records) + 1)


# ── the picture ─────────────────────────────────────────────────────────────────────────


def marked(svg: str, name: str) -> list[ET.Element]:
    return [one for one in ET.fromstring(svg).iter() if one.get("class") == name]


def seconds(svg: str, name: str) -> float:
    return sum(float(one.attrib["data-seconds"]) for one in marked(svg, name))


def assert_idle_adds_up(timeline: Timeline, last: int) -> None:
    shown = timeline.steps[-last:]
    idle_s = timeline.idle_share(shown) * timeline.elapsed_s(shown)
    assert seconds(timeline.to_svg(last), "idle") == pytest.approx(idle_s, abs=1e-12)


@pytest.mark.parametrize("last", [1, 2, 5, 24, 1000])
def test_idle_gaps_of_the_picture_add_up_to_the_idle_share(timeline: Timeline, last: int) -> None:
    assert_idle_adds_up(timeline, last)


def test_idle_gaps_are_as_wide_as_they_are_long() -> None:
    timeline = flow(10, gap_s=0.001)
    svg = timeline.to_svg()
    program, gap = marked(svg, "program")[3], marked(svg, "idle")[3]
    wide = {float(program.attrib["width"]) / PROGRAM_S, float(gap.attrib["width"]) / 0.001}
    assert max(wide) == pytest.approx(min(wide), rel=1e-3)
    start = float(program.attrib["x"]) + float(program.attrib["width"])
    assert float(gap.attrib["x"]) == pytest.approx(start, abs=0.02)


def test_the_picture_shows_the_last_steps() -> None:
    timeline = flow(40)
    titles = [one.findtext(f"{SVG}title") or "" for one in marked(timeline.to_svg(5), "program")]
    assert [title.split(",")[0] for title in titles] == [f"step {n}" for n in range(35, 40)]
    assert len(marked(timeline.to_svg(), "program")) == 24
    assert "no steps" in timeline.to_svg(0)


def test_kinds_and_fallbacks_can_be_told_apart() -> None:
    svg = flow(4).to_svg()
    prefill, fallback, *fed = marked(svg, "program")
    looks = {(one.get("fill"), one.get("stroke-dasharray")) for one in (prefill, fallback, *fed)}
    assert len(looks) == 3
    assert prefill.get("fill") != fallback.get("fill") != fed[0].get("fill")
    assert "sync fallback" in (fallback.findtext(f"{SVG}title") or "")


def test_a_failed_program_has_a_red_x() -> None:
    svg = failed("queue <full>\x1b\nerror 5").to_svg()
    (mark,) = marked(svg, "failed")
    box = marked(svg, "program")[2]
    assert mark.get("fill") == "#d62728"
    middle = float(box.attrib["x"]) + float(box.attrib["width"]) / 2
    assert float(mark.attrib["x"]) == pytest.approx(middle, abs=0.02)
    assert mark.findtext(f"{SVG}title") == "step 2 failed: queue <full>  error 5"
    assert (box.findtext(f"{SVG}title") or "").endswith("failed: queue <full>  error 5")
    (missing,) = marked(svg, "missing")
    assert missing.findtext(f"{SVG}title") == "step 3 has not run: queue <full>  error 5"


def test_the_legend_has_fallbacks_of_both_kinds() -> None:
    svg = ET.fromstring(eventful().to_svg())
    swatches = [one for one in svg.iter(f"{SVG}rect") if one.get("class") is None]
    dashed = [one for one in swatches if one.get("stroke-dasharray")]
    looks = [(one.get("fill"), one.get("stroke")) for one in dashed]
    assert looks == [("#c5d8ec", "#3f78b5"), ("#ddcfe9", "#8a63ad")]


def test_there_is_room_above_the_lanes_only_for_labels() -> None:
    def height(timeline: Timeline) -> float:
        return float(ET.fromstring(timeline.to_svg()).attrib["height"])

    broken = flow(4)
    start_s = broken.steps[2].scheduled_s
    broken.steps[2].breaks = (Break(BreakReason.DRAIN, start_s, start_s),)
    assert height(broken) == height(flow(4)) + 13
    broken.steps[2].breaks *= 9  # on top of each other, and no more rows than there are
    assert height(broken) == height(flow(4)) + 3 * 13


def test_breaks_and_rests_are_drawn() -> None:
    svg = eventful().to_svg()
    assert [one.text for one in marked(svg, "break-label")] == ["composition_changed", "reordered"]
    assert len(marked(svg, "break")) == 2
    (rest,) = marked(svg, "rest")
    assert float(rest.attrib["data-seconds"]) == pytest.approx(60.002)
    assert float(rest.attrib["width"]) < 400  # cut short: a minute would hide 30 ms of steps
    assert [one.findtext(f"{SVG}title") for one in marked(svg, "missing")] == [
        "step 7 has not run",
        "step 9 has not run",
    ]


def test_nothing_is_drawn_outside(timeline: Timeline) -> None:
    root = ET.fromstring(timeline.to_svg(1000))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for one in root.iter(f"{SVG}rect"):
        right = float(one.get("x", 0)) + float(one.attrib["width"])
        bottom = float(one.get("y", 0)) + float(one.attrib["height"])
        assert 0 <= float(one.get("x", 0)) <= right <= width
        assert bottom <= height


def ticks(svg: str) -> Iterator[tuple[float, float]]:
    root = ET.fromstring(svg)
    lines = {one.get("x1") for one in root.iter(f"{SVG}line")}
    for one in root.iter(f"{SVG}text"):
        if one.get("x") in lines and one.get("text-anchor") == "middle":
            text = one.text or ""
            if text.replace(".", "").isdigit() and one.get("fill") == "#1f2430":
                yield float(one.attrib["x"]), float(text)


def test_the_axis_is_in_milliseconds() -> None:
    svg = flow(10).to_svg()
    assert 4 <= len(list(ticks(svg))) <= 12
    per_ms = float(marked(svg, "program")[0].attrib["width"]) / (PROGRAM_S * 1e3)
    for (x, ms), (next_x, next_ms) in pairwise(ticks(svg)):
        assert (next_x - x) / (next_ms - ms) == pytest.approx(per_ms, rel=1e-2)


def test_the_axis_goes_on_after_a_rest() -> None:
    labels = [ms for _, ms in ticks(eventful().to_svg())]
    assert labels == sorted(labels)
    assert labels[0] == 0.0
    assert labels[-1] > 60_000
    assert len(labels) < 15


def test_the_picture_stands_alone() -> None:
    svg = eventful().to_svg()
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert not {one.tag.removeprefix(SVG) for one in root.iter()} & {"script", "style", "image"}
    background = root.find(f"{SVG}rect")
    assert background is not None
    assert background.get("fill") == "#ffffff"


def test_the_same_records_give_the_same_exports(timeline: Timeline) -> None:
    assert timeline.to_svg() == timeline.to_svg()
    assert timeline.to_chrome_trace() == timeline.to_chrome_trace()
    assert flow(20, gap_s=1e-4).to_svg() == flow(20, gap_s=1e-4).to_svg()


def test_a_notebook_shows_picture_and_summary() -> None:
    timeline = eventful()
    html = timeline._repr_html_()
    assert html.startswith('<div><svg style="max-width:100%;height:auto" ')
    assert "style" not in timeline.to_svg()  # CairoSVG takes a height of auto for none
    text = ET.fromstring(html).findtext("pre")
    assert text == timeline.summary()
    lines = {line[:20].strip(): line[21:] for line in text.splitlines()}
    assert lines["steps"] == "9 (11 kept)"
    assert lines["device idle"].endswith(f"({timeline.idle_share():.2%})")
    assert lines["decode_async_share"] == "0.667"  # 2 to 5, of 1 to 6
    assert lines["breaks"].startswith("composition_changed 1 (1.090 ms), reordered 1 (0.000 ms)")


def test_a_summary_of_nothing() -> None:
    assert Timeline().summary().splitlines()[-1].split() == ["breaks", "none"]
    assert repr(Timeline(3)) == "<Timeline, 0 of 3 steps>"


def test_files_have_what_the_calls_return(timeline: Timeline, tmp_path: Path) -> None:
    timeline.save_chrome_trace(tmp_path / "trace.json")
    timeline.save_svg(tmp_path / "trace.svg", last=7)
    assert json.loads((tmp_path / "trace.json").read_text("utf-8")) == timeline.to_chrome_trace()
    assert (tmp_path / "trace.svg").read_text("utf-8") == timeline.to_svg(7)


def test_known_times_are_finite() -> None:
    assert known_times([record(1)]) == []
    assert all(map(math.isfinite, known_times(eventful().steps)))
