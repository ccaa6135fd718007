"""Recipes: the page's rows are the code's, the pools are an engine's, times are near those measured, commands run."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec import Engine, EngineConfig
from specdec.cli.app import app, program
from specdec.errors import CapacityError
from specdec.measurement.model_shapes import SHAPES, Shrink
from specdec.measurement.recipes import CARDS, REQUESTS, TOKENS, CardMemory, recipes, row
from specdec.models.described_model import ModelOnMeta, model_on_meta
from specdec.models.published import RECIPES
from specdec.runtime import sizing
from specdec.runtime.sizing import CacheNeeds, DraftNeeds

from marks import deep, deep_cases
from package_files import module_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "recipes.md"
FAMILIES = ("gemma-4", "Qwen3-", "Qwen3.5", "gpt-oss", "Llama", "Mistral", "GLM", "EXAONE", "Mellum2", "Step", "MiMo")
USUAL = ("Llama-3.1-8B", "gpt-oss-20b", "MiMo-7B", "Step-3.7-Flash", "Qwen3.5-9B")
EACH = [name if name in USUAL else deep(name) for name in RECIPES]
MEASURED = {  # milliseconds of a plain step of one request, as docs/results has them
    ("E4B", "H200"): 3.27,
    ("E4B", "H100"): 4.19,
    ("26B-A4B", "H200"): 2.79,
    ("26B-A4B", "H100"): 3.55,
    ("31B", "H200"): 15.66,
    ("Llama-3.1-8B", "H200"): 4.17,
    ("Llama-3.1-8B", "H100"): 5.80,
    ("E4B-QAT", "H200"): 2.37,
    ("31B-QAT", "H200"): 7.85,
    ("gpt-oss-20b", "H200"): 1.69,
    ("gpt-oss-120b", "H200"): 2.42,
    ("Qwen3.5-4B", "H100"): 3.55,
    ("Qwen3.5-9B", "H100"): 6.00,
    ("Qwen3.5-27B", "H100"): 18.67,
}


def run(*words: str):
    return CliRunner().invoke(app, ["recipe", *words])


@pytest.fixture(scope="module")
def figures():
    return module_of(ROOT / "tools" / "recipe_figures.py")


@deep_cases("Step-3.7-Flash")
@pytest.mark.parametrize("name", EACH)
def test_the_bundled_figures_and_the_page_are_those_of_the_code(name, figures):
    found = figures.recipe(RECIPES[name])
    bundled = recipes()[name]
    assert row(bundled) == row(found), "bundled/recipes.json is stale; run `make api`"
    assert (bundled.command, bundled.on_less, bundled.rest) == (found.command, found.on_less, found.rest)
    assert f"|{'|'.join(row(bundled))}|" in PAGE.read_text("utf-8").splitlines(), "it is stale; run `make api`"
    assert found.pair.memory == f"{sum(found.weights.values()) / 1e9:.1f} GB"  # of `specdec models`
    for step in found.steps:
        if (known := MEASURED.get((name, step.gpu))) is not None:
            assert step.measured and step.expected_ms == pytest.approx(known, rel=0.1)
    measured = {step.gpu for step in found.steps if step.measured}
    assert measured >= {gpu for pair, gpu in MEASURED if pair == name}
    for card in found.cards:
        left = found.pair.gpus * card.gigabytes * 1e9 - sum(found.weights.values())
        page_0 = sum(group["token_bytes"] for group in found.groups) if card.pools else 0
        assert sum(card.pools.values()) - page_0 <= max(0.8 * left, 0)
        if card.gigabytes == CARDS[-1] and card.requests == REQUESTS:  # no window is limited
            assert card.pools == {group["name"]: group["batch_bytes"] for group in found.groups}
        assert card.requests * TOKENS <= card.tokens <= REQUESTS * TOKENS


def test_the_page_has_every_recipe_and_each_family_of_the_readme():
    models = re.findall(r"^\|([\w.-]+/[\w.-]+)", PAGE.read_text("utf-8"), re.MULTILINE)
    assert models == [pair.target for pair in RECIPES.values()]
    assert [name for name in FAMILIES if not any(name in model for model in models)] == []
    assert all("/" in pair.drafter or pair.drafter in ("mtp", "suffix") for pair in RECIPES.values())


@pytest.mark.parametrize("name", RECIPES)
def test_a_command_is_one_that_serve_takes(name):
    word, verb, *words = shlex.split(recipes()[name].command)
    assert (word, verb) == ("specdec", "serve")
    program.commands["serve"].make_context("serve", [*words]).close()
    assert words[1] == RECIPES[name].target and words[3] == RECIPES[name].drafter


@pytest.mark.usefixtures("shallow_pair", "bundled_once")
@pytest.mark.parametrize("free", [10**12, 12_000_000, 4_000_000])
def test_pools_are_those_that_an_engine_allocates(free, monkeypatch):
    """With room for all, with windows that take half of it, and with less than a request."""
    monkeypatch.setattr(sizing, "free_bytes", lambda device: free)
    config = EngineConfig(max_batch_size=3, max_model_len=512, device="cpu")
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-eagle3", config=config) as engine:
        drafts = DraftNeeds.from_drafter(engine.drafter, engine.spec)
        sizes = {"max_len": 512, "lookahead": engine.spec.num_nodes, "device_type": "cpu"}
        needs = CacheNeeds(engine.target.layout, drafts, engine.target.dtype, config, **sizes)
        slots = needs.slots_within(config, int(free * 0.25))
        assert engine.cache.bytes_by_group() == {
            kept.name: (count + 1) * each
            for kept, count, each in zip(needs.groups, slots, needs.slot_bytes, strict=True)
        }
        assert (slots == needs.slots) == (free == 10**12)
        half = int(free * 0.25) // (2 * needs.slot_bytes[1])
        assert slots[1] == min(needs.slots[1], half)


def test_states_of_recurrent_layers_leave_less_for_the_pools():
    found = recipes()["Qwen3.5-9B"]
    [states] = [group["batch_bytes"] for group in found.groups if group["name"] == "states"]
    assert [card.pools["states"] for card in found.cards] == [states] * len(CARDS)
    assert sum(found.cards[0].pools.values()) == pytest.approx(0.8 * (24e9 - sum(found.weights.values())), rel=0.01)
    assert found.cards[0].requests < REQUESTS


@pytest.mark.parametrize(
    ("name", "less"),
    [
        ("31B", "31B-QAT"),
        ("E4B-QAT", "E2B-QAT"),
        ("Qwen3-30B-A3B", "Qwen3-8B"),
        ("Qwen3.5-35B-A3B", "Qwen3.5-27B"),
    ],
)
def test_less_is_the_same_model_in_fewer_bits_or_the_next_smaller(name, less):
    found = recipes()
    assert found[name].on_less.startswith(f"`specdec recipe {less}`")
    assert "--tensor-parallel 8" in found["Step-3.7-Flash"].on_less and "int4" in found["MiMo-7B"].on_less


def test_the_shell_prints_a_recipe_by_any_of_its_names():
    report = json.loads(run("llama-3.1-8b", "--json", "-").stdout)
    assert report["pair"]["target"] == "meta-llama/Llama-3.1-8B-Instruct" and report["weights"]["target"] > 16e9
    assert [card["gigabytes"] for card in report["cards"]] == list(CARDS)
    text = run("/models/Llama-3.1-8B-Instruct").stdout
    assert text.startswith("specdec serve --target meta-llama/Llama-3.1-8B-Instruct --drafter yuhuili/")
    for step in report["steps"]:
        assert f"expected {step['expected_ms']:.2f} ms" in text and step["measured"]
    assert "\nneeded  " in text and "\n24 GB " in text
    assert "(measured)" in text and "on a smaller GPU:" in text and f"{report['cards'][0]['tokens']:,}" in text


def test_a_gpu_with_room_for_no_request_of_the_planned_length_has_its_tokens_in_the_table():
    cards = [CardMemory(80, {"full": 9}, 24_000, 2), CardMemory(48, {"full": 1}, 5000, 0), CardMemory(24, {}, 0, 0)]
    cells = row(replace(next(iter(recipes().values())), cards=cards))
    assert cells[4:7] == ("2", "5,000 tokens", "-")


def test_a_table_has_every_recipe_and_says_what_its_columns_are():
    table = run().stdout
    assert "24 GB" in table and all(pair.target in table for pair in RECIPES.values())
    assert "how many of these requests fit; -: the weights leave no room" in table and "milliseconds" in table
    commands = [found.command for found in recipes().values()]
    assert [each["command"] for each in json.loads(run("--json", "-").stdout)] == commands


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("Qwen/Qwen3-14B", "Qwen3-8B"),  # spelled more like Qwen3.5-4B, which is of another family
        ("gemma-4-e2b", "E2B"),
        ("step-3.5", "Step"),
    ],
)
def test_a_model_without_a_recipe_is_told_the_nearest(asked, near):
    result = run(asked)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "there is no recipe" in result.stderr and f"specdec recipe {near}" in result.stderr


@pytest.mark.parametrize(
    ("target", "hinted"), [("Qwen/Qwen3-14B", True), ("no/such-thing-at-all", False), ("x", False)]
)
def test_a_refusal_of_a_model_of_the_hub_names_the_recipe_of_one_that_is_called_like_it(target, hinted, monkeypatch):
    def refuse(*_, **__):
        raise CapacityError("too large")

    monkeypatch.setattr(Engine, "from_pretrained", refuse)
    result = CliRunner().invoke(app, ["generate", "x", "--target", target])
    assert result.exit_code == 2 and "too large" in result.stderr
    assert ("; what runs is `specdec recipe Qwen3-8B`, of Qwen/Qwen3-8B" in result.stderr) == hinted


def test_a_shape_whose_drafter_is_not_made_at_random_is_timed_plainly():
    assert SHAPES["exaone-4.0-32b"].drafts == {} and SHAPES["mistral-small-24b"].drafts.keys() == {"chain", "tree"}
    assert SHAPES["glm-4.7-flash"].drafts.keys() == {"mtp1", "mtp", "tree"}
    words = ["bench", "--shape", "exaone-4.0-32b", "--drafts", "chain", "--layers", "2", "--shrink", "16"]
    assert "'chain' is not one of plain" in CliRunner().invoke(app, words).stderr


def test_layers_of_a_published_mixture_are_measured_as_attention_calls_them():
    """GLM-4.7-Flash expands its latents: a config alone would say that a key has 64 numbers."""
    fields = SHAPES["glm-4.7-flash"].target(Shrink(layers=2))
    [spec, _] = ModelOnMeta("glm", model_on_meta(fields, sizing.torch.bfloat16)).layout.layers
    assert {field.name: (field.heads, field.dim) for field in spec.fields} == {"k": (20, 256), "v": (20, 256)}
