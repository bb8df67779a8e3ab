"""The metrics page: what it counts, when the engine lives and when it does not."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as open_parser
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from aneuron import Engine, EngineClosed, Overloaded
from aneuron.outputs import AbortReason, Choice, Completion, FinishReason, Timing, Usage
from aneuron.plans import BreakReason
from aneuron.server.watch.histogram import LATENCY, PER_TOKEN, TTFT, Histogram
from aneuron.server.watch.metrics import HISTOGRAMS, Metrics, RequestMeter, missing
from aneuron.testing import Count, Fault, count_engine, sim_engine
from tests.support import CARRIES, outcomes, patient, start, until

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

DOCS = Path(__file__).parents[2] / "docs"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
parse_open: Any = open_parser.text_string_to_metric_families  # has no types
TOTALS = ("request_success_total", "request_aborted_total", "request_failure_total")


class Page:
    """A page that was scraped, by name and labels."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = list(families)
        self.samples = [sample for family in self.families for sample in family.samples]

    def get(self, name: str, **labels: str) -> float | None:
        found = [
            sample.value
            for sample in self.samples
            if sample.name == f"aneuron_{name}" and labels.items() <= sample.labels.items()
        ]
        assert len(found) <= 1
        return found[0] if found else None

    def sum(self, *names: str) -> float:
        wanted = {f"aneuron_{name}" for name in names}
        return sum(sample.value for sample in self.samples if sample.name in wanted)


async def scrape(metrics: Metrics) -> Page:
    page, _ = await metrics.render("text/plain")
    return Page(parse_plain(page.decode()))


def completion(
    reason: FinishReason = FinishReason.STOP,
    *,
    timing: Timing | None = None,
    abort_reason: AbortReason | None = None,
    num_new: int = 5,
) -> Completion:
    choice = Choice(0, "", list(range(num_new)), reason, abort_reason=abort_reason)
    return Completion("r", [choice], Usage(7, num_new), timing or Timing(0.5, 1.5, 5.5))


def some_metrics() -> Metrics:
    return Metrics(Engine("sim:count"), "m")


# ── the engine's own ────────────────────────────────────────────────────────────────────


async def test_case_79_all_aborted_and_then_read() -> None:
    async with count_engine(latency=patient(), max_num_seqs=20, num_kv_blocks=64) as engine:
        metrics = Metrics(engine, "m")
        meters = [metrics.received("chat", max_tokens=500) for _ in range(30)]
        streams = [start(engine, 10 * at, 500) for at in range(1, 31)]
        await until(lambda: engine.stats().running == 20)
        before = await scrape(metrics)
        assert before.get("num_requests_running") == 20
        assert before.get("num_requests_waiting") == 10
        assert 0 < (before.get("kv_cache_usage_perc") or 0) <= 1
        for stream in streams:
            stream.cancel()
        for meter, answer in zip(meters, await outcomes(streams), strict=True):
            meter.finished(answer)
        await engine.wait_idle()
        page = await scrape(metrics)
    assert page.get("num_requests_running") == page.get("num_requests_waiting") == 0
    assert page.get("kv_cache_usage_perc") == page.get("inflight_steps") == 0
    assert page.get("request_aborted_total", reason="client") == 30
    assert page.sum(*TOTALS) == page.sum("requests_received_total") == 30
    assert min(sample.value for sample in before.samples + page.samples) >= 0
    # Waits are counted of aborted ones, too: of all that ran.
    assert page.get("request_queue_time_seconds_count") == 20
    assert page.get("e2e_request_latency_seconds_count") == 0


async def test_counters_are_the_engines_and_stay_when_it_is_closed() -> None:
    async with count_engine(num_kv_blocks=64) as engine:
        metrics = Metrics(engine, "m")
        await engine.generate(prompt_token_ids=list(range(40)), max_tokens=20)
        await engine.generate(prompt_token_ids=list(range(40)), max_tokens=20)
        await engine.wait_idle()
        stats, running = engine.stats(), start(engine, 10, 10_000)
        await anext(running)
        assert (await scrape(metrics)).get("num_requests_running") == 1
    page = await scrape(metrics)  # closed amid a request
    assert page.get("engine_open") == 0
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert page.get(gauge) == 0
    assert page.get("inflight_steps") == page.get("stalled_seconds") == 0
    assert page.get("prompt_tokens_total") == stats.prompt_tokens + 1 == 81
    assert (page.get("generation_tokens_total") or 0) > stats.generation_tokens == 40
    assert page.get("prefix_cache_hits_total") == stats.prefix_cache_hits == 32
    assert page.get("prefix_cache_queries_total") == engine.stats().prefix_cache_queries
    assert page.get("num_preemptions_total") == 0
    assert page.get("engine_info", device="sim", num_blocks="64") == 1


async def test_an_engine_that_closes_shows_nothing_that_goes_on() -> None:
    resume = threading.Event()

    def stuck(_: object) -> float:
        resume.wait()
        return 0.0

    async with count_engine(latency=stuck) as engine:
        stream = start(engine)
        await until(lambda: engine.stats().in_flight_steps > 0)
        closing = asyncio.create_task(engine.aclose())
        try:
            await until(lambda: not engine.is_open)
            assert engine.stats().used_blocks > 0  # the device has them still
            page = await scrape(Metrics(engine, "m"))
        finally:
            resume.set()
        await closing
        await stream
    assert page.get("kv_cache_usage_perc") == page.get("inflight_steps") == 0
    assert page.get("stalled_seconds") == 0


async def test_an_engine_that_was_never_open_or_has_failed() -> None:
    page = await scrape(some_metrics())
    assert page.get("engine_open") == page.get("num_requests_running") == 0
    assert page.get("prompt_tokens_total") is None
    async with count_engine(faults=[Fault(3, 101)]) as engine:
        metrics = Metrics(engine, "m")
        assert (await scrape(metrics)).get("engine_open") == 1
        await outcomes([start(engine)])
        await until(lambda: not engine.is_open)
        page = await scrape(metrics)
    assert page.get("engine_open") == page.get("num_requests_running") == 0
    assert page.get("kv_cache_usage_perc") == 0
    assert page.get("steps_total") == engine.stats().steps > 0


async def test_breaks_and_shares() -> None:
    async with count_engine(**CARRIES["handoff"]) as engine:
        metrics = Metrics(engine, "m")
        assert (await scrape(metrics)).get("device_idle_share") is None  # no step yet
        await outcomes([start(engine, 10 * at, 20 * at) for at in range(1, 5)])
        await engine.wait_idle()
        stats, page = engine.stats(), await scrape(metrics)
    assert stats.breaks
    for reason in BreakReason:
        one = stats.breaks.get(reason.value)
        assert page.get("flow_breaks_total", reason=reason.value) == (one.count if one else 0)
    seconds = sum(one.seconds for one in stats.breaks.values())
    assert page.sum("flow_break_seconds_total") == pytest.approx(seconds)
    assert page.get("decode_async_share") == pytest.approx(stats.decode_async_share)
    assert page.get("async_steps_total") == stats.async_steps
    assert page.get("sync_fallback_steps_total") == stats.sync_fallback_steps
    idle = page.get("device_idle_share")
    assert idle is not None
    assert 0 < idle <= 1


async def test_busy_and_idle_time_of_the_device() -> None:
    async with count_engine() as engine:
        await start(engine)
        await engine.wait_idle()
        page = await scrape(Metrics(engine, "m"))
        busy_s, idle_s = engine.timeline.busy_s, engine.timeline.idle_s
    assert page.get("device_busy_seconds_total") == pytest.approx(busy_s)
    assert page.get("device_idle_seconds_total") == pytest.approx(idle_s)
    assert page.get("device_idle_share") == pytest.approx(idle_s / (busy_s + idle_s))


async def test_speculation_is_counted() -> None:
    draft = {"method": "ngram", "num_tokens": 4}
    async with sim_engine(Count(), speculative=draft) as engine:
        await engine.generate(prompt_token_ids=[5, 6, 7, 8, 9, 10, 5, 6], max_tokens=4)
        await engine.wait_idle()
        stats, page = engine.stats(), await scrape(Metrics(engine, "m"))
    assert page.get("spec_decode_num_draft_tokens_total") == stats.draft_tokens > 0
    assert page.get("spec_decode_num_accepted_tokens_total") == stats.accepted_draft_tokens > 0


# ── requests ────────────────────────────────────────────────────────────────────────────


async def test_what_a_finished_request_tells() -> None:
    metrics = some_metrics()
    meter = metrics.received("completions", n=1, max_tokens=64)
    meter.observe_first(1.25)
    meter.observe_first(9.0)  # the first one counts
    for gap_s in (0.02, 0.03):
        meter.observe_gap(gap_s)
    meter.finished(completion(), "tool_calls")
    page = await scrape(metrics)
    sums = {
        "time_to_first_token_seconds": 1.25,
        "inter_token_latency_seconds": 0.05,
        "request_time_per_output_token_seconds": 1.0,  # 4 s, 4 tokens after the first
        "e2e_request_latency_seconds": 5.5,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 1.0,
        "request_decode_time_seconds": 4.0,
        "request_inference_time_seconds": 5.0,
        "request_prompt_tokens": 7,
        "request_generation_tokens": 5,
        "request_params_n": 1,
        "request_params_max_tokens": 64,
    }
    assert set(sums) == set(HISTOGRAMS)
    for name, value in sums.items():
        assert page.get(f"{name}_sum") == pytest.approx(value), name
        number = 2 if name.startswith("inter") else 1
        assert page.get(f"{name}_count") == page.get(f"{name}_bucket", le="+Inf") == number
    assert page.get("request_success_total", finished_reason="tool_calls") == 1
    assert page.get("request_success_total", finished_reason="stop") == 0
    assert page.get("requests_received_total", endpoint="completions") == 1


async def test_what_cannot_be_known_is_not_counted() -> None:
    metrics = some_metrics()
    metrics.received("chat", n=3).finished(completion())  # time per token: of which choice?
    metrics.received("chat").finished(completion(num_new=1))
    never_ran = completion(
        FinishReason.ABORT, timing=Timing(None, None, 3.0), abort_reason=AbortReason.DEADLINE
    )
    metrics.received("chat").finished(never_ran)
    page = await scrape(metrics)
    assert page.get("request_time_per_output_token_seconds_count") == 0
    assert page.get("request_params_max_tokens_count") == 0
    assert page.get("time_to_first_token_seconds_count") == 2  # told by the end alone
    assert page.get("request_queue_time_seconds_count") == 2
    assert page.get("request_aborted_total", reason="deadline") == 1


class Odd(Exception):
    code = None


@pytest.mark.parametrize(
    ("error", "counter", "label"),
    [
        (Overloaded("full", retry_after_s=1), "failure", "overloaded"),
        (ValueError("a bug"), "failure", "internal_error"),
        (Odd(), "failure", "internal_error"),
        (asyncio.CancelledError(), "aborted", "client"),
        (GeneratorExit(), "aborted", "client"),
        (KeyboardInterrupt(), "aborted", "shutdown"),
        (None, "aborted", "client"),
    ],
)
def test_a_request_ends_once_however_it_ends(
    error: BaseException | None, counter: str, label: str
) -> None:
    metrics = some_metrics()

    def serve(meter: RequestMeter, error: BaseException | None) -> None:
        with meter:
            if error is not None:
                raise error

    if error is None:
        serve(metrics.received("chat"), None)
    else:
        with pytest.raises(type(error)):
            serve(metrics.received("chat"), error)
    kept = {"failure": metrics.failed_by_code, "aborted": metrics.aborted_by_reason}
    assert +kept[counter] == Counter([label])
    assert ends(metrics) == 1


def ends(metrics: Metrics) -> int:
    counters = (metrics.finished_by_reason, metrics.aborted_by_reason, metrics.failed_by_code)
    return sum(counter.total() for counter in counters)


@given(st.lists(st.sampled_from(["finished", "abort", "aborted", "failed"]), max_size=4))
def test_only_the_first_end_counts(told: list[str]) -> None:
    metrics = some_metrics()
    with metrics.received("chat") as meter:
        for end in told:
            match end:
                case "finished":
                    meter.finished(completion())
                case "abort":
                    meter.finished(completion(FinishReason.ABORT))
                case "aborted":
                    meter.aborted("shutdown")
                case _:
                    meter.failed(EngineClosed("closed"))
    assert ends(metrics) == 1
    expected = {"finished": "stop", "failed": "engine_unavailable", "aborted": "shutdown"}
    seen = metrics.finished_by_reason + metrics.aborted_by_reason + metrics.failed_by_code
    assert list(seen) == [expected.get(told[0], "client") if told else "client"]
    assert metrics.histograms["e2e_request_latency_seconds"].num_values == (
        told[:1] == ["finished"]
    )


async def test_labels_are_bounded_and_escaped() -> None:
    name = 'a "model"\\with\nall'
    metrics = Metrics(Engine("sim:count"), name)
    metrics.responded("/v1/chat/completions", 200)
    for at in range(100):
        metrics.responded(f"/scan/{at}", 404)
    metrics.responded(None, 404)
    page = await scrape(metrics)
    assert {sample.labels["model_name"] for sample in page.samples} == {name}
    assert page.get("http_responses_total", route="/v1/chat/completions", status="200") == 1
    assert page.get("http_responses_total", route="other", status="404") == 101


# ── histograms ──────────────────────────────────────────────────────────────────────────

edges = st.sampled_from(TTFT + PER_TOKEN + LATENCY)


@given(
    st.sampled_from([TTFT, PER_TOKEN, LATENCY]),
    st.lists(st.floats(0, 1e4, allow_nan=False) | edges),
)
def test_buckets_are_those_of_prometheus_client(
    bounds: tuple[float, ...], values: list[float]
) -> None:
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram("h", "h", buckets=bounds, registry=registry)
    ours = Histogram(bounds)
    for value in values:
        theirs.observe(value)
        ours.observe(value)
    for bound, number in ours.buckets():
        assert registry.get_sample_value("h_bucket", {"le": bound}) == number
    assert registry.get_sample_value("h_sum") == pytest.approx(ours.total)
    assert ours.num_values == len(values)


# ── the page ────────────────────────────────────────────────────────────────────────────


async def test_the_scraper_says_which_format() -> None:
    async with count_engine() as engine:
        await start(engine)
        metrics = Metrics(engine, "m")
        metrics.received("chat")
        plain, plain_type = await metrics.render(None)
        opened, open_type = await metrics.render(OPEN_METRICS)
    assert plain_type.startswith("text/plain; version=0.0.4")
    assert open_type.startswith("application/openmetrics-text; version=1.0.0")
    assert opened.endswith(b"# EOF\n")
    assert opened.count(b"# EOF") == 1
    plain_names = {sample.name for sample in Page(parse_plain(plain.decode())).samples}
    assert {s.name for s in Page(parse_open(opened.decode())).samples} == plain_names


@pytest.mark.parametrize(
    "accept", ["text/plain; version=x", "text/plain;version=1.a", "application/openmetrics-text;version=", ";,=", "*/*"]  # noqa: E501
)  # fmt: skip
async def test_no_accept_header_breaks_it(accept: str) -> None:
    page, content_type = await some_metrics().render(accept)
    assert b"aneuron_engine_open" in page
    assert content_type


async def test_others_run_while_a_page_is_written() -> None:
    metrics, turns = some_metrics(), 0
    loop = asyncio.get_running_loop()

    def turn() -> None:
        nonlocal turns
        turns += 1
        handle[0] = loop.call_soon(turn)

    handle = [loop.call_soon(turn)]
    page, _ = await metrics.render(OPEN_METRICS)
    handle[0].cancel()
    assert turns >= 4
    assert len(page) > 10_000


async def test_each_app_has_its_own_registry_and_takes_others_collectors() -> None:
    one, other = some_metrics(), some_metrics()
    assert one.registry is not None
    prometheus_client.Counter("mine", "of the app's owner", registry=one.registry).inc()
    one.received("chat")
    one_page, other_page = await scrape(one), await scrape(other)
    assert "mine_total" in {sample.name for sample in one_page.samples}
    assert "mine_total" not in {sample.name for sample in other_page.samples}
    assert other_page.sum("requests_received_total") == 0
    names = {name for name in prometheus_client.REGISTRY._names_to_collectors if "aneuron" in name}
    assert not names


async def test_without_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing() is None
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    text = missing()
    assert text is not None
    assert "aneuron[metrics]" in text
    metrics = some_metrics()
    with metrics.received("chat") as meter:
        meter.finished(completion())
    metrics.responded("/metrics", 501)
    assert metrics.finished_by_reason["stop"] == 1
    with pytest.raises(RuntimeError, match=re.escape(text)):
        await metrics.render(None)


# ── what is written about it ────────────────────────────────────────────────────────────


async def exported() -> set[str]:
    """Names of all families, as the text format has them."""
    async with count_engine(timeline=True) as engine:
        await start(engine)
        page, _ = await Metrics(engine, "m").render(None)
    return {line.split()[2] for line in page.decode().splitlines() if line.startswith("# TYPE ")}


async def test_the_docs_list_every_metric_and_no_other() -> None:
    text = (DOCS / "metrics.md").read_text("utf-8")
    listed = {f"aneuron_{name}" for name in re.findall(r"^\| `(\w+)", text, re.MULTILINE)}
    assert listed == await exported()


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


async def test_the_dashboard_asks_for_what_there_is() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text("utf-8"))
    names, asked = await exported(), set[str]()
    for panel in panels(dashboard):
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            asked |= set(re.findall(r"aneuron_\w+", target["expr"]))
    bases = {
        re.sub(r"_(bucket|sum|count)$", "", name) if name not in names else name for name in asked
    }
    assert bases <= names
    for needed in ("flow_breaks_total", "device_idle_seconds_total", "event_loop_lag_seconds"):
        assert f"aneuron_{needed}" in bases
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == ["Traffic", "Latency", "Tokens", "KV and prefix cache", "The flow"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_dashboards_panels_do_not_overlap() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text("utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
