"""What a launch of a traced program must hold to, checked on its arguments before it is queued.

Comes in: the arguments of one rank, and which program they are for. Goes out: a `Flight`, or a
`Violation`. What was launched before is remembered: whom a launch feeds, who wrote a block last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from aneuron.testing.fakes.nxd.tensor import FakeTensor, Flight

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aneuron.testing.fakes.faults import Violation, Watch

__all__ = ["PREFILL", "LaunchRules", "Layout"]

PREFILL = "context_encoding_model"
_IDS, _MASK, _POSITIONS, _SEQ_IDS = range(4)
_SLOTS, _TABLE, _QUERIES, _COMPUTED = range(11, 15)
_AHEAD = 2  # tokens that are launched before the host knows them: a launch and the next


@dataclass(frozen=True, slots=True)
class Layout:
    """How an artifact lays out its cache.

    Attributes:
        is_block_kv: in blocks, else in rows by sequence id.
        block_size: tokens of a block; of a row, its length.
        has_prefix: a prompt may continue what is in the cache.
        decode_buckets: context lengths that a decode is compiled for, ascending.
        is_ours: of aneuron's programs, which are told how many tokens a prompt has; NxDI's take
            the first of the highest positions for the last one.
    """

    is_block_kv: bool
    block_size: int
    has_prefix: bool
    decode_buckets: tuple[int, ...]
    is_ours: bool

    @classmethod
    def of_config(cls, config: Mapping[str, Any], decode_buckets: Sequence[int]) -> Layout:
        """Return the layout that a neuron_config.json tells."""
        told = config.get("neuron_config", config)
        is_block_kv = bool(told.get("is_block_kv_layout", False))
        return cls(
            is_block_kv=is_block_kv,
            block_size=int(told["pa_block_size"] if is_block_kv else told["seq_len"]),
            has_prefix=bool(told.get("is_prefix_caching", False)),
            decode_buckets=tuple(sorted(decode_buckets)),
            is_ours="aneuron" in config,
        )


@dataclass(slots=True)
class _Launch:
    """A launch under examination: its arguments as lists, and the cells that it writes."""

    flight: Flight
    args: Sequence[Any]
    rows: list[list[int]]  # positions
    slots: list[list[int]] | None  # of each token; None: the program has no such input
    table: list[list[int]]
    cells: list[tuple[int, int]] = field(default_factory=list)  # block, offset

    @property
    def is_prefill(self) -> bool:
        return self.flight.tag == PREFILL

    def real_rows(self) -> list[int]:
        return [row for row, is_real in enumerate(self.flight.is_real) if is_real]


class LaunchRules:
    """The rules, and what they remember.

    Args:
        layout: of the cache.
        watch: where violations go.
    """

    def __init__(self, layout: Layout, watch: Watch) -> None:
        """Start with nothing launched and an empty cache."""
        self._layout = layout
        self._watch = watch
        self._num_launches: dict[str, int] = {}
        self._prefill: Flight | None = None  # the latest launch, if it was one
        self._last_cell: dict[int, tuple[Flight, int]] = {}  # block → who wrote it, and where
        self._num_written: dict[int, int] = {}  # sequence id → tokens that its row holds
        self._newest: dict[int, int] = {}  # sequence id → position of its newest token
        self._examined: _Launch | None = None

    def check(self, tag: str, args: Sequence[Any]) -> Flight:
        """Check the arguments of a launch; nothing is remembered before `accept`.

        Raises:
            Violation: they break a rule.
        """
        self._check_prefill_was_read()
        launch = self._read(tag, args)
        if launch.is_prefill:
            self._check_prefill(launch)
        else:
            self._check_decode(launch)
        self._check_cells(launch)
        self._examined = launch
        return launch.flight

    def accept(self) -> None:
        """Remember what was checked last: it is in the queue now."""
        launch, self._examined = self._examined, None
        assert launch is not None
        flight = launch.flight
        self._num_launches[flight.tag] = flight.ordinal
        self._prefill = flight if launch.is_prefill else None
        for block, offset in launch.cells:
            self._last_cell[block] = (flight, offset)
        for row, seq_id in enumerate(flight.seq_ids):
            is_real = flight.is_real[row]
            self._num_written[seq_id] = flight.positions[row] + 1 if is_real else 0
            if is_real:
                self._newest[seq_id] = flight.positions[row]

    def num_newer(self, flight: Flight) -> int:
        """Return how many launches of its program came after a launch."""
        return self._num_launches[flight.tag] - flight.ordinal

    # ── what a launch says ──────────────────────────────────────────────────────────────

    def _read(self, tag: str, args: Sequence[Any]) -> _Launch:
        rows = args[_POSITIONS].tolist()
        has_slots = len(args) > _SLOTS and args[_SLOTS].numel() > 0
        has_table = len(args) > _TABLE and args[_TABLE].dim() == 2
        flight = Flight(
            tag=tag,
            ordinal=self._num_launches.get(tag, 0) + 1,
            seq_ids=args[_SEQ_IDS].tolist(),
            positions=[row[-1] for row in rows],
            is_real=[],
            first_blocks=args[_TABLE][:, 0].tolist() if has_table else [0] * len(rows),
        )
        return _Launch(
            flight=flight,
            args=args,
            rows=rows,
            slots=args[_SLOTS].tolist() if has_slots else None,
            table=args[_TABLE].tolist() if has_table else [],
        )

    # ── prefill ─────────────────────────────────────────────────────────────────────────

    def _check_prefill_was_read(self) -> None:
        if self._prefill is not None and not self._prefill.is_settled:
            raise self._broken("a launch behind a prefill that was not read")

    def _check_prefill(self, launch: _Launch) -> None:
        flight = launch.flight
        if len(launch.rows) != 1:
            raise self._broken(f"a prefill of {len(launch.rows)} rows")
        if isinstance(launch.args[_IDS], FakeTensor):
            raise self._broken("a prefill fed with a device tensor")
        real = self._real_tokens(launch)
        flight.is_real = [bool(real)]
        positions = [launch.rows[0][token] for token in real]
        if not positions:
            return
        flight.positions = [positions[-1]]
        start = positions[0]
        if real != list(range(len(real))) or positions != list(range(start, start + len(real))):
            raise self._broken(f"a prefill whose positions are {positions}")
        if not self._layout.is_ours and max(launch.rows[0]) > positions[-1]:
            raise self._broken(f"padding behind position {positions[-1]} has a higher one")
        if start and not self._layout.has_prefix:
            raise self._broken(f"a prefill from position {start}: it shares a step with a decode")
        if self._layout.is_block_kv:
            self._check_prompt_blocks(launch, positions)
        else:
            launch.cells = [(flight.seq_ids[0] + 1, position) for position in positions]

    def _real_tokens(self, launch: _Launch) -> list[int]:
        if self._layout.is_block_kv and launch.slots is not None:
            return [token for token, slot in enumerate(launch.slots[0]) if slot >= 0]
        mask = launch.args[_MASK][0].tolist()
        return [token for token in range(len(launch.rows[0])) if mask[token]]

    def _check_prompt_blocks(self, launch: _Launch, positions: list[int]) -> None:
        assert launch.slots is not None
        size, start = self._layout.block_size, positions[0]
        self._check_counts(launch, 0, len(positions), start)
        for position, slot in zip(positions, launch.slots[0], strict=False):
            block, offset = divmod(slot, size)
            if block == 0 or offset != position % size:
                raise self._broken(f"position {position} of a prompt written to slot {slot}")
            launch.cells.append((block, offset))
        prefix = launch.table[0] if launch.table else []
        pages = -(-start // size)
        if len(prefix) < pages or min(prefix[:pages], default=1) <= 0:
            raise self._broken(f"{start} tokens of a prefix with the block table {prefix}")

    # ── decode ──────────────────────────────────────────────────────────────────────────

    def _check_decode(self, launch: _Launch) -> None:
        flight = launch.flight
        if launch.slots is not None:
            flight.is_real = [slots[0] >= 0 for slots in launch.slots]
        else:
            flight.is_real = [
                self._goes_on(*row) for row in zip(flight.seq_ids, flight.positions, strict=True)
            ]
        if self._layout.is_block_kv:
            self._check_blocks(launch)
        else:
            self._check_rows(launch)
        if isinstance(launch.args[_IDS], FakeTensor):
            self._check_fed(flight, launch.args[_IDS])
        else:
            self._check_resident(launch)

    def _goes_on(self, seq_id: int, position: int) -> bool:
        """Whether a row decodes what its sequence id holds, or its newest token again."""
        held = self._num_written.get(seq_id, 0)
        return held > 0 and position in (held - 1, held)

    def _check_blocks(self, launch: _Launch) -> None:
        size, real = self._layout.block_size, launch.real_rows()
        if real != list(range(len(real))):
            raise self._broken("padding between rows: with blocks it is at the end")
        if len({launch.flight.seq_ids[row] for row in real}) < len(real):
            raise self._broken(f"a slot twice in {launch.flight.seq_ids}")
        for row in real:
            position, blocks = launch.flight.positions[row], launch.table[row]
            self._check_begun(position)
            page, offset = divmod(position, size)
            if page >= len(blocks) or min(blocks[: page + 1]) <= 0:
                raise self._broken(f"position {position} with the block table {blocks}")
            self._check_counts(launch, row, 1, position)
            launch.cells.append((blocks[page], offset))

    def _check_rows(self, launch: _Launch) -> None:
        seq_ids, widths = launch.flight.seq_ids, self._layout.decode_buckets
        if any(one >= other for one, other in pairwise(seq_ids)):
            raise self._broken(f"sequence ids {seq_ids}: they are to be sorted, each once")
        for row in launch.real_rows():
            position = launch.flight.positions[row]
            self._check_begun(position)
            if position >= (width := launch.args[_MASK].shape[1]):
                raise self._broken(f"position {position} in the bucket {width} of {widths}")
            launch.cells.append((seq_ids[row] + 1, position))

    def _check_begun(self, position: int) -> None:
        if position == 0:
            raise self._broken("a prompt's first token in a decode: they share a step")

    def _check_resident(self, launch: _Launch) -> None:
        """Check that a row that takes its last token from the device finds that one there."""
        flight = launch.flight
        for row in launch.real_rows():
            seq_id, position = flight.seq_ids[row], flight.positions[row]
            newest = self._newest.get(seq_id, -1)
            if int(launch.args[_IDS][row, 0]) < 0 and newest != position - 1:
                raise self._broken(
                    f"position {position} of slot {seq_id} takes its last token from the device, "
                    f"which has that of position {newest}"
                )

    def _check_fed(self, flight: Flight, tokens: FakeTensor) -> None:
        source = tokens.output.flight
        if flight.seq_ids != source.seq_ids or flight.is_real != source.is_real:
            raise self._broken(
                f"rows {flight.seq_ids} fed with the tokens of {source.seq_ids}, or with other "
                "padding: gather, or read them"
            )
        real = [row for row, is_real in enumerate(flight.is_real) if is_real]
        if any(
            flight.first_blocks[row] != source.first_blocks[row]
            or flight.positions[row] != source.positions[row] + 1
            for row in real
        ):
            raise self._broken("a row fed with the token of another request or position")
        length = max((flight.positions[row] + 1 for row in real), default=0)
        edges = [edge for edge in self._layout.decode_buckets if 0 < edge - length <= _AHEAD]
        if real and edges:
            raise self._broken(
                f"fed at a context of {length} tokens: the bucket's edge {edges[0]} is near"
            )

    # ── both ────────────────────────────────────────────────────────────────────────────

    def _check_counts(self, launch: _Launch, row: int, queries: int, computed: int) -> None:
        told = tuple(int(launch.args[index][row, 0]) for index in (_QUERIES, _COMPUTED))
        if told != (queries, computed):
            raise self._broken(
                f"num_queries and computed_context_lens {told}: they are {(queries, computed)}"
            )

    def _check_cells(self, launch: _Launch) -> None:
        """Check that no block is written that a launch nobody waited for wrote for another."""
        if len(set(launch.cells)) < len(launch.cells):
            raise self._broken(f"two tokens written to one cell, of {sorted(launch.cells)}")
        first: dict[int, int] = {}
        for block, offset in launch.cells:
            first.setdefault(block, offset)
        for block, offset in first.items():
            writer, last = self._last_cell.get(block, (None, -1))
            if writer is not None and not writer.is_settled and offset != last + 1:
                raise self._broken(
                    f"block {block} was handed on while launch {writer.ordinal} of {writer.tag}, "
                    "which wrote to it, was in flight"
                )

    def _broken(self, what: str) -> Violation:
        return self._watch.broken(what)
