"""Native MTP: every draft is what the published forward gives, and the output is the target's own."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import SHAPES, Published, Reference, publish
from safetensors.torch import load_file, save_file
from split_engines import use_peers
from transformers import AutoModelForCausalLM, Exaone4ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import specdec
from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.cli.bodies.settings import load_engine
from specdec.cli.options import PairOptions
from specdec.errors import CheckpointError, ConfigError, UnsupportedModelError
from specdec.layers.decoder import FusedDecoder

from marks import deep, is_deep

OTHERS = ("exaone_moe", "glm4_moe", "deepseek_v3", "ernie", "hy_v3", "mellum", "step3p7", "mimo_v2_flash")
FUSED_FIRST = ("exaone4", "deepseek_v3", "ernie", "step3p7", "mimo_v2_flash")
CHAIN, TREE = {"num_steps": 3}, {"num_steps": 3, "topk": 2, "num_draft_tokens": 9}


class Watched:
    """Each propose of an engine: the committed text with the root, and the tree."""

    def __init__(self, engine: Engine) -> None:
        self.seen: list[tuple[list[int], list[int], list[int]]] = []
        worker, own = engine.round.worker, engine.round.worker.propose

        def propose(batch: Any) -> Any:
            tree = own(batch)
            history = batch.history.tensor if hasattr(batch.history, "tensor") else batch.history
            for i, length in enumerate(batch.history_len.tolist()):
                if int(batch.rows.index[i]) != engine.table.padding_row:
                    self.seen.append((history[i, :length].tolist(), tree.tokens[i].tolist(), tree.parents[i].tolist()))
            return tree

        worker.propose = propose


def assert_published(reference: Reference, seen: list[tuple[list[int], list[int], list[int]]]) -> int:
    """The children of every node are the best of the published forward after it -> nodes that were compared. `make
    test` looks at some 24 drafts."""
    compared = 0
    for text, tokens, parents in seen if is_deep() else seen[:: 1 + len(seen) // 24]:
        for node in range(len(tokens)):
            children = [tokens[i] for i in range(1, len(tokens)) if parents[i] == node]
            if not children:
                continue
            path, at = [], node
            while at:
                path.append(tokens[at])
                at = parents[at]
            logits = reference.logits(text, path[::-1])
            best = logits.topk(len(children)).indices.tolist()
            assert set(best) == set(children), (len(text), node, text, tokens, parents, logits.tolist())
            compared += len(children)
    return compared


def texts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(6) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Published] = {}

    def get(name: str) -> Published:
        if name not in made:
            made[name] = publish(name, tmp_path_factory.mktemp(name), seed=len(made))
        return made[name]

    return get


def engine_of(source: Any, drafter: Any = "mtp", spec: dict[str, Any] | None = None, **settings: Any) -> Engine:
    shape = None if spec is None else SpecConfig(**spec, adaptive=False)
    return Engine.from_pretrained(source, drafter, spec=shape, config=EngineConfig(max_model_len=64, **settings))


PARAMS = SamplingParams(max_new_tokens=9)


def simulated_rounds(reference: Reference, prompt: list[int], output: list[int], num_steps: int) -> int:
    """Rounds after the first token, each with a chain of the published forward."""
    text, at, rounds = [*prompt, *output], len(prompt) + 1, 0
    while at < len(text):
        drafts: list[int] = []
        for _ in range(num_steps):
            drafts.append(int(reference.logits(text[:at], drafts).argmax()))
        accepted = 0
        while accepted < num_steps and at + accepted < len(text) and drafts[accepted] == text[at + accepted]:
            accepted += 1
        at, rounds = at + accepted + 1, rounds + 1
    return rounds


@pytest.mark.parametrize("tree", [deep(False), True])
@pytest.mark.parametrize("name", [deep(n) if n in OTHERS else n for n in SHAPES if n != "glm4_moe-shared"])
def test_drafts_are_those_of_the_published_forward(name: str, tree: bool, published: Any) -> None:
    """Texts shorter than the modules are many, a window shorter than the tree, prompts in chunks; the output is
    plain decoding's."""
    made = published(name)
    prompts = texts(1, (1, 2, 13))
    plain = [out.token_ids for out in engine_of(made.folder, None).generate(prompts, PARAMS)]
    engine = engine_of(made.folder, spec=TREE if tree else CHAIN, prefill_chunk=4)
    assert (engine.drafter.form, len(engine.drafter.modules)) == (made.shape.form, made.shape.count)
    watched = Watched(engine)
    assert [out.token_ids for out in engine.generate(prompts, PARAMS)] == plain
    assert assert_published(Reference(made), watched.seen) > 40


@pytest.mark.parametrize("name", [n if n in FUSED_FIRST else deep(n) for n in SHAPES])
def test_fused_modules_draft_what_the_published_forward_gives(name: str, published: Any) -> None:
    """Every family's block through the table of fused layers: the numbers of its own modules, drafts and output."""
    made = published(name)
    plain, engine = (engine_of(made.folder, spec=TREE, fused=fused, attention="torch") for fused in (False, True))
    assert engine.drafter.unfused is None
    for own, fused in zip(plain.drafter.modules, engine.drafter.modules, strict=True):
        assert isinstance(fused.block, FusedDecoder) and not isinstance(own.block, FusedDecoder)
        torch.testing.assert_close(fused.probed(), own.probed(), atol=1e-5, rtol=1e-4)
    prompts = texts(1, (2, 13))
    watched = Watched(engine)
    expected = engine_of(made.folder, None).generate(prompts, PARAMS)
    assert [out.token_ids for out in engine.generate(prompts, PARAMS)] == [out.token_ids for out in expected]
    assert assert_published(Reference(made), watched.seen) > 30


@pytest.mark.parametrize("name", ["exaone4", "step-form", "mimo_v2-form"])
def test_rounds_are_as_many_as_a_simulation_has(name: str, published: Any) -> None:
    made, prompt = published(name), texts(5, (7,))[0]
    out = engine_of(made.folder, spec=CHAIN).generate([prompt], PARAMS)[0]
    assert out.stats.rounds == simulated_rounds(Reference(made), prompt, out.token_ids, 3)


@pytest.mark.parametrize(
    ("name", "page_size", "chunk", "slots"),
    [("step-form", 1, 1, None), ("glm4_moe-3", 4, 5, 60), deep("mimo_v2-form", 1, 16, 60), deep("exaone4", 4, 1, 60)],
)
def test_carried_rows_follow_prefix_hits_chunks_and_preemption(
    name: str, page_size: int, chunk: int, slots: int | None, published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that other requests had before, hits within and at the end of prompts, chunks of one token."""
    monkeypatch.setenv("SPECDEC_SANITIZE", "1")
    made = published(name)
    shared = texts(2, (12,))[0]
    prompts = [shared[:k] + rest for k, rest in zip((12, 12, 5, 9), texts(3, (1, 3, 2, 1)), strict=True)]
    plain = [out.token_ids for out in engine_of(made.folder, None).generate(prompts, PARAMS)]
    limits = {} if slots is None else {"full_slots": slots}
    engine = engine_of(made.folder, spec=CHAIN, page_size=page_size, prefill_chunk=chunk, max_batch_size=2, **limits)
    watched = Watched(engine)
    for _ in range(2):
        outputs = engine.generate(prompts, PARAMS)
        assert [out.token_ids for out in outputs] == plain
    assert sum(out.stats.cached_tokens for out in outputs) > 0
    assert_published(Reference(made), watched.seen)


@pytest.mark.parametrize("name", ["glm4_moe-shared", "glm4_moe-3", "deepseek_v3"])
def test_first_drafts_equal_transformers(name: str, published: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`MtpModel` of transformers on the same file, logits within 1e-5; its tensors are found by a literal pattern."""
    made = published(name)
    model = AutoModelForCausalLM.from_pretrained(made.folder, attn_implementation="eager")
    num_layers, count = model.config.num_hidden_layers, made.shape.count
    model.config.num_mtp_layers = count
    patterns = [rf"model\.layers\.{num_layers + k}\." for k in range(count)]
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", patterns, raising=False)
    mtp = MtpModel.from_pretrained(model).eval()
    text = texts(4, (9,))[0]
    engine = engine_of(made.folder, spec={"num_steps": count})
    drawn: list[torch.Tensor] = []
    own = engine.drafter.logits
    monkeypatch.setattr(engine.drafter, "logits", lambda k, out: drawn.append(own(k, out)) or drawn[-1])
    watched = Watched(engine)
    engine.generate([text], SamplingParams(max_new_tokens=9))
    committed = watched.seen[0][0]
    with torch.no_grad():
        hidden = model.model(torch.tensor([committed[:-1]]), use_cache=False).last_hidden_state
        ids, positions = torch.tensor([committed[1:]]), torch.arange(1, len(committed))[None]
        cache = MtpCache(config=model.config.get_mtp_config())
        _, logits, _ = mtp(ids, hidden, torch.ones_like(ids), positions, cache)
    for k in range(count):
        torch.testing.assert_close(drawn[k][0, 0], logits[0, k], atol=1e-5, rtol=1e-5)


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


def test_which_modules_a_name_means(published: Any, tmp_path: Path) -> None:
    """auto: those of the checkpoint, else suffix; a folder: its own; none there: which names were looked for."""
    made = published("exaone4")
    tensors = load_file(made.folder / "model.safetensors")
    plain = {key: tensor for key, tensor in tensors.items() if not key.startswith("mtp.")}
    shutil.copy(made.folder / "config.json", tmp_path)
    save_file(plain, tmp_path / "model.safetensors", metadata={"format": "pt"})
    engines = [engine_of(*pair) for pair in ((made.folder, "auto"), (tmp_path, "auto"), (tmp_path, made.folder))]
    assert [engine.drafter.name for engine in engines] == ["mtp", "suffix", "mtp"]
    assert engines[0].spec.num_steps == 3 and engines[2].drafter.source == str(made.folder)
    with pytest.raises(CheckpointError, match=r"no MTP modules there \(looked for mtp\.\*, .*drafter=DIR"):
        engine_of(tmp_path, "mtp")
    packed = tensors | {"mtp.fc.weight": torch.zeros((32, 64), dtype=torch.int8)}
    save_file(packed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"mtp\.fc\.weight is packed \(torch\.int8\)"):
        engine_of(tmp_path, "mtp")
    save_file(
        {k: t for k, t in tensors.items() if k != "mtp.layers.0.mlp.up_proj.weight"}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"tensor mlp\.up_proj\.weight is missing"):
        engine_of(tmp_path, "mtp")


def test_auto_never_refuses_what_ran_before(
    published: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Modules that cannot be used, or several devices: a line in the log, and another drafter."""
    made = published("mimo")
    tensors = load_file(made.folder / "model.safetensors")
    shutil.copy(made.folder / "config.json", tmp_path)
    packed = tensors | {"model.mtp_layers.0.input_proj.weight": torch.zeros((32, 64), dtype=torch.int8)}
    save_file(packed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    use_peers(monkeypatch)
    for folder, ranks in ((tmp_path, 1), (made.folder, 2)):
        settings = {"fused": True, "tensor_parallel": 2, "attention": "torch"} if ranks == 2 else {}
        with caplog.at_level("WARNING"), engine_of(folder, "auto", **settings) as engine:
            assert engine.drafter.name == "suffix"
        assert "drafter='auto': its MTP modules are not used: " in caplog.messages[-1]
    with pytest.raises(ConfigError, match=r"drafter='mtp' with tensor_parallel=2; MTP modules run on one device"):
        engine_of(made.folder, "mtp", **settings)


@pytest.mark.parametrize("topk", [1, 2])
def test_commands_draft_as_deep_as_the_modules_say(topk: int, published: Any) -> None:
    pair = PairOptions(target=str(published("glm4_moe-3").folder), draft_topk=topk)
    with load_engine(pair, EngineConfig(max_model_len=64)) as engine:
        assert (engine.drafter.name, engine.spec.num_steps, engine.spec.topk) == ("mtp", 3, topk)


FORMS = ("exaone4", "glm4_moe-3", "mimo_v2-form")


def test_output_is_that_of_plain_decoding_in_random_cases(published: Any) -> None:
    """Family, draft, pages, chunks, rows, pool and sampling at random: a seeded sample, 300 cases in the deep run."""
    rng = random.Random(11)
    names = [name for name in SHAPES if name != "glm4_moe-shared"] if is_deep() else FORMS
    for case in range(300 if is_deep() else len(FORMS)):
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
        plain = engine_of(made.folder, None, **settings).generate(prompts, drawn)
        drafted = engine_of(made.folder, spec=spec, **settings).generate([*prompts, *prompts[::-1]], drawn)
        expected = [out.token_ids for out in (*plain, *plain[::-1])]
        assert [out.token_ids for out in drafted] == expected, (case, made.shape, spec, settings)
