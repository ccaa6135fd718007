"""Cached targets of `tiny_families.py`, with drafters, engines, and the tokens that transformers generates.

A plugin of conftest.py. A model is cached for the session, so a test that changes one asks for a fresh one.
"""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from block_heads import random_block
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig, PreTrainedModel

from specdec import Engine, EngineConfig, SpecConfig
from specdec.draft_models.gemma4_mtp import constructible_assistants
from specdec.kvcache.layout import layout_from_config
from specdec.loading.model_loading import Checkpoint
from specdec.models import published
from specdec.models.target import TargetModel
from specdec.modules.private_copy import text_configs

from greedy_truth import Truth
from marks import deep, each_value, is_deep, pairs, slow
from proved_models import SHARED
from tiny_families import FULL, SLIDING, VOCAB, build_target, random_eagle3, spread

FAMILIES = [
    *("gemma4-e2b", "gemma4-31b", "gemma4-moe", "gemma4-multimodal", "gemma3", "gemma2"),
    *("gpt_oss", "llama", "qwen2", "qwen3", "qwen3_moe", "mistral"),
]
GEMMA4_FAMILIES = [family for family in FAMILIES if family.startswith("gemma4")]
FAST_FAMILIES = ("gemma4-e2b", "gemma2", "gpt_oss", "llama")  # shared K/V, softcaps, sinks, full attention alone


def fast_ones(families: Sequence[str], *choices: Sequence[Any]) -> list[Any]:
    """Combine families and choices, for a test that depends little on the family.

    `make test` runs every value of the choices on the fast families; test_greedy_exact.py decodes on every family.
    """
    others = [case for case in pairs(families, *choices) if case[0] not in FAST_FAMILIES]
    fast = each_value(pairs([family for family in families if family in FAST_FAMILIES], *choices))
    return [*fast, *(deep(*case) for case in others)]


@pytest.fixture(params=[family if family in FAST_FAMILIES else slow(family) for family in FAMILIES])
def family(request: pytest.FixtureRequest) -> str:
    """Every family of target, one test each."""
    return str(request.param)


def few_layers() -> dict[str, Any]:
    """Fields of a gemma4-e2b of 3 layers, the last of which shares K/V, for engines on interpreted kernels. With `make
    test-deep` it has 4."""
    few = {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL], "num_kv_shared_layers": 1}
    return {} if is_deep() else few


BUNDLED: dict[tuple[Any, ...], PreTrainedModel] = {}


@pytest.fixture(scope="module")
def bundled_once() -> Iterator[None]:
    """Load and check the bundled models once per process, not once per engine. For tests that change none."""
    load = Checkpoint.load

    def once(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, config: Any = None) -> PreTrainedModel:
        path = Path(checkpoint.path)
        if path.parent != published.BUNDLED_DIR or set(checkpoint.options) - {"dtype"}:
            return load(checkpoint, dtype, device, config)
        key = path, dtype, device
        if key not in BUNDLED:
            BUNDLED[key] = load(checkpoint, dtype, device, config)
            SHARED[id(BUNDLED[key])] = BUNDLED[key]
        return BUNDLED[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "load", once)
        yield


TARGETS_BUILT: dict[str, PreTrainedModel] = {}


def shared_target(family: str, seed: int = 0, *, fresh: bool = False, **overrides: Any) -> PreTrainedModel:
    """Build a tiny random target, window 8, no end token. It is cached, so not to be changed unless `fresh`.

    overrides: fields of the text config.
    """
    key = f"{family} {seed} {sorted(overrides.items())}"
    if fresh:
        torch.manual_seed(seed)
        return spread(build_target(family, **overrides))
    if key not in TARGETS_BUILT:
        with torch.inference_mode(False):  # later tests get it too, and inference tensors share no K/V
            torch.manual_seed(seed)
            TARGETS_BUILT[key] = spread(build_target(family, **overrides))
        SHARED[id(TARGETS_BUILT[key])] = TARGETS_BUILT[key]
    return TARGETS_BUILT[key]


@pytest.fixture(scope="session")
def random_prompt() -> Callable[..., list[int]]:
    """random_prompt(length, seed=0, vocab=96): token ids."""

    def make(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
        rng = random.Random(1000 * seed + length)
        return [rng.randrange(vocab) for _ in range(length)]

    return make


@pytest.fixture(scope="session")
def make_target() -> Callable[..., PreTrainedModel]:
    """make_target(family, seed=0, fresh=False, **overrides): the function `shared_target`."""
    return shared_target


@pytest.fixture(scope="session")
def make_assistant() -> Callable[..., Gemma4AssistantForCausalLM]:
    """make_assistant(target, ordered=False, seed=1, **overrides): a random MTP assistant that fits a Gemma 4 target.

    `ordered`: a centroid head over a random token order. `overrides` go to its text config, `backbone_hidden_size` to
    the outer one. Cached: do not change it.
    """
    built: dict[str, Gemma4AssistantForCausalLM] = {}

    @torch.inference_mode(False)
    def make(
        target: PreTrainedModel, ordered: bool = False, seed: int = 1, **overrides: Any
    ) -> Gemma4AssistantForCausalLM:
        key = f"{id(target)} {ordered} {seed} {sorted(overrides.items())}"
        if key in built:
            return built[key]
        config = target.config.get_text_config()
        layout = layout_from_config(config)
        sliding, full = layout.last_owner(SLIDING), layout.last_owner(FULL)
        text: dict[str, Any] = {
            "vocab_size": config.vocab_size,
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 4 if ordered else 2,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL] if ordered else [SLIDING, FULL],
            "num_attention_heads": 4,
            "num_key_value_heads": sliding.k.heads,
            "head_dim": sliding.k.dim,
            "global_head_dim": full.k.dim,
            "num_global_key_value_heads": full.k.heads,
            "attention_k_eq_v": True,
            "sliding_window": sliding.window,
            "max_position_embeddings": config.max_position_embeddings,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "pad_token_id": None,
        }
        outer = {
            "backbone_hidden_size": overrides.pop("backbone_hidden_size", config.hidden_size),
            "use_ordered_embeddings": ordered,
            "num_centroids": 12,
            "centroid_intermediate_top_k": 3,
        }
        torch.manual_seed(seed)
        with constructible_assistants():
            assistant = Gemma4AssistantForCausalLM(
                Gemma4AssistantConfig(text_config=Gemma4TextConfig(**{**text, **overrides}), **outer)
            )
        spread(assistant)
        if ordered:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(config.vocab_size))
        built[key] = assistant
        return assistant

    return make


@contextmanager
def eager(model: PreTrainedModel) -> Iterator[None]:
    """Run the model with its eager attention in the block."""
    configs = text_configs(model)
    before = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


@pytest.fixture(scope="session")
def hf_forward() -> Callable[..., Any]:
    """hf_forward(model, ids, **kwargs): the HF output of one eager forward over [ids] without a cache."""

    @torch.no_grad()
    def forward(model: PreTrainedModel, ids: Sequence[int], **kwargs: Any) -> Any:
        device = next(model.parameters()).device
        with eager(model):
            return model(torch.tensor([list(ids)], device=device), use_cache=False, **kwargs)

    return forward


@pytest.fixture(scope="session")
def greedy_oracle(hf_forward: Callable[..., Any]) -> Callable[..., Sequence[int]]:
    """greedy_oracle(model, ids, n, guess=()): the n tokens of greedy decoding, by full HF forwards without a cache.

    The tokens are the same for any guess (such as an engine's output). One forward over `ids` and the guess proves all
    its right tokens; each further token takes a forward. Without a guess, for a model that no test changes, the result
    is a `Truth`: the first list that it is compared with is the guess.
    """
    known: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    alive: list[PreTrainedModel] = []  # an id is only a key while its model lives

    def tokens(model: PreTrainedModel, ids: Sequence[int], n: int, guess: Sequence[int]) -> list[int]:
        if (key := (id(model), tuple(ids))) not in known:
            known[key] = []
            alive.append(model)
        out = known[key]
        if len(out) < len(guess):
            best = hf_forward(model, [*ids, *guess]).logits[0, len(ids) - 1 : -1].argmax(-1).tolist()
            wrong = (i for i, (token, guessed) in enumerate(zip(best, guess, strict=True)) if token != guessed)
            right = best[: next(wrong, len(best)) + 1]  # the first wrong guess shows the right token, none after it
            out += right[len(out) :]
        while len(out) < n:
            out.append(int(hf_forward(model, [*ids, *out]).logits[0, -1].argmax()))
        return out[:n]

    def oracle(model: PreTrainedModel, ids: Sequence[int], n: int, guess: Sequence[int] = ()) -> Sequence[int]:
        if guess or id(model) not in SHARED:
            return tokens(model, ids, n, guess)
        return Truth(functools.partial(tokens, model, list(ids), n))

    return oracle


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., Engine]:
    """make_engine(model, drafter=None, *, num_steps=3, spec=None, tokenizer=None, **engine_config).

    `drafter`: a module, a name, or any drafter.
    """

    def make(
        model: PreTrainedModel,
        drafter: Any = None,
        *,
        num_steps: int = 3,
        spec: SpecConfig | None = None,
        tokenizer: Any = None,
        **config: Any,
    ) -> Engine:
        spec = spec or SpecConfig(num_steps=num_steps)
        settings = EngineConfig(**{"max_model_len": 256, "prefill_chunk": 16, **config})
        if hasattr(drafter, "bind"):
            return Engine(TargetModel(model), drafter, tokenizer=tokenizer, spec=spec, config=settings)
        return Engine.from_pretrained(model, drafter, tokenizer=tokenizer, spec=spec, config=settings)

    return make


@pytest.fixture(scope="session")
def make_drafter(
    make_assistant: Callable[..., Gemma4AssistantForCausalLM],
    scripted: Any,
    tree_script: Callable[..., Any],
) -> Callable[..., Any]:
    """make_drafter(kind, model, prompts=(), answers=()): a drafter for the model. Other kinds are returned as they are.

    "trees": random trees with many right paths; without answers the prompts are whole texts. "mtp" and "ordered": an
    assistant of Gemma 4. "eagle3" and "block": a random head. "lm": a tiny Llama.
    """

    def make(kind: str | None, model: Any, prompts: Sequence[Any] = (), answers: Sequence[Any] = ()) -> Any:
        match kind:
            case "trees":
                if answers:
                    prompts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
                return scripted(tree_script(prompts, model.get_input_embeddings().num_embeddings))
            case "mtp" if type(model).__name__.startswith("Gemma4"):
                return make_assistant(model)
            case "ordered":
                return make_assistant(model, ordered=True)
            case "eagle3":
                return random_eagle3(model)
            case "block":
                return random_block(model)
            case "lm":
                return shared_target("llama")
        return kind

    return make


@pytest.fixture
def engine_of(
    model: PreTrainedModel,
    make_engine: Callable[..., Engine],
    make_drafter: Callable[..., Any],
    byte_tokenizer: Any,
) -> Callable[..., Engine]:
    """engine_of(kind, truths, **config): an engine over the `model` fixture of a test's file, with any drafter."""
    specs = {"tree": SpecConfig(3, 3, 12), "eagle3": SpecConfig(3, 2, 6), "scripted": SpecConfig(5)}
    kinds = {"tree": "mtp", "scripted": "trees"}

    def make(kind: str | None = None, truths: Sequence[Sequence[int]] = (), **config: Any) -> Engine:
        drafter, spec = make_drafter(kinds.get(kind, kind), model, truths), specs.get(kind)
        return make_engine(model, drafter, spec=spec, tokenizer=byte_tokenizer, **{"max_model_len": 320, **config})

    return make
