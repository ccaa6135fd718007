"""Every program in examples/ runs on the bundled models and says what a reader can verify; a difference is an error.

They run in this process, as `python examples/NAME ARGS` would, so that torch is imported once. A new program without
an entry in RUNS or ELSEWHERE fails.
"""

import importlib
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from specdec import Engine, EngineConfig
from specdec.errors import ConfigError
from specdec.models.published import HELD_OUT_PROBLEMS
from specdec.training.target_answers import read_prompt_file

from marks import deep, deep_cases
from processes import run as start_program

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text("utf-8"))

# program -> runs of it: (arguments, a pattern that the output must have)
RUNS: dict[str, list[tuple[str, str]]] = {
    "demo.py": [("--count 1", r"identical to plain decoding: yes, speed-up [\d.]+x")],
    "tree_walkthrough.py": [("", r"accepted path \[\d.*\], bonus .*: \d tokens from one target forward")],
    "gemma4_mtp.py": [
        ("", r"3\*12=36.*\n.*36-7=29.*\n#### 29\n\d+ tokens, \d+ of them accepted drafts"),
        (
            "--compare --draft-topk 3 --nodes 10 --steps 5 --prompt one --prompt two --max-new-tokens 24 "
            "--temperature 0.8 --seed 3",
            r"(?s)^one\n.*\ntwo\n.*identical to plain decoding: yes, \d+ tokens/s, speed-up [\d.]+x",
        ),
    ],
    "eagle3.py": [
        ("", r"\d+ tokens, \d+ of them accepted drafts"),
        ("--compare --draft-topk 4 --nodes 16 --max-new-tokens 48", r"identical to plain decoding: yes"),
    ],
    "hf_drop_in.py": [
        ("", r"identical to model.generate: yes"),
        ("--assistant suffix --max-new-tokens 8", r"identical to model.generate: yes"),
    ],
    "batch_stream.py": [
        ("", r"8 answers, at most 4 at a time: \d+ tokens"),
        (
            "--compare --limit 3 --batch-size 2 --max-new-tokens 40",
            r"identical to plain decoding: yes, \d+ tokens/s, speed-up [\d.]+x",
        ),
    ],
    "gsm8k.py": [("--limit 4", r"(?i)accuracy")],
}
ELSEWHERE = {
    "ray_serve.py": "test_ray_serve.py runs it, with SPECDEC_RAY=1",
    "self_prompts.py": "test_a_model_writes_different_prompts_that_training_reads",
    "train_tiny_gemma4.py": "needs a GPU for an hour; made the bundled target once",
    "word_problems.py": "test_the_held_out_problems_are_made_again",
}
COMPARING = (
    "demo.py --count 1",
    deep("gemma4_mtp.py --compare"),
    deep("eagle3.py --compare"),
    "hf_drop_in.py --max-new-tokens 32",
    deep("batch_stream.py --compare --limit 3 --batch-size 2 --max-new-tokens 40"),
)

pytestmark = [
    pytest.mark.usefixtures("shallow_pair", "bundled_once"),
    pytest.mark.skipif(not EXAMPLES.exists(), reason="needs the checkout"),
]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Runs a program in a folder of its own: (exit code, standard output, standard error)."""

    def run_program(name: str, *args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [name, *args])
        code = 0
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        out, err = capsys.readouterr()
        return code, out, err

    monkeypatch.syspath_prepend(str(EXAMPLES))  # a script finds its neighbours
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return run_program


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@deep_cases("gemma4_mtp.py", "batch_stream.py", "hf_drop_in.py", "gsm8k.py", "eagle3.py")
@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_runs_and_says_what_it_should(name, run, request):
    if name in ELSEWHERE:
        pytest.skip(ELSEWHERE[name])
    if name == "gemma4_mtp.py":  # its answer is the right one
        request.getfixturevalue("whole_pair")
    assert name in RUNS, f"examples/{name} has no entry in RUNS; add arguments and a line to look for"
    for args, pattern in RUNS[name]:
        code, out, err = run(name, *args.split())
        assert code == 0, err
        assert re.search(pattern, out), out


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_has_help_and_usage_lines(name, run):
    code, out, _ = run(name, "--help")
    assert code == 0
    assert out.lstrip().lower().startswith("usage:")
    assert f"python examples/{name}" in (EXAMPLES / name).read_text("utf-8").split('"""')[1]


@pytest.mark.slow
def test_a_script_starts_from_any_folder(tmp_path):
    done = start_program([str(EXAMPLES / "gemma4_mtp.py"), "--max-new-tokens", "8"], cwd=tmp_path)  # not the checkout
    assert done.returncode == 0, done.stderr
    assert "acceptance length" in done.stdout


def test_the_held_out_problems_are_made_again(run, tmp_path):
    code, out, err = run("word_problems.py", "--heldout", "--out", str(tmp_path / "again.jsonl"))
    assert code == 0, err
    assert out.startswith("200 problems")
    assert (tmp_path / "again.jsonl").read_text("utf-8") == HELD_OUT_PROBLEMS.read_text("utf-8")


@pytest.mark.slow
def test_a_model_writes_different_prompts_that_training_reads(run, module):
    program, prompts = module("self_prompts"), Path("prompts.jsonl")
    arguments = "--target tiny-gemma4 --count 3 --batch 4 --out prompts.jsonl"
    code, out, err = run("self_prompts.py", *arguments.split())
    assert code == 0, err
    assert re.search(r"prompts.jsonl: 3 prompts of \d+ turns", out), out
    texts = [chat[-1]["content"] for chat in read_prompt_file(prompts)]
    assert len(set(texts)) == 3 and all(len(text) >= program.SHORTEST for text in texts)
    with Engine.from_pretrained("tiny-gemma4", None, config=EngineConfig(max_batch_size=1)) as engine:
        prefix = program.user_turn(engine)
        assert engine.chat_prompt("Tom has 3 pens.")[: len(prefix)] == prefix
        engine.tokenizer.chat_template = None
        with pytest.raises(ConfigError, match="has no chat template"):
            program.user_turn(engine)


@deep_cases("demo.py --count 1")
@pytest.mark.slow
@pytest.mark.parametrize("command", COMPARING)
def test_a_difference_is_an_error(command, run, monkeypatch):
    whole = Engine._make_requests

    def cut_short(engine, prompts, params):
        requests = whole(engine, prompts, params)
        for request in requests:
            if engine.drafter is not None:
                request.max_total_len = len(request.prompt) + 10
        return requests

    monkeypatch.setattr(Engine, "_make_requests", cut_short)
    code, out, _ = run(*command.split())
    assert code == 1
    assert re.search(r"identical to (plain decoding|model.generate): NO", out)


def test_a_comparison_without_drafts_has_no_speed_up(run):
    """Two runs without drafts were said to have a speed-up of 0.95 or 1.04."""
    code, out, _ = run("gemma4_mtp.py", "--drafter=none", "--compare", "--max-new-tokens=3")
    assert code == 0
    assert re.search(r"identical to plain decoding: yes, \d+ tokens/s, no speed-up: no drafts were made\n$", out)


@pytest.mark.parametrize("name", ["gemma4_mtp", "eagle3"])
def test_the_table_of_models_is_the_one_in_the_docstring(name, run, module):
    code, out, _ = run(f"{name}.py", "--models")
    assert code == 0
    assert out in module(name).__doc__


@pytest.mark.parametrize(
    ("model", "drafter", "want"),
    [
        ("E4B", None, ("google/gemma-4-E4B-it", "google/gemma-4-E4B-it-assistant", 4)),
        ("e2b", None, ("google/gemma-4-E2B-it", "google/gemma-4-E2B-it-assistant", 2)),
        ("google/gemma-4-31B-it", None, ("google/gemma-4-31B-it", "google/gemma-4-31B-it-assistant", 8)),
        ("/models/gemma-4-31B-it/", "/models/a", ("/models/gemma-4-31B-it/", "/models/a", 8)),
        ("12B", "ngram", ("google/gemma-4-12B-it", "ngram", 4)),
        ("./mine", "./head", ("./mine", "./head", 4)),
    ],
)
def test_short_names_hub_ids_and_folders_find_their_pair(model, drafter, want, module):
    pair = module("compare_pair").find_pair(module("gemma4_mtp").PAIRS, model, drafter)
    assert (pair.target, pair.drafter, pair.num_steps) == want


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("gemma4_mtp.py --model nobody", "--model 'nobody' is not in the table (tiny-gemma4, E2B, E4B, 12B, 26B-A4B"),
        ("eagle3.py --drafter ./nowhere", "'./nowhere' is not a folder"),
        ("gemma4_mtp.py --temperature nan", "temperature=nan"),
        ("batch_stream.py --batch-size 0", "max_batch_size=0"),
        ("batch_stream.py --data missing.jsonl", "missing.jsonl"),
        ("batch_stream.py --limit -1", "limit=-1"),
        ("gsm8k.py --limit -1", "limit=-1"),
        ("gsm8k.py --drafter ./nowhere --limit 1", "./nowhere"),
        ("demo.py --count -1", "--count -1"),
        ("eagle3.py --steps 0", "num_steps=0"),
        ("hf_drop_in.py --max-new-tokens 0", "--max-new-tokens 0"),
        ("hf_drop_in.py --assistant mtp", "no MTP modules there"),
        ("word_problems.py --out a.jsonl --count -3", "--count -3"),
        ("word_problems.py --out none/a.jsonl --count 1", "none/a.jsonl"),
        ("self_prompts.py --target tiny-gemma4 --out a.jsonl --count 0", "--count 0"),
        ("self_prompts.py --target tiny-gemma4 --out a.jsonl --batch 0", "max_batch_size=0"),
        ("tree_walkthrough.py --nodes 1", "num_draft_tokens=1"),
        ("eagle3.py --topk 4", "unrecognized arguments: --topk 4"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(command, says, run):
    code, _, err = run(*command.split())
    assert code == 2
    assert says in err.splitlines()[-1]
