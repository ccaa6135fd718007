"""The command line, on the bundled pair: what it prints, as text and as JSON, and how it says no."""

import io
import json
import logging
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from typer.testing import CliRunner

from specdec import Engine, __version__
from specdec.cli.actions.settings import quiet_libraries
from specdec.cli.app import app, main, program
from specdec.cli.commands import ServeOptions
from specdec.config import EngineConfig
from specdec.models.published import BUNDLED_NAMES, PAIRS
from specdec.runtime.request_output import StreamDelta
from specdec.serving.server_settings import ServeSettings

from marks import deep_cases, is_deep, slow
from processes import start

QUESTION = "Tom has 3 apples and buys 5 more. How many apples does he have?"
pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")


def run(*args):
    return CliRunner().invoke(app, list(args))


@pytest.fixture(scope="module")
def answer():
    result = run("generate", QUESTION, "--json", "-", "--max-new-tokens", "24", "--fixed-drafts")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_holds_text_tokens_and_statistics(answer):
    assert answer["prompt"] == QUESTION
    assert answer["text"] and answer["token_ids"]
    assert answer["finish_reason"] in ("stop", "length")
    assert len(answer["drafted"]) == len(answer["token_ids"])
    assert answer["stats"]["acceptance_length"] > 1
    assert len(answer["stats"]["accepted_per_position"]) == 4


LLAMA = ("--shape", "llama-8b", "--layers", "2", "--shrink", "16", "--device", "cpu")
NO_CUDA = "device='cuda' cannot be used"
ASKED_FOR_CUDA = [
    ((*words, "--device", "cuda"), NO_CUDA) for words in (("generate", "x"), ("bench",), ("eval", "gsm8k"))
]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("generate", ""), "the prompt is ''"),
        (("generate", "x", "--target", "no/such/model/here"), "no/such/model/here"),
        (("generate", "x", "--drafter", "./nowhere"), "./nowhere"),
        (("generate", "x", "--temperature", "nan"), "temperature=nan"),
        (("generate", "x", "--top-n-sigma", "nan"), "top_n_sigma=nan"),
        (("generate", "x", "--max-new-tokens", "0"), "max_new_tokens=0"),
        (("generate", "x", "--max-new-tokens", "999999"), "max_model_len"),
        (("generate", "x", "--num-draft-tokens", "9"), "num_draft_tokens=9"),
        (("bench", *LLAMA, "--drafts", "chain,bush"), "'bush' is not one of plain, chain, tree"),
        (("bench", *LLAMA, "--contexts", "200k"), "context=204800 with 50 rounds after it"),
        (("bench", *LLAMA, "--weights", "mxfp4"), "packs experts, and this shape has none"),
        (("bench", *LLAMA, "--weights", "int3"), "weights='int3' is unknown; choose one of bf16, int4-g32"),
        (("bench", *LLAMA, "--weights", "bf16", "--dtype", "fp16"), "contradict each other; give one of them"),
        (("bench", *LLAMA, "--batches", "1,x"), "batches='1,x': positive whole numbers are expected"),
        (("bench", *LLAMA, "--suppose-acceptance", "0.5"), "suppose_acceptance='0.5': numbers from 1 on are expected"),
        (("bench", *LLAMA, "--target", "x"), "--shape makes its own target and drafter"),
        (("bench", "--shape", "gemma5"), "shape='gemma5' is unknown; choose one of gemma4-e2b"),
        (("bench", "--phases", "--layers", "3"), "are for --shape"),
        (("bench", "--weights", "fp8"), "--weights belongs to --shape or --phases"),
        (("bench", "--plot", "o.png"), "--plot belongs to --shape or --phases"),
        (("bench", "--suppose-acceptance", "2"), "--suppose-acceptance belongs to --shape or --phases"),
        (("bench", "--batches", "8"), "--batches belongs to --shape or --phases"),  # it was ignored
        (("bench", "--data-folder", "."), "--data-folder is for gsm8k"),
        (("bench", "--data", "missing.jsonl"), "missing.jsonl"),
        (("bench", "--data", "gsm8"), "data='gsm8': no such file; a JSONL file is expected, or one of gsm8k, mt-bench"),
        (("eval", "gsm8k", "--data", "missing.jsonl"), "missing.jsonl"),
        (("eval", "gsm8k", "--shots", "9"), "shots=9"),
        (("eval", "gsm8k", "--compare", "--drafter", "none"), "drafter"),
        (("generate", "x", "--dtype", "int8"), "dtype='int8': a floating torch.dtype or its name is expected, such as"),
        (("serve", "--target", "/not/there", "--api-key", ""), "API key is empty"),
        (("serve", "--target", "/not/there", "--tool-parser", "poem"), "tool_parser='poem' is unknown"),
        (("serve", "--target", "/not/there", "--served-model-name", ""), "none empty"),
        (("bench", "--json", "--limit"), "'--limit': a file name or '-' is expected"),
        (("bench", "--json", "-x"), "'-x': a file name or '-' is expected"),
        *([] if torch.cuda.is_available() else ASKED_FOR_CUDA),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_mistakes_get_one_sentence_and_exit_code_2(args, says):
    result = run(*args)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("specdec: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (("--version",), 0, f"specdec {__version__}"),
        (("bench", "--limit", "-1"), 2, "greater than or equal to 0"),
        (("eval", "gsm8k", "--limit", "-1"), 2, "greater than or equal to 0"),
        (("eval", "gsm9k"), 2, "'gsm9k' is not one of"),
        (("eval", "mt-bench"), 2, "needs its prompts"),
        (("generate", "x", "--topk", "4"), 2, "No such option: --topk (Possible options: --draft-topk,"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_commands_that_need_no_engine(args, status, says):
    result = run(*args)
    assert (result.exit_code, says in re.sub(r"[\s│]+", " ", result.output)) == (status, True)


def test_a_raw_prompt_has_no_template(answer):
    options = ("--raw", "--dtype", "bf16", "--max-new-tokens", "1", "--drafter", "none")
    other = json.loads(run("generate", QUESTION, "--json", "-", *options).stdout)
    assert "accepted drafts" not in run("generate", QUESTION, "--show-drafts", *options).output
    assert len(other["prompt_token_ids"]) < len(answer["prompt_token_ids"]) and other["drafted"] == [False]


@deep_cases("text")
@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--show-drafts"]], ids=["text", "drafts"])
def test_plain_text_is_the_same_text(options, answer):
    args = ["generate", QUESTION, "--max-new-tokens", "24", "--fixed-drafts", *options]
    result = CliRunner().invoke(app, args, env={"FORCE_COLOR": "1"})
    assert re.sub(r"\x1b\[[\d;]*m", "", result.stdout).strip() == answer["text"].strip()
    green = "".join(re.findall(r"\x1b\[1;32m([^\x1b]*)", result.stdout))
    assert (0 < len(green) < len(answer["text"])) == bool(options)
    assert "acceptance length" in result.stderr and ("from accepted drafts" in result.stderr) == bool(options)
    piped = CliRunner().invoke(app, args)
    marked = "[from accepted drafts]" in piped.stderr and "[" in piped.stdout
    assert piped.stdout.translate({ord("["): None, ord("]"): None}).strip() == answer["text"].strip()
    assert marked == bool(options)


EVAL = ("eval", "gsm8k", "--shots", "1", "--limit", "2", "--max-new-tokens", "8")


@pytest.mark.slow
def test_eval_writes_its_report_three_ways(tmp_path):
    files = {name: str(tmp_path / f"report.{name}") for name in ("json", "markdown", "png")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    result = run(*EVAL, "--compare", "--draft-topk", "2", "--temperature", "0.5", "--seed", "3", *options)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    wanted = {"problems": 2, "compare": True, "topk": 2, "temperature": 0.5, "seed": 3, "max_new_tokens": 8}
    assert {key: report["settings"][key] for key in wanted} == wanted
    assert set(report["runs"]) == {"speculative", "plain"}
    text = (tmp_path / "report.markdown").read_text()
    assert text.startswith("| run | strict accuracy")
    assert result.stdout == ""  # asked for in files
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_eval_says_no_before_it_works(tmp_path, monkeypatch):
    monkeypatch.setattr("specdec.measurement.phase_report.find_spec", lambda name: None)
    no_plots = run(*EVAL, "--png", str(tmp_path / "report.png"))
    assert no_plots.exit_code == 2
    assert "specdec-runtime[plots]" in no_plots.stderr


# what needs no model


LIGHT = [  # what is answered before anything heavy is imported, and its status
    *(([*command, "--help"], 0) for command in ([], *([name] for name in program.commands))),  # of each: with --deep
    (["--version"], 0),
    (["models"], 0),
    (["bench", "--no-such-option"], 2),
    (["bench", "--json", "no/such/folder/report.json"], 2),
]
LIST_MODULES = """
import json, os, sys
from specdec.cli.app import main

said = os.dup(1)
for command in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        sys.argv, status = ["specdec", *command], 0
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        with open(said, "w") as report:
            print(json.dumps([command, status, list(sys.modules)]), file=report, flush=True)
        os._exit(0)
    os.wait()
"""


def test_help_and_shell_errors_import_nothing_heavy():
    """The modules that each command imported, in a fork of a process that has imported what all of them begin with."""
    light = LIGHT if is_deep() else [each for each in LIGHT if len(each[0]) != 2 or each[0][0] == "bench"]
    program = [sys.executable, "-c", LIST_MODULES, json.dumps([command for command, _ in light])]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(command, status) for command, status, _ in runs] == light
    for command, _, loaded in runs:
        assert not {"torch", "transformers", "numpy", "accelerate", "huggingface_hub"}.intersection(loaded), command
        own = {name.removeprefix("specdec.cli.") for name in loaded if name.startswith("specdec.cli.")}
        needed = {"actions", "actions.list_pairs"} if command == ["models"] else set()
        assert own == {"app", "command", "commands", "config_file", "options", "output_files"} | needed, command


def test_models_lists_what_stands_for_something():
    text = run("models").stdout
    assert re.search(r"^tiny-gemma4-mtp +[\d.]+ MB$", text, re.MULTILINE)
    for pair in PAIRS:
        assert f"{pair.target} " in text and f"{pair.drafter} " in text
    listed = json.loads(run("models", "--json", "-").stdout)
    assert set(listed["bundled"]) == set(BUNDLED_NAMES)
    assert all(size["bytes"] > 1e6 for size in listed["bundled"].values())
    assert "gpt-oss-20b" in [pair["name"] for pairs in listed["pairs"].values() for pair in pairs]


@pytest.mark.parametrize("name", program.commands)
def test_a_command_is_listed_with_the_first_line_of_its_help(name):
    first, _, _ = program.commands[name].help.partition("\n\n")
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"})
    assert re.search(rf"│ {name} +{re.escape(first)} ".replace(r"\\", ""), result.stdout)


@pytest.mark.parametrize("settings", [EngineConfig, ServeSettings])
def test_an_option_of_serve_and_the_setting_of_its_name_have_one_default(settings):
    options = {each.name: each.default for each in fields(ServeOptions)}
    shared = {each.name: each.default for each in fields(settings) if each.name in options}
    assert len(shared) > 3
    assert shared == {name: options[name] for name in shared}


# --json FILE means one thing


@deep_cases("bench", "eval")
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("generate", QUESTION, "--max-new-tokens", "4"),
        ("bench", "--limit", "1", "--max-new-tokens", "4"),
        ("models",),
        EVAL,
    ],
    ids=lambda words: words[0],
)
def test_json_goes_to_a_file_next_to_the_text_or_alone_to_standard_output(command, tmp_path):
    path = tmp_path / "out.json"
    printed = run(*command, "--json", str(path))
    assert printed.exit_code == 0, printed.output
    assert not printed.stdout.startswith("{") and len(printed.stdout) > 4
    assert printed.stderr == "" or command[0] == "generate"  # nothing moves there off a terminal
    alone = run(*command, "--json", "-")
    assert set(json.loads(alone.stdout)) == set(json.loads(path.read_text()))


# interrupted, piped, and misused


@pytest.mark.deep
def test_ctrl_c_ends_with_130_and_keeps_what_is_finished(tmp_path):
    """Against the process itself: a signal while it works, the report of before, and the same command again."""
    report, folder = tmp_path / "report.json", tmp_path / "kept"
    report.write_text("before")
    # 200 long answers: on a machine however busy they are not done before four are seen
    args = ["eval", "gsm8k", "--limit", "200", "--batch-size", "1", "--max-new-tokens", "96"]
    command = ["-m", "specdec", *args, "--transcripts", str(folder), "--json", str(report)]
    process = start(command, stdout=PIPE, stderr=PIPE)
    path = folder / "transcripts-0.jsonl"
    while process.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") > 3):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert re.fullmatch(
        r"specdec: interrupted; \d+ of 200 problems are finished, kept in .*: the same command continues\n", err
    )
    assert out.startswith("| run | strict accuracy")  # of what was finished
    assert report.read_text() == "before"


@pytest.mark.slow
def test_ctrl_c_in_a_benchmark_prints_what_all_have_done(monkeypatch):
    calls = []
    generate = Engine.generate

    def interrupted(engine, *args, **kwargs):
        calls.append(engine)
        if len(calls) == 6:  # two warm up, one prompt by both, then the second run of the second prompt
            raise KeyboardInterrupt
        return generate(engine, *args, **kwargs)

    monkeypatch.setattr(Engine, "generate", interrupted)
    result = run("bench", "--limit", "3", "--max-new-tokens", "4")
    assert result.exit_code == 130
    assert result.stderr == "specdec: interrupted; 1 of 3 prompts were measured\n"
    assert "tiny-gemma4, 1 prompt, batch 1" in result.stdout


def test_ctrl_c_while_an_answer_streams_to_a_file_of_both_streams_whose_encoding_lacks_a_character(monkeypatch):
    def stream(engine, *args):
        yield StreamDelta("half an €", [1], [False], None)
        raise KeyboardInterrupt

    both = io.BytesIO()
    monkeypatch.setattr(Engine, "stream", stream)
    monkeypatch.setattr(sys, "argv", ["specdec", "generate", "x"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(both, "latin-1"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(both, "latin-1", write_through=True))
    with pytest.raises(SystemExit, match="130"):
        main()
    assert both.getvalue() == b"half an \\u20ac\nspecdec: interrupted\n"


def test_a_message_of_the_hub_is_logged_once(caplog):
    hub = logging.getLogger("huggingface_hub")
    hub.addHandler(caplog.handler)  # as its own, next to that of the root logger
    quiet_libraries()
    hub.warning("Retrying in 1s")
    assert caplog.messages == ["Retrying in 1s"]


def test_ctrl_c_that_an_import_wraps_is_an_interruption_too(monkeypatch):
    """Python 3.11 makes an exception in the making of a class, as of torch, the cause of a RuntimeError."""

    def importing(engine, *args):
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    monkeypatch.setattr(Engine, "stream", importing)
    result = run("generate", "x")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "\n", "specdec: interrupted\n")


@pytest.mark.parametrize(
    "command", ["models", "generate --help", slow("bench --limit 1 --max-new-tokens 2 --drafter none")]
)
def test_a_closed_pipe_ends_a_command_quietly(command):
    with start(["-m", "specdec", *command.split()], real=command == "models", stdout=PIPE, stderr=PIPE) as process:
        process.stdout.close()  # before anything is written
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_gets_one_sentence_wherever_output_goes():
    for words in ("--version", "generate --help", "models"):
        command = ["-m", "specdec", *words.split()]
        with open("/dev/full", "w") as full, start(command, stdout=full, stderr=PIPE) as process:
            assert process.stderr.read().startswith("specdec: "), words
        assert process.returncode == 2, words


def test_streams_that_the_shell_closed_are_empty_ones():
    closed = 'exec "$0" -m specdec models <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", closed, sys.executable]).returncode == 0


@pytest.mark.parametrize("option", ["--json", "--markdown", "--png"])
def test_a_path_that_cannot_be_written_is_refused_before_the_work(option, tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "from_pretrained", lambda *args, **kwargs: pytest.fail("it began to work"))
    result = run(*EVAL, option, str(tmp_path / "nowhere" / "report"))
    assert result.exit_code == 2
    assert result.stderr.startswith("specdec: ") and "cannot be written: No such file or directory" in result.stderr
    result = run(*EVAL, "--json", str(tmp_path / "a"), "--markdown", str(tmp_path / "a"))
    assert "named for two outputs" in result.stderr


@pytest.mark.slow
def test_a_speed_task_from_the_shell(tmp_path):
    data = tmp_path / "code.jsonl"
    data.write_text(json.dumps({"task_id": "x/0", "prompt": "def add(a, b):\n", "test": "assert add(1, 2) == 3"}))
    picture = tmp_path / "report.png"
    shown = ("--fixed-drafts", "--png", str(picture))  # whether a round drafts depends on no timing
    result = run("eval", "humaneval", "--data", str(data), "--max-new-tokens", "8", *shown)
    assert result.exit_code == 0, result.output
    assert "- speed-up: " in result.stdout
    assert "humaneval: programs are not executed: speed and acceptance only." in result.stdout
    assert "max_batch_size 1;" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    alone = run("eval", "humaneval", "--data", str(data), "--max-new-tokens", "2", "--no-compare")
    assert "speed-up" not in alone.stdout
