"""The subject of a diagnosis: a target, a drafter and prompts, with facts about them, and engines made from them.

A change of a pair is another `ExaminedPair`; the target is never changed.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch

from specdec.attention.trees.tree import DraftTree
from specdec.config import SamplingParams
from specdec.draft_models.base import Binding, DraftBatch, Drafter, DraftWorker
from specdec.draft_models.block.block_drafter import BlockDrafter
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.draft_models.native_mtp.conventions import conventions_in_words
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpDrafter
from specdec.engine import Engine
from specdec.errors import counted
from specdec.models.target import TargetModel
from specdec.runtime.request_output import GenerationOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedPair:
    """A pair and its prompts.

    prompts: texts, or token ids, to which no template is applied. chat: texts are turns of a chat; False: raw text.
    template: arguments of the chat template, such as enable_thinking.
    """

    engine: Engine
    drafter: Drafter
    prompts: Sequence[str | list[int]]
    chat: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> TargetModel:
        return self.engine.target

    @property
    def tokenizer(self) -> Any | None:
        return self.engine.tokenizer

    @property
    def has_template(self) -> bool:
        return getattr(self.tokenizer, "chat_template", None) is not None

    def prompt_ids(self) -> list[list[int]]:
        read = partial(self.engine.chat_prompt, **self.template) if self.chat else self.engine.encode
        return [read(prompt) if isinstance(prompt, str) else list(prompt) for prompt in self.prompts]

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[GenerationOutput]:
        """Outputs of a separate engine of this pair: no prefix cache and no statistics are shared.

        It has K/V for these prompts only, since the user's engine keeps its own pools meanwhile. It captures nothing,
        since a drafter that records its logits waits for the device.
        """
        config = replace(
            self.engine.config,
            max_batch_size=len(prompts),
            max_model_len=min(max(map(len, prompts)) + params.max_new_tokens, self.engine.max_model_len),
            full_slots=None,
            swa_slots=None,
            prefix_cache=False,
            cuda_graphs=False,
        )
        spec = replace(self.engine.spec, adaptive=False)  # every depth is measured, whether it pays or not
        with Engine(self.target, self.drafter, tokenizer=self.tokenizer, spec=spec, config=config) as made:
            return made.generate(list(prompts), params, progress=False)


def watched_drafter(drafter: Drafter, root: int, seen: list[torch.Tensor]) -> Drafter:
    """A copy of a drafter. It adds the first logits [V] float32 of its first draft after `root` to `seen`."""

    def noted(batch: DraftBatch, draw: Callable[..., Any], logits: torch.Tensor, *given: Any) -> Any:
        if not seen and batch.history_len.tolist() == [root + 1]:
            seen.append(logits[0, 0].float().clone())
        return draw(logits, *given)

    def bind(binding: Binding) -> DraftWorker:
        worker = drafter.bind(binding)
        propose = worker.propose

        def watched(batch: DraftBatch) -> DraftTree:
            sample, best = (partial(noted, batch, draw) for draw in (batch.sample, batch.best))
            return propose(replace(batch, sample=sample, best=best, params=None))

        worker.propose = watched  # type: ignore[method-assign]
        return worker

    made = copy.copy(drafter)
    made.bind = bind  # type: ignore[method-assign]
    return made


def pair_facts(pair: ExaminedPair) -> dict[str, str]:
    """Facts about a pair, one line each: format, taps, positions, norms, tensors, dtype, template, window."""
    target, drafter, spec = pair.target, pair.drafter, pair.engine.spec
    layers = counted(len(target.layout.layers), "layer")
    facts = {
        "target": f"{target.name}, {layers}, sliding window {target.layout.max_window or 'none'}",
        "dtype": f"{str(target.dtype).removeprefix('torch.')} on {target.device}",
        "draft": f"{counted(spec.num_steps, 'step')} of topk {spec.topk}, {spec.num_nodes} nodes",
        "template": _template(pair),
        "drafter": drafter.name,
    }
    describe = FACTS.get(type(drafter))
    return facts if describe is None else facts | describe(drafter)


def _template(pair: ExaminedPair) -> str:
    if pair.tokenizer is None:
        return "no tokenizer: prompts are token ids"
    if not pair.has_template:
        return "the tokenizer has none: prompts are plain text"
    return "the tokenizer's chat template" if pair.chat else "not applied: prompts are plain text"


def _spec_facts(drafter: Eagle3Drafter | BlockDrafter) -> dict[str, str]:
    """The fields of its spec: every choice in its computation."""
    return {each.name: str(getattr(drafter.spec, each.name)) for each in fields(drafter.spec)}


def _module_facts(drafter: NativeMtpDrafter) -> dict[str, str]:
    own = [name for name in ("embed", "head") if name in drafter.modules[0].parts()]
    return {
        "format": f"{len(drafter.modules)} MTP module(s), form {drafter.form}, from {drafter.source or 'memory'}",
        "conventions": "; ".join(conventions_in_words(drafter)),
        "window": str(drafter.windows[0] or "none"),
        "tensors of its own": ", ".join(own) or "none",
    }


def _assistant_facts(drafter: Gemma4MTPDrafter) -> dict[str, str]:
    config = drafter.assistant.config.get_text_config()
    head = "centroids" if drafter.model.masked_embedding is not None else "dense"
    layers = counted(config.num_hidden_layers, "layer")
    return {
        "format": f"Gemma 4 MTP assistant, {layers}, hidden {config.hidden_size}, {head} head",
        **{name: str(getattr(drafter, name)) for name in ("layer_map", "windows", "query_offset", "window_shift")},
        **{name: str(getattr(config, name)) for name in ("rope_parameters", "tie_word_embeddings")},
    }


FACTS: dict[type, Callable[[Any], dict[str, str]]] = {
    Eagle3Drafter: _spec_facts,
    BlockDrafter: _spec_facts,
    Gemma4MTPDrafter: _assistant_facts,
    NativeMtpDrafter: _module_facts,
}
