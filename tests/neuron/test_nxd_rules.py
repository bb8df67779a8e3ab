"""The rules of traced programs, as the adapter keeps them: a played runtime watches."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aneuron import OutOfMemory
from aneuron.config import BatchShape, EngineConfig
from aneuron.models.neuron.nxd import NxdModel
from aneuron.testing.fakes import FakeNxd, Fault, SumDecoder, Times
from tests.neuron.artifacts import (
    BATCH,
    BLOCK,
    KINDS,
    LENGTH,
    OURS,
    VOCAB,
    artifact_of,
    count_decoder,
    engine_over,
    fake_device,
    write,
)
from tests.neuron.launching import Launcher, Spy, launcher

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from aneuron.futures import DeviceFuture
    from aneuron.models.neuron.launches import NxdLaunched
    from tests.neuron.artifacts import Kind

IDS, MASK, POSITIONS, SEQ_IDS = range(4)
SLOTS, TABLE = 11, 12


def sum_decoder(_: Any = None) -> SumDecoder:
    return SumDecoder(VOCAB, max_model_len=LENGTH)


def sum_of(ids: Sequence[int]) -> int:
    return sum(place * one for place, one in enumerate(ids, 1)) % VOCAB


@pytest.mark.parametrize("kind", ["blocks", "nxdi rows"])
def test_rule_05_a_result_outlives_two_newer_launches(tmp_path: Path, kind: Kind) -> None:
    with launcher(write(tmp_path / "a", kind)) as on:
        one, token = on.begin(0, [7, 8])
        launched = on.run(on.decode([one], [token]))
        assert launched.read()[0] == 10
        for newer in (10, 11):
            on.run(on.decode([one], [newer])).read()
        assert launched.read()[0] == 10


async def test_rule_05_the_device_reads_before_the_ring_is_full(tmp_path: Path) -> None:
    folder = await asyncio.to_thread(write, tmp_path / "a", "nxdi blocks")
    fake = FakeNxd(Times(decode_s=0.004), decoder=count_decoder)
    device, artifact = fake_device(fake), await asyncio.to_thread(artifact_of, folder)
    model = await asyncio.to_thread(NxdModel.load, artifact, device)
    play = Launcher(model.with_kv(16, BLOCK), fake)
    device.start(asyncio.get_running_loop())
    one = play.place(0)
    prompt = play.prefill(one, [20, 21])
    future = device.launch(model.executable(prompt), prompt)
    futures: list[DeviceFuture] = []
    for _ in range(6):  # all queued before one has ended
        inputs = play.decode([one], [0])
        inputs.input_ids = futures[-1] if futures else np.array([22], np.int32)
        futures.append(device.launch(model.executable(inputs), inputs))
    assert (await future).tolist() == [22]
    assert [int((await each)[0]) for each in futures] == [23, 24, 25, 26, 27, 28]
    await device.close()
    assert fake.violations == []


@pytest.mark.parametrize("kind", KINDS)
def test_rule_07_every_length_finds_a_compiled_shape(tmp_path: Path, kind: Kind) -> None:
    with launcher(write(tmp_path / "a", kind, ranks=2)) as on:
        for length in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 62, 63):
            one = on.place(1, LENGTH)
            on.run(on.prefill(one, [3] * length))
            on.run(on.decode([one], [3])).read()
        one = on.place(1, LENGTH)
        on.run(on.prefill(one, [3] * LENGTH))
        with pytest.raises(ValueError, match=r"no program is compiled for 65"):
            on.run(on.decode([one], [3]))


@pytest.mark.parametrize("kind", KINDS)
def test_rule_07_wide_integers_are_narrowed(tmp_path: Path, kind: Kind) -> None:
    names = ("input_ids", "positions", "slot_mapping", "block_table", "context_lens", "slots")
    with launcher(write(tmp_path / "a", kind)) as on:
        one = on.place(0)
        for inputs in (on.prefill(one, [3, 4]), on.decode([one], [5])):
            for name in names:
                column = getattr(inputs, name)
                setattr(inputs, name, None if column is None else column.astype(np.int64))
            on.run(inputs).read()


@pytest.mark.parametrize("kind", ["rows", "nxdi rows"])
def test_rule_08_rows_are_sorted_by_sequence_id(tmp_path: Path, kind: Kind) -> None:
    spy = Spy()
    with launcher(write(tmp_path / "a", kind), spy) as on:
        begun = [on.begin(slot, [100 * slot, 100 * slot + 1]) for slot in (3, 0)]
        placed = [one for one, _ in begun]
        assert [token for _, token in begun] == [302, 2]
        found = on.run(on.decode(placed, [302, 2])).read()
        assert found[:2].tolist() == [303, 3]  # in the launch's order
        assert spy.last(SEQ_IDS).tolist() == [0, 1, 2, 3]
        assert spy.last(IDS)[:, 0].tolist() == [2, 0, 0, 302]
        # Padding writes where an owner would write before it reads.
        assert spy.last(POSITIONS)[:, 0].tolist() == [2, LENGTH - 1, LENGTH - 1, 2]


def test_rule_08_a_prompt_of_nxdi_is_masked_before_a_token_and_on_it(tmp_path: Path) -> None:
    spy = Spy()
    with launcher(write(tmp_path / "a", "nxdi rows"), spy) as on:
        one, token = on.begin(1, [4, 5, 6])
        assert spy.last(MASK).tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]]
        assert spy.last(POSITIONS).tolist() == [[0, 1, 2, 1, 1, 1, 1, 1]]
        on.run(on.decode([one], [token])).read()
        assert spy.last(MASK).sum(dim=1).tolist() == [0, 3, 0, 0]  # what is in the cache already


@pytest.mark.parametrize("kind", ["nxdi rows", "nxdi blocks"])
def test_rule_08_the_last_token_of_a_prompt_has_the_first_highest_position(
    tmp_path: Path, kind: Kind
) -> None:
    spy = Spy()
    with launcher(write(tmp_path / "a", kind), spy) as on:
        for count in (1, 2, 3):
            on.begin(2, [9] * count)
            assert spy.last(POSITIONS)[0].tolist().index(count - 1) == count - 1
            assert spy.last(POSITIONS).max() == count - 1


@pytest.mark.parametrize("kind", ["blocks", "nxdi blocks"])
def test_rule_08_blocks_are_padded_at_the_end(tmp_path: Path, kind: Kind) -> None:
    spy = Spy()
    with launcher(write(tmp_path / "a", kind, block_padding=0), spy) as on:
        begun = [on.begin(slot, [100 * slot, 100 * slot + 1]) for slot in (3, 0)]
        placed = [one for one, _ in begun]
        found = on.run(on.decode(placed, [302, 2])).read()
        assert found[:2].tolist() == [303, 3]
        assert (spy.last(SLOTS)[:, 0] < 0).tolist() == [False, False, True, True]
        assert spy.last(TABLE)[2:].max() == 0


@pytest.mark.parametrize("kind", OURS)
def test_rule_08_padding_touches_no_request(tmp_path: Path, kind: Kind) -> None:
    folder = write(tmp_path / "a", kind, decoder=sum_decoder)
    with launcher(folder, FakeNxd(decoder=sum_decoder)) as on:
        idle, first = on.begin(0, [1, 2, 3])
        busy, token = on.begin(1, [5])
        ids = [5, token]
        for _ in range(8):
            (token, *_) = on.run(on.decode([busy], None)).read()
            assert token == sum_of(ids)
            ids.append(int(token))
        (token, *_) = on.run(on.decode([idle], None)).read()
        assert token == sum_of([1, 2, 3, first])


@pytest.mark.parametrize("kind", ["blocks", "rows", "nxdi blocks", "nxdi rows"])
def test_rule_09_only_the_same_rows_are_fed_on_the_device(tmp_path: Path, kind: Kind) -> None:
    spy = Spy()
    with launcher(write(tmp_path / "a", kind, ranks=2), spy) as on:
        a, _ = on.begin(0, [10])
        b, _ = on.begin(1, [50])
        first = on.run(on.decode([a, b], [11, 51]))
        second = on.run(on.decode([a, b], [0, 0]), first)
        assert type(spy.last(IDS)).__name__ == "FakeTensor"
        assert first.read()[:2].tolist() == [12, 52]
        gathered = second.gather(np.array([1, 0, 2, 3]))
        third = on.run(on.decode([b, a], [0, 0]), gathered)
        moved_on_device = type(spy.last(IDS)).__name__ == "FakeTensor"
        assert moved_on_device == kind.endswith("rows")  # sorted, whatever their order
        assert second.read()[:2].tolist() == [13, 53]
        assert gathered.read()[:2].tolist() == [53, 13]
        assert third.read()[:2].tolist() == [54, 14]
        again = third.gather(np.array([1, 0, 2, 3])).gather(np.array([1, 0, 2, 3]))
        again.wait()
        fourth = on.run(on.decode([b, a], [0, 0]), again)
        assert fourth.read()[:2].tolist() == [55, 15]


@pytest.mark.parametrize("kind", ["blocks", "rows"])
def test_rule_09_tokens_of_other_rows_are_refused(tmp_path: Path, kind: Kind) -> None:
    with launcher(write(tmp_path / "a", kind)) as on:
        a, b, _, d = (on.begin(slot, [10 + slot])[0] for slot in range(4))
        rows = [a, b, d] if kind == "rows" else [a, b]
        others = [a, b] if kind == "rows" else [b, a]
        for others in ([d, a], [a, d]) if kind == "rows" else ([b, a], [a, d]):
            launched = on.run(on.decode(rows[:2], [11, 12]))
            with pytest.raises(ValueError, match="fed with the tokens of other rows"):
                on.run(on.decode(others, [0, 0]), launched)
            launched.wait()


@pytest.mark.parametrize("kind", ["rows", "blocks"])
def test_rule_09_a_prompt_feeds_from_the_host(tmp_path: Path, kind: Kind) -> None:
    spy = Spy()
    with launcher(write(tmp_path / "a", kind, batch_size=1), spy) as on:
        one = on.place(0)
        prompt = on.run(on.prefill(one, [30, 31]))
        assert on.run(on.decode([one], [0], padded=1), prompt).read().tolist() == [33]
        assert spy.last(IDS).tolist() == [[32]]


@pytest.mark.parametrize("kind", ["blocks", "nxdi rows"])
def test_rule_10_near_a_bucket_s_end_the_next_one_is_taken(tmp_path: Path, kind: Kind) -> None:
    with launcher(write(tmp_path / "a", kind)) as on:
        one = on.place(0, LENGTH)
        on.run(on.prefill(one, [1] * 11))
        sizes = {}
        for length in range(12, LENGTH + 1):
            inputs = on.decode([one], [1])
            sizes[length] = on.model.executable(inputs).name
            on.run(inputs).read()
    names = {f"decode[r4,c{size}]": size for size in (16, 32, 64)}
    taken = {length: names[name] for length, name in sizes.items()}
    assert [length for length, size in taken.items() if size == 16] == [12, 13]
    assert [length for length, size in taken.items() if size == 32] == list(range(14, 30))
    assert max(taken) == LENGTH


@pytest.mark.parametrize("kind", ["blocks", "nxdi rows"])
async def test_rule_10_the_flow_breaks_there(tmp_path: Path, kind: Kind) -> None:
    folder = await asyncio.to_thread(write, tmp_path / "a", kind)
    async with engine_over(folder, token_carry="handoff") as (engine, _):
        told = await engine.generate(prompt_token_ids=[1] * 9, max_tokens=40, temperature=0.0)
        assert told.token_ids == list(range(2, 42))
        assert engine.stats().breaks["bucket_edge"].count == 4  # at 14, 15 and at 30, 31


@pytest.mark.parametrize("kind", ["blocks", "nxdi blocks"])
def test_rule_12_the_block_of_a_decode_is_in_its_table(tmp_path: Path, kind: Kind) -> None:
    spy = Spy(decoder=sum_decoder)
    with launcher(write(tmp_path / "a", kind, decoder=sum_decoder), spy) as on:
        one, token = on.begin(2, [9, 8, 7])
        ids = [9, 8, 7, token]
        launched: NxdLaunched | None = None
        for _ in range(8):  # over two ends of blocks, launched ahead
            page = one.count // BLOCK
            ahead = on.run(on.decode([one], [token]), launched)
            assert spy.last(TABLE)[0, page] == one.blocks[page] > 0
            token = sum_of(ids)
            ids.append(token)
            if launched is not None:
                launched.wait()
            launched = ahead
        assert launched is not None
        assert launched.read()[0] == token


@pytest.mark.parametrize("kind", KINDS)
def test_rule_13_a_prompt_has_been_read_when_its_launch_returns(tmp_path: Path, kind: Kind) -> None:
    with launcher(write(tmp_path / "a", kind)) as on:
        one = on.place(0)
        on.run(on.prefill(one, [3, 4]))
        assert on.fake.core.num_reads == 1
        launched = on.run(on.decode([one], [5]))
        assert on.fake.core.num_reads == 1
        launched.wait()
        two = on.prefill(one, [3, 4])
        two.num_reqs = 2
        two.context_lens = np.array([2, 2], np.int32)
        with pytest.raises(ValueError, match="2 prompts in a step"):
            on.run(two)


@pytest.mark.parametrize("layout", ["rank_out", "out_rank"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_rule_17_values_are_nested_as_the_runtime_wants(
    tmp_path: Path, layout: Any, ranks: int
) -> None:
    folder = write(tmp_path / "a", "nxdi rows", ranks=ranks)
    with launcher(folder, FakeNxd(decoder=count_decoder, layout=layout)) as on:
        one, token = on.begin(0, [7])
        first = on.run(on.decode([one], [token]))
        second = on.run(on.decode([one], [0]), first)
        assert [int(each.read()[0]) for each in (first, second)] == [9, 10]


class Swapped(FakeNxd):
    """A runtime whose results are nested otherwise than it says."""

    def forward_async(self, ranked: Any) -> Any:
        return [list(one) for one in zip(*super().forward_async(ranked), strict=True)]


@pytest.mark.parametrize("layout", ["rank_out", "out_rank"])
def test_rule_17_results_nested_otherwise_are_refused(tmp_path: Path, layout: Any) -> None:
    folder = write(tmp_path / "a", "nxdi rows", ranks=3)
    swapped = Swapped(decoder=count_decoder, layout=layout)
    with launcher(folder, swapped, expect="dropped") as on:
        with pytest.raises(ValueError, match=r"outputs of 1 ranks, of 3 launched"):
            on.begin(0, [7])
        gc.collect()


def test_rule_18_one_rank_is_read_and_all_are_kept_until_then(tmp_path: Path) -> None:
    with launcher(write(tmp_path / "a", "blocks", ranks=3)) as on:
        one, token = on.begin(0, [7])
        before = on.fake.core.num_reads
        launched = on.run(on.decode([one], [token]))
        gc.collect()  # nothing that the program writes may be gone
        ahead = on.run(on.decode([one], [0]), launched)
        launched.wait()
        gc.collect()
        ahead.wait()
        assert on.fake.core.num_reads == before + 2


def shape_of_engine(model: NxdModel) -> BatchShape:
    return BatchShape.of(model.artifact.adapt(EngineConfig()), LENGTH)


@pytest.mark.parametrize("kind", KINDS)
def test_rule_19_warming_up_loads_every_program(tmp_path: Path, kind: Kind) -> None:
    with launcher(write(tmp_path / "a", kind)) as on:
        told: list[tuple[str, int, int | None]] = []
        on.model.warm_up(shape_of_engine(on.model), lambda *one: told.append(one))
        shape = on.model.artifact.shape
        count = len(shape.prefills) + len(shape.decodes)
        assert on.fake.num_cold == count
        assert told == [("warm up", done, count) for done in range(count + 1)]
        one, _ = on.begin(0, list(range(30)))
        for _ in range(8):
            on.run(on.decode([one], [5])).read()
        assert on.fake.num_cold == count


def test_rule_19_what_fails_while_warming_up_is_told(tmp_path: Path) -> None:
    fake = FakeNxd(faults=[Fault(4, step=3)], decoder=count_decoder)
    with (
        launcher(write(tmp_path / "a", "blocks"), fake) as on,
        pytest.raises(OutOfMemory, match="status 4"),
    ):
        on.model.warm_up(shape_of_engine(on.model), None)


@pytest.mark.parametrize("true_async", [True, False])
def test_rule_19_warming_up_measures_whether_launches_return_early(
    tmp_path: Path, true_async: bool
) -> None:
    times = Times(decode_s=0.02)
    fake = FakeNxd(times, true_async=true_async, decoder=count_decoder)
    with launcher(write(tmp_path / "a", "nxdi rows"), fake) as on:
        on.model.warm_up(shape_of_engine(on.model), None)
        assert on.model._device.true_async is true_async


def test_all_rows_of_the_batch_decode_at_once(tmp_path: Path) -> None:
    with launcher(write(tmp_path / "a", "rows")) as on:
        begun = [on.begin(slot, [60 * slot]) for slot in range(BATCH)]
        found = on.run(on.decode([one for one, _ in begun], None)).read()
        assert found.tolist() == [60 * slot + 2 for slot in range(BATCH)]
