"""The public engine: it runs requests on a target with a drafter.

    engine = Engine.from_pretrained("tiny-gemma4", drafter="tiny-gemma4-mtp")
    [out] = engine.generate("...", SamplingParams(max_new_tokens=64))

Calls from several threads take turns, one step each, in order of arrival; `submit` and `abort` never wait for a turn.
The requests of all threads and open streams share rounds, whichever thread runs the step. An interrupted step (an
error, Ctrl-C) changes no request: the next step restarts all requests from their tokens. If the tokenizer or grammar of
one request raises, only this request ends, with RequestFailedError. If a step fails twice with no token in between,
one request ends and the others continue: `specdec.runtime.step_faults` chooses it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.attention.backend import choose_backend
from specdec.attention.checked_backend import sanitized
from specdec.config import MAX_PRIORITY, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.base import Drafter, with_defaults
from specdec.errors import ConfigError, SpecDecError, counted, shown
from specdec.gpu.captures import CaptureStore, default_budget
from specdec.gpu.operations import choose_operations
from specdec.gpu.ranks import make_ranks
from specdec.loading.drafter_loading import load_any_drafter, require_options_used
from specdec.loading.load_check import warn_at_load
from specdec.loading.model_loading import SHARED_OPTIONS, load_target, pick_device, pick_tokenizer
from specdec.models.target import TargetModel
from specdec.modules.weight_watch import watched_weights
from specdec.progress import progress_bar
from specdec.runtime.calls import arguments
from specdec.runtime.calls.handle import Handle
from specdec.runtime.calls.inbox import Inbox
from specdec.runtime.calls.request_builder import RequestBuilder
from specdec.runtime.calls.turns import Turns
from specdec.runtime.cpu_threads import CpuThreads
from specdec.runtime.drafts.convention_watch import ConventionWatch
from specdec.runtime.drafts.draft_policy import DraftPolicy, draft_ladder
from specdec.runtime.engine_stats import EngineStats
from specdec.runtime.prompts.prefill import division_of
from specdec.runtime.prompts.prefixes import PrefixPolicy
from specdec.runtime.prompts.prompt_budget import PromptBudget, PromptGap
from specdec.runtime.request import Request
from specdec.runtime.request_output import GenerationOutput, StreamDelta
from specdec.runtime.rounds.captured_rounds import capture_for
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.scheduler import Scheduler, slots_needed
from specdec.runtime.sizing import lookahead_slots, make_cache
from specdec.runtime.step_faults import StepFaults
from specdec.runtime.steps import Steps
from specdec.runtime.warm_up import warm_up
from specdec.settings.declared_fields import require_int
from specdec.text.prompts import Prompt, as_chat_list, as_token_ids, chat_or_text_ids, text_ids

T = TypeVar("T")

LOADED_WITH = ("target", "drafter", "tokenizer", "spec", "config", "drafter_options")


class Engine:
    """Generates with speculation. The output is that of the target alone.

    Make one with `from_pretrained`. `drafter` is a Drafter fitted to the target, or None (plain decoding in the same
    runtime). Engines may share target and drafter, which hold only weights; each engine has its own state.
    """

    @arguments.known_keywords
    @torch.inference_mode(False)  # ordinary tensors, even if the caller is in inference mode
    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None = None,
        *,
        tokenizer: Any | None = None,
        spec: SpecConfig | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        arguments.require_parts(target, drafter, tokenizer)
        arguments.require_type("spec", spec, SpecConfig)
        arguments.require_type("config", config, EngineConfig)
        self.config = config = config or EngineConfig()
        self.target = target = target.as_deterministic() if config.deterministic else target
        self.drafter = drafter = None if drafter is None else with_defaults(drafter)
        self.tokenizer = tokenizer
        self.spec = spec = arguments.fitted_spec(spec, drafter)
        arguments.require_suitable(spec, config, target, drafter)
        if config.tensor_parallel > 1 and target.ranks is None:
            self.target = target = target.on_ranks(make_ranks(target.device, config.tensor_parallel))
        layouts = [target.layout] + ([] if drafter is None or drafter.kv_layout is None else [drafter.kv_layout])
        head_dim = max(layout.max_head_dim for layout in layouts)
        capture = capture_for(target.devices, self.config.cuda_graphs)
        backend = choose_backend(
            config.attention,
            target.device,
            target.dtype,
            head_dim,
            deterministic=target.deterministic,
            captured=capture is not None,
        )
        arguments.require_recurrent(target, config, backend)
        lookahead = lookahead_slots(self.spec, drafts=drafter is not None, captured=capture is not None)
        self.cache, self.max_model_len = make_cache(target, drafter, spec, self.config, lookahead, backend)
        arguments.warn_where_drafts_end(drafter, self.max_model_len)
        self.table = self.cache.table
        memory = capture  # before the sanitizer wraps it
        backend, capture = sanitized(self.cache, backend, capture)
        self.state = state = DeviceState(target, drafter, self.cache, backend, spec, config)
        shared = self.cache if arguments.caches_prefixes(config, target, drafter) else None
        lag = None if self.state.lag is None else self.state.lag.count
        self.prefixes = PrefixPolicy(shared, self.state.weights.version, lag)
        budget = PromptBudget.from_config(config, target.device.type, recurrent=target.recurrent)
        # a fixed chunk is read in one forward
        division = division_of(self.state, captured=capture is not None) if config.prefill_chunk is None else None
        self.scheduler = Scheduler(
            self.table,
            max_model_len=self.max_model_len,
            prompt_gap=PromptGap(budget, division),
            prefixes=self.prefixes,
            context_len=target.context_length.max_len,
        )
        draft_policy = None
        if drafter is not None and spec.adaptive:
            ladder = draft_ladder(spec, captured=capture is not None, lookup=self.state.has_lookup)
            draft_policy = DraftPolicy(ladder, self.table.max_requests + 1)
        store = CaptureStore(
            capture,
            memory,
            None if capture is None else config.max_capture_bytes or default_budget(*target.devices),
            weights_generation=state.weights.generation,
            view_key=lambda: state.view.key,
            strict=config.cuda_graphs is True,
        )
        self.steps = Steps(self.scheduler, self.state, self.spec, draft_policy, store)
        self._conventions = ConventionWatch(target, drafter)
        self._faults = StepFaults(self.scheduler, self.steps.launches)
        self.request_builder = RequestBuilder(target, tokenizer, None if drafter is None else self.spec, self.scheduler)
        self.end_tokens = self.request_builder.end_tokens
        self.inbox = Inbox(self.steps, self._attempt_turn)
        self._turns = Turns()
        self._interrupted = False  # a turn began but did not end
        self._cleared = False  # `close` has finished
        with self.cache.ranks.turn:
            warm_up(self.steps)

    @classmethod
    def from_pretrained(
        cls,
        target: str | PathLike[str] | PreTrainedModel | nn.Module,
        drafter: str | PathLike[str] | nn.Module | Drafter | Sequence[Any] | None = None,
        *,
        tokenizer: Any | None = None,
        spec: SpecConfig | None = None,
        config: EngineConfig | None = None,
        drafter_options: Mapping[str, Any] | None = None,
        **target_options: Any,
    ) -> "Engine":
        """Load a target and a drafter and make an engine of them.

        target: hub id, folder, bundled name or a loaded model (with or without peft adapters).
        drafter: the same, or "mtp" (modules of the target's checkpoint), "suffix", "ngram", "auto" (the modules, else
            the published drafter if it is on disk, else "suffix"), or None ("none"). With two, [drafter, "suffix"] or
            "NAME,suffix", each round takes the draft with more expected tokens per second.
        tokenizer: a tokenizer or its name; default: the target's, None for a loaded module.
        target_options: other arguments (revision, token, ...), for transformers' `from_pretrained` of the target.
        drafter_options: the same for the drafter, which also inherits the target's token, trust_remote_code, cache_dir
            and local_files_only.

        Raises CheckpointError (missing checkpoint or tensors), UnsupportedModelError (a target that cannot run exactly,
        a drafter for another target), ConfigError (bad settings).
        """
        config = config or EngineConfig()
        arguments.require_type("spec", spec, SpecConfig)
        arguments.require_type("config", config, EngineConfig)
        arguments.require_type("drafter_options", drafter_options, Mapping)
        require_options_used(drafter, drafter_options)
        arguments.require_loading_arguments(target_options, LOADED_WITH)
        shared_out = config.tensor_parallel > 1
        loaded_here = isinstance(target, (str, PathLike))
        ranks = make_ranks(pick_device(config.device), config.tensor_parallel) if shared_out and loaded_here else None
        model = load_target(
            target, dtype=config.dtype, device=config.device, options=target_options, on_host=shared_out
        )
        if shared_out and ranks is None:
            ranks = make_ranks(model.device, config.tensor_parallel)
        device = model.device if ranks is None else ranks.devices[0]
        tokenizer = pick_tokenizer(tokenizer, target, target_options)
        shared = {name: value for name, value in target_options.items() if name in SHARED_OPTIONS}
        ops = choose_operations(config.fused, config.attention, device, model.dtype)
        with CpuThreads(model, device).limited():  # loading runs forwards too
            bound = TargetModel(model, ops, deterministic=config.deterministic, ranks=ranks)
            fitted = load_any_drafter(drafter, bound, {**shared, **(drafter_options or {})}, tokenizer)
            spec = arguments.fitted_spec(spec, fitted)
            arguments.require_adaptive_lookup(spec, fitted)
            warn_at_load(bound, fitted, tokenizer, spec)
            return cls(bound, fitted, tokenizer=tokenizer, spec=spec, config=config)

    @arguments.known_keywords
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[GenerationOutput]:
        """Continue every prompt (text or token ids). Results are in the order of prompts, all samples of each together.

        `params`: one for all prompts, or one each; `n` samples give n results. Requests beyond `max_batch_size` wait.
        All prompts are checked before any runs: ConfigError (empty, ids outside the vocabulary), CapacityError (can
        never fit). If one fails later (RequestFailedError), or the engine is closed (SpecDecError), all requests of the
        call end. `progress`: show a bar on standard error; None: on a terminal, if there are several prompts.
        """
        requests = self._make_requests(prompts, params)
        try:
            self.inbox.submit(requests)
            shown = len(requests) > 1 if progress is None else progress
            with progress_bar("generating", len(requests), enabled=shown) as update:
                for each in requests:
                    while not each.finished:
                        self._advance(each)
                        update(lambda: sum(request.finished for request in requests))
                    each.require_whole()
        finally:
            self.inbox.abort_unended(requests)
        return [request.output() for request in requests]

    @arguments.known_keywords
    def chat(
        self, chats: Any, params: SamplingParams | Sequence[SamplingParams] | None = None, **template_kwargs: Any
    ) -> list[GenerationOutput]:
        """`generate` for a conversation, or for each of a list. Arguments are those of `chat_prompt`."""
        return self.generate([self.chat_prompt(chat, **template_kwargs) for chat in as_chat_list(chats)], params)

    @arguments.known_keywords
    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamDelta]:
        """Continue one prompt and yield the new tokens of each round. The last delta has the whole output.

        Leaving the loop early aborts the request. Bad input raises here, not at the first delta. A stream that fails
        raises RequestFailedError, or SpecDecError if the engine was closed.
        """
        arguments.require_one_request(prompt, params, "a stream")
        [request] = self._make_requests([prompt], params)
        return self._deltas(request)

    @arguments.known_keywords
    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> Handle:
        """Submit one prompt without waiting for a step. Read its tokens from the handle.

        priority: from -100 to 100. Lower values are served first and preempted last; equal values in order of arrival.
        The value falls by 1 for every 64 later requests that are admitted before it.
        """
        arguments.require_one_request(prompt, params, "a handle")
        [handle] = self.submit_many([prompt], params, priority=priority)
        return handle

    @arguments.known_keywords
    def submit_many(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[Handle]:
        """`submit` for many prompts. All are checked before any is submitted. Handles are in the order of
        `generate`."""
        require_int("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
        requests = self._make_requests(prompts, params)
        self.inbox.submit(requests, priority)
        return [Handle(request, self._advance, self.abort) for request in requests]

    def step(self) -> bool:
        """Run one step: a round of all decoding requests, then prompt chunks. Returns whether work is left.

        Raises any error of the step; the next step then restarts all requests from their tokens. If an error names one
        request's row (`specdec.errors.name_row`), that request ends instead.
        """
        self.inbox.require_open()
        self._in_turn(self._run, self._run_step_transaction)
        return not self.inbox.is_idle

    def abort(self, id: int) -> None:
        """End a request after the current step; it keeps its tokens. An unknown or ended id is no error.

        id: `Handle.id`. Raises ConfigError if it is not an integer.
        """
        if isinstance(id, bool) or not isinstance(id, int):
            raise ConfigError(f"id={shown(id)}: the id of one request is expected, an integer as in Handle.id")
        self.inbox.abort(id)

    def chat_prompt(
        self,
        chat: str | Sequence[Mapping[str, Any]],
        /,
        *,
        special_tokens_in_content: str = "allow",
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a user's turn, or of messages {"role": ..., "content": ...}, up to the beginning of the answer.

        special_tokens_in_content: "escape" reads control tokens in messages ("<|turn>system") as plain
        text, like the server; "allow" keeps them control tokens, like transformers.
        `template_kwargs` go to the chat template: `tools`, `enable_thinking`, ... Without a template a turn is plain
        text, and messages or `template_kwargs` raise ConfigError.
        """
        return chat_or_text_ids(self.request_builder.tokenizer, chat, template_kwargs, special_tokens_in_content)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens that the tokenizer adds."""
        return text_ids(self.request_builder.tokenizer, text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        ids = as_token_ids(token_ids, self.target.vocab_size)
        text: str = self.request_builder.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def stats(self) -> EngineStats:
        """Sums over finished requests, and the engine's present state."""
        return self._turns.run(self.steps.stats)

    @property
    def drafts_off(self) -> str:
        """Why the newest round had no draft, or an empty text. Unlike `stats`, it does not wait for a step."""
        if self.drafter is None:
            return "there is no drafter"
        return "" if self.steps.draft_policy is None else self.steps.draft_policy.stats().off

    def running_ids(self) -> set[int]:
        """Ids (`Handle.id`) of the requests that have a row."""
        return {request.id for request in self.scheduler.running}

    def most_new_tokens(self, prompt_len: int) -> int:
        """The largest `max_new_tokens` for a prompt of this length; at least 1, even if that does not fit."""
        max_new = self.max_model_len - prompt_len
        needed = slots_needed(self.table, prompt_len, max_new) if max_new > 1 else []
        available = [pool.capacity * self.config.page_size for pool in self.table.allocator.pools]
        short = [slots for need, slots in zip(needed, available, strict=False) if need > slots]
        return max(min([max_new, *(slots - prompt_len + 2 - self.table.lookahead for slots in short)]), 1)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all K/V pools and recurrent states together."""
        return sum(self.cache.bytes_by_group().values())

    @contextmanager
    def prompts_only(self) -> Iterator[None]:
        """Make steps within the block read prompts but launch no rounds: a request gets only its first token."""
        self.scheduler.rounds_held = True
        try:
            yield
        finally:
            self.scheduler.rounds_held = False

    def clear_prefix_cache(self) -> None:
        """Drop all cached K/V, and do not cache K/V that running requests have computed. Call it after changes of the
        model that an engine cannot notice: docs/troubleshooting.md lists them.

        It also compares every attribute and config of the target's modules with their earlier values, and copies a
        target with hooks or adapters again. Raises UnsupportedModelError if the changed target cannot be served.
        """
        self._in_turn(self._forget_prefixes)

    def close(self) -> None:
        """Free the KV tensors. The engine then refuses work; the model stays usable.

        Unfinished requests end: waiting calls of `generate` and `stream` raise SpecDecError; a handle gets the finish
        reason "abort" and an `error`.
        """
        if not self._cleared:
            self._in_turn(self._close)

    def __repr__(self) -> str:
        drafter = "no drafter" if self.drafter is None else f"drafter {self.drafter.name}"
        kind = str(self.target.dtype).removeprefix("torch.")
        state = ", closed" if self.inbox.closed else ""
        return (
            f"<Engine {self.target.name}, {drafter}, {kind} on {self.target.device}, "
            f"{counted(self.config.max_batch_size, 'request')} of up to {self.max_model_len} tokens{state}>"
        )

    def __reduce__(self) -> NoReturn:
        raise SpecDecError("an engine is not copied or pickled; make another, which may share its target and drafter")

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _in_turn(self, work: Callable[[], T], transaction: Callable[[Callable[[], T]], T] | None = None) -> T:
        """Do this work in a turn. If it raises, the next turn restarts requests from settled tokens."""
        result = self._turns.run(lambda: (transaction or self._run_transaction)(work))
        self.inbox.drain()
        return result

    def _attempt_turn(self) -> bool:
        """Process the inbox in a turn, unless a thread has a turn or waits for one. Returns whether it was done."""
        return self._turns.attempt(lambda: self._run_transaction(lambda: None))

    def _run_step_transaction(self, work: Callable[[], None]) -> None:
        """`_run_transaction` for a step: an error ends at most one request, and is not raised if it names the request's
        row."""
        try:
            self._run_transaction(work)
        except Exception as error:
            named = self._faults.end_named(error)
            ended = named or self._faults.end_newest(error, self.inbox.live.values())
            if ended is not None:
                self.inbox.abort_later(ended.id)  # the next turn restarts the others and releases it
            if named is None:
                raise
        else:
            self._faults.step_ended()

    def _run_transaction(self, work: Callable[[], T]) -> T:
        with self.cache.ranks.turn:  # other engines may share the target
            if self._interrupted:
                self.inbox.restart()
            self._interrupted = True
            self.inbox.process()
            result = work()
            self.inbox.process()
            self._interrupted = False
            return result

    def _advance(self, request: Request) -> None:
        """Run one step, unless the request has ended."""
        self._in_turn(lambda: None if request.finished else self._run(), self._run_step_transaction)

    def _close(self) -> None:
        """Close, within a turn. If it is interrupted, the next call of `close` repeats it."""
        self.inbox.close()
        self.steps.store.clear()
        self.cache.clear()
        self._cleared = True

    def _forget_prefixes(self) -> None:
        for weights in watched_weights(self.target, self.drafter):
            weights.find_hidden_changes()
        self.prefixes.clear()

    def _run(self) -> None:
        self.inbox.require_open()
        if not self.scheduler.idle:
            ended = self.steps.run()
            for request in ended:
                self.inbox.remove_ended(request.id)
            if not self._conventions.is_done:
                self._conventions.after_step(ended, running=bool(self.scheduler.running))
            if self.cache.sanitizer is not None:
                self.cache.sanitizer.raise_fault()

    def _deltas(self, request: Request) -> Iterator[StreamDelta]:
        try:
            self.inbox.submit([request])  # submitted when the first delta is read: an unread stream holds no slots
            for delta in Handle(request, self._advance, self.abort):
                if delta.output is not None:
                    request.require_whole()
                yield delta
        finally:
            self.inbox.abort_unended([request])  # also when the garbage collector closes a stream, within any turn

    def _make_requests(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        self.inbox.require_open()
        return self.request_builder.build_requests(prompts, params)
