"""Native MTP modules as models publish them: the places of their tensors and, one row per family, their conventions.

Module k reads a token and a state (`mtp_drafter.py` says which) and has its own K/V:

    x = proj [enorm(embed(token)); hnorm(state)]      y = block(x)      z = norm(y)      logits = head(z)

    form  modules                 state that module k reads                       drafts a round
    R     one, applied again      the target's; while drafting, its own carry     any number
    C     several, chained        the carry of module k - 1, one row earlier      one per module
    T     several                 the target's, k rows earlier                    one per module

The carry is z or y. A single module always has form R. Everything else is read from the tensors: whether a module has
its own head, norms and embedding.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpFamily:
    """The conventions of a family's modules, which no tensor states.

    form: form of several modules. normed_state: the target's state is read after its final norm. normed_carry: the
    carry is z. hidden_first: the projection reads the hidden half first. like: the target layer whose attention a
    module's block copies, if the target's config has no `mtp_layer_types`; tensors show whether its MLP has experts.
    """

    form: str = "C"
    normed_state: bool = True
    normed_carry: bool = True
    hidden_first: bool = False
    like: int = -1


DEEPSEEK = MtpFamily()
"""transformers 5.17 (`modeling_layers.MtpModel`) and SGLang: the state and the carry after their norms, embedding
first. The card of DeepSeek-V3 chains its modules."""

SPECULATORS = MtpFamily()
"""speculators 0.5 (`models/mtp`), for any target: MiMo's names at the top level, the embedding first, the carry after
`final_layernorm`."""

FAMILIES: dict[str, MtpFamily] = {
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "kimi_k25"), DEEPSEEK),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite"), DEEPSEEK),
    "hy_v3": DEEPSEEK,  # tensors like GLM's; its final norm is `final_layernorm`
    # transformers 5.24 runs it by `MtpModel`: the block slides like layer 1 (the last layer does not slide)
    "mellum": MtpFamily(like=1),
    "ernie4_5_moe": DEEPSEEK,  # no final norm, so the carry is y
    # vLLM's qwen3_next_mtp and qwen3_5_mtp: state and carry after their norms; the block has full attention
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), DEEPSEEK),
    # vLLM's exaone_moe_mtp: the block is built like layer 0, sliding and with RoPE
    **dict.fromkeys(("exaone4", "exaone4_5", "exaone_moe"), MtpFamily(like=0)),
    # XiaomiMiMo's modeling_mimo.py: cat([hidden, embedding])
    **dict.fromkeys(("mimo", "qwen2"), MtpFamily(hidden_first=True)),
    # stepfun's publication and vLLM's step3p5_mtp: state before the final norm, carry before the module's norm
    # (transformers 5.17 differs, and shares one head). The block slides like layer 1
    **dict.fromkeys(("step3p5", "step3p7"), MtpFamily(normed_state=False, normed_carry=False, like=1)),
    # SGLang's mimo_v2 MTP: every module reads the target's states; a sliding block with a dense MLP
    "mimo_v2_flash": MtpFamily(form="T", like=1),
}
"""Keys are the `model_type` of the text config or of the whole config."""

PLACES = (
    r"layers\.(?P<layer>\d+)\.(?:transformer(?:_block)?\.)?(?P<name>.+)",  # beyond the target's last layer
    r"mtp_layers\.(?P<module>\d+)\.(?P<name>.+)",
    r"mtp_block\.(?P<module>\d+)\.(?P<name>.+)",
    r"(?P<name>mtp_(?:emb_norm|hidden_norm|linear_proj))\.(?P<module>\d+)(?P<end>\..+)",
    r"mtp\.layers\.(?P<module>\d+)\.(?P<name>.+)",
    r"mtp\.(?P<name>(?:fc|pre_fc_norm_embedding|pre_fc_norm_hidden|norm)\..+)",  # of the one module
)
"""Places of a module's tensors, after any prefix. `module` is the module's number; `layer` continues the target's
numbering."""

PARTS = {
    "enorm": ("enorm", "token_layernorm", "pre_fc_norm_embedding", "mtp_emb_norm"),
    "hnorm": ("hnorm", "hidden_layernorm", "pre_fc_norm_hidden", "mtp_hidden_norm"),
    "proj": ("eh_proj", "input_proj", "fc", "mtp_linear_proj"),
    "norm": ("shared_head.norm", "final_layernorm", "norm"),
    "head": ("shared_head.head", "shared_head.output"),
    "embed": ("embed_tokens",),
}
"""Parts of a module by the names in checkpoints; all other tensors belong to its block."""

PART_OF = {name: part for part, names in PARTS.items() for name in names}
REQUIRED = ("enorm", "hnorm", "proj")


def module_tensors(names: Iterable[str], num_layers: int) -> list[dict[str, str]]:
    """File names of each module's tensors by place, such as "enorm.weight" or "block.mlp.up_proj.weight".

    num_layers: layers of the target; modules that are named like layers are counted after these.
    """
    modules: dict[int, dict[str, str]] = {}
    for key in names:
        for place in PLACES:
            found = re.fullmatch(rf"(?:.+\.)??{place}", key)
            if found is None or re.search("vis(?:ion|ual)|audio", key):
                continue
            groups = found.groupdict()
            number = int(groups["layer"]) - num_layers if groups.get("layer") else int(groups.get("module") or 0)
            if number >= 0 and (place is not PLACES[0] or ".mtp" not in f".{key}"):
                modules.setdefault(number, {})[_place(groups["name"] + (groups.get("end") or ""))] = key
                break
    return [modules[number] for number in sorted(modules) if _is_module(modules[number])]


def _is_module(names: Mapping[str, str]) -> bool:
    """Is it named as a module, or does it have a module's norms? Otherwise it is a layer of a longer model or of
    another tower."""
    norms = tuple(f"{part}." for part in REQUIRED)
    return any(place.startswith(norms) or ".mtp" in f".{key}" for place, key in names.items())


def _place(name: str) -> str:
    part, _, kind = name.rpartition(".")
    if part in PART_OF:
        return f"{PART_OF[part]}.{kind}"
    return f"block.{name.replace('pre_mlp_layernorm', 'post_attention_layernorm')}"  # MiMo-V2 has the former
