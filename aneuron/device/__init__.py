"""The device protocol, and how a device is found by name.

A device runs executables in order and gives `DeviceFuture`s. What an executable computes is
the models' business (`aneuron.models`); where, when and on which thread is the device's.
One file, or package, per kind: `sim`, `cpu`, `neuron`; `profiles` says how long real devices take,
`limits` what a process may use of its machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

from aneuron.errors import ConfigError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    import numpy as np

    from aneuron.config import BatchShape
    from aneuron.futures import DeviceFuture
    from aneuron.plans import ModelInput, ModelSpec

__all__ = [
    "BUILTIN_DEVICES",
    "DEVICE_NAMES",
    "Device",
    "Executable",
    "Model",
    "OwnsCores",
    "PlacedModel",
    "SplitExecutable",
    "SplitModel",
    "open_device",
]

DEVICE_NAMES = ("cpu", "neuron", "sim", "sim:PROFILE")
# A device of another name, of yours, runs what it is given.
BUILTIN_DEVICES = ("cpu", "neuron", "sim")


class Executable(Protocol):
    """A program of fixed shape, for one bucket.

    Attributes:
        name: for people: "decode[r8,b16]".
        sampled_dtype: of the ids that it samples.
    """

    name: str
    sampled_dtype: str

    def __call__(self, inputs: ModelInput, fed: Any, /) -> Any:
        """Run; runs on the device's thread.

        Args:
            inputs: the columns of the launch; to be read now, not kept.
            fed: the device value fed: ids, or None for `inputs.input_ids`; to a part that
                samples, the `Logits` of the part before.

        Returns:
            The sampled ids, a device value [inputs.num_sampled]; or, from a model that
            cannot sample on the device, logits float32 [inputs.num_sampled, vocab].
        """


class SplitExecutable(NamedTuple):
    """The same program in parts, so that the host may have a say before a token is drawn.

    Attributes:
        forward: gives `Logits`.
        sampling: fed with them; gives what the whole program gives.
        hooked: fed with them; gives those of `inputs.edits.hooked`, float32 [H, V].
    """

    forward: Executable
    sampling: Executable
    hooked: Executable


class Model(Protocol):
    """Loaded weights and their executables; engines may share it."""

    spec: ModelSpec

    def with_kv(self, num_blocks: int, block_size: int, num_slots: int = 0) -> Self:
        """Return the model over device state of its own.

        Args:
            num_blocks: of the KV pool; the null block comes on top.
            block_size: tokens in a block.
            num_slots: whose last tokens and parameters it keeps; a spare one comes on top.
        """

    def executable(self, inputs: ModelInput) -> Executable:
        """Return the executable for the bucket of these inputs."""


class SplitModel(Model, Protocol):
    """A model with `spec.is_split`."""

    def split(self, inputs: ModelInput) -> SplitExecutable:
        """Return the parts of the executable for the bucket of these inputs."""


@runtime_checkable
class PlacedModel(Model, Protocol):
    """A model whose executables and state are on one device from the start."""

    def on(self, device: Any) -> Self:
        """Return it on that device; `with_kv` comes after.

        Raises:
            ConfigError: the device is of another kind.
        """

    def warm_up(
        self, shape: BatchShape, progress: Callable[[str, int, int | None], None] | None
    ) -> None:
        """Run every bucket once, on padding only, so that no request waits for a compile.

        Args:
            shape: the buckets.
            progress: called as `progress("warm up", done, total)`.

        Raises:
            ConfigError: a program cannot be compiled.
            DeviceError: a program failed.
        """


class Device(Protocol):
    """Runs executables first in, first out; never blocks the loop."""

    name: str

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind to the loop that futures resolve on, and start the device's threads.

        Raises:
            ConfigError: another engine has it open.
        """

    def launch(
        self,
        executable: Executable,
        inputs: ModelInput,
        *,
        read: bool = True,
        feed: DeviceFuture | None = None,
    ) -> DeviceFuture:
        """Queue a program and return the future of its sampled ids at once.

        `inputs.input_ids` may be the unread future of an earlier launch. The inputs belong
        to the launch until its future has resolved. Faults come with the future.

        Args:
            executable: the program.
            inputs: its inputs.
            read: whether the ids are copied to the host as soon as the program has ended.
                False: only if somebody awaits the future, behind what is queued by then;
                `DeviceFuture.discard` waits for the end of the program alone.
            feed: the unread future of the part before, to a part of a split executable.
        """

    def gather(self, tokens: DeviceFuture, order: np.ndarray) -> DeviceFuture:
        """Queue `tokens[order]` and return its unread future; both int [rows]."""

    def for_rank(self, rank: int, num_ranks: int) -> Device:
        """Return the device of a rank, of `num_ranks`: 0 is this one, the output rank.

        The others are siblings of the same kind with threads of their own; each is started
        and closed, and reports its faults, by itself. Asked again, it gives the same ones.
        """

    def memory_budget(self) -> int:
        """Return the bytes that a KV pool may take by default."""

    def close(self) -> DeviceFuture:
        """Let queued work end, then the threads; the future resolves when they have."""


@runtime_checkable
class OwnsCores(Device, Protocol):
    """A device whose cores are one engine's alone from the moment it loads a model."""

    def reserve(self) -> None:
        """Take the device for a model that is about to be loaded; `close` gives it back.

        Raises:
            ConfigError: another engine has it open, or loads a model onto it.
        """

    def disconnect(self) -> None:
        """Give a reserved device back that was never started, with its cores; may block."""


def open_device(name: str) -> Device:
    """Return a device by its name, `sim:PROFILE` being `sim` with a latency profile.

    Nothing is started yet.

    Raises:
        ConfigError: no such device, or no such profile.
    """
    match name.split(":", 1):
        case ["sim"]:
            from aneuron.device.sim import SimDevice

            return SimDevice()
        case ["sim", profile_name]:
            from aneuron.device.profiles import profile
            from aneuron.device.sim import SimDevice

            return SimDevice.of_profile(profile(profile_name, param="device"))
        case ["cpu"]:
            from aneuron.device.cpu import CpuDevice

            return CpuDevice()
        case ["neuron"]:
            from aneuron.device.neuron.found import open_neuron

            return open_neuron()
    raise ConfigError(
        f"unknown device {name!r}; known are auto, {', '.join(DEVICE_NAMES)}", param="device"
    )
