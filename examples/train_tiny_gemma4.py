"""Train the bundled target: a tiny Gemma 4 that solves word problems, inside a time limit.

Stages: tokenizer, target, report. The schedule follows the clock, so a run ends decayed and saved whatever the speed of
the machine. Only GSM8K's training file is read; its last 200 problems and the held-out generated ones are never trained
on. Its drafters come from `specdec train`.

    python examples/train_tiny_gemma4.py --gsm8k-train train.jsonl --out out --minutes 9
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are the parallelism

import torch
import torch.nn.functional as F
import transformers
from tiny_gemma4_data import (
    VOCAB,
    PackedProblems,
    accuracy,
    batches,
    encode,
    read_gsm8k,
    tokenizer_corpus,
    train_tokenizer,
)
from tiny_gemma4_model import compile_layers, merge_shards, new_target, save
from transformers import Gemma4ForCausalLM, PreTrainedTokenizerFast
from word_problems import generate, heldout, heldout_questions

from specdec.progress import Stage
from specdec.training.packed_rows import ANSWER, causal_mask
from specdec.training.training_loop import MixedOptimizer, schedule

STAGES = ("tokenizer", "target", "report")


@dataclass
class Run:
    """State that the stages share."""

    args: argparse.Namespace
    began: float
    device: torch.device
    tokenizer: PreTrainedTokenizerFast | None = None
    target: Gemma4ForCausalLM | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    result: dict[str, object] = field(default_factory=dict)

    @property
    def target_dir(self) -> Path:
        return self.args.out / "tiny-gemma4"

    def left(self) -> float:
        return self.args.minutes * 60 - (time.perf_counter() - self.began)


def weighted_loss(
    hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, cap: float
) -> torch.Tensor:
    """Mean cross-entropy of the soft-capped logits under per-token weights."""
    logits = cap * torch.tanh((hidden @ head.T).float() / cap)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def next_token_targets(batch: dict[str, torch.Tensor], question_weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and weights: the token after each one, in the same document, answers in full and questions lightly."""
    labels, kind = batch["ids"].roll(-1, 1), batch["kind"].roll(-1, 1)
    follows = batch["pos"].roll(-1, 1) == batch["pos"] + 1
    weights = torch.where(kind == ANSWER, 1.0, question_weight) * (kind > 0) * follows
    return labels, weights


def to_device(arrays: dict, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(a).to(device, non_blocking=True).long() for name, a in arrays.items()}


def train_target(run: Run, gsm8k: list[dict[str, str]], seconds: float, stage: Stage) -> None:
    args, model, tokenizer = run.args, run.target, run.tokenizer
    stop = time.perf_counter() + seconds
    documents = encode(tokenizer.backend_tokenizer, gsm8k, args.length)
    data = PackedProblems(
        tokenizer.backend_tokenizer.to_str(), documents, args.gsm8k_share, args.rows, args.length, args.seed
    )
    source = batches(data, args.workers)
    validation = generate(args.seed + 77_777, args.val_count, heldout_questions())
    optimizer = MixedOptimizer(model, args.lr * args.lr_scale, args.muon_lr * args.lr_scale, args.optimizer == "muon")
    loss_fn = torch.compile(weighted_loss, dynamic=False) if args.compile else weighted_loss
    if args.compile:
        compile_layers(model.model)
    model.train()
    start = saved = evaluated = time.perf_counter()
    step, tokens, waited, mean = 0, 0, 0.0, None
    while True:
        asked = time.perf_counter()
        batch = to_device(next(source), run.device)
        waited += time.perf_counter() - asked
        labels, weights = next_token_targets(batch, args.question_weight)
        windows = {"full_attention": None, "sliding_attention": model.config.sliding_window}
        masks = {kind: causal_mask(batch["pos"], window, torch.bfloat16) for kind, window in windows.items()}
        hidden = model.model(
            input_ids=batch["ids"],
            position_ids=batch["pos"],
            attention_mask=masks,
            use_cache=False,
        ).last_hidden_state
        loss = loss_fn(hidden, model.lm_head.weight, labels, weights, model.config.final_logit_softcapping)
        loss.backward()
        now = time.perf_counter()
        optimizer.step(schedule((now - start) / (stop - start)) if step else 0.05)
        mean = loss.detach() if mean is None else mean.lerp(loss.detach(), 0.05)
        step, tokens = step + 1, tokens + labels.numel()
        if step == 1:
            mean.item()
            print(f"first step, with compilation: {time.perf_counter() - start:.1f} s", flush=True)
            start = saved = evaluated = time.perf_counter()
            stage.update(0.0)
            tokens, waited = 0, 0.0
        if step % 8:
            continue
        value = mean.item()  # also keeps the host from running ahead of the clock
        now = time.perf_counter()
        rate = tokens / (now - start) / 1e3
        says = f"step {step}, loss {value:.4f}, {rate:.0f}k tok/s, waited {waited:.1f} s"
        stage.update((now - start) / (stop - start), says)
        if now - saved > 120:
            save(model, tokenizer, run.target_dir, args.shard_size)
            saved = now
        if now - evaluated > args.eval_every and stop - now > 0.5 * args.eval_every:
            score = accuracy(model, tokenizer, validation, min(args.max_new, 144))
            print(f"{now - start:6.0f} s  validation accuracy {score:.3f} of {len(validation)}", flush=True)
            evaluated = time.perf_counter()
        if now >= stop:
            break
    elapsed = time.perf_counter() - start
    del source
    save(model, tokenizer, run.target_dir, args.shard_size)
    run.result["target_training"] = {
        "steps": step,
        "tokens": tokens,
        "tokens_per_s": round(tokens / elapsed),
        "loss": value,
    }


def score_target(run: Run, dev: list[dict[str, str]], stage: Stage) -> None:
    """Greedy accuracy in bfloat16 on held-out and GSM8K dev problems, in float32 on the held-out ones."""
    sets = {"heldout": heldout()[: run.args.report_count], "gsm8k_dev": dev[: run.args.report_count]}
    wide = Gemma4ForCausalLM.from_pretrained(run.target_dir, dtype=torch.float32).to(run.device)
    cases = [("heldout", "bf16", run.target), ("gsm8k_dev", "bf16", run.target), ("heldout", "fp32", wide)]
    for turn, (name, dtype, model) in enumerate(cases):
        stage.update(turn / len(cases), f"{name}, {dtype}")
        score = accuracy(model, run.tokenizer, sets[name], run.args.max_new)
        run.result[f"{name}_accuracy_{dtype}"] = score


def load_or_make(run: Run, gsm8k: list[dict[str, str]]) -> None:
    args = run.args
    if args.init_from:
        run.tokenizer = PreTrainedTokenizerFast.from_pretrained(args.init_from)
        run.target = Gemma4ForCausalLM.from_pretrained(args.init_from, dtype=torch.bfloat16).to(run.device)
        return
    run.tokenizer = train_tokenizer(tokenizer_corpus(gsm8k, args.seed + 1, 2000 if args.tiny else 20_000))
    assert len(run.tokenizer) == VOCAB, len(run.tokenizer)
    run.target = new_target(args.tiny, run.device)


def report(run: Run) -> None:
    run.result |= {
        "seconds": {name: round(s, 1) for name, s in run.seconds.items()},
        "seed": run.args.seed,
        "arguments": {k: str(v) for k, v in vars(run.args).items() if not isinstance(v, Path)},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "device": torch.cuda.get_device_name() if run.device.type == "cuda" else "cpu",
        "target_parameters": sum(p.numel() for p in run.target.parameters()),
    }
    (run.args.out / "report.json").write_text(json.dumps(run.result, indent=2) + "\n")
    print("\n--- report")
    for name, value in run.result.items():
        if name != "arguments":
            print(f"{name:28} {value}")


def main() -> None:
    args = parse_args()
    if args.merge:
        merge_shards(args.merge)
        return
    stages = args.stages.split(",")
    assert set(stages) <= set(STAGES), f"{stages=}, allowed are {STAGES}"
    torch.manual_seed(args.seed)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan per shape; the memory-efficient kernel does not
    transformers.utils.logging.disable_progress_bar()
    began = time.perf_counter() - time.process_time()  # importing torch counts against the limit too
    run = Run(args, began, torch.device(args.device))
    args.out.mkdir(parents=True, exist_ok=True)
    gsm8k, dev = read_gsm8k(args.gsm8k_train)

    def timed(name: str, began: float) -> None:
        run.seconds[name] = time.perf_counter() - began
        print(f"=== {name}: {run.seconds[name]:.1f} s, {run.left():.0f} s left", flush=True)

    began = time.perf_counter()
    load_or_make(run, gsm8k)
    save(run.target, run.tokenizer, run.target_dir, args.shard_size)
    timed("tokenizer", began)
    if "target" in stages:
        began = time.perf_counter()
        seconds = run.left() - 5 - (args.report_seconds if "report" in stages else 0)
        with Stage("target", every=args.log_every) as stage:
            train_target(run, gsm8k, seconds, stage)
        timed("target", began)
    run.target.requires_grad_(False).eval()
    if "report" in stages:
        began = time.perf_counter()
        with Stage("report", every=args.log_every) as stage:
            score_target(run, dev, stage)
        timed("report", began)
    report(run)


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Train the bundled tiny Gemma 4.")
    p.add_argument("--gsm8k-train", type=Path)
    p.add_argument("--out", type=Path)
    p.add_argument("--minutes", type=float, default=9.0, help="limit of the whole call, compilation included")
    p.add_argument("--report-seconds", type=float, default=50.0, help="time set aside for the report")
    p.add_argument("--stages", default=",".join(STAGES))
    p.add_argument("--init-from", type=Path, help="folder of a target and its tokenizer to continue from")
    p.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    p.add_argument("--lr", type=float, default=3e-3, help="peak rate of AdamW")
    p.add_argument("--muon-lr", type=float, default=1e-2, help="peak rate of Muon")
    p.add_argument("--lr-scale", type=float, default=1.0, help="lower both peaks, when going on")
    p.add_argument("--question-weight", type=float, default=0.1)
    p.add_argument("--gsm8k-share", type=float, default=0.1)
    p.add_argument("--rows", type=int, default=128)
    p.add_argument("--length", type=int, default=512)
    p.add_argument("--workers", type=int, default=max(0, min(14, (os.cpu_count() or 2) - 2)))
    p.add_argument("--max-new", type=int, default=256)
    p.add_argument("--val-count", type=int, default=128)
    p.add_argument("--report-count", type=int, default=200)
    p.add_argument("--eval-every", type=float, default=110.0)
    p.add_argument("--log-every", type=float, default=15.0)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--shard-size", default="14MB")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--tiny", action="store_true", help="a miniature target, to test the script itself")
    p.add_argument("--merge", type=Path, help="only merge the shards of this checkpoint folder into one file")
    args = p.parse_args()
    if not args.merge and not (args.gsm8k_train and args.out):
        p.error("--gsm8k-train and --out are needed")
    return args


if __name__ == "__main__":
    main()
