"""Tokens per second with and without a drafter, in one run, on the same prompts, only if the outputs are equal.

The contestants take turns prompt by prompt, so that a slow moment of a shared machine hits all of them; compare the
ratios, not the absolute figures. Peers from transformers run one prompt at a time.
"""

import copy
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.engine import Engine
from specdec.errors import ConfigError, SpecDecError
from specdec.evaluation.scoring import final_number, is_correct

VERSIONS = f"torch {torch.__version__}, transformers {transformers.__version__}"


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A user message and, where the data has one, the reference answer."""

    text: str
    answer: str | None = None


@dataclass(slots=True)
class Contestant:
    """One way of generating: token ids of some prompts in, token ids of their outputs out."""

    name: str
    run: Callable[[list[list[int]]], list[list[int]]]
    seconds: float = 0.0
    tokens: int = 0
    outputs: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What `run_bench` measured; `tokens_per_second` by contestant, in the order they ran."""

    target: str
    drafter: str | None
    prompts: int
    spec: SpecConfig
    temperature: float
    batch_size: int
    tokens_per_second: dict[str, float]
    acceptance_length: float
    accepted_per_position: list[float]
    accuracy: float | None
    identical_to_plain: bool
    hardware: str
    versions: str


def read_prompts(path: Path, limit: int = 0) -> list[BenchPrompt]:
    """Prompts of a JSONL file: 'question' (GSM8K), 'prompt' (HumanEval) or the first of 'turns' (MT-bench)."""
    if not path.is_file():
        raise ConfigError(
            f"data={str(path)!r}: no such file; a JSONL file with 'question', 'prompt' or 'turns' is wanted"
        )
    prompts: list[BenchPrompt] = []
    for number, record in islice(json_lines(path), limit or None):
        text = record.get("question") or record.get("prompt") or (record.get("turns") or [None])[0]
        if not text:
            raise ConfigError(f"{path}:{number}: no 'question', 'prompt' or 'turns'; keys are {sorted(record)}")
        prompts.append(BenchPrompt(text, record.get("answer")))
    if not prompts:
        raise ConfigError(f"data={str(path)!r} holds no prompt")
    return prompts


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSONL file, without blank lines. Raises ConfigError at a line that is no object."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}: not a line of JSON ({error})") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{path}:{number}: an object is wanted, not {line.strip()[:40]}")
        yield number, record


def run_bench(
    *,
    target: str,
    drafter: str | None,
    prompts: Sequence[BenchPrompt],
    spec: SpecConfig,
    config: EngineConfig,
    params: SamplingParams,
    raw: bool = False,
    peer: bool = False,
) -> BenchReport:
    """Run every contestant on every prompt. Raises SpecDecError when an output is not plain decoding's.

    params: with a temperature above 0 they need a seed, without which no two outputs would be alike.
    """
    if params.temperature > 0 and params.seed is None:
        raise ConfigError(f"temperature={params.temperature} without a seed: outputs could not be compared; give one")
    engine = Engine.from_pretrained(target, drafter, spec=spec, config=config)
    plain = engine if drafter is None else Engine(engine.target, None, tokenizer=engine.tokenizer, config=config)
    contestants = [Contestant("specdec, no drafter", _runner(plain, params))]
    if drafter is not None:
        contestants.append(Contestant(f"specdec, {drafter}", _runner(engine, params)))
    if peer:
        contestants += _peers(engine, params, spec.num_steps)
    ids = [engine.encode(p.text) if raw else engine.chat_prompt(p.text) for p in prompts]
    for contestant in contestants:
        contestant.run(ids[:1])  # warm up: allocations, thread pools
    warm_up = engine.stats()
    groups = [ids[i : i + config.max_batch_size] for i in range(0, len(ids), config.max_batch_size)]
    for group in track(groups, "measuring", console=Console(stderr=True), transient=True):
        for contestant in contestants:
            start = time.perf_counter()
            outputs = contestant.run(group)
            contestant.seconds += time.perf_counter() - start
            contestant.tokens += sum(len(out) for out in outputs)
            contestant.outputs += outputs
    _require_parity(contestants)

    stats = engine.stats()
    stats.add(warm_up, sign=-1)
    texts = [engine.decode(out) for out in contestants[0].outputs]
    answers = [p.answer or "" for p in prompts]
    graded = [is_correct(text, a) for text, a in zip(texts, answers, strict=True) if final_number(a) is not None]
    return BenchReport(
        target=target,
        drafter=drafter,
        prompts=len(prompts),
        spec=spec,
        temperature=params.temperature,
        batch_size=config.max_batch_size,
        tokens_per_second={c.name: c.tokens / c.seconds for c in contestants},
        acceptance_length=stats.acceptance_length,
        accepted_per_position=stats.accepted_per_position,
        accuracy=sum(graded) / len(graded) if graded else None,
        identical_to_plain=True,
        hardware=hardware(engine.target.device),
        versions=VERSIONS,
    )


def markdown_table(report: BenchReport) -> str:
    """The report as a Markdown table with one line of context."""
    base = next(iter(report.tokens_per_second.values()))
    lines = ["| run | tokens/s | vs no drafter |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {speed:.1f} | {speed / base:.2f}x |" for name, speed in report.tokens_per_second.items()]
    positions = ", ".join(f"{share:.2f}" for share in report.accepted_per_position)
    accuracy = "" if report.accuracy is None else f"; accuracy {100 * report.accuracy:.1f} %"
    lines += [
        "",
        f"{report.target}, {report.prompts} prompts, batch {report.batch_size}, temperature {report.temperature:g}, "
        f"{report.spec.num_steps} steps of topk {report.spec.topk}, {report.spec.num_nodes} nodes: "
        f"acceptance length {report.acceptance_length:.2f} (by position {positions}){accuracy}; "
        f"identical to plain decoding: yes. {report.hardware}, {report.versions}.",
    ]
    return "\n".join(lines)


def _runner(engine: Engine, params: SamplingParams) -> Callable[[list[list[int]]], list[list[int]]]:
    return lambda prompts: [out.token_ids for out in engine.generate(prompts, params)]


def _peers(engine: Engine, params: SamplingParams, num_steps: int) -> list[Contestant]:
    """transformers' own generate on the same weights: plain, and assisted by the same drafter where it is one."""
    model = engine.target.model
    ends = sorted(engine.end_tokens)

    def run(prompts: list[list[int]], **assistance: Any) -> list[list[int]]:
        outputs: list[list[int]] = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=model.device)
            out = model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=params.temperature > 0,
                temperature=params.temperature or None,
                max_new_tokens=params.max_new_tokens,
                eos_token_id=ends,
                pad_token_id=0,
                **assistance,
            )
            outputs.append(out[0, len(prompt) :].tolist())
        return outputs

    peers = [Contestant("transformers, plain", run)]
    if isinstance(engine.drafter, Gemma4MTPDrafter):
        assistant = engine.drafter.assistant
        assistant.generation_config = copy.deepcopy(assistant.generation_config)
        assistant.generation_config.num_assistant_tokens = num_steps
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        peers.append(Contestant("transformers, assisted", lambda prompts: run(prompts, assistant_model=assistant)))
    return peers


def _require_parity(contestants: Sequence[Contestant]) -> None:
    """Every specdec contestant must equal plain decoding; peers are measured, not judged."""
    plain = contestants[0].outputs
    for contestant in contestants[1:]:
        if not contestant.name.startswith("specdec"):
            continue
        for number, (ours, reference) in enumerate(zip(contestant.outputs, plain, strict=True)):
            if ours != reference:
                at = next((i for i, (a, b) in enumerate(zip(ours, reference, strict=False)) if a != b), len(reference))
                raise SpecDecError(
                    f"no figures: prompt {number} differs from plain decoding at token {at} with {contestant.name}"
                )


def hardware(device: torch.device) -> str:
    """What a figure was measured on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
