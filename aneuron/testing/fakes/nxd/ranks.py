"""The ranks of one traced program: a module and a state for each, run at the same time.

Comes in: the arguments of each rank, on the core's thread. Goes out: the plain outputs of each.
Ranks meet where the program reduces: a sum over what all of them bring, in order of rank.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["ModuleOfRank", "RankGroup"]


class ModuleOfRank(Protocol):
    """Makes the module of a rank."""

    def __call__(
        self, rank: int, reduce: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.nn.Module:
        """Return the module; it calls `reduce` for the sum over all ranks."""


class RankGroup:
    """A module for each rank, which all programs share, as they share weights and state.

    Args:
        make: makes the module of a rank.
        aliases: names of the buffers that the outputs behind the plain ones replace.
        weights: of each rank.
    """

    def __init__(
        self,
        make: ModuleOfRank,
        aliases: Sequence[str],
        weights: Sequence[Mapping[str, torch.Tensor]],
    ) -> None:
        """Make the modules, load the weights, and zero the state.

        Raises:
            ValueError: the weights of a rank are not those of its module.
        """
        self.ranks = len(weights)
        self._aliases = aliases
        self._barrier = threading.Barrier(self.ranks)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * self.ranks
        self._modules = [self._module(make, rank, one) for rank, one in enumerate(weights)]

    def num_bytes(self) -> int:
        """Return what weights and state of all ranks take."""
        return sum(
            tensor.nbytes
            for module in self._modules
            for tensor in (*module.parameters(), *module.buffers())
        )

    def run(self, args: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Run a program on the arguments of each rank; return each rank's plain outputs.

        Raises:
            Exception: the first one that a rank raised.
        """
        outputs: list[list[torch.Tensor]] = [[] for _ in args]
        errors: list[Exception] = []
        self._barrier.reset()

        def run_rank(rank: int) -> None:
            try:
                outputs[rank] = self._run_rank(rank, args[rank])
            except threading.BrokenBarrierError:  # another rank has failed
                return
            except Exception as error:  # noqa: BLE001  raised below, on the core's thread
                errors.append(error)
                self._barrier.abort()

        others = [
            threading.Thread(target=run_rank, args=(rank,), name=f"fake-rank{rank}", daemon=True)
            for rank in range(1, self.ranks)
        ]
        for thread in others:
            thread.start()
        run_rank(0)
        for thread in others:
            thread.join()
        if errors:
            raise errors[0]
        return outputs

    def _run_rank(self, rank: int, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        module = self._modules[rank]
        with torch.no_grad():
            outputs = list(module(*args))
            num_plain = len(outputs) - len(self._aliases)
            for name, replaced in zip(self._aliases, outputs[num_plain:], strict=True):
                state = module.get_buffer(name)
                if replaced.data_ptr() != state.data_ptr():
                    state.copy_(replaced)
            return [output.clone() for output in outputs[:num_plain]]

    def _reduce(self, rank: int, part: torch.Tensor) -> torch.Tensor:
        self._parts[rank] = part
        self._barrier.wait()
        whole = self._parts[0].clone()
        for other in self._parts[1:]:
            whole += other
        self._barrier.wait()  # nobody brings the next part before all have summed
        return whole

    def _module(
        self, make: ModuleOfRank, rank: int, weights: Mapping[str, torch.Tensor]
    ) -> torch.nn.Module:
        module = make(rank, partial(self._reduce, rank))
        wrong = module.load_state_dict(dict(weights), strict=False, assign=True)
        missing = set(wrong.missing_keys) - set(self._aliases)
        if missing or wrong.unexpected_keys:
            raise ValueError(
                f"weights of rank {rank}: missing {sorted(missing)}, "
                f"unexpected {sorted(wrong.unexpected_keys)}"
            )
        for name in self._aliases:
            module.get_buffer(name).zero_()
        return module.eval()
