"""`specdec.generate`: a drop-in for `model.generate(...)`, with the drafter as second argument.

It merges generation settings like transformers. It honours every setting that an engine can honour exactly. It refuses
all others by name, also those of the checkpoint, so that nothing is silently ignored. Stop strings are matched by
transformers' criterion. The model is not changed, even if the call fails.
"""

import difflib
import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specdec.config import MAX_TREE_NODES, BoundedDepth, EngineConfig, SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.errors import ConfigError, shown
from specdec.loading.model_loading import pick_tokenizer
from specdec.models.described_model import context_length
from specdec.settings.declared_fields import require
from specdec.settings.plain_arguments import plain_number

HONOURED = frozenset(
    {"max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
    | {"eos_token_id", "pad_token_id", "bos_token_id", "stop_strings", "num_assistant_tokens", "num_return_sequences"}
    | {"return_dict_in_generate", "use_mtp"}
)
HARMLESS = frozenset(
    # memory and compilation
    {"use_cache", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size", "compile_config"}
    | {"disable_compile"}
    # transformers' drafting; drafts do not change the output
    | {"num_assistant_tokens_schedule", "assistant_confidence_threshold", "max_matching_ngram_size"}
    | {"assistant_lookbehind", "target_lookbehind"}
    # about other models, or about the file
    | {"decoder_start_token_id", "trust_remote_code", "transformers_version"}
)
"""Settings that cannot change a token with any value."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_new_tokens": (0,),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "cache_implementation": ("dynamic", "static", "offloaded", "offloaded_static", "hybrid", "sliding_window"),
}
"""Values without effect, in addition to None, False, an empty list and transformers' defaults."""


def merge_settings(model: PreTrainedModel, given: GenerationConfig | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name; None: unset or switched off. Precedence: keyword (None switches even a default off), given
    config, the model's config, transformers' defaults. Raises ConfigError for those that cannot be honoured."""
    if given is not None and not isinstance(given, GenerationConfig):
        raise ConfigError(f"generation_config={shown(given)}: a transformers GenerationConfig is expected")
    defaults = GenerationConfig._get_default_generation_params()
    legacy = model.config._get_generation_parameters() if given is None else {}
    for name, value in legacy.items():  # like transformers
        raise ConfigError(f"the model's config sets {name}={shown(value)}; set it in model.generation_config instead")
    own = getattr(model, "generation_config", None)
    sources = [
        ("the model's generation_config sets", {} if own is None else vars(own)),
        ("the generation_config sets", {} if given is None else vars(given)),
        ("", kwargs),
    ]
    merged: dict[str, Any] = {}
    where: dict[str, str] = {}
    for source, values in sources:
        for name, value in values.items():
            if values is kwargs or not (name.startswith("_") or value is None):
                merged[name], where[name] = value, source
    known = {*vars(GenerationConfig()), *defaults, "assistant_tokenizer"}  # which generate takes from its kwargs
    known |= _parameter_names(GenerationMixin.generate, model.forward)
    for name, value in merged.items():
        if value is None or name in HONOURED | HARMLESS:
            continue
        misspelt = not where[name] and name not in known and not isinstance(value, torch.Tensor)
        if misspelt or not _is_neutral(name, value, defaults):
            raise ConfigError(_refusal(name, value, where[name], known))
    unasked = {"max_length": None, "num_assistant_tokens": None}  # their defaults do not count
    return dict.fromkeys(HONOURED) | defaults | unasked | merged


def most_new_tokens(settings: Mapping[str, Any], model: PreTrainedModel, input_len: int) -> Any:
    """Most new tokens of a row. `max_length` counts the padded input. If neither limit is set: 20."""
    if settings["max_new_tokens"] is not None:
        return settings["max_new_tokens"]
    max_length = settings["max_length"]
    if max_length is None:
        limit = getattr(model.config, "max_position_embeddings", None)
        if limit is not None and limit <= input_len:
            raise ConfigError(f"the input has {input_len} tokens, and the model {limit} positions; shorten the input")
        max_length = GenerationConfig._get_default_generation_params()["max_length"] + input_len
        max_length = max_length if limit is None else min(max_length, limit)
    max_length = _as_int("max_length", max_length)
    if max_length <= input_len:
        raise ConfigError(
            f"max_length={max_length}, but the input already has {input_len} tokens; raise it, or give "
            "max_new_tokens instead"
        )
    return max_length - input_len


def end_ids(settings: Mapping[str, Any]) -> list[int]:
    """`eos_token_id` as a list. Negative ids, and ids outside the vocabulary, never occur."""
    ids = settings["eos_token_id"]
    if ids is None:
        return []
    many = ids.reshape(-1).tolist() if isinstance(ids, (torch.Tensor, np.ndarray)) else ids
    return [_as_int("eos_token_id", one) for one in (many if isinstance(many, (list, tuple)) else [many])]


def pad_id(settings: Mapping[str, Any]) -> int | None:
    """`pad_token_id`, else the first end token, as in transformers."""
    if settings["pad_token_id"] is None:
        return next(iter(end_ids(settings)), None)
    return _as_int("pad_token_id", settings["pad_token_id"])


def sampling_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of SamplingParams that choose tokens. A filter that is None is off."""
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    chosen = {name: neutral if settings[name] is None else settings[name] for name, neutral in off.items()}
    if not settings["do_sample"]:
        return {"temperature": 0.0, "repetition_penalty": chosen["repetition_penalty"]}
    if chosen["top_p"] == 0:  # then transformers keeps the most likely token
        chosen["top_p"] = np.finfo(np.float32).tiny
    return chosen


def num_copies(settings: Mapping[str, Any]) -> int:
    count = settings["num_return_sequences"]
    count = 1 if count is None else _as_int("num_return_sequences", count)
    if count < 1 or (count > 1 and not settings["do_sample"]):
        raise ConfigError(
            f"num_return_sequences={count}: 1 is expected, or more with do_sample=True; greedy ones are equal"
        )
    return count


def draft_settings(settings: Mapping[str, Any]) -> SpecConfig | None:
    """The shape of drafts that is asked for; None: the drafter's default."""
    drafts = settings["num_assistant_tokens"]
    if drafts is None:
        return None
    drafts = _as_int("num_assistant_tokens", drafts)
    if not 1 <= drafts < MAX_TREE_NODES:
        raise ConfigError(f"num_assistant_tokens={drafts}: 1 to {MAX_TREE_NODES - 1} drafts a round are supported")
    return BoundedDepth(num_steps=drafts)  # the drafter may allow fewer


def generate(
    model: PreTrainedModel,
    drafter: str | os.PathLike[str] | nn.Module | None = None,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    *,
    inputs: torch.Tensor | None = None,
    assistant_model: str | os.PathLike[str] | nn.Module | None = None,
    generation_config: GenerationConfig | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: Any | None = None,
    seed: int | None = None,
    spec: SpecConfig | None = None,
    engine_config: EngineConfig | None = None,
    **hf_generate_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Continue a padded batch like `model.generate(input_ids, attention_mask=..., **kwargs)`.

    input_ids (or `inputs`), attention_mask: [B, T] int64, padded on either side; without a mask, padding is inferred as
    in transformers. drafter (or `assistant_model`): a module, a name or None. tokenizer: needed for `stop_strings`.
    use_mtp=True: use the MTP modules of the model's checkpoint, like drafter="mtp". streamer: gets the prompt, then
    every token, of a single row. spec: overrides `num_assistant_tokens`. Returns [B, T + new] int64 on the device of
    `input_ids`: the given rows, the generated tokens, then `pad_token_id`; with `return_dict_in_generate` as
    `sequences` of a GenerateDecoderOnlyOutput. With do_sample, row i draws with seed + i; without a seed, one is drawn
    from torch's generator, so `torch.manual_seed` makes it repeatable. Raises ConfigError for arguments that it cannot
    honour.
    """
    anything: object = model
    if not isinstance(anything, nn.Module) or not hasattr(anything, "config"):
        raise ConfigError(f"model={shown(model)}: a loaded transformers model is expected; Engine takes names")
    settings = merge_settings(model, generation_config, hf_generate_kwargs)
    drafter = _either_name("drafter", drafter, "assistant_model", assistant_model)
    if settings["use_mtp"]:
        if drafter is not None:
            raise ConfigError(
                f"use_mtp=True next to drafter={shown(drafter)}; the modules are a drafter: give one of them"
            )
        drafter = "mtp"
    if isinstance(drafter, torch.Tensor):
        raise ConfigError("drafter is a tensor; the order is generate(model, drafter, input_ids)")
    ids = _input_ids(model, settings, _either_name("input_ids", input_ids, "inputs", inputs))
    mask = _attention_mask(settings, ids, attention_mask)
    copies = num_copies(settings)
    ids, mask = ids.repeat_interleave(copies, dim=0), mask.repeat_interleave(copies, dim=0)
    if streamer is not None and not _is_streamer(streamer):
        raise ConfigError(f"streamer={shown(streamer)}: a transformers streamer, with put and end, is expected")
    if streamer is not None and len(ids) != 1:
        raise ConfigError(f"a streamer takes one row, not {len(ids)}; leave it out, or use Engine.stream for each")

    prompts: list[list[int]] = [row[seen].tolist() for row, seen in zip(ids, mask, strict=True)]
    params = _params_of_rows(settings, model, ids, seed)
    stops = _stop_criteria(settings["stop_strings"], tokenizer)
    if engine_config is None:
        longest = max(map(len, prompts), default=0) + max((each.max_new_tokens for each in params), default=1)
        most = context_length(model.config.get_text_config()).max_len or longest  # the engine refuses longer rows
        engine_config = EngineConfig(max_batch_size=min(max(len(prompts), 1), 4096), max_model_len=min(longest, most))
    with Engine.from_pretrained(model, drafter, spec=spec or draft_settings(settings), config=engine_config) as engine:
        if stops is None and streamer is None:
            new = [out.token_ids for out in engine.generate(prompts, params)]
        else:
            new = _stream(engine, prompts, params, ids, stops, streamer)

    sequences = torch.cat([ids, _padded(new, pad_id(settings) or 0, ids.device)], dim=1)
    if settings["return_dict_in_generate"]:
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    return sequences


def _params_of_rows(
    settings: Mapping[str, Any], model: PreTrainedModel, ids: torch.Tensor, seed: int | None
) -> list[SamplingParams]:
    """Parameters of each row of `ids`; only their seeds differ."""
    vocab_size = model.config.get_text_config().vocab_size
    arguments = sampling_arguments(settings) | {
        "max_new_tokens": most_new_tokens(settings, model, ids.shape[1]),
        "stop_token_ids": [token for token in end_ids(settings) if 0 <= token < vocab_size],
        "ignore_eos": True,  # only the end tokens above count
    }
    if settings["do_sample"] and seed is None:
        seed = int(torch.randint(0, 2**62, (), device="cpu").item())
    return [
        SamplingParams(**arguments, seed=None if seed is None else _as_int("seed", seed) + row)
        for row in range(len(ids))
    ]


def _padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> torch.Tensor:
    """Token ids of rows, padded on the right to the longest."""
    out = torch.full((len(rows), max(map(len, rows), default=0)), pad, dtype=torch.int64, device=device)
    for row, tokens in enumerate(rows):
        out[row, : len(tokens)] = torch.tensor(tokens, device=device)
    return out


def _stream(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    ids: torch.Tensor,
    stops: StopStringCriteria | None,
    streamer: BaseStreamer | None,
) -> list[list[int]]:
    """New tokens of each row, checked one by one after each round. Rows share rounds."""
    if streamer is not None:
        streamer.put(ids.cpu())
    reach = 0 if stops is None else max(len(stop.encode()) for stop in stops.stop_strings)
    new: list[list[int]] = [[] for _ in prompts]
    unfinished = dict(enumerate(engine.submit_many(prompts, params)))
    while unfinished:
        for row, handle in list(unfinished.items()):
            delta = next(handle)
            ended = delta.output is not None
            for token in delta.token_ids:
                new[row].append(token)
                if streamer is not None:
                    streamer.put(torch.tensor([token], device="cpu"))
                if stops is None:
                    continue  # reach is 0, but [-0:] would be the whole text
                tail = [*prompts[row][-reach:], *new[row][-reach:]]  # a token has at least one byte
                if bool(stops(torch.tensor([tail], device="cpu"), None)):
                    handle.abort()
                    ended = True
                    break
            if ended:
                del unfinished[row]
    if streamer is not None:
        streamer.end()
    return new


def _stop_criteria(strings: Any, tokenizer: Any) -> StopStringCriteria | None:
    """transformers' criterion. It decides what matches, including the prompt and special tokens."""
    if strings is None or (isinstance(strings, (list, tuple)) and not strings):
        return None
    SamplingParams(stop=strings)  # raises unless it is a string or strings
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = pick_tokenizer(tokenizer, None, {})
    if tokenizer is None:
        raise ConfigError(f"stop_strings={shown(strings)} need a tokenizer; pass tokenizer=..., or use eos_token_id")
    try:
        return StopStringCriteria(tokenizer, strings if isinstance(strings, str) else list(strings))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"stop_strings={shown(strings)} cannot be matched with the vocabulary of this tokenizer, as transformers "
            f"does it ({shown(str(error))}); an Engine takes them as SamplingParams(stop=...)"
        ) from error


def _is_streamer(value: object) -> bool:
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in ("put", "end"))


def _input_ids(model: PreTrainedModel, settings: Mapping[str, Any], ids: Any) -> torch.Tensor:
    if ids is None:
        bos = settings["bos_token_id"]
        if bos is None:
            raise ConfigError("there are no input_ids, and no bos_token_id to begin with; give one of them")
        ids = torch.tensor([[_as_int("bos_token_id", bos)]], device=model.device)
    if not isinstance(ids, torch.Tensor):
        raise ConfigError(f"input_ids={shown(ids)}: a tensor [batch, tokens] is expected; Engine.generate takes lists")
    if ids.dim() != 2:
        raise ConfigError(f"input_ids has shape {tuple(ids.shape)}; [batch, tokens] is expected")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ConfigError(f"input_ids are {ids.dtype}; token ids are integers")
    return ids


def _attention_mask(settings: Mapping[str, Any], ids: torch.Tensor, mask: Any) -> torch.Tensor:
    """The given mask, or transformers' mask of ids that are not padding, if padding differs from the end token."""
    if mask is None:
        pad = pad_id(settings)
        return torch.ones_like(ids, dtype=torch.bool) if pad is None or pad in end_ids(settings) else ids != pad
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        given = tuple(mask.shape) if isinstance(mask, torch.Tensor) else shown(mask)
        raise ConfigError(f"attention_mask {given} does not match input_ids {tuple(ids.shape)}")
    return mask.to(ids.device).bool()


def _is_neutral(name: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    """Is the value equivalent to leaving the field unset?"""
    if isinstance(value, torch.Tensor):  # processors of text-and-image models pass token types: text is 0
        return name.endswith("token_type_ids") and not bool(value.any())
    if isinstance(value, (bool, np.bool_)):
        return bool(value) == bool(defaults.get(name))
    if isinstance(value, (list, tuple, dict, set)):
        return not value and name != "watermarking_config"  # {} watermarks with transformers' defaults
    return isinstance(value, (int, float, str, np.generic)) and value in (defaults.get(name), *NEUTRAL.get(name, ()))


def _parameter_names(*functions: Callable[..., Any]) -> set[str]:
    return {name for function in functions for name in inspect.signature(function).parameters}


def _refusal(name: str, value: Any, source: str, known: Collection[str]) -> str:
    """Why a setting is refused, and what to do. known: the names that transformers accepts."""
    setting = f"{name}={shown(list(value) if isinstance(value, list) else value)}"  # also for a LogitsProcessorList
    if name == "prompt_lookup_num_tokens":
        return f"{setting} is not supported by specdec.generate; prompt lookup is drafter='ngram'"
    if source:
        return f"{source} {setting}, which specdec.generate cannot honour; pass {name}=None to go without it"
    close = [] if name in known else difflib.get_close_matches(name, HONOURED, n=1)
    advice = f"did you mean {close[0]}?" if close else "leave it out, or use model.generate"
    return f"{setting} is not supported by specdec.generate; {advice}"


def _either_name(name: str, value: Any, alias: str, other: Any) -> Any:
    if value is not None and other is not None:
        raise ConfigError(f"{name} and {alias} are two names of one argument; give one of them")
    return value if other is None else other


def _as_int(name: str, value: Any) -> int:
    number = plain_number(value)
    require(name, number, isinstance(number, int) and not isinstance(number, bool), "an integer is expected")
    return int(number)
