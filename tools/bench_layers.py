"""The fused layers on a GPU: checked against their references, then timed: `python tools/bench_layers.py`.

    checks     every kernel against its reference at Gemma 4 E4B's shapes; rows alone and among others, bit for bit
    products   each product of a forward, ours beside cuBLAS beside its bytes at the read bandwidth measured here
    forward    the whole decoder and head in one CUDA graph, context 1,024, random bfloat16 weights; `--peers`: beside
               the Hugging Face modules in a graph

Times are medians of CUDA-graph replays; products rotate over copies of their weights, so that the L2 is cold. A check
that fails ends the run with 1 before anything is timed.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_setup import DEVICE, device_option, machine, require_device  # isort: skip - before triton
import torch
import torch.nn.functional as F
from gpu_attention import bandwidth
from result_table import ResultTable, Row
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from specdec.attention.bridge import AttentionCall
from specdec.attention.kernels.own_keys import own_keys
from specdec.attention.kernels.tree_attention import tree_attention
from specdec.gpu.operations import FAST, KERNELS
from specdec.kvcache.index_spaces import PrimaryLoc
from specdec.kvcache.layout import layout_from_config
from specdec.layers.fuse import fuse
from specdec.layers.linear import gated_linear, linear, reference_gated_linear, vendor_linear
from specdec.layers.norm import Gain, norm, reference_norm
from specdec.layers.per_layer_embedding import gated_projection, reference_gated_projection
from specdec.layers.product import MAX_SMALL_ROWS, choose_cut, finish
from specdec.layers.rope_store import Destination, Heads, reference_rope_store, reference_rotary, rope_store, rotary
from specdec.modules.private_copy import ATTENTION_NAME, text_configs

BF16 = torch.bfloat16
CONTEXT = 1024
LAYERS, HIDDEN, INTERMEDIATE, VOCAB, PLE = 42, 2560, 10240, 262144, 256
SHAPES = {  # name -> (N, K), the products of E4B; gate / up is gated
    "qkv sliding": (3072, HIDDEN),
    "qkv full": (6144, HIDDEN),
    "q sliding": (2048, HIDDEN),
    "q full": (4096, HIDDEN),
    "o sliding": (HIDDEN, 2048),
    "o full": (HIDDEN, 4096),
    "gate/up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "ple gate": (PLE, HIDDEN),
    "ple context": (LAYERS * PLE, HIDDEN),
    "head": (VOCAB, HIDDEN),
}
FORWARDS = {
    1: (1, 1),
    5: (1, 5),
    8: (1, 8),
    16: (1, 16),
    32: (32, 1),
    40: (8, 5),
    64: (64, 1),
    128: (128, 1),
    160: (32, 5),
    256: (256, 1),
}  # rows -> requests, nodes


def randn(*shape: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=BF16) * std


def replay_ms(call: Callable[[], object], replays: int = 20) -> float:
    """Median milliseconds of `call` in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(replays + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


# checks


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||; NaN counts as far."""
    error = float((got.double() - want.double()).norm() / want.double().norm())
    return error if error == error else float("inf")


def check_products() -> list[Row]:
    """Against float64, and every row among up to 2,048 against itself alone."""
    rows = []
    for name, (n, k) in SHAPES.items():
        if name == "head":
            n = 4096
        x, w = randn(2048, k), randn(n, k, std=k**-0.5)
        gated = name == "gate/up"
        compute: Callable[..., torch.Tensor] = (
            (lambda x, w: gated_linear(x, w, "gelu_tanh")) if gated else (lambda x, w: finish(linear(x, w)))
        )
        want = (
            reference_gated_linear(x.double(), w.double(), "gelu_tanh") if gated else F.linear(x.double(), w.double())
        )
        worst, equal = 0.0, True
        alone = [compute(x[i : i + 1], w) for i in range(0, 2048, 113)]
        for num_rows in (1, 2, 5, 8, 16, 17, 32, 40, 64, 100, 128, 160, 256, 513, 2048):
            y = compute(x[:num_rows], w)
            worst = max(worst, far(y, want[:num_rows]))
            picked = range(0, num_rows, 113)
            equal &= all(torch.equal(y[i], alone[j][0]) for j, i in enumerate(picked))
        rows.append(
            Row(
                f"product {name} {n}x{k}",
                f"{worst:.1e}, rows {'equal' if equal else 'DIFFER'}",
                "",
                worst < 4e-3 and equal,
            )
        )
    return rows


def check_small() -> list[Row]:
    rows = []
    for num_rows in (1, 8, 40, 160):
        hidden, w = randn(num_rows, HIDDEN), randn(HIDDEN, INTERMEDIATE, std=INTERMEDIATE**-0.5)
        product = linear(randn(num_rows, INTERMEDIATE), w)
        gain, scale = Gain(randn(HIDDEN), 1e-6), randn(1)
        worst = 0.0
        for options in (
            {"pre": gain},
            {"post": gain, "residual": hidden, "pre": gain},
            {"residual": hidden, "scale": scale},
        ):
            pairs = zip(norm(product, **options), reference_norm(product, **options), strict=True)
            worst = max(worst, *(far(got, want) for got, want in pairs))
        rows.append(Row(f"norm, {num_rows} rows", f"{worst:.1e}", "", worst < 4e-3))
        worst = 0.0
        for dim, num_kv in ((256, 2), (512, 2), (512, 0)):
            gains = Gain(randn(dim), 1e-6), *((Gain(randn(dim), 1e-6), Gain(None, 1e-6)) if num_kv else (None, None))
            heads = Heads(8, num_kv, dim, *gains)
            qkv = linear(randn(num_rows, HIDDEN), randn(heads.width, HIDDEN, std=HIDDEN**-0.5))
            positions = torch.randint(0, 100000, (num_rows,), device=DEVICE)
            frequencies = 1e4 ** (-torch.arange(0, dim, 2, device=DEVICE) / dim)
            table = rotary(positions, frequencies, 1.0, BF16)
            worst = max(
                worst, far(torch.stack(table), torch.stack(reference_rotary(positions, frequencies, 1.0, BF16)))
            )
            pools = torch.zeros((4, 200, max(1, num_kv), dim), device=DEVICE, dtype=BF16)
            slots = PrimaryLoc(1 + torch.randperm(199, device=DEVICE)[:num_rows])
            got = rope_store(qkv, heads, table, Destination(pools[0], pools[1], slots))
            want = reference_rope_store(qkv, heads, table, Destination(pools[2], pools[3], slots))
            pairs = [(a, b) for a, b in zip(got, want, strict=True) if a is not None and b is not None]
            pairs += [(pools[0], pools[2]), (pools[1], pools[3])] if num_kv else []
            worst = max(worst, *(far(a, b) for a, b in pairs))
        rows.append(Row(f"rotary and store, {num_rows} rows", f"{worst:.1e}", "", worst < 4e-3))
        inputs, w = randn(num_rows, LAYERS, PLE)[:, 3], randn(HIDDEN, PLE, std=PLE**-0.5)
        gate = linear(hidden, randn(PLE, HIDDEN, std=HIDDEN**-0.5))
        got, want = (f(gate, inputs, w, "gelu_tanh") for f in (gated_projection, reference_gated_projection))
        worst = far(got.parts, want.parts)
        rows.append(Row(f"gated projection, {num_rows} rows", f"{worst:.1e}", "", worst < 4e-3))
    return rows


# products


def copies(n: int, k: int) -> int:
    return int(min(24, max(2, 4e8 // (n * k * 2))))


def time_product(name: str, num_rows: int, weights: Sequence[torch.Tensor]) -> float:
    """Microseconds of one product, in a chain over cold weights."""
    x = randn(num_rows, weights[0].shape[1])

    def chain() -> None:
        for w in weights:
            if name == "gate/up":
                gated_linear(x, w, "gelu_tanh")
            else:
                linear(x, w)

    return replay_ms(chain, 8) * 1e3 / len(weights)


def product_rows(read: float, row_counts: Sequence[int]) -> list[Row]:
    rows = []
    for name, (n, k) in SHAPES.items():
        weights = [randn(n, k) for _ in range(copies(n, k))]
        floor = n * k * 2 / read * 1e6
        cells = []
        for num_rows in row_counts:
            x = randn(num_rows, k)
            ours = time_product(name, num_rows, weights)
            cublas = replay_ms(lambda x=x, ws=weights: [x @ w.T for w in ws], 8) * 1e3 / len(weights)
            cells.append(f"{num_rows}: {ours:.1f} / {cublas:.1f}")
        rows.append(Row(f"{name} {n}x{k}, {tuple(choose_cut(n, k))}", f"floor {floor:.1f} us", ", ".join(cells)))
    return rows


# the forward


class BenchContext:
    """`batch` requests of CONTEXT committed keys, a chain of `nodes` rows each, slots in random order."""

    def __init__(self, config: Any, batch: int, nodes: int) -> None:
        self.layout = layout_from_config(config)
        self.batch, self.nodes = batch, nodes
        length = CONTEXT + nodes
        order = 1 + torch.randperm(batch * length, device=DEVICE).view(batch, length)
        window = config.sliding_window
        self.pages = {None: order[:, :CONTEXT].contiguous(), window: order[:, CONTEXT - window : CONTEXT].contiguous()}
        self.committed_len = torch.full((batch,), CONTEXT, device=DEVICE)
        self.start = {None: None, window: self.committed_len - window}
        write = order[:, CONTEXT:].contiguous()
        self.slots = PrimaryLoc(write.flatten())
        self.own = {
            each: own_keys(self.pages[each], self.start[each], self.committed_len, write, page_size=1)
            for each in self.pages
        }
        self.positions = self.committed_len[:, None] + torch.arange(nodes, device=DEVICE)
        self.pools = {
            spec.layer: [randn(batch * length + 1, spec.num_kv_heads, spec.head_dim) for _ in "kv"]
            for spec in self.layout.layers
            if spec.owner == spec.layer
        }

    def destination(self, layer: int) -> Destination | None:
        return Destination(*self.pools[layer], self.slots) if layer in self.pools else None

    def attend_rows(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        *,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert softcap is None, "no model measured here has a softcap on its attention"
        spec = self.layout.layers[layer]
        out = tree_attention(
            q.view(self.batch, self.nodes, *q.shape[1:]).transpose(1, 2),
            *(*self.pools[spec.owner], self.own[spec.window], self.pages[spec.window], self.start[spec.window]),
            *(self.committed_len, self.positions),
            page_size=1,
            scaling=scaling,
            window=spec.window,
            sinks=sinks,
        )
        return out.view(q.shape)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Does for unfused modules what `attend_rows` does for fused ones."""
        q, k, v = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
        if call.layer in self.pools:
            pool_k, pool_v = self.pools[call.layer]
            pool_k.index_copy_(0, self.slots, k)
            pool_v.index_copy_(0, self.slots, v)
            return self.attend_rows(call.layer, q, k, v, scaling=call.scaling)[None]
        return self.attend_rows(call.layer, q, None, None, scaling=call.scaling)[None]


def e4b(num_layers: int = LAYERS, vocab: int = VOCAB) -> Any:
    """Random weights in transformers' modules; E4B's shapes."""
    kinds = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(num_layers)]
    config = Gemma4TextConfig(
        vocab_size=vocab,
        vocab_size_per_layer_input=vocab,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=num_layers,
        layer_types=kinds,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        global_head_dim=512,
        num_kv_shared_layers=18 if num_layers == LAYERS else num_layers // 2,
        hidden_size_per_layer_input=PLE,
        sliding_window=512,
        final_logit_softcapping=30.0,
    )
    previous = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        with torch.device(DEVICE):
            model = Gemma4ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(previous)
    for layer in model.model.layers:  # scores of about 1: else every softmax picks one key, and rounding picks which
        layer.self_attn.q_norm.weight.fill_(1 / 16)
    for config in text_configs(model):
        config._attn_implementation_internal = ATTENTION_NAME
    return model


def forward_rows(read: float, row_counts: Sequence[int], peers: Sequence[int]) -> list[Row]:
    begin = time.perf_counter()
    model = e4b()
    hf = model.model
    print(f"model made in {time.perf_counter() - begin:.0f} s", flush=True)
    contexts = {n: BenchContext(hf.config, *FORWARDS[n]) for n in row_counts}
    tokens = {n: torch.randint(0, VOCAB, (1, n), device=DEVICE) for n in row_counts}

    def run(decoder: Any, n: int, head: Callable[[torch.Tensor], torch.Tensor] | None) -> torch.Tensor:
        context = contexts[n]
        options = {"use_cache": False, "specdec_ctx": context}
        hidden = decoder(input_ids=tokens[n], position_ids=context.positions.view(1, -1), **options).last_hidden_state
        return hidden if head is None else head(hidden[0])

    want = {n: run(hf, n, None) for n in row_counts}
    hf_ms = {n: replay_ms(lambda n=n: run(hf, n, model.lm_head)) for n in peers}
    fused, fast = fuse(hf, KERNELS), fuse(hf, FAST)
    begin = time.perf_counter()
    rows = []
    skip = {id(hf.embed_tokens_per_layer.weight)}
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in skip)
    for n in row_counts:
        error = far(run(fused, n, None), want[n])
        context = contexts[n]
        kv_bytes = 0
        for spec in context.layout.layers:
            keys = CONTEXT if spec.window is None else min(CONTEXT, spec.window)
            kv_bytes += context.batch * keys * 2 * spec.num_kv_heads * spec.head_dim * 2
        floor = (weight_bytes + kv_bytes) / read * 1e3
        if not rows:
            print(f"fused, first forward {time.perf_counter() - begin:.0f} s", flush=True)
        ms = replay_ms(lambda n=n: run(fused, n, lambda x: finish(linear(x, model.lm_head.weight))), 50)
        body = replay_ms(lambda n=n: run(fused, n, None), 20)
        vendor = ""
        if n > MAX_SMALL_ROWS:
            head = partial(vendor_linear, weight=model.lm_head.weight)
            library = replay_ms(lambda n=n, head=head: run(fast, n, lambda x: finish(head(x))), 20)
            vendor = f", in any order {library:.3f} ms"
        bare = 0.0
        if n in peers:  # what attention of the forward costs: without it
            context.attend_rows = lambda layer, q, k, v, **_: q  # type: ignore[method-assign]
            bare = replay_ms(lambda n=n: run(fused, n, lambda x: finish(linear(x, model.lm_head.weight))), 20)
            del context.attend_rows
        peer = f", HF in a graph {hf_ms[n]:.2f} ms, without attention {bare:.3f} ms" if n in hf_ms else ""
        rows.append(
            Row(
                f"forward, {n} rows ({context.batch} x {context.nodes})",
                f"{error:.1e} from HF",
                f"{ms:.3f} ms = {ms / floor:.2f} x floor {floor:.3f}; without head {body:.3f}{vendor}{peer}",
                error < 0.05,
            )
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[device_option]
    )
    parser.add_argument("--rows", type=int, nargs="*", default=list(FORWARDS), help="rows of the forwards")
    parser.add_argument("--peers", type=int, nargs="*", default=[], help="of these, beside the Hugging Face modules")
    parser.add_argument("--products", type=int, nargs="*", default=[], help="time products of so many rows")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--warm", type=int, help="compile what a forward of so many rows needs, and end")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    require_device()
    torch.manual_seed(0)
    if options.warm is not None:
        return 0 if warm(options.warm) else 1
    begin = time.perf_counter()
    warmers = [subprocess.Popen([sys.executable, __file__, "--warm", str(n)]) for n in bucket_heads(options.rows)]
    read, copy = bandwidth()
    for warmer in warmers:
        warmer.wait()
    print(f"compiled after {time.perf_counter() - begin:.0f} s", flush=True)
    results = ResultTable(f"{machine()}, read {read / 1e9:.0f} GB/s, copy {copy / 1e9:.0f} GB/s")
    with torch.no_grad():
        if not options.no_checks:
            results.add([*check_products(), *check_small()])
        if not results.failed and options.products:
            results.add(product_rows(read, options.products))
        if not results.failed and options.rows:
            results.add(forward_rows(read, options.rows, options.peers))
    return results.finish(options.out)


def bucket_heads(row_counts: Sequence[int]) -> list[int]:
    """One row count for each set of kernels that they need."""
    return list({(min(n, 16) > 8, n > 16, n > 32, n > 64, n == 1): n for n in row_counts if n}.values())


def warm(num_rows: int) -> bool:
    """A forward of twelve layers with a small vocabulary compiles the kernels of all."""
    with torch.no_grad():
        model = e4b(num_layers=12, vocab=1024)
        context = BenchContext(model.model.config, *FORWARDS[num_rows])
        fused = fuse(model.model, KERNELS)
        tokens = torch.zeros((1, num_rows), dtype=torch.int64, device=DEVICE)
        fused(input_ids=tokens, position_ids=context.positions.view(1, -1), specdec_ctx=context)
        torch.cuda.synchronize()
    return True


if __name__ == "__main__":
    sys.exit(main())
