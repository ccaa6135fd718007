"""Native MTP: every draft is what the published forward gives, and the output is the target's own."""

import functools
import json
import random
import re
import shutil
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_drafts import best_paths, paths_of
from mtp_checkpoints import EMBED, FULL, HEAD, SHAPES, SLIDING, Published, Reference, publish
from packed_checkpoints import FORMS as STORED
from packed_checkpoints import quantise, set_config
from safetensors.torch import load_file, save_file
from split_engines import use_peers
from torch import nn
from transformers import AutoModelForCausalLM, Exaone4ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import specdec
from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.cli.actions.settings import load_engine
from specdec.cli.options import PairOptions
from specdec.draft_models.native_mtp.conventions import all_conventions
from specdec.draft_models.native_mtp.mtp_checkpoint import by_config, module_tensors
from specdec.draft_models.native_mtp.mtp_drafter import MtpFamily
from specdec.draft_models.native_mtp.mtp_module import decoder_on_device
from specdec.errors import CheckpointError, ConfigError, UnsupportedModelError
from specdec.layers.decoder import FusedDecoder
from specdec.measurement.transformers_peer import assisted_peer
from specdec.runtime.calls import arguments
from specdec.runtime.drafts.dense_drafts import dense_drafts, record

from marks import deep, deep_cases, examples, is_deep, slow, usual_cases
from proved_models import SHARED
from watched_drafts import Proposal, watch_proposals

SIMULATED = ("exaone4", "step-form", "mimo_v2-form", "ernie", "mimo", "glm4_moe", "glm4_moe-copied")
OTHERS = ("exaone_moe", "deepseek_v3", "kimi_k25", "ernie", "hy_v3", "mellum", "qwen3_5_moe", "qwen3_next")
SAME_DRAFTS = ("glm4_moe-shared", "qwen3-tuned")
OTHERWISE = ("qwen3_5", "step3p7")
FUSED_FIRST = ("exaone4", "qwen3_5", "deepseek_v3", "ernie", "step3p7", "mimo_v2_flash")
NEW = examples(6, 9)
CHAIN, TREE = {"num_steps": 3}, {"num_steps": 3, "topk": 2, "num_draft_tokens": 9}


def assert_published(made: Published, seen: list[Proposal]) -> int:
    """The children of every node are the best of the published forward after it -> nodes that were compared. `make
    test` looks at some 12 drafts."""
    reference, compared = Reference(made), 0
    for draft in seen if is_deep() else seen[:: 1 + len(seen) // 12]:
        children = defaultdict[tuple[int, ...], list[int]](list)
        for path in paths_of(draft)[1:]:
            children[path[:-1]].append(path[-1])
        for path, tokens in children.items():
            logits = reference.logits(draft.text, path)
            best = logits.topk(len(tokens)).indices.tolist()
            assert sorted(best) == sorted(tokens), (draft, path, logits.tolist())
            compared += len(tokens)
    return compared


def drafts_are_published(
    engine: Engine, made: Published, prompts: list[list[int]], least: int, tokens: int = NEW
) -> Any:
    """Token ids of these requests; more than `least` of their drafts were compared with the published forward, or a
    third of that in `make test`."""
    seen = watch_proposals(engine)
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=tokens))
    assert assert_published(made, seen) > examples(least // 3, least)
    return [out.token_ids for out in outputs]


def texts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(6) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[tuple[Any, ...], Published] = {}

    def get(name: str, **fields: Any) -> Published:
        case = name, *fields.items()
        if case not in made:
            made[case] = publish(name, tmp_path_factory.mktemp(name), seed=list(SHAPES).index(name), **fields)
        return made[case]

    return get


@functools.cache
def shared(folder: Path, with_tower: Any) -> Any:
    """The model of a published folder, loaded and proved once. No test changes it. with_tower: its class, if it has a
    tower."""
    model = (with_tower or AutoModelForCausalLM).from_pretrained(folder, attn_implementation="eager").eval()
    SHARED[id(model)] = model
    return model


def engine_of(source: Any, drafter: Any = "mtp", spec: dict[str, Any] | None = None, **settings: Any) -> Engine:
    shape = None if spec is None else SpecConfig(**spec, adaptive=False)
    if isinstance(source, Published):
        with_tower = None if source.shape.tower is None else type(source.model)
        whole = "tensor_parallel" not in settings or with_tower is not None
        source = shared(source.folder, with_tower) if whole else source.folder
    return Engine.from_pretrained(source, drafter, spec=shape, config=EngineConfig(max_model_len=64, **settings))


PARAMS = SamplingParams(max_new_tokens=NEW)


def simulated_rounds(reference: Reference, prompt: list[int], output: list[int], spec: dict[str, int]) -> int:
    """Rounds after the first token, each with a draft of the published forward, no deeper than what is left to ask."""
    text, at, rounds = [*prompt, *output], len(prompt) + 1, 0
    while at < len(text):
        levels = min(spec["num_steps"], len(text) - at - 1)
        size = levels, spec.get("topk", 1), spec.get("num_draft_tokens", 1 + levels) - 1
        (_, paths), accepted = best_paths(reference, text[:at], *size), 0
        while tuple(text[at : at + accepted + 1]) in paths and at + accepted < len(text):
            accepted += 1
        at, rounds = at + accepted + 1, rounds + 1
    return rounds


@deep_cases("mimo_v2-form-spec7", "step-form-spec1")
@pytest.mark.parametrize(
    ("name", "spec"),
    [*((name, TREE) for name in SIMULATED), ("mimo_v2-form", CHAIN), *(deep(name, CHAIN) for name in SIMULATED[:2])],
)
def test_rounds_are_as_many_as_a_simulation_has(name: str, spec: dict[str, int], published: Any) -> None:
    """ERNIE's module has no final norm, MiMo-7B's reads the hidden half first, GLM's holds an embedding and a head: its
    own, or copies of the target's."""
    made = published(name)
    engine = engine_of(made, spec=spec)
    if name.startswith("glm4_moe"):
        [module] = engine.drafter.modules
        assert ((module.embed, module.head) == (None, None)) == (name != "glm4_moe")
    for prompt in texts(5, (7, 1)):
        out = engine.generate(prompt, PARAMS)[0]
        assert out.stats.rounds == simulated_rounds(Reference(made), prompt, out.token_ids, spec)


@pytest.mark.parametrize("tree", [deep(False), True])
@pytest.mark.parametrize(
    "name",
    [
        n if n == "mimo" or n not in {*OTHERS, *SIMULATED[1:], *OTHERWISE} else deep(n)
        for n in SHAPES
        if n not in SAME_DRAFTS
    ],
)
def test_drafts_are_those_of_the_published_forward(name: str, tree: bool, published: Any) -> None:
    """Texts shorter than the modules are many, a window shorter than the tree, prompts in chunks; the output is
    plain decoding's. A module holds no copies of the target's embedding and head."""
    made = published(name)
    prompts = texts(1, (1, 2, 13))
    plain = [out.token_ids for out in engine_of(made, None).generate(prompts, PARAMS)]
    engine = engine_of(made, spec=TREE if tree else CHAIN, prefill_chunk=4)
    assert (engine.drafter.form, len(engine.drafter.modules)) == (made.shape.form, made.shape.count)
    for module in engine.drafter.modules:
        own = () if made.shape.copies else made.shape.parts
        assert (module.embed is not None, module.head is not None) == (EMBED in own, HEAD in own)
    assert drafts_are_published(engine, made, prompts, 40) == plain


@deep_cases("ernie", "mimo_v2_flash")
@pytest.mark.parametrize("name", [n if n in FUSED_FIRST else deep(n) for n in SHAPES if n not in SAME_DRAFTS])
def test_fused_modules_draft_what_the_published_forward_gives(name: str, published: Any) -> None:
    """Every family's block through the table of fused layers: the numbers of its own modules, drafts and output."""
    made = published(name)
    plain, engine = (engine_of(made, spec=TREE, fused=fused, attention="torch") for fused in (False, True))
    assert engine.drafter.unfused is None
    for own, fused in zip(plain.drafter.modules, engine.drafter.modules, strict=True):
        assert isinstance(fused.block, FusedDecoder) and not isinstance(own.block, FusedDecoder)
        torch.testing.assert_close(fused.probed(), own.probed(), atol=1e-5, rtol=1e-4)
    prompts = texts(1, (2, 13))
    expected = engine_of(made, None).generate(prompts, PARAMS)
    assert drafts_are_published(engine, made, prompts, 30) == [out.token_ids for out in expected]


@pytest.mark.parametrize(
    ("row", "said", "recurrent", "like"),
    [
        (0, [SLIDING], (), 1),  # the config's word counts, whatever the row says
        (0, None, (), 0),
        (1, ["chunked_attention"], (), 1),  # the target has no such layer
        (5, None, (), 2),
        (1, None, (1, 2), 0),
    ],
)
def test_modules_attend_like_the_layer_that_their_config_names(
    row: int, said: list[str] | None, recurrent: tuple[int, ...], like: int
) -> None:
    config = SimpleNamespace(layer_types=[FULL, SLIDING, FULL], mtp_layer_types=said)
    layers = [SimpleNamespace(layer=layer, recurrent=layer in recurrent) for layer in range(3)]
    target: Any = SimpleNamespace(user_decoder=SimpleNamespace(config=config), layout=SimpleNamespace(layers=layers))
    assert by_config(MtpFamily(like=row), target).like == like


@deep_cases("kernels")
@pytest.mark.parametrize(
    ("settings", "tokens"),
    [slow({"attention": "triton"}, 4), ({"deterministic": True}, examples(6, 12))],
    ids=["kernels", "in order"],
)
def test_full_attention_modules_do_not_see_rows_before_their_first(
    settings: dict[str, Any], tokens: int, published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows q < k of module k do not exist, for kernels and where keys are added up in order as in plain torch."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    made = published("glm4_moe-3")
    engine = engine_of(made, spec={**TREE, "num_draft_tokens": 7}, **settings)
    drafts_are_published(engine, made, texts(1, (1, 5)), 12, tokens)


@pytest.mark.parametrize(
    ("name", "page_size", "chunk", "slots"),
    [
        ("step-form", 1, 1, None),
        deep("glm4_moe-3", 4, 5, 60),
        deep("mimo_v2-form", 1, 16, 60),
        deep("exaone4", 4, 1, 60),
    ],
)
def test_carried_rows_follow_prefix_hits_chunks_and_preemption(
    name: str, page_size: int, chunk: int, slots: int | None, published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that other requests had before, hits within and at the end of prompts, chunks of one token."""
    monkeypatch.setenv("SPECDEC_SANITIZE", "1")
    made = published(name)
    shared = texts(2, (9,))[0]
    prompts = [shared[:k] + rest for k, rest in zip((9, 9, 5), texts(3, (1, 3, 2)), strict=True)]
    plain = [out.token_ids for out in engine_of(made, None).generate(prompts, PARAMS)]
    limits = {"swa_slots": 99} if slots is None else {"full_slots": slots}
    engine = engine_of(made, spec=CHAIN, page_size=page_size, prefill_chunk=chunk, max_batch_size=2, **limits)
    seen = watch_proposals(engine)
    for _ in range(2):
        outputs = engine.generate(prompts, PARAMS)
        assert [out.token_ids for out in outputs] == plain
    assert sum(out.stats.cached_tokens for out in outputs) > 0
    assert_published(made, seen)


@pytest.mark.parametrize(("name", "chunk"), [("step-form", 1), deep("mimo_v2_flash", 16), deep("step3p7", 1)])
def test_a_hit_in_a_row_that_another_request_had(
    name: str, chunk: int, published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row, pages of 1, a window of 2: the row's carried states are another text's, and the tokens that are read
    again lie before the window of those that follow. Chunks of one token begin again at each."""
    monkeypatch.setenv("SPECDEC_SANITIZE", "1")
    made = published(name, sliding_window=2)
    base, other = texts(7, (7, examples(7, 11)))
    params = SamplingParams(max_new_tokens=5)
    engine = engine_of(made, spec=TREE, page_size=1, prefill_chunk=chunk, max_batch_size=1, swa_slots=99)
    engine.generate(base, params)
    seen, plain = watch_proposals(engine), engine_of(made, None)
    for prompt in ([*base, 1], [*base[:5], 3, 3], base, [*base, 1, 4])[: examples(2, 4)]:
        engine.generate(other, params)
        out = engine.generate(prompt, params)[0]
        assert out.token_ids == plain.generate(prompt, params)[0].token_ids
        assert out.stats.cached_tokens >= 5 - engine.drafter.reread
    assert assert_published(made, seen) > examples(16, 50)


@deep_cases("deepseek_v3")
@pytest.mark.parametrize("name", ["glm4_moe-3", deep("glm4_moe-shared"), "deepseek_v3", "kimi_k25"])
def test_tokens_and_forwards_equal_those_of_transformers_use_mtp(
    name: str, published: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many drafts as it makes: its tokens, in as many forwards of the target. The first draft's logits are
    those of its `MtpModel`, which finds modules by a literal pattern of layers, and not after Kimi's prefix."""
    made, params = published(name), SamplingParams(max_new_tokens=examples(8, 12))
    model, tensors, count = made.loaded(), load_file(made.folder / "model.safetensors"), made.shape.count
    own_names = {key.removeprefix("language_model."): tensor for key, tensor in tensors.items()}
    save_file(own_names, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(made.folder / "config.json", tmp_path)
    model.config.name_or_path, config = str(tmp_path), model.config.get_text_config()
    config.num_mtp_layers = count
    patterns = [rf"model\.layers\.{config.num_hidden_layers + k}\." for k in range(count)]
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", patterns, raising=False)
    with Engine.from_pretrained(
        model, "mtp", spec=SpecConfig(count, adaptive=False), config=EngineConfig(max_model_len=64)
    ) as engine:
        [(name, generate)], seen = assisted_peer(engine, params, count).items(), watch_proposals(engine)
        assert name == "transformers, use_mtp"
        for prompt in texts(8, (9, 4)):
            forwards: list[int] = []
            hook = model.register_forward_pre_hook(lambda *_, seen=forwards: seen.append(1))
            [theirs] = generate([prompt])
            hook.remove()
            ours = engine.generate(prompt, params)[0]
            assert (ours.token_ids, ours.stats.rounds) == (theirs.token_ids, len(forwards) - 1)
    text, mtp = seen[0].text, MtpModel.from_pretrained(model).eval()
    with torch.no_grad():
        hidden = model.get_decoder()(torch.tensor([text[:-1]]), use_cache=False).last_hidden_state
        ids, positions = torch.tensor([text[1:]]), torch.arange(1, len(text))[None]
        _, logits, _ = mtp(ids, hidden, torch.ones_like(ids), positions, MtpCache(config=config.get_mtp_config()))
    torch.testing.assert_close(seen[0].logits, logits[0], atol=1e-5, rtol=1e-5)


def test_generate_takes_use_mtp_and_reads_the_models_folder(published: Any) -> None:
    made = published("exaone4")
    model = Exaone4ForCausalLM.from_pretrained(made.folder)
    ids = torch.tensor(texts(6, (5,)))
    drafted = specdec.generate(model, input_ids=ids, max_new_tokens=8, use_mtp=True)
    assert torch.equal(drafted, specdec.generate(model, input_ids=ids, max_new_tokens=8))
    with pytest.raises(ConfigError, match=r"^use_mtp=True next to drafter='ngram'"):
        specdec.generate(model, "ngram", ids, use_mtp=True)
    made_here = Exaone4ForCausalLM(model.config.__class__(**{**model.config.to_dict(), "_name_or_path": ""}))
    with pytest.raises(CheckpointError, match=r"was not loaded from a checkpoint; give drafter=DIR"):
        specdec.generate(made_here, input_ids=ids, use_mtp=True)


@pytest.mark.parametrize(("asked", "levels"), [deep(None, 3), (2, 2), (20, 3)])
def test_generate_asks_modules_for_at_most_what_they_draft(
    asked: int | None, levels: int, published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More drafts than modules were refused, also if the model's own generation_config has such a number."""
    made = published("glm4_moe-3")
    model, ids, made_with = made.loaded(), torch.tensor(texts(6, (5,))), list[int]()
    plain, fitted = specdec.generate(model, input_ids=ids, max_new_tokens=8), arguments.fitted_spec
    monkeypatch.setattr(
        arguments,
        "fitted_spec",
        lambda spec, drafter: made_with.append((found := fitted(spec, drafter)).num_steps) or found,
    )
    model.generation_config.num_assistant_tokens = asked
    drafted = specdec.generate(model, input_ids=ids, max_new_tokens=8, use_mtp=True)
    assert {*made_with} == {levels} and torch.equal(drafted, plain)


def rewritten(made: Published, folder: Path, dropped: str = " ", **tensors: torch.Tensor) -> Path:
    """The checkpoint in another folder, without tensors whose names begin with `dropped`, and with these more, or in
    the place of its own, a dot as two underscores."""
    shutil.copy(made.folder / "config.json", folder)
    kept = {key: t for key, t in load_file(made.folder / "model.safetensors").items() if not key.startswith(dropped)}
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(kept | named, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_which_modules_a_name_means(published: Any, tmp_path: Path) -> None:
    """auto: those of the checkpoint, else suffix; a folder: its own; none there: which names were looked for."""
    made = published("exaone4")
    rewritten(made, tmp_path, dropped="mtp.")
    engines = [engine_of(*pair) for pair in ((made.folder, "auto"), (tmp_path, "auto"), (tmp_path, made.folder))]
    assert [engine.drafter.name for engine in engines] == ["mtp", "suffix", "mtp"]
    assert engines[0].spec.num_steps == 3 and engines[2].drafter.source == str(made.folder)
    with pytest.raises(CheckpointError, match=r"no MTP modules there \(looked for mtp\.\*, .*drafter=DIR"):
        engine_of(tmp_path, "mtp")


@pytest.mark.cpu
def test_modules_copied_next_to_a_model_are_found(published: Any, tmp_path: Path) -> None:
    """In a file of their own, which the index does not list; they were said to be missing. An adapter is no module."""
    made = published("exaone4")
    tensors = load_file(rewritten(made, tmp_path) / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    own = {key: tensors.pop(key) for key in list(tensors) if key.startswith("mtp.")}
    files = {"model-00001-of-00001": tensors, "mtp": own, "adapter_model": {"base.model.layers.3.enorm": torch.ones(1)}}
    for name, content in files.items():
        save_file(content, tmp_path / f"{name}.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert drafts_are_published(engine_of(tmp_path, spec=CHAIN), made, texts(1, (5,)), 2, 4)


FIRST = "mtp__layers__0__"


CONVENTIONS, INDEX = "mtp_conventions.json", "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("changes", "file", "text", "said"),
    [
        pytest.param(
            {"mtp__fc__weight": torch.zeros((32, 64), dtype=torch.int8)}, "", "", r"fc\.weight is packed", id="packed"
        ),
        pytest.param({"dropped": "mtp.layers.0.mlp.up_proj"}, "", "", r"up_proj\.weight is missing", id="missing"),
        # tables raised in the first round, and a padded head drafted tokens that the target has not
        ({f"{FIRST}embed_tokens__weight": torch.ones(6, 16)}, "", "", r"embed\.weight is \[6, 16\], not \[6, 32\]"),
        ({f"{FIRST}embed_tokens__weight": torch.ones(4, 32)}, "", "", r"embed\.weight is \[4, 32\], not \[6, 32\]"),
        ({f"{FIRST}shared_head__head__weight": torch.ones(9, 32)}, "", "", r"head\.weight is \[9, 32\], not \[6, 32\]"),
        # read as if it were not there, so that modules drafted without their norm
        ({"mtp__final_norm__weight": torch.ones(32)}, "", "", r"mtp\.final_norm\.weight belongs to no part of a"),
        *(({}, INDEX, text, "cannot be read") for text in ("{", "[]", '{"weight_map": {"lm_head.weight": 3}}')),
        # files that a user writes: another layer or type was an IndexError, and "no" was yes
        ({}, CONVENTIONS, "{", "cannot be read: Expecting"),
        ({}, CONVENTIONS, "[]", "cannot be read: .* not list; an object with some of the fields form, normed_state"),
        ({}, CONVENTIONS, '{"carry": 1}', "cannot be read: .* 'carry'; an object with some of the fields"),
        ({}, CONVENTIONS, '{"normed_state": "no"}', "normed_state='no'; a value like True is expected"),
        ({}, CONVENTIONS, '{"like": 1.0}', "like=1.0; a value like -1 is expected"),
        ({}, CONVENTIONS, '{"form": "R"}', "form='R'; the form of several modules is 'C' or 'T'"),
        ({}, CONVENTIONS, '{"like": 3}', "like=3; a layer of the target from 0 to 2 is expected, or -3 to -1"),
    ],
)
def test_modules_that_cannot_be_read_are_refused(
    changes: dict[str, Any], file: str, text: str, said: str, published: Any, tmp_path: Path
) -> None:
    made = published("exaone4")
    rewritten(made, tmp_path, **changes)
    if file:
        (tmp_path / file).write_text(text)
        said = rf"{re.escape(file)}:? {said}"
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said):
        engine_of(made, tmp_path)


def test_a_padded_embedding_of_a_modules_own_is_read(published: Any, tmp_path: Path) -> None:
    table = torch.randn((8, 32), generator=torch.Generator().manual_seed(1))
    engine = engine_of(rewritten(published("exaone4"), tmp_path, mtp__layers__0__embed_tokens__weight=table))
    assert torch.equal(engine.drafter.modules[0].embed.weight.cpu(), table)


def test_a_module_has_the_embedding_and_the_head_under_mtp(published: Any, tmp_path: Path) -> None:
    """`mtp.embed_tokens` and `mtp.lm_head` were not read: the module drafted with the target's."""
    made, random = published("exaone4"), torch.Generator().manual_seed(1)
    own = {part: torch.randn((6, 32), generator=random) for part in (EMBED, HEAD)}
    tables = {"mtp__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4)}  # some exports have them
    rewritten(made, tmp_path, mtp__embed_tokens__weight=own[EMBED], mtp__lm_head__weight=own[HEAD], **tables)
    [(parts, block)] = made.modules
    made = made._replace(folder=tmp_path, modules=[(parts | own, block)])
    assert drafts_are_published(engine_of(made, spec=CHAIN), made, texts(1, (5,)), 2, 4)


def test_a_module_that_is_missing_between_others_is_named(published: Any, tmp_path: Path) -> None:
    """The third was taken for the second."""
    made = published("glm4_moe-3")
    with pytest.raises(CheckpointError, match=r"of its MTP modules up to 2 there is no 1; give a checkpoint"):
        engine_of(made, rewritten(made, tmp_path, dropped="model.layers.3."))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("mellum", {"num_hidden_layers": 1, "layer_types": [SLIDING], "mlp_layer_types": ["sparse"]}),
        ("qwen3_5", {"num_hidden_layers": 3, "layer_types": ["linear_attention", FULL, "linear_attention"]}),
    ],
)
def test_modules_of_a_target_of_other_layers(name: str, layers: dict[str, Any], tmp_path: Path) -> None:
    """A published block is like the second layer, which is not there, or the last, which is recurrent here."""
    made = publish(name, tmp_path, **layers)
    drafts_are_published(engine_of(made, spec=TREE), made, texts(1, (2, 9)), 10)


def test_layers_of_a_longer_model_are_no_modules(published: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A target that was loaded with its first layers, and a tower of many: "auto" warned that modules are not used."""
    made = published("exaone4")
    names = load_file(made.folder / "model.safetensors").keys()
    assert [len(module_tensors([*names, "model.tower.layers.40.fc1.weight"], layers)) for layers in (2, 3)] == [1, 1]
    left = [name for name in names if not name.startswith("mtp.")]
    assert module_tensors(left, 2) == {} != module_tensors(["mtp.layers.0.mlp.up_proj.weight"], 2)
    model = Exaone4ForCausalLM.from_pretrained(made.folder, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    with caplog.at_level("WARNING"):
        assert engine_of(model, "auto").drafter.name == "mtp"
    assert "not used" not in caplog.text


def test_a_finetuned_module_in_speculators_format(published: Any, tmp_path: Path) -> None:
    """Its folder has the module alone, at the top level, and a config of its own; the target's family ships none."""
    made = published("qwen3-tuned")
    tensors = load_file(made.folder / "model.safetensors")
    own = {key.removeprefix("model."): tensor for key, tensor in tensors.items() if "mtp_layers" in key}
    save_file(own, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafts_are_published(engine_of(made, tmp_path, spec=TREE), made, texts(1, (2, 9)), 30)
    with pytest.raises(UnsupportedModelError, match=r"is a qwen3, whose MTP conventions are not known"):
        engine_of(made, "mtp")


def test_quantised_modules_that_cannot_be_read_are_refused(published: Any, tmp_path: Path) -> None:
    """Never drafted with as numbers that they are not: scales that are lacking, modules that were dropped, and plain
    tensors of other shapes next to packed ones."""
    made = published("exaone4")
    folder, _ = quantise(made.folder, STORED["fp8-block"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for dropped, said in (
        (
            "mtp.layers.0.mlp.up_proj.weight_scale_inv",
            r"MTP module 0: the checkpoint lacks .*up_proj\.weight_scale_inv",
        ),
        ("mtp.", r"no MTP modules there .*the base of a finetuned or quantised one"),
    ):
        left = {key: tensor for key, tensor in tensors.items() if not key.startswith(dropped)}
        save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=said):
            engine_of(folder, "mtp")
    for key, part in (
        ("mtp.pre_fc_norm_hidden", "hnorm"),
        ("mtp.layers.0.post_feedforward_layernorm", "post_feedforward_layernorm"),
    ):
        other = tensors | {f"{key}.weight": torch.ones(7)}
        save_file(other, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=rf"{part}\.weight is \[7\], not \[32\]"):
            engine_of(folder, "mtp")


@usual_cases("exaone4-fp8-block-excluded", "glm4_moe-3-int4-g32-packed")
@pytest.mark.parametrize("stored", ["packed", "excluded", "bf16"])
@pytest.mark.parametrize(
    ("name", "form"),
    [("exaone4", "fp8-block"), ("glm4_moe-3", "int4-g32"), deep("glm4_moe-3", "fp8-channel"), deep("exaone4", "gptq")],
)
def test_modules_of_a_quantised_checkpoint_draft_as_their_values_do(
    name: str, form: str, stored: str, published: Any, tmp_path: Path
) -> None:
    """Packed as the target is, with their projections; named on the config's exclude list; or in 16 bits, and no list
    says so. Each against the plain checkpoint of the same values."""
    sizes = {"moe_intermediate_size": 32} if name.startswith("glm") else {}  # int4 is by 32 columns
    made, modules = published(name, **sizes), r"^mtp\.|layers\.[234]\."
    quantised, plain = quantise(made.folder, STORED[form], tmp_path, ignore=None if stored == "packed" else modules)
    files = [folder / "model.safetensors" for folder in (quantised, plain)]
    packed, values = map(load_file, files)
    if stored == "packed":
        for key in [key for key in packed if key.endswith(("fc.weight", "eh_proj.weight"))]:
            written, meant = STORED[form].write(packed.pop(key).numpy())
            packed |= {key.removesuffix("weight") + name: tensor for name, tensor in written.items()}
            values[key] = torch.from_numpy(meant).float()
        if "config_groups" in (config := STORED[form].config):  # formats by the names of modules in the checkpoint
            here, others = config["config_groups"]["group_0"], STORED["fp8-channel"].config["config_groups"]["group_0"]
            groups = {"group_0": {**here, "targets": [r"re:.*\.layers\."]}, "group_1": {**others, "targets": ["re:no"]}}
            set_config(quantised, quantization_config={**config, "config_groups": groups})
    elif stored == "excluded":
        excluded = {
            "ignore": ["re:.*mtp.*", "re:.*layers.[234].*"],
            "modules_to_not_convert": ["mtp", "model.layers.2"],
        }
        set_config(quantised, quantization_config={**STORED[form].config, **excluded})
    else:
        packed |= {key: tensor.bfloat16() for key, tensor in packed.items() if re.search(modules, key)}
        values |= {key: tensor.bfloat16().float() for key, tensor in values.items() if re.search(modules, key)}
    for file, tensors in zip(files, (packed, values), strict=True):
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file, metadata={"format": "pt"})
    drafts, measured, kinds = [], [], []
    for folder in (quantised, plain):
        engine = engine_of(folder, spec=CHAIN, dtype="float32")
        seen = watch_proposals(engine)
        engine.generate(texts(1, (2, 7)), SamplingParams(max_new_tokens=examples(3, 5)))
        drafts.append([each[:3] for each in seen])
        text = record(engine.target, [1], texts(3, (9,))[0])
        measured.append([dense_drafts(each, text, 3).log_p for each in all_conventions(engine.drafter)])
        kinds.append({type(part).__name__ for module in engine.drafter.modules for part in module.modules()})
    assert drafts[0] == drafts[1]
    assert len(measured[1]) == (12 if name == "exaone4" else 6)  # also with blocks like other layers
    # with one scale a row, a product scales its float32 sum, which rounds in another place
    rounding = {"rtol": 1e-5, "atol": 5e-5} if form == "fp8-channel" else {}
    torch.testing.assert_close(*measured, **rounding)
    assert ["PackedLinear" in each for each in kinds] == [stored == "packed", False]


class Int8Linear(nn.Module):
    """A linear layer in whole numbers and one scale, such as bitsandbytes and others put into a model."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.data.abs().max() / 127
        self.weight = nn.Parameter((linear.weight.data / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * self.scale)


def test_modules_of_a_target_in_whole_numbers_stay_floating(published: Any) -> None:
    """They took the dtypes of the target's layers: a RuntimeError with bitsandbytes, or a module of whole numbers."""
    made = published("mimo")
    model = made.loaded()
    for layer in model.model.layers:
        layer.mlp.up_proj = Int8Linear(layer.mlp.up_proj)
    engine = engine_of(model, spec=CHAIN)
    stored = load_file(made.folder / "model.safetensors")["model.mtp_layers.0.mlp.up_proj.weight"]
    assert torch.equal(engine.drafter.modules[0].layer.mlp.up_proj.weight, stored)
    assert drafts_are_published(engine, Published(made.folder, made.shape, model, made.modules), texts(1, (7,)), 8)


def test_auto_never_refuses_what_ran_before(published: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Modules that cannot be used: a line in the log, and another drafter."""
    packed = {"model__mtp_layers__0__input_proj__weight": torch.zeros((32, 64), dtype=torch.int8)}
    rewritten(published("mimo"), tmp_path, **packed)
    with caplog.at_level("WARNING"), engine_of(tmp_path, "auto") as engine:
        assert engine.drafter.name == "suffix"
    assert "drafter='auto': its MTP modules are not used: " in caplog.messages[-1]


def test_only_what_modules_run_of_a_text_model_is_moved_to_their_device(published: Any) -> None:
    """A target that devices share is loaded into host memory, and its modules run on the first device."""
    decoder = published("mimo").loaded().get_decoder()
    made = decoder_on_device(decoder, torch.device("meta"))
    there = {name.split(".")[0] for name, part in made.state_dict(keep_vars=True).items() if part.device.type == "meta"}
    assert there == {"norm"} and made.rotary_emb.inv_freq.device.type == "meta"
    assert made.layers[0].mlp.up_proj.weight is decoder.layers[0].mlp.up_proj.weight
    assert decoder.norm.weight.device.type == "cpu" and decoder_on_device(decoder, torch.device("cpu")) is decoder


@deep_cases("glm4_moe-shared-spec1")
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("glm4_moe-3", CHAIN),
        ("glm4_moe-shared", TREE),
        deep("deepseek_v3", TREE),
        deep("kimi_k25", CHAIN),
        deep("mimo", TREE),
    ],
)
def test_modules_draft_for_a_target_on_two_devices(
    name: str, spec: dict[str, int], published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie on the first device, read with a checkpoint or fitted to a whole target, and draft the same."""
    use_peers(monkeypatch)
    settings: dict[str, Any] = {"max_model_len": 64, "fused": True}
    drafts = []

    def watch(engine: Engine) -> None:
        seen = watch_proposals(engine)
        prompts = texts(1, (2, 7))[: examples(1, 2)]
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=examples(3, 5)))
        drafts.append(([each[:3] for each in seen], [out.token_ids for out in outputs]))

    with engine_of(published(name), spec=spec, fused=True) as whole:
        watch(whole)
        config = EngineConfig(tensor_parallel=2, **settings)
        with Engine(whole.target, whole.drafter, spec=SpecConfig(**spec, adaptive=False), config=config) as engine:
            watch(engine)
    with engine_of(published(name), spec=spec, fused=True, tensor_parallel=2) as engine:
        assert len(engine.target.ranks) == 2
        watch(engine)
    assert drafts[0] == drafts[1] == drafts[2]


@pytest.mark.parametrize("topk", [1, 2])
def test_commands_draft_as_deep_as_the_modules_say(topk: int, published: Any) -> None:
    pair = PairOptions(target=str(published("glm4_moe-3").folder), draft_topk=topk)
    with load_engine(pair, 8, max_model_len=64) as engine:
        assert (engine.drafter.name, engine.spec.num_steps, engine.spec.topk) == ("mtp", 3, topk)


@pytest.mark.deep
def test_output_is_that_of_plain_decoding_in_random_cases(published: Any) -> None:
    """Family, draft, pages, chunks, rows, pool and sampling at random. A sample of `make test` is among the drafters
    of test_drafters."""
    rng = random.Random(11)
    names = [name for name in SHAPES if name not in SAME_DRAFTS]
    for case in range(300):
        made = published(names[case % len(names)])
        most = 3 if made.shape.form != "R" else 5
        topk = rng.choice((1, 1, 2, 3))
        spec = {"num_steps": rng.randint(1, most), "topk": topk}
        settings = {
            "page_size": rng.choice((1, 2, 4)),
            "prefill_chunk": rng.choice((1, 3, 16)),
            "max_batch_size": rng.randint(1, 4),
            "deterministic": rng.random() < 0.2,
            **rng.choice(({}, {"full_slots": 96})),
        }
        shared = texts(case, (10,))[0]
        prompts = [shared[: rng.choice((0, 5, 10))] + rest for rest in texts(case + 1, (1, 3, 8, 2))]
        drawn = SamplingParams(max_new_tokens=9, temperature=rng.choice((0.0, 0.8)), seed=case)
        plain = engine_of(made, None, **settings).generate(prompts, drawn)
        drafted = engine_of(made, spec=spec, **settings).generate([*prompts, *prompts[::-1]], drawn)
        expected = [out.token_ids for out in (*plain, *plain[::-1])]
        assert [out.token_ids for out in drafted] == expected, (case, made.shape, spec, settings)
