"""The public engine: a target, a drafter, and requests in and out.

    engine = Engine.from_pretrained("tiny-gemma4", drafter="tiny-gemma4-mtp")
    [out] = engine.generate("...", SamplingParams(max_new_tokens=64))

One engine serves one thread. Requests of an open `stream` and of `generate` share rounds.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from transformers import PreTrainedModel

from specdec.attention.backend import use_kernels
from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.base import Drafter
from specdec.draft_models.registry import drafter_from_module
from specdec.errors import ConfigError, SpecDecError
from specdec.models.bundled import resolve_name
from specdec.models.loading import load_config, load_drafter, load_model, load_tokenizer, pick_device, pick_dtype
from specdec.models.target import TargetModel
from specdec.request import GenerationOutput, Request, RequestState, RequestStats, StreamDelta
from specdec.runner import Runner
from specdec.scheduler import Scheduler
from specdec.sizing import make_table
from specdec.text.detokenize import Detokenizer
from specdec.text.prompts import Prompt, as_prompt_list, chat_ids


class Engine:
    """Generates with speculation, exactly as the target alone would.

    Make one with `from_pretrained`. `drafter` is a bound Drafter or None (plain decoding in the same runtime).
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None = None,
        *,
        tokenizer: Any | None = None,
        spec: SpecConfig | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.spec = spec or SpecConfig()
        self.config = config or EngineConfig()
        head_dims = [layer.head_dim for layer in target.layout.layers]
        kernels = use_kernels(self.config.attention, target.device, target.dtype, max(head_dims))
        num_nodes = self.spec.num_nodes if drafter is not None else 1
        self.table, self.max_model_len = make_table(target, drafter, self.config, num_nodes)
        self.scheduler = Scheduler(
            self.table,
            num_nodes=num_nodes,
            max_model_len=self.max_model_len,
            prefill_chunk=self.config.prefill_chunk,
        )
        for pool in self.table.allocator.pools.values() if kernels else ():
            pool.use_kernels()
        self.runner = Runner(target, drafter, self.table, self.spec)
        self.end_tokens = _end_tokens(target.model, tokenizer)
        self._totals = RequestStats()
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        target: str | PreTrainedModel,
        drafter: str | nn.Module | None = None,
        *,
        tokenizer: Any | None = None,
        spec: SpecConfig | None = None,
        config: EngineConfig | None = None,
    ) -> "Engine":
        """Load and bind a pair.

        target: hub id, folder, bundled name or a loaded model. drafter: the same, "ngram", or None.
        tokenizer: a tokenizer or its name; default: the target's own, None for a loaded module.
        Raises CheckpointError (nothing there, tensors missing), UnsupportedModelError (a target that cannot be served
        exactly, a drafter for another target), ConfigError (bad settings).
        """
        config = config or EngineConfig()
        _require_type("spec", spec, SpecConfig)
        _require_type("config", config, EngineConfig)
        if isinstance(target, str):
            device = pick_device(config.device)
            model_config = load_config(target)
            dtype = pick_dtype(config.dtype, device, model_config)
            model = load_model(target, dtype=dtype, device=device, config=model_config)
            tokenizer = load_tokenizer(target) if tokenizer is None else tokenizer
        elif isinstance(target, PreTrainedModel):
            _require_same("device", config.device and torch.device(config.device).type, target.device.type)
            _require_same("dtype", config.dtype, target.dtype)
            model = target.eval()
        else:
            raise ConfigError(
                f"target={target!r}: a hub id, a folder, a bundled name or a transformers model is wanted"
            )
        if isinstance(tokenizer, str):
            name, tokenizer = tokenizer, load_tokenizer(resolve_name(tokenizer))
            if tokenizer is None:
                raise ConfigError(f"tokenizer={name!r}: no tokenizer there; give a folder, a hub id or a tokenizer")
        bound = TargetModel(model)
        return cls(bound, _bind_drafter(drafter, bound), tokenizer=tokenizer, spec=spec, config=config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[GenerationOutput]:
        """Continue every prompt (text or token ids); results in the order of the prompts.

        `params`: one for all, or one each. More prompts than `max_batch_size` queue. Every prompt is checked before
        any runs: ConfigError (empty, ids outside the vocabulary), CapacityError (can never fit).
        `progress`: a bar on standard error; None shows it on a terminal when there is more than one prompt.
        """
        requests = self._make_requests(prompts, params)
        try:
            for request in requests:
                self.scheduler.submit(request)
            with _progress_bar(len(requests), enabled=len(requests) > 1 if progress is None else progress) as advance:
                finished = 0
                while finished < len(requests):
                    self._step()
                    now = sum(r.state is RequestState.FINISHED for r in requests)
                    advance(now - finished)
                    finished = now
        finally:
            self._abort(requests)
        return [request.output() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamDelta]:
        """Continue one prompt, yielding what each round adds; the last delta carries the whole output.

        Leaving the loop early aborts the request and frees its slots. Bad input raises here, not at the first delta.
        """
        [request] = self._make_requests([prompt], params)
        return self._deltas(request)

    def chat_prompt(self, chat: str | Sequence[Mapping[str, Any]], **template_kwargs: Any) -> list[int]:
        """Token ids of a user's turn, or of messages {"role": ..., "content": ...}, up to where the answer begins.

        `template_kwargs` go to the chat template: `tools`, `enable_thinking`, `add_generation_prompt` and others.
        Without a chat template a turn is plain text; messages, or anything for a template, raise ConfigError.
        """
        messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
        if template_kwargs.get("chat_template") or getattr(self._require_tokenizer(), "chat_template", None):
            return chat_ids(self._require_tokenizer(), messages, **template_kwargs)
        if not isinstance(chat, str):
            raise ConfigError("this tokenizer has no chat template, so it cannot put messages into words; give text")
        if template_kwargs:
            raise ConfigError(
                f"this tokenizer has no chat template that could read {', '.join(sorted(template_kwargs))}"
            )
        return self.encode(chat)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens that the tokenizer adds."""
        ids: list[int] = self._require_tokenizer()(text)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        text: str = self._require_tokenizer().decode(list(token_ids), skip_special_tokens=True)
        return text

    def stats(self) -> RequestStats:
        """Sums over all requests that finished in this engine."""
        total = RequestStats()
        total.add(self._totals)
        return total

    def close(self) -> None:
        """Drop the KV pools; the engine refuses further work. The model stays usable."""
        if not self._closed:
            self._abort([*self.scheduler.running, *self.scheduler.waiting])
            self.table.allocator.pools.clear()
            self._closed = True

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _step(self) -> None:
        """One forward: prefill first, so that a waiting prompt joins the batch as soon as it can."""
        self._require_open()
        for request in self.scheduler.admit():
            self.runner.load_history(request)
        requests, chunk_len = self.scheduler.next_prefill()
        # Triton launches on the current device, whatever it is; K/V have the model's dtype, whatever autocast says
        device = self.target.device
        with torch.cuda.device_of(self.table.slots.tensor), torch.autocast(device.type, enabled=False):
            if requests:
                self.runner.prefill(requests, chunk_len)
            else:
                requests = self.scheduler.next_decode()
                self.runner.decode(requests)
        for request in requests:
            if request.state is RequestState.FINISHED:
                self.scheduler.release(request)
                self._totals.add(request.stats)

    def _deltas(self, request: Request) -> Iterator[StreamDelta]:
        sent = 0
        self.scheduler.submit(request)  # not before the first delta is asked for: a stream nobody reads holds nothing
        try:
            while True:
                while request.num_output == sent and request.state is not RequestState.FINISHED:
                    self._step()
                finished = request.state is RequestState.FINISHED
                text = request.detokenizer.stream(request.output_ids, request.params.stop_strings, finished=finished)
                tokens, drafted = request.output_ids[sent:], request.drafted[sent:]
                sent = request.num_output
                yield StreamDelta(text, tokens, drafted, request.output() if finished else None)
                if finished:
                    return
        finally:
            self._abort([request])

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.state is not RequestState.FINISHED:
                self.scheduler.release(request)
                request.state = RequestState.FINISHED
                request.finish_reason = "abort"

    def _make_requests(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        self._require_open()
        many = as_prompt_list(prompts)
        requests: list[Request] = []
        for index, (prompt, one) in enumerate(zip(many, _params_for(params, len(many)), strict=True)):
            ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
            if not prompt or not ids:
                raise ConfigError(f"prompt {index} is empty; at least one token is needed to continue from")
            vocab_size = self.target.vocab_size
            for what, tokens in ((f"prompt {index} holds", ids), ("stop_token_ids holds", one.stop_token_ids)):
                outside = [token for token in tokens if not 0 <= token < vocab_size]
                if outside:
                    raise ConfigError(f"{what} token id {outside[0]}, outside the vocabulary of {vocab_size}")
            if one.stop_strings and self.tokenizer is None:
                raise ConfigError("stop strings need a tokenizer; pass tokenizer=..., or use stop_token_ids")
            self.scheduler.require_fits(len(ids), one.max_new_tokens)
            ends = frozenset(one.stop_token_ids) | (frozenset() if one.ignore_eos else self.end_tokens)
            seed = secrets.randbits(63) if one.seed is None else one.seed
            requests.append(Request(ids, one, seed, Detokenizer(self.tokenizer), ends))
        return requests

    def _require_open(self) -> None:
        if self._closed:
            raise SpecDecError("this engine is closed; make a new one")

    def _require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ConfigError("text prompts need a tokenizer; pass tokenizer=..., or give token ids")
        return self.tokenizer


def _bind_drafter(drafter: str | nn.Module | None, target: TargetModel) -> Drafter | None:
    if drafter is None:
        return None
    if isinstance(drafter, nn.Module):
        return drafter_from_module(drafter, target)
    if not isinstance(drafter, str):
        raise ConfigError(
            f"drafter={drafter!r}: a hub id, a folder, a bundled name, 'ngram', a module or None is wanted"
        )
    return load_drafter(drafter, target)


def _end_tokens(model: PreTrainedModel, tokenizer: Any | None) -> frozenset[int]:
    """Ids that end a text: of the generation config, else of the config, else of the tokenizer."""
    for source in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, (list, tuple)) else [ids])
    return frozenset()


def _params_for(params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise ConfigError(f"params={params!r}: a SamplingParams for all prompts, or a list of one each, is wanted")
    if len(params) != count:
        raise ConfigError(f"{len(params)} SamplingParams for {count} prompts; give one for all, or one each")
    return list(params)


def _require_type(name: str, value: object, wanted: type) -> None:
    if value is not None and not isinstance(value, wanted):
        raise ConfigError(f"{name}={value!r}: a {wanted.__name__} is wanted")


def _require_same(name: str, wanted: object, actual: object) -> None:
    if wanted is not None and wanted != actual:
        raise ConfigError(
            f"{name}={wanted} in the EngineConfig, but the loaded model has {actual}; convert it, or leave it None"
        )


@contextmanager
def _progress_bar(total: int, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """A bar on standard error that counts finished requests; nothing when disabled or off a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (enabled and console.is_terminal)) as bar:
        task = bar.add_task("generate", total=total)
        yield lambda count: bar.advance(task, count)
