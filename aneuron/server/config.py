"""`ServerConfig`: how the server behaves, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aneuron.errors import ConfigError

__all__ = ["ServerConfig"]

_REASONING_FIELDS = ("reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the server behaves.

    Attributes:
        served_model_names: that requests may ask for; answers say the one that was asked for, and
            metrics the first. Without any, the engine's name of the model.
        api_keys: one of which a request must bring, printable and without spaces; none are asked
            for if there are none.
        max_body_bytes: of a request; larger ones are refused with 413.
        cors_origins: of browsers that may call; without any, CORS is off.
        drain_s: seconds that open requests may go on after a signal to stop.
        stall_s: seconds without a finished step, while work waits, after which `/health` is 503.
        ping_s: seconds of silence on a stream after which a comment line is sent; 0 sends none.
        tool_parser: format of tool calls: a name, "auto" by the model's own, None never parses.
        reasoning_field: of messages and deltas, for what the model thinks: "reasoning" or
            "reasoning_content".

    Raises:
        ConfigError: a setting is wrong; `param` names it.
    """

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 2**20
    cors_origins: tuple[str, ...] = ()
    drain_s: float = 30.0
    stall_s: float = 90.0
    ping_s: float = 15.0
    tool_parser: str | None = "auto"
    reasoning_field: str = "reasoning"

    def __post_init__(self) -> None:
        """Check each setting."""
        for name in ("served_model_names", "api_keys", "cors_origins"):
            values = getattr(self, name)
            if isinstance(values, str) or not all(isinstance(one, str) and one for one in values):
                raise ConfigError(f"{name} must be texts that are not empty", param=name)
            object.__setattr__(self, name, tuple(values))
        if any(not key.isprintable() or " " in key for key in self.api_keys):
            # A header that carried it would be taken for another, so that none could match.
            raise ConfigError("api_keys must be printable, without spaces", param="api_keys")
        size = self.max_body_bytes
        if type(size) is not int or size < 1:
            raise ConfigError(
                "max_body_bytes must be a number of 1 or more", param="max_body_bytes"
            )
        for name in ("drain_s", "stall_s", "ping_s"):
            value = getattr(self, name)
            sound = isinstance(value, int | float) and not isinstance(value, bool)
            if not sound or not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be seconds, 0 or more", param=name)
        if self.reasoning_field not in _REASONING_FIELDS:
            message = f"reasoning_field must be {' or '.join(_REASONING_FIELDS)}"
            raise ConfigError(message, param="reasoning_field")
