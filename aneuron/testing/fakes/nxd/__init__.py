"""The traced NxD runtime, played.

`runtime` is the seam and the launches, `rules` what a launch must hold to, `tensor` the handles,
`ranks` the modules that run.
"""

from __future__ import annotations

from aneuron.testing.fakes.nxd.runtime import FakeNxd

__all__ = ["FakeNxd"]
