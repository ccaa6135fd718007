"""transformers' own generate as contestants: on the same weights, one prompt at a time. Measured, not judged."""

import copy
from functools import partial
from typing import Any

import torch

from specdec.config import SamplingParams
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.engine import Engine
from specdec.evaluation.contest import Contestant, Prompts


def plain_peer(engine: Engine, params: SamplingParams) -> Contestant:
    """The target alone."""
    return Contestant("transformers, plain", partial(_generate, engine, params), judged=False)


def assisted_peer(engine: Engine, params: SamplingParams, num_steps: int) -> list[Contestant]:
    """The target with the same drafter, if transformers can use it: a Gemma 4 assistant, on the device of a target that
    was not left in host memory for several devices."""
    if not isinstance(engine.drafter, Gemma4MTPDrafter) or engine.target.home != engine.target.device:
        return []
    run = partial(_generate, engine, params, assistant_model=assistant_of(engine.drafter, num_steps))
    return [Contestant("transformers, assisted", run, judged=False)]


def assistant_of(drafter: Gemma4MTPDrafter, num_steps: int) -> Any:
    """Its model, told to draft `num_steps` tokens in every round of assisted generation."""
    assistant = drafter.assistant
    config = assistant.generation_config = copy.deepcopy(assistant.generation_config)
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = num_steps, "constant"
    return assistant


def _generate(engine: Engine, params: SamplingParams, prompts: Prompts, **assistance: Any) -> Prompts:
    model = engine.target.model
    outputs: Prompts = []
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
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs
