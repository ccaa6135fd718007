"""Published shapes without weights: their sizes against published ones, their floor by hand, and smaller ones."""

import functools
from functools import partial

import pytest
import torch
from transformers import Gemma4TextConfig, GptOssConfig, LlamaConfig, Qwen3_5TextConfig

from specdec.errors import CapacityError, ConfigError
from specdec.layers.description.moe_families import router_of
from specdec.layers.moe.routing import reference_route
from specdec.layers.packed.packed_modules import packed_of
from specdec.layers.packed.packed_weight import dequantised
from specdec.measurement import random_weights as weights
from specdec.measurement.memory_floor import draft_bytes, expected_experts, step_bytes
from specdec.measurement.model_shapes import SHAPES, Shrink, find_shape
from specdec.measurement.phase_run import drafting_modules
from specdec.measurement.random_weights import COLUMN_MULTIPLE, FORMS
from specdec.models.described_model import ModelOnMeta
from specdec.models.target import TargetModel
from specdec.models.weight_storage import stored_weights
from specdec.modules.transformers_names import auto_class

from marks import deep_cases, usual_cases

CPU = torch.device("cpu")
SMALL = Shrink(layers=4, divisor=16)
PACKED = Shrink(layers=2, divisor=16, multiple=COLUMN_MULTIPLE)
ROUTERS = {
    "glm-4.7-flash": 46 * 64 * 2048,
    "glm-4.5-air": 45 * 128 * 4096,
    "ernie-21b-a3b": 27 * (64 * 2560 + 64),
    "mimo-v2-flash": 47 * 256 * 4096,
    "k-exaone": 47 * 128 * 6144,
}
"""Numbers of routers that stay in float32: ERNIE's, and the others' from transformers 5.24 on."""


PUBLISHED = {  # numbers of a target and of its drafter
    "gemma4-e2b": (4_628_569_344, 77_731_328),  # 2.28e9 and its table: "2.3B effective", "5.1B" with its encoders
    # E4B: 4.64e9 next to its table of 2.82e9 per-layer embeddings; the assistants' own tables are counted
    "gemma4-e4b": (7_463_013_376, 78_517_760),
    "gemma4-12b": (11_923_078_912, 422_856_960),
    "gemma4-26b-a4b": (25_233_141_760, 419_711_232),  # "25.2B"
    "gemma4-31b": (30_697_345_280, 469_518_592),  # "30.7B"
    "gpt-oss-20b": (20_914_757_184, 307_641_600),  # "20.91B"
    "gpt-oss-120b": (116_829_156_672, 307_641_600),  # "116.83B"
    "llama-8b": (8_030_261_248, 424_689_664),
    "llama-70b": (70_553_706_496, 1_576_034_304),  # "70.6B"
    "qwen3-8b": (8_190_735_360, 399_523_840),  # "8.2B"
    "qwen3-8b-dflash": (8_190_735_360, 1_048_626_432),  # "1B"
    "qwen3-8b-dspark": (8_190_735_360, 2_371_077_376),  # with its own copies of the table and the head
    "qwen3-30b-a3b": (30_532_122_624, 145_235_968),  # "30.5B"
    "mistral-small-24b": (23_572_403_200, 829_706_240),  # "23.6B"
    "glm-4.7-flash": (29_943_390_976, 643_706_112),  # "30B"
    "exaone-4.0-32b": (32_003_216_384, 1_279_391_488),  # "32.0B", "1.28B"
    "mellum2-12b-a2.5b": (12_149_923_072, 428_371_456),  # "12.15B"
    "step-3.7-flash": (198_936_477_696, 2_427_187_968),  # "198B" with its encoder
    "mimo-7b": (7_622_619_136, 210_790_400),  # "7.83B" with its module
    "exaone-4.5-33b": (32_527_504_384, 536_110_336),  # "33B", with its module and without its vision tower
    "glm-4.5-air": (106_852_245_504, 2_375_059_456),  # "106B"
    "ernie-21b-a3b": (21_825_437_888, 807_577_664),  # "21B"
    "mimo-v2-flash": (308_778_768_832, 987_820_224),  # "309B"
    "k-exaone": (236_571_150_336, 528_513_280),  # "236B"
    "qwen3.5-4b": (4_205_751_296, 120_599_552),  # "4B"
    "qwen3.5-9b": (8_953_803_264, 243_290_624),  # "9B"
    "qwen3.5-27b": (26_895_998_464, 424_699_392),  # "27B"
    "qwen3.5-35b-a3b": (34_660_610_688, 844_640_768),  # "35B"
    "qwen3-next-80b-a3b": (79_674_391_296, 1_650_471_424),  # "80B"
}


@usual_cases("gemma4-e2b", "gpt-oss-20b", "llama-8b", "qwen3-8b-dspark", "ernie-21b-a3b", "qwen3.5-4b")
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_number_of_parameters(name):
    (target, drafter), found = PUBLISHED[name], weights.count_weights(find_shape(name), Shrink())
    assert tuple(each.numbers for each in found) == (target, drafter)
    config = find_shape(name).target(Shrink())
    kept = auto_class(config)._model_mapping[type(config)]._keep_in_fp32_modules_strict or ()
    float32 = ROUTERS[name] if any("gate.weight" in part for part in kept) else 0
    assert tuple(each.bytes for each in found) == (2 * (target + float32), 2 * drafter)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: find_shape("gemma4"), r"'gemma4' is unknown; choose one of gemma4-e2b, .*, qwen3-next-80b-a3b"),
        (lambda: Shrink(layers=1), "at least 2"),
        (lambda: Shrink(divisor=3), "1, 2, 4, 8 or 16"),
        (lambda: Shrink(divisor=32), "1, 2, 4, 8 or 16"),
        (lambda: SHAPES["gemma4-e4b"].target(Shrink(layers=43)), "layers=43: this shape has 42"),
        (lambda: weights.find_form("int3"), "'int3' is unknown; choose one of bf16, int4-g32, int4-g128, fp8, mxfp4"),
        (
            lambda: weights.count_weights(SHAPES["llama-8b"], PACKED, form=FORMS["mxfp4"]),
            "packs experts, and this shape has none; choose int4-g32 or fp8",
        ),
        (
            lambda: weights.count_weights(SHAPES["gemma4-26b-a4b"], SMALL, form=FORMS["fp8"]),
            "176 columns are not a multiple of 32",
        ),
    ],
)
def test_a_shape_or_form_that_cannot_be_is_one_sentence(ask, says):
    with pytest.raises(ConfigError, match=says):
        ask()


def test_every_depth_of_e4b_has_an_owner_for_each_layer():
    for layers in (*range(2, 12), 24, 25, 41, 42):
        config = SHAPES["gemma4-e4b"].target(Shrink(layers=layers, divisor=16))
        kinds = config.layer_types
        assert len(kinds) == layers and kinds[-1] == "full_attention"
        assert {*kinds[: layers - config.num_kv_shared_layers]} == {"sliding_attention", "full_attention"}


def test_weights_are_seeded_and_keep_activations_near_one():
    made = [weights.make_target(SHAPES["mellum2-12b-a2.5b"], SMALL, CPU, torch.float32, seed) for seed in (0, 0, 1)]
    first, again, other = (next(model.parameters()) for model in made)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    with torch.no_grad():
        logits = made[0](torch.arange(40)[None]).logits
    assert logits.isfinite().all()
    assert 0.5 < float(logits.std()) < 2.0


@pytest.mark.parametrize("columns", [64, 96, 2880])
@pytest.mark.parametrize("name", FORMS)
def test_packed_random_weights_keep_the_variance_of_a_product(name, columns):
    """Their scales differ, their mean is 0, and they are finite: of e4m3 two of 256 patterns are no number."""
    empty = weights.empty_packed(FORMS[name], CPU, torch.Size((512, columns)))
    weight = weights.fill_packed(empty, torch.Generator().manual_seed(0))
    plain = dequantised(weight, torch.float32) * columns**0.5
    assert plain.isfinite().all()
    assert 0.95 < float(plain.std()) < 1.05  # a seed's numbers differ between processors
    assert abs(float(plain.mean())) < 0.02
    assert len(weight.scales.unique()) > 1
    if name == "mxfp4":
        assert (weight.scales.log2() % 1 == 0).all()
    assert weight.group in {"int4-g32": (32,), "int4-g128": (32, 64, 128), "fp8": (columns,), "mxfp4": (32,)}[name]


@functools.cache
def packed_target(shape, form):
    """A small model of this shape, which no test changes. form: None if its weights are plain."""
    return weights.make_target(SHAPES[shape], PACKED, CPU, torch.float32, 0, form and FORMS[form])


@pytest.mark.parametrize(("shape", "form"), [("gpt-oss-20b", "mxfp4"), ("gemma4-e4b", "int4-g32"), ("llama-8b", None)])
def test_the_floor_of_a_model_on_meta_is_that_of_the_model(shape, form):
    """`specdec recipe` has the floor that `specdec bench` prints."""
    model = packed_target(shape, form)
    there = ModelOnMeta(shape, weights.target_on_meta(SHAPES[shape], PACKED, torch.float32, form and FORMS[form]))
    assert step_bytes(there, 2, 3, 40) == step_bytes(TargetModel(model), 2, 3, 40)


@deep_cases("gemma4-26b-a4b-int4-g128", "qwen3-30b-a3b-fp8")
@pytest.mark.parametrize(
    ("shape", "form"),
    [("gemma4-e4b", "int4-g32"), ("gemma4-26b-a4b", "int4-g128"), ("gpt-oss-20b", "mxfp4"), ("qwen3-30b-a3b", "fp8")],
)
def test_a_packed_model_is_the_plain_one_elsewhere(shape, form):
    """Gives the same buffers, other weights, activations near 1, and as many bytes as were foretold."""
    plain = weights.make_target(SHAPES[shape], PACKED, CPU, torch.float32, 0)
    model = packed_target(shape, form)
    buffers = dict(model.named_buffers())
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=0, atol=0)
    packed = {name for name, module in model.named_modules() if packed_of(module)}
    linears = {name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)}
    within = {name for name in linears if ".layers." in name and "router" not in name}
    experts = {name for name, _ in plain.named_modules() if name.endswith(".experts")}
    assert packed == (experts if form == "mxfp4" else within | experts)
    with torch.no_grad():
        logits = model(torch.arange(40)[None]).logits
    assert 0.9 < float(logits.std()) < 1.1
    foretold, _ = weights.count_weights(SHAPES[shape], PACKED, torch.float32, FORMS[form])
    assert stored_weights(model) == foretold
    assert foretold.numbers == stored_weights(plain).numbers
    assert foretold.bytes < stored_weights(plain).bytes
    assert foretold.form.startswith(form.partition("-")[0])


def test_tied_tables_stay_one_when_they_leave_meta():
    with weights.META:
        model = weights.build_model(llama(tie_word_embeddings=True), weights.META, torch.float32)
    weights.leave_meta(model, CPU)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_lack_of_memory_is_reported_with_the_numbers_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(weights, "free_bytes", lambda device: 10 << 30)
    shape, forms = SHAPES["gemma4-31b"], (None, FORMS["int4-g32"])
    plain, packed = (weights.count_weights(shape, Shrink(), form=form) for form in forms)
    with pytest.raises(CapacityError, match=r"gemma4-31b takes 62\.3 GB of weights in bfloat16 and 10\.7 GB are free"):
        weights.require_room("gemma4-31b", *plain, CPU, torch.bfloat16)
    with pytest.raises(CapacityError, match=r"20\.2 GB of weights in int4-g32, the rest bfloat16 and 10\.7 GB are"):
        weights.require_room("gemma4-31b", *packed, CPU, torch.bfloat16)


# the floor, by hand

SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}

STATE_DIMS = ("linear_key_head_dim", "linear_value_head_dim")
HYBRID = ["linear_attention", "full_attention"]


def llama(**more):
    return LlamaConfig(vocab_size=32, head_dim=4, num_hidden_layers=2, **SIZES, **more)


def target_of(config):
    torch.manual_seed(0)
    return TargetModel(weights.build_model(config, CPU, torch.float32))


def test_floor_of_a_llama_by_hand():
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 2 * 8  # q, k and v, o, mlp, norms
    counted = step_bytes(target_of(llama()), batch=3, nodes=5, context=100)
    assert counted.weights == 4 * (2 * layer + 8 + 32 * 8)  # and the last norm, and the head
    assert counted.rows == 3 * 5 * 8 * 4  # of the table
    assert counted.kv == 3 * 100 * 2 * (2 * 4) * 4  # layers, K and V of one head of 4
    assert counted.experts == 0
    assert counted.total == counted.weights + counted.rows + counted.kv


def test_a_tied_table_is_read_whole_and_once():
    tied, own = (step_bytes(target_of(llama(tie_word_embeddings=tie)), 1, 1, 10) for tie in (True, False))
    assert tied.weights == own.weights
    assert (tied.rows, own.rows) == (0, 8 * 4)


def test_sliding_layers_read_their_window_and_per_layer_tables_rows():
    kinds = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    per_layer = {"vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 2}
    config = Gemma4TextConfig(vocab_size=32, **SIZES, head_dim=4, global_head_dim=8, **kinds, **per_layer)
    counted = step_bytes(target_of(config), batch=2, nodes=1, context=10)
    assert counted.kv == 2 * (6 * 2 * 4 + 10 * 2 * 8) * 4
    assert counted.rows == 2 * (2 * 2) * 4  # of [32, layers * 2]; the other table is the head's
    assert step_bytes(target_of(config), batch=2, nodes=1, context=3).kv == 2 * (3 * 2 * 4 + 3 * 2 * 8) * 4


def test_a_recurrent_layer_reads_and_writes_its_state_and_no_keys():
    fields = {"linear_num_key_heads": 1, "linear_num_value_heads": 2} | dict.fromkeys(STATE_DIMS, 4)
    config = Qwen3_5TextConfig(vocab_size=32, **SIZES, head_dim=4, num_hidden_layers=2, layer_types=HYBRID, **fields)
    counted = step_bytes(target_of(config), batch=2, nodes=3, context=100)
    assert counted.kv == 2 * 100 * 2 * 4 * 4  # of the other layer
    assert counted.states == 2 * 2 * (2 * 4 * 4 * 4 + 3 * (4 + 4 + 8) * 4 + 8)  # matrices, inputs, a length


@pytest.mark.parametrize(("name", "forwards"), [("exaone-4.5-33b", {0: 3}), ("step-3.7-flash", {0: 1, 1: 2, 2: 3})])
def test_drafts_of_modules_read_the_head_each_and_a_module_each_forward(name, forwards):
    target = TargetModel(weights.make_target(SHAPES[name], SMALL, CPU, torch.float32, 0))
    drafter = weights.drafter_of(SHAPES[name].drafter(target.config, SMALL), target, 1)
    spec, head = target.layout.layers[drafter.family.like], target.model.get_output_embeddings().weight.nbytes
    kept = min(100, spec.window) * sum(field.bytes(torch.float32) for field in spec.fields)
    parts = [[part for name, part in module.parts().items() if name != "head"] for module in drafter.modules]
    own = [sum(weight.nbytes for part in each for weight in part.parameters()) for each in parts]
    assert draft_bytes(drafter, target, 2, 3, 100) == 3 * head + sum(
        count * (own[module] + 2 * kept) for module, count in forwards.items()
    )
    assert draft_bytes(drafter, target, 2, 1, 100) == head + sum(own[module] + 2 * kept for module in forwards)
    assert draft_bytes(None, target, 2, 3, 100) == 0


def mixture(width, head_dim):
    """A layer of GPT-OSS with four experts, of which each row chooses one."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": head_dim}
    sizes = {"vocab_size": 32, "hidden_size": width, "intermediate_size": width}
    return GptOssConfig(**sizes, **heads, **experts, layer_types=["full_attention"])


def test_a_mixtures_floor_counts_the_expected_experts():
    target = target_of(mixture(8, 4))
    expert = (8 * 16 + 16 + 8 * 8 + 8) * 4
    assert step_bytes(target, 1, 1, 10).experts == expert  # one row, one expert
    assert expected_experts(target, 4, 2) == pytest.approx(1 + 3 / 4)  # the second row finds the first one's by 1 in 4
    assert step_bytes(target, 1, 2, 10).experts == expert * 7 // 4
    assert step_bytes(target, 1000, 1, 10).experts == 4 * expert
    assert step_bytes(target, 1, 1, 10).weights == step_bytes(target, 1000, 1, 10).weights


@deep_cases("mellum2-12b-a2.5b")
@pytest.mark.parametrize("name", ["ernie-21b-a3b", "mellum2-12b-a2.5b"])
def test_rows_of_random_mixtures_choose_as_many_experts_as_a_floor_expects(name):
    """ERNIE's correction outweighed its scores, so that eight rows read half of what their floor counted."""
    model = weights.make_target(SHAPES[name], Shrink(layers=2, divisor=16), CPU, torch.float32, 0)
    router = next(part for part in map(router_of, model.modules()) if part is not None)
    x = torch.randn(50 * 8, router.weight.shape[1], generator=torch.Generator().manual_seed(0))
    chosen = reference_route(x, router).experts.view(50, -1)
    distinct = sum(len(rows.unique()) for rows in chosen) / 50
    assert distinct > 0.95 * expected_experts(TargetModel(model), len(router.weight), 8)


def test_packed_weights_are_read_as_words_and_scales():
    def counted(form, rows):
        model = weights.build_model(mixture(32, 16), CPU, torch.float32)
        weights.pack_layers(model, FORMS[form], partial(weights.empty_packed, FORMS[form], CPU))
        weights.randomise(model, 0)
        return step_bytes(TargetModel(model), 1, rows, 10)

    biases, numbers = (64 + 32) * 4, (64 + 32) * 32
    expert = numbers // 2 + numbers // 32 * 2 + biases  # four bits each, two bytes every 32
    assert counted("mxfp4", 1).experts == counted("int4-g32", 1).experts == expert
    assert counted("mxfp4", 2).experts == expert * 7 // 4
    linears = (32 + 16 + 16) * 32 + 32 * 32  # q, k and v, o
    saved = counted("mxfp4", 1).weights - counted("int4-g32", 1).weights
    assert saved == linears * 4 - linears // 2 - linears // 32 * 2
    rows = 32 + 16 + 16 + 32
    assert counted("mxfp4", 1).weights - counted("fp8", 1).weights == linears * 3 - rows * 2


@usual_cases("gemma4-e2b", "llama-8b", "qwen3-8b-dspark", "mimo-7b")
@pytest.mark.parametrize("name", [name for name in SHAPES if SHAPES[name].drafts])
def test_every_shape_has_a_drafter_that_fits_it(name):
    shape = SHAPES[name]
    target = TargetModel(weights.make_target(shape, SMALL, CPU, torch.float32, 0))
    drafter = weights.drafter_of(shape.drafter(target.config, SMALL), target, 1)
    assert drafter.fit is not None
    both = stored_weights(target.model, *drafting_modules(drafter)).numbers  # a report left MTP modules out
    assert both == sum(each.numbers for each in weights.count_weights(shape, SMALL))
    assert set(shape.drafts) in ({"chain", "tree"}, {"mtp1", "mtp", "tree"}, {"block", "tree"})
    if name in ("gemma4-e2b", "gemma4-e4b"):
        ordering = drafter.assistant.masked_embedding.token_ordering
        assert torch.equal(ordering.sort().values, torch.arange(target.vocab_size))
