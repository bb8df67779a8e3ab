"""The vocabulary of the flow: what one stage hands to the next.

    Scheduler ─ SchedulerOutput ─▶ ModelRunner ─ ModelInput ─▶ executable on the device
    device ─ ModelRunnerOutput ─▶ Scheduler

Plain data, numpy columns on the hot path, no behaviour that waits or computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aneuron.plans.records import Break, BreakReason, StepRecord

if TYPE_CHECKING:
    from aneuron.params import SamplingParams

__all__ = [
    "BlockCopies",
    "Break",
    "BreakReason",
    "Fork",
    "GrammarOutput",
    "LogitEdits",
    "Logits",
    "ModelInput",
    "ModelRunnerOutput",
    "ModelSpec",
    "NewRequest",
    "PromptLogprobs",
    "PromptTargets",
    "RuleWrite",
    "Sampled",
    "SampledLogprobs",
    "SchedulerOutput",
    "SlotWrites",
    "SpecDecodeMetadata",
    "StepRecord",
]


# ── scheduler → runner ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that enters the batch: new, or resumed after a preemption."""

    request_id: int  # internal: unique per submission
    slot: int
    token_ids: np.ndarray  # int32 [known tokens]: prompt, and on resume its output so far
    prompt_len: int
    block_ids: np.ndarray  # int32 [blocks]
    params: SamplingParams
    seed: int
    # Tokens that its blocks hold already: found in the prefix cache, or all of the prompt
    # where another choice of the same request computed it.
    num_computed: int = 0
    end_ids: tuple[int, ...] = ()  # ids that end its answer, beside its stop ids
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Fork:
    """Choices that join the batch with the last chunk of a prompt that they share.

    They have no tokens in this step: each samples its first one from the logits of the row
    that computes the prompt's end. Blocks that the prompt fills are shared; of one that it
    fills in part each has a copy, made when the step has written it.
    """

    slot: int  # of the row that computes the prompt
    slots: np.ndarray  # int64 [choices], of the others
    copied_blocks: np.ndarray  # int32 [choices] to copy to; [0]: the prompt fills its blocks


@dataclass(slots=True)  # not frozen: made each step, and that costs four times as much
class SchedulerOutput:
    """The plan of one step; the rows are columns, in the scheduler's order.

    A slot is not given to another request before every step that holds it has resolved,
    so a slot in a plan in flight names one request.
    """

    step_id: int
    is_decode: bool  # every request is in the decode *state*, not merely "one token"
    request_ids: np.ndarray  # int64 [n], internal
    slots: np.ndarray  # int64 [n]: numpy converts indices of any other type at each use
    num_scheduled: np.ndarray  # int32 [n], tokens of this step
    new_requests: tuple[NewRequest, ...]
    removed_slots: tuple[int, ...]  # slots that left the batch since the last plan
    ending_slots: tuple[int, ...]  # whose token of this step is the last by length
    forks: tuple[Fork, ...]
    # blocks appended to requests that are in the batch already:
    block_slots: np.ndarray  # int64 [k]
    block_columns: np.ndarray  # int64 [k]
    block_ids: np.ndarray  # int32 [k]
    # Of a step that verifies drafts: each request's last token and its drafts, int32 [tokens].
    draft_ids: np.ndarray | None = field(default=None, kw_only=True)
    # Drafts of the step before that failed: slots int64 [k], how many int32 [k].
    rejected: tuple[np.ndarray, np.ndarray] | None = field(default=None, kw_only=True)
    record: StepRecord = field(init=False, compare=False, repr=False)

    @property
    def is_prefill(self) -> bool:
        """Whether it computes prompts."""
        return not self.is_decode and self.draft_ids is None

    def __post_init__(self) -> None:
        """Begin the record of this step."""
        self.record = StepRecord(self.step_id, self.is_decode, self.request_ids, self.num_scheduled)


class GrammarOutput(NamedTuple):
    """What the host says of samples once it has seen the tokens before: of live requests."""

    slots: np.ndarray  # int64 [G], of the requests with a grammar
    bitmask: np.ndarray  # int32 [G, ceil(V / 32)], a bit for each id that may follow
    hooked_slots: np.ndarray  # int64 [H], of those with hooks
    logits: np.ndarray  # float32 [H, V], as their hooks left them


# ── runner → device ─────────────────────────────────────────────────────────────────────


class RuleWrite(NamedTuple):
    """What the new owner of a slot does to its logits before a token is drawn."""

    slot: int
    params: SamplingParams
    token_ids: np.ndarray  # int32 [known tokens]: prompt, and on resume its output so far
    prompt_len: int
    end_ids: tuple[int, ...]
    bad_word_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class SlotWrites:
    """New contents of K slots on the device: all of a slot's state, so that it resets.

    Travels with the launch that admits the slots' new owners, in queue order.
    """

    slots: np.ndarray  # int64 [K]
    prompt_lens: np.ndarray  # int32 [K]
    temperature: np.ndarray  # float32 [K]
    top_k: np.ndarray  # int32 [K]
    top_p: np.ndarray  # float32 [K]
    min_p: np.ndarray  # float32 [K]
    seed: np.ndarray  # int64 [K]
    rules: tuple[RuleWrite, ...] = ()  # of the owners that have some


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Blocks of the KV cache to copy, in all layers, once a launch has written its tokens."""

    sources: np.ndarray  # int64 [K]
    targets: np.ndarray  # int64 [K], all different and none of them a source


class LogitEdits(NamedTuple):
    """What the host decides of a launch's samples: those of requests with a grammar or hooks."""

    samples: np.ndarray  # int64 [G], that a grammar restricts
    bitmask: np.ndarray  # int32 [G, ceil(V / 32)], a bit for each id that may be drawn
    hooked: np.ndarray  # int64 [H], whose logits hooks have changed
    logits: np.ndarray  # float32 [H, V], which take the place of the model's


class SpecDecodeMetadata(NamedTuple):
    """Which samples verify a draft: those of a request, in order, until one is not as drafted."""

    draft_ids: np.ndarray  # int32 [S], what a sample must be for the next one to count; or -1
    starts: np.ndarray  # int64 [n], first sample of each request


class PromptTargets(NamedTuple):
    """Tokens of prompts whose log probabilities are wanted: P of them, row after row."""

    indices: np.ndarray  # int64 [P], in [T], of the token before each
    targets: np.ndarray  # int32 [P], the tokens
    num_logprobs: int  # alternatives of each: the most that a row wants
    parts: tuple[tuple[int, int, int], ...]  # of each row: slot, first position, how many


@dataclass(slots=True)
class ModelInput:
    """The inputs of one launch, padded to a bucket: T tokens, R rows, S samples, B blocks a row.

    Arrays are views into one entry of the staging ring: the launch owns them until its
    future has resolved. Tokens of a prefill are packed row after row. Padding: tokens have
    slot -1 (no write), rows have block 0 (the null block), context length 1 and start at
    the number of real tokens, samples are of token 0.

    Each row has one sample, in the same order, but where a request forks, or where drafts are
    verified: then S and R differ, and `logits_indices` names a row's last token once for each
    of its choices, or all of its tokens.

    With `slots`, the device keeps the state of requests: sampling reads its parameters there
    and writes its tokens, and `prompt_lens` to `seed` below hold nothing. Under the carry
    `resident` a decode reads its rows' last tokens there, too.
    """

    is_decode: bool
    num_reqs: int  # rows that count
    num_samples: int  # samples that count
    num_tokens: int  # tokens that count
    max_query_len: int  # most tokens of one row, rounded up to a bucket; 1 in decode
    all_greedy: bool  # no row samples: argmax is enough
    input_ids: Any  # int32 [T]; or the DeviceFuture of the step before ([T], unread); or
    #                 None: the last tokens of `slots`
    positions: np.ndarray  # int32 [T]
    slot_mapping: np.ndarray  # int32 [T], block * block_size + offset, -1 = no write
    query_start: np.ndarray  # int32 [R + 1], first token of each row
    block_table: np.ndarray  # int32 [R, B]
    context_lens: np.ndarray  # int32 [R], tokens in the cache once this step has run
    logits_indices: np.ndarray  # int32 [S], the token in [T] that it comes after
    prompt_lens: np.ndarray  # int32 [S]
    temperature: np.ndarray  # float32 [S], 0 = greedy
    top_k: np.ndarray  # int32 [S], 0 = all
    top_p: np.ndarray  # float32 [S]
    min_p: np.ndarray  # float32 [S]
    seed: np.ndarray  # int64 [S]
    slots: np.ndarray | None = None  # int32 [S]; the spare slot if a sample does not count
    writes: SlotWrites | None = None  # to be made before anything else of this launch
    copies: BlockCopies | None = None  # to be made once the tokens are written
    rule_samples: np.ndarray | None = None  # int64, samples whose slots have rules; None: no row
    logprob_samples: np.ndarray | None = None  # int64 [L], samples that want logprobs; likewise
    num_logprobs: int = 0  # alternatives of each: the most that one of them wants
    prompt_targets: PromptTargets | None = None
    edits: LogitEdits | None = None  # to be made before a token is drawn
    spec_decode_metadata: SpecDecodeMetadata | None = None  # samples not accepted give -1

    @property
    def num_rows(self) -> int:
        """Rows with padding (R)."""
        return len(self.context_lens)

    @property
    def sampled_rows(self) -> Any:
        """Return the row of each sample, as an index of row columns: int64 [S], or a slice."""
        if self.is_decode:
            return slice(None)
        return np.searchsorted(self.query_start, self.logits_indices, side="right") - 1

    @property
    def num_sampled(self) -> int:
        """Samples of the output: a decode's is padded, a prefill's is not."""
        return self.num_rows if self.is_decode else self.num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a loaded model tells the engine."""

    name: str
    vocab_size: int
    max_model_len: int  # the longest context it was made for
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int  # over all layers
    dtype: str  # of weights and KV cache
    sampled_dtype: str = "int32"
    on_device_sampling: bool = True  # False: executables return logits
    has_slots: bool = False  # executables keep last tokens and parameters of every slot
    has_logits: bool = False  # and have logits, for rules (penalties, bias, bans) and logprobs
    has_masks: bool = False  # and take `ModelInput.edits`, for grammars
    verifies_drafts: bool = False  # and take `ModelInput.spec_decode_metadata`
    is_split: bool = False  # and come in two parts, too: forward and sampling; for hooks
    # Most prompt tokens in a step beside decodes, where time grows with each; None: any number.
    interleaved_prefill_tokens: int | None = None
    max_prompts: int | None = None  # most prompts in a step; None: any number
    can_fork: bool = True  # choices share a prompt's step; False: each computes it by itself
    # Fields of `SamplingParams` that its sampling does not know.
    unsupported_params: tuple[str, ...] = ()
    greedy_only: bool = False
    # Context lengths where the buckets of decodes end, of programs that must not be fed there.
    bucket_edges: tuple[int, ...] = ()


# ── device → runner ─────────────────────────────────────────────────────────────────────


class SampledLogprobs(NamedTuple):
    """Log probabilities of the L samples that want them, and of their K likeliest ids."""

    samples: np.ndarray  # int64 [L]; the runner puts slots in their place, int64 [L]
    chosen: np.ndarray  # float32 [L], of the token that was sampled
    ids: np.ndarray  # int32 [L, K], the likeliest first
    values: np.ndarray  # float32 [L, K]


class PromptLogprobs(NamedTuple):
    """Log probabilities of P tokens of prompts, and of the K likeliest ids there."""

    chosen: np.ndarray  # float32 [P]
    ids: np.ndarray  # int32 [P, K], the likeliest first
    values: np.ndarray  # float32 [P, K]


class Logits(NamedTuple):
    """What the forward part of a split executable gives to its sampling part."""

    values: Any  # float32 [S, V], a device value
    prompt_logprobs: PromptLogprobs | None


class Sampled(NamedTuple):
    """What an executable gives where a request wants more than its token."""

    token_ids: Any  # a device value [samples], as it is without
    logprobs: SampledLogprobs | None
    prompt_logprobs: PromptLogprobs | None


# ── runner → scheduler ──────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class ModelRunnerOutput:
    """A step's tokens on the host, in launch order."""

    slots: np.ndarray  # int64 [n]
    token_ids: np.ndarray  # int32 [n]
    logprobs: SampledLogprobs | None = None
    # Of each part of a prompt: slot, position of its first token, and columns of its tokens.
    prompt_logprobs: tuple[tuple[int, int, PromptLogprobs], ...] = ()
    # Of a step that verified drafts, what comes behind: second tokens of requests, and so on.
    more: tuple[ModelRunnerOutput, ...] = ()
