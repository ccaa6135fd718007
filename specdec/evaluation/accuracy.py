"""Runs a task with a drafter, without one, or (`compare`) both in one run on the same problems.

Problems are cut into fixed batches, and batches are dealt to the processes of `accelerate launch`. Every finished turn
is a line of a file, a transcript. So a kill, or another number of processes, changes only the timings: a killed
evaluation resumes from the transcripts, and a larger one reuses them. A folder holds one file per process; the first
line of a file holds its settings, and each further line names the batch it was made in. Invariant: reused turns are
those that the present settings would give again; a file with other settings is refused, and the error names them.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.errors import CapacityError, ConfigError, counted, require_one_of
from specdec.evaluation.accuracy_report import Report, make_report
from specdec.evaluation.data_sets import (
    DATA_SETS,
    EXEMPLARS,
    NEXT_PROBLEM,
    batches_of,
    choose,
    dialogue_ids,
    load_data,
    question_text,
)
from specdec.loading.model_loading import Checkpoint, load_tokenizer, pick_device
from specdec.measurement.conditions import VERSIONS, hardware, pair_names
from specdec.measurement.timed_comparison import Record, first_difference, run_interleaved
from specdec.models.described_model import context_length
from specdec.models.target import TargetModel
from specdec.progress import Interrupted, progress_bar, working
from specdec.text.prompt_files import Problem
from specdec.text.record_files import append_record, open_records, whole_lines


def evaluate(
    task: str,
    target: str | Path,
    drafter: str | Path | None = None,
    *,
    data: str | Path = "auto",
    limit: int = 0,
    shots: int | None = None,
    instruction: str = "",
    compare: bool | None = None,
    params: SamplingParams | None = None,
    spec: SpecConfig | None = None,
    config: EngineConfig | None = None,
    folder: str | Path | None = None,
    drafter_options: Mapping[str, Any] | None = None,
    **loading: Any,
) -> Report:
    """Run a task from `DATA_SETS`. Every process of `accelerate launch` returns the whole report.

    data: a JSONL file, a folder with it, or "hub"; for gsm8k also "bundled" (generated; what tiny-gemma4 learned) or
        "auto" (bundled for tiny-gemma4, else hub).
    limit: number of problems, the first of every category; 0: all.
    shots (gsm8k): worked examples before each problem; None: 0 with a chat template, else 8.
    instruction: a line after each question.
    compare: also decode without the drafter; None: if there is a drafter, except for gsm8k.
    params: params.seed (default 0) and a problem's number give the problem's seed.
    folder: keeps finished turns, to resume from with the same settings, or another limit.
    loading, drafter_options: how target and drafter are loaded, as `Engine.from_pretrained` takes them.

    Ctrl-C raises Interrupted with the report of the finished problems.
    """
    require_one_of("task", task, DATA_SETS)
    graded = DATA_SETS[task].graded
    target, drafter = pair_names(target, drafter)
    params, config = params or SamplingParams(), config or EngineConfig()
    compare = (not graded and drafter is not None) if compare is None else compare
    if compare and drafter is None:
        raise ConfigError("compare without a drafter: there is nothing to compare plain decoding with; give a drafter")
    if params.n > 1:
        raise ConfigError(f"n={params.n}: each problem has one answer; leave n out, or run again with another seed")
    if limit < 0:
        raise ConfigError(f"limit={limit}: a number of problems, or 0 for all, is expected")
    max_len = context_length(Checkpoint.from_name(target, loading).hf_config().get_text_config()).max_len
    tokenizer = load_tokenizer(target, loading)
    if tokenizer is None:
        raise ConfigError(f"{target!r} holds no tokenizer, and the problems are text; add the tokenizer's files")
    chat = bool(getattr(tokenizer, "chat_template", None))
    shots = _resolve_shots(task, shots, chat)
    if data == "auto" and graded:
        data = "bundled" if target == "tiny-gemma4" else "hub"
    source, problems = load_data(task, str(data))
    chosen = choose(problems, limit or len(problems))
    bare = chat or not graded  # without a worked-example frame
    turns = {i: [question_text(turn, bare, shots, instruction) for turn in problems[i].turns] for i in chosen}
    ask = Dialogues(tokenizer, chat, turns)
    ends = (NEXT_PROBLEM,) if graded and (shots or not chat) else ()
    params = replace(params, seed=params.seed or 0, stop=(*params.stop_strings, *ends))

    cpu = pick_device(config.device).type == "cpu" or parse_flag_from_env("ACCELERATE_USE_CPU")
    state = PartialState(cpu=cpu, timeout=timedelta(days=7))  # waits for the slowest process; the default is minutes
    device = state.device if state.num_processes > 1 else config.device
    if max_len is not None:
        ask.require_fits(max_len, params.max_new_tokens)
    room = config.max_model_len or ask.room(params.max_new_tokens)
    config = replace(config, device=device, max_model_len=room)
    given: dict[str, Any] = {"tokenizer": tokenizer, "spec": spec, "config": config, "drafter_options": drafter_options}
    with working(f"loading {target}"):
        engine = Engine.from_pretrained(target, drafter, **given, **loading)
    ask.require_fits(engine.max_model_len, params.max_new_tokens)
    engines = {"plain" if drafter is None else "speculative": engine}
    if compare:
        engines["plain"] = Engine(engine.target, None, tokenizer=tokenizer, config=config)

    settings: Record = {"task": task, "target": target, "drafter": drafter, "compare": compare}
    settings |= {"data": source, "problems": len(chosen), "sha256": fingerprint(problems, chosen)}
    settings |= {"chat_template": chat, "shots": shots, "instruction": instruction, "versions": VERSIONS}
    settings |= asdict(params) | asdict(engine.spec) | asdict(config)
    settings |= {"loading": repr(loading), "drafter_options": repr(dict(drafter_options or {}))}
    settings |= {"dtype": str(engine.target.dtype), "device": engine.target.device.type}
    settings = json.loads(json.dumps(settings))  # as read from JSON later: tuples become lists

    batches = {fingerprint(problems, one): one for one in batches_of(problems, chosen, config.max_batch_size)}
    return Evaluation(task, problems, batches, ask, engines, params, settings, state).run(folder)


Records = dict[tuple[int, int], Record]
"""Finished turns by number of the problem and of the turn."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Problems of a task, in batches by fingerprint, and the engines that solve them in each of the processes."""

    task: str
    problems: Sequence[Problem]
    batches: dict[str, tuple[int, ...]]
    ask: "Dialogues"
    engines: dict[str, Engine]
    params: SamplingParams
    settings: Record
    state: PartialState

    def run(self, folder: str | Path | None) -> Report:
        """Solve the problems that have no transcripts in `folder`, and report on all."""
        with ExitStack() as stack:
            keep = Path(folder or stack.enter_context(TemporaryDirectory()))
            found = gather_object(read_transcripts(keep, self.settings))
            # only records of the present batches: another batch size may change how many drafts are accepted
            records = by_turn(record for record in found if record["batch"] in self.batches)
            file = stack.enter_context(open_transcripts(keep, self.settings, self.state.process_index))
            unsolved = [name for name, batch in self.batches.items() if not records.keys() >= self.ask.keys(batch)]
            mine = unsolved[self.state.process_index :: self.state.num_processes]
            if mine:
                with working("warming up"):  # allocations, thread pools, kernels
                    short = replace(self.params, max_new_tokens=min(8, self.params.max_new_tokens))
                    for engine in self.engines.values():
                        engine.generate([self.ask.prompt(self.batches[mine[0]][0], [])], short)
            total, shown = sum(map(len, self.ask.turns.values())), self.state.is_main_process
            update = stack.enter_context(progress_bar(self.task, total, len(records), enabled=shown))
            try:
                for name in mine:
                    for key, record in by_turn(solve(self.engines, self.ask, self.batches[name], self.params)).items():
                        if key not in records:
                            append_record(file, record | {"batch": name})
                            records[key] = record
                    update(len(records))
            except KeyboardInterrupt as stop:
                raise self.interrupted(records, folder) from stop
            return self.report(by_turn(gather_object(list(records.values()))))

    def interrupted(self, records: Records, folder: str | Path | None) -> Interrupted:
        """What Ctrl-C raises. It has a report of the solved batches, unless other processes hold some records."""
        done = [keys for keys in map(self.ask.keys, self.batches.values()) if records.keys() >= keys]
        finished = {key: records[key] for keys in done for key in keys}
        count, where = len({index for index, _ in finished}), f", kept in {folder}: the same command continues"
        said = f"{count} of {len(self.ask.turns)} problems are finished{where if folder else ''}"
        return Interrupted(said, self.report(finished) if finished and self.state.num_processes == 1 else None)

    def report(self, records: Records) -> Report:
        """The report of these turns."""
        data_set, [engine, *_] = DATA_SETS[self.task], self.engines.values()
        settings = self.settings | {"problems": len({index for index, _ in records})}
        answers = [problem.answer or "" for problem in self.problems] if data_set.graded else None
        place = f"{hardware(engine.target.device)}, {counted(self.state.num_processes, 'process', 'processes')}"
        categories = [problem.category for problem in self.problems]
        ordered = [records[key] for key in sorted(records)]
        return make_report(settings, answers, ordered, place, categories, data_set.note)


def by_turn(records: Iterable[Record]) -> Records:
    return {(record["index"], record["turn"]): record for record in records}


@dataclass(frozen=True, slots=True)
class Dialogues:
    """The dialogues by problem number, asked turn by turn."""

    tokenizer: Any
    chat: bool
    turns: dict[int, list[str]]

    def prompt(self, index: int, answers: list[str]) -> list[int]:
        """The prompt of the turn after `answers`, which are the model's own."""
        return dialogue_ids(self.tokenizer, self.turns[index][: len(answers) + 1], answers, self.chat)

    def keys(self, batch: Collection[int]) -> set[tuple[int, int]]:
        """(index, turn) of every turn in a batch."""
        return {(index, turn) for index in batch for turn in range(len(self.turns[index]))}

    def room(self, max_new_tokens: int) -> int | None:
        """Tokens of the longest dialogue; None if that depends on how an answer is tokenised again."""
        if any(len(turns) > 1 for turns in self.turns.values()):
            return None
        return max(len(self.prompt(index, [])) for index in self.turns) + max_new_tokens

    def require_fits(self, max_model_len: int, max_new_tokens: int) -> None:
        """Raises CapacityError for a dialogue that is too long, before any work is done."""
        for index, turns in self.turns.items():
            needed = len(self.prompt(index, [""] * (len(turns) - 1))) + len(turns) * max_new_tokens
            if needed > max_model_len:
                raise CapacityError(
                    f"problem {index} may take {needed} tokens with max_new_tokens={max_new_tokens}, and the model has "
                    f"room for {max_model_len}; lower max_new_tokens, or leave the problem out"
                )


def solve(engines: dict[str, Engine], ask: Dialogues, batch: Collection[int], params: SamplingParams) -> list[Record]:
    """Solve a batch turn by turn, with all engines in turn, so that a slow moment of the machine affects all of
    them."""
    answers: dict[str, dict[int, list[str]]] = {name: {index: [] for index in batch} for name in engines}
    records: list[Record] = []
    for turn in range(max(len(ask.turns[index]) for index in batch)):
        asked = [index for index in batch if len(ask.turns[index]) > turn]
        seeded = [replace(params, seed=problem_seed(params.seed or 0, index)) for index in asked]
        runners = {name: partial(engine.generate, params=seeded, progress=False) for name, engine in engines.items()}
        prompts = {name: [ask.prompt(index, known[index]) for index in asked] for name, known in answers.items()}
        for place, (index, runs) in enumerate(zip(asked, run_interleaved(runners, prompts), strict=True)):
            parting: Record | None = None
            if len(engines) == 2:
                first, second = (own[place] for own in prompts.values())
                outputs = (run["token_ids"] for run in runs.values())
                parting = {"position": None, "logit_margin": None}  # earlier answers differ
                if first == second:
                    parting = find_parting(engines["plain"].target, first, *outputs)
            records.append({"index": index, "turn": turn, "parting": parting, "runs": runs})
            for name, run in runs.items():
                answers[name][index].append(run["text"])
    return records


@torch.inference_mode()
def find_parting(target: TargetModel, prompt: list[int], first: list[int], second: list[int]) -> Record | None:
    """Position of the first difference of two outputs, and the margin between the float32 logits of the two tokens
    there, from one forward of the bare model; None: they are equal. The margin is None if one output ends there."""
    position = first_difference(first, second)
    if position is None:
        return None
    if position == min(len(first), len(second)):
        return {"position": position, "logit_margin": None}
    tokens = torch.tensor([prompt + first[:position]], device=target.model.device)
    logits = target.model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    return {"position": position, "logit_margin": abs(float(logits[first[position]] - logits[second[position]]))}


def problem_seed(seed: int, index: int) -> int:
    """The seed of one problem: the same in every run and process, and unrelated to other problems' seeds."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8]) >> 1


def fingerprint(problems: Sequence[Problem], chosen: Sequence[int]) -> str:
    """A hash of the chosen questions and their reference answers."""
    return hashlib.sha256(json.dumps([(index, asdict(problems[index])) for index in chosen]).encode()).hexdigest()


def _resolve_shots(task: str, shots: int | None, chat: bool) -> int:
    if shots is None:
        return 0 if chat or not DATA_SETS[task].graded else len(EXEMPLARS)
    if shots and not DATA_SETS[task].graded:
        raise ConfigError(f"shots={shots}: {task} has no worked examples; leave it out")
    if not 0 <= shots <= len(EXEMPLARS):
        raise ConfigError(f"shots={shots}: there are {len(EXEMPLARS)} worked examples; give 0 to {len(EXEMPLARS)}")
    return shots


NEUTRAL = {"data", "problems", "sha256", "max_model_len", "full_slots", "swa_slots", "cuda_graphs"}
"""Settings that change neither answers nor acceptance: which problems there are (records name their batch), room, and
speed."""


def read_transcripts(folder: Path, settings: Record) -> list[Record]:
    """Finished turns in `folder`, of all processes. Raises ConfigError if the folder was made with other settings."""
    records: list[Record] = []
    for path in sorted(folder.glob("transcripts-*.jsonl")):
        head, *others = _lines_of(path) or [settings]
        compared = {key: value for key, value in settings.items() if key not in NEUTRAL}
        other = [f"{key} {head.get(key)!r}, now {value!r}" for key, value in compared.items() if head.get(key) != value]
        if other:
            raise ConfigError(
                f"{path} was made with {'; '.join(other)}; use the same settings (another limit may be given) or "
                "another folder"
            )
        records += others
    return records


def open_transcripts(folder: Path, settings: Record, rank: int) -> FileIO:
    """Open this process's file, without a buffer, for `append_record`; its first line holds the settings."""
    if folder.is_file():
        raise ConfigError(f"transcripts={str(folder)!r} is a file; a folder is expected")
    path = folder / f"transcripts-{rank}.jsonl"
    file = open_records(path)
    if not path.stat().st_size:
        append_record(file, settings)
    return file


def _lines_of(path: Path) -> list[Record]:
    """The settings and the finished turns in one file."""
    lines: list[Record] = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or (lines and "batch" not in record):
            raise ConfigError(f"{path}:{number} is not a transcript of this version; use another folder")
        lines.append(record)
    return lines
