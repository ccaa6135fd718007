"""Quantised checkpoints that do not do what their config says are refused, by tensor: formats x defects.

A defect changes the tensors or the config of a tiny valid checkpoint. Other changes affect no value: with them the
checkpoint loads, and every weight has the same values.
"""

import copy
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_checkpoints import FORMS, Form, Tensors, compressed, compressed_int4, gptq, mxfp4, quantise, set_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specdec import SamplingParams
from specdec.errors import CheckpointError, SpecDecError, UnsupportedModelError
from specdec.layers.packed.packed_modules import PackedLinear
from specdec.layers.packed.packed_weight import dequantised
from specdec.loading.model_loading import Checkpoint as Loaded

from engine_internals import packed_values
from marks import deep, each_value
from tiny_families import build_target, spread

CPU = torch.device("cpu")
LAYER = "model.layers.0"
Config = dict[str, Any]


@dataclass(frozen=True)
class Names:
    """Names of a form's tensors. weight: what precedes them, of a weight that the defects change."""

    words: str
    scales: str
    zeros: str = ""
    weight: str = f"{LAYER}.mlp.up_proj."


def compressed_mxfp4() -> Form:
    def write(weight):
        tensors, meant = mxfp4().write(weight)
        return {"weight_packed": tensors["blocks"].flatten(1), "weight_scale": tensors["scales"]}, meant

    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    return Form(compressed(weights, "mxfp4-pack-quantized"), write)


def compressed_block() -> Form:
    def write(weight):
        tensors, meant = FORMS["fp8-block"].write(weight)
        return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, meant

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [16, 16]}
    return Form(compressed(weights, "float-quantized"), write)


ALL = {**FORMS, "gptq-v2-plain": gptq(2), "ct-mxfp4": compressed_mxfp4(), "ct-fp8-block": compressed_block()}
COMPRESSED = Names("weight_packed", "weight_scale", "weight_zero_point")
IN_COLUMNS = Names("qweight", "scales", "qzeros")
FP8 = Names("weight", "weight_scale")
NAMES = {
    **dict.fromkeys(("int4-g32", "int4-zeros", "int4-channel"), COMPRESSED),
    **dict.fromkeys(("gptq", "gptq-zeros", "gptq-v2", "gptq-v2-plain", "awq"), IN_COLUMNS),
    **dict.fromkeys(("fp8-channel", "fp8-tensor", "ct-fp8-block"), FP8),
    "fp8-block": Names("weight", "weight_scale_inv"),
    "mxfp4": Names("blocks", "scales", weight=f"{LAYER}.mlp.experts.down_proj_"),
    "ct-mxfp4": Names("weight_packed", "weight_scale"),
}
assert set(NAMES) == set(ALL)
INT4 = [form for form, names in NAMES.items() if names in (COMPRESSED, IN_COLUMNS)]
CT_INT4 = [form for form in INT4 if NAMES[form] is COMPRESSED]
GPTQ = [form for form in INT4 if form.startswith("gptq")]
FP8S = [form for form in NAMES if "fp8" in form]
LLAMA = [form for form in NAMES if form != "mxfp4"]


@dataclass
class Checkpoint:
    """config: its quantization_config. others: entries of its config.json."""

    form: str
    tensors: Tensors
    config: Config
    others: Config

    @property
    def names(self) -> Names:
        return NAMES[self.form]

    def key(self, name: str) -> str:
        return self.names.weight + name

    def map(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace a tensor of the weight that is changed."""
        self.tensors[self.key(name)] = change(self.tensors[self.key(name)]).contiguous()

    @property
    def weights(self) -> Config:
        """What compressed-tensors says of its weights."""
        return self.config["config_groups"]["group_0"]["weights"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Plain models of one layer; K is 64 and 96."""
    folders = {}
    for family in ("llama", "gpt_oss"):
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "num_hidden_layers": 1}
        if family == "gpt_oss":
            sizes["layer_types"] = ["full_attention"]
        folders[family] = tmp_path_factory.mktemp(family)
        spread(build_target(family, **sizes)).save_pretrained(folders[family])
    return folders


@pytest.fixture(scope="module")
def written(sources, tmp_path_factory):
    """written(form) -> the folder of a checkpoint that loads, and that of a plain one of the same values."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(form: str) -> tuple[Path, Path]:
        if form not in made:
            source = sources["gpt_oss" if form == "mxfp4" else "llama"]
            made[form] = quantise(source, ALL[form], tmp_path_factory.mktemp("written"))
        return made[form]

    return make


@pytest.fixture
def changed(written, tmp_path):
    """changed(form, change) -> the folder of that checkpoint after a change."""

    def make(form: str, change: Callable[[Checkpoint], None]) -> str:
        folder, _ = written(form)
        tensors = load_file(folder / "model.safetensors")
        checkpoint = Checkpoint(form, tensors, copy.deepcopy(ALL[form].config), {})
        change(checkpoint)
        save_file(checkpoint.tensors, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        set_config(tmp_path, **{"quantization_config": checkpoint.config, **checkpoint.others})
        return str(tmp_path)

    return make


def load(folder) -> torch.nn.Module:
    return Loaded.from_name(str(folder)).load(torch.float32, CPU)


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Each parameter, and what each packed weight stands for."""
    return dict(model.named_parameters()) | packed_values(model)


# defects: the forms that can have one, what it does, and what the message has


def lacks(name: str) -> Callable[[Checkpoint], None]:
    return lambda c: c.tensors.pop(c.key(getattr(c.names, name)))


def retyped(name: str, dtype: torch.dtype) -> Callable[[Checkpoint], None]:
    return lambda c: c.map(getattr(c.names, name), lambda t: t.to(dtype))


def replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Checkpoint], None]:
    return lambda c: c.map(getattr(c.names, name), change)


def added(key: str, tensor: torch.Tensor) -> Callable[[Checkpoint], None]:
    """key: of the weight that is changed where it has no dot."""
    return lambda c: c.tensors.update({key if "." in key else c.key(key): tensor.clone()})


def configured(**entries: Any) -> Callable[[Checkpoint], None]:
    return lambda c: c.config.update(entries)


def weights(**entries: Any) -> Callable[[Checkpoint], None]:
    return lambda c: c.weights.update(entries)


def both(*changes: Callable[[Checkpoint], Any]) -> Callable[[Checkpoint], None]:
    def change(checkpoint: Checkpoint) -> None:
        for one in changes:
            one(checkpoint)

    return change


def in_groups_of_48(c: Checkpoint) -> None:
    """The issue's case: K = 96 in two groups of 48, of a config that says 64."""
    down = f"{LAYER}.mlp.down_proj.weight_scale"
    for key in [key for key in c.tensors if key.endswith("weight_scale")]:
        c.tensors[key] = c.tensors[key][:, : 2 if key == down else 1].contiguous()
    c.weights["group_size"] = 64


def plain_beside_scale(c: Checkpoint) -> None:
    """A weight in 16 bits where the config promises a packed one, whose scale is left."""
    c.tensors[c.key("weight")] = torch.ones(96, 64, dtype=torch.bfloat16)
    c.tensors.pop(c.key(c.names.words), None) if c.names.words != "weight" else None


def second_group(c: Checkpoint, targets: list[str], **entries: Any) -> None:
    group = copy.deepcopy(c.config["config_groups"]["group_0"])
    c.config["config_groups"]["group_1"] = {**group, "targets": targets}
    c.config["config_groups"]["group_1"]["weights"].update(entries)


def quantise_head(c: Checkpoint) -> None:
    head, _ = ALL[c.form].write(c.tensors.pop("lm_head.weight").float().numpy())
    c.tensors |= {f"lm_head.{name}": tensor for name, tensor in head.items()}


def quantise_tied_head(c: Checkpoint) -> None:
    quantise_head(c)
    c.others["tie_word_embeddings"] = True


def no_config(c: Checkpoint) -> None:
    """FP8 numbers are floats: transformers reads them without their scales, and says that these are not used. Of other
    formats it only said that their weights are missing."""
    c.config = None


def renamed(c: Checkpoint) -> None:
    c.tensors = {key.replace("model.layers.", "decoder.blocks."): tensor for key, tensor in c.tensors.items()}


def int8_without_config(c: Checkpoint) -> None:
    """bitsandbytes' names; its numbers were read as weights."""
    c.config = None
    for key in [key for key in c.tensors if key.endswith("weight_scale")]:
        c.tensors[key.replace("weight_scale", "SCB")] = c.tensors.pop(key)
        weight = key.removesuffix("_scale")
        c.tensors[weight] = c.tensors[weight].float().to(torch.int8)


def int8_without_scale(c: Checkpoint) -> None:
    """Its numbers were read as weights."""
    int8_without_config(c)
    c.tensors = {key: tensor for key, tensor in c.tensors.items() if not key.endswith("SCB")}


def older_name(c: Checkpoint) -> None:
    """The weights were said to be missing."""
    c.others["compression_config"], c.config = {**c.config, "quant_method": "sparseml"}, None


def auto_round(packing: str) -> Any:
    """AutoRound packs weights as GPTQ or AWQ do, under names of its own. One group size is that of some modules."""

    def change(c: Checkpoint) -> None:
        own = {"quant_method": "auto-round", "packing_format": f"auto_round:{packing}", "data_type": "int", "bits": 4}
        size, sym = c.config["group_size"], c.config.get("sym", False)
        others = {".*_proj$": {"group_size": size}, "lm_head": {"bits": 16, "data_type": "fp"}}
        c.config = {**own, "sym": sym, "group_size": 2 * size, "extra_config": others}

    return change


def quantise_embeddings(c: Checkpoint) -> None:
    del c.tensors["model.embed_tokens.weight"]
    for name in ("weight_packed", "weight_scale", "weight_shape"):
        c.tensors[f"model.embed_tokens.{name}"] = c.tensors[c.key(name)].clone()


def with_fourth(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A tensor whose number 3 is this one."""
    return lambda t: t.flatten().index_fill(0, torch.tensor([3]), value).view_as(t)


def without(tensors: Tensors, prefix: str) -> None:
    for key in [key for key in tensors if key.startswith(prefix)]:
        del tensors[key]


ONES = torch.ones(1)
UP, NORM = f"{LAYER}.mlp.up_proj", f"{LAYER}.input_layernorm"
DEFECTS: dict[str, tuple[list[str], Callable[[Checkpoint], Any], str]] = {
    # names
    "no scales": ([*NAMES], lacks("scales"), r"lacks {weight}{scales}"),
    "no words": ([*NAMES], lacks("words"), r"lacks {weight}{words}|lacks 1 tensors"),
    "nothing": (["int4-g32"], lambda c: without(c.tensors, c.key("")), r"{weight}weight"),
    "no zeros": (["int4-zeros", *GPTQ, "awq"], lacks("zeros"), r"lacks {weight}{zeros}"),
    "scale of inputs": (LLAMA, added("input_scale", ONES), r"has input_scale, which is not read"),
    "zeros of FP8": (FP8S, added("weight_zero_point", torch.zeros(96, 1)), r"has weight_zero_point, which is not read"),
    "any other": (LLAMA, added("perm", torch.arange(64)), r"has perm, which is not read"),
    "packed and plain": (
        [form for form in LLAMA if NAMES[form].words != "weight"],
        added("weight", torch.ones(96, 64)),
        r"plain weight \(float32\), and .*{weight}{words}",
    ),
    "two scales": (["fp8-block"], added("weight_scale", torch.ones(6, 4)), r"weight_scale and weight_scale_inv"),
    "another's scale": (["fp8-channel"], added("weight_scale_inv", torch.ones(96, 1)), r"has weight_scale_inv"),
    "plain, and a scale": (LLAMA, plain_beside_scale, r"plain weight \(bfloat16\), and {weight}\w+"),
    "bias of experts": (["mxfp4"], added(f"{LAYER}.mlp.experts.a_bias", torch.ones(4, 96)), r"a_bias is not read as"),
    "stored twice": (["mxfp4"], added(f"{LAYER}.mlp.experts.down_proj", torch.ones(4, 96, 64)), r"is stored twice"),
    # types
    "scales in int8": ([*NAMES], retyped("scales", torch.int8), r"{weight}{scales} is .* in int8"),
    "words in int8": ([*NAMES], retyped("words", torch.int8), r"{weight}{words} is .* in int8"),
    "words in e5m2": ([*NAMES], retyped("words", torch.float8_e5m2), r"{weight}{words} is .* in float8_e5m2"),
    "words in 16 bits": (
        FP8S,
        retyped("words", torch.float16),
        r"plain weight \(float16\), and {weight}{scales}",
    ),
    "zeros in int8": (["int4-zeros", *GPTQ, "awq"], retyped("zeros", torch.int8), r"{weight}{zeros} is .* in int8"),
    # numbers; such a model was "not plain causal attention"
    "NaN": (["int4-g32", "gptq"], replaced("scales", with_fourth(torch.nan)), r"up_proj: {scales} .* are not finite"),
    "infinity": (["int4-g32", "gptq"], replaced("scales", with_fourth(torch.inf)), r"{scales} .* are not finite"),
    # shapes
    "too many scales": ([*NAMES], replaced("scales", lambda t: torch.stack([t, t])), r"{weight}{scales} is"),
    "a row less": ([*NAMES], replaced("words", lambda t: t[:-1]), r"{weight}{words} is"),
    "one scale": (
        [form for form in LLAMA if form != "fp8-tensor"],
        replaced("scales", lambda t: t.flatten()[:1]),
        r"{weight}{scales} is \[1\]",
    ),
    "a scale less": (
        [form for form in LLAMA if form not in ("int4-channel", "fp8-channel", "fp8-tensor")],
        replaced("scales", lambda t: t[:, :1] if t.shape[0] != 2 else t[:1]),
        r"{weight}{scales} is",
    ),
    "other zeros": (["int4-zeros"], replaced("zeros", lambda t: t[:, :2]), r"{weight}{zeros} is \[12, 2\]"),
    "shape of another": (
        CT_INT4,
        lambda c: c.map("weight_shape", lambda t: t.flip(0)),
        r"up_proj: weight_shape says \[64, 96\]",
    ),
    # what the config says of groups
    "groups of 48": (["int4-g32"], in_groups_of_48, r"down_proj: 96 columns do not divide into groups of 64"),
    "other groups": (["int4-g32", "int4-zeros"], weights(group_size=8), r"weight_\w+ is .* in groups of 8"),
    "groups for a row": (["int4-g32"], weights(group_size=None, strategy="channel"), r"weight_scale is .* by row"),
    "other groups in columns": ([*GPTQ, "awq"], configured(group_size=16), r"(qzeros|scales) is .* in groups of 16"),
    "groups by default": ([*GPTQ, "awq"], lambda c: c.config.pop("group_size"), r"do not divide into groups of 128"),
    "a row in columns": ([*GPTQ, "awq"], configured(group_size=-1), r"(qzeros|scales) is .* by row"),
    "other blocks": (["ct-fp8-block"], weights(block_structure=[32, 16]), r"weight_scale is .* blocks of 32 x 16"),
    "no blocks": (["fp8-block"], configured(weight_block_size=None), r"scale_inv is .* by tensor or by channel"),
    "tensor for channel": (["fp8-channel"], weights(strategy="tensor"), r"weight_scale is .* FP8 by tensor"),
    "tensor groups": (
        ["int4-g32", "fp8-channel"],
        weights(strategy="tensor_group", group_size=32),
        r"strategy tensor_group",
    ),
    "tensor for int4": (["int4-channel"], weights(strategy="tensor"), r"strategy tensor"),
    "sixteen for MXFP4": (["ct-mxfp4"], weights(group_size=16), r"is not read"),
    # zeros
    "asymmetric": (["int4-g32", "int4-channel"], weights(symmetric=False), r"lacks .*weight_zero_point"),
    "asymmetric FP8": (["fp8-channel"], weights(symmetric=False), r"with zeros"),
    "symmetric": (["int4-zeros"], weights(symmetric=True), r"weight_zero_point has zeros of \d+"),
    "symmetric in columns": (["gptq-zeros", "gptq-v2"], configured(sym=True), r"qzeros has zeros of \d+"),
    "without zeros": (["awq"], configured(zero_point=False), r"qzeros has zeros of \d+"),
    "version 2 as 1": (["gptq-v2-plain"], configured(checkpoint_format="gptq"), r"qzeros has zeros of 9"),
    "version 1 as 2": (["gptq"], configured(checkpoint_format="gptq_v2"), r"qzeros has zeros of 7"),
    "no config": ([*NAMES], no_config, r"(zeros|scales?(_inv)?) is not used, and the module .* is"),
    "no config, other shapes": (FP8S, both(no_config, replaced("words", lambda t: t[:, ::2])), r"{scales} is not used"),
    "no config of int8": (["fp8-channel"], int8_without_config, r"SCB is not used, and the module .* is"),
    "no scale of int8": (["fp8-channel"], int8_without_scale, r"_proj.weight is stored in whole numbers \(I8\)"),
    "names of another class": (
        LLAMA,
        renamed,
        r"LlamaForCausalLM has no module for its \d+ quantised tensors, decoder\.",
    ),
    # the order of columns
    "in any order": (GPTQ, lambda c: c.map("g_idx", lambda t: t.flip(0)), r"up_proj: .*grouped by importance"),
    "no order": (GPTQ, both(configured(desc_act=True), lambda c: c.tensors.pop(c.key("g_idx"))), r"lacks .*g_idx"),
    "order lacking": (["int4-g32"], weights(actorder="group"), r"lacks .*weight_g_idx"),
    "order of CT": (
        ["int4-g32"],
        both(weights(actorder="static"), added("weight_g_idx", torch.arange(64).flip(0) // 32)),
        r"grouped by importance",
    ),
    # what lies next to modules that are plain
    "bias": (LLAMA, added("bias", torch.ones(96)), r"{weight}bias is not read"),
    "bias of a norm": (LLAMA, added(f"{NORM}.bias", torch.ones(64)), r"input_layernorm.bias is not read"),
    "scale of a norm": ([*NAMES], added(f"{NORM}.weight_scale", ONES), r"plain weight .*layernorm.weight_scale next"),
    "scale of queries": ([*NAMES], added(f"{LAYER}.self_attn.q_scale", ONES), r"self_attn.q_scale is not read"),
    "scales of an activation": (LLAMA, added(f"{LAYER}.mlp.act_fn.scales", torch.ones(96)), r"act_fn.scales is not"),
    "head in int8": ([*NAMES], added("lm_head.weight", torch.ones(97, 64, dtype=torch.int8)), r"lm_head"),
    "norm in e4m3": ([*NAMES], added(f"{NORM}.weight", torch.ones(64).to(torch.float8_e4m3fn)), r"input_layernorm"),
    "tied head": (["int4-g32", "fp8-channel"], quantise_tied_head, r"lm_head is quantised, and the config ties its"),
    "quantised embeddings": (["int4-g32"], quantise_embeddings, r"model.embed_tokens is quantised.*Embedding"),
    # groups of modules
    "another group's": (
        ["int4-g32"],
        lambda c: second_group(c, [r"re:.*up_proj$"], symmetric=False),
        r"lacks .*up_proj.weight_zero_point",
    ),
    "no group's": (
        ["int4-g32"],
        lambda c: (
            second_group(c, [r"re:.*up_proj$"], symmetric=False),
            c.config["config_groups"]["group_0"].update(targets=[r"re:.*attn.*"]),
        ),
        r"no target of its quantization_config names it",
    ),
    "of some modules": (
        ["gptq"],
        configured(dynamic={r"+:.*up_proj": {"group_size": 16}}),
        r"up_proj.* in groups of 16",
    ),
    "of some modules in 8 bits": (["gptq"], configured(dynamic={r".*up_proj": {"bits": 8}}), r"GPTQ in 8 bits"),
}
CASES = [(form, defect) for defect, (forms, *_) in DEFECTS.items() for form in forms]


REPORTED = [
    *((form, f"words in {stored}") for form in FP8S for stored in ("int8", "e5m2", "16 bits")),  # a scale was left over
    *((form, "asymmetric") for form in ("int4-g32", "int4-channel")),
    ("int4-g32", "groups of 48"),
    *((form, "bias") for form in ("gptq", "fp8-channel")),
    *((form, number) for form in ("int4-g32", "gptq") for number in ("NaN", "infinity")),
]


@pytest.mark.parametrize(("form", "defect"), [*REPORTED, *each_value(case for case in CASES if case not in REPORTED)])
def test_a_file_that_does_not_do_what_its_config_says_is_refused(form, defect, changed):
    _, change, message = DEFECTS[defect]
    with pytest.raises((CheckpointError, UnsupportedModelError)) as error:
        load(changed(form, change))
    said, wanted = str(error.value), message.format(**{k: re.escape(v) for k, v in vars(NAMES[form]).items()})
    assert re.search(wanted, said) and "\n" not in said, said


def test_a_config_that_is_wrong_about_all_tensors_is_refused(sources, tmp_path):
    folder = shutil.copytree(sources["llama"], tmp_path / "plain")
    set_config(folder, quantization_config=FORMS["gptq"].config)
    with pytest.raises(CheckpointError, match="none of its tensors is"):
        load(folder)


@pytest.mark.parametrize("form", ["int4-g32", deep("fp8-channel")])
def test_a_head_may_be_quantised(form, written, changed, make_engine, greedy_oracle, random_prompt):
    oracle = AutoModelForCausalLM.from_pretrained(written(form)[1], dtype=torch.float32)
    _, meant = ALL[form].write(oracle.lm_head.weight.detach().numpy())
    with torch.no_grad():
        oracle.lm_head.weight.copy_(torch.from_numpy(meant))
    model, prompt = load(changed(form, quantise_head)), random_prompt(9)
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    [out] = make_engine(model, "ngram").generate(prompt, SamplingParams(max_new_tokens=16))
    assert out.token_ids == greedy_oracle(oracle, prompt, 16, out.token_ids)


# experts, which are stored one by one and stacked while they are read


def a_plain_expert(tensors: Tensors, prefix: str) -> None:
    without(tensors, prefix)
    tensors[f"{prefix}weight"] = torch.ones(32, 32)


def scales_of_another_type(tensors: Tensors, prefix: str) -> None:
    tensors[f"{prefix}weight_scale"] = tensors[f"{prefix}weight_scale"].float()


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    model = build_target("qwen3_moe", moe_intermediate_size=32, num_hidden_layers=1)
    spread(model).save_pretrained(folder / "source")
    return quantise(folder / "source", FORMS["int4-g32"], folder)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (a_plain_expert, r"experts: 3 of 4 experts have a quantised up_proj"),
        (scales_of_another_type, r"experts.1.up_proj is stored as .* in float32.*experts.0.up_proj as .* in float16"),
    ],
)
def test_experts_of_a_layer_are_alike(change, message, experts, tmp_path):
    tensors = load_file(experts / "model.safetensors")
    change(tensors, f"{LAYER}.mlp.experts.1.up_proj.")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((experts / "config.json").read_bytes())
    with pytest.raises(UnsupportedModelError, match=message):
        load(tmp_path)


# differences that change no value


def zeros_of_eight(c: Checkpoint) -> None:
    num_rows, num_groups = c.tensors[c.key("weight_scale")].shape
    words = torch.full((num_rows // 8, num_groups), 0x88888888 - 2**32, dtype=torch.int32)
    c.tensors[c.key("weight_zero_point")] = words


def an_encoder(c: Checkpoint) -> None:
    """A module that the class does not have, with all that a quantised one may have."""
    for name in ("weight", "weight_scale", "weight_zero_point", "bias"):
        c.tensors[f"model.vision_tower.layers.0.mlp.up_proj.{name}"] = ONES.clone()


def several_formats(c: Checkpoint) -> None:
    """The group of `up_proj` is its own; names come before patterns, and these before classes."""
    written, _ = compressed_int4(16).write(c.others.pop("plain").float().numpy())
    c.tensors |= {c.key(name): tensor for name, tensor in written.items()}
    second_group(c, [r"re:.*mlp\.up_proj$"], group_size=16)
    c.config["config_groups"]["group_2"] = {
        **copy.deepcopy(c.config["config_groups"]["group_0"]),
        "targets": [f"{LAYER}.mlp.gate_proj"],
    }


ORDER = torch.arange(64, dtype=torch.int32) // 32
SAME: dict[str, tuple[list[str], Callable[[Checkpoint], Any]]] = {
    "nothing": ([*NAMES], lambda c: None),
    "scales of K/V": (
        [*NAMES],
        both(*(added(f"{LAYER}.self_attn.{name}", ONES) for name in ("k_scale", "v_scale"))),
    ),
    "scales of K/V in projections": (LLAMA, added(f"{LAYER}.self_attn.k_proj.k_scale", ONES)),
    "zeros of K/V": (CT_INT4, added(f"{LAYER}.self_attn.k_zero_point", ONES)),
    "scales of K/V by their older name": (LLAMA, added(f"{LAYER}.self_attn.v_proj.output_scale", ONES)),
    "a scheme of K/V": (CT_INT4, configured(kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False})),
    "a bias of zeros": (LLAMA, added("bias", torch.zeros(96))),
    "a mask": (LLAMA, added(f"{LAYER}.self_attn.bias", torch.ones(1, 1, 8, 8))),
    "an encoder": ([*NAMES], an_encoder),
    "no shape": (CT_INT4, lambda c: c.tensors.pop(c.key("weight_shape"))),
    "no g_idx": (GPTQ, lambda c: c.tensors.pop(c.key("g_idx"))),
    "a g_idx in order": (GPTQ, configured(desc_act=True)),
    "a g_idx of CT": (["int4-g32"], added("weight_g_idx", ORDER)),
    "zeros that are 8": (["int4-g32"], zeros_of_eight),
    "scales in float32": (INT4 + FP8S, retyped("scales", torch.float32)),
    "one scale alone": (["fp8-tensor"], replaced("scales", lambda t: t.reshape(()))),
    "one scale in two dimensions": (["fp8-tensor"], replaced("scales", lambda t: t.reshape(1, 1))),
    "scales in one dimension": (["fp8-channel"], replaced("scales", lambda t: t.reshape(-1))),
    "the scale's other name": (
        ["fp8-block"],
        lambda c: c.tensors.update({c.key("weight_scale"): c.tensors.pop(c.key("weight_scale_inv"))}),
    ),
    "blocks as text": (["ct-fp8-block"], weights(block_structure="16x16")),
    "left out, and packed": (LLAMA, configured(ignore=[UP], modules_to_not_convert=[UP])),
    "a strategy by its size": (["int4-g32"], weights(strategy=None)),
    "a row by its size": (["int4-channel"], weights(strategy=None, group_size=-1)),
    "transforms of nothing": (CT_INT4, configured(transform_config={}, sparsity_config={})),
    "the config's older name": (["int4-g32"], older_name),
    "modules left out": (["gptq"], configured(dynamic={r"-:.*lm_head": {}})),
    "AutoRound's names": (["gptq", "gptq-zeros"], auto_round("auto_gptq")),
    "AutoRound's names of AWQ": (["awq"], auto_round("auto_awq")),
}


DIFFERENCES = [(form, name) for name, (forms, _) in SAME.items() for form in forms]


@pytest.mark.parametrize(("form", "difference"), each_value(DIFFERENCES))
def test_settings_that_change_no_value_are_read(form, difference, written, changed):
    before, after = values_of(load(written(form)[0])), values_of(load(changed(form, SAME[difference][1])))
    assert before and before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def test_modules_of_several_formats_are_read_as_their_targets_say(sources, changed):
    plain = load_file(sources["llama"] / "model.safetensors")[f"{UP}.weight"]
    folder = changed("int4-g32", lambda c: (c.others.update(plain=plain), several_formats(c)))
    mlp = load(folder).model.layers[0].mlp
    assert (mlp.gate_proj.group, mlp.up_proj.group, mlp.down_proj.group) == (32, 16, 32)
    _, meant = compressed_int4(16).write(plain.float().numpy())
    assert torch.equal(dequantised(mlp.up_proj.packed, torch.float32), torch.from_numpy(meant))


def test_scales_of_keys_and_values_are_said_not_to_be_read(changed, caplog):
    with caplog.at_level(logging.INFO, logger="specdec"):
        load(changed("fp8-channel", SAME["scales of K/V"][1]))
    assert f"2 tensors of the checkpoint, {LAYER}.self_attn.k_scale first, are not read: they scale" in caplog.text


# configs that are malformed or not read

INT4 = FORMS["int4-g32"].config
INT4_GROUP = INT4["config_groups"]["group_0"]
FP8_ROW = {"num_bits": 8, "type": "float", "strategy": "channel"}
NOT_READ = [
    (compressed({"num_bits": 8, "type": "int"}, "int-quantized"), "8 bits, int, int-quantized"),
    (compressed({"num_bits": 8, "type": "int"}, "pack-quantized"), "8 bits, int, pack-quantized"),
    (compressed({"num_bits": 4, "type": "float"}, "nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
    (compressed(FP8_ROW, "float-quantized", {**FP8_ROW, "dynamic": False}), "calibrated scales"),
    ({**FORMS["int4-g32"].config, "transform_config": {"config_groups": {}}}, "transforms"),
    ({**FORMS["fp8-channel"].config, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ({"quant_method": "compressed-tensors"}, "no config_groups"),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "calibrated scales"),
    ({"quant_method": "gptq", "bits": 8}, "8 bits"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
    ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:gptqmodel"}, "auto_round:gptqmodel"),
    ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "AutoRound, mx_fp, packing_format missing"),
    ({"quant_method": "nvfp4"}, "nvfp4"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
    ({"quant_method": "exl3"}, "exl3"),
    ({"quant_method": "of tomorrow"}, "of tomorrow"),
    ({}, "quant_method missing"),
]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        *NOT_READ,
        ([], "quantization_config is [], expected an object"),
        ("gptq", "quantization_config='gptq', expected an object"),
        (True, "quantization_config=True, expected an object"),
        ({"quant_method": ["gptq"]}, "quantization_config.quant_method is ['gptq'], expected a string"),
        ({"quant_method": "compressed-tensors", "config_groups": ["a"]}, "config_groups is ['a'], expected an object"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 1}}, "config_groups.a is 1, expected an object"),
        (compressed("int4", "pack-quantized"), "group_0.weights is 'int4', expected an object"),
        (compressed({"num_bits": "4"}, "pack-quantized"), "weights.num_bits is '4', expected a whole number"),
        (compressed({"num_bits": True}, "pack-quantized"), "weights.num_bits is True, expected a whole number"),
        (compressed({"symmetric": 1}, "pack-quantized"), "weights.symmetric is 1, expected true or false"),
        (compressed({"group_size": 0}, "pack-quantized"), "group_size is 0, expected a whole number above 0, or -1"),
        (compressed({"strategy": "group"}, "pack-quantized"), "group_size is None, expected a whole number above 0"),
        (compressed({"strategy": "channel", "group_size": 8}, "x"), "group_size is 8, expected null"),
        (compressed({"strategy": "block"}, "x"), "block_structure is None, expected two whole numbers"),
        (compressed({"block_structure": "16"}, "x"), "block_structure is '16', expected two whole numbers"),
        ({**INT4, "config_groups": {"a": {**INT4_GROUP, "targets": "Linear"}}}, "targets is 'Linear', expected a list"),
        ({**INT4, "config_groups": {"a": {**INT4_GROUP, "targets": ["re:["]}}}, "expected patterns that can be read"),
        ({**FORMS["int4-g32"].config, "sparsity_config": 3}, "sparsity_config is 3, expected an object"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128], expected two whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size is [0, 128], expected two"),
        ({"quant_method": "gptq", "bits": "4"}, "quantization_config.bits is '4', expected a whole number"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": ["a"]}, "dynamic is ['a'], expected an object"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"[": {}}}, "expected patterns that can be read"),
        ({"quant_method": "awq", "bits": 4, "zero_point": "yes"}, "zero_point is 'yes', expected true or false"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_is_malformed_or_not_read_is_one_sentence(config, said, written, tmp_path):
    shutil.copy(written("int4-g32")[0] / "config.json", tmp_path)
    set_config(tmp_path, quantization_config=config)
    with pytest.raises(SpecDecError) as error:
        load(tmp_path)
    assert said in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)
    if (config, said) in NOT_READ:
        assert isinstance(error.value, UnsupportedModelError) and "compressed-tensors, GPTQ, AWQ and AutoRound" in str(
            error.value
        )
