"""`specdec bench --shape` and `--phases`: what is timed, what is judged, and what is shown of it."""

import functools
import json
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from specdec import SamplingParams, SpecConfig
from specdec.cli.actions import benchmarks as command
from specdec.cli.app import app
from specdec.errors import CapacityError
from specdec.loading.drafter_loading import load_any_drafter
from specdec.measurement import phase_run as run_module
from specdec.measurement import timed_rounds
from specdec.measurement.memory_floor import StepBytes, read_bandwidth
from specdec.measurement.parity import check_parity, output_gaps
from specdec.measurement.phase_report import Cell, PhaseReport, Spread, phase_table
from specdec.measurement.phase_run import BenchSubject, Plan, run_phases
from specdec.measurement.transformers_peer import Peer, peers_for
from specdec.models.target import TargetModel
from specdec.progress import Interrupted

from marks import deep_cases

runner = CliRunner()
SMALL = ("--layers", "2", "--shrink", "16", "--device", "cpu")


measured_bandwidth = functools.cache(read_bandwidth)


@pytest.fixture(autouse=True)
def one_measurement(monkeypatch):
    """The bandwidth of a machine takes half a second to measure, and every run does."""
    monkeypatch.setattr(run_module, "read_bandwidth", measured_bandwidth)


def bench(*words):
    return runner.invoke(app, ["bench", *words])


@pytest.fixture
def subject(make_target, make_assistant):
    """A tiny random pair."""
    model = make_target("gemma4-e2b")
    target = TargetModel(model)
    drafter = load_any_drafter(make_assistant(model), target)
    return BenchSubject(
        name="tiny",
        target=target,
        drafter=drafter,
        drafts={"plain": None, "chain": SpecConfig(2)},
        prompts=lambda batch, context: [
            [(7 * i + 3 * j) % target.vocab_size for j in range(context)] for i in range(batch)
        ],
        assumed=(2.0,),
    )


def plan(**more):
    return Plan(**{"batches": [1], "contexts": [12], "rounds": 4, **more})


# rounds


def test_driven_rounds_give_what_generate_gives(make_target, make_assistant, make_engine):
    model = make_target("gemma4-e2b")
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13]]
    engine = make_engine(model, make_assistant(model), num_steps=2, max_batch_size=2)
    driven = timed_rounds.drive(engine, prompts, 5, 2, profiled=True)
    assert len(driven.rounds) == 5 and driven.uncaptured == 0 and driven.idle is None
    lengths = [len(output) for output in driven.outputs]
    fresh = make_engine(model, None, max_batch_size=2)
    for prompt, output, length in zip(prompts, driven.outputs, lengths, strict=True):
        [plain] = fresh.generate([prompt], SamplingParams(max_new_tokens=length, ignore_eos=True))
        assert output == plain.token_ids
    for one in driven.rounds:
        assert min(one.draft, one.verify, one.other) > 0
        assert one.draft + one.verify + one.other <= one.wall
        assert one.host <= one.wall
    assert 1 <= driven.acceptance_length <= 3


def test_a_request_never_ends_while_it_is_timed(make_target, make_engine):
    model = make_target("llama")
    params = SamplingParams(max_new_tokens=timed_rounds.tokens_of_rounds(4, 0), ignore_eos=True)
    [plain] = make_engine(model).generate([[5, 6, 7]], params)
    driven = timed_rounds.drive(make_engine(model, max_batch_size=2), [[5, 6, 7], [8, 9]], 4, 0, profiled=False)
    assert driven.outputs[0] == plain.token_ids[: len(driven.outputs[0])]
    assert driven.acceptance_length == 1  # a token of each request in each timed round
    assert timed_rounds.tokens_of_rounds(4, 2) == 1 + (6 + 4 + 8 + 4) * 3


def test_the_host_part_is_what_is_not_spent_waiting():
    shares = [0.1, 0.15, 0.05]  # of each of two requests
    before, settled = SimpleNamespace(settled_at=10.0), SimpleNamespace(settled_at=11.0, shares=shares)
    on_gpu, on_cpu = (timed_rounds.round_time(before, settled, 2, waited) for waited in (0.75, None))
    assert on_gpu == (1.0, 0.2, 0.3, 0.1, 0.25)
    assert on_cpu.host == pytest.approx(0.4)


def test_each_round_has_waited_for_its_own_result():
    launches = SimpleNamespace(row_totals=SimpleNamespace(settled_at=0.0), waited_seconds=9.0)

    def step():
        launches.row_totals = SimpleNamespace(settled_at=launches.row_totals.settled_at + 1.0, shares=[0.0] * 3)
        launches.waited_seconds += 0.25

    target, steps = SimpleNamespace(device=torch.device("cuda")), SimpleNamespace(launches=launches)
    engine = SimpleNamespace(target=target, steps=steps, step=step, running_ids=lambda: [1])
    assert [one.host for one in timed_rounds.step_rounds(engine, 2)] == [0.75, 0.75]


def test_gaps_are_counted_within_rounds_and_not_between_them():
    """Two rounds of two stamps, 0 to 5 and 100 to 104, with gaps of 1 and 0.5 in the first and 2 in the second."""
    first = [("_stamp_kernel", 0.0, 1.0), ("a", 2.0, 4.0), ("_stamp_kernel", 4.5, 5.0)]
    second = [("_stamp_kernel", 100.0, 101.0), ("copy", 50.0, 60.0), ("_stamp_kernel", 103.0, 104.0)]
    assert timed_rounds.gaps_between_stamps([*first, *second], 2) == pytest.approx((1.5 + 2.0) / 2)
    assert timed_rounds.gaps_between_stamps([], 2) == 0.0


def test_idle_time_is_what_no_span_covers():
    #      0  1  2  3  4  5  6  7
    #      ####     ##       ##
    #         ###
    assert timed_rounds.idle_within([(1.0, 2.0), (0.0, 1.5), (3.0, 4.0), (6.0, 7.0)]) == pytest.approx(1 + 2)
    assert timed_rounds.idle_within([(0.0, 5.0), (1.0, 2.0), (4.0, 6.0)]) == 0.0
    assert timed_rounds.idle_within([]) == 0.0


# parity


def test_gaps_are_the_distance_to_the_best_in_deviations(make_target, greedy_oracle, hf_forward):
    model = make_target("llama")
    prompt, wrong = [5, 6, 7], 50
    best = greedy_oracle(model, prompt, 1)[0]
    gaps = output_gaps(model, prompt, [best, wrong])
    logits = hf_forward(model, [*prompt, best]).logits[0, -1]
    assert gaps[0] == 0
    assert float(gaps[1]) == pytest.approx(float((logits.max() - logits[wrong]) / logits.std()), rel=1e-4)


def test_gaps_do_not_depend_on_the_chunks_of_the_reference(make_target, monkeypatch):
    model = make_target("gemma4-e2b")
    prompt, output = [i % 90 for i in range(60)], [3, 4, 5]
    whole = output_gaps(model, prompt, output)
    monkeypatch.setattr("specdec.measurement.parity.MAX_CHUNK", 16)  # across windows of 8
    torch.testing.assert_close(output_gaps(model, prompt, output), whole, rtol=1e-4, atol=1e-4)


def test_one_wrong_token_fails(make_target, greedy_oracle):
    model = make_target("llama")
    prompt = [5, 6, 7]
    output = list(greedy_oracle(model, prompt, 5))
    assert check_parity(model, [prompt], [output]).passed
    wrong = [*output[:3], (output[3] + 1) % 96, output[4]]
    failed = check_parity(model, [prompt, prompt], [output, wrong])
    assert not failed.passed
    assert failed.tokens == 10 and failed.exact < 10 and failed.worst > failed.tolerance


def test_a_fault_of_the_engine_fails_parity_and_has_no_figures(subject, monkeypatch):
    """Logits that belong to the token beside: what the engine emits is not what transformers would."""
    head = subject.target.head
    monkeypatch.setattr(subject.target, "head", lambda hidden: head(hidden).roll(1, dims=-1))
    report = run_phases(subject, plan())
    assert [cell.shown for cell in report.cells] == [False, False]
    for cell, record in zip(report.cells, report.as_json()["cells"], strict=True):
        assert cell.note == f"parity failed: {cell.parity.summary}" and " (at most 0.01)" in cell.note
        assert not cell.tokens_per_second and cell.acceptance_length is None
        assert record["ms"] == {} and record["x_floor"] is None and record["floor_ms"] > 0


# cells


def test_a_cell_without_memory_is_a_note_and_the_others_go_on(subject, monkeypatch):
    driven = run_module._time_rounds

    def full(subject, plan, spec, prompts, max_len):
        if len(prompts) == 2:
            raise CapacityError("2 requests take 9 GB, and 1 GB are left")
        return driven(subject, plan, spec, prompts, max_len)

    monkeypatch.setattr(run_module, "_time_rounds", full)
    cells = run_phases(subject, plan(batches=[1, 2])).cells
    assert [cell.shown for cell in cells] == [True, True, False, False]
    assert cells[2].note == "no figure: 2 requests take 9 GB, and 1 GB are left"


def test_a_batch_that_would_have_to_wait_is_refused(make_target, make_engine):
    engine = make_engine(make_target("llama"), max_batch_size=4, max_model_len=64, full_slots=100)
    run_module._require_room(engine, 1, 64)
    with pytest.raises(CapacityError, match=r"4 requests of 64 tokens: .* GB of K/V"):
        run_module._require_room(engine, 4, 64)


def test_a_peer_that_cannot_run_is_a_note(subject, monkeypatch):
    def fails(prompts, steps):
        raise RuntimeError("no such kernel\nand a trace")

    monkeypatch.setattr(run_module, "peers_for", lambda *given: [Peer("transformers, odd", fails)])
    assert run_phases(subject, plan(peer=True)).cells[-1].note == "no figure: RuntimeError: no such kernel"


def test_assisted_generation_takes_as_many_steps_as_it_has_rounds(subject, make_target):
    peers = peers_for(subject.target.model, subject.drafter, 2, 1)
    assert [peer.rows for peer in peers] == [1, 1, 3]
    assert len(peers_for(subject.target.model, subject.drafter, 2, 2)) == 2  # assisted generation has one row
    prompts = subject.prompts(1, 12)
    assert [len(peer.run(prompts, 3)) for peer in peers] == [3, 3, 3]
    forwards = []
    hook = subject.target.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        peers[2].run(prompts, 3)
    finally:
        hook.remove()
    assert len(forwards) in (3 + 4 + 1, 3 + 4 + 2)  # a stamp each, and one more where the last look came before it


def test_ctrl_c_keeps_whole_cells(subject, monkeypatch):
    driven, calls = run_module._time_rounds, []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return driven(*given)

    monkeypatch.setattr(run_module, "_time_rounds", interrupted)
    with pytest.raises(Interrupted, match="1 cells were measured") as stop:
        run_phases(subject, plan())
    assert [cell.run for cell in stop.value.report.cells] == ["plain"]


def test_spreads_are_quantiles_in_milliseconds():
    assert Spread.of([0.001 * i for i in range(11)]) == Spread(*map(pytest.approx, (5.0, 1.0, 9.0)))
    assert Spread.of([0.5]) == Spread(500.0, 500.0, 500.0)


def test_the_table_says_what_is_supposed_and_what_was_shrunk():
    def text(**more):
        times = {"round": Spread(4.0, 3.0, 5.0)}
        cell = Cell(run="plain", batch=1, context=9, ms=times, floor_bytes=StepBytes(1, 0, 0, 0), floor_ms=2.0)
        settings = {"shrunk": "", "assumed": False, "parameters": {}, "weight_bytes": 10**9, "read_bandwidth": 1e12}
        settings["weights"] = "int4-g32, the rest bfloat16"
        report = PhaseReport(subject="a pair", conditions={"device": "x"}, cells=[cell], **{**settings, **more})
        title, _, heads, _, row = phase_table(report).splitlines()
        return title, dict(zip(heads.split(" | "), row.split(" | "), strict=True))

    title, cells = text(shrunk="4 layers", assumed=True)
    assert "SHRUNK to 4 layers: no figures of the published model" in title
    assert "1.00 GB of weights in int4-g32, the rest bfloat16" in title
    assert "are supposed, not measured" in title
    assert (cells["x floor"], cells["ms (p10 to p90)"]) == ("2.00", "4.00 (3.00 to 5.00)")
    title, _ = text()
    assert "SHRUNK" not in title and "supposed" not in title


# the command


def test_a_shape_from_the_shell(tmp_path):
    files = ("--json", str(tmp_path / "o.json"), "--plot", str(tmp_path / "o.png"))
    result = bench("--shape", "gemma4-e4b", *SMALL, "--batches", "1", "--contexts", "24", "--rounds", "2", *files)
    assert result.exit_code == 0, result.output
    assert "SHRUNK to 2 layers, widths / 16" in result.stdout
    record = json.loads((tmp_path / "o.json").read_text())
    assert set(record) == {item.name for item in fields(PhaseReport)}
    assert [(cell["run"], cell["batch"]) for cell in record["cells"]] == [
        (run, 1) for run in ("plain", "chain", "tree")
    ]
    for cell in record["cells"]:
        assert set(cell) == {*(item.name for item in fields(Cell)), "x_floor"}
        assert cell["parity"]["passed"] and cell["ms"]["round"]["median"] > 0
        assert cell["x_floor"] == cell["ms"]["round"]["median"] / cell["floor_ms"]
        assert (cell["break_even"] is None) == (cell["run"] == "plain")
        assert set(cell["floor_bytes"]) == {"weights", "experts", "rows", "kv", "states", "drafts"}
    plain, chain = record["cells"][:2]
    ratio = chain["ms"]["round"]["median"] / plain["ms"]["round"]["median"]
    assert chain["break_even"] == pytest.approx(ratio)
    assert chain["tokens_per_second"]["if AL 2"] == pytest.approx(2e3 / chain["ms"]["round"]["median"])
    assert set(record["cells"][1]["ms"]) == {"round", "draft", "verify", "other", "host"}
    assert set(record["cells"][1]["tokens_per_second"]) == {"if AL 2", "if AL 3"}
    assert record["conditions"]["command"].startswith("specdec")
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("shallow_pair", "bundled_once")
def test_a_pair_from_the_shell():
    words = ("--phases", "--device", "cpu", "--fixed-drafts", "--batches", "2", "--contexts", "12", "--rounds", "2")
    record = json.loads(bench(*words, "--json", "-").stdout)
    assert (record["subject"], record["shrunk"]) == ("tiny-gemma4 with tiny-gemma4-mtp", "")
    assert [(cell["run"], cell["parity"]["passed"]) for cell in record["cells"]] == [("plain", True), ("chain", True)]
    for cell in record["cells"]:
        speed = 2 * cell["acceptance_length"] / (cell["ms"]["round"]["median"] / 1e3)
        assert cell["tokens_per_second"] == {"measured": pytest.approx(speed)}


@deep_cases("qwen3-8b-dspark-fp8-block-Qwen/Qwen3-8B with deepseek-ai/dspark_-fp8, the rest float32")
@pytest.mark.parametrize(
    ("shape", "weights", "draft", "published", "form"),
    [
        ("gpt-oss-20b", "mxfp4", "tree", "openai/gpt-oss-20b with", "mxfp4, the rest float32"),
        ("qwen3-8b-dspark", "fp8", "block", "Qwen/Qwen3-8B with deepseek-ai/dspark_", "fp8, the rest float32"),
    ],
)
def test_packed_weights_and_only_the_drafts_that_were_asked_for(shape, weights, draft, published, form):
    result = bench("--shape", shape, *SMALL, "--weights", weights, "--drafts", draft, "--batches", "1",
                   "--contexts", "8", "--rounds", "2", "--json", "-")  # fmt: skip
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["subject"].startswith(f"random weights ({weights}) at the shape of {published}")
    assert record["weights"] == form
    [cell] = record["cells"]
    assert cell["run"] == draft and cell["parity"]["passed"]
    assert (cell["floor_bytes"]["experts"] > 0) == (shape == "gpt-oss-20b")


def test_a_shape_that_does_not_fit_says_so_before_it_is_made(monkeypatch):
    monkeypatch.setattr("specdec.measurement.random_weights.free_bytes", lambda device: 1 << 30)
    result = bench("--shape", "gemma4-31b", "--device", "cpu")
    assert result.exit_code == 2
    assert "gemma4-31b takes 124.7 GB of weights in float32 and 1.1 GB are free on cpu" in result.stderr


def test_numbers_and_prompts():
    assert command.parse_integers("batches", "8,1, 2k,8") == [1, 8, 2048]
    assert command.parse_numbers("acceptance", "3,2.5") == [2.5, 3.0]
    prompts = [[1, 2, 3], [4, 5]]
    assert command.joined_prompts(prompts, 2, 4) == [[5, 1, 2, 3], [2, 3, 4, 5]]
    assert command.joined_prompts(prompts, 1, 2) == [[2, 3]]
