"""Settings of an engine: checked once when it is made, frozen, the same for all its parts.

Comes in: keyword arguments of `Engine`. Goes out: an `EngineConfig`, the `BatchShape` and
the `Buckets` that executables are made for. Pure.
"""

from __future__ import annotations

import bisect
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TypedDict

from aneuron.errors import ConfigError

__all__ = ["MOST_CELLS", "BatchShape", "Buckets", "EngineConfig", "EngineOptions"]

_CHOICES = {
    "token_carry": ("auto", "host", "handoff", "resident"),
    "dtype": ("auto", "float32", "bfloat16"),
    "quantization": ("int8", "int4", None),
    "kv_cache_dtype": ("auto", "int8"),
    "scheduling_policy": ("fcfs", "priority"),
}
# Buffers are made for the largest step, and cells of the KV cache have int32 numbers.
_MOST = {
    "max_num_seqs": 2**16,
    "max_num_batched_tokens": 2**20,
    "block_size": 2**16,
    "max_in_flight_steps": 64,
    "num_ranks": 4096,
    "tensor_parallel_size": 4096,
    "num_threads": 1024,
    "interleaved_prefill_tokens": 2**20,
}
_BESIDE = ("device", "model", "progress", "revision", "tokenizer")  # of `Engine`, no settings
_OPTIONAL = ("num_threads", "interleaved_prefill_tokens")
MOST_CELLS = 2**31 - 1
_DRAFT_TOKENS = 4
_MOST_DRAFT_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine runs.

    Attributes:
        async_scheduling: schedule one step ahead; False is the synchronous baseline.
        token_carry: how a step's tokens become the next step's input; "auto" takes the
            best that the executables support, "host" belongs to the baseline.
        dtype: of the weights and the KV cache; "auto" is bfloat16 where the processor has
            it in hardware, else float32.
        quantization: of the weights on a processor, "int8" or "int4"; None is none. Needs a
            compiler on the machine, else it is left out; see docs/performance.md.
        kv_cache_dtype: of keys and values on a processor: "auto" is that of `dtype`, "int8" has
            8 bits and a scale for each token and head, about half of bfloat16's memory.
        enforce_eager: compile nothing; slower on a processor.
        num_threads: that compute on a processor; None takes one per core.
        max_model_len: longest context in tokens; None takes the model's own.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: most prompt tokens in one step; longer prompts are cut.
        interleaved_prefill_tokens: the same for a step between those of many requests that decode:
            the less, the shorter the gaps between their tokens, and the longer until others have
            their first. It is more while few decode (`max_num_batched_tokens` / n), and while many
            tokens wait (1/96 of them). None takes 40 on a processor, elsewhere
            `max_num_batched_tokens`.
        max_waiting: most requests beside `max_num_seqs`, each choice counting as one; beyond,
            `generate` raises `Overloaded`. None is any number.
        scheduling_policy: "fcfs" serves first who came first; "priority" who has the lowest
            `priority`, for whom others are preempted.
        enable_prefix_caching: share the blocks of prompts that begin alike.
        block_size: tokens in one block of the KV cache.
        num_kv_blocks: size of the KV pool of each rank; None derives it from `kv_cache_bytes`.
        kv_cache_bytes: memory for the KV pools of all ranks; None asks the device.
        num_seqs_buckets, num_tokens_buckets, num_blocks_buckets: sizes that executables are
            made for (rows, packed prompt tokens, blocks per row); None takes powers of two
            and one step between them, an empty sequence means exact sizes.
        max_in_flight_steps: steps between `schedule()` and applied tokens.
        step_timeout_s: after this long without a result the device counts as lost.
        shutdown_s: `aclose()` waits this long for the device.
        num_ranks: devices that run every step alike; the first one's tokens count.
        tensor_parallel_size: NeuronCores that each traced program spans; only on such programs.
        speculative: draft tokens and verify several in one step; a mapping such as
            `{"method": "ngram", "num_tokens": 4}`: the tokens that followed the same words
            earlier on (prompt lookup), at most so many a step. None drafts none.
        timeline: keep the times of the last steps, for `engine.timeline`'s pictures.

    Raises:
        ConfigError: a setting is wrong; `param` names it.
    """

    async_scheduling: bool = True
    token_carry: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    enforce_eager: bool = False
    num_threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    interleaved_prefill_tokens: int | None = None
    max_waiting: int | None = None
    scheduling_policy: str = "fcfs"
    enable_prefix_caching: bool = True
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None
    num_seqs_buckets: Sequence[int] | None = None
    num_tokens_buckets: Sequence[int] | None = None
    num_blocks_buckets: Sequence[int] | None = None
    max_in_flight_steps: int = 2
    step_timeout_s: float = 60.0
    shutdown_s: float = 5.0
    num_ranks: int = 1
    tensor_parallel_size: int = 1
    speculative: Mapping[str, object] | None = None
    timeline: bool = False

    def __post_init__(self) -> None:
        """Check each setting, then those that depend on each other."""
        for name in ("async_scheduling", "enable_prefix_caching", "enforce_eager", "timeline"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false", param=name)
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                known = ", ".join(one or "or left out" for one in allowed)
                raise ConfigError(
                    f"{name} must be one of {known}, not {getattr(self, name)!r}", param=name
                )
        self._check_counts()
        for name in ("step_timeout_s", "shutdown_s"):
            _check_seconds(name, getattr(self, name))
        for name in ("num_seqs_buckets", "num_tokens_buckets", "num_blocks_buckets"):
            _check_buckets(name, getattr(self, name))
        self._check_carry()
        if self.speculative is not None:
            object.__setattr__(self, "speculative", _check_speculative(self.speculative))

    def _check_counts(self) -> None:
        for name, most in _MOST.items():
            if name not in _OPTIONAL or getattr(self, name) is not None:
                _check_count(name, getattr(self, name), high=most)
        for name in ("max_model_len", "num_kv_blocks", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.max_waiting is not None:
            _check_count("max_waiting", self.max_waiting, low=0)

        if (self.num_kv_blocks or 0) >= MOST_CELLS // self.block_size:
            raise ConfigError(
                f"num_kv_blocks {self.num_kv_blocks} of {self.block_size} tokens are over 2^31 - 1",
                param="num_kv_blocks",
            )

    def _check_carry(self) -> None:
        if self.async_scheduling and self.token_carry == "host":
            raise ConfigError(
                "token_carry='host' is the synchronous baseline: pass async_scheduling=False",
                param="token_carry",
            )
        if self.async_scheduling and self.max_in_flight_steps < 2:
            raise ConfigError(
                "with one step in flight nothing overlaps: pass async_scheduling=False",
                param="max_in_flight_steps",
            )
        if not self.async_scheduling and self.token_carry in ("handoff", "resident"):
            raise ConfigError(
                f"token_carry={self.token_carry!r} needs async_scheduling=True",
                param="token_carry",
            )

    @classmethod
    def build(cls, options: dict[str, object]) -> EngineConfig:
        """Return the configuration for keyword arguments of `Engine`.

        Raises:
            ConfigError: an unknown name or a wrong value.
        """
        known = {item.name for item in fields(cls)}
        for name in options:
            if name not in known:
                names = ", ".join(sorted({*known, *_BESIDE}))
                raise ConfigError(f"unknown setting {name!r}; known are {names}", param=name)
        return cls(**options)  # type: ignore[arg-type]  # each value is checked above

    @property
    def num_draft_tokens(self) -> int:
        """Most tokens that a step verifies beside the one that it samples anyway."""
        return 0 if self.speculative is None else int(str(self.speculative["num_tokens"]))

    @property
    def depth(self) -> int:
        """Steps that may be in flight: 1 is the synchronous baseline."""
        return self.max_in_flight_steps if self.async_scheduling else 1


class EngineOptions(TypedDict, total=False):
    """Settings beside the named ones; see `EngineConfig` for what each means."""

    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    enforce_eager: bool
    num_threads: int | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    interleaved_prefill_tokens: int | None
    max_waiting: int | None
    scheduling_policy: str
    enable_prefix_caching: bool
    block_size: int
    num_kv_blocks: int | None
    kv_cache_bytes: int | None
    num_seqs_buckets: Sequence[int] | None
    num_tokens_buckets: Sequence[int] | None
    num_blocks_buckets: Sequence[int] | None
    max_in_flight_steps: int
    step_timeout_s: float
    shutdown_s: float
    num_ranks: int
    tensor_parallel_size: int
    speculative: Mapping[str, object] | None
    timeline: bool


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes that one dimension of the executables comes in; empty means any size."""

    sizes: tuple[int, ...]
    largest: int = field(init=False)

    def __post_init__(self) -> None:
        """Remember the largest size."""
        object.__setattr__(self, "largest", self.sizes[-1] if self.sizes else 0)

    @classmethod
    def up_to(cls, limit: int, given: Sequence[int] | None, *, smallest: int = 1) -> Buckets:
        """Return the given sizes, or powers of two with one step between them, up to `limit`.

        The limit itself is always one of the sizes, so that every step fits.
        """
        if given is not None:
            smaller = sorted({size for size in given if size < limit})
            return cls((*smaller, limit) if given else ())
        steps: set[int] = {limit}
        size = smallest
        while size < limit:
            steps |= {size, min(limit, size * 3 // 2)}
            size *= 2
        return cls(tuple(sorted(steps)))

    def fit(self, size: int) -> int:
        """Return the smallest size that holds `size`."""
        if not self.sizes:
            return size
        return self.sizes[bisect.bisect_left(self.sizes, size)]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Sizes of the batch and the buckets that launches are padded to."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_slots: int
    depth: int  # steps in flight
    rows: Buckets
    tokens: Buckets
    blocks: Buckets
    num_draft_tokens: int = 0  # most that a step verifies of one request

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> BatchShape:
        """Return the shape for these settings."""
        max_blocks = -(-max_model_len // config.block_size)
        num_tokens = config.max_num_batched_tokens
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=num_tokens,
            max_model_len=max_model_len,
            block_size=config.block_size,
            num_slots=config.max_num_seqs * config.depth,
            depth=config.depth,
            rows=Buckets.up_to(config.max_num_seqs, config.num_seqs_buckets),
            tokens=Buckets.up_to(num_tokens, config.num_tokens_buckets, smallest=16),
            blocks=Buckets.up_to(max_blocks, config.num_blocks_buckets),
            num_draft_tokens=config.num_draft_tokens,
        )


def _check_count(name: str, value: object, *, low: int = 1, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
        kind = "a positive integer" if low else "an integer from 0"
        raise ConfigError(f"{name} must be {kind}, not {value!r}", param=name)
    if high is not None and int(value) > high:
        raise ConfigError(f"{name} must be at most {high}, not {value}", param=name)


def _check_speculative(given: object) -> Mapping[str, object]:
    name = "speculative"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} must be a mapping, not {given!r}", param=name)
    if unknown := sorted(set(map(str, given)) - {"method", "num_tokens"}):
        raise ConfigError(
            f"{name}: unknown key {unknown[0]!r}; known are method and num_tokens", param=name
        )
    if given.get("method") != "ngram":
        raise ConfigError(
            f"{name}: method must be 'ngram', not {given.get('method')!r}", param=name
        )
    num_tokens = given.get("num_tokens", _DRAFT_TOKENS)
    try:
        _check_count("num_tokens", num_tokens, high=_MOST_DRAFT_TOKENS)
    except ConfigError as fault:
        raise ConfigError(f"{name}: {fault}", param=name) from None
    return MappingProxyType({"method": "ngram", "num_tokens": int(str(num_tokens))})


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} must be a number of seconds, not {value!r}", param=name)
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name} must be over 0, not {value}", param=name)


def _check_buckets(name: str, sizes: object) -> None:
    if sizes is None:
        return
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise ConfigError(f"{name} must be a list of sizes, not {sizes!r}", param=name)
    for size in sizes:
        _check_count(name, size)
