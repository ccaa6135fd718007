"""Fixtures shared by the tests. Nothing here reaches the network; one CPU thread per test process."""

import os

# read at import by the libraries below
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# kernels run in the interpreter where there is no GPU: triton reads this when it is imported, and the launchers at each
# call, so only the tests of kernels set it again (see `interpreted` there)
os.environ["TRITON_INTERPRET"] = "0" if os.path.exists("/dev/nvidiactl") else "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4VisionConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from specdec import DraftTree, Engine, EngineConfig, SpecConfig
from specdec.attention.bridge import text_configs
from specdec.draft_models.base import DraftBatch, Observation
from specdec.draft_models.registry import constructible_assistants
from specdec.kvcache.frozen import KVView
from specdec.kvcache.layout import layout_from_config
from specdec.models.target import TargetModel

ROOT = Path(__file__).resolve().parent.parent

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` and its kin return, so that an unwritten element shows: NaN, or the largest integer."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = make(*args, **kwargs)
            if out.is_floating_point() or out.is_complex():
                return out.fill_(float("nan"))
            return out.fill_(True if out.dtype == torch.bool else torch.iinfo(out.dtype).max)

        return wrapper

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of evaluation data beside the checkout; tests that need it are skipped without it."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("no ../shared/data beside the checkout")
    return path


# Tiny random targets of every family, and what they must generate

VOCAB = 96
WINDOW = 8
SLIDING, FULL = "sliding_attention", "full_attention"
FAMILIES = [
    *("gemma4-e2b", "gemma4-31b", "gemma4-moe", "gemma4-multimodal", "gemma3", "gemma2"),
    *("gpt_oss", "llama", "qwen2", "qwen3", "qwen3_moe", "mistral"),
]
GEMMA4_FAMILIES = [family for family in FAMILIES if family.startswith("gemma4")]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Every family of target, one test each."""
    return str(request.param)


@pytest.fixture(params=GEMMA4_FAMILIES)
def gemma4_family(request: pytest.FixtureRequest) -> str:
    """Every family that has MTP assistants."""
    return str(request.param)


def build_target(family: str, **overrides: Any) -> PreTrainedModel:
    """An untrained model of the family; `overrides` go to its text config."""
    base: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    gemma4: dict[str, Any] = {
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "global_head_dim": 16,
        "sliding_window": WINDOW,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    }
    k_eq_v = {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
    shared = {
        "num_key_value_heads": 1,
        "num_hidden_layers": 6,
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": overrides.get("vocab_size", VOCAB),
    }
    moe = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    alternating = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "sliding_window": WINDOW}
    match family:
        case "gemma4-e2b":
            return Gemma4ForCausalLM(Gemma4TextConfig(**{**base, **gemma4, **shared, **overrides}))
        case "gemma4-31b":
            return Gemma4ForCausalLM(Gemma4TextConfig(**{**base, **gemma4, **k_eq_v, **overrides}))
        case "gemma4-moe":
            return Gemma4ForCausalLM(Gemma4TextConfig(**{**base, **gemma4, **k_eq_v, **moe, **overrides}))
        case "gemma4-multimodal":
            tower = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
            vision = {"intermediate_size": 8, "num_key_value_heads": 1, "head_dim": 8, "position_embedding_size": 4}
            audio = {"subsampling_conv_channels": [8, 8], "output_proj_dims": 8}
            config = Gemma4Config(
                text_config=Gemma4TextConfig(**{**base, **gemma4, **shared, **overrides}),
                vision_config=Gemma4VisionConfig(**tower, **vision),
                audio_config=Gemma4AudioConfig(**tower, **audio),
            )
            return Gemma4ForConditionalGeneration(config)
        case "gemma3":
            slides = {"num_hidden_layers": 4, "layer_types": [SLIDING] * 3 + [FULL], "sliding_window": WINDOW}
            return Gemma3ForCausalLM(Gemma3TextConfig(**{**base, **slides, "query_pre_attn_scalar": 1, **overrides}))
        case "gemma2":
            softcap = {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 1}  # low, so that it matters
            return Gemma2ForCausalLM(Gemma2Config(**{**base, **alternating, **softcap, **overrides}))
        case "gpt_oss":
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
            return GptOssForCausalLM(GptOssConfig(**{**base, **alternating, **experts, **overrides}))
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**{**base, "num_hidden_layers": 3, **overrides}))
        case "qwen2":
            del base["head_dim"]
            slides = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
            return Qwen2ForCausalLM(Qwen2Config(**{**base, **slides, "num_hidden_layers": 3, **overrides}))
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**{**base, "num_hidden_layers": 3, **overrides}))
        case "qwen3_moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 3}
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**base, **experts, **overrides}))
        case "mistral":
            slides = {"num_hidden_layers": 3, "sliding_window": WINDOW}
            return MistralForCausalLM(MistralConfig(**{**base, **slides, **overrides}))
    raise AssertionError(f"{family=}")


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Weights wide enough that greedy output wanders, sinks and norms included; no end token.

    Embeddings are small beside what the layers add: with a tied head they would predict their own token for ever.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.02 if "embed_tokens." in name else 0.45)
            elif name.endswith("sinks"):
                weight.normal_()
            elif "norm" in name:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model.eval()


@pytest.fixture(scope="session")
def make_target() -> Callable[..., PreTrainedModel]:
    """make_target(family, seed=0, fresh=False, **overrides): a tiny random target, window 8, no end token.

    Cached, so not to be changed unless `fresh`. `overrides` go to the text config.
    """
    built: dict[str, PreTrainedModel] = {}

    def make(family: str, seed: int = 0, *, fresh: bool = False, **overrides: Any) -> PreTrainedModel:
        key = f"{family} {seed} {sorted(overrides.items())}"
        if fresh or key not in built:
            torch.manual_seed(seed)
            model = spread(build_target(family, **overrides))
            if fresh:
                return model
            built[key] = model
        return built[key]

    return make


@pytest.fixture(scope="session")
def make_assistant() -> Callable[..., Gemma4AssistantForCausalLM]:
    """make_assistant(target, ordered=False, seed=1, **overrides): a random MTP assistant that fits a Gemma 4 target.

    `ordered`: a centroid head over a random token order. `overrides` go to its text config, `backbone_hidden_size` to
    the outer one. Cached: do not change it.
    """
    built: dict[str, Gemma4AssistantForCausalLM] = {}

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
            "num_key_value_heads": sliding.num_kv_heads,
            "head_dim": sliding.head_dim,
            "global_head_dim": full.head_dim,
            "num_global_key_value_heads": full.num_kv_heads,
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
    """The model under its eager attention for the length of the block."""
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
        with eager(model):
            return model(torch.tensor([list(ids)]), use_cache=False, **kwargs)

    return forward


@pytest.fixture(scope="session")
def greedy_oracle(hf_forward: Callable[..., Any]) -> Callable[[PreTrainedModel, Sequence[int], int], list[int]]:
    """greedy_oracle(model, ids, n): the n tokens of greedy decoding, one full HF forward each."""
    known: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    alive: list[PreTrainedModel] = []  # an id is only a key while its model lives

    def oracle(model: PreTrainedModel, ids: Sequence[int], n: int) -> list[int]:
        out = known.setdefault((id(model), tuple(ids)), [])
        alive.append(model)
        while len(out) < n:
            out.append(int(hf_forward(model, [*ids, *out]).logits[0, -1].argmax()))
        return out[:n]

    return oracle


@pytest.fixture(scope="session")
def random_prompt() -> Callable[..., list[int]]:
    """random_prompt(length, seed=0, vocab=96): token ids."""

    def make(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
        rng = random.Random(1000 * seed + length)
        return [rng.randrange(vocab) for _ in range(length)]

    return make


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., Engine]:
    """make_engine(model, drafter=None, *, num_steps=3, spec=None, tokenizer=None, **engine_config).

    `drafter`: a module or a name, or any object with `propose`.
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
        if hasattr(drafter, "propose"):
            return Engine(TargetModel(model), drafter, tokenizer=tokenizer, spec=spec, config=settings)
        return Engine.from_pretrained(model, drafter, tokenizer=tokenizer, spec=spec, config=settings)

    return make


class ScriptedDrafter:
    """A drafter that a test scripts: `script(tokens, n)` -> (draft tokens [n], their parents [n]) behind the tokens.

    Parents number nodes, the root is 0; None is a chain.
    """

    name = "scripted"
    taps: tuple[int, ...] = ()
    bytes_per_slot = 0
    extra_keys = 0

    def __init__(self, script: Callable[[list[int], int], tuple[list[int], list[int] | None]]) -> None:
        self.view: KVView | None = None
        self.script = script
        self.rounds = 0

    def start(self, max_requests: int) -> None:
        pass

    def observe(self, seen: Observation) -> None:
        pass

    def propose(self, batch: DraftBatch) -> DraftTree:
        self.rounds += 1
        tokens, parents = [], []
        for row, length in zip(batch.history.tolist(), batch.history_len.tolist(), strict=True):
            drafts, above = self.script(row[:length], batch.num_steps)
            tokens.append([row[length - 1], *drafts])
            parents.append([-1, *(range(batch.num_steps) if above is None else above)])
        return DraftTree.from_parents(torch.tensor(tokens), torch.tensor(parents))


@pytest.fixture(scope="session")
def scripted() -> type[ScriptedDrafter]:
    """A drafter class for scripts: see ScriptedDrafter."""
    return ScriptedDrafter


@pytest.fixture(scope="session")
def tree_script() -> Callable[..., Callable[[list[int], int], tuple[list[int], list[int] | None]]]:
    """tree_script(truths, vocab=96, hit=0.7): a script of random branching trees.

    `truths` are whole sequences: a draft behind a path that follows one of them follows it too with probability `hit`,
    in a random place among its siblings. A pure function of the tokens, so the same in any batch.
    """

    def make(
        truths: Sequence[Sequence[int]], vocab: int = VOCAB, hit: float = 0.7
    ) -> Callable[[list[int], int], tuple[list[int], list[int] | None]]:
        def script(tokens: list[int], n: int) -> tuple[list[int], list[int] | None]:
            rng = random.Random(str(tokens))
            paths = [list(tokens)]  # by node
            parents: list[int] = []
            while len(paths) <= n:
                parent = rng.randrange(max(0, len(paths) - 3), len(paths))
                above = paths[parent]
                true = [t[len(above)] for t in truths if len(t) > len(above) and list(t[: len(above)]) == above]
                token = true[0] if true and rng.random() < hit else rng.randrange(vocab)
                if [*above, token] not in paths:  # siblings differ
                    paths.append([*above, token])
                    parents.append(parent)
            return [path[-1] for path in paths[1:]], parents

        return script

    return make


@pytest.fixture(scope="session")
def pair_tokenizer() -> PreTrainedTokenizerFast:
    """96 tokens of two characters each, a0 to j5: stop strings can cross their borders."""
    vocab = {f"{'abcdefghij'[i // 10]}{i % 10}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[a-j][0-9]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte and <eos> = 256: characters of several bytes are split over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
