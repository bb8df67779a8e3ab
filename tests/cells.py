"""A device that remembers what wrote each cell of its KV cache, for tests of the scheduler.

It runs plans in the order in which they were made, as a real one does. A cell holds the name
of the whole context that it was written for, so a row that reads a cell of another content,
one that nobody wrote, or one that was overwritten, shows at once; and a sampled token is a
function of that context, so every request has one right answer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from aneuron import FinishReason

if TYPE_CHECKING:
    from aneuron.plans import NewRequest, SchedulerOutput
    from aneuron.request import Request

EOS = 0
VOCAB = 5
UNWRITTEN = GARBAGE = -1


def name_of(context: int, token: int) -> int:
    """The name of a context that is one token longer."""
    return (context * 1_000_003 + token + 1) % (2**61 - 1)


def sampled(context: int, choice: int) -> int:
    """What the model says after a context: the end id once in 13 times."""
    value = (context * 31 + choice * 7919) % 1009
    return EOS if value % 13 == 0 else 1 + value % (VOCAB - 1)


def names_of(ids: list[int]) -> list[int]:
    return list(itertools.accumulate(ids, name_of, initial=17))[1:]


def alone(request: Request, limit: int) -> tuple[list[int], FinishReason]:
    """What a request answers, and why it ends, if nothing else happens to it."""
    assert request.prompt_ids is not None
    params, ids = request.params, request.prompt_ids.tolist()
    room = limit - len(ids)
    room = room if params.max_tokens is None else min(room, params.max_tokens)
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    output: list[int] = []
    while len(output) < room:
        output.append(sampled(names_of(ids + output)[-1], request.choice))
        if output[-1] in stop_ids and len(output) >= min(params.min_tokens, room):
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


# ── the device ──────────────────────────────────────────────────────────────────────────


@dataclass
class Row:
    """A request in the batch, as the runner and the device know it."""

    request: Request
    table: list[int]
    ids: list[int]  # prompt and what the device sampled
    end: int  # tokens to compute before it decodes
    computed: int  # tokens launched
    is_spoilt: bool = False  # a step of it failed: what follows is garbage


@dataclass
class Work:
    """What one launch does for a row."""

    slot: int
    row: Row
    start: int
    count: int
    samples: list[tuple[int, Row]]  # slots and rows that get a token from its last position
    copies: list[int]  # blocks that its last one is copied to
    sharers: set[int]  # ids of requests that may hold a block that it writes

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.count)


@dataclass
class Device:
    """Rows, cells, and launches that have not run yet."""

    size: int
    cells: np.ndarray  # [blocks, block_size], name of the context that each was written for
    rows: dict[int, Row] = field(default_factory=dict)

    def launch(self, plan: SchedulerOutput, requests: dict[int, Request]) -> list[Work]:
        """Bring rows up to date and take a plan, as `InputBatch` does."""
        for slot in plan.removed_slots:
            self.rows.pop(slot, None)
        for new in plan.new_requests:
            self.add(new, requests[new.request_id])
        for slot, column, block in zip(
            plan.block_slots.tolist(), plan.block_columns.tolist(), plan.block_ids.tolist(),
            strict=True,
        ):  # fmt: skip
            assert column == len(self.rows[slot].table), "a block goes after the last one"
            self.rows[slot].table.append(block)
        work = [
            self.work(plan, slot, count)
            for slot, count in zip(plan.slots.tolist(), plan.num_scheduled.tolist(), strict=True)
            if count
        ]
        woken = [slot for fork in plan.forks for slot in fork.slots.tolist()]
        assert {one.slot for one in work} | set(woken) == set(plan.slots.tolist())
        assert len(plan.slots) == len(work) + len(woken) == len(set(plan.slots.tolist()))
        return work

    def add(self, new: NewRequest, request: Request) -> None:
        assert new.slot not in self.rows, "the slot's last owner has not left the batch"
        assert new.token_ids.tolist() == request.token_ids().tolist()
        assert new.num_computed <= len(new.token_ids)
        blocks, ids = new.block_ids.tolist(), new.token_ids.tolist()
        self.rows[new.slot] = Row(request, blocks, ids, len(ids), new.num_computed)

    def work(self, plan: SchedulerOutput, slot: int, count: int) -> Work:
        row = self.rows[slot]
        start, row.computed = row.computed, row.computed + count
        samples, copies = ([(slot, row)] if row.computed >= row.end else []), []
        sharers = {one.request_id for one in row.request.unforked}
        for fork in plan.forks:
            if fork.slot == slot:
                assert row.computed == row.end, "choices wake with the end of the prompt"
                woken = [(one, self.rows[one]) for one in fork.slots.tolist()]
                samples += woken
                sharers |= {one.request.request_id for _, one in woken}
                copies = fork.copied_blocks.tolist()
                assert len(copies) == (len(woken) if row.end % self.size else 0)
                assert all(one.computed == row.end for _, one in woken)
        if plan.is_decode:
            assert count == 1
            assert start >= row.end, "its prompt is not computed"
        else:
            assert start + count <= row.end
        return Work(slot, row, start, count, samples, copies, sharers)

    def run(self, work: list[Work], *, fails: bool) -> dict[int, int]:
        """Run a launch; return the token that each slot gets."""
        tokens: dict[int, int] = {}
        for one in work:
            row = one.row
            row.is_spoilt |= fails
            for at in one.positions:
                name = GARBAGE
                if not row.is_spoilt:
                    self.check_context(row, at)
                    name = names_of(row.ids[: at + 1])[-1]
                self.cells[row.table[at // self.size], at % self.size] = name
        for one in work:  # once all tokens are written
            source = one.row.table[(one.start + one.count - 1) // self.size]
            for block in one.copies:
                self.cells[block] = self.cells[source]
            for slot, row in one.samples:
                row.is_spoilt |= one.row.is_spoilt
                context = names_of(one.row.ids[: one.start + one.count])[-1]
                tokens[slot] = 1 if row.is_spoilt else sampled(context, row.request.choice)
                row.ids.append(tokens[slot])
        return tokens

    def check_context(self, row: Row, num_tokens: int) -> None:
        """Every cell that a row reads was written for exactly its own context."""
        at = np.arange(num_tokens)
        cells = self.cells[np.array(row.table, np.int64)[at // self.size], at % self.size]
        assert cells.tolist() == names_of(row.ids[:num_tokens]), f"{row.request} reads others' KV"
