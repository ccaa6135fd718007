"""Engines on quantised checkpoints: greedy tokens are those of transformers on the dequantised model, in float32.

Checkpoints are tiny and written bit by bit (`packed_checkpoints.py`), one for each family and format, once a session.
"""

import json
import logging
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packed_checkpoints import FORMS, quantise, set_config
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Mxfp4Config,
    NanoChatConfig,
    NanoChatForCausalLM,
    PreTrainedModel,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from typer.testing import CliRunner

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.cli.app import app
from specdec.errors import UnsupportedModelError
from specdec.gpu.operations import REFERENCE
from specdec.layers.description.moe_families import UNFUSED, experts_of
from specdec.layers.packed.packed_modules import PackedLinear
from specdec.layers.packed.packed_weight import dequantised
from specdec.loading.model_loading import Checkpoint
from specdec.models.published import BUNDLED_DIR
from specdec.models.target import TargetModel
from specdec.models.weight_storage import is_quantised, weights_in_words

from engine_internals import packed_values
from marks import deep, deep_cases, examples, is_deep, usual_cases
from tiny_families import FULL, LINEAR, NEMOTRON, VOCAB, build_target, random_eagle3, spread

NEW = examples(8, 16)
GREEDY = SamplingParams(max_new_tokens=NEW)
CPU = torch.device("cpu")
WIDE = {"intermediate_size": 64}  # packed weights take columns in multiples of 32
SIZES = {"qwen3_moe": {"moe_intermediate_size": 32}, "gemma4-moe": {**WIDE, "moe_intermediate_size": 32}}
SIZES |= {"glm4_moe": {**WIDE, "moe_intermediate_size": 32}, "hy_v3": {**WIDE, "moe_intermediate_size": 32}}
SIZES["step3p7"] = {**WIDE, "moe_intermediate_size": 32, "share_expert_dim": 32}

PAIRS = [  # family, form: what `make test` runs
    ("llama", "int4-g32"),
    ("qwen3", "gptq-zeros"),
    ("qwen2", "awq"),  # with biases
    ("mistral", "fp8-block"),
    ("gemma3", "int4-channel"),
    ("gemma4-e2b", "int4-zeros"),
    ("gpt_oss", "mxfp4"),
    ("qwen3_moe", "gptq-v2"),
]
MORE = [  # families and forms that differ in how their tensors are found
    ("gemma4-moe", "int4-g32"),
    ("gemma4-multimodal", "fp8-channel"),
    ("mixtral", "fp8-tensor"),
    ("qwen3_moe", "fp8-block"),
    ("glm4_moe", "int4-g32"),
    ("hy_v3", "fp8-channel"),
    ("step3p7", "int4-g32"),
    ("llama", "gptq"),
]


@pytest.fixture(scope="session")
def packed_pair(tmp_path_factory):
    """packed_pair(family, form, **quantise) -> (folder of the quantised checkpoint, the model of the same values)."""
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def make(family: str, form: str, **options) -> tuple[Path, PreTrainedModel]:
        key = f"{family} {form} {options}"
        if key not in made:
            with torch.inference_mode(False):
                torch.manual_seed(0)
                model = spread(build_target(family, **SIZES.get(family, WIDE)))
                folder = tmp_path_factory.mktemp("packed")
                model.save_pretrained(folder / "source")
                packed, plain = quantise(folder / "source", FORMS[form], folder, **options)
                made[key] = packed, type(model).from_pretrained(plain, dtype=torch.float32)
        return made[key]

    return make


# what is loaded


@deep_cases(
    *("qwen3_moe-fp8-block", "glm4_moe-int4-g32", "hy_v3-fp8-channel", "gemma4-multimodal-fp8-channel"),
    *("llama-int4-g32", "qwen3-gptq-zeros", "mistral-fp8-block", "gpt_oss-mxfp4"),  # tokens of these are below
    "gemma4-moe-int4-g32",
)
@pytest.mark.parametrize(("family", "form"), [*PAIRS, *MORE])
def test_weights_stand_for_those_of_the_plain_model(family, form, packed_pair, random_prompt):
    folder, plain = packed_pair(family, form)
    model = Checkpoint.from_name(str(folder)).load(torch.float32, CPU)
    found = packed_values(model)
    assert len(found) >= 2 * plain.config.get_text_config().num_hidden_layers
    parameters = dict(plain.named_parameters())
    for name, weight in found.items():
        want = parameters[name]
        assert torch.equal(weight, want.transpose(1, 2) if family == "gpt_oss" else want), name
    for name, parameter in model.named_parameters():  # what is not packed is as ever
        if name in parameters:
            assert torch.equal(parameter, parameters[name]), name
    ids = torch.tensor([random_prompt(20)])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    assert TargetModel(model, REFERENCE).unfused is None, "fused layers describe packed modules"


def test_a_load_leaves_nothing_behind(packed_pair):
    """To the rest of the program, and to the user, it is a model as any other."""
    model = Checkpoint.from_name(str(packed_pair("llama", "int4-g32")[0])).load(torch.bfloat16, CPU)
    assert not model.is_quantized and not hasattr(model, "hf_quantizer")
    assert getattr(model.config, "quantization_config", None) is None
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight.dtype == torch.bfloat16 and type(model.lm_head) is torch.nn.Linear
    linear = model.model.layers[0].mlp.down_proj
    assert isinstance(linear, PackedLinear) and linear.scales.dtype == torch.float16  # the checkpoint's
    assert model.to("cpu") is model and TargetModel(model).dtype == torch.bfloat16, "a drafter's, too"


def test_a_device_map_of_one_device_is_honoured(packed_pair):
    """Packs as on a GPU, where tensors are read onto the device and packed there."""
    folder, plain = packed_pair("qwen3_moe", "gptq-v2")
    model = Checkpoint.from_name(str(folder), {"device_map": {"": CPU}}).load(torch.bfloat16, CPU)
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {CPU}
    experts = model.model.layers[0].mlp.experts
    want = plain.model.layers[0].mlp.experts.down_proj[1]
    assert torch.equal(dequantised(experts.experts.down[1], torch.float32), want)


def test_shards_are_read(packed_pair, tmp_path, random_prompt):
    folder, plain = packed_pair("llama", "int4-g32")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    index = {name: f"model-0000{1 + number % 3}-of-00003.safetensors" for number, name in enumerate(names)}
    for file in set(index.values()):
        save_file({n: tensors[n] for n in names if index[n] == file}, tmp_path / file, {"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    model = Checkpoint.from_name(str(tmp_path)).load(torch.float32, CPU)
    assert torch.equal(
        packed_values(model)["model.layers.1.mlp.up_proj.weight"], plain.model.layers[1].mlp.up_proj.weight
    )


def test_modules_left_as_they_are_are_told_by_their_tensors(packed_pair):
    """`ignore` and `targets`, in whatever syntax, need not be understood."""
    folder, _ = packed_pair("llama", "int4-g32", ignore=r"layers\.0\.|k_proj")
    form = FORMS["int4-g32"]
    group = {**form.config["config_groups"]["group_0"], "targets": [r"re:.*layers\.[12]\..*"]}
    set_config(folder, quantization_config={**form.config, "config_groups": {"a": group}, "ignore": ["re:.*k_proj$"]})
    model = Checkpoint.from_name(str(folder)).load(torch.float32, CPU)
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if name.endswith("_proj")}
    plain = {name for name, kind in kinds.items() if kind == "Linear"}
    assert plain == {name for name in kinds if "layers.0." in name or name.endswith("k_proj")}


@pytest.mark.parametrize("form", ["int4-g32", "fp8-channel"])
def test_experts_of_some_layers_may_be_left_as_they_are(form, packed_pair):
    """Tensors of FP8 have the names of plain ones."""
    folder, plain = packed_pair("qwen3_moe", form, ignore=r"layers\.0\.mlp\.experts")
    model = Checkpoint.from_name(str(folder)).load(torch.float32, CPU)
    kinds = [type(layer.mlp.experts).__name__ for layer in model.model.layers]
    assert kinds == ["Qwen3MoeExperts", "PackedExperts", "PackedExperts"]
    for mine, theirs in zip(model.model.layers[:1], plain.model.layers[:1], strict=True):
        assert torch.equal(mine.mlp.experts.gate_up_proj, theirs.mlp.experts.gate_up_proj)


@pytest.mark.parametrize("folder", UNFUSED)
def test_experts_that_are_read_for_families_without_fused_layers_are_those_of_qwen3(folder):
    """They have its parameters, and compute what it computes."""
    sizes = {"hidden_size": 8, "intermediate_size": 6, "moe_intermediate_size": 6, "hidden_act": "silu"}
    config = SimpleNamespace(num_experts=3, num_local_experts=3, _experts_implementation="eager", **sizes)
    found = vars(import_module(f"transformers.models.{folder}.modeling_{folder}"))
    kinds = [each for name, each in found.items() if name.endswith("Experts") and each.__module__ == found["__name__"]]
    assert kinds
    for kind in kinds:
        experts, known = kind(config), Qwen3MoeExperts(config)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter)
        known.load_state_dict(experts.state_dict())
        rows = torch.randn(5, 8), torch.tensor([[0, 2], [2, 1], [1, 0], [2, 0], [0, 1]]), torch.rand(5, 2)
        described = experts_of(experts)
        assert described is not None and described.activation == "silu" and torch.equal(experts(*rows), known(*rows))


def test_experts_that_are_quantised_in_one_tensor_are_refused_as_such(tmp_path):
    """The message said that the checkpoint is damaged."""
    model = build_target("qwen3_moe", num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    tensors = model.state_dict()
    for key in [key for key in tensors if ".experts." in key]:
        tensors |= {key: tensors[key].to(torch.float8_e4m3fn), f"{key}_scale_inv": torch.ones(4, 1, 1)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    set_config(tmp_path, quantization_config=FORMS["fp8-block"].config)
    with pytest.raises(UnsupportedModelError, match="_proj_scale_inv scales all experts of a layer; quantised experts"):
        Checkpoint.from_name(str(tmp_path)).load(torch.float32, CPU)


def test_a_class_that_initialises_weights_of_its_modules_is_read(tmp_path):
    """It raised: the modules of quantised weights are empty while transformers loads the others."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    NanoChatForCausalLM(NanoChatConfig(vocab_size=VOCAB, num_hidden_layers=1, **sizes)).save_pretrained(tmp_path / "a")
    folder, plain = quantise(tmp_path / "a", FORMS["int4-g32"], tmp_path)
    model = Checkpoint.from_name(str(folder)).load(torch.float32, CPU)
    meant = load_file(plain / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(dequantised(model.model.layers[0].self_attn.o_proj.packed, torch.float32), meant)


# engines


def check_tokens(make_engine, packed, plain, greedy_oracle, prompts, drafter=None, **config):
    engine = make_engine(packed, drafter, max_batch_size=2, **config)
    outputs = engine.generate(prompts, GREEDY)
    engine.table.check()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == greedy_oracle(plain, prompt, NEW, output.token_ids)
    return outputs


@usual_cases(
    *("chain-16-llama-int4-g32", "tree-16-qwen3-gptq-zeros", "tree-1-mistral-fp8-block", "chain-1-gpt_oss-mxfp4"),
)
@pytest.mark.parametrize(("family", "form"), PAIRS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("drafts", ["chain", "tree"])
def test_tokens_are_those_of_the_dequantised_model(
    family, form, drafts, page_size, packed_pair, make_engine, greedy_oracle, random_prompt, scripted, tree_script
):
    folder, plain = packed_pair(family, form)
    model = Checkpoint.from_name(str(folder)).load(torch.float32, CPU)
    prompts = [random_prompt(n) for n in (5, 21)]
    config = {"page_size": page_size}
    drafter = "ngram"
    if drafts == "tree":
        truths = [[*prompt, *greedy_oracle(plain, prompt, NEW)] for prompt in prompts]
        drafter, config["spec"] = scripted(tree_script(truths, VOCAB)), SpecConfig(5)
    outputs = check_tokens(make_engine, model, plain, greedy_oracle, prompts, drafter, **config)
    if drafts == "tree":
        assert sum(sum(out.stats.accepted_counts) for out in outputs) > 0


@deep_cases("gemma4-e2b-int4-zeros")
@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", "int4-g32"), ("gemma4-e2b", "int4-zeros"), deep("llama", "fp8-channel"), deep("gpt_oss", "mxfp4")],
)
def test_a_folder_is_served_with_deterministic_rows(family, form, packed_pair, greedy_oracle, random_prompt):
    """Loaded by name, and a row has its bits in any batch: proved when the engine is made."""
    folder, plain = packed_pair(family, form)
    prompts = [random_prompt(n) for n in (3, 26)]
    config = EngineConfig(max_model_len=64, max_batch_size=4, deterministic=True)
    params = SamplingParams(max_new_tokens=8, logprobs=1)
    with Engine.from_pretrained(str(folder), "ngram", config=config) as engine:
        alone = [engine.generate(prompt, params)[0] for prompt in prompts]
        together = engine.generate(prompts, params)
    for one, other, prompt in zip(alone, together, prompts, strict=True):
        assert one.token_ids == other.token_ids == greedy_oracle(plain, prompt, 8)
        assert one.logprobs == other.logprobs


MOE = {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}
MIXTURES = {
    "minimax_m2": {"head_dim": 8, "rotary_dim": 4, "num_local_experts": 3, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 3, "moe_topk": 2},  # its router is quantised too
    "lfm2_moe": {**MOE, "num_dense_layers": 0, "layer_types": [FULL] * 2},
    "nemotron_h": {**NEMOTRON, **MOE, "layer_types": [LINEAR, FULL, "moe"], "head_dim": 8},  # experts without gates
}


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_is_served_as_it_is_published(family, greedy_oracle, random_prompt, tmp_path):
    """In FP8, with experts one by one, which were refused."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "bos_token_id": None}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "eos_token_id": None}
    config = AutoConfig.for_model(family, **{**heads, **sizes, **MIXTURES[family]})
    spread(AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path / "source")
    folder, plain = quantise(tmp_path / "source", FORMS["fp8-block"], tmp_path)
    oracle, prompt = Checkpoint.from_name(str(plain)).load(torch.float32, CPU), random_prompt(9)
    with Engine.from_pretrained(str(folder), "ngram", config=EngineConfig(max_model_len=32)) as engine:
        kinds = {name: type(each).__name__ for name, each in engine.target.decoder.named_modules()}
        assert {kinds[name] for name in kinds if name.endswith(".experts")} == {"PackedExperts"}
        assert {kinds[name] for name in kinds if name.endswith("wg")} <= {"PackedLinear"}
        assert engine.generate(prompt, GREEDY)[0].token_ids == greedy_oracle(oracle, prompt, NEW)


@pytest.mark.parametrize(
    ("family", "form", "lengths", "spec"),
    [("gemma4-e2b", "int4-g32", (4, 30), SpecConfig(3, 3, 12)), ("llama", "gptq", (12,), SpecConfig(3, 2, 6))],
    ids=["assistant", "eagle3"],
)
def test_a_drafter_in_16_bits_drafts_for_a_packed_target(
    family, form, lengths, spec, packed_pair, make_assistant, make_engine, greedy_oracle, random_prompt
):
    folder, plain = packed_pair(family, form)
    model = Checkpoint.from_name(str(folder)).load(torch.float32, CPU)
    drafter = random_eagle3(model) if family == "llama" else make_assistant(plain)
    prompts = [random_prompt(n) for n in lengths]
    check_tokens(make_engine, model, plain, greedy_oracle, prompts, drafter, spec=spec, page_size=4)


def test_an_assistant_may_be_quantised_itself(packed_pair, make_assistant, make_engine, greedy_oracle, tmp_path):
    """It goes through the same loader as its target."""
    _, plain = packed_pair("gemma4-e2b", "int4-g32")
    assistant = make_assistant(plain, hidden_size=32, head_dim=8)
    assistant.save_pretrained(tmp_path / "source")
    packed, _ = quantise(tmp_path / "source", FORMS["int4-g32"], tmp_path)
    engine = make_engine(plain, str(packed), max_batch_size=1)
    assert any(isinstance(module, PackedLinear) for module in engine.drafter.assistant.modules())
    prompt = list(range(1, 20))
    assert engine.generate(prompt, GREEDY)[0].token_ids == greedy_oracle(plain, prompt, NEW)


@pytest.fixture(scope="module")
def bundled(shallow_folder, tmp_path_factory):
    """The folder of tiny-gemma4 in int4."""
    models = BUNDLED_DIR if is_deep() else shallow_folder
    return quantise(models / "tiny-gemma4", FORMS["int4-g32"], tmp_path_factory.mktemp("bundled"))[0]


@pytest.mark.cpu
@pytest.mark.usefixtures("shallow_pair")
def test_storage_of_weights_is_reported(packed_pair, bundled, caplog):
    """At load, in the summary of `specdec generate`, and of what transformers runs quantised."""
    words = "weights in int4 in groups of 32, the rest float32"
    folder, _ = packed_pair("llama", "int4-g32")
    with caplog.at_level(logging.INFO, logger="specdec"):
        Engine.from_pretrained(folder, tokenizer="tiny-gemma4", config=EngineConfig(max_model_len=32)).close()
    assert re.search(rf"^target {folder}: {words} \(\d+ MB\)$", "\n".join(caplog.messages), re.MULTILINE)
    result = CliRunner().invoke(app, ["generate", "Hi", "--max-new-tokens", "2", "--target", str(bundled)])
    assert result.exit_code == 0 and f"; {words} (" in result.stderr, result.stderr
    plain = build_target("llama")
    assert not is_quantised(plain) and re.fullmatch(r"float32 \(\d+ MB\)", weights_in_words(plain))
    plain.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="torchao"))
    assert is_quantised(plain) and weights_in_words(plain) == "torchao as transformers runs it, the rest float32"


def test_an_engine_notices_no_change_of_packed_modules(packed_pair, make_engine, caplog):
    """Modules of specdec are known not to change by themselves: nothing is copied and proved again."""
    model = Checkpoint.from_name(str(packed_pair("llama", "int4-g32")[0])).load(torch.float32, CPU)
    engine = make_engine(model, max_batch_size=1)
    weights = engine.target.weights
    with caplog.at_level(logging.INFO, logger="specdec"):
        before = weights.generation()
        weights.find_hidden_changes()
        assert weights.generation() == before and not caplog.messages
        model.model.layers[0].mlp.down_proj.scales.mul_(2)  # in place: seen, and nothing moved
        assert weights.generation() == before


# what is refused


def test_a_quantization_config_without_a_method_is_one_sentence(packed_pair):
    folder, _ = packed_pair("gpt_oss", "mxfp4")
    with pytest.raises(UnsupportedModelError, match=r"cannot be loaded: .* no `quant_method`"):
        Checkpoint.from_name(str(folder), {"quantization_config": {"dequantize": True}}).load(torch.float32, CPU)


def test_columns_that_fill_no_words_are_named(tmp_path):
    model = spread(build_target("llama"))  # an intermediate size of 48
    model.save_pretrained(tmp_path / "source")
    folder, _ = quantise(tmp_path / "source", FORMS["int4-zeros"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    written, _ = FORMS["int4-zeros"].write(tensors.pop("model.layers.0.mlp.down_proj.weight").numpy())
    tensors |= {f"model.layers.0.mlp.down_proj.{name}": tensor for name, tensor in written.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="48 columns"):
        Checkpoint.from_name(str(folder)).load(torch.float32, CPU)


@pytest.mark.parametrize(
    "given", [Mxfp4Config(dequantize=True), {"quant_method": "mxfp4", "dequantize": True}], ids=["object", "dict"]
)
def test_the_users_own_quantization_config_goes_to_transformers(given, packed_pair):
    """A dict too, which transformers itself refuses next to the `quantization_config` of a checkpoint."""
    folder, plain = packed_pair("gpt_oss", "mxfp4")
    loaded = Checkpoint.from_name(str(folder), {"quantization_config": given}).load(torch.float32, CPU)
    experts = loaded.model.layers[0].mlp.experts
    assert torch.equal(experts.down_proj, plain.model.layers[0].mlp.experts.down_proj)


def test_memory_holds_the_packed_weights_alone(packed_pair):
    model = Checkpoint.from_name(str(packed_pair("llama", "int4-g32")[0])).load(torch.bfloat16, CPU)
    packed = sum(buffer.nbytes for name, buffer in model.named_buffers() if "words" in name or "scales" in name)
    numbers = sum(weight.numel() for weight in packed_values(model).values())
    assert packed == numbers // 2 + numbers // 32 * 2
