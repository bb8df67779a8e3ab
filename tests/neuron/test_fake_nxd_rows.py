"""The played NxD runtime: whom a launch feeds, which cells it writes, and what shares a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from aneuron.testing.fakes import Violation
from tests.neuron.nxd_rig import (
    BATCH,
    BLOCK,
    COMPUTED,
    IDS,
    MASK,
    POSITIONS,
    QUERIES,
    SEQ_IDS,
    SLOTS,
    TABLE,
    Row,
    rig,
)

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ["blocks", "slots", "rows"]


def violation(text: str) -> Any:
    return pytest.raises(Violation, match=text)


# ── rule 9: what feeds what ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["order", "one less", "one more", "position"])
def test_rule_09_only_the_same_rows_in_the_same_order_are_fed(
    tmp_path: Path, kind: Any, change: str
) -> None:
    with rig(tmp_path, kind, expect="fed with") as one:
        rows = [Row(0, 3), Row(1, 3), Row(2, 3)]
        flying = one.launch(one.decode(rows[:2], one.begin(*rows[:2])))
        one.begin(rows[2])
        for row in rows[:2]:
            row.position += 1
        match change:
            case "order":
                fed = [rows[1], rows[0]]
                if kind == "rows":  # they are sorted, so it takes other ids
                    fed = [rows[1], rows[2]]
            case "one less":
                fed = rows[:1]
            case "one more":
                fed = rows
            case _:
                rows[0].position -= 1
                fed = rows[:2]
        with violation("fed with"):
            one.launch(one.decode(fed, one.tokens(flying)))
        one.read(flying)


def test_rule_09_what_has_other_blocks_is_another_request(tmp_path: Path) -> None:
    with rig(tmp_path, expect="the token of another request") as one:
        row, other = Row(0, 3), Row(1, 3)
        newest = one.begin(row, other)
        flying = one.launch(one.decode([row], newest[:1]))
        other.position += 1
        args = one.decode([other], one.tokens(flying))
        args[SEQ_IDS][0] = row.seq_id  # programs with blocks need not look at it
        with violation("the token of another request"):
            one.launch(args)
        one.read(flying)


def test_rule_09_another_slot_is_not_fed(tmp_path: Path) -> None:
    with rig(tmp_path, "slots", expect="fed with the tokens of") as one:
        row = Row(0, 3)
        flying = one.launch(one.decode([row], one.begin(row)))
        moved = Row(2, 4, blocks=row.blocks)
        with violation(r"rows \[2, 4, 4, 4\] fed with the tokens of \[0, 4, 4, 4\]"):
            one.launch(one.decode([moved], one.tokens(flying)))
        one.read(flying)


def test_rule_09_another_padded_size_has_no_program(tmp_path: Path) -> None:
    with rig(tmp_path, expect="no program for the shapes") as one:
        row = Row(0, 3)
        flying = one.launch(one.decode([row], one.begin(row)))
        row.position += 1
        args: list[Any] = list(one.decode([row], one.tokens(flying)))
        args[IDS] = tuple(one.reshape(1, -1) for one in args[IDS])
        with pytest.raises(torch.jit.Error):
            one.launch(args)
        one.read(flying)


def test_rule_09_a_resident_token_is_that_of_the_position_before(tmp_path: Path) -> None:
    with rig(tmp_path, "slots", expect="takes its last token from the device") as one:
        row = Row(0, 3)
        one.begin(row)
        row.position += 1  # a step was left out
        with violation("which has that of position 2"):
            one.launch(one.decode([row], [-1]))


# ── rule 10: the bucket's edge ──────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "is_near"), [(13, False), (14, True), (15, True), (16, False)])
def test_rule_10_nothing_is_fed_near_a_buckets_edge(
    tmp_path: Path, kind: Any, length: int, *, is_near: bool
) -> None:
    # Programs are compiled for 16, 32 and 64 tokens of context.
    with rig(tmp_path, kind, expect="edge 16 is near" if is_near else None) as one:
        row = Row(0, length - 2)
        prompt = list(range(10, 8 + length))
        (newest,) = one.read(one.launch(one.prefill(row, prompt, size=64)))
        flying = one.launch(one.decode([row], [newest], size=32))
        row.position += 1
        args = one.decode([row], one.tokens(flying), size=16 if length < 16 else 32)
        if is_near:
            with violation("the bucket's edge 16 is near"):
                one.launch(args)
            assert one.read(flying)[0] == newest + 1
            flying = one.launch(one.decode([row], [newest + 1], size=32))  # known, it may
            assert one.read(flying)[0] == newest + 2
        else:
            ahead = one.launch(args)
            assert one.read(flying)[0] == newest + 1
            assert one.read(ahead)[0] == newest + 2


# ── rules 11 and 12: blocks ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_rule_11_a_block_is_not_handed_on_before_its_writer_was_waited_for(
    tmp_path: Path, kind: Any
) -> None:
    with rig(tmp_path, kind, expect="was handed on while launch 2") as one:
        row = Row(0, 2)
        newest = one.begin(row)
        one.read(one.launch(one.decode([row], newest)))
        row.position += 1
        wasted = one.launch(one.decode([row], [newest[0] + 1]))  # its end was seen too late
        with violation("was handed on"):
            one.launch(one.prefill(Row(0, 2), [70, 71]))
        one.read(wasted)
        assert one.read(one.launch(one.prefill(Row(0, 2), [70, 71])))[0] == 72


def test_rule_11_a_decode_too_may_not_take_a_block_in_flight(tmp_path: Path) -> None:
    with rig(tmp_path, expect="was handed on while launch 1") as one:
        row, other = Row(0, 5), Row(1, 4)
        newest = one.begin(row, other)
        wasted = one.launch(one.decode([row], newest[:1]))
        other.blocks[1] = row.blocks[1]
        with violation("block 2 was handed on"):
            one.launch(one.decode([other], newest[1:]))
        one.read(wasted)


@pytest.mark.parametrize("missing", ["null block", "too short"])
def test_rule_12_the_block_of_the_next_token_is_in_the_table(tmp_path: Path, missing: str) -> None:
    with rig(tmp_path, expect="with the block table") as one:
        row = Row(0, BLOCK if missing == "null block" else 6)
        newest = one.begin(row)
        args = one.decode([row], newest, size=16)
        if missing == "null block":
            args[TABLE][0, 1] = 0
        else:
            args[POSITIONS][0, 0] = 16
        with violation("with the block table"):
            one.launch(args)


def test_rule_12_rows_stay_in_their_bucket(tmp_path: Path) -> None:
    with rig(tmp_path, "rows", expect="in the bucket 16") as one:
        row = Row(0, 16)
        one.read(one.launch(one.prefill(row, list(range(16)), size=64)))
        with violation("position 16 in the bucket 16"):
            one.launch(one.decode([row], [16], size=16))


def test_rule_12_a_prompt_is_written_where_its_positions_are(tmp_path: Path) -> None:
    with rig(tmp_path, expect="of a prompt written to slot") as one:
        args = one.prefill(Row(0, 3), [1, 2, 3])
        args[SLOTS][0, 2] += 1
        with violation("position 2 of a prompt written to slot 7"):
            one.launch(args)


def test_rule_12_a_cell_is_written_once_in_a_launch(tmp_path: Path) -> None:
    with rig(tmp_path, expect="two tokens written to one cell") as one:
        rows = [Row(0, 3), Row(1, 3)]
        newest = one.begin(*rows)
        rows[1].blocks = rows[0].blocks
        with violation("two tokens written to one cell"):
            one.launch(one.decode(rows, newest))


@pytest.mark.parametrize("index", [QUERIES, COMPUTED])
def test_rule_12_counts_agree_with_positions(tmp_path: Path, index: int) -> None:
    with rig(tmp_path, expect="num_queries and computed_context_lens") as one:
        row = Row(0, 3)
        newest = one.begin(row)
        for args in (one.decode([row], newest), one.prefill(Row(1, 3), [1, 2, 3])):
            args[index][0] += 1
            with violation("num_queries and computed_context_lens"):
                one.launch(args)


def test_rule_12_a_prefix_has_its_blocks(tmp_path: Path) -> None:
    with rig(tmp_path, expect="tokens of a prefix with the block table") as one:
        row = Row(0, 6)
        args = one.prefill(row, [1, 2, 3])
        args[POSITIONS][0, :3] += BLOCK
        args[SLOTS][0, :3] += BLOCK
        args[COMPUTED][0] = BLOCK
        with violation("4 tokens of a prefix with the block table"):
            one.launch(args)


# ── rule 13: prefill and decode ─────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("then", ["decode", "prefill"])
def test_rule_13_a_prefill_is_read_before_anything_is_launched(
    tmp_path: Path, kind: Any, then: str
) -> None:
    with rig(tmp_path, kind, expect="behind a prefill that was not read") as one:
        row, other = Row(0, 3), Row(1, 3)
        newest = one.begin(row)
        args = one.decode([row], newest) if then == "decode" else one.prefill(Row(2, 2), [1, 2])
        flying = one.launch(one.prefill(other, [1, 2]))
        with violation("behind a prefill that was not read"):
            one.launch(args)
        one.read(flying)
        one.read(one.launch(args))


def test_rule_13_a_decode_begins_no_prompt(tmp_path: Path) -> None:
    text = "a prompt's first token in a decode"
    with rig(tmp_path, expect=text) as one, violation(text):
        one.launch(one.decode([Row(0, 0)], [5]))


def test_rule_13_a_prefill_decodes_nothing(tmp_path: Path) -> None:
    with rig(tmp_path, "rows", expect="it shares a step with a decode") as one:
        args = one.prefill(Row(0, 3), [1, 2])
        args[POSITIONS][0, :2] = torch.tensor([7, 8])
        with violation("a prefill from position 7"):
            one.launch(args)


def test_rule_13_a_prefill_has_one_row(tmp_path: Path) -> None:
    with rig(tmp_path, "rows", expect="a prefill of 2 rows") as one:
        args = [torch.cat((arg, arg)) for arg in one.prefill(Row(0, 3), [1, 2])]
        rules = one.fake._rules
        assert rules is not None
        with violation("a prefill of 2 rows"):
            rules.check("context_encoding_model", args)  # no artifact has such a program


def test_rule_13_a_prefill_is_one_prompt_in_order(tmp_path: Path) -> None:
    with rig(tmp_path, "rows", expect="a prefill whose positions are") as one:
        args = one.prefill(Row(0, 3), [1, 2])
        args[POSITIONS][0, 1] = 0
        with violation(r"a prefill whose positions are \[0, 0\]"):
            one.launch(args)


@pytest.mark.parametrize("kind", ["blocks", "rows"])
@pytest.mark.parametrize("count", [1, 2])
def test_rule_08_padding_has_no_higher_position_than_a_prompt(
    tmp_path: Path, kind: Any, count: int
) -> None:
    text = f"padding behind position {count - 1} has a higher one"
    with rig(tmp_path, kind, expect=text) as one:
        args = one.prefill(Row(0, count), [5] * count)
        args[POSITIONS][0, count:] = count
        with violation(text):
            one.launch(args)


def test_rule_13_a_prefill_is_not_fed(tmp_path: Path) -> None:
    with rig(tmp_path, "rows", expect="a prefill fed with a device tensor") as one:
        args: list[Any] = list(one.prefill(Row(0, 3), [1, 2]))
        flying = one.launch(one.decode([], []))
        args[IDS] = tuple(rank[0].reshape(1, -1) for rank in flying)
        args[POSITIONS], args[MASK] = args[POSITIONS][:, :BATCH], args[MASK][:, :BATCH]
        one.fake._buckets[
            tuple(arg[0].shape if isinstance(arg, tuple) else arg.shape for arg in args)
        ] = _prefill_bucket(one)
        with violation("a prefill fed with a device tensor"):
            one.launch(args)
        one.read(flying)


def _prefill_bucket(one: Any) -> Any:
    return next(
        bucket for bucket in one.fake._buckets.values() if bucket.tag == "context_encoding_model"
    )
