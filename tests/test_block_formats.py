"""Block drafters on disk: every published family is read as its own code computes it.

`test_refused_drafters.py` has what is refused.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from block_heads import written_block
from block_reference import Checkpoint, accepted_lengths, draft
from drafter_folders import DRAFTED, PUBLISHED, VOCAB, change_drafter, narrow, published_target, read_drafter
from transformers import MuseGlimmerAssistantModel, MuseGlimmerConfig, MuseGlimmerForConditionalGeneration
from transformers.cache_utils import DFlashCache

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.block.block_checkpoint import read_block
from specdec.draft_models.block.block_drafter import BlockDrafter, block_drafter
from specdec.draft_models.checkpoints.drafter_formats import is_block_config, is_eagle3_config
from specdec.loading.drafter_loading import load_any_drafter
from specdec.measurement.model_shapes import SHAPES, Shrink
from specdec.models.target import TargetModel
from specdec.modules.transformers_names import cache_argument

from marks import examples, slow, usual_cases
from proved_models import SHARED
from tiny_families import spread
from watched_drafts import Proposal, watch_proposals

FIRST_SLIDES = {"transformer_layer_config.layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture
def narrow_target(make_target: Callable[..., Any]) -> Callable[[int], Any]:
    """A random model of this many layers, whose tokens are few enough to be guessed now and then.

    In float64, and so is what drafts for it: in float32 the states of forty random layers depend so much on how a
    prompt is cut that two computations of the same logits differ by 1e-4.
    """

    def make(layers: int) -> Any:
        return make_target("qwen3", vocab_size=VOCAB, num_hidden_layers=layers, fresh=True).double()

    return make


def accepted_in(seen: list[Proposal]) -> list[int]:
    """Tokens of each round but the last, the target's own included."""
    return [len(after.text) - len(before.text) for before, after in itertools.pairwise(seen)]


@usual_cases(  # others have another width of block, other layers, or the same head without its successor
    *("z-lab/gpt-oss-20b-DFlash", "JetSpec/jetspec-qwen3-8b", "DSpark, gated", "DSpark, rnn"),
    *("meta-models/Muse-Glimmer-30B-assistant", "speculators, dflash, sliding", "speculators, dspark, sliding"),
)
@pytest.mark.parametrize(
    "name", [name if name in ("DSpark, gated", "z-lab/gpt-oss-20b-DFlash") else slow(name) for name in PUBLISHED]
)
def test_first_block_and_accepted_lengths_are_those_of_the_definition(
    name: str, tmp_path: Path, narrow_target: Callable[[int], Any], random_prompt: Callable[..., list[int]]
) -> None:
    model = narrow_target(narrow(name, tmp_path))
    checkpoint, prompt = Checkpoint.at(tmp_path), random_prompt(11, vocab=VOCAB)
    want, lengths = accepted_lengths(checkpoint, model, prompt, examples(5, 40))
    drafter, config = block_drafter(tmp_path, TargetModel(model)), EngineConfig(max_model_len=160, prefill_chunk=4)
    with Engine(TargetModel(model), drafter, spec=SpecConfig(drafter.spec.num_drafts), config=config) as engine:
        seen = watch_proposals(engine)
        out = engine.generate([prompt], SamplingParams(max_new_tokens=examples(18, 80), ignore_eos=True))[0]
    first = draft(checkpoint, model, [*prompt, out.token_ids[0]])
    drafted = slice(None) if drafter.target_ids is None else drafter.target_ids
    torch.testing.assert_close(seen[0].logits[:, drafted].double(), first.logits, atol=2e-5, rtol=2e-5)
    assert out.token_ids[: len(want)] == want
    assert accepted_in(seen)[: len(lengths)] == lengths


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
    codes = torch.randn(VOCAB, 4, generator=torch.Generator().manual_seed(1))
    codes = codes / codes.norm(dim=-1, keepdim=True)
    successors = {"markov_head.markov_w1.weight": codes, "markov_head.markov_w2.weight": codes.roll(1, 0)}
    change_drafter(tmp_path, {"lm_head.weight": torch.zeros(VOCAB, 32), **successors})
    drafter = block_drafter(tmp_path, TargetModel(model))
    with Engine(TargetModel(model), drafter, spec=SpecConfig(7), config=EngineConfig(max_model_len=128)) as engine:
        seen = watch_proposals(engine)
        out = engine.generate([[0, 1, 2]], SamplingParams(max_new_tokens=25, ignore_eos=True))[0]
    assert out.token_ids == [(3 + i) % VOCAB for i in range(25)]
    assert accepted_in(seen) == [8, 8]
    assert accepted_lengths(Checkpoint.at(tmp_path), model, [0, 1, 2], 17)[1] == [8, 8]


@pytest.mark.slow
def test_a_drafter_of_transformers_is_what_its_own_module_computes(
    tmp_path: Path, random_prompt: Callable[..., list[int]]
) -> None:
    """With the target that it is published for, whose embeddings are normed and the block's are not."""
    text = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 12, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "eos_token_id": None}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    torch.manual_seed(0)
    config = MuseGlimmerConfig(text_config=text, vision_config=vision)
    model = spread(MuseGlimmerForConditionalGeneration(config).eval())
    SHARED[id(model)] = model
    narrow("meta-models/Muse-Glimmer-30B-assistant", tmp_path)
    reference = MuseGlimmerAssistantModel.from_pretrained(tmp_path).eval()
    prompt, size, answers = random_prompt(11, vocab=VOCAB), reference.config.block_size, []
    for spec in (SpecConfig(size - 1), SpecConfig(size - 1, topk=3, num_draft_tokens=12), None):
        drafter = None if spec is None else block_drafter(tmp_path, TargetModel(model))
        with Engine(TargetModel(model), drafter, spec=spec, config=EngineConfig(max_model_len=96)) as engine:
            seen = [] if drafter is None else watch_proposals(engine)
            params = SamplingParams(max_new_tokens=examples(8, 40), ignore_eos=True)
            answers.append(engine.generate([prompt], params)[0].token_ids)
        if drafter is None:
            continue
        table, block = model.get_input_embeddings(), torch.tensor([[answers[-1][0]] + [VOCAB - 1] * (size - 1)])
        with torch.no_grad():
            states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
            taps = torch.cat([states[i + 1] for i in reference.config.target_layer_ids], dim=-1)
            cache = DFlashCache(config=reference.config)
            cache.set_previous_accepted_tokens(len(prompt))
            embeds = torch.nn.functional.embedding(block, table.weight)
            out = reference(embeds, taps, **cache_argument(reference, cache)).last_hidden_state
            torch.testing.assert_close(seen[0].logits, model.lm_head(out[0, 1:]), atol=1e-5, rtol=1e-5)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    ("config", "block", "eagle"),
    [
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, True, False),
        ({"model_type": "qwen3", "dflash_config": {"mask_token_id": 4}}, True, False),
        ({"architectures": ["Qwen3DSparkModel"]}, True, False),
        ({"architectures": ["DFlash2DraftModel"]}, True, False),
        ({"speculators_model_type": "dflash"}, True, False),
        ({"speculators_model_type": "xpress"}, True, False),
        ({"speculators_model_type": "peagle"}, False, True),
        ({"architectures": ["PEagleDraftModel"], "model_type": "llama"}, False, True),
        ({"model_type": "muse_glimmer_assistant"}, True, False),
        ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 9}, False, True),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, False, True),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, False, True),
        ({"architectures": ["EagleSpeculator"], "speculators_model_type": "eagle"}, False, False),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, False, False),
        ({"model_type": "gemma4_assistant"}, False, False),
    ],
)
def test_configs_are_told_apart(config: dict[str, Any], block: bool, eagle: bool) -> None:
    assert (is_block_config(config), is_eagle3_config(config)) == (block, eagle)


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        ("qwen3-8b-dflash", "z-lab/Qwen3-8B-DFlash-b16"),
        ("qwen3-8b-dspark", "deepseek-ai/dspark_qwen3_8b_block7"),
    ],
)
def test_a_shape_is_what_its_drafter_is_read_as(shape: str, published: str, tmp_path: Path) -> None:
    """Apart from widths, which `narrow` reduces; the default draft is the whole block."""
    narrow(published, tmp_path)
    read, made = read_drafter(published, tmp_path), SHAPES[shape].drafter(SHAPES[shape].target(Shrink()), Shrink())
    same = ("aux_layers", "windows", "block_size", "causal", "shifted", "owns_embed", "successor", "rope", "qk_norm")
    assert [getattr(made, name) for name in same] == [getattr(read, name) for name in same]
    assert SHAPES[shape].drafts["block"].num_steps == read.num_drafts


@pytest.mark.parametrize(
    ("name", "kinds", "windows"),
    [
        ("DFlash, sliding", {}, (6, 6, 6, 6, None)),
        ("speculators, dflash, sliding", {}, (6, 6)),
        ("speculators, dspark, sliding", FIRST_SLIDES, (6, None)),
        ("meta-models/Muse-Glimmer-30B-assistant", {}, (6, 6)),
    ],
)
def test_a_key_at_the_edge_of_a_window_is_visible_as_the_format_says(
    name: str, kinds: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    """The window of DFlash's config is 6, that of the others 5."""
    narrow(name, tmp_path)
    assert read_drafter(name, change_drafter(tmp_path, kinds)).windows == windows


def test_a_block_of_one_row_drafts_if_its_first_row_does(tmp_path: Path) -> None:
    name = "deepseek-ai/dspark_qwen3_8b_block7"
    narrow(name, tmp_path)
    assert read_drafter(name, change_drafter(tmp_path, {"block_size": 1})).num_drafts == 1


def test_logits_are_capped_as_the_config_says(tmp_path: Path) -> None:
    """The key was accepted, and ignored unless the layers were Gemma 4's."""
    narrow("z-lab/Qwen3-8B-DFlash-b16", tmp_path)
    change_drafter(tmp_path, {"final_logit_softcapping": 30})
    assert read_drafter("z-lab/Qwen3-8B-DFlash-b16", tmp_path).softcap == 30.0


@pytest.mark.parametrize(
    ("name", "stated", "drafts"),
    [
        ("speculators, dspark", None, 5),  # exports from before the key; they were read as from the anchor
        ("speculators, dspark", True, 6),
        ("speculators, dflash", None, 7),
        ("deepseek-ai/dspark_qwen3_8b_block7", None, 7),
        ("deepseek-ai/dspark_qwen3_8b_block7", False, 6),  # the key was refused outside of speculators' format
        ("deepseek-ai/dspark_gemma4_12b_block7", False, 6),
        ("z-lab/Qwen3-8B-DFlash-b16", None, 15),
    ],
)
def test_the_first_row_drafts_if_the_config_or_its_publisher_says_so(
    name: str, stated: bool | None, drafts: int, tmp_path: Path
) -> None:
    narrow(name, tmp_path)
    change_drafter(tmp_path, {"sample_from_anchor": stated})
    assert read_drafter(name, tmp_path).num_drafts == drafts


def test_a_drafter_of_few_tokens_knows_the_targets_ids_of_them(tmp_path: Path) -> None:
    narrow("speculators, dflash", tmp_path)
    head = read_block(tmp_path, published_target("speculators, dflash"))
    assert head.target_ids is not None and torch.equal(head.target_ids, DRAFTED)


@pytest.mark.parametrize("kind", ["dflash", "jetspec"])
def test_what_is_written_is_read(kind: str, tmp_path: Path, make_target: Callable[..., Any]) -> None:
    model = make_target("qwen3")
    head = written_block(tmp_path, model, kind)
    read = read_block(tmp_path, TargetModel(model))
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
        table, lm_head = model.get_input_embeddings().weight, model.lm_head.weight
        change_drafter(tmp_path, {"embed_tokens.weight": table.detach(), "lm_head.weight": lm_head.detach()})
    head = block_drafter(tmp_path, TargetModel(model)).head
    assert (head.embed_tokens is None, head.lm_head is None) == (same, same)


def test_a_head_with_a_bias_is_no_copy_of_the_targets(make_target: Callable[..., Any], tmp_path: Path) -> None:
    narrow("deepseek-ai/dspark_qwen3_8b_block7", tmp_path)
    model = make_target("qwen3", vocab_size=VOCAB, num_hidden_layers=36)
    change_drafter(tmp_path, {"lm_head.weight": model.lm_head.weight.detach(), "lm_head.bias": torch.ones(VOCAB)})
    assert block_drafter(tmp_path, TargetModel(model)).head.lm_head is not None
