"""Train an EAGLE-3 head for any Hugging Face causal LM that specdec runs, inside a time limit.

Stages: the target's own answers to the prompts, a reduced draft vocabulary by frequency, training-time test, report on
prompts that were not trained on. Schedules follow the clock, so that a run ends decayed and saved whatever the speed of
the machine. The head is saved in the SpecForge format, as `Engine.from_pretrained(target, drafter=OUT)` reads it.

    python examples/train_eagle3.py --target tiny-gemma4 --prompts word-problems --out out --minutes 6

A prompt file holds one JSON object a line with "messages", or "question" or "prompt" (one user turn each).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from eagle3_training import Batch, Lesson, chain_loss, draft_logits, pack_rows, rounds, simulate, teach
from tiny_gemma4_data import Document
from tiny_gemma4_model import MixedOptimizer, schedule
from word_problems import heldout, heldout_questions, stream

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.eagle3 import eagle3_drafter
from specdec.draft_models.eagle3_config import Eagle3Spec, TargetShape
from specdec.draft_models.eagle3_format import write_head
from specdec.draft_models.eagle3_model import Eagle3Head
from specdec.loading import load_model, load_tokenizer
from specdec.target import TargetModel

WORD_PROBLEMS = "word-problems"
STEP_DECAY = 0.8


def prompt_source(names: list[str], seed: int) -> tuple[Iterator[dict[str, Any]], list[dict[str, Any]]]:
    """(endless training prompts, taking turns between the sources; prompts kept for the report)."""
    sources: list[Iterator[dict[str, Any]]] = []
    kept: list[dict[str, Any]] = []
    for name in names:
        if name == WORD_PROBLEMS:
            sources.append(stream(seed + 88_888, heldout_questions()))
            kept += heldout()
        else:
            lines = [json.loads(line) for line in Path(name).read_text("utf-8").splitlines() if line.strip()]
            cut = max(1, min(200, len(lines) // 10))
            sources.append(itertools.cycle(lines[:-cut]))
            kept += lines[-cut:]
    return itertools.chain.from_iterable(zip(*sources, strict=False)), kept


def encode(tokenizer: Any, prompt: dict[str, Any]) -> list[int]:
    text = prompt.get("question") or prompt.get("prompt")
    turns = prompt.get("messages") or [{"role": "user", "content": text.strip()}]
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(turns[-1]["content"])["input_ids"])
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False))


@torch.no_grad()
def answers(model: Any, prompts: list[list[int]], max_new: int, temperature: float) -> list[list[int]]:
    """The model's answers up to and including an end token, for one batch."""
    config = model.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    pad = config.pad_token_id if config.pad_token_id is not None else (ends[0] or 0)
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    settings = sampling if temperature else {"do_sample": False}
    new = model.generate(ids, attention_mask=mask, max_new_tokens=max_new, pad_token_id=pad, **settings)
    out = []
    for row in new[:, width:].tolist():
        stop = next((k for k, token in enumerate(row) if token in ends), len(row) - 1)
        out.append(row[: stop + 1])
    return out


def collect(
    model: Any, tokenizer: Any, source: Iterator[dict[str, Any]], args: argparse.Namespace, seconds: float
) -> list[Document]:
    """The target's own answers, three batches in four greedy, until the time is up."""
    stop, longest, done = time.perf_counter() + seconds, 0.0, 0
    documents: list[Document] = []
    while done == 0 or time.perf_counter() + longest < stop:
        began = time.perf_counter()
        prompts = [encode(tokenizer, next(source)) for _ in range(args.answer_batch)]
        prompts = [p for p in prompts if len(p) < args.length - 16]
        new = answers(model, prompts, args.max_new, args.temperature if done % 4 == 3 else 0.0)
        documents += [
            (np.array(p + a, np.int32), len(p))
            for p, a in zip(prompts, new, strict=True)
            if len(p) + len(a) <= args.length
        ]
        longest, done = max(longest, time.perf_counter() - began), done + 1
    print(f"{len(documents)} answers, {sum(len(d) - c for d, c in documents)} answer tokens", flush=True)
    return documents


def draft_vocabulary(documents: list[Document], size: int, vocab_size: int) -> tuple[torch.Tensor | None, float]:
    """The `size` most frequent tokens of the answers, ascending, and the share of answer tokens they cover."""
    counts = np.bincount(np.concatenate([tokens[cut:] for tokens, cut in documents]), minlength=vocab_size)
    if size >= vocab_size:
        return None, 1.0
    ids = np.sort(np.argsort(-counts, kind="stable")[:size])
    return torch.from_numpy(ids), float(counts[ids].sum() / counts.sum())


def new_head(target: TargetModel, args: argparse.Namespace, draft_vocab: int | None) -> Eagle3Head:
    """A head of the arguments' shape; its lm_head starts as the target's rows where the widths agree."""
    num_layers, hidden = len(target.layout.layers), args.hidden or target.hidden_size
    spec = Eagle3Spec(
        hidden_size=hidden,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        intermediate_size=args.intermediate or 3 * hidden,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim or hidden // args.heads,
        aux_layers=(2, num_layers // 2, num_layers - 3),
        windows=(None,) * args.layers,
        draft_vocab_size=draft_vocab or target.vocab_size,
        max_position_embeddings=target.max_position_embeddings or 4096,
        owns_embed=hidden != target.hidden_size,
        fc_norm=args.fc_norm,
        norm_output=args.norm_output,
    )
    return Eagle3Head(spec).place(target.device, torch.bfloat16)


def save(head: Eagle3Head, target: TargetModel, target_ids: torch.Tensor | None, out: Path) -> None:
    shape = TargetShape(
        name=target.name,
        num_layers=len(target.layout.layers),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
    )
    write_head(out, head.spec, head.state_dict(), shape, target_ids)


class Lessons:
    """Batches with what the target says about them; kept on the device when they fit `cache_gb`, else taught again."""

    def __init__(
        self, target: TargetModel, head: Eagle3Head, documents: list[Document], args: argparse.Namespace
    ) -> None:
        packed = pack_rows(documents, args.length)
        self.target, self.aux_layers = target, head.spec.aux_layers
        self.rows = min(args.rows, len(packed.ids))
        self.data = Batch(*(x.to(target.device) for x in packed))
        self.count = len(packed.ids)
        numbers = self.count * args.length * (head.spec.feature_size + target.hidden_size)
        self.cache: list[Lesson] = []
        if 2 * numbers <= args.cache_gb * 1e9:
            parts = [
                self._teach(torch.arange(i, min(i + self.rows, self.count))) for i in range(0, self.count, self.rows)
            ]
            self.cache = [Lesson(*(torch.cat(field) for field in zip(*parts, strict=True)))]
        print(
            f"{self.count} rows of {args.length}; target states {'kept' if self.cache else 'computed again'}",
            flush=True,
        )

    def __iter__(self) -> Iterator[tuple[Batch, Lesson]]:
        while True:
            order = torch.randperm(self.count)
            for first in range(0, self.count - self.rows + 1, self.rows):
                index = order[first : first + self.rows]
                on_device = index.to(self.target.device)
                lesson = Lesson(*(x[on_device] for x in self.cache[0])) if self.cache else self._teach(index)
                yield self._batch(index), lesson

    def _batch(self, index: torch.Tensor) -> Batch:
        return Batch(*(x[index.to(x.device)].long() for x in self.data))

    def _teach(self, index: torch.Tensor) -> Lesson:
        lesson = teach(self.target, self.aux_layers, self._batch(index))
        return Lesson(*(x.bfloat16() for x in lesson))


def train(
    target: TargetModel,
    head: Eagle3Head,
    target_ids: torch.Tensor | None,
    documents: list[Document],
    args: argparse.Namespace,
    seconds: float,
) -> dict[str, object]:
    stop = time.perf_counter() + seconds
    lessons = Lessons(target, head, documents, args)
    table = (target.embed if head.embed_tokens is None else head.embed_tokens).weight
    # Muon is for the matrices inside; "embed" in its name sends a table to AdamW
    named = {f"embed_{name}" if name == "lm_head" else name: part for name, part in head.named_children()}
    optimizer = MixedOptimizer(torch.nn.ModuleDict(named), args.lr, args.muon_lr, args.optimizer == "muon")
    start = shown = saved = time.perf_counter()
    step, total = 0, sum(STEP_DECAY**i for i in range(args.steps_ttt))
    for batch, lesson in lessons:
        with torch.no_grad():
            teacher = target.logits(lesson.hidden.to(target.dtype))  # [B, T, V]
        loss = torch.zeros((), device=target.device)
        chains = draft_logits(head, table, target.head, target_ids, batch, lesson, args.steps_ttt)
        for i, (logits, good) in enumerate(zip(chains, rounds(batch, args.steps_ttt), strict=True)):
            loss = loss + STEP_DECAY**i * chain_loss(logits, teacher.roll(-1 - i, 1), target_ids, good)
        loss.backward()
        optimizer.step(schedule((time.perf_counter() - start) / (stop - start)) if step else 0.05)
        step += 1
        if step % 8:
            continue
        value, now = loss.item() / total, time.perf_counter()  # also keeps the host from running ahead of the clock
        if now - shown > args.log_every:
            epoch = step * lessons.rows / lessons.count
            print(f"{now - start:6.0f} s  step {step}  loss {value:.4f}  epoch {epoch:.1f}", flush=True)
            shown = now
        if now - saved > 60:
            save(head, target, target_ids, args.out)
            saved = now
        if now >= stop:
            break
    save(head, target, target_ids, args.out)
    return {"steps": step, "loss": value, "answers": len(documents), "rows": lessons.count}


def measure(target: TargetModel, out: Path, prompts: list[list[int]], max_new: int) -> dict[str, object]:
    """Acceptance of the saved head in the engine itself, greedy: chains of 4, and trees of 16 nodes as deep."""
    config = EngineConfig(max_batch_size=64, max_model_len=max(map(len, prompts)) + max_new)
    shapes = {"chain": SpecConfig(num_steps=4), "tree": SpecConfig(num_steps=4, topk=4, num_draft_tokens=16)}
    found: dict[str, object] = {}
    for name, spec in shapes.items():
        with Engine(target, eagle3_drafter(out, target), spec=spec, config=config) as engine:
            engine.generate(prompts, SamplingParams(max_new_tokens=max_new))
            found[name] = round(engine.stats().acceptance_length, 3)
    return found


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan per shape; the memory-efficient kernel does not
    transformers.utils.logging.disable_progress_bar()
    began = time.perf_counter()
    deadline = began + 60 * args.minutes
    device = torch.device(args.device)
    model = load_model(args.target, dtype=torch.bfloat16, device=device).requires_grad_(False)
    tokenizer = load_tokenizer(args.tokenizer or args.target)
    target = TargetModel(model)
    source, kept = prompt_source(args.prompts, args.seed)
    left = deadline - time.perf_counter() - args.report_seconds
    documents = collect(model, tokenizer, source, args, args.answer_share * left)
    target_ids, covered = draft_vocabulary(documents, args.draft_vocab, target.vocab_size)
    print(f"draft vocabulary of {args.draft_vocab} covers {covered:.4%} of the answers", flush=True)
    head = new_head(target, args, None if target_ids is None else len(target_ids))
    if target_ids is not None:
        target_ids = target_ids.to(device)
    if head.lm_head is not None and target.head.weight.shape[1] == head.spec.hidden_size:
        rows = target.head.weight if target_ids is None else target.head.weight[target_ids]
        head.lm_head.weight.data.copy_(rows)
    result: dict[str, object] = {"parameters": sum(p.numel() for p in head.parameters()), "coverage": covered}
    seconds = deadline - time.perf_counter() - args.report_seconds
    result["training"] = train(target, head, target_ids, documents, args, seconds)
    kept_ids = [encode(tokenizer, prompt) for prompt in kept[: args.report_count]]
    new = [a for i in range(0, len(kept_ids), 512) for a in answers(model, kept_ids[i : i + 512], args.max_new, 0.0)]
    held = [(np.array(p + a, np.int32), len(p)) for p, a in zip(kept_ids, new, strict=True)]
    longest = max(args.length, max(len(tokens) for tokens, _ in held))
    result["simulated"] = simulate(head.eval(), target, target_ids, held, longest)
    result["bytes"] = (args.out / "model.safetensors").stat().st_size
    result["arguments"] = {name: str(value) for name, value in vars(args).items()}
    write_report(result, args.out)
    if args.engine_report:
        result["engine"] = measure(target, args.out, kept_ids, args.max_new)
    result["seconds"] = round(time.perf_counter() - began, 1)
    write_report(result, args.out)
    print(json.dumps({k: v for k, v in result.items() if k != "arguments"}, indent=2))


def write_report(result: dict[str, object], out: Path) -> None:
    (out / "report.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Train an EAGLE-3 head by training-time test.")
    p.add_argument("--target", required=True, help="hub id, folder or bundled name")
    p.add_argument("--tokenizer", help="default: the target's")
    p.add_argument("--prompts", nargs="+", required=True, help=f"JSON-lines files, or {WORD_PROBLEMS}")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--minutes", type=float, default=6.0, help="limit of the whole call")
    p.add_argument("--answer-share", type=float, default=0.3, help="of the time, for the target's answers")
    p.add_argument("--report-seconds", type=float, default=40.0, help="time set aside for the report")
    p.add_argument("--report-count", type=int, default=200)
    p.add_argument("--engine-report", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--draft-vocab", type=int, default=1024)
    p.add_argument("--hidden", type=int, help="default: the target's")
    p.add_argument("--intermediate", type=int, help="default: three times hidden")
    p.add_argument("--layers", type=int, default=1)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--kv-heads", type=int, default=2)
    p.add_argument("--head-dim", type=int)
    p.add_argument("--fc-norm", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--norm-output", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--steps-ttt", type=int, default=5)
    p.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    p.add_argument("--lr", type=float, default=2e-3, help="peak rate of AdamW")
    p.add_argument("--muon-lr", type=float, default=1e-2, help="peak rate of Muon")
    p.add_argument("--rows", type=int, default=64)
    p.add_argument("--length", type=int, default=512)
    p.add_argument("--max-new", type=int, default=256)
    p.add_argument("--answer-batch", type=int, default=2048)
    p.add_argument("--temperature", type=float, default=1.0, help="of every fourth batch of answers")
    p.add_argument("--cache-gb", type=float, default=40.0, help="keep the target's states when they fit")
    p.add_argument("--log-every", type=float, default=15.0)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return p.parse_args()


if __name__ == "__main__":
    main()
