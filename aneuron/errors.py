"""Every error that aneuron raises, by whose doing it is.

    AneuronError
    ├── ConfigError            (also ValueError)    the caller's settings
    ├── RequestError                                the caller's request
    │   ├── InvalidRequest     (also ValueError)    a field with a wrong value
    │   ├── ContextTooLong     (also ValueError)    the prompt does not fit
    │   └── Overloaded                              the queue is full
    ├── DeviceError                                 the device's doing
    │   ├── LaunchFailed                            one launch was refused
    │   ├── OutOfMemory                             the device ran out of memory
    │   └── DeviceLost                              fatal: the engine closes
    ├── EngineClosed           (also RuntimeError)  you closed it, or never opened it
    └── InternalError                               our bug; please report it

Cancellation is never one of these: `asyncio.CancelledError` always propagates, and the
reason of an abort is kept on the completion (`abort_reason`).
"""

from __future__ import annotations

from typing import Self

__all__ = [
    "AneuronError",
    "ConfigError",
    "ContextTooLong",
    "DeviceError",
    "DeviceLost",
    "EngineClosed",
    "InternalError",
    "InvalidRequest",
    "LaunchFailed",
    "OutOfMemory",
    "Overloaded",
    "RequestError",
    "engine_failure",
]


class AneuronError(Exception):
    """Base of all errors that aneuron raises; `code` is a stable name for programs.

    Attributes:
        prompt_index: which prompt of `Engine.generate_many` it is about, from 0; else None.
    """

    code = "error"
    prompt_index: int | None = None

    def copy(self) -> Self:
        """Return a fresh instance with the same message, facts and cause.

        Each stream that fails raises an instance of its own, so that tracebacks of
        unrelated tasks do not grow into each other.
        """
        clone = self.__class__.__new__(self.__class__, *self.args)
        clone.args = self.args
        clone.__dict__.update(self.__dict__)
        clone.__cause__ = self.__cause__
        return clone


class ConfigError(AneuronError, ValueError):
    """A setting of the caller is wrong; `param` names it."""

    code = "invalid_config"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestError(AneuronError):
    """A request cannot be served; raised before anything of it is scheduled.

    Attributes:
        param: the field at fault, where one is.
        request_id: the caller's name of the request, where it had one.
    """

    code = "invalid_request"

    def __init__(
        self, message: str, *, param: str | None = None, request_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.request_id = request_id


class InvalidRequest(RequestError, ValueError):
    """A field of the request has a wrong value; `param` names the field."""

    code = "invalid_value"


class ContextTooLong(RequestError, ValueError):
    """The prompt does not fit into the context, or into the whole KV pool."""

    code = "context_length_exceeded"


class Overloaded(RequestError):
    """The waiting queue is full; try again after `retry_after_s` seconds."""

    code = "overloaded"

    def __init__(
        self, message: str, *, retry_after_s: float, request_id: str | None = None
    ) -> None:
        super().__init__(message, request_id=request_id)
        self.retry_after_s = retry_after_s


class DeviceError(AneuronError):
    """The device reported a fault; `device` names it, `__cause__` is what it said."""

    code = "device_error"

    def __init__(self, message: str, *, device: str | None = None) -> None:
        super().__init__(message)
        self.device = device


class LaunchFailed(DeviceError):
    """The device refused one launch (shape, argument); the requests of that step fail."""

    code = "launch_failed"


class OutOfMemory(DeviceError):
    """The device ran out of memory; the requests of that step fail, or loading does."""

    code = "out_of_memory"


class DeviceLost(DeviceError):
    """The device is gone (time-out, terminal status); the engine fails and must be reopened."""

    code = "device_lost"


class EngineClosed(AneuronError, RuntimeError):
    """The engine is not open, or closed while the request ran."""

    code = "engine_unavailable"


class InternalError(AneuronError):
    """A bug of aneuron; please report it with the traceback of its cause."""

    code = "internal_error"


def engine_failure(error: BaseException) -> AneuronError:
    """Return the one typed error to tell users for what ended the engine.

    Of a group, the device's fault is what counts; anything that is not the device's doing
    is our bug.
    """
    if isinstance(error, BaseExceptionGroup):
        faults, _ = error.split(DeviceError)
        found: BaseException = error if faults is None else faults
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        return engine_failure(found)
    if isinstance(error, DeviceError):
        return error
    internal = InternalError(f"the engine failed: {type(error).__name__}: {error}")
    internal.__cause__ = error
    return internal
