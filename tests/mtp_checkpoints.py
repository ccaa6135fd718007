"""Tiny checkpoints with MTP modules under their published names, and a dense reference of the modules.

transformers makes and saves a model of one layer, whose layer is a module's block; the reference runs that model.
"""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.func import functional_call
from transformers import DeepseekV3Config

import tiny_families
from tiny_families import FULL, LINEAR, SLIDING

BASE = {**tiny_families.BASE, "vocab_size": 6}
SLIDES = {"sliding_window": 5, "num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL]}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
EXAONE_MOE = {**SLIDES, **EXPERTS, "num_experts": 4, "mlp_layer_types": ["dense", "sparse", "sparse"]}
GLM = {**EXPERTS, "num_hidden_layers": 2, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1}
TOKEN, STATE, PROJ, NORM, HEAD, EMBED, BLOCK = "enorm", "hnorm", "proj", "norm", "head", "embed", "block"


class Shape(NamedTuple):
    """A target and its modules.

    name: beginning of its classes in transformers.   single: fields of the one-layer model for a module's block.
    names: (part, module k, layers n of the target) -> name of the part.   copies: modules repeat the target's head and
    embedding.   tower: fields of a vision tower.   saved_as: a part of names by `save_pretrained`, and its published
    form.   block_names: the same for tensors of a block.
    """

    name: str
    fields: dict[str, Any]
    single: dict[str, Any]
    names: Callable[[str, int, int], str]
    form: str = "R"
    count: int = 1
    normed_state: bool = True
    normed_carry: bool = True
    hidden_first: bool = False
    parts: tuple[str, ...] = (NORM,)
    model_type: str | None = None
    copies: bool = False
    tower: dict[str, Any] | None = None
    saved_as: tuple[str, str] = ("", "")
    block_names: tuple[tuple[str, str], ...] = ()


def deepseek(part: str, k: int, n: int) -> str:
    own = {PROJ: "eh_proj", NORM: "shared_head.norm", HEAD: "shared_head.head", EMBED: "embed_tokens", BLOCK: ""}
    return f"model.layers.{n + k}.{own.get(part, part)}"


def kimi(part: str, k: int, n: int) -> str:
    return f"language_model.{deepseek(part, k, n)}"


def step(part: str, k: int, n: int) -> str:
    own = {PROJ: "eh_proj", NORM: "transformer.shared_head.norm", HEAD: "transformer.shared_head.output"}
    return f"model.layers.{n + k}.{'transformer.' if part == BLOCK else own.get(part, part)}"


def qwen(part: str, k: int, n: int) -> str:
    own = {TOKEN: "pre_fc_norm_embedding", STATE: "pre_fc_norm_hidden", PROJ: "fc", NORM: "norm"}
    return f"mtp.layers.{k}." if part == BLOCK else f"mtp.{own[part]}"


def mimo(part: str, k: int, n: int) -> str:
    own = {TOKEN: "token_layernorm", STATE: "hidden_layernorm", PROJ: "input_proj", NORM: "final_layernorm", BLOCK: ""}
    return f"model.mtp_layers.{k}.{own[part]}"


def mimo_v2(part: str, k: int, n: int) -> str:
    own = {PROJ: "eh_proj", NORM: "final_layernorm", BLOCK: ""}
    return f"model.mtp.layers.{k}.{own.get(part, part)}"


def ernie(part: str, k: int, n: int) -> str:
    own = {TOKEN: "mtp_emb_norm", STATE: "mtp_hidden_norm", PROJ: "mtp_linear_proj"}
    return f"model.mtp_block.{k}." if part == BLOCK else f"model.{own[part]}.{k}"


def hy(part: str, k: int, n: int) -> str:
    return f"model.layers.{n + k}.final_layernorm" if part == NORM else deepseek(part, k, n)


ONE = {"num_hidden_layers": 1}
ONE_SLIDING = {**ONE, "layer_types": [SLIDING]}
ERNIE = {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "num_hidden_layers": 2, "moe_layer_start_index": 1}
SPARSE = {"mlp_layer_types": ["sparse"]}
HY = {**EXPERTS, "num_experts": 4, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
MELLUM = {**SLIDES, **EXPERTS, "num_experts": 4, "layer_types": [FULL, SLIDING, SLIDING]}
MELLUM["mlp_layer_types"] = ["sparse"] * 3
DEEPSEEK = {**GLM, **tiny_families.LATENT, "topk_group": 1}
BEYOND = {**ONE, "first_k_dense_replace": 0}
RECURRENT = {**tiny_families.RECURRENT, "num_hidden_layers": 3, "layer_types": [LINEAR, LINEAR, FULL]}
NEXT = {**RECURRENT, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
ONE_FULL = {**ONE, "layer_types": [FULL]}
DENSE_FIRST = {**SLIDES, "layer_types": [FULL, SLIDING, FULL], "mlp_layer_types": ["dense", "sparse", "sparse"]}
MIMO_V2 = {**DENSE_FIRST, **EXPERTS, "n_routed_experts": 4, "head_dim": 12, "v_head_dim": 8, "num_key_value_heads": 1}
STEP = {**DENSE_FIRST, **EXPERTS, "n_routed_experts": 4, "share_expert_dim": 24, "num_sliding_attention_heads": 6}
STEP |= {"swiglu_limits": [0, 0.5, 0.5], "swiglu_limits_shared": [0, 0.5, 0.5]}
STEP |= {"num_nextn_predict_layers": 3, "mtp_layer_types": [SLIDING] * 3, "mtp_mlp_layer_types": ["dense"] * 3}
STEP["rope_parameters"] = {
    FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
SLIDING_DENSE = {**ONE_SLIDING, "mlp_layer_types": ["dense"]}
STEP_BLOCK = {**SLIDING_DENSE, "swiglu_limits": None, "swiglu_limits_shared": None}
TINY = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "patch_size": 4}
SHAPES: dict[str, Shape] = {
    "exaone4": Shape("Exaone4", SLIDES, ONE_SLIDING, qwen),
    "exaone_moe": Shape("ExaoneMoe", EXAONE_MOE, {**ONE_SLIDING, "mlp_layer_types": ["dense"]}, qwen),
    "glm4_moe": Shape("Glm4Moe", GLM, BEYOND, deepseek, parts=(NORM, HEAD, EMBED)),
    "glm4_moe-shared": Shape("Glm4Moe", GLM, BEYOND, deepseek),
    "glm4_moe-copied": Shape("Glm4Moe", GLM, BEYOND, deepseek, parts=(NORM, HEAD, EMBED), copies=True),
    "glm4_moe-3": Shape("Glm4Moe", GLM, BEYOND, deepseek, "C", 3),
    "deepseek_v3": Shape("DeepseekV3", DEEPSEEK, BEYOND, deepseek),
    "kimi_k25": Shape(
        *("Kimi_K25", DEEPSEEK, BEYOND, kimi),
        tower={**TINY, "intermediate_size": 16},
        saved_as=("language_model.model.blocks.", "language_model.model.layers."),
    ),
    "step3p7": Shape(
        "Step3p7", STEP, STEP_BLOCK, step, "C", 3, False, False, parts=(NORM, HEAD), tower={**TINY, "image_size": 8}
    ),
    "mimo_v2_flash": Shape(
        *("MiMoV2Flash", MIMO_V2, SLIDING_DENSE, mimo_v2, "T", 3),
        block_names=(("post_attention_layernorm.weight", "pre_mlp_layernorm.weight"),),
    ),
    "mimo": Shape("Qwen2", {"num_hidden_layers": 2}, ONE, mimo, hidden_first=True, model_type="mimo"),
    "qwen3-tuned": Shape("Qwen3", {"num_hidden_layers": 2}, ONE, mimo),  # a finetuned module, in a folder of its own
    "ernie": Shape("Ernie4_5_Moe", ERNIE, {**ONE, "moe_layer_start_index": 0}, ernie, parts=()),
    "hy_v3": Shape("HYV3", HY, {**ONE, **SPARSE}, hy),
    "mellum": Shape("Mellum", MELLUM, {**ONE_SLIDING, **SPARSE}, qwen),
    "qwen3_5": Shape("Qwen3_5", RECURRENT, ONE_FULL, qwen),
    "qwen3_5_moe": Shape("Qwen3_5Moe", NEXT, ONE_FULL, qwen),
    "qwen3_next": Shape("Qwen3Next", NEXT, ONE_FULL, qwen),
    # the forms of Step and MiMo-V2 around other blocks: what says so lies next to the modules
    "step-form": Shape(
        "Exaone4", SLIDES, ONE_SLIDING, step, "C", 3, normed_state=False, normed_carry=False, parts=(NORM, HEAD)
    ),
    "mimo_v2-form": Shape("Exaone4", SLIDES, ONE_SLIDING, mimo_v2, "T", 3),
}


class Published(NamedTuple):
    """A written checkpoint, and its modules for the reference: tensors by part, and a text model of one layer."""

    folder: Path
    shape: Shape
    model: Any
    modules: list[tuple[dict[str, torch.Tensor], Any]]

    def loaded(self) -> Any:
        return type(self.model).from_pretrained(self.folder, attn_implementation="eager").eval()


def planted(model: Any, seed: int) -> Any:
    """Set random weights, such that states before and after a norm differ."""
    torch.manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.3)
        else:
            nn.init.uniform_(weight, 0.5, 2.0) if "norm" in name else nn.init.normal_(weight, std=0.1)
            if name.endswith("A_log"):
                nn.init.uniform_(weight, -5.0, -2.0)
    return model.eval()


def _config_class(name: str) -> Any:
    """Return the config class of the text model."""
    return getattr(transformers, f"{name}{'Text' if name.startswith('Qwen3_5') else ''}Config")


def publish(name: str, folder: Path, seed: int = 0, **fields: Any) -> Published:
    shape = SHAPES[name]

    def build(seed: int, **more: Any) -> Any:
        text = copy.deepcopy({**BASE, **shape.fields, **fields, **more})  # configs write into what they are given
        kind, made = "ForCausalLM", _config_class(shape.name)
        if shape.tower is None:
            made = made(**text)
        else:  # its text model is of a type of its own, or DeepSeek's
            kind, own = "ForConditionalGeneration", getattr(transformers, f"{shape.name}TextConfig", DeepseekV3Config)
            made = made(text_config=own(**text), vision_config=shape.tower, tie_word_embeddings=False)
        made._attn_implementation = "eager"
        return planted(getattr(transformers, shape.name + kind)(made), seed)

    model = build(seed)
    if shape.model_type:
        model.config.model_type = shape.model_type
    model.save_pretrained(folder)
    tensors = {key.replace(*shape.saved_as): t for key, t in load_file(folder / "model.safetensors").items()}
    width = BASE["hidden_size"]
    num_layers, modules = len(model.get_decoder().layers), []
    for k in range(shape.count):
        single = build(seed + 100 + k, **shape.single)
        single.save_pretrained(folder / "block")
        block = load_file(folder / "block" / "model.safetensors")
        parts = {part: torch.rand(width) * 1.5 + 0.5 for part in (TOKEN, STATE, *({NORM} & {*shape.parts}))}
        parts[PROJ] = torch.randn(width, 2 * width) * 0.2
        if HEAD in shape.parts:
            parts[HEAD] = torch.randn(BASE["vocab_size"], width) * 0.5
        if EMBED in shape.parts:
            parts[EMBED] = torch.randn(BASE["vocab_size"], width)
        if shape.copies:
            parts[HEAD], parts[EMBED] = model.lm_head.weight.data.clone(), model.model.embed_tokens.weight.data.clone()
        tensors |= {f"{shape.names(part, k, num_layers)}.weight": tensor for part, tensor in parts.items()}
        inside, prefix = "model.layers.0.", shape.names(BLOCK, k, num_layers)
        saved = {key.replace(*shape.saved_as).partition(inside)[2]: t for key, t in block.items()}
        tensors |= {prefix + dict(shape.block_names).get(key, key): t for key, t in saved.items() if key}
        single.get_decoder().norm = nn.Identity()
        modules.append((parts, single.get_decoder()))
    if name.endswith("-form"):
        like = {"form": shape.form, "normed_state": shape.normed_state, "normed_carry": shape.normed_carry, "like": 0}
        (folder / "mtp_conventions.json").write_text(json.dumps(like))
    for path in (folder / "block").iterdir():
        path.unlink()
    (folder / "block").rmdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Published(folder, shape, model, modules)


class Reference:
    """The published forward of modules. A text t_0 .. t_S is committed except for its last token; drafts follow."""

    def __init__(self, published: Published) -> None:
        self.shape, self.model, self.modules = published.shape, published.model, published.modules
        self.known: dict[tuple[int, ...], torch.Tensor] = {}  # states by tokens

    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """States h_p [1, T, H] of these tokens."""
        if (text := tuple(tokens)) not in self.known:
            self.known[text] = self._states(text)
        return self.known[text]

    @torch.no_grad()
    def _states(self, tokens: Sequence[int]) -> torch.Tensor:
        decoder = self.model.get_decoder()
        seen: list[torch.Tensor] = []
        hook = decoder.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        out: torch.Tensor = decoder(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state
        hook.remove()
        return out if self.shape.normed_state else seen[0]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = functional_call(self.model.get_decoder().norm, {"weight": weight}, x)
        return out

    def module(self, k: int, tokens: Sequence[int], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs y (before the norm) and z (after it) of the rows at positions 0, 1, ..."""
        parts, block = self.modules[k]
        table = parts.get(EMBED, self.model.get_input_embeddings().weight)
        halves = [self._norm(table[torch.tensor([tokens])], parts[TOKEN]), self._norm(state, parts[STATE])]
        x = torch.cat(halves[::-1] if self.shape.hidden_first else halves, -1) @ parts[PROJ].t()
        y = block(inputs_embeds=x, use_cache=False).last_hidden_state
        return y, self._norm(y, parts[NORM]) if NORM in parts else y

    @torch.no_grad()
    def logits(self, text: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        """Logits [V] of the draft after `drafts`."""
        h, tokens, shape = self.states(text[:-1]), [*text, *drafts], self.shape
        if shape.form == "R":
            for _ in range(len(drafts) + 1):
                y, z = self.module(0, tokens[1 : 1 + h.shape[1]], h)
                h = torch.cat([h, (z if shape.normed_carry else y)[:, -1:]], 1)
            return self._head(0, z)
        state = h
        for k in range(len(drafts) + 1):
            y, z = self.module(k, tokens[1 + k : 1 + k + h.shape[1]], state)
            state = h if shape.form == "T" else z if shape.normed_carry else y
        return self._head(len(drafts), z)

    def _head(self, k: int, z: torch.Tensor) -> torch.Tensor:
        return (z[0, -1] @ self.modules[k][0].get(HEAD, self.model.lm_head.weight).t()).float()
