"""Train a Gemma 4 MTP drafter on the frozen K/V of its target, all positions of a packed row at once.

Position S stands for one drafting round: token x_S has no K/V yet, every step sits at RoPE position S, reads the
committed keys [0, S) (the newest W+1 of them in the sliding layer), and only the recurrent state h moves:

    h_0 = target hidden of S-1;  step j: (embed(x_{S+j}), h_j) -> law of x_{S+j+1}, h_{j+1}

Invariant: the parallel forward equals one `Gemma4AssistantForCausalLM` call per position on K/V cut to [0, S).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from tiny_gemma4_data import ANSWER, Document, additive, answer, encode, masks, pack, to_arrays
from tiny_gemma4_model import MixedOptimizer, compile_layers, save, schedule
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM, PreTrainedTokenizerFast
from word_problems import heldout_questions, stream

STEP_WEIGHTS = (1.0, 0.9, 0.8, 0.7, 0.6)
KV = dict[str, tuple[torch.Tensor, torch.Tensor]]


class Lesson(NamedTuple):
    """What the frozen target says about a packed batch."""

    hidden: torch.Tensor  # [B, T, H] after the final norm
    logits: torch.Tensor  # [B, T, V]
    kv: KV  # last non-shared layer of each type, [B, Hkv, T, D]


def collect_answers(
    target: Gemma4ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    gsm8k: list[dict[str, str]],
    args: argparse.Namespace,
    seconds: float,
) -> list[Document]:
    """The target's answers, greedy and sampled in turn, to GSM8K training questions and fresh problems."""
    stop = time.perf_counter() + seconds
    problems = stream(args.seed + 55_555, heldout_questions())
    size = args.answer_batch
    known = [gsm8k[i : i + size] for i in range(0, len(gsm8k), size)]
    documents: list[Document] = []
    longest, done = 0.0, 0
    while done == 0 or time.perf_counter() + longest < stop:
        began = time.perf_counter()
        # GSM8K once greedy and once sampled, spread between chunks of fresh problems
        use_known = known and done % 2 == 1 and done // 2 < 2 * len(known)
        part = known[done // 2 % len(known)] if use_known else [next(problems) for _ in range(size)]
        sampled = done // 2 >= len(known) if use_known else done % 4 == 2
        prompts = encode(tokenizer.backend_tokenizer, [{**p, "answer": ""} for p in part], args.length)
        ids = [tokens[:cut].tolist() for tokens, cut in prompts]
        new = answer(target, ids, args.max_new, size, temperature=1.0 if sampled else 0.0)
        pairs = zip(ids, new, strict=True)
        documents += [(np.array(q + a, np.int32), len(q)) for q, a in pairs if len(q) + len(a) <= args.length]
        longest, done = max(longest, time.perf_counter() - began), done + 1
    print(f"{len(documents)} answers, {sum(len(d) - c for d, c in documents)} answer tokens", flush=True)
    return documents


@torch.no_grad()
def teach(target: Gemma4ForCausalLM, ids: torch.Tensor, pos: torch.Tensor) -> Lesson:
    out = target.model(
        input_ids=ids,
        position_ids=pos,
        attention_mask=masks(pos, target.config.sliding_window, target.dtype),
        use_cache=False,
        return_shared_kv_states=True,
    )
    cap = target.config.final_logit_softcapping
    logits = cap * torch.tanh(target.lm_head(out.last_hidden_state) / cap)
    return Lesson(out.last_hidden_state, logits, dict(out.shared_kv_states))


def drafter_masks(pos: torch.Tensor, window: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Row S sees keys [0, S), in the sliding layer the newest window+1; S = 0 sees itself to stay finite, unused."""
    doc = (pos == 0).cumsum(1)
    t = torch.arange(pos.shape[1], device=pos.device)
    behind = t[:, None] - t[None, :]
    same = doc[:, :, None] == doc[:, None, :]
    lone = (pos == 0)[:, :, None] & (behind == 0)
    return {
        "full_attention": additive(same & (behind >= 1) | lone, dtype),
        "sliding_attention": additive(same & (behind >= 1) & (behind <= window + 1) | lone, dtype),
    }


def draft_logits(
    target: Gemma4ForCausalLM,
    drafter: Gemma4AssistantForCausalLM,
    ids: torch.Tensor,
    pos: torch.Tensor,
    lesson: Lesson,
    steps: int,
    forced: bool = True,
) -> Iterator[torch.Tensor]:
    """Logits [B, T, V] of each step; forced feeds the true next tokens, otherwise the drafter's own argmax."""
    mask = drafter_masks(pos, target.config.sliding_window, lesson.hidden.dtype)
    token, h = ids, lesson.hidden.roll(1, 1)
    for j in range(steps):
        x = drafter.pre_projection(torch.cat([target.model.embed_tokens(token), h], -1))
        y = drafter.model(
            inputs_embeds=x, position_ids=pos, attention_mask=mask, shared_kv_states=lesson.kv, use_cache=False
        ).last_hidden_state
        logits = drafter.lm_head(y)
        yield logits
        token = ids.roll(-j - 1, 1) if forced else logits.argmax(-1)
        h = drafter.post_projection(y)


def valid_rounds(pos: torch.Tensor, kind: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """For each step j, where tokens S..S+j+1 all lie in one answer."""
    good, out = kind == ANSWER, []
    for j in range(1, steps + 1):
        good = good & (kind.roll(-j, 1) == ANSWER) & (pos.roll(-j, 1) == pos + j)
        out.append(good)
    return out


def soft_loss(logits: torch.Tensor, teacher: torch.Tensor, good: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with the target's law, mean over the good rounds."""
    law = teacher.float().softmax(-1)
    losses = -(law * logits.float().log_softmax(-1)).sum(-1)
    return (losses * good).sum() / good.sum().clamp(min=1)


def train_drafter(
    target: Gemma4ForCausalLM,
    drafter: Gemma4AssistantForCausalLM,
    documents: list[Document],
    args: argparse.Namespace,
    seconds: float,
) -> dict[str, object]:
    stop = time.perf_counter() + seconds
    arrays = to_arrays(pack(documents, args.length), args.length)
    data = {name: torch.from_numpy(a).to(target.device).long() for name, a in arrays.items()}
    optimizer = MixedOptimizer(drafter, args.drafter_lr, args.muon_lr, args.optimizer == "muon")
    loss_fn = torch.compile(soft_loss, dynamic=False) if args.compile else soft_loss
    if args.compile:
        compile_layers(target.model)
        compile_layers(drafter.model)
    count, rows = len(data["ids"]), min(args.rows, len(data["ids"]))
    drafter.train()
    start = shown = saved = time.perf_counter()
    step, order, value = 0, torch.randperm(count), float("nan")
    while True:
        at = step * rows % (count - rows + 1)
        if step and at < rows:
            order = torch.randperm(count)
        batch = {name: a[order[at : at + rows].to(a.device)] for name, a in data.items()}
        ids, pos = batch["ids"], batch["pos"]
        lesson = teach(target, ids, pos)
        rounds = valid_rounds(pos, batch["kind"], len(STEP_WEIGHTS))
        loss = torch.zeros((), device=ids.device)
        for j, logits in enumerate(draft_logits(target, drafter, ids, pos, lesson, len(STEP_WEIGHTS))):
            loss = loss + STEP_WEIGHTS[j] * loss_fn(logits, lesson.logits.roll(-j, 1), rounds[j])
        loss.backward()
        now = time.perf_counter()
        optimizer.step(schedule((now - start) / (stop - start)) if step else 0.05)
        step += 1
        if step == 1:
            print(f"first step, with compilation: {loss.item():.3f}, {time.perf_counter() - start:.1f} s", flush=True)
            start = time.perf_counter()
        if step % 8:
            continue
        value = loss.item() / sum(STEP_WEIGHTS)
        now = time.perf_counter()
        if now - shown > args.log_every:
            print(f"{now - start:6.0f} s  step {step}  loss {value:.4f}  epoch {step * rows / count:.1f}", flush=True)
            shown = now
        if now - saved > 60:
            save(drafter, None, args.out / "tiny-gemma4-mtp", args.shard_size)
            saved = now
        if now >= stop:
            break
    drafter.eval()
    save(drafter, None, args.out / "tiny-gemma4-mtp", args.shard_size)
    size = sum(p.numel() for p in drafter.parameters())
    return {"steps": step, "loss": value, "answers": len(documents), "rows": count, "parameters": size}


@torch.no_grad()
def simulate(
    target: Gemma4ForCausalLM,
    drafter: Gemma4AssistantForCausalLM,
    documents: list[Document],
    length: int,
    drafts: int = 4,
) -> dict[str, object]:
    """Greedy chains of `drafts` tokens against the target's greedy answers.

    `agreement` is the rate per step of correct prefixes over all positions; `acceptance_length` walks each answer as
    decoding would, bonus token included.
    """
    accepted_rounds: list[int] = []
    reached, correct = np.zeros(drafts), np.zeros(drafts)
    rows = pack([d for d in documents if len(d[0]) <= length], length)
    for first in range(0, len(rows), 64):
        part = rows[first : first + 64]
        batch = {n: torch.from_numpy(a).to(target.device).long() for n, a in to_arrays(part, length).items()}
        ids, pos = batch["ids"], batch["pos"]
        with torch.compiler.set_stance("force_eager"):
            lesson = teach(target, ids, pos)
            chains = list(draft_logits(target, drafter, ids, pos, lesson, drafts, forced=False))
        good = torch.stack(valid_rounds(pos, batch["kind"], drafts))
        hits = torch.stack([c.argmax(-1) == ids.roll(-j - 1, 1) for j, c in enumerate(chains)]) & good
        prefix = hits.long().cumprod(0)
        reached += good.sum((1, 2)).cpu().numpy()
        correct += prefix.sum((1, 2)).cpu().numpy()
        accepted = prefix.sum(0).cpu().numpy()
        for r, row in enumerate(part):
            at = 0
            for tokens, cut in row:
                s, end = at + cut, at + len(tokens)
                while s < end - 1:  # the last token ends the turn: no round follows it
                    accepted_rounds.append(int(accepted[r, s]))
                    s += accepted_rounds[-1] + 1
                at += len(tokens)
    rate = correct / reached
    return {
        "agreement": [round(float(x), 4) for x in rate],
        "expected_length": round(1 + float(rate.sum()), 3),
        "acceptance_length": round(1 + sum(accepted_rounds) / max(1, len(accepted_rounds)), 3),
        "rounds": len(accepted_rounds),
        "drafts": drafts,
    }
