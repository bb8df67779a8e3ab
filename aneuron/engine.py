"""The front door: `Engine`.

Comes in: a model name and requests. Goes out: streams. Opening starts one supervisor task,
the engine's only task of its own; in it runs the TaskGroup with the step loop and the
materializer (core.py). Every call here is made on the loop that opened the engine.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from functools import partial
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, Unpack

from aneuron.config import EngineConfig, EngineOptions
from aneuron.core import EngineCore
from aneuron.errors import EngineClosed, InvalidRequest
from aneuron.futures import end_with_owner
from aneuron.models.loading import Loaded, check_source, load
from aneuron.outputs import AbortReason, FinishReason
from aneuron.params import SamplingParams, check_deadline
from aneuron.params.messages import Conversation
from aneuron.prompt import validate_text, validate_token_ids
from aneuron.stream import AsyncEntered, Consumers, TokenStream
from aneuron.stream.many import CompletionStream
from aneuron.submission import Submission
from aneuron.threads import run_apart
from aneuron.timeline.card import card

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np

    from aneuron.device import Device, Model
    from aneuron.errors import AneuronError
    from aneuron.models.catalog import Progress
    from aneuron.outputs import EngineStats
    from aneuron.params.messages import Messages
    from aneuron.plans import ModelSpec
    from aneuron.prompt import Tokenizer
    from aneuron.request import Request
    from aneuron.timeline import Timeline

__all__ = ["Engine"]

_NOT_OPEN = "the engine is not open: use `async with`, or await open()"
_MANY_WINDOW = 2  # choices that generate_many submits, per sequence that can run


class _State(Enum):
    NEW = auto()  # made; nothing is loaded
    OPENING = auto()  # open() is loading
    OPEN = auto()  # open() returned
    CLOSING = auto()  # aclose() was called
    CLOSED = auto()  # the supervisor has ended; open() may be called again


class Engine(AsyncEntered):
    """An inference engine on your event loop.

        async with aneuron.Engine("smollm2-135m") as engine:
            async for token in engine.generate("The capital of France is", max_tokens=32):
                print(token, end="", flush=True)

    Args:
        model: a built-in name, a directory, a `.gguf` file, a Hugging Face id, a simulated
            model (`sim:count`), or a model object.
        device: "auto", "cpu", "neuron" or "sim", or a device object.
        async_scheduling: schedule one step ahead; False is the synchronous baseline.
        token_carry: how tokens travel from step to step; see docs/async_scheduling.md.
        tokenizer: in place of the model's own.
        revision: of a Hugging Face id.
        progress: called as `progress(stage, done, total)`, from a worker thread, while it loads.
        options: see `EngineConfig`.

    Raises:
        ConfigError: a setting is wrong; `param` names it.
    """

    loop: asyncio.AbstractEventLoop  # these five are set by open()
    _core: EngineCore
    _submission: Submission
    tokenizer: Tokenizer
    spec: ModelSpec

    def __init__(
        self,
        model: str | os.PathLike[str] | Model,
        *,
        device: str | Device = "auto",
        async_scheduling: bool = True,
        token_carry: str = "auto",
        tokenizer: Tokenizer | None = None,
        revision: str | None = None,
        progress: Progress | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Check the settings; `async with`, or `open()`, does the work."""
        self.config = EngineConfig.build(
            {"async_scheduling": async_scheduling, "token_carry": token_carry, **options}
        )
        model, device = check_source(model, device)
        self._load = partial(
            load, model, device, self.config, tokenizer, revision=revision, progress=progress
        )
        name = model if isinstance(model, str) else model.spec.name
        self._label = f"{name} on {device if isinstance(device, str) else device.name}"
        self._state = _State.NEW
        self._opening: object = None
        self._ids, self.consumers = count(1), Consumers()
        self._supervisor: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Engine {self._label}, {self._state.name.lower()}>"

    def _repr_html_(self) -> str:
        """Return what it does now, for a notebook."""
        seen = (self.stats(), self.timeline) if hasattr(self, "_core") else ()
        state = "failed" if self.failure else self._state.name.lower()
        return card(self._label, state, *seen)

    # ── opening and closing ─────────────────────────────────────────────────────────────

    async def open(self) -> Self:
        """Load the model and start; the engine belongs to this event loop from now on.

        Raises:
            ConfigError: no such model or device, or they do not go together.
            OutOfMemory: the KV pool does not fit.
            EngineClosed: it was closed while it opened.
            DeviceError, InternalError: the device did not start.
            RuntimeError: it is open already.
        """
        self._drop_orphan()
        if self._state not in (_State.NEW, _State.CLOSED):
            raise RuntimeError(f"{self!r} cannot be opened again before it is closed")
        self._state, self._opening = _State.OPENING, (opening := object())
        begun_s = monotonic()
        try:
            loaded = await run_apart(self._load, name="aneuron-load", discard=Loaded.discard)
            try:
                self._check_opening(opening)
                self._start(loaded)
            except BaseException:
                await run_apart(loaded.discard, name="aneuron-load")
                raise
            await self._core.wait_started()
            self._check_opening(opening)
        except BaseException:  # cancelled too: it can be opened again
            if self._opening is opening and self._state is _State.OPENING:
                self._state = _State.NEW
                if self._supervisor is not None:
                    self._supervisor.cancel()
            raise
        self._state = _State.OPEN
        self._core.log_open(self._label, self.spec, monotonic() - begun_s)
        return self

    def _check_opening(self, opening: object) -> None:
        if self._opening is not opening or self._state is not _State.OPENING:
            raise EngineClosed("the engine was closed while it was opening")

    def _drop_orphan(self) -> None:
        """Let go of a core that was left without `aclose()`."""
        if self._supervisor is not None and self._core.is_orphan:
            self._core.let_go()
            self._submission.close()
            self._supervisor, self._state = None, _State.CLOSED

    def _start(self, loaded: Loaded) -> None:
        self.loop = asyncio.get_running_loop()
        self.tokenizer, self.spec = loaded.tokenizer, loaded.models[0].spec
        self._label = self._label.replace(" on auto", f" on {loaded.devices[0].name}")
        self.config = loaded.config
        self._core = core = EngineCore.build(loaded, self.loop)
        self._submission = Submission(
            core.intake, core.scheduler.kv, self.tokenizer, self.spec, self.config,
            max_model_len=loaded.max_model_len, ids=self._ids, clock=core.scheduler.clock,
        )  # fmt: skip
        # The only bare task: so open, generate and aclose may be called from different tasks.
        self._supervisor = asyncio.create_task(core.supervise(), name="aneuron-supervisor")
        end_with_owner(self, self._supervisor, core.stop, what=f"the engine {self._label}")

    async def aclose(self) -> None:
        """Abort what runs (reason "shutdown"), wait for the device, and free everything.

        Returns within `shutdown_s`, also when the device hangs. Safe to call again, and from
        any task; cancelling the caller does not stop the closing.
        """
        self._drop_orphan()
        if self._supervisor is None:
            self._state = _State.CLOSED
            return
        self._core.check_caller()
        if self._state in (_State.OPENING, _State.OPEN):
            self._state = _State.CLOSING
            self._core.stop()
        await asyncio.wait({self._supervisor})
        self._submission.close()
        self._state = _State.CLOSED

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ── requests ────────────────────────────────────────────────────────────────────────

    def generate(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Iterable[int] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        **sampling: Any,
    ) -> TokenStream:
        """Submit a prompt; the engine starts at once, also if nobody iterates.

        Args:
            prompt: text; or give `prompt_token_ids`.
            params: what to sample; keyword arguments are laid over it.
            prompt_token_ids: the prompt as ids.
            request_id: your name for it, free again when it ends.
            priority: less is sooner; needs `scheduling_policy="priority"`.
            deadline_s: seconds from now, after which it is aborted (reason "deadline").
            sampling: fields of `SamplingParams`.

        Returns:
            A stream to iterate, or to await; an empty or too long text is raised there.

        Raises:
            InvalidRequest: a field is wrong; `param` names it.
            ContextTooLong: the ids do not fit.
            Overloaded: too many requests wait (`max_waiting`).
            EngineClosed, DeviceLost, InternalError: the engine is not open, or has failed.
            RuntimeError: called outside the engine's event loop.
        """
        self._check_open()
        if (prompt is None) == (prompt_token_ids is None):
            raise InvalidRequest("give either prompt or prompt_token_ids", param="prompt")
        params = SamplingParams.build(params, sampling, self.generate)
        made = self._submission.make(params, request_id, priority)
        if prompt is not None:
            return self._submit(made, validate_text(prompt), deadline_s)
        ids = validate_token_ids(prompt_token_ids, vocab_size=self.spec.vocab_size)
        self._submission.check_length(len(ids), params, param="prompt_token_ids")
        return self._submit(made, ids, deadline_s)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        **sampling: Any,
    ) -> TokenStream:
        """Submit a conversation, rendered with the model's chat template.

        Args:
            messages: dicts with "role" and "content", oldest first.
            params: what to sample.
            tools: that the model may call, as OpenAI has them; the template makes text of them.
            add_generation_prompt: let the prompt end where an answer begins.
            continue_final_message: let it end inside the last message, which the answer goes on
                with; needs `add_generation_prompt=False`.
            chat_template_kwargs: other variables of the template, such as `enable_thinking`.
            request_id: your name for it.
            priority: as in `generate`.
            deadline_s: likewise.
            sampling: fields of `SamplingParams`.

        Returns and raises what `generate` does; a template complains at the first await.
        """
        self._check_open()
        params = SamplingParams.build(params, sampling, self.chat)
        conversation = Conversation.of(
            messages, tools=tools, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )  # fmt: skip
        made = self._submission.make(params, request_id, priority)
        return self._submit(made, conversation, deadline_s)

    def generate_many(
        self,
        prompts: Iterable[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        **sampling: Any,
    ) -> CompletionStream:
        """Submit many prompts (texts or lists of ids); answers come as they finish.

        Prompts are drawn from the iterable as earlier ones end. The rest holds for each of them,
        as in `generate`.

        Returns:
            An async iterator of `(index of the prompt, Completion)`; a refused prompt raises there.

        Raises what `generate` does, but for the prompts.
        """
        self._check_open()
        params = SamplingParams.build(params, sampling, self.generate_many)
        self._submission.check(params, priority)
        generate = partial(
            self.generate, params=params, priority=priority, deadline_s=check_deadline(deadline_s)
        )

        def submit(prompt: str | Sequence[int]) -> TokenStream:
            if isinstance(prompt, str):
                return generate(prompt)
            return generate(prompt_token_ids=prompt)

        window = _MANY_WINDOW * self.config.max_num_seqs // params.n
        return CompletionStream(prompts, submit, self.consumers, window=window)

    def _submit(
        self, request: Request, prompt: str | Conversation | np.ndarray, deadline_s: float | None
    ) -> TokenStream:
        self._submission.submit(request, prompt, deadline_s)
        return TokenStream(self, request)

    def abort(self, request_id: str) -> None:
        """End a request by name; no token of it comes after this. Unknown names do nothing."""
        self._opened_core().check_caller()
        if (request := self._core.intake.requests.get(request_id)) is not None:
            self.end(request, FinishReason.ABORT)

    def end(self, request: Request, reason: FinishReason) -> None:
        """End a request from outside (for streams): ABORT forgets, STOP keeps."""
        # Not one that ended, nor one of a loop that was closed before this core's.
        if self._core.intake.requests.get(request.name) is request:
            self._core.intake.end(request, reason, AbortReason.CLIENT)

    # ── looking in ──────────────────────────────────────────────────────────────────────

    async def wait_idle(self) -> None:
        """Wait until nothing runs, waits or is in flight; raises if not open, or failed."""
        self._check_open()
        await self._core.wait_idle()

    def stats(self) -> EngineStats:
        """Return a snapshot of counts; `EngineClosed` if the engine was never open."""
        return self._opened_core().stats()

    def reset_prefix_cache(self) -> None:
        """Forget the content of all cached blocks; running requests are not touched."""
        self._check_open()
        self._core.scheduler.kv.reset()

    @property
    def is_open(self) -> bool:
        """It takes requests: opened, not closed, and not failed."""
        return self._state is _State.OPEN and self._core.failure is None

    @property
    def failure(self) -> AneuronError | None:
        """What ended it, if that was no `aclose()`."""
        found = None if self._supervisor is None else self._core.failure
        return None if isinstance(found, EngineClosed) else found

    @property
    def device(self) -> Device:
        """The device of the open engine."""
        return self._opened_core().runner.device

    @property
    def timeline(self) -> Timeline:
        """When the last steps reached each stage; see `Engine(timeline=True)`."""
        return self._opened_core().timeline

    def _opened_core(self) -> EngineCore:
        if not hasattr(self, "_core"):
            raise EngineClosed(_NOT_OPEN)
        return self._core

    def _check_open(self) -> None:
        if self._state is not _State.OPEN:
            raise EngineClosed(f"{_NOT_OPEN} (it is {self._state.name.lower()})")
        self._core.check_caller()
        if self._core.failure is not None:
            raise self._core.failure.copy()
