"""The played compiler: it takes what can be traced, and fails as the real one does."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from aneuron.testing.fakes import FakeCompiler, Fault, Violation
from tests.neuron.nxd_rig import write_artifact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from aneuron.device.neuron.raw import NxdCompiler


class Adder(nn.Module):
    """Counts up; its state is how often it ran."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, twice: bool = False) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(1, dtype=dtype))
        self.twice = twice

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        runs = self.get_buffer("runs").float() + 1
        return (ids + 1, runs, runs) if self.twice else (ids + 1, runs)


class Odd(Adder):
    """Its ranks differ."""

    def __init__(self, *, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids, runs = super().forward(ids)
        return ids if self.rank == 0 else ids.float(), runs


@dataclass
class Program:
    tag: str = "token_generation_model"
    module: Callable[[int], nn.Module] = lambda _: Adder()
    inputs: Sequence[tuple[torch.Tensor, ...]] = field(
        default_factory=lambda: [(torch.zeros((2, 1), dtype=torch.int32),)]
    )
    aliases: Sequence[str] = ("runs",)


def a_program() -> Any:
    return Program()


def compiled(folder: Path, *programs: Any, **options: Any) -> Any:
    compiler: NxdCompiler = FakeCompiler(**options)
    compiler.compile(programs, folder, ranks=2)
    return json.loads((folder / "model.pt").read_text("utf-8"))


def test_it_lists_shapes_and_aliases(tmp_path: Path) -> None:
    told = compiled(tmp_path, Program())
    bucket = {"inputs": [[[2, 1], "int32"]], "outputs": [[[2, 1], "int32"]]}
    assert told == {
        "ranks": 2,
        "programs": [
            {"tag": "token_generation_model", "aliases": ["runs"], "buckets": [bucket]},
        ],
    }


def test_it_says_how_far_it_is(tmp_path: Path) -> None:
    compiler = FakeCompiler()
    seen: list[tuple[Any, ...]] = []
    other: Any = Program(inputs=[(torch.zeros((1, 8), dtype=torch.int32),)])
    both = [a_program(), other]
    compiler.compile(both, tmp_path, ranks=1, progress=lambda *told: seen.append(told))
    assert seen == [("compile", 1, 2), ("compile", 2, 2)]
    assert compiler.num_compiled == 2


def test_rule_15_it_fails_with_a_code_and_writes_nothing(tmp_path: Path) -> None:
    compiler = FakeCompiler(faults=[Fault("compile", step=2)])
    other: Any = Program(inputs=[(torch.zeros((1, 8), dtype=torch.int32),)])
    with pytest.raises(RuntimeError, match="NCC_EBVF030"):
        compiler.compile([a_program(), other], tmp_path, ranks=1)
    assert list(tmp_path.iterdir()) == []
    compiler.compile([a_program(), other], tmp_path, ranks=1)  # the fault came once
    assert compiler.violations == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"inputs": [(torch.zeros((2, 1), dtype=torch.int64),)]}, "an input is int64"),
        ({"aliases": ()}, "2 outputs with 0 aliases"),
        ({"module": lambda _: Adder(twice=True)}, "3 outputs with 1 aliases"),
        ({"module": lambda _: Adder(dtype=torch.float16)}, "alias runs is .*float16"),
        ({"module": lambda rank: Odd(rank=rank)}, "ranks differ"),
    ],
)
def test_what_cannot_be_traced_is_refused(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    with pytest.raises(RuntimeError, match=text):
        compiled(tmp_path, replace(Program(), **change))


def test_rule_07_two_programs_of_the_same_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="inputs of the same shapes"):
        compiled(tmp_path, Program(), Program(tag="context_encoding_model"))


def test_it_compiles_into_an_empty_folder(tmp_path: Path) -> None:
    write_artifact(tmp_path)
    with pytest.raises(Violation, match="a folder with files"):
        compiled(tmp_path, Program())


async def test_rule_02_it_does_not_compile_on_the_loop(tmp_path: Path) -> None:
    compiler = FakeCompiler()
    with pytest.raises(Violation, match="on the event loop's thread"):
        compiler.compile([], tmp_path, ranks=1)
    await asyncio.to_thread(compiler.compile, [a_program()], tmp_path, ranks=1)
    assert len(compiler.violations) == 1
