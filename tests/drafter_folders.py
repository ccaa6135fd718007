"""Writes drafters to folders in the published formats, narrow and with random weights, for tests that damage them."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specdec.draft_models.block.block_checkpoint import read_block
from specdec.draft_models.block.block_head import BlockHead, BlockSpec
from specdec.draft_models.checkpoints.drafter_formats import AUX_IDS, LAYER_KEYS
from specdec.draft_models.eagle3.checkpoint import read_head, write_head
from specdec.draft_models.eagle3.head import Eagle3Head, Eagle3Spec

TARGET: Any = SimpleNamespace(name="target", layout=SimpleNamespace(layers=range(8)), hidden_size=16, vocab_size=60)
SPEC = Eagle3Spec(
    hidden_size=16,
    target_hidden_size=16,
    vocab_size=60,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    aux_layers=(2, 4, 5),
    draft_vocab_size=20,
)
IDS = torch.arange(0, 60, 3)
"""Target token of each draft token of SPEC."""
VOCAB = 7
"""Tokens of the targets of block drafters: few enough to be guessed now and then."""

# published block drafters: layers of the target, and the config without the sizes that `narrow` sets

QWEN3 = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_scaling": None, "hidden_act": "silu"}
OLD = {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "attention_dropout": 0.0, "bos_token_id": 151643}
ZLAB = {"architectures": ["DFlashDraftModel"], "dtype": "bfloat16", "tie_word_embeddings": True, **QWEN3, **OLD}
DEEPSPEC = {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "use_cache": True, "block_size": 7, **QWEN3}
SUCCESSOR = {"markov_rank": 4, "markov_head_type": "vanilla"}
CONFIDENT = {**SUCCESSOR, "enable_confidence_head": True, "confidence_head_with_markov": True}
WINDOWS = {
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
    "max_window_layers": 5,
}
GEMMA4 = {  # what the config of Gemma4DSparkModel has of the target's, and its own
    "architectures": ["Gemma4DSparkModel"],
    "num_anchors": 512,
    "block_size": 7,
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


def dflash(ids: list[int], layers: int, block_size: int, nested: Mapping[str, Any] = {}, **more: Any) -> dict[str, Any]:
    config = {"target_layer_ids": ids, "mask_token_id": VOCAB - 1, **nested}
    return {**ZLAB, "dflash_config": config, "num_hidden_layers": layers, "block_size": block_size, **more}


def dspark(ids: list[int], layers: int = 5, base: Mapping[str, Any] = DEEPSPEC, **more: Any) -> dict[str, Any]:
    return {**base, "target_layer_ids": ids, "mask_token_id": VOCAB - 1, "num_hidden_layers": layers, **more}


def speculators(kind: str, entered: list[int], layers: int, block_size: int, **more: Any) -> dict[str, Any]:
    """Return a flat config: `narrow` moves the keys of layers to their place."""
    top = {"architectures": [f"{kind}DraftModel"], "speculators_version": "0.9.0"}
    top |= {"speculators_model_type": kind.lower(), "speculators_config": {"algorithm": kind.lower()}}
    top |= {"aux_hidden_state_layer_ids": entered, "mask_token_id": VOCAB - 1, "tie_word_embeddings": False}
    return {**top, **QWEN3, "block_size": block_size, "num_hidden_layers": layers, "attention_bias": False, **more}


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "use_sliding_window": True}
FROM_ANCHOR = {"sample_from_anchor": True, "draft_vocab_size": 4}
BOTH_WAYS = {"sliding_window_non_causal": True, "sample_from_anchor": False}
MUSE_GLIMMER = {  # saved by transformers
    "architectures": ["MuseGlimmerAssistantModel"],
    "model_type": "muse_glimmer_assistant",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 200000,
    "block_size": 6,
    "mask_token_id": VOCAB - 1,
    "num_hidden_layers": 2,
    "target_layer_ids": [0, 5, 10],
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 5,
}
DRAFTED = torch.tensor([0, 2, 3, 6])
"""Target token of each draft token of heads with a draft vocabulary."""
IDS_OF_36, IDS_OF_48 = [1, 9, 17, 25, 33], [5, 17, 29, 41, 46]
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "z-lab/Qwen3-8B-DFlash-b16": (36, dflash(IDS_OF_36, 5, 16)),
    "z-lab/gpt-oss-20b-DFlash": (24, dflash([1, 6, 11, 16, 21], 8, 8)),
    "DFlash, sliding": (32, dflash([1, 8, 15, 22, 29], 5, 16, **WINDOWS)),
    "JetSpec/jetspec-qwen3-8b": (36, dflash(IDS_OF_36, 5, 16, {"causal_head": True})),
    "deepseek-ai/dflash_qwen3_8b_block7": (36, dspark(IDS_OF_36, markov_rank=0, enable_confidence_head=False)),
    "deepseek-ai/dspark_qwen3_8b_block7": (36, dspark(IDS_OF_36, **CONFIDENT)),
    "deepseek-ai/dspark_qwen3_14b_block7": (40, dspark([1, 10, 19, 28, 37], **CONFIDENT)),
    "DSpark, gated": (12, dspark([-1, 3, 10], 2, markov_rank=4, markov_head_type="gated")),
    "DSpark, rnn": (12, dspark([1, 3, 10], 2, markov_rank=4, markov_head_type="rnn")),
    "deepseek-ai/dflash_gemma4_12b_block7": (48, dspark(IDS_OF_48, base=GEMMA4, markov_rank=0)),
    "deepseek-ai/dspark_gemma4_12b_block7": (48, dspark(IDS_OF_48, base=GEMMA4, **CONFIDENT)),
    "meta-models/Muse-Glimmer-30B-assistant": (12, MUSE_GLIMMER),
    "speculators, dflash": (12, speculators("DFlash", [2, 6, 9], 2, 8, draft_vocab_size=4)),
    "speculators, dflash, sliding": (12, speculators("DFlash", [0, 6, 11], 2, 8, **SLIDING)),
    "speculators, dspark": (12, speculators("DSpark", [2, 6, 9], 2, 6, **CONFIDENT, **FROM_ANCHOR)),
    "speculators, dspark, sliding": (12, speculators("DSpark", [2, 6], 2, 6, **CONFIDENT, **SLIDING, **BOTH_WAYS)),
}


def narrow(name: str, folder: Path, seed: int = 0) -> int:
    """Write a published config at reduced width, with random weights. Returns the number of layers of its target."""
    layers, config = PUBLISHED[name]
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "vocab_size": VOCAB, "num_target_layers": layers, "max_position_embeddings": 4096}
    full = {"layer_types": ["full_attention"] * config["num_hidden_layers"], "sliding_window": None}
    config = full | config | sizes
    given, rank = config.get("dflash_config", config), config.get("markov_rank", 0)
    entered = config.get("aux_hidden_state_layer_ids") or [i + 1 for i in given["target_layer_ids"]]
    drafted = config.get("draft_vocab_size")
    owns = config["architectures"][0] in ("Qwen3DSparkModel", "Gemma4DSparkModel")
    gemma4: dict[str, Any] = {}
    if config["model_type"] == "gemma4_text":  # a global head is twice as wide, and its keys are values
        gemma4 = {"is_gemma4": True, "keys_are_values": True, "hidden_act": "gelu_pytorch_tanh"}
        gemma4 |= {"num_kv_heads": 1, "head_dim": 16, "rope": config["rope_parameters"]["full_attention"]}
    spec = BlockSpec(
        **{key.field: sizes[at] for at, key in LAYER_KEYS.items() if key.field and at in sizes} | gemma4,
        vocab_size=VOCAB,
        aux_layers=tuple(entered),
        block_size=config["block_size"],
        mask_token=VOCAB - 1,
        windows=(None,) * config["num_hidden_layers"],
        owns_embed=owns,
        draft_vocab_size=drafted or (VOCAB if owns else None),
        successor=config["markov_head_type"] if rank else None,
        successor_rank=rank,
    )
    torch.manual_seed(seed)
    state = BlockHead(spec).state_dict()
    for tensor in state.values():
        tensor.normal_(std=0.4) if tensor.dim() > 1 else tensor.add_(0.1 * torch.randn_like(tensor))
    if config.get("enable_confidence_head"):
        state |= {"confidence_head.proj.weight": torch.ones(1, 36), "confidence_head.proj.bias": torch.ones(1)}
    if drafted:
        state |= {"d2t": DRAFTED - torch.arange(4), "t2d": torch.isin(torch.arange(VOCAB), DRAFTED)}
    if "speculators_model_type" in config:
        moved = [key for key in (*LAYER_KEYS, "attention_bias") if key in config and key != "model_type"]
        layer = {key: config.pop(key) for key in moved} | {"model_type": "qwen3"}
        config |= {"transformer_layer_config": layer, "draft_vocab_size": drafted or VOCAB}
        config["model_type"] = "speculator_model"
        config.pop("num_target_layers")
    if config["model_type"] == "muse_glimmer_assistant":
        for key in ("vocab_size", "num_target_layers"):
            config.pop(key)
        names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
        state = {names.get(key, key): tensor for key, tensor in state.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, folder / "model.safetensors")
    return layers


def fresh(spec: Eagle3Spec = SPEC) -> Eagle3Head:
    torch.manual_seed(0)
    head = Eagle3Head(spec)
    head.target_ids = IDS if spec.draft_vocab_size == len(IDS) else None
    return head


def write_drafter(kind: str, folder: Path) -> Path:
    """Write a whole drafter: "SpecForge" and "speculators" for TARGET, or a name in PUBLISHED."""
    if kind in PUBLISHED:
        narrow(kind, folder)
        return folder
    write_head(folder, fresh(), TARGET)
    if kind == "speculators":
        layer = json.loads((folder / "config.json").read_text())
        for name in ("eagle_config", "architectures", "torch_dtype"):
            layer.pop(name)
        top = {"speculators_model_type": "eagle3", "draft_vocab_size": 20, "norm_before_residual": False}
        top["model_type"] = "speculator_model"
        config = top | {AUX_IDS: [2, 4, 5], "transformer_layer_config": layer}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_drafter(kind: str, folder: Path) -> Any:
    """Read a drafter's spec."""
    if kind not in PUBLISHED:
        return read_head(folder, TARGET).spec
    return read_block(folder, published_target(kind)).spec


def published_target(kind: str) -> Any:
    layout = SimpleNamespace(layers=range(PUBLISHED[kind][0]))
    return SimpleNamespace(name="target", layout=layout, hidden_size=32, vocab_size=VOCAB)


def change_drafter(folder: Path, changes: Mapping[str, Any]) -> Path:
    """Change tensors, by their names in the file, and keys of config.json, by dotted paths; None removes one."""
    config, file = json.loads((folder / "config.json").read_text("utf-8")), folder / "model.safetensors"
    tensors = {
        key: value
        for key, value in changes.items()
        if isinstance(value, torch.Tensor) or key.endswith(".weight") or key in ("d2t", "t2d")
    }
    for path, value in changes.items():
        if path not in tensors:
            place, _, key = path.rpartition(".")
            part = config.setdefault(place, {}) if place else config
            part.pop(key, None)
            part |= {} if value is None else {key: value}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    if tensors:
        state = load_file(file) | tensors
        save_file({key: tensor.contiguous() for key, tensor in state.items() if tensor is not None}, file)
    return folder
