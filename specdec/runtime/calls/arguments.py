"""Checks an engine's arguments, except prompts, before any work. An unknown keyword of a public method raises an error
that says where it belongs or which keyword was meant, instead of a TypeError.

It runs no model. Every refusal is one sentence that says what to do.
"""

import difflib
import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

from specdec.attention.backend import Backend
from specdec.config import BoundedDepth, EngineConfig, OpenDepth, SamplingParams, SpecConfig
from specdec.draft_models.base import Fit
from specdec.errors import ConfigError, UnsupportedModelError, counted, shown
from specdec.modules.weight_watch import updates_are_counted
from specdec.settings.plain_arguments import plain_number

logger = logging.getLogger("specdec")


def params_for(params: Any, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise ConfigError(f"params={shown(params)}: one SamplingParams, or a list of one for each prompt, is expected")
    if len(params) != count:
        raise ConfigError(f"{len(params)} SamplingParams for {counted(count, 'prompt')}; give one for all, or one each")
    return list(params)


def spec_for(params: SamplingParams, spec: SpecConfig | None) -> SpecConfig | None:
    """The draft settings of one request in an engine with settings `spec`; None: it does not speculate."""
    asked = params.speculation
    if not isinstance(asked, SpecConfig):
        return spec if asked is None else None
    if spec is None:
        raise ConfigError(
            f"speculation={asked}, but this engine has no drafter; leave it None, or make one with drafter="
        )
    for name in ("num_steps", "topk", "num_nodes"):
        if getattr(asked, name) > getattr(spec, name):
            field_name = "num_draft_tokens" if name == "num_nodes" else name
            raise ConfigError(
                f"speculation={asked} has {field_name}={getattr(asked, name)}, and this engine was made for at most "
                f"{getattr(spec, name)}; ask for less, or make it with a larger spec="
            )
    return asked


def require_one_request(prompt: Any, params: Any, what: str) -> None:
    """Raise ConfigError for a bare number, which a list of prompts would make a prompt of one token, and for several
    samples, where only one is possible."""
    if isinstance(plain_number(prompt), (int, float)):
        raise ConfigError(f"prompt={shown(prompt)}: a string or a list of token ids is expected")
    if isinstance(params, SamplingParams) and params.n > 1:
        raise ConfigError(f"n={params.n}: {what} has one sample; submit_many returns a handle for each, generate all")


def require_parts(target: Any, drafter: Any, tokenizer: Any) -> None:
    """Refuse names and loaded modules: `Engine(...)` takes parts fitted to each other, `from_pretrained` makes them."""
    for name, part, wanted, fits in (
        ("target", target, "a TargetModel", hasattr(target, "layout")),
        ("drafter", drafter, "a fitted Drafter", drafter is None or callable(getattr(drafter, "bind", None))),
        ("tokenizer", tokenizer, "a tokenizer", tokenizer is None or callable(tokenizer)),
    ):
        if not fits:
            raise ConfigError(
                f"{name} is {shown(part)}; Engine(...) wants {wanted}, Engine.from_pretrained takes names and models"
            )


def fitted_spec(spec: SpecConfig | None, drafter: Any) -> SpecConfig:
    """Choose the depth for this drafter. An `OpenDepth` (None counts as one) takes the drafter's default depth. Without
    a default, and in any other `BoundedDepth`, its own depth is cut to the drafter's maximum. Any other `spec` is
    returned unchanged."""
    spec = OpenDepth() if spec is None else spec
    if not isinstance(spec, BoundedDepth):
        return spec
    steps = spec.num_steps
    if drafter is not None and drafter.max_steps is not None:
        steps = min(steps, drafter.max_steps)
    if drafter is not None and isinstance(spec, OpenDepth):
        steps = drafter.default_steps or steps
    return SpecConfig(steps, spec.topk, spec.num_draft_tokens, spec.adaptive)


def require_suitable(spec: SpecConfig, config: EngineConfig, target: Any, drafter: Any) -> None:
    """Raise ConfigError for settings that do not suit the target and the drafter as they were made, and
    UnsupportedModelError for a drafter that was fitted to another target."""
    if config.fused is False and target.unfused is None:
        raise ConfigError(f"fused=False, but {target.name} was made with fused layers; make it without `ops`")
    if target.ranks is not None and len(target.ranks) != config.tensor_parallel:
        raise ConfigError(
            f"tensor_parallel={config.tensor_parallel}, but the target is shared by {len(target.ranks)} devices "
            "already; give the same number, or load it again"
        )
    for part in [target] if drafter is None else [target, drafter]:
        if config.fused is True and part.unfused is not None:
            raise ConfigError(f"fused=True, but {part.name} runs unfused: {part.unfused}; use fused='auto'")
    if drafter is None:
        return
    if drafter.fit is not None and drafter.fit != Fit.of(target):
        raise UnsupportedModelError(
            f"drafter {drafter.name} was fitted to a target of other layers, sizes or dtype than {target.name}; "
            "give Engine.from_pretrained its name or module, to fit it to this one"
        )
    if drafter.max_steps is not None and spec.num_steps > drafter.max_steps:
        raise ConfigError(
            f"num_steps={spec.num_steps}, and drafter {drafter.name} drafts at most {drafter.max_steps} tokens a "
            f"round; give spec=SpecConfig(num_steps={drafter.max_steps}), or fewer"
        )
    if spec.topk > target.vocab_size:
        raise ConfigError(
            f"topk={spec.topk}, and {target.name} has a vocabulary of {target.vocab_size} tokens; give "
            f"spec=SpecConfig(topk={target.vocab_size}), or fewer"
        )
    if config.finished_tokens and not drafter.reads_finished:
        raise ConfigError(
            f"finished_tokens={config.finished_tokens}, and drafter {drafter.name} proposes nothing of finished "
            "requests; give drafter='suffix', or [drafter, 'suffix'], or finished_tokens=0"
        )


def warn_where_drafts_end(drafter: Any, max_model_len: int) -> None:
    """Log the position from which the drafter does not draft, because it cannot compute later positions."""
    if drafter is not None and drafter.max_positions is not None and drafter.max_positions < max_model_len:
        logger.warning(
            "drafter %s does not draft from position %d on, where its RoPE changes or its table of positions ends; "
            "longer texts, up to max_model_len=%d, continue without drafts",
            drafter.name,
            drafter.max_positions,
            max_model_len,
        )


def require_adaptive_lookup(spec: SpecConfig, drafter: Any) -> None:
    """Raise ConfigError if a model and a lookup are given but drafts are fixed: the lookup would never draft."""
    if drafter is not None and drafter.has_lookup and not spec.adaptive:
        raise ConfigError(
            f"adaptive=False, but {drafter.name} needs a choice between the two in each round; give "
            "spec=SpecConfig(adaptive=True), or one drafter"
        )


def require_kv_dtype(target: Any, config: EngineConfig) -> None:
    """Raise ConfigError if `kv_dtype` is set and the target has recurrent layers, whose records are not rounded."""
    if target.recurrent and config.kv_dtype is not None:
        raise ConfigError(
            f"kv_dtype={config.kv_dtype!r}, and {target.name} has recurrent layers, whose records are not rounded; "
            "leave it None"
        )


def require_recurrent(target: Any, config: EngineConfig, backend: Backend) -> None:
    """Raise ConfigError for settings that a target with recurrent layers does not support yet."""
    require_kv_dtype(target, config)
    if target.recurrent and backend.name == "torch" and target.device.type != "cpu":
        raise ConfigError(
            f"attention={config.attention!r} is plain torch on {target.device}, and {target.name} has recurrent "
            "layers, which run on Triton's kernels there; use attention='triton'"
        )


def caches_prefixes(config: EngineConfig, target: Any, drafter: Any) -> bool:
    """Are prefixes cached? Not if updates of the weights are not counted. Nor if the drafter rereads the end of a
    prefix and the target has recurrent layers, since a copied state already contains the whole prefix."""
    if not config.prefix_cache or not updates_are_counted(target, drafter):
        return False
    if not target.recurrent or drafter is None or not drafter.reread:
        return True
    logger.warning(
        "prefixes are not cached: drafter %s reads the last %d tokens of a prefix again, and %s has recurrent layers",
        drafter.name,
        drafter.reread,
        target.name,
    )
    return False


def require_type(name: str, value: object, wanted: type) -> None:
    if value is not None and not isinstance(value, wanted):
        raise ConfigError(f"{name} is {shown(value)}; a {wanted.__name__} is expected")


AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

SAMPLING = {field.name: "params=SamplingParams({})" for field in fields(SamplingParams)}
ENGINE = {field.name: "config=EngineConfig({})" for field in fields(EngineConfig) if field.name != "dtype"}
ENGINE |= {field.name: "spec=SpecConfig({})" for field in fields(SpecConfig)}
"""Each setting and where it belongs; transformers knows a dtype as well."""
VLLM_NAMES = {"sampling_params": "params", "use_tqdm": "progress", "max_tokens": "max_new_tokens"}
"""vLLM's names of arguments, and ours."""
MISSPELT_SIMILARITY = 0.8
"""Minimum similarity, 0 to 1, at which a keyword that could be meant for transformers counts as a misspelt setting."""
SUGGESTED_SIMILARITY = 0.55
"""Minimum similarity, 0 to 1, at which an error suggests a setting for an unknown keyword."""


def known_keywords(function: AnyFunction) -> AnyFunction:
    """Decorate a method so that an unknown keyword raises ConfigError. If the method passes keywords on to a chat
    template, only sampling parameters, vLLM's names and similar names are refused."""
    parameters = inspect.signature(function).parameters
    passes_on = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    known = [f"**{name}" if each.kind is each.VAR_KEYWORD else name for name, each in parameters.items()][1:]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known and (not passes_on or _is_setting(name)):
                raise _unknown(f"{function.__qualname__.removesuffix('.__init__')} takes no {name}", name, known)
        return function(*args, **kwargs)

    return cast(AnyFunction, checked)


def _is_setting(name: str) -> bool:
    """Is a keyword meant for us, although a chat template could have a variable of this name?"""
    similar = difflib.get_close_matches(name, SAMPLING, n=1, cutoff=MISSPELT_SIMILARITY)
    return name in VLLM_NAMES or name == "chat_template_kwargs" or bool(similar)


def require_loading_arguments(options: Iterable[str], known: Collection[str]) -> None:
    """Raise ConfigError if an argument meant for transformers is a setting of ours, or is spelt almost like a setting
    or like one of `known`, the arguments of `from_pretrained`. Other arguments are left to transformers."""
    for name in options:
        if name in ENGINE | SAMPLING or difflib.get_close_matches(name, [*known, *ENGINE], cutoff=MISSPELT_SIMILARITY):
            raise _unknown(f"Engine.from_pretrained takes no {name}", name, known)


def _unknown(what: str, name: str, known: Collection[str]) -> ConfigError:
    places = {**{each: each if each.startswith("**") else each + "=..." for each in known}, **SAMPLING, **ENGINE}
    if name in SAMPLING:
        what += ", which is a sampling parameter"
    elif name in ENGINE:
        what += ", which is a setting of the engine"
    for meant in difflib.get_close_matches(VLLM_NAMES.get(name, name), places, n=1, cutoff=SUGGESTED_SIMILARITY):
        return ConfigError(f"{what}; did you mean {places[meant].format(meant + '=...')}?")
    return ConfigError(f"{what}; it takes {', '.join(known)}")
