"""Latency profiles of real devices, for the simulated one: what was published, and where.

A profile gives the time of a program from the shape of its inputs. Each figure is either
published, and names its source, or inferred, and tells its formula. Files are those of the
repository aws-neuron/aws-neuron-sdk; what others measured is named as theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aneuron.plans import ModelInput

__all__ = ["FILE_SUFFIX", "PROFILES", "Figure", "Profile", "profile"]

FILE_SUFFIX = ".json"  # of a profile in a file: `profile_files`


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of milliseconds, and where it comes from.

    Attributes:
        ms: the number.
        source: the file that has it, or the formula that gives it.
        is_inferred: whether nobody has published it.
    """

    ms: float
    source: str
    is_inferred: bool = False

    def __str__(self) -> str:
        mark = "inferred: " if self.is_inferred else ""
        return f"{self.ms:.4g} ms ({mark}{self.source})"


@dataclass(frozen=True, slots=True)
class Profile:
    """How long a device's programs take; callable as the `latency` of `SimDevice`.

        decode:  decode + decode_row · (rows - 1)          rows with padding
        prefill: prefill + prefill_token · tokens          tokens with padding

    Attributes:
        name: as in `sim:NAME`.
        decode: a decode of one row.
        decode_row: what each further row adds. Figures exist for up to 8 rows; above that
            the line is continued, which is inferred.
        prefill: what a prefill costs whatever its length; None: all of it as a decode.
        prefill_token: what each token of it adds.
        gap: what a step costs beyond its program when the host waits for it.
        skew: how much later the last rank ends than the first.
    """

    name: str
    decode: Figure
    decode_row: Figure
    prefill: Figure | None
    prefill_token: Figure
    gap: Figure
    skew: Figure

    def __call__(self, inputs: ModelInput) -> float:
        """Return the latency of one program in seconds; a draft verified is like a row more."""
        if inputs.is_decode or inputs.spec_decode_metadata is not None:
            return self.decode_s(len(inputs.positions))
        return self.prefill_s(len(inputs.positions))

    def decode_s(self, num_rows: int) -> float:
        """Return the seconds of a decode of `num_rows` rows, padding included."""
        return (self.decode.ms + self.decode_row.ms * (num_rows - 1)) / 1000

    def prefill_s(self, num_tokens: int) -> float:
        """Return the seconds of a prefill of `num_tokens` tokens, padding included."""
        base = self.decode if self.prefill is None else self.prefill
        return (base.ms + self.prefill_token.ms * num_tokens) / 1000

    @property
    def gap_s(self) -> float:
        """Seconds that a step costs beyond its program in sync mode."""
        return self.gap.ms / 1000

    @property
    def skew_s(self) -> float:
        """Seconds from the first rank's end to the last one's."""
        return self.skew.ms / 1000

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Yield each figure with its name, for a table."""
        for name in ("decode", "decode_row", "prefill", "prefill_token", "gap", "skew"):
            figure = getattr(self, name)
            if figure is not None:
                yield name, figure


def profile(name: str, *, param: str = "profile") -> Profile:
    """Return the profile of this name, or the one that a .json file of this name holds.

    Raises:
        ConfigError: there is none; `param` is the setting that named it.
    """
    if name.endswith(FILE_SUFFIX):
        from aneuron.device.profile_files import load_profile

        return load_profile(Path(name), param=param)
    if name not in PROFILES:
        known = ", ".join(PROFILES)
        raise ConfigError(
            f"unknown latency profile {name!r}; known are {known}, and {FILE_SUFFIX} files",
            param=param,
        )
    return PROFILES[name]


def _inferred(ms: float, formula: str) -> Figure:
    return Figure(ms, formula, is_inferred=True)


_INF2_LATENCY = "about-neuron/benchmarks/inf2/latency_data_decoder.csv"
_INF2_THROUGHPUT = "about-neuron/benchmarks/inf2/throughput_data_decoder.csv"
_TRN1_LATENCY = "about-neuron/benchmarks/trn1/latency_data_decoder.csv"
_TRN1_THROUGHPUT = "about-neuron/benchmarks/trn1/throughput_data_decoder.csv"
_TRN2_8B = "vllm-neuron/docs: tutorial-eagle3-speculative-decoding-llama-3-1.md"
_TRN2_70B = "libraries/nxd-inference/tutorials/llama70b_perf_comparison.csv"
_TRN2_70B_WHICH = (
    "in the SDK documentation's version of it, with 814 and 19.6 ms; another has 575.6 and 19.8"
)
_ASYNC_DOC = "vllm-neuron/docs/design/framework/async_execution.md"
_ASYNC_DEMO = (
    "examples/vllm_neuron/basics/async/async_vs_sequential_autoregressive.py "
    "in jinhuang12/vllm-neuron, an unofficial copy"
)

_GAP = Figure(0.437, f"{_ASYNC_DOC}: host gap between launches that are not queued ahead")
_SKEW = Figure(0.080, f"{_ASYNC_DOC}: spread of one program over 64 cores")
_NOTHING = _inferred(0.0, "0: the source ran one small program and says nothing of it")

# Lines through published points: ms per token of a prefill, and what is left at none.
_INF2_8B_TOKEN = (102 - 25) / (2048 - 128)
_INF2_8B_BASE = 25 - 128 * _INF2_8B_TOKEN
_TRN1_8B_TOKEN = (153.02 - 17.09) / (4096 - 128)
_TRN1_8B_BASE = 17.09 - 128 * _TRN1_8B_TOKEN
_TRN1_70B_TOKEN = (547 - 53.2) / (2048 - 128)
_TRN1_70B_BASE = 53.2 - 128 * _TRN1_70B_TOKEN
# How much a row adds, as a share of the first row.
_TRN1_8B_GROWTH = (7.65 - 5.86) / 7 / 5.86
_TRN1_70B_GROWTH = (32 - 26.2) / 3 / 26.2
# Where a device or a model has too few figures: how its time compares.
_TRN2_8B_PREFILL = 51 / (_TRN1_8B_BASE + 512 * _TRN1_8B_TOKEN)
_INF2_PREFILL = 102 / (_TRN1_8B_BASE + 2048 * _TRN1_8B_TOKEN)
_TRN2_8B_DECODE = 10.5 / (1 + _TRN1_8B_GROWTH)
_TRN2_70B_FLOOR = 20.0

PROFILES = {
    one.name: one
    for one in (
        Profile(
            name="inf2-llama3-8b",
            decode=Figure(6.42, f"{_INF2_LATENCY}: TPOT p50, TP 24, 1 row, window 4096"),
            decode_row=_inferred(
                (10.45 - 6.42) / 7,
                f"(10.45 - 6.42) / 7: 8 rows ({_INF2_THROUGHPUT}) and 1 row, window 4096",
            ),
            prefill=_inferred(_INF2_8B_BASE, "25 - 128 · prefill_token"),
            prefill_token=_inferred(
                _INF2_8B_TOKEN,
                f"(102 - 25) / (2048 - 128): TTFT of 2048 and 128 tokens, {_INF2_LATENCY}",
            ),
            gap=_GAP,
            skew=_SKEW,
        ),
        Profile(
            name="trn1-llama3-8b",
            decode=Figure(
                5.86, f"{_TRN1_LATENCY}: TPOT p50, TP 32, 1 row, window 4096, int8 weights"
            ),
            decode_row=_inferred(
                (7.65 - 5.86) / 7,
                f"(7.65 - 5.86) / 7: 8 rows ({_TRN1_THROUGHPUT}) and 1 row, window 4096",
            ),
            prefill=_inferred(_TRN1_8B_BASE, "17.09 - 128 · prefill_token"),
            prefill_token=_inferred(
                _TRN1_8B_TOKEN,
                "(153.02 - 17.09) / (4096 - 128): TTFT of 4096 and 128 tokens, window 8192, "
                f"{_TRN1_LATENCY}",
            ),
            gap=_GAP,
            skew=_SKEW,
        ),
        Profile(
            name="trn2-llama3-8b",
            decode=_inferred(
                _TRN2_8B_DECODE,
                f"10.5 / (1 + growth): TPOT, TP 8, 2 rows ({_TRN2_8B}), its host time "
                "included; growth = decode_row / decode of trn1-llama3-8b",
            ),
            decode_row=_inferred(10.5 - _TRN2_8B_DECODE, "10.5 - decode: TPOT of 2 rows"),
            prefill=_inferred(
                _TRN1_8B_BASE * _TRN2_8B_PREFILL,
                f"that of trn1-llama3-8b, scaled so that 512 tokens take 51 ({_TRN2_8B})",
            ),
            prefill_token=_inferred(_TRN1_8B_TOKEN * _TRN2_8B_PREFILL, "scaled likewise"),
            gap=_GAP,
            skew=_SKEW,
        ),
        Profile(
            name="inf2-llama3-70b",
            decode=Figure(
                35.0,
                f"{_INF2_LATENCY}: TPOT p50, TP 24, 1 row: the upper end of 32 to 35, more in "
                "longer windows",
            ),
            decode_row=_inferred(
                35.0 * _TRN1_70B_GROWTH,
                "35 · growth; growth = decode_row / decode of trn1-llama3-70b",
            ),
            prefill=_inferred(
                _TRN1_70B_BASE * _INF2_PREFILL,
                "that of trn1-llama3-70b, scaled as the 8b profiles of inf2 and trn1 compare "
                "at 2048 tokens",
            ),
            prefill_token=_inferred(_TRN1_70B_TOKEN * _INF2_PREFILL, "scaled likewise"),
            gap=_GAP,
            skew=_SKEW,
        ),
        Profile(
            name="trn1-llama3-70b",
            decode=Figure(26.2, f"{_TRN1_LATENCY}: TPOT p50, TP 32, 1 row, window 4096"),
            decode_row=_inferred(
                (32 - 26.2) / 3,
                f"(32 - 26.2) / 3: 4 rows ({_TRN1_THROUGHPUT}: 28 to 32, more in longer "
                "windows) and 1 row",
            ),
            prefill=_inferred(_TRN1_70B_BASE, "53.2 - 128 · prefill_token"),
            prefill_token=_inferred(
                _TRN1_70B_TOKEN,
                "(547 - 53.2) / (2048 - 128): TTFT of 2048 and 128 tokens (windows 4096 and "
                f"1152), {_TRN1_LATENCY}",
            ),
            gap=_GAP,
            skew=_SKEW,
        ),
        Profile(
            name="trn2-llama3-70b",
            decode=Figure(
                19.6,
                f"{_TRN2_70B}: TPOT p50, TP 64, 1 row, its host time included, {_TRN2_70B_WHICH}",
            ),
            decode_row=_inferred(
                19.6 * _TRN1_70B_GROWTH,
                "19.6 · growth; growth = decode_row / decode of trn1-llama3-70b",
            ),
            prefill=_inferred(_TRN2_70B_FLOOR, "20: as the profiles of trn1 and inf2 have it"),
            prefill_token=_inferred(
                (814 - _TRN2_70B_FLOOR) / 10_000,
                f"(814 - 20) / 10000: TTFT p50 ({_TRN2_70B}, {_TRN2_70B_WHICH}) of the "
                "10000 tokens that its tutorial sends",
            ),
            gap=_GAP,
            skew=_SKEW,
        ),
        Profile(
            name="micro",
            decode=Figure(2.58, f"{_ASYNC_DEMO}: 387 steps/s queued ahead, trn2"),
            decode_row=_NOTHING,
            prefill=None,
            prefill_token=_NOTHING,
            gap=_inferred(0.37, f"2.95 - 2.58: 340 and 387 steps/s, {_ASYNC_DEMO}"),
            skew=_SKEW,
        ),
        Profile(
            name="micro-long",
            decode=Figure(5.18, f"{_ASYNC_DOC}: time of one compiled program"),
            decode_row=_NOTHING,
            prefill=None,
            prefill_token=_NOTHING,
            gap=_GAP,
            skew=_SKEW,
        ),
    )
}
