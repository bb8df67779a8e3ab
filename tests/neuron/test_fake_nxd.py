"""The played NxD runtime: what a launch must hold to. One deliberate violation for each rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from aneuron.testing.fakes import Violation
from tests.neuron.nxd_rig import BATCH, IDS, MASK, POSITIONS, SEQ_IDS, SLOTS, Row, rig

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ["blocks", "slots", "rows"]


def violation(text: str) -> Any:
    return pytest.raises(Violation, match=text)


# ── what is allowed ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("layout", ["rank_out", "out_rank"])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_count_on_while_launched_ahead(
    tmp_path: Path, kind: Any, layout: Any, ranks: int
) -> None:
    with rig(tmp_path, kind, layout=layout, ranks=ranks) as one:
        rows = [Row(0, 3), Row(2, 5)]
        newest = one.begin(*rows)
        flying = one.launch(one.decode(rows, newest))
        found = []
        for _ in range(6):
            for row in rows:
                row.position += 1
            ahead = one.launch(one.decode(rows, one.tokens(flying)))
            found.append(one.read(flying))
            flying = ahead
        found.append(one.read(flying))
        at = [0, 2] if kind == "rows" else [0, 1]
        for place, last in zip(at, newest, strict=True):
            assert [ids[place] for ids in found] == list(range(last + 1, last + 8))


def test_rows_come_and_go_with_resident_tokens(tmp_path: Path) -> None:
    with rig(tmp_path, "slots") as one:
        first, other = Row(1, 3), Row(3, 4)
        (last,) = one.begin(first)
        flying = one.launch(one.decode([first], [-1]))
        first.position += 1
        ahead = one.launch(one.decode([first], [-1]))
        assert one.read(flying)[0] == last + 1
        (begun,) = one.begin(other)
        first.position += 1
        together = one.launch(one.decode([other, first], [-1, -1]))
        assert one.read(ahead)[0] == last + 2
        assert one.read(together)[:2] == [begun + 1, last + 3]


def test_a_blocking_forward_gives_what_a_launch_gives(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        row = Row(0, 3)
        newest = one.begin(row)
        (ids,) = one.fake.forward(one.decode([row], newest))
        assert ids.dtype == torch.int32
        assert ids.shape == (BATCH, 1)
        assert ids[0, 0] == newest[0] + 1


# ── rule 2 and the handles ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "read",
    [
        lambda one: one.cpu(),
        lambda one: one.numpy(),
        lambda one: one.tolist(),
        np.asarray,
        len,
        bool,
        lambda one: one[0],
        lambda one: one + 1,
    ],
)
def test_rule_02_a_handle_is_opaque(tmp_path: Path, read: Any) -> None:
    with rig(tmp_path, expect="only to_cpu reads it") as one:
        row = Row(0, 3)
        outputs = one.launch(one.decode([row], one.begin(row)))
        with pytest.raises((Violation, TypeError)) as caught:
            read(outputs[0][0])
        if caught.type is TypeError:  # Python's own, where an operator is missing
            one.fake.violations.append("only to_cpu reads it")
        assert one.read(outputs)[0] == 14


def test_a_handle_tells_its_shape_and_is_viewed_in_another(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        row = Row(0, 3)
        outputs = one.launch(one.decode([row], one.begin(row)))
        ids = outputs[0][0]
        assert (ids.shape, ids.dtype) == (torch.Size([BATCH, 1]), torch.int32)
        assert ids.reshape(-1).shape == torch.Size([BATCH])
        assert ids.view(1, -1).dtype == torch.int32
        with pytest.raises(RuntimeError, match="shape"):
            ids.reshape(3, 3)
        assert one.fake.to_cpu(ids.reshape(-1)).shape == (BATCH,)
        one.read(outputs)


# ── rule 5: the ring of two ─────────────────────────────────────────────────────────────


def three_launches(one: Any) -> list[Any]:
    row = Row(0, 3)
    launches = []
    (newest,) = one.begin(row)
    for step in range(3):
        launches.append(one.launch(one.decode([row], [newest + step])))
        row.position += 1
        launches[-1][0][0].output.flight.entry.wait_ended()  # there is room for the next
    return launches


def test_rule_05_a_handle_behind_two_newer_launches_is_overwritten(tmp_path: Path) -> None:
    with rig(tmp_path, expect="newer launches have overwritten") as one:
        first, second, third = three_launches(one)
        with violation("newer launches have overwritten"):
            one.read(first)
        with violation("fed with an output that newer launches have overwritten"):
            one.launch(one.decode([Row(0, 6)], one.tokens(first)))
        assert one.read(second)[0] == 15
        assert one.read(third)[0] == 16
        first[0][0].output.flight.entry.wait()  # nothing can be read, but it is drained


def test_rule_05_a_handle_that_was_read_is_read_again(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        row = Row(0, 3)
        (newest,) = one.begin(row)
        launches = []
        for step in range(3):
            launches.append(one.launch(one.decode([row], [newest + step])))
            row.position += 1
            one.read(launches[-1])
        assert [one.read(launch)[0] for launch in launches] == [14, 15, 16]


# ── rule 7: static shapes ───────────────────────────────────────────────────────────────


def test_rule_07_unknown_shapes_raise_what_a_router_raises(tmp_path: Path) -> None:
    raised = [torch.jit.Error, ValueError, KeyError, torch.jit.Error]
    with rig(tmp_path, expect="no program for the shapes") as one:
        for error in raised:
            args = one.decode([], [])
            args[MASK] = args[MASK][:, :-1]
            with pytest.raises(error, match="no program for the shapes"):
                one.launch(args)
        assert one.fake.core.num_launches == 0


def test_rule_07_int64_is_refused(tmp_path: Path) -> None:
    with rig(tmp_path, expect="argument 2 of rank 0 is int64") as one:
        args = one.decode([], [])
        args[POSITIONS] = args[POSITIONS].to(torch.int64)
        with violation("int64"):
            one.launch(args)


def test_rule_07_another_dtype_than_compiled_is_refused(tmp_path: Path) -> None:
    with rig(tmp_path, expect=r"argument 0 is torch.float32, compiled for torch.int32") as one:
        args = one.decode([], [])
        args[IDS] = args[IDS].float()
        with violation("compiled for"):
            one.launch(args)


def test_arguments_are_tensors_of_the_host_or_of_this_runtime(tmp_path: Path) -> None:
    with rig(tmp_path, expect="is a ndarray") as one:
        args: list[Any] = list(one.decode([], []))
        args[IDS] = args[IDS].numpy()
        with violation("argument 0 of rank 0 is a ndarray"):
            one.launch(args)


# ── rule 8: padding ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_rule_08_padding_gives_other_garbage_each_time(tmp_path: Path, kind: Any) -> None:
    with rig(tmp_path, kind) as one:
        row = Row(0, 3)
        (newest,) = one.begin(row)
        found = [one.read(one.launch(one.decode([row], [newest]))) for _ in range(3)]
        assert [ids[0] for ids in found] == [newest + 1] * 3
        garbage = [tuple(ids[1:]) for ids in found]
        assert len(set(garbage)) == 3


@pytest.mark.parametrize("seq_ids", [[1, 0, 2, 3], [0, 1, 1, 3]])
def test_rule_08_sequence_ids_are_sorted_each_once(tmp_path: Path, seq_ids: list[int]) -> None:
    with rig(tmp_path, "rows", expect="sequence ids") as one:
        args = one.decode([Row(0, 3)], one.begin(Row(0, 3)))
        args[SEQ_IDS] = torch.tensor(seq_ids, dtype=torch.int32)
        with violation("they are to be sorted"):
            one.launch(args)


def test_rule_08_padding_over_a_live_row_shows_in_its_tokens(tmp_path: Path) -> None:
    with rig(tmp_path, "rows") as one:
        live, other = Row(1, 5), Row(0, 3)
        last, newest = one.begin(live, other)
        one.read(one.launch(one.decode([other], [newest])))  # pads with the id that is in use
        ids = one.read(one.launch(one.decode([live], [last])))
        assert ids[1] != last + 1


@pytest.mark.parametrize("kind", ["blocks", "slots"])
def test_rule_08_with_blocks_padding_is_at_the_end(tmp_path: Path, kind: Any) -> None:
    with rig(tmp_path, kind, expect="padding between rows") as one:
        rows = [Row(0, 3), Row(1, 3)]
        args = one.decode(rows, one.begin(*rows))
        args[SLOTS][0] = -1
        with violation("padding between rows"):
            one.launch(args)


def test_rule_08_padding_writes_nothing(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        row = Row(0, 3)
        (newest,) = one.begin(row)
        args = one.decode([row, Row(0, 2)], [newest, 99])  # the second would spoil the first
        args[SLOTS][1] = -1
        one.read(one.launch(args))
        row.position += 1
        assert one.read(one.launch(one.decode([row], [newest + 1])))[0] == newest + 2


def test_a_slot_has_one_row(tmp_path: Path) -> None:
    with rig(tmp_path, "slots", expect="a slot twice") as one:
        rows = [Row(0, 3), Row(1, 3)]
        args = one.decode(rows, one.begin(*rows))
        args[SEQ_IDS][1] = 0
        with violation("a slot twice"):
            one.launch(args)
