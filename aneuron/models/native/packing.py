"""Weights as the C++ library multiplies them: in panels of 32 columns, maybe quantised.

Comes in: matrices of a decoder as torch tensors. Goes out: `Packed`, tensors in the layouts that
matrix.h describes, and the structures that point at them. Quantisation: symmetric, per column and
64 to 256 values (int8); with a zero, per column and 32 values, over that part of their range that
loses least (int4), its scales rounded to bfloat16 first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aneuron.models.native.library import Matrix

__all__ = ["KINDS", "Packed", "interleave", "pack"]

KINDS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
_PANEL = 32
_DEPTH = 8  # of every kind, K is a multiple of this
_INT4_GROUP = 32  # of K, with a scale of their own
_INT8_GROUPS = (256, 192, 128, 96, 64)  # the first that divides K; the last pads it
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of a group's range, that int4 tries
_HALF_PANEL = 16


@dataclass(frozen=True, slots=True)
class Packed:
    """One matrix [columns, depth] in panels; absent tensors are None."""

    kind: str
    columns: int
    depth: int  # padded
    group: int
    data: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors that are there, by name."""
        parts = {"data": self.data, "scales": self.scales, "zeros": self.zeros, "bias": self.bias}
        return {f"{name}.{part}": one for part, one in parts.items() if one is not None}

    @classmethod
    def of(cls, name: str, kind: str, columns: int, tensors: dict[str, torch.Tensor]) -> Packed:
        """Return the matrix whose `tensors(name)` these are; shapes tell the rest."""
        data = tensors[f"{name}.data"]
        depth = data.shape[1] * data.shape[3] * (2 if kind == "int4" else 1)
        parts = (tensors.get(f"{name}.{part}") for part in ("scales", "zeros", "bias"))
        scales, zeros, bias = parts
        group = depth if scales is None else depth // scales.shape[1]
        return cls(kind, columns, depth, group, data, scales, zeros, bias)

    @property
    def matrix(self) -> Matrix:
        """The structure that points at these tensors, which must outlive it."""
        parts = (self.data, self.scales, self.zeros, self.bias)
        addresses = [None if part is None else part.data_ptr() for part in parts]
        return Matrix(KINDS[self.kind], self.columns, self.depth, self.group, *addresses)


def pack(weight: torch.Tensor, kind: str, bias: torch.Tensor | None = None) -> Packed:
    """Return a matrix in panels.

    Args:
        weight: [N, K], of any float type.
        kind: one of `KINDS`.
        bias: [N], or None.
    """
    columns, depth = weight.shape
    group = _group(kind, depth)
    padded = _pad(weight.float(), _PANEL, group)
    panels, depth = len(padded) // _PANEL, padded.shape[1]
    long = None if bias is None else _pad(bias.float().unsqueeze(1), _PANEL, 1).squeeze(1)
    if kind == "float32":
        data = _in_panels(padded, 1)
        return Packed(kind, columns, depth, depth, data, bias=long)
    if kind == "bfloat16":
        data = _in_panels(padded.to(torch.bfloat16), 2)
        return Packed(kind, columns, depth, depth, data, bias=long)
    if kind == "int8":
        groups = padded.view(len(padded), depth // group, group)
        scales = groups.abs().amax(dim=2, keepdim=True) / 127
        scales[scales == 0] = 1.0
        stored = ((groups / scales).round() + 128).to(torch.uint8).flatten(1)
        by_panel = scales.view(panels, _PANEL, -1).transpose(1, 2).contiguous()
        return Packed(kind, columns, depth, group, _in_panels(stored, 4), by_panel, bias=long)
    return _pack_int4(padded, columns, long)


def _group(kind: str, depth: int) -> int:
    """Return how many values of K share a scale, or what K is padded to."""
    if kind == "int4":
        return _INT4_GROUP
    if kind == "int8":
        return next((size for size in _INT8_GROUPS if depth % size == 0), _INT8_GROUPS[-1])
    return _DEPTH


def _pack_int4(padded: torch.Tensor, columns: int, bias: torch.Tensor | None) -> Packed:
    group, depth = _INT4_GROUP, padded.shape[1]
    num_groups = depth // group
    groups = padded.view(-1, num_groups, group)
    best = _rounded(groups, 1.0)
    for shrink in _SHRINKS[1:]:
        tried = _rounded(groups, shrink)
        is_better = tried[0] < best[0]
        best = tuple(torch.where(is_better, new, old) for new, old in zip(tried, best, strict=True))
    _, scales, zeros, values = best
    stored = values.to(torch.uint8)
    pairs = stored.view(len(padded), depth // _DEPTH, 2, 4)
    data = _in_panels((pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1), 4)

    def by_panel(values: torch.Tensor) -> torch.Tensor:
        in_panels = values.view(-1, _PANEL, num_groups).transpose(1, 2)
        return in_panels.bfloat16().contiguous()

    both = by_panel(scales), by_panel(scales * zeros)
    return Packed("int4", columns, depth, group, data, *both, bias=bias)


def _rounded(groups: torch.Tensor, shrink: float) -> tuple[torch.Tensor, ...]:
    """Round groups of values, [N, groups, size], to 16 steps over a part of their range.

    Returns:
        The squared error, scale and zero, [N, groups, 1] each, and the steps.
    """
    low = groups.amin(dim=2, keepdim=True).clamp(max=0) * shrink
    high = groups.amax(dim=2, keepdim=True).clamp(min=0) * shrink
    scales = ((high - low) / 15).bfloat16().float()
    scales[scales == 0] = 1.0
    zeros = (-low / scales).round()
    steps = ((groups / scales).round() + zeros).clamp(0, 15)
    errors = ((steps - zeros) * scales - groups).square().sum(dim=2, keepdim=True)
    return errors, scales, zeros, steps


def interleave(fused: torch.Tensor) -> torch.Tensor:
    """Return gate and up, [2 * size, ...] one after the other, in turns of 16 columns.

    So that each panel has 16 columns of either. A size that 16 does not divide is padded.
    """
    gate, up = (_pad(half.reshape(len(half), -1), _HALF_PANEL, 1) for half in fused.chunk(2))
    turns = torch.stack(
        [half.view(-1, _HALF_PANEL, half.shape[1]) for half in (gate, up)], dim=1
    ).flatten(0, 2)
    return turns if fused.dim() > 1 else turns.squeeze(1)


def _pad(weight: torch.Tensor, columns: int, depth: int) -> torch.Tensor:
    """Return it with zeros behind, so that these numbers divide its sizes."""
    missing = -len(weight) % columns, -weight.shape[1] % depth
    return torch.nn.functional.pad(weight, (0, missing[1], 0, missing[0]))


def _in_panels(rows: torch.Tensor, run: int) -> torch.Tensor:
    """Return [N, K] as [N / 32, K / run, 32, run]."""
    panels = rows.view(-1, _PANEL, rows.shape[1] // run, run)
    return panels.transpose(1, 2).contiguous()
