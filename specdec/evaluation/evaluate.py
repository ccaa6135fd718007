"""GSM8K accuracy of a target with its drafter, without, or (`compare`) both in one run on the same problems.

    report = evaluate_gsm8k("tiny-gemma4", "tiny-gemma4-mtp", compare=True)
    print(markdown(report))

Problems are cut into fixed batches, the batches are dealt to the processes of `accelerate launch`, and every finished
problem is a line of a file. So neither a kill nor the number of processes changes more than the timings.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TextIO

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env
from rich.console import Console
from rich.progress import Progress

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.evaluation.bench import VERSIONS, hardware
from specdec.evaluation.gsm8k import EXEMPLARS, NEXT_PROBLEM, load_problems, prompt_ids
from specdec.evaluation.report import Record, Report, make_report
from specdec.evaluation.scoring import SCORES, is_correct
from specdec.models.loading import find_config, load_tokenizer, pick_device
from specdec.models.target import TargetModel


def evaluate_gsm8k(
    target: str,
    drafter: str | None = None,
    *,
    data: str = "auto",
    limit: int = 0,
    shots: int | None = None,
    instruction: str = "",
    compare: bool = False,
    params: SamplingParams | None = None,
    spec: SpecConfig | None = None,
    config: EngineConfig | None = None,
    folder: str | Path | None = None,
) -> Report:
    """Solve problems and score the answers. Every process of `accelerate launch` returns the whole report.

    data: "hub" (GSM8K's test split), "bundled" (generated; what tiny-gemma4 learned), a JSONL file with GSM8K's fields,
    or "auto" (bundled for tiny-gemma4, else hub); limit 0: all. shots: worked examples in front; None: 0 under a chat
    template, else 8. instruction: a line behind each question. compare: also decode without the drafter. params.seed
    (default 0) seeds each problem by its number. folder: keeps what is finished, to go on from under the same settings.
    """
    params, spec, config = params or SamplingParams(), spec or SpecConfig(), config or EngineConfig()
    if compare and drafter is None:
        raise ConfigError("compare without a drafter: there is nothing to compare plain decoding with; give a drafter")
    find_config(target)  # says so if there is no checkpoint
    tokenizer = load_tokenizer(target)
    if tokenizer is None:
        raise ConfigError(f"{target!r} holds no tokenizer, and the problems are text; add the tokenizer's files")
    chat = bool(getattr(tokenizer, "chat_template", None))
    shots = (0 if chat else len(EXEMPLARS)) if shots is None else shots
    if not 0 <= shots <= len(EXEMPLARS):
        raise ConfigError(f"shots={shots}: there are {len(EXEMPLARS)} worked examples; give 0 to {len(EXEMPLARS)}")
    data = ("bundled" if target == "tiny-gemma4" else "hub") if data == "auto" else data
    source, problems = load_problems(data, limit)
    prompts = [prompt_ids(tokenizer, problem.text, chat, shots, instruction) for problem in problems]
    answers = [problem.answer or "" for problem in problems]
    stop = (*params.stop_strings, NEXT_PROBLEM) if shots or not chat else params.stop_strings
    params = replace(params, seed=params.seed or 0, stop=stop)

    cpu = pick_device(config.device).type == "cpu" or parse_flag_from_env("ACCELERATE_USE_CPU")
    state = PartialState(cpu=cpu, timeout=timedelta(days=7))  # to wait for the slowest process; the default is minutes
    device = state.device if state.num_processes > 1 else config.device
    longest = max(map(len, prompts)) + params.max_new_tokens
    config = replace(config, device=device, max_model_len=config.max_model_len or longest)
    engine = Engine.from_pretrained(target, drafter, tokenizer=tokenizer, spec=spec, config=config)
    engines = {"plain" if drafter is None else "speculative": engine}
    if compare:
        engines["plain"] = Engine(engine.target, None, tokenizer=tokenizer, config=config)

    sha256 = hashlib.sha256(json.dumps([asdict(problem) for problem in problems]).encode()).hexdigest()
    settings: Record = {"task": "gsm8k", "target": target, "drafter": drafter, "compare": compare}
    settings |= {"data": source, "problems": len(problems), "sha256": sha256}
    settings |= {"chat_template": chat, "shots": shots, "instruction": instruction, "versions": VERSIONS}
    settings |= asdict(params) | asdict(spec) | asdict(config)
    settings |= {"dtype": str(engine.target.dtype), "device": engine.target.device.type}
    settings = json.loads(json.dumps(settings))  # as they are read again: tuples become lists
    with ExitStack() as stack:
        folder = Path(folder or stack.enter_context(TemporaryDirectory()))
        records = {record["index"]: record for record in gather_object(read_transcripts(folder, settings))}
        file = stack.enter_context(open_transcripts(folder, settings, state.process_index))
        quiet = not state.is_main_process
        bar = stack.enter_context(Progress(console=Console(stderr=True), transient=True, disable=quiet))
        task = bar.add_task("gsm8k", total=len(problems), completed=len(records))
        size = config.max_batch_size
        batches = [range(i, min(i + size, len(problems))) for i in range(0, len(problems), size)]
        # a batch that a kill cut short is made again as a whole: its size may change how many drafts are accepted
        unsolved = [batch for batch in batches if not records.keys() >= set(batch)]
        for one in engines.values() if unsolved else ():  # warm up: allocations, thread pools, kernels
            one.generate(prompts[0], replace(params, max_new_tokens=min(8, params.max_new_tokens)))
        for batch in unsolved[state.process_index :: state.num_processes]:
            for record in solve(engines, prompts, batch, params):
                if record["index"] not in records:
                    file.write(json.dumps(record) + "\n")
                    records[record["index"]] = record
            bar.update(task, completed=len(records), description=running_scores(records.values(), answers))
        records = {record["index"]: record for record in gather_object(list(records.values()))}
    place = f"{hardware(engine.target.device)}, {state.num_processes} process(es)"
    return make_report(settings, answers, [records[index] for index in range(len(problems))], place)


def solve(engines: dict[str, Engine], prompts: list[list[int]], batch: range, params: SamplingParams) -> list[Record]:
    """One batch by every engine in turn, so that a slow moment of the machine hits all of them."""
    seeded = [replace(params, seed=problem_seed(params.seed or 0, index)) for index in batch]
    records: list[Record] = [{"index": index, "parting": None, "runs": {}} for index in batch]
    for name, engine in engines.items():
        start = perf_counter()
        outputs = engine.generate([prompts[index] for index in batch], seeded, progress=False)
        seconds = (perf_counter() - start) / len(batch)
        for record, out in zip(records, outputs, strict=True):
            kept = {"token_ids": out.token_ids, "text": out.text, "finish_reason": out.finish_reason}
            record["runs"][name] = {**kept, "stats": asdict(out.stats), "seconds": seconds}
    for record in records if len(engines) == 2 else ():
        first, second = (run["token_ids"] for run in record["runs"].values())
        if first != second:
            record["parting"] = find_parting(engines["plain"].target, prompts[record["index"]], first, second)
    return records


@torch.inference_mode()
def find_parting(target: TargetModel, prompt: list[int], first: list[int], second: list[int]) -> Record:
    """Where two outputs part, and how far apart the target's logits of their two tokens are there.

    The logits are those of one forward of the bare model over the prompt and what the outputs share, widened to fp32.
    """
    # neither ends where the other goes on: what ends an output is a function of its tokens
    position = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    tokens = torch.tensor([prompt + first[:position]], device=target.device)
    hidden = target.decoder(input_ids=tokens, use_cache=False).last_hidden_state[0, -1]
    logits = target.logits(hidden).float()
    return {"position": position, "logit_margin": abs(float(logits[first[position]] - logits[second[position]]))}


def problem_seed(seed: int, index: int) -> int:
    """The seed of one problem: the same in every run and process, and unrelated to that of the next problem."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8]) >> 1


def read_transcripts(folder: Path, settings: Record) -> list[Record]:
    """What is finished in `folder`, by whichever process. Raises ConfigError where it was made with other settings."""
    records: list[Record] = []
    for path in sorted(folder.glob("transcripts-*.jsonl")):
        whole_lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # what a kill cut short has no line feed
        head, *finished = [json.loads(line) for line in whole_lines] or [settings]
        other = [f"{key} {head.get(key)!r}, now {value!r}" for key, value in settings.items() if head.get(key) != value]
        if other:
            raise ConfigError(f"{path} was made with {'; '.join(other)}; use the same settings or another folder")
        records += finished
    return records


def open_transcripts(folder: Path, settings: Record, rank: int) -> TextIO:
    """This process's file, to go on behind its last whole line; its first line holds the settings."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"transcripts-{rank}.jsonl"
    file = path.open("a", buffering=1, encoding="utf-8")  # a line is handed to the system as it is written
    if not file.truncate(path.read_bytes().rfind(b"\n") + 1):
        file.write(json.dumps(settings) + "\n")
    return file


def running_scores(records: Collection[Record], answers: Sequence[str]) -> str:
    """Of the first run, in per cent, for the progress bar."""
    outputs = [(next(iter(record["runs"].values()))["text"], answers[record["index"]]) for record in records]
    share = {score: sum(is_correct(*output, score) for output in outputs) / len(outputs) for score in SCORES}
    return ", ".join(f"{score} {100 * value:.1f} %" for score, value in share.items())
