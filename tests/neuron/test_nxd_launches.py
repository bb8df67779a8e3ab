"""What one launch of a traced program takes: inputs that are kept, buckets, ids of the host."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aneuron.testing.fakes import FakeNxd
from tests.neuron.artifacts import LENGTH, OURS, count_decoder, real_decoder, write, write_real
from tests.neuron.launching import Spy, launcher

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.neuron.artifacts import Kind

IDS = 0


class Weakly(FakeNxd):
    """A played runtime that knows the ids of each launch, and does not keep them."""

    def __init__(self) -> None:
        super().__init__(decoder=count_decoder)
        self.ids: list[weakref.ref[Any]] = []

    def forward_async(self, ranked: Sequence[Sequence[Any]]) -> list[list[Any]]:
        self.ids.append(weakref.ref(ranked[0][IDS]))
        return super().forward_async(ranked)


@pytest.mark.parametrize("kind", ["blocks", "nxdi blocks", "nxdi rows"])
def test_rule_06_a_launch_keeps_what_it_reads_until_it_was_read(tmp_path: Path, kind: Kind) -> None:
    fake = Weakly()
    with launcher(write(tmp_path / "a", kind), fake) as on:
        one, token = on.begin(0, [7])
        fake.core.hold()
        first = on.run(on.decode([one], [token]))
        second = on.run(on.decode([one], [0]), first)
        gc.collect()
        assert [ids() is not None for ids in fake.ids] == [False, True, True]
        fake.core.go_on()
        assert [int(each.read()[0]) for each in (first, second)] == [9, 10]
        gc.collect()
        assert [ids() is not None for ids in fake.ids] == [False] * 3
    assert fake.violations == []


def test_rule_06_a_launch_keeps_what_feeds_it(tmp_path: Path) -> None:
    with launcher(write(tmp_path / "a", "nxdi blocks", ranks=2)) as on:
        one, token = on.begin(0, [7])
        first = on.run(on.decode([one], [token]))
        second = on.run(on.decode([one], [0]), first)
        assert first.read()[0] == 9
        on.fake.core.hold()
        third = on.run(on.decode([one], [0]), second)
        on.fake.core.go_on()
        assert second.read()[0] == 10
        del first, second
        gc.collect()
        assert third.read()[0] == 11


ABOVE = {7: 8, 8: 16, 15: 16, 16: LENGTH, LENGTH - 1: LENGTH, LENGTH: LENGTH}
AT_LEAST = {7: 8, 8: 8, 9: 16, 16: 16, 17: LENGTH, LENGTH: LENGTH}


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("rows", ABOVE), ("nxdi rows", ABOVE), ("blocks", AT_LEAST), ("nxdi blocks", AT_LEAST)],
)
def test_rule_07_a_prompt_s_bucket_is_strictly_above_it_on_rows(
    tmp_path: Path, kind: Kind, sizes: dict[int, int]
) -> None:
    """As NxD Inference does; with blocks a full bucket is taken."""
    with launcher(write(tmp_path / "a", kind)) as on:
        names = {
            count: on.model.executable(on.prefill(on.place(0, LENGTH), [3] * count)).name
            for count in sizes
        }
    assert names == {count: f"prefill[t{size},p0]" for count, size in sizes.items()}


@pytest.mark.parametrize("kind", OURS)
def test_rule_09_a_row_without_an_id_is_not_fed_that_of_its_slot(
    tmp_path: Path, kind: Kind
) -> None:
    """-1 would mean the slot's last token; a row whose logits were NaN fails by itself."""
    whole = real_decoder()
    whole.embed.weight.data[9] = torch.nan
    spy = Spy(decoder=None)
    with launcher(write_real(tmp_path / "a", kind, whole, ranks=1), spy) as on:
        rows = [on.begin(slot, [3 + slot])[0] for slot in (0, 1)]
        launched = on.run(on.decode(rows, [5, 9]))
        good, bad = launched.values()[:2]
        assert good >= 0 > bad
        ahead = on.run(on.decode(rows, [0, 0]), launched)
        assert spy.last(IDS)[:2, 0].tolist() == [good, 0]
        assert ahead.values()[0] >= 0
