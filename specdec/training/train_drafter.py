"""Train a drafter for a Hugging Face causal LM that specdec runs: an EAGLE-3 head or a frozen-KV (MTP) drafter.

    specdec train --target DIR --prompts prompts.jsonl --out head
    accelerate launch --num_processes 4 -m specdec.cli train ...

Stages: the target's own answers to the prompts (nothing else is learnt from), training-time test on them, and a report
on prompts kept aside, by the engine that will serve the drafter. Stages are limited by time and leave their state under
OUT/training: the same command again goes on where it was stopped (Ctrl-C is fine), or only reports.

The drafter is saved in a published format (SpecForge's EAGLE-3, or transformers' Gemma4Assistant), to be used as
`Engine.from_pretrained(target, drafter=OUT)`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.eagle3.head import Eagle3Spec
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.loading import load_any_drafter, load_model, load_tokenizer
from specdec.models.target import TargetModel
from specdec.training.drafter_lessons import Lesson, Recipe, draft_loss
from specdec.training.eagle3_training import Eagle3Recipe
from specdec.training.mtp_training import MTPRecipe, new_assistant
from specdec.training.train_settings import TrainSettings
from specdec.training.training_data import (
    ROOM,
    Document,
    PackedRows,
    collect_answers,
    encode,
    pack_rows,
    prompt_source,
    read_answers,
)
from specdec.training.training_optimizer import MixedOptimizer, Team, schedule
from specdec.training.training_progress import Stage

SAVE_EVERY = 60.0  # seconds
FREE_SETTINGS = frozenset(
    {"out", "minutes", "answer_minutes", "answers", "steps", "log_every", "device", "report_count", "cache_gb", "batch"}
)
"""What a run may change when it goes on."""
SHAPES = {"chain of 4": SpecConfig(4), "tree, topk 4, 16 nodes": SpecConfig(4, 4, 16)}


class Lessons:
    """Batches with what the target says about them; kept when they fit `cache_gb`, else asked for again."""

    def __init__(self, recipe: Recipe, documents: list[Document], args: TrainSettings, team: Team) -> None:
        self.recipe, self.team, self.seed = recipe, team, args.seed
        self.device = recipe.target.device
        self.data = pack_rows(documents, args.length)
        self.count = len(self.data.ids)
        self.rows = min(args.rows, max(1, self.count // team.size))
        self.keep = args.cache_gb * 1e9 / team.size
        self.kept: dict[int, Lesson] = {}
        self.kept_bytes = 0

    def from_step(self, step: int) -> Iterator[tuple[PackedRows, Lesson]]:
        """Endless; each process takes its own rows of every batch, in an order that only the step decides."""
        width = self.rows * self.team.size
        for number in itertools.count(step):
            epoch, at = divmod(number, max(1, self.count // width))
            order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + epoch))
            index = order[at * width + self.team.rank : (at + 1) * width : self.team.size]
            lessons = [self._lesson(int(i)) for i in index]
            lesson = {name: torch.cat([x[name] for x in lessons]).to(self.device) for name in lessons[0]}
            yield self._batch(index), lesson

    def _batch(self, index: torch.Tensor) -> PackedRows:
        return PackedRows(*(x[index].to(self.device).long() for x in self.data))

    def _lesson(self, row: int) -> Lesson:
        if row in self.kept:
            return self.kept[row]
        lesson = {k: x.bfloat16() for k, x in self.recipe.teach(self._batch(torch.tensor([row]))).items()}
        size = sum(x.numel() * x.element_size() for x in lesson.values())
        if self.kept_bytes + size <= self.keep:
            self.kept[row] = lesson
            self.kept_bytes += size
        return lesson


def train(recipe: Recipe, lessons: Lessons, args: TrainSettings, team: Team, stage: Stage) -> dict[str, Any]:
    """Train until the clock (or --steps) says so; the schedule follows whichever is nearer its end."""
    named = dict(recipe.module.named_children())
    optimizer = MixedOptimizer(torch.nn.ModuleDict(named), args.lr, args.muon_lr, args.optimizer == "muon")
    state_file = args.out / "training" / "state.pt"
    step, spent, value = 0, 0.0, float("nan")
    if state_file.exists():
        state = torch.load(state_file, map_location=recipe.target.device, weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        recipe.target_ids = state["target_ids"]  # more answers since then would have chosen others
        step, spent, value = state["step"], state["seconds"], state["loss"]
        print(f"going on from step {step}, {spent:.0f} s of training", flush=True)

    def save(seconds: float) -> None:
        if team.main:
            recipe.save(args.out)
            part = state_file.with_suffix(".part")
            record = {"step": step, "seconds": seconds, "loss": value, "target_ids": recipe.target_ids}
            torch.save(record | {"optimizer": optimizer.state_dict()}, part)
            part.replace(state_file)  # whole or not at all

    def fraction() -> float:
        seconds = time.perf_counter() - start
        return team.most(max(seconds / (60 * args.minutes), step / args.steps if args.steps else 0.0))

    recipe.module.train()
    start = time.perf_counter() - spent
    saved = time.perf_counter()
    done = fraction()
    stage.update(done)
    batches = lessons.from_step(step)
    try:
        while done < 1:
            batch, lesson = next(batches)
            loss = draft_loss(recipe, recipe.target, batch, lesson, args.draft_steps)
            loss.backward()
            team.average_gradients(optimizer.parameters)
            optimizer.step(schedule(done))
            step, value, now = step + 1, loss.item(), time.perf_counter()
            if now - saved > SAVE_EVERY:
                save(now - start)
                saved = now
            done = fraction()
            epoch = step * lessons.rows * team.size / lessons.count
            stage.update(done, f"step {step}, loss {value:.4f}, epoch {epoch:.2f}")
            if done >= 1:
                save(now - start)
    except KeyboardInterrupt:
        save(time.perf_counter() - start)
        raise
    recipe.module.eval()
    team.wait()
    return {"steps": step, "loss": round(value, 4), "rows": lessons.count}


def measure(
    target: TargetModel, tokenizer: Any, args: TrainSettings, prompts: list[dict[str, Any]], stage: Stage
) -> dict[str, Any]:
    """Acceptance of the saved drafter on prompts kept aside, greedy, by the engine."""
    found: dict[str, Any] = {}
    for turn, (name, spec) in enumerate(SHAPES.items()):
        stage.update(turn / len(SHAPES), name)
        config = EngineConfig(max_batch_size=args.batch, max_model_len=args.length)
        with Engine(
            target, load_any_drafter(str(args.out), target), tokenizer=tokenizer, spec=spec, config=config
        ) as engine:
            ids = [p for prompt in prompts if len(p := encode(engine, prompt)) + ROOM <= args.length]
            for first in range(0, len(ids), args.batch):
                part = ids[first : first + args.batch]
                params = [SamplingParams(max_new_tokens=min(args.max_new, args.length - len(p))) for p in part]
                engine.generate(part, params, progress=False)
                answered = first + len(part)
                stage.update((turn + answered / len(ids)) / len(SHAPES), f"{name}, {answered} prompts")
            stats = engine.stats()
        found[name] = {
            "prompts": len(ids),
            "acceptance_length": round(stats.acceptance_length, 3),
            "accepted_per_position": [round(share, 3) for share in stats.accepted_per_position],
        }
        print(f"{name}: acceptance length {stats.acceptance_length:.2f} over {len(ids)} prompts", flush=True)
    return found


def check_shape(target: TargetModel, args: TrainSettings) -> None:
    """Say what cannot be made before any answer is asked for."""
    heads = args.heads or int(target.config.num_attention_heads)
    hidden = args.hidden or target.hidden_size
    if args.kind == "mtp":
        kv_heads = {f"the target's {spec.layer_type}": spec.num_kv_heads for spec in target.layout.layers}
    else:
        kv_heads = {"--kv-heads": args.kv_heads or target.layout.layers[-1].num_kv_heads}
        if args.head_dim is None and hidden % heads:
            raise ConfigError(f"--heads {heads} does not divide --hidden {hidden}; give a divisor, or --head-dim")
        head_dim = args.head_dim or hidden // heads
        if head_dim % 2:
            raise ConfigError(f"--head-dim {head_dim} is odd, but RoPE turns pairs of numbers; give an even --head-dim")
    for name, count in kv_heads.items():
        if heads % count:
            raise ConfigError(f"--heads {heads} does not group over {count} ({name}); give a multiple of {count}")


def new_recipe(target: TargetModel, documents: list[Document], args: TrainSettings) -> Recipe:
    hidden, config, num_layers = args.hidden, target.config, len(target.layout.layers)
    owner = target.layout.layers[-1]
    heads = args.heads or int(config.num_attention_heads)
    if args.kind == "mtp":
        hidden = hidden or max(64, target.hidden_size // 2)
        layers, intermediate = args.layers or 2, args.intermediate or 4 * hidden
        return MTPRecipe(
            new_assistant(target, hidden=hidden, intermediate=intermediate, layers=layers, heads=heads), target
        )
    hidden = hidden or target.hidden_size
    spec = Eagle3Spec(
        hidden_size=hidden,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        intermediate_size=args.intermediate or 3 * hidden,
        num_heads=heads,
        num_kv_heads=args.kv_heads or owner.num_kv_heads,
        head_dim=args.head_dim or hidden // heads,
        aux_layers=(2, num_layers // 2, num_layers - 3),
        windows=(None,) * (args.layers or 1),
        draft_vocab_size=min(args.draft_vocab, target.vocab_size),
        max_position_embeddings=target.max_position_embeddings or 4096,
        owns_embed=hidden != target.hidden_size,
        fc_norm=True,
        norm_output=True,
    )
    return Eagle3Recipe.new(target, documents, spec, args.draft_vocab)


def remember_settings(args: TrainSettings) -> None:
    """Refuse to go on from a run that had other settings."""
    settings = {k: v for k, v in asdict(args).items() if k not in FREE_SETTINGS}
    settings["prompts"] = [_fingerprint(name) for name in args.prompts]
    file = args.out / "training" / "settings.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
        return
    before = json.loads(file.read_text("utf-8"))
    names = [name for name, value in settings.items() if before.get(name) != value and name != "prompts"]
    changed = [f"--{name.replace('_', '-')} was {before.get(name)}, is {settings[name]}" for name in names]
    if settings["prompts"] != before["prompts"]:
        changed.append("the content of --prompts has changed")
    if changed:
        raise ConfigError(
            f"{args.out} holds a run with other settings ({'; '.join(changed)}); give another --out or those settings, "
            f"or delete {args.out / 'training'} to start over"
        )


def _fingerprint(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def train_drafter(args: TrainSettings) -> None:
    """All stages. Raises SpecDecError for what cannot be made; Ctrl-C keeps what is done."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    team = Team(cpu=args.device == "cpu" or not torch.cuda.is_available())
    torch.manual_seed(args.seed)
    source, kept = prompt_source(args.prompts, args.seed)
    asked = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(team.state.device if asked == "cuda" else asked)
    model = load_model(args.target, dtype=getattr(torch, args.dtype), device=device).requires_grad_(False)
    tokenizer, target = load_tokenizer(args.tokenizer or args.target), TargetModel(model)
    if tokenizer is None:
        raise ConfigError(f"{args.tokenizer or args.target!r} holds no tokenizer; give --tokenizer")
    check_shape(target, args)
    if team.main:
        remember_settings(args)
    team.wait()
    config = EngineConfig(max_batch_size=args.batch, max_model_len=args.length)
    with (
        Engine(target, None, tokenizer=tokenizer, config=config) as engine,
        Stage("answers", every=args.log_every, show=team.main) as stage,
    ):
        collect_answers(
            engine,
            itertools.islice(source, team.rank, None, team.size),
            args.out / "training" / f"answers-{team.rank}.jsonl",
            count=-(-args.answers // team.size),
            seconds=60 * args.answer_minutes,
            length=args.length,
            max_new=args.max_new,
            temperature=args.temperature,
            seed=args.seed + team.rank * 10**6,
            stage=stage,
        )
    team.wait()
    documents = read_answers(args.out / "training", args.length)
    tokens = sum(len(d) - cut for d, cut in documents)
    recipe = new_recipe(target, documents, args)
    parameters = sum(p.numel() for p in recipe.module.parameters())
    if team.main:
        print(
            f"{len(documents)} answers, {tokens} tokens; {parameters / 1e6:.2f} million parameters to train", flush=True
        )
    result: dict[str, Any] = {"target": args.target, "kind": args.kind, "parameters": parameters}
    result |= {"answers": len(documents), "answer_tokens": tokens, "processes": team.size}
    with Stage("training", every=args.log_every, show=team.main) as stage:
        result |= train(recipe, Lessons(recipe, documents, args, team), args, team, stage)
    if team.main:
        with Stage("report", every=args.log_every) as stage:
            result["held_out"] = measure(target, tokenizer, args, kept[: args.report_count], stage)
        result |= {"device": str(device), "torch": torch.__version__, "transformers": transformers.__version__}
        (args.out / "training" / "report.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    team.wait()
