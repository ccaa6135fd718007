"""Trains frozen-KV drafters for any target: a Gemma 4 assistant's layers on the target's K/V, all positions at once.

Position S is one drafting round: token x_S has no K/V yet, every step has RoPE position S and reads the committed keys
[0, S) (the newest window + 1 of them in a sliding layer), and only the recurrent state h changes:

    h_0 = target hidden of S - 1;   step t: (embed(x_{S+t}), h_t) -> distribution of x_{S+t+1}, h_{t+1}

Invariant: the parallel forward equals the drafter's own step on K/V cut to [0, S) (tests/test_parallel_drafts.py).
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig, GenerationConfig

from specdec.attention.dense import bias_of
from specdec.attention.draft_attention import same_document
from specdec.draft_models.gemma4_mtp import constructible_assistants, parallel_states
from specdec.errors import UnsupportedModelError
from specdec.kvcache.layout import FULL_ATTENTION as FULL
from specdec.kvcache.layout import SLIDING_ATTENTION as SLIDING
from specdec.models.target import TargetModel
from specdec.training.draft_loss import TargetStates, TrainableDrafter, run_target
from specdec.training.head_training import query_heads, require_groups
from specdec.training.packed_rows import PackedRows
from specdec.training.train_settings import TrainSettings


def new_assistant(
    target: TargetModel, *, hidden: int, intermediate: int, layers: int, heads: int
) -> Gemma4AssistantForCausalLM:
    """Sliding layers if the target has some, and a full layer last, like the published assistants."""
    owners = {kind: owner for kind in (FULL, SLIDING) if (owner := target.layout.last_owner(kind)) is not None}
    if FULL not in owners:
        raise UnsupportedModelError(
            f"{target.name} has only {sorted(owners)} layers; an assistant ends in a full_attention layer"
        )
    full, other = owners[FULL], owners.get(SLIDING, owners[FULL])
    kinds = [SLIDING if SLIDING in owners else FULL] * (layers - 1) + [FULL]
    rope = dict(target.config.rope_parameters)
    if rope.get("truncate") is False:  # transformers reads it only from flat RoPE parameters, but these are nested
        raise UnsupportedModelError(
            f"{target.name}: its RoPE (truncate=False) cannot be written into an assistant; train an EAGLE-3 head"
        )
    by_kind = rope if any(isinstance(value, dict) for value in rope.values()) else dict.fromkeys((FULL, SLIDING), rope)
    make_text: Any = Gemma4TextConfig  # its type hints lack some fields
    text = make_text(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        layer_types=kinds,
        num_attention_heads=heads,
        num_key_value_heads=other.k.heads,
        num_global_key_value_heads=full.k.heads,
        head_dim=other.k.dim,
        global_head_dim=full.k.dim,
        sliding_window=other.window or 512,
        num_kv_shared_layers=layers,
        attention_k_eq_v=full.k.heads != other.k.heads,  # only then are global heads a separate field
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        rope_parameters={kind: dict(by_kind[kind]) for kind in {*kinds}},
        max_position_embeddings=target.max_position_embeddings or 4096,
        tie_word_embeddings=True,
        **{name: getattr(target.config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    )
    with constructible_assistants():
        model: Any = Gemma4AssistantForCausalLM(
            Gemma4AssistantConfig(text_config=text, backbone_hidden_size=target.hidden_size)
        )
    model.generation_config = GenerationConfig.from_model_config(text)
    _initialise(model, target)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if "inv_freq" not in name:  # RoPE frequencies stay float32; `.to(bfloat16)` would round them
            tensor.data = tensor.data.bfloat16()
    placed: Gemma4AssistantForCausalLM = model.to(target.device)
    return placed


@torch.no_grad()
def _initialise(model: Any, target: TargetModel) -> None:
    """q_norm includes the attention scale, which is 1 here; the head starts as the target's main directions."""
    for name, weight in model.named_parameters():
        if name.endswith("q_norm.weight"):
            weight.fill_(weight.numel() ** -0.5)
        elif "post_" in name and name.endswith("norm.weight"):
            weight.fill_(0.2)
    head: Any = target.head
    table = head.weight.float().cpu()
    hidden = model.config.get_text_config().hidden_size
    if hidden <= table.shape[1]:
        _, directions = torch.linalg.eigh(table.T @ table)  # [H target, H target], the strongest last
        model.lm_head.weight.copy_(table @ directions[:, -hidden:])


def drafter_masks(pos: torch.Tensor, window: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Row S sees keys [0, S), in a sliding layer the newest window + 1; S = 0 sees itself to stay finite, unused."""
    same, distance = same_document(pos)
    lone, earlier = (pos == 0)[:, :, None] & (distance == 0), same & (distance >= 1)
    near = earlier & (distance <= window + 1)
    return {kind: bias_of(seen | lone).to(dtype) for kind, seen in ((FULL, earlier), (SLIDING, near))}


class TrainableAssistant(TrainableDrafter):
    """An assistant and its target. Row S predicts the token after its own, so `ahead` is 1."""

    module: Gemma4AssistantForCausalLM
    ahead = 1

    def target_states(self, batch: PackedRows) -> TargetStates:
        kinds = sorted(set(self.module.config.get_text_config().layer_types))
        found = [self.target.layout.last_owner(kind) for kind in kinds]
        owners = tuple(owner.layer for owner in found if owner is not None)
        hidden, _, kv = run_target(self.target, batch, owners=owners)
        known: TargetStates = {"hidden": hidden}
        for kind, (k, v) in zip(kinds, kv, strict=True):
            known |= {f"k {kind}": k, f"v {kind}": v}
        return known

    def drafts(self, batch: PackedRows, known: TargetStates, steps: int) -> Iterator[torch.Tensor]:
        config = self.module.config.get_text_config()
        masks = drafter_masks(batch.pos, config.sliding_window, known["hidden"].dtype)
        kv = {kind: (known[f"k {kind}"], known[f"v {kind}"]) for kind in set(config.layer_types)}
        embedded = (self.target.embed(batch.ids.roll(-step, 1)) for step in range(steps))
        return parallel_states(self.module, embedded, known["hidden"].roll(1, 1), batch.pos, masks, kv)

    def score(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module.lm_head(states)
        return logits

    def save(self, folder: Path) -> None:
        self.module.save_pretrained(folder)


def trainable_assistant(target: TargetModel, settings: TrainSettings) -> TrainableAssistant:
    """A new assistant. Raises ConfigError if its heads do not group over the target's K/V heads."""
    heads = query_heads(target, settings)
    for layer in target.layout.layers:
        require_groups(heads, layer.k.heads, f"the target's {layer.layer_type}")
    hidden = settings.hidden or max(64, target.hidden_size // 2)
    assistant = new_assistant(
        target,
        hidden=hidden,
        intermediate=settings.intermediate or 4 * hidden,
        layers=settings.layers or 2,
        heads=heads,
    )
    return TrainableAssistant(assistant, target)
