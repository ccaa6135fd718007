"""Time EAGLE-3's draft with its K/V in scratch tensors (old) and in lookahead slots (new). Temporary.

    python tools/measure_draft.py [--repeat 50] [--page-size N] [--device cpu]

A random head of the size of Llama 3.1 8B's in bf16, behind a random target of two layers. Timed is the part `draft` of
a round (its start, the tables, all levels, the choice of the tree), captured, both paths in turn; ms are medians by
CUDA events. First the tokens of both paths are compared in float32, where they must be equal, on a small head that has
windows. In bf16 they are compared too, for information: the paths round attention differently, and random logits have
near ties.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from gpu_setup import DEVICE, ON_CPU, device_option, machine, require_device  # isort: skip - before triton
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.attention.trees.tree import DraftTree
from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.eagle3.head import Eagle3Head, Eagle3Spec
from specdec.engine import Engine
from specdec.gpu.operations import choose_operations
from specdec.models.target import TargetModel
from specdec.runtime.rounds.decode_round import DecodeRound
from specdec.runtime.rounds.result import RoundShape
from specdec.sampling.sampling_table import Uses

SHAPES = {  # steps, topk, nodes with the root
    "chain of 4": SpecConfig(4),
    "tree 3x8": SpecConfig(8, 3, 25),
    "tree 8x64": SpecConfig(8, 8, 64),
}
PATHS = {"old": "scratch", "new": "lookahead"}


class Size(NamedTuple):
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    windows: tuple[int | None, ...] = (None,)


LLAMA_8B = Size(4096, 14336, 32, 8, 128, 128256, 32000)
SMALL = Size(512, 1024, 8, 2, 64, 2000, 1000, (None, 37))
TINY = Size(32, 48, 4, 2, 16, 64, 40, (None, 5))


def spread(model: torch.nn.Module) -> Any:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
    return model.eval()


def make_engine(size: Size, dtype: torch.dtype, batch: int, max_len: int, page_size: int | None) -> Engine:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=2,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=2 * max_len,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    spec = Eagle3Spec(
        hidden_size=size.hidden,
        target_hidden_size=size.hidden,
        vocab_size=size.vocab,
        intermediate_size=size.intermediate,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        aux_layers=(0, 1, 2),
        windows=size.windows,
        draft_vocab_size=size.draft_vocab,
    )
    with torch.device(DEVICE):
        model, head = LlamaForCausalLM(config), Eagle3Head(spec)
    target = TargetModel(spread(model.to(dtype)), choose_operations(True, "triton", DEVICE, dtype))
    target_ids = torch.randperm(size.vocab)[: size.draft_vocab].sort().values
    drafter = Eagle3Drafter(spread(head).place(DEVICE, dtype), target_ids, target)
    for model_name, reason in (("target", target.unfused), ("head", drafter.unfused)):
        if reason is not None:
            print(f"the {model_name} runs by its modules: {reason}", flush=True)
    options: dict[str, Any] = {} if page_size is None else {"page_size": page_size}
    engine_config = EngineConfig(
        attention="triton",
        cuda_graphs=False,
        max_batch_size=batch,
        max_model_len=max_len,
        full_slots=batch * (max_len + 128),
        prefix_cache=False,
        **options,
    )
    engine = Engine(target, drafter, spec=SHAPES["tree 8x64"], config=engine_config)
    worker: Any = engine.round.worker
    for kept in worker.store.layers.values():
        kept.k.normal_()
        kept.v.normal_()
    worker._hidden.normal_()
    table = engine.table
    for _ in range(batch):
        table.ensure(table.open(), max_len)
    return engine


def set_lengths(engine: Engine, lengths: np.ndarray) -> None:
    """The first rows have these committed lengths, and a root behind them."""
    rows, round = np.arange(len(lengths)), engine.round
    engine.table.committed_len[rows] = lengths
    round.tokens[rows, lengths] = 1 + rows
    round.sampling.load(rows, [(SamplingParams(temperature=0), 0)] * len(rows))
    round.max_drafts[rows] = np.full(len(rows), 8)
    round.seat(rows)
    round.flush()


def program(engine: Engine, spec: SpecConfig, batch: int, longest: int) -> Callable[[], DraftTree]:
    shape = RoundShape(batch, longest, spec.depth, spec.topk, spec.num_nodes, Uses(sampled=False), None)

    def draft() -> DraftTree:
        decode = DecodeRound(engine.round, shape)
        decode.draft()
        return decode.tree

    return draft


def captured(draft: Callable[[], DraftTree]) -> tuple[Callable[[], None], DraftTree]:
    if ON_CPU:
        return lambda: None, draft()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            draft()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        tree = draft()
    return graph.replay, tree


def both(engine: Engine, spec: SpecConfig, lengths: np.ndarray, repeat: int) -> tuple[dict[str, float], float]:
    """ms of each path, and the share of nodes whose token and parent are the same."""
    set_lengths(engine, lengths)
    draft = program(engine, spec, len(lengths), int(lengths.max()))
    replays, trees, times = {}, {}, {}
    for name, path in PATHS.items():
        os.environ["SPECDEC_DRAFT"] = path
        replays[name], trees[name] = captured(draft)
        times[name] = []
    for turn in range(0 if ON_CPU else repeat + 3):
        for name, replay in replays.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
            begin.record()
            replay()
            end.record()
            end.synchronize()
            if turn >= 3:
                times[name].append(begin.elapsed_time(end))
    old, new = trees["old"], trees["new"]
    same = (old.tokens == new.tokens) & (old.parents == new.parents)
    medians = {name: statistics.median(seconds) if seconds else float("nan") for name, seconds in times.items()}
    return medians, float(same[:, 1:].float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, parents=[device_option])
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--page-size", type=int)
    options = parser.parse_args()
    require_device()
    print(f"{machine()}\n", flush=True)
    small, batch = (TINY, 3) if ON_CPU else (SMALL, 8)
    with torch.inference_mode():
        for page_size in (1, 16):
            length = 70 if ON_CPU else 1000
            engine = make_engine(small, torch.float32, batch, length + 200, page_size)
            for name, spec in SHAPES.items():
                _, same = both(engine, spec, length - 7 * np.arange(batch), 0)
                print(f"float32, page size {page_size}, {name}: {same:.2%} of nodes equal", flush=True)
                assert same == 1.0, "the two paths draft other tokens"
            engine.close()
        if ON_CPU:
            return
        print(f"\nlookahead of 8x64: {engine.table.lookahead} slots")
        print("\n| draft | batch | context | old, ms | new, ms | new / old | nodes equal in bf16 |")
        print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
        engine = make_engine(LLAMA_8B, torch.bfloat16, 32, 32768 + 200, options.page_size)
        for context in (1024, 32768):
            for rows in (1, 8, 32):
                for name, spec in SHAPES.items():
                    ms, same = both(engine, spec, np.full(rows, context), options.repeat)
                    cells = f"{ms['old']:.3f} | {ms['new']:.3f} | {ms['new'] / ms['old']:.3f} | {same:.1%}"
                    print(f"| {name} | {rows} | {context} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
