"""A played native PyTorch runtime, on this processor.

`FakeNative` (fake.py) is what adapters call; below it are graphs (graphs.py), the cores with what
is queued for them (cores.py), and tensors that only graphs can read (tensors.py).
"""

from __future__ import annotations

from aneuron.testing.fakes.native.fake import FakeNative

__all__ = ["FakeNative"]
