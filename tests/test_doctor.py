"""The doctor names a seeded cause and only that, finds nothing in a healthy pair, and its reference is the worker's.

Causes are seeded as exports get them wrong: in config.json, in the weights, in the tokenizer's files, in names.
"""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from block_heads import random_head
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.cli.app import app
from specdec.doctor import diagnose
from specdec.doctor.causes import changed_block, possible_masks, taps_of_blocks
from specdec.doctor.diagnosis import Measured, Trial
from specdec.draft_models.block.block_drafter import BlockDrafter
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.errors import ConfigError
from specdec.loading.drafter_loading import load_any_drafter
from specdec.loading.load_check import warn_at_load
from specdec.models import published
from specdec.models.published import ACCEPTED, HELD_OUT_PROBLEMS, PAIRS_BY_TITLE, published_acceptance
from specdec.models.weight_storage import NONE, grid_of
from specdec.runtime.drafts.dense_drafts import dense_drafts, record
from specdec.text.prompt_files import read_prompts

from engine_internals import REFERENCE, TargetModel
from marks import deep_cases, examples, is_deep

HEAD, ASSISTANT = "tiny-gemma4-eagle3", "tiny-gemma4-mtp"
SPEC = SpecConfig(4)
TOKENS = examples(14, 32)
QUESTIONS = [problem.text for problem in read_prompts(HELD_OUT_PROBLEMS, 5)]

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")


@pytest.fixture(scope="module")
def engine(shallow_pair):
    with Engine.from_pretrained("tiny-gemma4", None, spec=SPEC, config=EngineConfig(max_batch_size=8)) as engine:
        yield engine


@pytest.fixture
def diagnosed(engine):
    """What the doctor finds in a drafter, which may be given by name or folder."""

    def run(drafter, tokenizer=None, **options):
        fitted = drafter
        if isinstance(drafter, str | Path):
            fitted = load_any_drafter(str(drafter), engine.target)
        tokenizer = engine.tokenizer if tokenizer is None else tokenizer
        with Engine(engine.target, fitted, tokenizer=tokenizer, spec=SPEC, config=engine.config) as pair:
            return diagnose(pair, **{"prompts": QUESTIONS, "max_new_tokens": TOKENS, **options})

    return run


@pytest.fixture
def export(tmp_path):
    """A copy of a bundled checkpoint, with its config.json and tensors changed."""

    def copy(name, config=None, tensors=None, folder="copy"):
        place = shutil.copytree(published.BUNDLED_DIR / name, tmp_path / folder)
        if config is not None:
            content = json.loads((place / "config.json").read_text())
            config(content)
            (place / "config.json").write_text(json.dumps(content))
        if tensors is not None:
            state = tensors(load_file(place / "model.safetensors"))
            save_file(state, place / "model.safetensors", metadata={"format": "pt"})
        return place

    return copy


def causes(diagnosis):
    return [finding.cause for finding in diagnosis.findings]


def taps(step):
    """Ids of another format in the place of its own, which count from one layer earlier: step 1 is right."""

    def change(config):
        ids = config["eagle_config"].pop("eagle_aux_hidden_state_layer_ids")
        config["eagle_aux_hidden_state_layer_ids"] = [tap + step for tap in ids]

    return change


def to_fp8(weight):
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return ((weight.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


def to_int4(weight):
    groups = weight.float().view(-1, 32)
    scale = groups.abs().amax(1, keepdim=True) / 7
    return ((groups / scale).round() * scale).view_as(weight).to(weight.dtype)


def rounded(cast):
    return lambda state: {name: cast(w) if "proj" in name and "layer" in name else w for name, w in state.items()}


def text_rope(config):
    config["text_config"]["rope_parameters"]["full_attention"]["rope_theta"] = 10000.0


def fed_back_unnormed(config):
    """A config as SpecForge wrote it before and after the change of its meaning: the earlier one is assumed."""
    del config["eagle_config"]["norm_output"]
    assert config["norm_output"] is True


def slides(config):
    config |= {"layer_types": ["sliding_attention"], "sliding_window": 6, "use_sliding_window": True}


def narrower(config):
    config["text_config"]["sliding_window"] = 47


SEEDED = {
    "taps one later": (HEAD, taps(2), None, "taps"),
    "norm": (HEAD, fed_back_unnormed, None, "norm"),
    "rope base of an assistant": (ASSISTANT, text_rope, None, "rope base"),
    "window of a head": (HEAD, slides, None, "window"),
    "fp8 head": (HEAD, None, rounded(to_fp8), "dtype"),
    "int4 assistant": (ASSISTANT, None, rounded(to_int4), "dtype"),
}


@deep_cases("tiny-gemma4-eagle3")
@pytest.mark.slow
@pytest.mark.parametrize("drafter", [ASSISTANT, HEAD])
def test_nothing_is_named_in_a_healthy_pair_and_the_reference_is_what_the_worker_computes(drafter, diagnosed):
    found = diagnosed(drafter)
    assert causes(found) == []
    assert found.healthy
    assert found.reference.holds
    assert found.reference.same_token
    assert found.reference.difference < 1e-4
    assert found.published is not None
    assert len(found.acceptance.by_depth) == SPEC.num_steps
    assert json.loads(json.dumps(found.as_json()))["healthy"]


@deep_cases("window of a head", "fp8 head", "taps one later", "int4 assistant")  # the taps of a block are below
@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "config", "tensors", "cause"), SEEDED.values(), ids=SEEDED)
def test_a_seeded_cause_is_named_and_only_that(drafter, config, tensors, cause, export, diagnosed):
    found = diagnosed(export(drafter, config, tensors), prompts=None)  # eight: some gains are small
    assert causes(found) == [cause]
    assert not found.healthy
    [finding] = found.findings
    assert finding.do
    if finding.after is not None and not finding.certain:
        assert finding.after > finding.before


@pytest.mark.deep
def test_raw_prompts_of_a_chat_model_are_named(diagnosed):
    assert causes(diagnosed(ASSISTANT, chat=False)) == ["template"]


@pytest.mark.deep
def test_signs_of_a_qat_target_with_the_plain_assistant(export, tmp_path, caplog):
    target = export("tiny-gemma4", folder="gemma-4-tiny-it-qat-w4a16-ct")
    plain = export(ASSISTANT, folder="gemma-4-tiny-it-assistant")
    qat = export(ASSISTANT, folder="gemma-4-tiny-it-qat-q4_0-unquantized-assistant")
    config = EngineConfig(max_batch_size=1, max_model_len=64)
    Engine.from_pretrained(target, qat, config=config).close()
    assert "QAT" not in caplog.text
    with Engine.from_pretrained(target, plain, config=config) as engine:
        assert "QAT pair" in caplog.text
        found = diagnose(engine, ["a", "b", "c", "d"], max_new_tokens=8)
    assert "QAT pair" in causes(found)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (SpecConfig(100, adaptive=True), "a round drafts up to 100 where that"),
        (SpecConfig(5, adaptive=False), "every round drafts 5;"),
        (SpecConfig(4), None),
    ],
    ids=["100", "5, fixed", "4"],
)
def test_more_steps_than_a_drafter_is_published_for_are_a_warning_at_load(spec, says, engine, caplog):
    drafter = load_any_drafter(ASSISTANT, engine.target)
    warn_at_load(engine.target, drafter, engine.tokenizer, spec)
    told = f"num_steps={spec.num_steps}, and tiny-gemma4-mtp is published for 4: {says}"
    assert (told in caplog.text) if says else not caplog.text


def test_few_prompts_and_no_drafter_are_refused(engine, diagnosed):
    with pytest.raises(ConfigError, match="no drafter"):
        diagnose(engine)
    with pytest.raises(ConfigError, match="3 prompts; 4 or more"):
        diagnosed(ASSISTANT, prompts=["a", "b", "c"])


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_answers_that_are_no_longer_than_drafts_are_refused(tokens, diagnosed):
    """An answer of 4 tokens has no place after which all of 4 drafts can be compared: it ended in a RuntimeError."""
    with pytest.raises(ConfigError, match=rf"^max_new_tokens={tokens}: drafts of num_steps=4 .* 5 tokens or more"):
        diagnosed(ASSISTANT, max_new_tokens=tokens)


@pytest.mark.slow
def test_a_drafter_that_is_never_right_is_not_called_healthy(export, diagnosed):
    """All causes are ruled out: "nothing wrong was found" was said of a head that was hardly trained."""

    def untrained(state):
        generator = torch.Generator().manual_seed(1)
        made = {name: 0.02 * torch.randn(w.shape, generator=generator) for name, w in state.items() if w.dim() == 2}
        return state | made

    found = diagnosed(export(HEAD, tensors=untrained), max_new_tokens=8, causes=())
    assert causes(found) == ["training"] and not found.healthy
    assert found.acceptance.length < 1.1


@pytest.mark.parametrize(
    ("expected", "greedy", "clear"),
    [
        ((2.1, 2.1, 2.1, 2.1), (2.0,) * 4, True),
        ((2.1, 2.1, 2.1, 1.9), (2.0,) * 4, False),
        ((2.01, 2.01, 2.01, 2.01), (2.0,) * 4, False),
        ((2.1, 2.1, 2.1, 2.1), (2.0, 2.0, 2.0, 1.9), False),
        ((2.9, 2.01, 2.01, 2.01), (2.0,) * 4, False),
    ],
    ids=["clear", "one lost", "too little", "greedy lost", "one prompt alone"],
)
def test_rule_for_a_clear_gain(expected, greedy, clear):
    before = Measured((2.0,) * 4, (2.0,) * 4)
    assert Trial.compare("taps", "2 -> 3", Measured(expected, greedy), before).named is clear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grids_are_told_from_ordinary_weights(dtype):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert grid_of(weight) == NONE
    assert grid_of(to_fp8(weight)) == "8 bits"
    assert grid_of(weight.to(torch.float8_e4m3fn).to(dtype)) == "8 bits"
    assert grid_of(to_int4(weight)) == "4 bits"
    assert grid_of(torch.ones(64, 256)) is None


def test_published_figures_name_known_pairs_and_their_source():
    drafters = [pair.published_name for pairs in PAIRS_BY_TITLE.values() for pair in pairs]
    assert all(drafters.count(drafter) == 1 for drafter in ACCEPTED)
    assert all(figure.source and figure.data for figure in ACCEPTED.values())
    assert published_acceptance("google/gemma-4-31B-it", "google/gemma-4-31B-it-assistant").length == 5.37
    assert published_acceptance("some/gemma-4-31b-it", "/models/gemma-4-31B-it-assistant/").length == 5.37
    assert published_acceptance("XiaomiMiMo/MiMo-7B-RL", "mtp").length == 1.88
    assert published_acceptance("tiny-gemma4", None) is None


def turned(tokenizer, template):
    """A tokenizer with another chat template, as its files may have it."""
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def test_a_tokenizer_without_its_template_is_named(engine, diagnosed):
    found = diagnosed(ASSISTANT, turned(engine.tokenizer, None), prompts=["a", "b", "c", "d"], max_new_tokens=12)
    assert "template" in causes(found)


@pytest.mark.deep
def test_a_thinking_mode_that_the_drafter_was_not_trained_in_is_named(engine, diagnosed):
    """A template that thinks unless it is told not to, as Qwen 3's."""
    thinks = (
        "{% if enable_thinking is not defined or enable_thinking %}"
        "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %} <think> {% else %}"
    )
    template = f"{thinks}{engine.tokenizer.chat_template}{{% endif %}}"
    assert causes(diagnosed(ASSISTANT, turned(engine.tokenizer, template))) == ["thinking mode"]


def fitted_head(engine, drafter, owner, scale, max_new_tokens):
    """Weights of the head in `owner.logits`, with which its states on the doctor's own texts draft their tokens."""
    prompts = [engine.chat_prompt(problem.text) for problem in read_prompts(HELD_OUT_PROBLEMS, 8)]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True))
    states, tokens = [], []
    with pytest.MonkeyPatch.context() as spying, torch.inference_mode():
        logits = owner.logits
        spying.setattr(owner, "logits", lambda rows: states.append(rows.reshape(-1, rows.shape[-1])) or logits(rows))
        for output in outputs:
            text, before = record(engine.target, output.prompt_token_ids, output.token_ids), len(states)
            places = dense_drafts(drafter, text, SPEC.num_steps).roots[:, None] + 1 + torch.arange(SPEC.num_steps)
            by_depth = len(states) - before > 1  # states of one depth after another, or of all of each root
            tokens.append(text.tokens[places.T if by_depth else places].flatten())
        x, y = torch.cat(states), torch.cat(tokens)
        wanted = torch.nn.functional.one_hot(y, engine.target.vocab_size).float()
        ridge = 1e-3 * x.pow(2).mean() * torch.eye(x.shape[1])
        return scale * torch.linalg.solve(x.T @ x + ridge, x.T @ wanted).T


@pytest.fixture(scope="module")
def earlier(engine, tmp_path_factory):
    """An assistant for queries at S - 1, on disk: sharp attention, and a head that is fitted to its states there."""
    folder = tmp_path_factory.mktemp("earlier")
    fitted = load_any_drafter(ASSISTANT, engine.target)
    assistant = copy.deepcopy(fitted.assistant)
    for layer in assistant.model.layers:
        layer.self_attn.q_norm.weight.data *= 10
        layer.post_attention_layernorm.weight.data *= 10
    drafter = Gemma4MTPDrafter(assistant, engine.target, query_offset=-1, window_shift=1)
    # tied: the assistant reads the target's embedding, never its own
    assistant.lm_head.weight.data.copy_(fitted_head(engine, drafter, drafter, 20, TOKENS))
    assistant.save_pretrained(folder)
    return folder


@pytest.mark.deep
@pytest.mark.slow
def test_an_assistant_for_another_frozen_position_is_named(earlier, diagnosed):
    assert causes(diagnosed(earlier)) == ["frozen position"]


def test_the_command_says_what_it_found_and_exits_with_1_for_a_cause(export, tmp_path):
    copied = export(ASSISTANT, narrower)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"How many are {n} and {n}?"}) + "\n" for n in range(4)))
    report = tmp_path / "report.json"
    words = ["--max-new-tokens", "8", "--prompts", str(prompts), "--json", str(report)]
    result = CliRunner().invoke(app, ["doctor", "--drafter", str(copied), *words])
    assert result.exit_code == 1
    assert "window: its sliding_window is 47, the target's 48" in result.stdout
    assert json.loads(report.read_text())["findings"][0]["cause"] == "window"
    assert CliRunner().invoke(app, ["doctor", "--drafter", "none"]).exit_code == 2


def test_a_limit_holds_for_the_bundled_prompts_too(monkeypatch):
    """Without --prompts the option was ignored: 8 prompts were asked."""
    asked = []
    monkeypatch.setattr("specdec.cli.actions.examine_pair.diagnose", lambda _, prompts, **__: asked.extend(prompts))
    CliRunner().invoke(app, ["doctor", "--limit", "5"])
    assert len(asked) == 5


@pytest.mark.deep
@pytest.mark.parametrize(("drafter", "dtype"), [(ASSISTANT, torch.bfloat16), (HEAD, torch.float32)], ids=str)
def test_fused_layers_and_16_bits_are_no_cause(drafter, dtype, engine):
    model = copy.deepcopy(engine.target.model).to(dtype)
    target = TargetModel(model, REFERENCE)
    fitted = load_any_drafter(drafter, target)
    assert target.unfused is None and fitted.unfused is None
    with Engine(target, fitted, tokenizer=engine.tokenizer, spec=SPEC, config=engine.config) as pair:
        found = diagnose(pair, QUESTIONS, max_new_tokens=TOKENS)
    assert causes(found) == []
    assert found.reference.holds


def test_kv_in_8_bits_is_no_cause(engine):
    """Its rounding was reported as a wrong kernel."""
    config = replace(engine.config, kv_dtype="fp8")
    fitted = load_any_drafter(HEAD, engine.target)
    with Engine(engine.target, fitted, tokenizer=engine.tokenizer, spec=SPEC, config=config) as pair:
        found = diagnose(pair, QUESTIONS, max_new_tokens=8, causes=())
    assert found.reference.holds and found.reference.difference > 1e-3


# drafters of blocks


BLOCK_MASK, WRONG_MASK = 2047, 77
TAPS = (4, 9) if is_deep() else (2, 5)  # of the 30 layers of the bundled target, and of the 6 of the shallow one
"""The drafter below is the last row of the table; and what its config may say instead."""


@pytest.fixture(scope="module")
def block(engine):
    """block(**changes): a drafter of random layers whose lm_head is fitted to its states on the doctor's own prompts,
    with these fields of its spec changed."""
    target = engine.target
    head = random_head(target, "deepspec-dflash", std=0.1, mask_token=BLOCK_MASK, aux_layers=TAPS, windows=(None, 24))
    head.embed_tokens.weight.data.copy_(target.embed.weight)
    drafter = BlockDrafter(head, target)
    head.lm_head.weight.data.copy_(fitted_head(engine, drafter, drafter.plain, 60, TOKENS))
    return lambda **changes: changed_block(drafter, target, **changes)


@deep_cases("taps one later")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "cause", "do"),
    [
        ({"mask_token": WRONG_MASK}, "MASK id", f"mask_token_id: {BLOCK_MASK} "),
        ({"aux_layers": (5, 10)}, "taps", "target_layer_ids: [3, 8] into"),
        ({"shifted": False}, "rows", "sample_from_anchor: true "),
    ],
    ids=["MASK", "taps one later", "rows one earlier"],
)
def test_a_seeded_cause_of_a_block_pair_is_named_and_only_that(changes, cause, do, block, diagnosed):
    found = diagnosed(block(**changes), prompts=None)
    assert causes(found) == [cause]
    [finding] = found.findings
    assert do in finding.do
    assert finding.after > finding.before


def test_advice_about_taps_names_the_key_of_each_format():
    """The key of DFlash's format alone was named, which speculators' format refuses."""
    layout = SimpleNamespace(layers=range(9))
    drafter = SimpleNamespace(spec=SimpleNamespace(aux_layers=(2, 7)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.doctor.causes._changed", lambda pair, what, do, **spec: (do, spec["aux_layers"]))
        later, earlier = taps_of_blocks(drafter, SimpleNamespace(target=SimpleNamespace(layout=layout)))
    assert later[1] == (3, 8) and "target_layer_ids: [2, 7] into" in later[0]
    assert "aux_hidden_state_layer_ids: [3, 8] if it is in speculators' format" in later[0]
    assert earlier[1] == (1, 6)


def test_ids_that_may_be_a_mask():
    class Tokenizer(SimpleNamespace):
        def __len__(self):
            return 90

    tokenizer = Tokenizer(pad_token_id=3, mask_token_id=None, added_tokens_decoder={5: "<|MASK|>", 6: "<eos>"})
    assert possible_masks(tokenizer, SimpleNamespace(eos_token_id=[1, 2]), 96) == [3, 5, 90, 95, 0]
    assert possible_masks(None, SimpleNamespace(pad_token_id=200), 96) == [95, 0]


def test_the_page_of_block_drafters_names_every_pair_with_its_figure():
    """Names that a row of the page shortens, `_8b_`, are looked for by their beginning."""
    page = (Path(__file__).parent.parent / "docs/block_drafters.md").read_text("utf-8")
    for pair in PAIRS_BY_TITLE["published block drafters and their targets"]:
        assert pair.drafter.rpartition("/")[2].partition("_8b_")[0].partition("_14b_")[0] in page, pair
        assert pair.accepts is None or f"{pair.accepts.length}" in page, pair
