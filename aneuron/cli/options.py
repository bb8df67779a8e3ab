"""What commands have in common: flags, options of engine and sampling, the token carries.

Comes in: options, named as in vLLM where they mean the same. Goes out: settings of an engine
and `SamplingParams`. Values are checked by the engine, which names the option at fault.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

if TYPE_CHECKING:
    from aneuron.params import SamplingParams

__all__ = [
    "CARRIES",
    "FLAGS",
    "ChatSampling",
    "EngineSettings",
    "Flag",
    "JsonFlag",
    "Sampling",
    "SeveralSampling",
]

Flag = Annotated[bool, Parameter(negative="")]
JsonFlag = Annotated[bool, Parameter(name="--json", negative="")]

# By name, what an engine is opened with where commands compare carries.
CARRIES: dict[str, dict[str, Any]] = {
    "host": {"async_scheduling": False},
    "handoff": {"token_carry": "handoff"},
    "resident": {"token_carry": "resident"},
}


@Parameter(name="*", group=Group("Engine", sort_key=2))
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How the model runs.

    Attributes:
        device: What runs it: auto, cpu, neuron, sim, or sim with a profile such as sim:micro or
            sim:FILE.json.
        dtype: Of weights and KV cache: auto, float32 or bfloat16.
        quantization: Of the weights: int8 or int4; none by default.
        kv_cache_dtype: Of keys and values: auto, as dtype, or int8.
        enforce_eager: Compile nothing; slower on a processor.
        num_threads: That compute on a processor; one per core by default.
        max_model_len: Longest context in tokens; the model's own by default.
        revision: Branch, tag or commit of a Hugging Face id.
        async_scheduling: Schedule one step ahead, or run the synchronous baseline.
        token_carry: How tokens travel from step to step: auto, host, handoff or resident.
        enable_prefix_caching: Share the KV cache of prompts that begin alike.
        max_num_batched_tokens: Most prompt tokens in one step; longer prompts are cut.
        interleaved_prefill_tokens: The same between steps of many that decode; as the device says.
        block_size: Tokens in one block of the KV cache; compiled steps need a multiple of 16.
        num_kv_blocks: Blocks in the KV cache; by default, as memory allows.
        tensor_parallel_size: NeuronCores that each traced program spans.
    """

    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    enforce_eager: Flag = False
    num_threads: int | None = None
    max_model_len: int | None = None
    revision: str | None = None
    async_scheduling: bool = True
    token_carry: str = "auto"
    enable_prefix_caching: bool = True
    max_num_batched_tokens: int = 512
    interleaved_prefill_tokens: int | None = None
    block_size: int = 16
    num_kv_blocks: Annotated[int | None, Parameter(alias="--num-gpu-blocks-override")] = None
    tensor_parallel_size: int = 1


@Parameter(name="*", group=Group("Sampling", sort_key=1))
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen, and when the answer ends.

    Attributes:
        max_tokens: Most new tokens.
        min_tokens: No end of any kind before this many new tokens.
        temperature: 0 takes the likeliest token, the same at every run.
        top_p: Keep the smallest set of tokens whose probability reaches this.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        min_p: Drop tokens less likely than this share of the likeliest.
        seed: The same seed gives the same answer.
        stop: A text that ends the answer; may be given several times.
        ignore_eos: Do not end at the model's own end token.
    """

    max_tokens: int = 512
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    ignore_eos: Flag = False

    def params(self) -> SamplingParams:
        """Return them as the engine takes them.

        Raises:
            InvalidRequest: a value is out of range; `param` names it.
        """
        from aneuron.params import SamplingParams

        return SamplingParams(**asdict(self))


@Parameter(name="*", group=Group("Sampling", sort_key=1))
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSampling(Sampling):
    """As `Sampling`, but livelier by default."""

    temperature: float = 0.7


@Parameter(name="*", group=Group("Sampling", sort_key=1))
@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralSampling(Sampling):
    """As `Sampling`, and how many answers.

    Attributes:
        n: How many answers to sample; at temperature 0 they are all the same.
    """

    n: int = 1

    def params(self) -> SamplingParams:
        """Return them as the engine takes them.

        Raises:
            InvalidRequest: a value is out of range, or `n` are more than run at a time.
        """
        from aneuron.config import EngineConfig
        from aneuron.errors import InvalidRequest

        most = EngineConfig().max_num_seqs
        if self.n > most:
            raise InvalidRequest(f"n must be at most {most}, not {self.n}", param="n")
        return Sampling.params(self)  # `super()` is lost where a class gets its slots


FLAGS = {
    field.name: f"--{field.name.replace('_', '-')}"
    for options in (EngineSettings, SeveralSampling)
    for field in fields(options)
}
