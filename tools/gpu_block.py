"""Block drafters on a GPU: captured rounds against plain decoding, and what a round takes at the shape of Qwen3-8B.

    python tools/gpu_block.py                # parity, then times
    python tools/gpu_block.py --layers 4     # times of a smaller target, to see that they run

Parity: small random targets and heads of every kind in float32, chains and trees, captured and not; every token must be
that of plain decoding in the same engine's operations. Times: random weights in bfloat16, one request after a prompt of
1,024 tokens, plain and with blocks of 16; milliseconds a round by the engine's own clock, medians are not taken.
"""

import argparse
import random
from typing import Any

from gpu_setup import DEVICE, ON_CPU, device_option, machine, require_device  # isort: skip - before triton
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.block.block_drafter import BlockDrafter
from specdec.draft_models.block.block_head import BlockHead, BlockSpec
from specdec.engine import Engine
from specdec.gpu.operations import choose_operations
from specdec.models.target import TargetModel

DSPARK = {"shifted": True, "owns_vocabulary": True, "successor": "vanilla", "successor_rank": 16}
KINDS: dict[str, dict[str, Any]] = {"dflash": {}, "jetspec": {"causal": True}, "dspark": DSPARK}
SPECS = {
    "chain": SpecConfig(15, adaptive=False),
    "tree of 32": SpecConfig(15, 4, 32, adaptive=False),
    "tree of 64": SpecConfig(15, 8, 64, adaptive=False),
}


def filled(module: Any, gain: float) -> Any:
    """Random weights that keep activations near `gain`."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.0 if "embed" in name else gain * weight.shape[-1] ** -0.5)
    return module.eval()


def target_of(layers: int, hidden: int, vocab: int, dtype: torch.dtype) -> TargetModel:
    torch.manual_seed(0)
    heads = max(4, hidden // 128)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with DEVICE:
        model = Qwen3ForCausalLM._from_config(config, dtype=dtype)
    return TargetModel(filled(model, 1.0), choose_operations("auto", "auto", DEVICE, dtype))


def drafter_of(target: TargetModel, kind: str, layers: int, block: int) -> BlockDrafter:
    torch.manual_seed(1)
    taps, heads = len(target.layout.layers), target.config.num_attention_heads
    spec = BlockSpec(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        intermediate_size=3 * target.hidden_size,
        num_heads=heads,
        num_kv_heads=heads // 4,
        head_dim=128,
        aux_layers=tuple(1 + i * (taps - 2) // 5 for i in range(5)),
        block_size=block,
        mask_token=target.vocab_size - 1,
        windows=(None,) * layers,
        **KINDS[kind],
    )
    with DEVICE:
        head = BlockHead(spec)
    return BlockDrafter(filled(head.place(DEVICE, target.dtype), 1.0), target)


def check_parity() -> None:
    target = target_of(6, 512, 24, torch.float32)
    prompts = [[random.Random(i).randrange(24) for _ in range(5 + 9 * i)] for i in range(6)]
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    for deterministic in (False, True):
        settings: dict[str, Any] = {"max_model_len": 256, "max_batch_size": 4, "deterministic": deterministic}
        with Engine(target, None, config=EngineConfig(**settings)) as engine:
            want = [out.token_ids for out in engine.generate(prompts, params)]
        for kind in KINDS:
            drafter = drafter_of(target, kind, 2, 8)
            for graphs in (False,) if ON_CPU else (False, True):
                for name, spec in SPECS.items():
                    config = EngineConfig(**settings, cuda_graphs=graphs, page_size=16)
                    with Engine(target, drafter, spec=spec, config=config) as engine:
                        got = [out.token_ids for out in engine.generate(prompts, params)]
                        length = engine.stats().acceptance_length
                    wrong = sum(a != b for a, b in zip(got, want, strict=True))
                    label = f"{kind}, {name}, graphs={graphs}, deterministic={deterministic}"
                    fused = "fused" if drafter.unfused is None else f"unfused: {drafter.unfused}"
                    print(
                        f"{label}: {len(want) - wrong} of {len(want)} equal, {length:.2f} a round, {fused}", flush=True
                    )


def time_rounds(layers: int) -> None:
    target = target_of(layers, 4096, 151_936, torch.bfloat16)
    drafter = drafter_of(target, "dflash", 5, 16)
    prompt = [random.Random(0).randrange(151_000) for _ in range(1024)]
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    config = EngineConfig(max_model_len=2048, max_batch_size=1, page_size=16)
    for name, spec in {"plain": None, **SPECS}.items():
        drafts = drafter if spec is not None else None
        with Engine(target, drafts, spec=spec or SpecConfig(1, adaptive=False), config=config) as engine:
            engine.generate([prompt], params)  # compiled and captured
            stats = engine.generate([prompt], params)[0].stats
        parts = {"draft": stats.draft_seconds, "verify": stats.verify_seconds, "other": stats.other_seconds}
        each = {part: 1e3 * seconds / stats.rounds for part, seconds in parts.items()}
        print(f"{name}: {sum(each.values()):.2f} ms a round; {each}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[device_option]
    )
    parser.add_argument("--layers", type=int, default=36, help="of the target that is timed; 0: no times")
    given = parser.parse_args()
    require_device()
    print(machine(), flush=True)
    check_parity()
    if given.layers:
        time_rounds(given.layers)
