"""One real round with a draft tree, step by step: the tree, its mask, the page tables in both spaces, what is accepted.

    python examples/tree_walkthrough.py [--steps 3] [--topk 2] [--nodes 7] [--prompt "..."]

Uses the bundled pair. Every value printed is read from the engine while it generates; nothing is made up for show.
"""

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from rich.tree import Tree
from transformers.utils import logging as transformers_logging

from specdec import DraftTree, Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.attention.plan import KVPlan, plan_verify
from specdec.draft_models.base import DraftBatch, Observation

PROMPT = "A snail climbs 5 feet up a wall each day and slips back 2 feet each night. How far is it after 4 days?"


class Witness:
    """Passes everything on to the drafter and keeps what the round with the longest accepted path saw."""

    def __init__(self, engine: Engine) -> None:
        assert engine.drafter is not None
        self.drafter = engine.drafter
        self.name, self.view, self.taps = engine.drafter.name, None, engine.drafter.taps
        self.bytes_per_slot, self.extra_keys = engine.drafter.bytes_per_slot, engine.drafter.extra_keys
        self.best: tuple[int, DraftTree, KVPlan, list[int], int] | None = None
        self._last: tuple[DraftTree, KVPlan] | None = None

    def start(self, max_requests: int) -> None:
        self.drafter.start(max_requests)

    def propose(self, batch: DraftBatch) -> DraftTree:
        tree = self.drafter.propose(batch)
        self._last = (tree, plan_verify(batch.table, batch.rows, tree))
        return tree

    def observe(self, seen: Observation) -> None:
        self.drafter.observe(seen)
        length = int(seen.length[0])
        if self._last is not None and (self.best is None or length > self.best[0]):
            path = seen.path[0, :length].tolist()
            branches = bool((torch.tensor(path) != torch.arange(length)).any())  # prefer a path that is no plain chain
            if branches or self.best is None:
                self.best = (length, *self._last, path, int(seen.next_token[0]))


def draw_tree(tree: DraftTree, path: list[int], text: Callable[[int], str]) -> Tree:
    """The draft with accepted nodes in green."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    drawn = Tree(f"[bold green]0 {text(tokens[0])!r}[/] (root, depth 0)")
    branches = {0: drawn}
    for node in range(1, tree.num_nodes):
        style = "bold green" if node in path else "dim"
        label = f"[{style}]{node} {text(tokens[node])!r}[/] (depth {int(tree.depth[0, node])})"
        branches[node] = branches[parents[node]].add(label)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=7)
    args = parser.parse_args()

    transformers_logging.disable_progress_bar()
    console = Console(highlight=False)
    spec = SpecConfig(args.steps, args.topk, args.nodes)
    engine = Engine.from_pretrained(
        "tiny-gemma4", "tiny-gemma4-mtp", spec=spec, config=EngineConfig(max_batch_size=1, max_model_len=512)
    )
    witness = Witness(engine)
    engine.drafter = engine.runner.drafter = witness
    [out] = engine.generate(engine.chat_prompt(args.prompt), SamplingParams(max_new_tokens=120))
    if witness.best is None:
        raise SystemExit("the answer ended before a draft was verified; try another prompt")
    _, tree, plan, path, bonus = witness.best

    def text(token: int) -> str:
        return str(engine.tokenizer.decode([token]))

    committed = int(plan.committed_len[0])
    console.print(f"[bold]{args.prompt}[/]\n{out.text}\n")
    console.print(f"A round behind S = {committed} committed tokens, sliding window {engine.target.layout.window}:")
    console.print(draw_tree(tree, path, text))

    mask = Table(title="row sees column (ancestor or self)", show_header=True)
    mask.add_column("node")
    for node in range(tree.num_nodes):
        mask.add_column(str(node))
    for node, row in enumerate(tree.ancestors[0].tolist()):
        mask.add_row(str(node), *("T" if seen else "." for seen in row))
    console.print(mask)

    assert plan.write_full is not None and plan.write_swa is not None and plan.prefix_swa is not None
    console.print("where the nodes' K/V go      full", plan.write_full.tolist(), " SWA", plan.write_swa.tolist())
    full, swa, start = plan.prefix_full.slots[0], plan.prefix_swa.slots[0], int(plan.prefix_swa.start[0])
    console.print(f"prefix page table, full      {len(full)} entries from position 0: {full[:6].tolist()} ...")
    console.print(f"prefix page table, SWA       {len(swa)} entries from position {start}: {swa[:6].tolist()} ...")
    console.print(
        f"accepted path {path}, bonus {text(bonus)!r}: {len(path)} tokens from one target forward; "
        f"over the whole answer {out.stats.acceptance_length:.2f}"
    )


if __name__ == "__main__":
    main()
