"""`specdec.generate`: the drop-in for `model.generate(...)`, with a drafter in second place.

Takes the keyword arguments of Hugging Face generate that it can honour exactly and refuses the others by name, so that
nothing is silently ignored. Rows may be padded on either side; the attention mask says where.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.errors import ConfigError

DEFAULT_NEW_TOKENS = 20
HONOURED = frozenset(
    {"max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
    | {"eos_token_id", "pad_token_id", "stop_strings", "num_assistant_tokens"}
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_cache": (True, False, None),
    "bos_token_id": (),  # only matters without input_ids
    "return_dict_in_generate": (False, None),
    "output_scores": (False, None),
    "output_logits": (False, None),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
    "num_beams": (1, None),
    "num_return_sequences": (1, None),
    "min_length": (0, None),
    "min_new_tokens": (0, None),
    "typical_p": (1.0, None),
    "epsilon_cutoff": (0.0, None),
    "eta_cutoff": (0.0, None),
    "no_repeat_ngram_size": (0, None),
    "length_penalty": (1.0, None),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (1.0, None),
    "penalty_alpha": (None,),
    "synced_gpus": (False, None),
}
"""Arguments accepted only with a value that changes nothing; an empty tuple accepts any value."""


def generate(
    model: PreTrainedModel,
    drafter: str | nn.Module | None,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    generation_config: GenerationConfig | None = None,
    tokenizer: Any | None = None,
    seed: int | None = None,
    spec: SpecConfig | None = None,
    engine_config: EngineConfig | None = None,
    **hf_generate_kwargs: Any,
) -> torch.Tensor:
    """Continue a padded batch, as `model.generate(input_ids, attention_mask=..., **kwargs)` does.

    input_ids, attention_mask: [B, T] int64, padded on either side. drafter: a module, a name or None.
    Returns [B, T + new] int64 on the device of `input_ids`: the rows as given, then what was generated, then
    `pad_token_id`. With do_sample, row i draws with seed + i; without a seed one comes from torch's generator, so
    `torch.manual_seed` makes it repeatable. Raises ConfigError for arguments it cannot honour.
    """
    if input_ids.dim() != 2:
        raise ConfigError(f"input_ids has shape {tuple(input_ids.shape)}; [batch, tokens] is wanted")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise ConfigError(f"attention_mask {tuple(attention_mask.shape)} does not match {tuple(input_ids.shape)}")
    config = _effective_config(model, generation_config, hf_generate_kwargs)

    prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
    new_tokens = _max_new_tokens(config, input_ids.shape[1])
    vocab_size = model.config.get_text_config().vocab_size
    ends = tuple(token for token in _as_ids(config.eos_token_id) if token < vocab_size)
    pad = config.pad_token_id if config.pad_token_id is not None else (ends[0] if ends else 0)
    if config.do_sample and seed is None:
        seed = int(torch.randint(0, 2**62, ()).item())
    params = [
        SamplingParams(
            max_new_tokens=new_tokens,
            temperature=float(config.temperature) if config.do_sample else 0.0,
            top_k=int(config.top_k or 0) if config.do_sample else 0,
            top_p=float(config.top_p) if config.do_sample else 1.0,
            min_p=float(config.min_p or 0.0) if config.do_sample else 0.0,
            repetition_penalty=float(config.repetition_penalty),
            seed=None if seed is None else seed + row,
            stop=config.stop_strings or (),
            stop_token_ids=ends,
            ignore_eos=True,  # the ends above are the whole truth
        )
        for row in range(len(prompts))
    ]
    if spec is None:
        drafts = hf_generate_kwargs.get("num_assistant_tokens")
        spec = SpecConfig() if drafts is None else SpecConfig(num_steps=int(drafts))
    if engine_config is None:
        longest = max((len(prompt) for prompt in prompts), default=0) + new_tokens
        engine_config = EngineConfig(max_batch_size=max(len(prompts), 1), max_model_len=longest)
    training = model.training
    try:
        with Engine.from_pretrained(model, drafter, tokenizer=tokenizer, spec=spec, config=engine_config) as engine:
            outputs = engine.generate(prompts, params)
    finally:
        model.train(training)
    longest_new = max((len(out.token_ids) for out in outputs), default=0)
    generated = input_ids.new_full((len(prompts), longest_new), int(pad))
    for row, out in enumerate(outputs):
        generated[row, : len(out.token_ids)] = torch.tensor(out.token_ids, dtype=input_ids.dtype)
    return torch.cat([input_ids, generated], dim=1)


def _effective_config(
    model: PreTrainedModel, given: GenerationConfig | None, kwargs: dict[str, Any]
) -> GenerationConfig:
    """Keyword over given config over the model's own over transformers' defaults; refuses what cannot be honoured."""
    config = copy.deepcopy(given if given is not None else model.generation_config)
    for name, value in kwargs.items():
        if name in HONOURED:
            setattr(config, name, value)
        elif name not in NEUTRAL:
            raise ConfigError(
                f"{name}={value!r} is not supported by specdec.generate; supported: {', '.join(sorted(HONOURED))}"
            )
        elif NEUTRAL[name] and value not in NEUTRAL[name]:
            raise ConfigError(
                f"{name}={value!r} is not supported by specdec.generate; leave it out, or use {NEUTRAL[name][0]!r}"
            )
    for name, allowed in NEUTRAL.items():
        value = getattr(config, name, None)
        if name not in kwargs and allowed and value not in allowed:
            raise ConfigError(f"the generation config sets {name}={value!r}, which specdec.generate cannot honour")
    defaults = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}
    for name, value in defaults.items():  # transformers fills these in at the same point
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    return config


def _max_new_tokens(config: GenerationConfig, input_len: int) -> int:
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    if config.max_length is not None and config.max_length != DEFAULT_NEW_TOKENS:
        if config.max_length <= input_len:
            raise ConfigError(f"max_length={config.max_length}, but the input already has {input_len} tokens")
        return int(config.max_length) - input_len
    return DEFAULT_NEW_TOKENS


def _as_ids(ids: int | list[int] | torch.Tensor | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    if isinstance(ids, torch.Tensor):
        ids = ids.tolist()
    return tuple(int(i) for i in ids) if isinstance(ids, (list, tuple)) else (int(ids),)
