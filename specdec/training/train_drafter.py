"""Train a drafter for a causal LM: an EAGLE-3 head, an MTP module, a frozen-KV assistant or a block drafter.

Stages: the target answers the prompts, the drafter learns from these answers alone (training-time test), and an engine
reports its acceptance on held-out prompts. Each stage has a time limit and leaves its state under OUT/training. So the
same command continues where it was stopped (also by Ctrl-C), or only reports. The drafter is saved in a published
format (SpecForge's EAGLE-3, Qwen's MTP tensors, transformers' Gemma4Assistant, or DFlash).
"""

import json
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import gather

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.block.block_head import BlockHead, BlockSpec, spread_layers
from specdec.draft_models.eagle3.head import Eagle3Head, Eagle3Spec
from specdec.draft_models.native_mtp.mtp_checkpoint import module_count
from specdec.drafter_loading import load_any_drafter
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.loading import Checkpoint, load_model, load_tokenizer
from specdec.models.target import TargetModel
from specdec.progress import Stage
from specdec.training.assistant_training import TrainableAssistant, new_assistant
from specdec.training.block_training import TrainableBlock
from specdec.training.draft_loss import TrainableDrafter, draft_loss
from specdec.training.eagle3_training import TrainableEagle3
from specdec.training.native_mtp_training import TrainableNativeMtp, trainable_native_mtp
from specdec.training.output_folder import claim_folder, require_free_folder
from specdec.training.target_answers import (
    MIN_ANSWER,
    Chat,
    collect_answers,
    encode,
    prompt_source,
    read_answers,
    warn_of_repetition,
)
from specdec.training.train_settings import TrainSettings
from specdec.training.training_batches import TrainingBatches
from specdec.training.training_optimizer import MixedOptimizer, average_gradients, schedule

SAVE_EVERY = 60.0  # seconds
SHAPES = {"chain of 4": SpecConfig(4, adaptive=False), "tree, topk 4, 16 nodes": SpecConfig(4, 4, 16, adaptive=False)}


def train_steps(
    drafter: TrainableDrafter, batches: TrainingBatches, settings: TrainSettings, stage: Stage
) -> dict[str, Any]:
    """Train for --minutes or --steps, whichever ends first; the learning rate follows the limit that is nearer."""
    optimizer = MixedOptimizer(
        torch.nn.ModuleDict(drafter.trained), settings.lr, settings.muon_lr, settings.optimizer == "muon"
    )
    state_file = settings.out / "training" / "state.pt"
    step, spent, value = 0, 0.0, float("nan")
    if state_file.exists():
        state = torch.load(state_file, map_location=drafter.target.device, weights_only=True)
        if "optimizers" not in state["optimizer"]:
            raise ConfigError(
                f"{state_file} holds the optimiser of an earlier version of specdec, which this one cannot go on with; "
                "delete it to train anew on the same answers, or train into another --out"
            )
        optimizer.load_state_dict(state["optimizer"])
        if state["target_ids"] is not None:
            drafter.module.target_ids = state["target_ids"]  # today's answers may give other ids
        step, spent, value = state["step"], state["seconds"], state["loss"]
        print(f"going on from step {step}, {spent:.0f} s of training", flush=True)

    def save(seconds: float) -> None:
        if PartialState().is_main_process:
            drafter.save(settings.out)
            part = state_file.with_suffix(".part")
            record = {"step": step, "seconds": seconds, "loss": value, "target_ids": drafter.target_ids}
            torch.save(record | {"optimizer": optimizer.state_dict()}, part)
            part.replace(state_file)  # atomic

    def fraction() -> float:
        """The maximum over all processes, so that all make the same decision."""
        seconds = time.perf_counter() - start
        ours = max(seconds / (60 * settings.minutes), step / settings.steps if settings.steps else 0.0)
        return float(gather(torch.tensor([ours], dtype=torch.float64, device=PartialState().device)).max())

    drafter.module.train()
    start = time.perf_counter() - spent
    saved = time.perf_counter()
    done = fraction()
    stage.update(done)
    upcoming = batches.from_step(step)
    try:
        while done < 1:
            batch, known = next(upcoming)
            loss = draft_loss(drafter, batch, known, settings.draft_steps)
            loss.backward()
            average_gradients(optimizer.parameters)
            optimizer.step(schedule(done))
            step, value, now = step + 1, loss.item(), time.perf_counter()
            done = fraction()
            stage.update(done, f"step {step}, loss {value:.4f}, epoch {step * batches.width / batches.count:.2f}")
            if done >= 1 or now - saved > SAVE_EVERY:
                save(now - start)
                saved = now
    except KeyboardInterrupt:
        save(time.perf_counter() - start)
        raise
    drafter.module.eval()
    PartialState().wait_for_everyone()
    return {"steps": step, "loss": round(value, 4), "rows": batches.count}


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
            ids = [p for prompt in prompts if len(p := encode(engine, prompt)) + MIN_ANSWER <= settings.length]
            room = [min(settings.max_new_tokens, settings.length - len(p)) for p in ids]
            engine.generate(ids, [SamplingParams(max_new_tokens=most) for most in room], progress=False)
            stats = engine.stats()
        found[name] = {
            "prompts": len(ids),
            "acceptance_length": round(stats.acceptance_length, 3),
            "accepted_per_position": [round(share, 3) for share in stats.accepted_per_position],
        }
        print(f"{name}: acceptance length {stats.acceptance_length:.2f} over {len(ids)} prompts", flush=True)
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


def new_drafter(target: TargetModel, settings: TrainSettings) -> TrainableDrafter:
    """Raises ConfigError or UnsupportedModelError for a drafter that cannot be made."""
    if settings.kind == "eagle3":
        head = Eagle3Head(eagle3_spec(target, settings))
        return TrainableEagle3(head.place(target.device, torch.bfloat16), target)
    if settings.kind == "block":
        blocks = BlockHead(block_spec(target, settings))
        return TrainableBlock(blocks.place(target.device, torch.bfloat16), target)
    if settings.kind == "mtp":
        return new_module(target, settings)
    for layer in target.layout.layers:
        _require_groups(_query_heads(target, settings), layer.k.heads, f"the target's {layer.layer_type}")
    hidden = settings.hidden or max(64, target.hidden_size // 2)
    assistant = new_assistant(
        target,
        hidden=hidden,
        intermediate=settings.intermediate or 4 * hidden,
        layers=settings.layers or 2,
        heads=_query_heads(target, settings),
    )
    return TrainableAssistant(assistant, target)


def new_module(target: TargetModel, settings: TrainSettings) -> TrainableNativeMtp:
    """The module that --finetune names, the module in the target's checkpoint, or a new one."""
    start = settings.finetune
    own = Checkpoint.from_name(settings.target).folder()
    if start is None and module_count(own, len(target.layout.layers)) == 1:
        start = own
    return trainable_native_mtp(target, start, settings.conventions)


def eagle3_spec(target: TargetModel, settings: TrainSettings) -> Eagle3Spec:
    """The head's shape. Raises ConfigError if heads and widths do not match."""
    hidden, num_layers = settings.hidden or target.hidden_size, len(target.layout.layers)
    return Eagle3Spec(
        **_layer_shape(target, settings, hidden, settings.layers or 1),
        target_hidden_size=target.hidden_size,
        aux_layers=(2, num_layers // 2, num_layers - 3),
        draft_vocab_size=min(settings.draft_vocab, target.vocab_size),
        owns_embed=hidden != target.hidden_size,
        fc_norm=True,
        norm_output=True,
    )


def block_spec(target: TargetModel, settings: TrainSettings) -> BlockSpec:
    """The head's shape. Raises ConfigError if widths, heads or MASK do not match."""
    hidden, num_layers = target.hidden_size, len(target.layout.layers)
    if settings.hidden not in (None, hidden):
        raise ConfigError(f"--hidden {settings.hidden}: a block drafter has the target's width, {hidden}; leave it out")
    layers = settings.layers or 2
    shape = _layer_shape(target, settings, hidden, layers)
    pad = getattr(target.config, "pad_token_id", None)
    mask = settings.mask_token if settings.mask_token is not None else pad
    if mask is None or not 0 <= mask < target.vocab_size:
        raise ConfigError(
            f"MASK is token {mask}; give --mask-token, an id below {target.vocab_size} that texts do not contain"
        )
    return BlockSpec(
        **shape,
        aux_layers=spread_layers(max(3, layers), num_layers),
        block_size=1 + settings.draft_steps,
        mask_token=mask,
        causal=settings.causal,
    )


def _layer_shape(target: TargetModel, settings: TrainSettings, hidden: int, layers: int) -> dict[str, Any]:
    """Fields of `HeadSpec`. Raises ConfigError where heads and widths do not fit each other."""
    heads = _query_heads(target, settings)
    if settings.head_dim is None and hidden % heads:
        raise ConfigError(f"--heads {heads} does not divide --hidden {hidden}; give a divisor, or --head-dim")
    head_dim = settings.head_dim or hidden // heads
    if head_dim % 2:
        raise ConfigError(f"--head-dim {head_dim} is odd, but RoPE turns pairs of numbers; give an even --head-dim")
    kv_heads = settings.kv_heads or target.layout.layers[-1].k.heads
    _require_groups(heads, kv_heads, "--kv-heads")
    return {
        "hidden_size": hidden,
        "vocab_size": target.vocab_size,
        "intermediate_size": settings.intermediate or 3 * hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "windows": (None,) * layers,
        "max_position_embeddings": target.max_position_embeddings or 4096,
    }


def _query_heads(target: TargetModel, settings: TrainSettings) -> int:
    return settings.heads or int(target.config.num_attention_heads)


def _require_groups(heads: int, kv_heads: int, name: str) -> None:
    if heads % kv_heads:
        raise ConfigError(f"--heads {heads} does not group over {kv_heads} ({name}); give a multiple of {kv_heads}")


def train_drafter(settings: TrainSettings) -> None:
    """Run all stages. Raises SpecDecError for a drafter that cannot be made; after Ctrl-C finished work is kept."""
    settings.require_numbers()
    state = PartialState(cpu=settings.device == "cpu" or not torch.cuda.is_available())
    torch.manual_seed(settings.seed)
    require_free_folder(settings)
    source = prompt_source(settings.prompts, settings.seed)
    asked = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(state.device if asked == "cuda" else asked)
    model = load_model(settings.target, dtype=getattr(torch, settings.dtype), device=device).requires_grad_(False)
    tokenizer, target = load_tokenizer(settings.tokenizer or settings.target), TargetModel(model)
    if tokenizer is None:
        raise ConfigError(f"{settings.tokenizer or settings.target!r} holds no tokenizer; give --tokenizer")
    drafter = new_drafter(target, settings)  # before the target answers anything
    if state.is_main_process:
        claim_folder(settings)
        warn_of_repetition(settings.answers, source.num_prompts)
    state.wait_for_everyone()
    config = EngineConfig(max_batch_size=settings.batch, max_model_len=settings.length)
    shown: dict[str, Any] = {"every": settings.log_every, "show": state.is_main_process}
    with Engine(target, None, tokenizer=tokenizer, config=config) as engine, Stage("answers", **shown) as stage:
        collect_answers(engine, source.prompts, settings, stage)
    state.wait_for_everyone()
    documents = read_answers(settings.out / "training", settings.length)
    tokens = sum(len(d) - cut for d, cut in documents)
    if isinstance(drafter, TrainableEagle3):
        drafter.choose_vocabulary(documents, settings.draft_vocab)
    parameters = sum(p.numel() for part in drafter.trained.values() for p in part.parameters())
    sizes = f"{len(documents)} answers, {tokens} tokens; {parameters / 1e6:.2f} million parameters to train"
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
