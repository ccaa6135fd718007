"""Train a drafter for a causal LM: an EAGLE-3 head, an MTP module, a frozen-KV assistant or a block drafter.

Stages: the target answers the prompts, the drafter learns from these answers alone (training-time test), and an engine
reports its acceptance on held-out prompts. Each stage has a time limit and leaves its state under OUT/training. So the
same command continues where it was stopped (also by Ctrl-C), or only reports. The drafter is saved in a published
format (SpecForge's EAGLE-3, Qwen's MTP tensors, transformers' Gemma4Assistant, or DFlash).
"""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from accelerate import PartialState

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.errors import ConfigError, counted
from specdec.loading.drafter_loading import load_any_drafter
from specdec.loading.model_loading import Checkpoint, load_tokenizer, pick_device
from specdec.models.described_model import context_length
from specdec.models.target import TargetModel
from specdec.progress import Stage
from specdec.settings.declared_fields import require_fields
from specdec.training.assistant_training import trainable_assistant
from specdec.training.draft_loss import TrainableDrafter
from specdec.training.head_training import TrainableEagle3, trainable_block, trainable_eagle3
from specdec.training.native_mtp_training import trainable_module
from specdec.training.output_folder import claim_folder, require_free_folder
from specdec.training.target_answers import (
    Chat,
    collect_answers,
    fitting_prompts,
    prompt_source,
    read_answers,
    warn_of_repetition,
)
from specdec.training.train_settings import TrainSettings, require_own_options
from specdec.training.training_loop import TrainingBatches, train_steps

SHAPES = {"chain of 4": SpecConfig(4, adaptive=False), "tree, topk 4, 16 nodes": SpecConfig(4, 4, 16, adaptive=False)}

NEW_DRAFTERS: dict[str, Callable[[TargetModel, TrainSettings], TrainableDrafter]] = {
    "eagle3": trainable_eagle3,
    "block": trainable_block,
    "mtp": trainable_module,
    "assistant": trainable_assistant,
}
"""Makers by kind. They raise ConfigError or UnsupportedModelError for a drafter that cannot be made."""


def measure(
    target: TargetModel, tokenizer: Any, settings: TrainSettings, prompts: Sequence[Chat], stage: Stage
) -> dict[str, Any]:
    """Acceptance of the saved drafter in an engine, greedy, on held-out prompts."""
    found: dict[str, Any] = {}
    config = EngineConfig(max_batch_size=settings.batch, max_model_len=settings.length)
    shapes = reported_shapes(settings)
    for turn, (name, spec) in enumerate(shapes.items()):
        stage.update(turn / len(shapes), name)
        drafter = load_any_drafter(str(settings.out), target)
        with Engine(target, drafter, tokenizer=tokenizer, spec=spec, config=config) as engine:
            ids = [*fitting_prompts(engine, prompts, settings.length)]
            room = [min(settings.max_new_tokens, settings.length - len(p)) for p in ids]
            engine.generate(ids, [SamplingParams(max_new_tokens=most) for most in room], progress=False)
            stats = engine.stats()
        length = round(stats.acceptance_length, 3) if stats.drafted_rounds else None
        found[name] = {
            "prompts": len(ids),
            "acceptance_length": length,
            "accepted_per_position": [round(share, 3) for share in stats.accepted_per_position],
        }
        figure = "no round had drafts" if length is None else f"acceptance length {length:.2f}"
        print(f"{name}: {figure} over {counted(len(ids), 'prompt')} with room for an answer", flush=True)
    return found


def reported_shapes(settings: TrainSettings) -> dict[str, SpecConfig]:
    """Drafts for which acceptance is measured; for a block drafter, the whole block."""
    if settings.kind != "block" or settings.draft_steps == 4:
        return SHAPES
    depth, nodes = settings.draft_steps, min(32, 5 + 16 * (settings.draft_steps - 1))
    return {
        f"chain of {depth}": SpecConfig(depth, adaptive=False),
        f"tree of depth {depth}, topk 4, {nodes} nodes": SpecConfig(depth, 4, nodes, adaptive=False),
    }


def train_drafter(settings: TrainSettings) -> None:
    """Run all stages. Raises SpecDecError for a drafter that cannot be made; after Ctrl-C finished work is kept."""
    require_fields(settings, name_of=lambda name: f"--{name.replace('_', '-')}")
    require_own_options(settings)
    given = pick_device(settings.device)
    state = PartialState(cpu=given.type == "cpu" or not torch.cuda.is_available())
    torch.manual_seed(settings.seed)
    require_free_folder(settings)
    source = prompt_source(settings.prompts, settings.seed)
    device = state.device if given == torch.device("cuda") else given
    model = Checkpoint.from_name(settings.target).load(getattr(torch, settings.dtype), device).requires_grad_(False)
    tokenizer, target = load_tokenizer(settings.tokenizer or settings.target), TargetModel(model)
    if tokenizer is None:
        raise ConfigError(f"{settings.tokenizer or settings.target!r} holds no tokenizer; give --tokenizer")
    most = context_length(model.config.get_text_config()).max_len
    if most is not None and settings.length > most:
        raise ConfigError(f"--length {settings.length}: {settings.target} serves at most {most} tokens; give fewer")
    drafter = NEW_DRAFTERS[settings.kind](target, settings)  # before the target answers anything
    config = EngineConfig(max_batch_size=settings.batch, max_model_len=settings.length)
    shown: dict[str, Any] = {"every": settings.log_every, "show": state.is_main_process}
    with Engine(target, None, tokenizer=tokenizer, config=config) as engine, Stage("answers", **shown) as stage:
        tried, prompts = itertools.tee(source.prompts)
        next(fitting_prompts(engine, tried, settings.length))
        del tried  # it would keep all prompts that are read
        if state.is_main_process:  # a run that was refused has no folder
            claim_folder(settings)
            warn_of_repetition(settings.answers, source.num_prompts)
        state.wait_for_everyone()
        collect_answers(engine, prompts, settings, stage)
    state.wait_for_everyone()
    documents = read_answers(settings.out / "training", settings.length)
    tokens = sum(len(d) - cut for d, cut in documents)
    if isinstance(drafter, TrainableEagle3):
        drafter.choose_vocabulary(documents, settings.draft_vocab)
    parameters = sum(p.numel() for part in drafter.trained.values() for p in part.parameters())
    sizes = f"{counted(len(documents), 'answer')}, {tokens} tokens; {parameters / 1e6:.2f} million parameters to train"
    state.print(sizes, flush=True)
    result: dict[str, Any] = {"target": settings.target, "kind": settings.kind, "parameters": parameters}
    result |= {"answers": len(documents), "answer_tokens": tokens, "processes": state.num_processes}
    with Stage("training", **shown) as stage:
        result |= train_steps(drafter, TrainingBatches(drafter, documents, settings), settings, stage)
    if state.is_main_process:
        with Stage("report", **shown) as stage:
            result["held_out"] = measure(target, tokenizer, settings, source.kept[: settings.report_count], stage)
        result |= {"device": str(device), "torch": torch.__version__, "transformers": transformers.__version__}
        (settings.out / "training" / "report.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    state.wait_for_everyone()
