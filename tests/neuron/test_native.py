"""The native model on a played core, step by step: columns in, ids out, by the runtime's rules."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from aneuron import ConfigError
from aneuron.device.neuron import NeuronDevice
from aneuron.device.neuron.status import status_of
from aneuron.errors import DeviceError, OutOfMemory
from aneuron.models.neuron.native import NativeModel, native_spec
from aneuron.plans import LogitEdits
from aneuron.testing.fakes import CountDecoder, FakeNative, Fault, SumDecoder, Times
from tests.neuron.native_steps import SHAPE, Row, Watched, Weakly, shape_of, steps
from tests.support import after, sum_reference

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB = 300


class Spoilt(CountDecoder):
    """A row whose last id is 13 has NaN among its logits."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = super().forward(*args, **kwargs)
        logits.index_select(1, args[0])  # ids are indices, as for an embedding
        return torch.where(logits.argmax(-1, keepdim=True) == 14, float("nan"), logits)


class Flat(CountDecoder):
    """All ids are as likely."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros_like(super().forward(*args, **kwargs))


# ── what a step computes ────────────────────────────────────────────────────────────────


def test_a_prompt_and_its_decodes() -> None:
    """In two parts, over several blocks: from host ids, from slots, and fed."""
    prompt = [5, 9, 2, 7, 4, 1, 3, 8, 6, 11]
    with steps(decoder=SumDecoder(VOCAB)) as on:
        row = Row(2)
        on.run(on.prefill(row, prompt[:8])).wait()
        ids = [int(on.run(on.prefill(row, prompt[8:])).read()[0])]
        on_host = on.run(on.decode([row], ids)).read()
        ids.append(int(on_host[0]))
        from_slots = on.run(on.decode([row], None))
        fed = on.run(on.decode([row], [0]), from_slots)
        assert on_host.shape == (4,)  # padded
        assert on_host.dtype == np.int32
        for launched in (from_slots, fed):
            ids.append(int(launched.read()[0]))
            launched.wait()
            assert launched.read()[0] == ids[-1]
    assert ids == sum_reference(prompt, 4, VOCAB)


def test_rows_are_apart_in_any_order() -> None:
    with steps(decoder=SumDecoder(VOCAB)) as on:
        prompts: list[Sequence[int]] = [[3, 1], [4, 1, 5], [9], [2, 6, 5, 3]]
        begun = [on.begin(slot, ids) for slot, ids in enumerate(prompts)]
        rows = [row for row, _ in begun]
        answers = [[first] for _, first in begun]
        for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0], [1, 3, 0], [0, 1, 2, 3]):
            told = on.run(on.decode([rows[at] for at in order], None)).read()
            for at, token in zip(order, told.tolist(), strict=False):
                answers[at].append(token)
    expected = [sum_reference(list(ids), 6, VOCAB) for ids in prompts]
    for answer, whole in zip(answers, expected, strict=True):
        assert answer == whole[: len(answer)]


def test_a_slot_that_changed_hands_starts_anew() -> None:
    with steps() as on:
        one, first = on.begin(0, [5])
        assert on.run(on.decode([one], None)).read()[0] == first + 1
        other, first = on.begin(0, [100])
        assert on.run(on.decode([other], None)).read()[0] == first + 1 == 102


def test_without_slots_the_columns_are_the_launch_s() -> None:
    with steps() as on:
        row = Row(1)
        first = on.run(on.prefill(row, [7], has_slots=False)).read()
        launched = on.run(on.decode([row], first, has_slots=False))
        fed = on.run(on.decode([row], [0], has_slots=False), launched)
        assert [one.read()[0] for one in (launched, fed)] == [9, 10]


def test_samples_are_of_the_seed_and_the_position() -> None:
    """With slots or without, alone or in company, at any place of the batch."""
    told = []
    for has_slots in (True, False):
        for company in (0, 3):
            with steps(decoder=Flat(VOCAB)) as on:
                own: dict[str, Any] = {"temperature": 1.0, "seed": 77, "has_slots": has_slots}
                others = [on.begin(slot, [slot], temperature=0.0) for slot in range(company)]
                row, first = on.begin(5, [1, 2], **own)
                rows = [*(one for one, _ in others), row]
                ids = [*(one for _, one in others), first]
                column = np.array([*[0.0] * company, 1.0]), np.array([*[0] * company, 77])
                launched = on.run(
                    on.decode(rows, ids, temperature=column[0], seed=column[1], has_slots=has_slots)
                )
                told.append([first, int(launched.read()[company])])
                assert launched.read()[:company].tolist() == [0] * company  # greedy
    assert told == [told[0]] * 4
    assert len({*told[0], 0}) == 3


def test_a_grammar_leaves_other_rows_alone() -> None:
    with steps() as on:
        rows = [on.begin(slot, [slot])[0] for slot in range(3)]
        bits = np.zeros((1, -(-VOCAB // 32)), np.int32)
        bits[0, 299 // 32] = 1 << 299 % 32
        inputs = on.decode(rows, None)
        none = np.empty(0, np.int64)
        inputs.edits = LogitEdits(np.array([1]), bits, none, np.empty((0, VOCAB), np.float32))
        masked = on.run(inputs)
        assert masked.read()[:3].tolist() == [2, 299, 4]
        assert on.run(on.decode(rows, None)).read()[:3].tolist() == [3, 0, 5]


def test_nan_fails_rows_that_count_and_no_padding() -> None:
    with steps(decoder=Spoilt(VOCAB)) as on:
        rows = [on.begin(slot, ids)[0] for slot, ids in enumerate(([11], [20]))]
        launched = on.run(on.decode(rows, None))
        behind = on.run(on.decode(rows, None))  # reads the id of the row that failed
        assert launched.read()[:2].tolist() == [13, 22]
        with pytest.raises(FloatingPointError, match="NaN"):
            behind.read()
        behind.wait()
        assert on.run(on.decode(rows[1:], [30])).read()[0] == 31
        on.run(on.decode(rows, None)).wait()  # the -1 that its slot keeps is no index


# ── the rules of the runtime ────────────────────────────────────────────────────────────


def test_rule_04_a_read_frees_a_place_in_the_queue() -> None:
    fake = FakeNative(queue_depth=3)
    with steps(fake) as on:
        row, _ = on.begin(0, [5])
        launched = [on.run(on.decode([row], None)) for _ in range(3)]
        refused = on.decode([row], None)
        with pytest.raises(RuntimeError) as caught:
            on.run(refused)
        assert status_of(caught.value) == 7
        launched[0].read()
        launched.append(on.run(refused))  # and the refused launch has left nothing behind
        ids = [int(one.read()[0]) for one in launched]
    assert ids == after(6, 4)


@pytest.mark.parametrize("what", ["decode", "gather"])
def test_rule_06_what_a_refused_launch_has_sent_stays_until_the_next_was_read(what: str) -> None:
    fake = Weakly()
    with steps(fake) as on:
        row, _ = on.begin(0, [5])
        first = on.run(on.decode([row], None))
        inputs = on.decode([row], None)
        fake.sent.clear()
        fake.core.inject(Fault(7))
        with pytest.raises(RuntimeError) as caught:
            on.run(inputs) if what == "decode" else first.gather(np.arange(4))
        assert status_of(caught.value) == 7
        del caught  # its traceback has the launch's locals
        sent = list(fake.sent)
        gc.collect()
        assert sent
        assert all(one() is not None for one in sent)
        again = on.run(inputs)
        assert again.read()[0] == 8
        gc.collect()
        assert not any(one() for one in sent)
        assert first.read()[0] == 7


@pytest.mark.parametrize("has_events", [False, True])
def test_rule_04_a_wait_without_a_read_frees_it_too(has_events: bool) -> None:
    with steps(FakeNative(queue_depth=2, has_events=has_events)) as on:
        row, _ = on.begin(0, [5])
        for _ in range(4):
            launched = on.run(on.decode([row], None))
            gathered = launched.gather(np.array([1, 0, 2, 3]))
            launched.wait()
            gathered.wait()
            del launched, gathered
        assert on.run(on.decode([row], None)).read()[0] == 11


def test_rule_06_a_launch_keeps_what_it_reads() -> None:
    """Columns, what feeds it, and host copies of weights and caches, until it was read."""
    fake = FakeNative()
    with steps(fake) as on:
        fake.core.hold()
        row = Row(0)
        first = on.run(on.prefill(row, [5]))
        second = on.run(on.decode([row], None, padded=1))
        inputs = on.decode([row], [0], padded=1)
        last = on.run(inputs, second).gather(np.array([0]))
        inputs.positions[:] = 99  # its columns are the launch's, but the launch has copies
        inputs.block_table[:] = 31
        gone = weakref.ref(second)
        del inputs, second
        gc.collect()
        fake.core.go_on()
        assert first.read()[0] == 6
        assert gone() is not None
        assert last.read()[0] == 8
        assert gone() is None  # read, it keeps nothing of what fed it


def test_rule_07_all_that_is_sent_is_of_a_bucket_and_narrow() -> None:
    fake = Watched()
    with steps(fake) as on:
        model = on.model
        model.warm_up(shape_of(num_blocks_buckets=[8]))
        num_compiled = len(fake.compiles)
        fake.sent.clear()
        row, first = on.begin(0, [5, 6], temperature=0.5, top_k=3, seed=2**40)
        inputs = on.decode([row], [first])
        on.run(inputs).read()
        on.run(on.decode([row], None)).gather(np.arange(4)).wait()
        assert {one.dtype for one in fake.sent} == {torch.int32, torch.float32}
        assert len(fake.compiles) == num_compiled


def test_rule_09_a_step_is_fed_one_id_for_each_token() -> None:
    with steps() as on:
        row = Row(0)
        prefilled = on.run(on.prefill(row, [5]))
        with pytest.raises(ValueError, match="fed 1 ids to a step of 4 tokens"):
            on.run(on.decode([row], [0]), prefilled)
        row.count -= 1
        assert on.run(on.decode([row], [0], padded=1), prefilled).read()[0] == 7


def test_rule_09_another_order_is_gathered_on_the_device() -> None:
    with steps() as on:
        rows = [on.begin(slot, [10 * slot])[0] for slot in range(3)]
        launched = on.run(on.decode(rows, None))
        gathered = launched.gather(np.array([2, 0, 1, 3], np.int64))
        fed = on.run(on.decode([rows[2], rows[0], rows[1]], [0]), gathered)
        assert fed.read()[:3].tolist() == [23, 3, 13]
        assert gathered.read()[:3].tolist() == [22, 2, 12]
        launched.wait()


@pytest.mark.parametrize("true_async", [True, False])
def test_rule_14_whether_launches_return_early_is_measured(true_async: bool) -> None:
    fake = FakeNative(times=Times(decode_s=0.05), true_async=true_async)
    with steps(fake) as on:
        on.model.warm_up(shape_of(num_seqs_buckets=[4]))
        assert on.device.true_async is true_async


# ── warm-up ─────────────────────────────────────────────────────────────────────────────


def test_rule_19_warm_up_runs_every_bucket_and_tells_how_far_it_is() -> None:
    fake = FakeNative()
    told: list[tuple[str, int, int | None]] = []
    shape = shape_of(max_num_batched_tokens=16, num_tokens_buckets=[8], num_blocks_buckets=[2, 4])
    with steps(fake) as on:
        on.model.warm_up(shape, lambda *step: told.append(step))
    # Prompts of 9 tokens and more have no place in a table of 2 blocks.
    kinds = [one.split()[0] for one in fake.compiles]
    assert kinds.count("_prefill") == 3 + 2
    assert kinds.count("_decode") == 2 * 3
    assert kinds.count("_gather") == 2
    assert told == [("warm up", done, 11) for done in range(12)]


def test_rule_19_a_bucket_that_cannot_be_compiled_is_reported() -> None:
    fake = FakeNative(faults=[Fault("compile", step=3)])
    with (
        steps(fake) as on,
        pytest.raises(ConfigError, match=r"(?s)decode\[r4,b8\].*NCC_EBVF030") as told,
    ):
        on.model.warm_up(shape_of(num_seqs_buckets=[4], num_blocks_buckets=[8]))
    assert told.value.param == "model"


@pytest.mark.parametrize(
    ("status", "error"), [(4, OutOfMemory), (1003, DeviceError), (101, DeviceError)]
)
def test_rule_19_a_bucket_that_fails_is_reported(status: int, error: type[Exception]) -> None:
    with (
        steps(FakeNative(faults=[Fault(status, step=2)])) as on,
        pytest.raises(error, match=f"status {status}"),
    ):
        on.model.warm_up(SHAPE)


def test_rule_19_logits_of_nan_are_not_swallowed() -> None:
    class Broken(CountDecoder):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(*args, **kwargs) * float("nan")

    with steps(decoder=Broken(VOCAB)) as on:
        on.model.warm_up(SHAPE)  # of padding they say nothing
        with pytest.raises(FloatingPointError):
            on.begin(0, [1])


def test_rule_19_a_bucket_behind_the_warm_up_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with steps() as on:
        on.model.warm_up(SHAPE)
        row, _ = on.begin(0, [5])
        caplog.clear()
        on.run(on.decode([row], None)).read()
        assert "aneuron.models" not in [one.name for one in caplog.records]
        on.run(on.decode([row], None, padded=3)).read()
    messages = [one.message for one in caplog.records if one.name == "aneuron.models"]
    assert messages == ["played: decode[r3,b8] was not warmed up"]


# ── where it is ─────────────────────────────────────────────────────────────────────────


def test_a_model_stays_where_it_is_and_moves_to_a_new_runtime() -> None:
    fakes = [FakeNative(), FakeNative(index=1)]
    given = iter(fakes)
    device = NeuronDevice(lambda: next(given), kind="native")
    decoder = CountDecoder(VOCAB)
    model = NativeModel(native_spec(decoder.config, name="count"), decoder)
    placed = model.on(device)
    assert placed.on(device) is placed
    assert placed.with_kv(4, 4, 2) is not placed
    device.disconnect()
    assert placed.on(device) is not placed
    device.disconnect()


def test_a_model_needs_a_device_of_its_kind() -> None:
    decoder = CountDecoder(VOCAB)
    model = NativeModel(native_spec(decoder.config, name="count"), decoder)
    other: Any = object()
    for device in (other, NeuronDevice(FakeNative, kind="nxd")):
        with pytest.raises(ConfigError, match="native PyTorch") as told:
            model.on(device)
        assert told.value.param == "device"
    with pytest.raises(ConfigError, match="on no Neuron device") as told:
        model.with_kv(4, 4, 2)
    assert told.value.param == "device"


@pytest.mark.parametrize("part", ["weights", "cache"])
def test_no_room_on_the_device(part: str) -> None:
    fake = FakeNative(memory_bytes=100 if part == "weights" else 10_000)
    device = NeuronDevice(lambda: fake, kind="native")

    class Heavy(CountDecoder):
        def __init__(self) -> None:
            super().__init__(VOCAB)
            self.weight = torch.nn.Parameter(torch.zeros(100))

    decoder = Heavy()
    model = NativeModel(native_spec(decoder.config, name="heavy"), decoder)
    try:
        with pytest.raises(OutOfMemory, match="status 4"):
            model.on(device).with_kv(1000, 4, 2)
    finally:
        device.disconnect()


def test_weights_that_are_one_stay_one() -> None:
    class Tied(CountDecoder):
        def __init__(self) -> None:
            super().__init__(VOCAB)
            self.one = torch.nn.Parameter(torch.zeros(100))
            self.other = self.one

    fake = Watched()
    with steps(fake, Tied()) as on:
        assert sum(one.shape == (100,) for one in fake.sent) == 1
        assert not any(one.requires_grad for one in fake.sent)
        assert on.begin(0, [1])[1] == 2
