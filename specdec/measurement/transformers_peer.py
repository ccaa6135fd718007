"""transformers' own generate on the same weights, timed as a whole or by step. Its outputs are not compared.

A step is the time between two arrivals of tokens at a streamer: one token per request, or a round of assisted
generation. Either has one forward of the target.
"""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.config import SamplingParams
from specdec.draft_models.base import Drafter
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpDrafter
from specdec.engine import Engine
from specdec.measurement.timed_comparison import Runner, TokenPrompts
from specdec.runtime.request_output import GenerationOutput, RequestStats


def assisted_peer(engine: Engine, params: SamplingParams, num_steps: int) -> dict[str, Runner]:
    """The target with the same drafter, if transformers can use it: a Gemma 4 assistant, or MTP modules of the target's
    own checkpoint, of which it reads all at each call to draft one token each. The target must not have been left in
    host memory for several devices."""
    drafter, model = engine.drafter, engine.target.model
    if engine.target.home != engine.target.device:
        return {}
    if isinstance(drafter, NativeMtpDrafter) and drafter.source == model.config.name_or_path and _uses_mtp(model):
        return {"transformers, use_mtp": partial(generate_whole, engine, params, use_mtp=True)}
    if not isinstance(drafter, Gemma4MTPDrafter):
        return {}
    assistant = assistant_of(drafter, num_steps)
    return {"transformers, assisted": partial(generate_whole, engine, params, assistant_model=assistant)}


def _uses_mtp(model: Any) -> bool:
    """Does transformers find MTP modules of this model? It finds them by layer number."""
    config = model.config.get_text_config()
    first = f"model.layers.{config.num_hidden_layers}.enorm.weight"
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return bool(getattr(config, "num_mtp_layers", None)) and any(re.search(pattern, first) for pattern in patterns)


def assistant_of(drafter: Gemma4MTPDrafter, num_steps: int) -> Any:
    """The drafter's model, set to draft `num_steps` tokens in every round of assisted generation."""
    assistant = drafter.assistant
    config = assistant.generation_config = copy.deepcopy(assistant.generation_config)
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = num_steps, "constant"
    return assistant


def generate_whole(
    engine: Engine, params: SamplingParams, prompts: TokenPrompts, **assistance: Any
) -> list[GenerationOutput]:
    """Outputs of one prompt after another, without their text; their statistics are the numbers of tokens only."""
    model = engine.target.model
    outputs: list[GenerationOutput] = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=params.temperature > 0,
            temperature=params.temperature or None,
            max_new_tokens=params.max_new_tokens,
            eos_token_id=sorted(engine.end_tokens),
            pad_token_id=0,
            **assistance,
        )
        tokens = out[0, len(prompt) :].tolist()
        reason = "stop" if tokens[-1] in engine.end_tokens else "length"
        stats = RequestStats(prompt_tokens=len(prompt), output_tokens=len(tokens))
        outputs.append(GenerationOutput(prompt, tokens, "", reason, stats, [False] * len(tokens)))
    return outputs


WARM_UP_STEPS = 4


@dataclass(frozen=True, slots=True)
class Peer:
    """One way of generating with transformers. run: (prompts, steps) -> seconds of each step. rows: rows per request
    that one step verifies."""

    name: str
    run: Callable[[Sequence[Sequence[int]], int], list[float]]
    rows: int = 1


class StepTimes:
    """A streamer of transformers that notes when tokens arrive: of the prompt, then of each step, a round of assisted
    generation included."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, _tokens: torch.Tensor) -> None:
        self.at.append(perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


def peers_for(model: PreTrainedModel, drafter: Drafter | None, num_steps: int | None, batch: int) -> list[Peer]:
    """num_steps: of the chain that assisted generation drafts; None: do not run it."""

    steps = partial(generate_steps, model)
    compiled = ", compiled" if model.device.type == "cuda" else ""  # transformers compiles it there, by itself
    static = Peer(f"transformers, static cache{compiled}", partial(steps, cache_implementation="static"))
    peers = [Peer("transformers, plain", steps), static]
    if num_steps is not None and batch == 1 and isinstance(drafter, Gemma4MTPDrafter):
        assistant = assistant_of(drafter, num_steps)
        assistant.generation_config.assistant_confidence_threshold = 0.0  # as many drafts as ours, even unlikely ones
        peers.append(Peer("transformers, assisted", partial(steps, assistant_model=assistant), 1 + num_steps))
    return peers


def generate_steps(model: PreTrainedModel, prompts: Sequence[Sequence[int]], count: int, **options: Any) -> list[float]:
    """Seconds of `count` steps after the prefill and a few for warming up."""
    ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
    assistant, times = options.get("assistant_model"), StepTimes()
    config = copy.deepcopy(model.generation_config)
    assert config is not None
    config.eos_token_id, config.pad_token_id = None, 0
    a_step = 1 if assistant is None else 1 + assistant.generation_config.num_assistant_tokens
    steps = 1 + WARM_UP_STEPS + count  # the first one is the prefill

    def enough(tokens: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        return torch.full(tokens.shape[:1], len(times.at) > steps, device=tokens.device)

    model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        do_sample=False,
        max_new_tokens=steps * a_step,
        stopping_criteria=[enough],
        streamer=times,
        **options,
    )
    return [end - start for start, end in pairwise(times.at[1 + WARM_UP_STEPS : 1 + steps])]
