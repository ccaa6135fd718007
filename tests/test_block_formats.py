"""Block drafters on disk: every published family is read as its own code computes it, and what is not known is refused
by name."""

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from block_heads import KINDS, random_head, written_block
from block_reference import Checkpoint, accepted_lengths, draft
from safetensors.torch import load_file, save_file

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.block.block_checkpoint import is_block_config, read_block, resolve_layer_ids
from specdec.draft_models.block.block_drafter import BlockDrafter, block_drafter
from specdec.draft_models.block.block_head import BlockHead, BlockSpec
from specdec.draft_models.checkpoints.checkpoint_files import TargetShape
from specdec.draft_models.checkpoints.drafter_formats import is_eagle3_config
from specdec.drafter_loading import load_any_drafter
from specdec.errors import CheckpointError, UnsupportedModelError
from specdec.models.target import TargetModel
from specdec.training.train_drafter import spread_layers

from marks import deep, deep_cases, examples, slow

QWEN3 = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_scaling": None, "hidden_act": "silu"}
OLD = {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "attention_dropout": 0.0, "bos_token_id": 151643}
ZLAB = {"architectures": ["DFlashDraftModel"], "dtype": "bfloat16", "tie_word_embeddings": True, **QWEN3, **OLD}
DEEPSPEC = {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "use_cache": True, **QWEN3}
CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}
SUCCESSOR = {"markov_rank": 4, "markov_head_type": "vanilla"}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    # layers of the target; the config, at reduced width (`narrow`)
    "z-lab/Qwen3-8B-DFlash-b16": (
        36,
        {**ZLAB, "block_size": 16, "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33]}, "num_hidden_layers": 5},
    ),
    "z-lab/gpt-oss-20b-DFlash": (
        24,
        {**ZLAB, "block_size": 8, "dflash_config": {"target_layer_ids": [1, 6, 11, 16, 21]}, "num_hidden_layers": 8},
    ),
    "DFlash, sliding": (
        32,
        {
            **ZLAB,
            "block_size": 16,
            "dflash_config": {"target_layer_ids": [1, 8, 15, 22, 29]},
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
            "sliding_window": 6,
            "use_sliding_window": True,
            "max_window_layers": 5,
        },
    ),
    "JetSpec/jetspec-qwen3-8b": (
        36,
        {
            **ZLAB,
            "block_size": 16,
            "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "causal_head": True},
            "num_hidden_layers": 5,
        },
    ),
    "deepseek-ai/dflash_qwen3_8b_block7": (
        36,
        {
            **DEEPSPEC,
            "block_size": 7,
            "target_layer_ids": [1, 9, 17, 25, 33],
            "num_hidden_layers": 5,
            "markov_rank": 0,
            "enable_confidence_head": False,
        },
    ),
    "deepseek-ai/dspark_qwen3_8b_block7": (
        36,
        {
            **DEEPSPEC,
            **SUCCESSOR,
            **CONFIDENCE,
            "block_size": 7,
            "target_layer_ids": [1, 9, 17, 25, 33],
            "num_hidden_layers": 5,
        },
    ),
    "deepseek-ai/dspark_qwen3_14b_block7": (
        40,
        {
            **DEEPSPEC,
            **SUCCESSOR,
            **CONFIDENCE,
            "block_size": 7,
            "target_layer_ids": [1, 10, 19, 28, 37],
            "num_hidden_layers": 5,
        },
    ),
    "DSpark, gated": (
        12,
        {
            **DEEPSPEC,
            "markov_rank": 4,
            "markov_head_type": "gated",
            "block_size": 7,
            "target_layer_ids": [-1, 3, 10],
            "num_hidden_layers": 2,
        },
    ),
    "DSpark, rnn": (
        12,
        {
            **DEEPSPEC,
            "markov_rank": 4,
            "markov_head_type": "rnn",
            "block_size": 7,
            "target_layer_ids": [1, 3, 10],
            "num_hidden_layers": 2,
        },
    ),
}
GEMMA4 = {
    # what the config of Gemma4DSparkModel has of the target's, and its own
    "model_type": "gemma4_text",
    "target_model_type": "gemma4",
    "hidden_activation": "gelu_pytorch_tanh",
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": 30.0,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-6,
    "vocab_size_per_layer_input": 262144,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
}
DEEPSPEC_GEMMA4 = {**GEMMA4, "architectures": ["Gemma4DSparkModel"], "num_anchors": 512, "block_size": 7}
PUBLISHED |= {
    "deepseek-ai/dflash_gemma4_12b_block7": (
        48,
        {**DEEPSPEC_GEMMA4, "markov_rank": 0, "target_layer_ids": [5, 17, 29, 41, 46], "num_hidden_layers": 5},
    ),
    "deepseek-ai/dspark_gemma4_12b_block7": (
        48,
        {
            **DEEPSPEC_GEMMA4,
            **SUCCESSOR,
            **CONFIDENCE,
            "target_layer_ids": [5, 17, 29, 41, 46],
            "num_hidden_layers": 5,
        },
    ),
}
VOCAB = 7


def narrow(name: str, folder: Path, seed: int = 0) -> int:
    """Write a published config at reduced width, with random weights -> layers of its target."""
    layers, config = PUBLISHED[name]
    config = json.loads(json.dumps(config))
    config |= {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 8, "vocab_size": VOCAB, "num_target_layers": layers, "max_position_embeddings": 4096}
    config.setdefault("layer_types", ["full_attention"] * config["num_hidden_layers"])
    config.setdefault("sliding_window", None)
    if "dflash_config" in config:
        config["dflash_config"]["mask_token_id"] = VOCAB - 1
    else:
        config["mask_token_id"] = VOCAB - 1
    given = config.get("dflash_config", config)
    rank, is_dspark = config.get("markov_rank", 0), "dflash_config" not in config
    is_gemma4, special = config["model_type"] == "gemma4_text", dict[str, Any]()
    if is_gemma4:  # a global head is twice as wide, and its keys are values
        special = {"is_gemma4": True, "keys_are_values": True, "hidden_act": "gelu_pytorch_tanh"}
        special["rope"] = config["rope_parameters"]["full_attention"]
    spec = BlockSpec(
        hidden_size=32,
        vocab_size=VOCAB,
        intermediate_size=40,
        num_heads=4,
        num_kv_heads=1 if is_gemma4 else 2,
        head_dim=16 if is_gemma4 else 8,
        **special,
        aux_layers=tuple(i + 1 for i in given["target_layer_ids"]),
        block_size=config["block_size"],
        mask_token=VOCAB - 1,
        windows=(None,) * config["num_hidden_layers"],
        owns_vocabulary=is_dspark,
        successor=config["markov_head_type"] if rank else None,
        successor_rank=rank,
    )
    torch.manual_seed(seed)
    state = BlockHead(spec).state_dict()
    for tensor in state.values():
        tensor.normal_(std=0.4) if tensor.dim() > 1 else tensor.add_(0.1 * torch.randn_like(tensor))
    if config.get("enable_confidence_head"):
        state |= {"confidence_head.proj.weight": torch.ones(1, 36), "confidence_head.proj.bias": torch.ones(1)}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, folder / "model.safetensors")
    return layers


@pytest.fixture
def narrow_target(make_target: Callable[..., Any]) -> Callable[[int], Any]:
    """A random model of so many layers, whose tokens are few enough to be guessed now and then."""

    def make(layers: int) -> Any:
        return make_target("qwen3", vocab_size=VOCAB, num_hidden_layers=layers)

    return make


class Rounds:
    """Notes what an engine's block drafter computes and what is accepted of it."""

    def __init__(self, drafter: BlockDrafter) -> None:
        self.drafter, self.logits, self.lengths = drafter, list[torch.Tensor](), list[int]()
        logits = drafter.form.logits

        def noting(states: torch.Tensor) -> torch.Tensor:
            self.logits.append(logits(states).clone())
            return self.logits[-1]

        drafter.form.logits = noting  # type: ignore[method-assign]

    def bind(self, binding: Any) -> Any:
        worker = self.drafter.bind(binding)
        observe = worker.observe

        def noting(seen: Any) -> None:
            if self.logits:
                self.lengths.append(int(seen.length[0]))
            observe(seen)

        worker.observe = noting  # type: ignore[method-assign]
        return worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)


QUICK = ("DSpark, gated", "z-lab/gpt-oss-20b-DFlash")
OF_A_FORM_THAT_STAYS = {  # another width of block, other layers, or the same head without its successor
    *("z-lab/Qwen3-8B-DFlash-b16", "deepseek-ai/dflash_qwen3_8b_block7", "deepseek-ai/dspark_qwen3_14b_block7"),
    "deepseek-ai/dflash_gemma4_12b_block7",
}


@deep_cases("deepseek-ai/dspark_gemma4_12b_block7", "deepseek-ai/dspark_qwen3_8b_block7", "DFlash, sliding")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else (deep if name in OF_A_FORM_THAT_STAYS else slow)(name) for name in PUBLISHED]
)
def test_first_block_and_accepted_lengths_are_those_of_the_definition(
    name: str, tmp_path: Path, narrow_target: Callable[[int], Any], random_prompt: Callable[..., list[int]]
) -> None:
    model = narrow_target(narrow(name, tmp_path))
    checkpoint, prompt = Checkpoint.at(tmp_path), random_prompt(11, vocab=VOCAB)
    want, lengths = accepted_lengths(checkpoint, model, prompt, examples(20, 40))
    rounds = Rounds(block_drafter(tmp_path, TargetModel(model)))
    spec = SpecConfig(rounds.drafter.spec.num_drafts)
    config = EngineConfig(max_model_len=160, prefill_chunk=4)
    with Engine(TargetModel(model), rounds, spec=spec, config=config) as engine:
        out = engine.generate([prompt], SamplingParams(max_new_tokens=examples(40, 80), ignore_eos=True))[0]
    first = draft(checkpoint, model, [*prompt, out.token_ids[0]])
    torch.testing.assert_close(rounds.logits[0][0].double(), first.logits, atol=2e-5, rtol=2e-5)
    assert out.token_ids[: len(want)] == want
    assert rounds.lengths[: len(lengths)] == lengths


def test_planted_drafts_are_all_accepted(tmp_path: Path, make_target: Callable[..., Any]) -> None:
    """A target that writes 0 1 2 3 .. and a successor head that knows it: every round gains a whole block and one."""
    narrow("deepseek-ai/dspark_qwen3_8b_block7", tmp_path)
    model = make_target("qwen3", vocab_size=VOCAB, num_hidden_layers=36, fresh=True)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        table = torch.eye(VOCAB, 32)
        model.get_input_embeddings().weight.copy_(table)
        model.lm_head.weight.copy_(table.roll(1, 0) * 5)
        model.model.norm.weight.fill_(1.0)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"].zero_()
    codes = torch.randn(VOCAB, 4, generator=torch.Generator().manual_seed(1))
    codes = codes / codes.norm(dim=-1, keepdim=True)
    tensors["markov_head.markov_w1.weight"], tensors["markov_head.markov_w2.weight"] = codes, codes.roll(1, 0)
    save_file(tensors, tmp_path / "model.safetensors")
    rounds = Rounds(block_drafter(tmp_path, TargetModel(model)))
    with Engine(TargetModel(model), rounds, spec=SpecConfig(7), config=EngineConfig(max_model_len=128)) as engine:
        out = engine.generate([[0, 1, 2]], SamplingParams(max_new_tokens=41, ignore_eos=True))[0]
    assert out.token_ids == [(3 + i) % VOCAB for i in range(41)]
    assert rounds.lengths == [8, 8, 8, 8, 8]
    assert accepted_lengths(Checkpoint.at(tmp_path), model, [0, 1, 2], 33)[1] == [8, 8, 8, 8]


@pytest.mark.skipif(not os.environ.get("SPECDEC_DFLASH"), reason="SPECDEC_DFLASH: a checkout of z-lab/dflash")
@pytest.mark.parametrize("name", ["z-lab/Qwen3-8B-DFlash-b16", "z-lab/gpt-oss-20b-DFlash"])
def test_first_block_is_that_of_the_reference_code(
    name: str, tmp_path: Path, narrow_target: Callable[[int], Any], random_prompt: Callable[..., list[int]]
) -> None:
    from transformers import DynamicCache, Qwen3Config

    source = Path(os.environ["SPECDEC_DFLASH"]) / "dflash" / "model.py"
    found = importlib.util.spec_from_file_location("dflash_reference", source)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    model = narrow_target(narrow(name, tmp_path))
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    wanted = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "auto_map")}
    reference = module.DFlashDraftModel(Qwen3Config(**wanted)).eval()
    reference.load_state_dict(load_file(tmp_path / "model.safetensors"))
    prompt = random_prompt(11, vocab=VOCAB)
    rounds = Rounds(block_drafter(tmp_path, TargetModel(model)))
    spec = SpecConfig(config["block_size"] - 1)
    with Engine(TargetModel(model), rounds, spec=spec, config=EngineConfig(max_model_len=64)) as engine:
        root = engine.generate([prompt], SamplingParams(max_new_tokens=20, ignore_eos=True))[0].token_ids[0]
    block = torch.tensor([[root] + [VOCAB - 1] * (config["block_size"] - 1)])
    with torch.no_grad():
        seen = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        out = reference(
            target_hidden=module.extract_context_feature(seen, reference.target_layer_ids),
            noise_embedding=model.get_input_embeddings()(block),
            position_ids=torch.arange(len(prompt) + config["block_size"])[None],
            past_key_values=DynamicCache(),
            use_cache=True,
            is_causal=False,
        )
        torch.testing.assert_close(rounds.logits[0], model.lm_head(out[:, 1:]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "block", "eagle"),
    [
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, True, False),
        ({"model_type": "qwen3", "dflash_config": {"mask_token_id": 4}}, True, False),
        ({"architectures": ["Qwen3DSparkModel"]}, True, False),
        ({"architectures": ["DFlash2DraftModel"]}, True, False),
        ({"speculators_model_type": "dflash"}, True, False),
        ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 9}, False, True),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, False, False),
    ],
)
def test_configs_are_told_apart(config: dict[str, Any], block: bool, eagle: bool) -> None:
    assert (is_block_config(config), is_eagle3_config(config)) == (block, eagle)


def edited(folder: Path, **changes: Any) -> None:
    """Change the config in a folder; None removes a key; dotted keys are of `dflash_config`."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    for key, value in changes.items():
        place = config["dflash_config"] if key.startswith("dflash_") else config
        key = key.removeprefix("dflash_")
        place.pop(key, None)
        if value is not None:
            place[key] = value
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


SHAPE = TargetShape("small", 36, 32, VOCAB)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, UnsupportedModelError, "a DFlash2 drafter .* convolution"),
        ({"dflash_conv_kernel_size": 2}, UnsupportedModelError, "a DFlash2 drafter"),
        ({"dflash_selector_rank": 8}, UnsupportedModelError, "a DFlash2 drafter"),
        ({"speculators_model_type": "dflash"}, UnsupportedModelError, "speculators' format"),
        ({"model_type": "laguna"}, UnsupportedModelError, "laguna layers"),
        ({"dflash_attention_mode": "mla"}, UnsupportedModelError, "dflash_config.attention_mode='mla' is not known"),
        ({"logit_scale": 2.0}, UnsupportedModelError, "flag logit_scale=2.0 is not known"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "quantised"),
        ({"dflash_target_layer_ids": [1, 35]}, UnsupportedModelError, r"expected layers -1 \(the embeddings\) to 34"),
        ({"dflash_target_layer_ids": [1, 9]}, CheckpointError, "fc.weight is"),
        ({"num_target_layers": 40}, CheckpointError, "num_target_layers=40, but target small says 36"),
        ({"num_hidden_layers": 4}, CheckpointError, "num_hidden_layers=4, but the file says 5"),
        ({"hidden_size": 64}, CheckpointError, "hidden_size=64, but target small says 32"),
        ({"vocab_size": 9}, CheckpointError, "vocab_size=9, target small has 7"),
        ({"dflash_mask_token_id": 7}, CheckpointError, "mask_token_id=7, but target small has 7 rows"),
        ({"dflash_mask_token_id": None}, CheckpointError, "config.json says no mask_token_id"),
        ({"block_size": None}, CheckpointError, "config.json says no block_size"),
        ({"block_size": 1}, CheckpointError, "drafts nothing"),
        ({"block_size": "16"}, CheckpointError, "block_size='16', expected a whole number above 0"),
        ({"dflash_block_size": 8}, CheckpointError, "block_size is 16 in one place of its config and 8 in another"),
        ({"dflash_causal_head": True, "is_causal": False}, CheckpointError, "contradict each other"),
        ({"num_key_value_heads": 3}, CheckpointError, "num_attention_heads=.* do not group over num_key_value_heads=3"),
        ({"hidden_act": "swish9"}, UnsupportedModelError, "no activation"),
        ({"markov_rank": 4, "markov_head_type": "lstm"}, UnsupportedModelError, "markov_head_type='lstm'"),
        ({"markov_rank": 4, "markov_head_type": "rnn"}, CheckpointError, "markov_head.markov_w1.weight is missing"),
    ],
    ids=str,
)
def test_what_is_not_known_or_does_not_fit_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    narrow("z-lab/Qwen3-8B-DFlash-b16", tmp_path)
    edited(tmp_path, **changes)
    with pytest.raises(error, match=message):
        read_block(tmp_path, SHAPE)


@pytest.mark.parametrize("change", ["missing", "unknown", "integer"])
def test_tensors_must_be_those_of_the_head(change: str, tmp_path: Path) -> None:
    narrow("z-lab/Qwen3-8B-DFlash-b16", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if change == "missing":
        del tensors["norm.weight"]
    elif change == "unknown":
        tensors["layers.0.attention_conv.weight"] = torch.ones(2)
    else:
        tensors["norm.weight"] = tensors["norm.weight"].to(torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"norm.weight is missing|attention_conv.weight is not known|torch.int32"):
        read_block(tmp_path, SHAPE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "enable_moe_block=True of a drafter of Gemma 4's layers; it must be off"),
        ({"layer_types": ["sliding_attention"] * 5}, "attend fully in all of them"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type default or proportional"),
    ],
    ids=str,
)
def test_what_gemmas_layers_cannot_be(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    narrow("deepseek-ai/dspark_gemma4_12b_block7", tmp_path)
    edited(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        read_block(tmp_path, TargetShape("small", 48, 32, VOCAB))


def test_layers_are_named_by_their_output() -> None:
    assert resolve_layer_ids([-1, 0], 36) == (0, 1)
    assert spread_layers(5, 36) == (2, 10, 18, 26, 34)


def test_a_block_drafter_that_names_no_target_layers_is_refused(tmp_path: Path) -> None:
    """They were guessed in silence, and another guess than the right one is accepted never."""
    narrow("z-lab/Qwen3-8B-DFlash-b16", tmp_path)
    edited(tmp_path, dflash_target_layer_ids=None)
    with pytest.raises(CheckpointError, match=r"says no target_layer_ids.*take them from where it was published"):
        read_block(tmp_path, SHAPE)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("z-lab/Qwen3-8B-DFlash-b16", "dflash"),
        ("JetSpec/jetspec-qwen3-8b", "jetspec"),
        ("deepseek-ai/dspark_qwen3_8b_block7", "dspark"),
    ],
)
def test_reading(name: str, family: str, tmp_path: Path) -> None:
    narrow(name, tmp_path)
    spec = read_block(tmp_path, SHAPE).spec
    assert family == ("dspark" if spec.shifted else "jetspec" if spec.causal else "dflash")


@pytest.mark.parametrize("kind", ["dflash", "jetspec"])
def test_what_is_written_is_read(kind: str, tmp_path: Path, make_target: Callable[..., Any]) -> None:
    model = make_target("qwen3")
    head = written_block(tmp_path, model, kind)
    read = read_block(tmp_path, TargetShape.of(TargetModel(model)))
    assert read.spec == head.spec
    torch.testing.assert_close(read.state_dict(), head.state_dict(), rtol=0, atol=0)
    drafter = load_any_drafter(str(tmp_path), TargetModel(model))
    assert isinstance(drafter, BlockDrafter) and drafter.aux_layers == (0, 1)


@pytest.mark.parametrize("same", [True, False])
def test_copies_of_the_targets_vocabulary_are_shared(
    same: bool, make_target: Callable[..., Any], tmp_path: Path
) -> None:
    narrow("deepseek-ai/dspark_qwen3_8b_block7", tmp_path)
    model = make_target("qwen3", vocab_size=VOCAB, num_hidden_layers=36)
    if same:
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        tensors["lm_head.weight"] = model.lm_head.weight.detach().clone()
        save_file(tensors, tmp_path / "model.safetensors")
    head = block_drafter(tmp_path, TargetModel(model)).head
    assert (head.embed_tokens is None, head.lm_head is None) == (same, same)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_differ(kind: str, make_target: Callable[..., Any]) -> None:
    """The kinds of the other tests are what they are called."""
    spec = random_head(TargetModel(make_target("qwen3")), kind).spec
    assert (spec.causal, spec.shifted, spec.successor is not None) == (
        kind == "jetspec",
        kind.startswith(("dspark", "deepspec")),
        kind.startswith("dspark"),
    )
    assert spec.num_drafts == (6 if spec.shifted else 5)
    assert spec.rows_for(2) == (3 if spec.causal else 6)
