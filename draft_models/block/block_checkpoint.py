"""Block drafters on disk: reads and writes a folder in a published format as the spec and state dict of a `BlockHead`.

`drafter_formats.py` describes the formats. Invariant: config, tensors and target agree, or the head is refused.
"""

from pathlib import Path
from typing import Any

from specdec.draft_models.base import TargetInfo
from specdec.draft_models.block.block_head import KINDS, BlockHead, BlockSpec
from specdec.draft_models.checkpoints.checkpoint_files import fill_head, take_target_ids, write_folder
from specdec.draft_models.checkpoints.config_reader import HeadFiles, read_files, read_rope, read_windows
from specdec.draft_models.checkpoints.drafter_formats import (
    BLOCK_FORMATS,
    DFLASH_CONFIG,
    GEMMA4_BLOCK,
    HF_BLOCK,
    OUTPUT_IDS,
    SPECULATORS_BLOCK,
    published_names,
)
from specdec.errors import CheckpointError, UnsupportedModelError, about

ENTERED_IDS = "aux_hidden_state_layer_ids"


def read_block(folder: str | Path, target: TargetInfo) -> BlockHead:
    """Read a block drafter for `target`: a head with the weights of its checkpoint, on the CPU.

    Raises CheckpointError (files missing, tensors that disagree with the config or with the target) and
    UnsupportedModelError (a family, layer or flag that this runtime does not know or cannot honour).
    """
    with about(str(folder)):
        files = read_files(Path(folder), BLOCK_FORMATS)
        target_ids = take_target_ids(files.state, target)
        spec = _make_spec(files, target)
        head = fill_head(lambda: BlockHead(spec), files.state)
        head.target_ids = target_ids
        return head


def write_block(folder: str | Path, head: BlockHead, target: TargetInfo) -> None:
    """Write a head in DFlash's format, with JetSpec's `causal_head` and vLLM's `causal` if blocks are causal."""
    spec, state = head.spec, head.state_dict()
    special = (spec.is_gemma4, spec.shifted, spec.anchored, spec.skips_embed_norm, spec.successor)
    assert not any((*special, spec.owns_embed, spec.draft_vocab_size)), "a head that DFlash's format has no room for"
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **spec.stored_fields(),
        "num_target_layers": len(target.layout.layers),
        "attention_bias": bool(spec.biases),
        **spec.stored_windows(),
        "dtype": str(next(iter(state.values())).dtype).removeprefix("torch."),
        "block_size": spec.block_size,
        DFLASH_CONFIG: {
            "mask_token_id": spec.mask_token,
            "target_layer_ids": [entered - 1 for entered in spec.aux_layers],
            **({"causal_head": True, "causal": True} if spec.causal else {}),
        },
    }
    write_folder(folder, config, state)


def resolve_layer_ids(ids: list[Any] | None, target_layers: int, key: str) -> tuple[int, ...]:
    """Convert layer ids to boundaries (see `BlockSpec.aux_layers`). An id names a layer by its output, -1 the
    embeddings; ids under the key `ENTERED_IDS` are boundaries already.

    The last layer's output is refused: transformers norms it, other engines do not, and no published drafter states
    which form it was trained with.
    """
    if ids is None:
        raise CheckpointError(
            f"config.json has no {key}, the target layers whose states the drafter reads; every published "
            "block drafter has them, so take them from where it was published or trained"
        )
    first = -1 if key == OUTPUT_IDS else 0
    if not ids or any(type(i) is not int or not 0 <= i - first < target_layers for i in ids):
        raise UnsupportedModelError(
            f"{key}={ids}; expected layers {first} (the embeddings) to {target_layers - 1 + first} of the target's "
            f"{target_layers}"
        )
    return tuple(i - first for i in ids)


def _make_spec(files: HeadFiles, target: TargetInfo) -> BlockSpec:
    """Make the spec from config and tensors. Where two of config, tensors and target state a value, they must agree;
    shapes are checked later."""
    settings, state = files.settings, files.state
    if not files.num_layers:
        raise CheckpointError("there are no tensors layers.N.*")
    drafted = len(state["lm_head.weight"]) if "lm_head.weight" in state else None
    stated = {
        ("num_target_layers", f"target {target.name}"): len(target.layout.layers),
        ("hidden_size", f"target {target.name}"): target.hidden_size,
        ("draft_vocab_size", "the file, by its lm_head.weight,"): drafted or target.vocab_size,
    }
    files.require_same(stated, target)
    # speculators wrote all blocks like DFlash's before it had this key
    like_dspark = files.format is not SPECULATORS_BLOCK and "dspark" in published_names(files.config)
    shifted = settings.get("sample_from_anchor", like_dspark)
    causal = {key: settings[key] for key in ("causal_head", "causal", "is_causal") if key in settings}
    if len(set(causal.values())) > 1:
        raise CheckpointError(f"{causal} contradict each other about whether blocks are causal")
    rank = settings.get("markov_rank", 0)
    kind = settings.get("markov_head_type") if rank else None
    if rank and kind not in KINDS:
        raise UnsupportedModelError(f"markov_head_type={kind!r} with markov_rank={rank}; known are {', '.join(KINDS)}")
    mask, vocab = settings["mask_token_id"], settings.get("vocab_size", target.vocab_size)
    if mask >= target.vocab_size:
        raise CheckpointError(
            f"mask_token_id={mask}, but target {target.name} has {target.vocab_size} rows in its embedding table"
        )
    if vocab != target.vocab_size:
        raise CheckpointError(f"vocab_size={vocab}, target {target.name} has {target.vocab_size} tokens")
    if settings["block_size"] < 2 and not shifted:
        raise CheckpointError("block_size=1 drafts nothing; expected 2 or more")
    key = ENTERED_IDS if files.format is SPECULATORS_BLOCK else OUTPUT_IDS
    layers = {"causal": any(causal.values()), **_layers(files)}  # overrides the plain settings
    return BlockSpec(
        **files.fields(),
        **layers,
        vocab_size=target.vocab_size,
        aux_layers=resolve_layer_ids(settings.get(key), len(target.layout.layers), key),
        shifted=shifted,
        owns_embed="embed_tokens.weight" in state,
        draft_vocab_size=drafted,
        successor=kind,
        successor_rank=rank,
    )


def _layers(files: HeadFiles) -> dict[str, Any]:
    """Spec fields for the layers and for what a row sees."""
    if files.format is GEMMA4_BLOCK:
        return _gemma4_layers(files)
    settings, windows = files.settings, read_windows(files.format, files.settings, files.num_layers)
    rope = read_rope(settings, by_layer_type=files.format is SPECULATORS_BLOCK)
    layers: dict[str, Any] = {"windows": windows, "rope": rope}
    if files.format is HF_BLOCK:
        layers["skips_embed_norm"] = True
        if any(window is not None and window < settings["block_size"] for window in windows):
            raise UnsupportedModelError(
                f"sliding_window={settings['sliding_window']} with block_size={settings['block_size']}; specdec runs "
                "blocks whose rows all see each other, so windows of block_size - 1 or more"
            )
    if files.format is SPECULATORS_BLOCK and any(windows):
        layers |= {"anchored": True, "causal": not settings.get("sliding_window_non_causal", False)}
        if layers["causal"] and None in windows:
            raise UnsupportedModelError(
                f"layer_types={settings['layer_types']} without sliding_window_non_causal: rows of a block see "
                "earlier ones in sliding layers and all in full ones; specdec runs blocks that are alike in all layers"
            )
    return layers


def _gemma4_layers(files: HeadFiles) -> dict[str, Any]:
    """Spec fields for Gemma 4's layers. Head size and K/V heads come from the tensors: the config has two of each, in
    several places."""
    settings, state = files.settings, files.state
    settings.setdefault("hidden_activation", "gelu_pytorch_tanh")
    try:
        settings["head_dim"] = head_dim = len(state["layers.0.self_attn.q_norm.weight"])
        settings["num_key_value_heads"] = len(state["layers.0.self_attn.k_proj.weight"]) // head_dim
    except (KeyError, ZeroDivisionError) as error:
        raise CheckpointError("tensors layers.0.self_attn.q_norm.weight and k_proj.weight are missing") from error
    kinds = settings.get("layer_types", ["full_attention"] * files.num_layers)
    if any(kind != "full_attention" for kind in kinds):
        raise UnsupportedModelError(f"layer_types={kinds}; drafters of Gemma 4's layers attend fully in all of them")
    rope = settings.get("rope_parameters", {}).get("full_attention")
    if not isinstance(rope, dict) or rope.get("rope_type") not in ("default", "proportional"):
        raise UnsupportedModelError(
            f"rope_parameters.full_attention={rope}; expected an object of rope_type default or proportional"
        )
    return {
        "is_gemma4": True,
        "keys_are_values": "layers.0.self_attn.v_proj.weight" not in state,
        "rope": rope,
        "windows": (None,) * files.num_layers,
    }
