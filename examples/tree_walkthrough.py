"""One real round with a draft tree, step by step: the tree, its mask, the page tables in both spaces, what is accepted.

    python examples/tree_walkthrough.py [--steps 3] [--draft-topk 2] [--nodes 7] [--max-new-tokens 120] [--prompt "..."]

Uses the bundled pair. Each token is followed by the drafter's probability of it, and by that of the whole path to it.
Every printed value is read from the engine while it generates.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table
from rich.tree import Tree
from transformers.utils import logging as transformers_logging

from specdec import DraftTree, Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.attention.backend import TorchBackend
from specdec.attention.plan import KVPlan, plan_verify
from specdec.attention.trees.tree_builder import TreeBuilder
from specdec.draft_models.base import Binding, DraftBatch, Drafter, Observation, StatelessDrafter
from specdec.errors import SpecDecError

PROMPT = "A snail climbs 5 feet up a wall each day and slips back 2 feet each night. How far is it after 4 days?"


TokenPath = tuple[int, ...]
"""Tokens after the root."""


@dataclass(frozen=True)
class Round:
    """Data of one round. log_prob: of every path that the drafter scored, the sum of its tokens' log-probabilities."""

    tree: DraftTree
    plan: KVPlan
    log_prob: dict[TokenPath, float]
    accepted: tuple[int, ...] = ()
    bonus: int = -1

    def path_of(self, node: int) -> TokenPath:
        ancestors = self.tree.ancestors[0, node].nonzero()[1:, 0]
        return tuple(self.tree.tokens[0, ancestors].tolist())


class Witness(StatelessDrafter):
    """Forwards everything to the drafter, and keeps the data of the round with the longest accepted path."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name, self.aux_layers = drafter.name, drafter.aux_layers
        self.kv_layout, self.extra_keys, self.reread = drafter.kv_layout, drafter.extra_keys, drafter.reread
        self.best: Round | None = None
        self._last: Round | None = None

    def bind(self, binding: Binding) -> "Witness":
        self.binding, self.worker = binding, self.drafter.bind(binding)
        return self

    def propose(self, batch: DraftBatch) -> DraftTree:
        levels: list[tuple[torch.Tensor, torch.Tensor]] = []  # tokens and log-probabilities [B, M, K] of the children

        def best(logits: torch.Tensor, positions: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            levels.append(batch.best(logits, positions, count))
            return levels[-1]

        def sample(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # what a chain calls
            return best(logits, positions, 1)[0][..., 0]

        tree = self.worker.propose(replace(batch, best=best, sample=sample))
        plan = plan_verify(self.binding.backend, self.binding.cache.table, batch.rows, tree)
        self._last = Round(tree, plan, path_log_probs(batch.root, levels))
        return tree

    def observe(self, seen: Observation) -> None:
        self.worker.observe(seen)
        path = seen.path[0, : int(seen.length[0])].tolist()
        branches = path != list(range(len(path)))  # prefer a path that is no plain chain
        if self._last is not None and (self.best is None or (branches and len(path) > len(self.best.accepted))):
            self.best = replace(self._last, accepted=tuple(path), bonus=int(seen.next_token[0]))


def path_log_probs(root: torch.Tensor, levels: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[TokenPath, float]:
    """Replay the growth of the (only) tree from the scores that the drafter branched by."""
    growth = TreeBuilder(root, TorchBackend(), len(levels))
    log_prob: dict[TokenPath, float] = {(): 0.0}
    beam: list[TokenPath] = [()]
    for level_tokens, level_scores in levels:
        for above, tokens, values in zip(beam, level_tokens[0].tolist(), level_scores[0].tolist(), strict=True):
            log_prob |= {(*above, token): log_prob[above] + value for token, value in zip(tokens, values, strict=True)}
        chosen = growth.add_level(level_tokens, level_scores)
        pairs = zip(chosen.tokens[0].tolist(), chosen.origin[0].tolist(), strict=True)
        beam = [(*beam[origin], token) for token, origin in pairs]
    return log_prob


def draw_tree(seen: Round, text: Callable[[int], str]) -> Tree:
    """The draft with accepted nodes in green; the probability of each token, and of the path up to it."""
    tokens, parents = seen.tree.tokens[0].tolist(), seen.tree.parents[0].tolist()
    drawn = Tree(f"[bold green]0 {text(tokens[0])!r}[/] (root, depth 0)")
    branches = {0: drawn}
    for node in range(1, seen.tree.num_nodes):
        style = "bold green" if node in seen.accepted else "dim"
        path = seen.path_of(node)
        whole = torch.tensor(seen.log_prob[path])
        own = (whole - seen.log_prob[path[:-1]]).exp()
        label = f"[{style}]{node} {text(tokens[node])!r}[/] {own:.3f} (depth {len(path)}, path {whole.exp():.3f})"
        branches[node] = branches[parents[node]].add(label)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--attention", default="auto", choices=("auto", "torch", "triton"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--draft-topk", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=120)
    args = parser.parse_args()
    try:
        show_round(args)
    except SpecDecError as error:
        parser.error(str(error))


def show_round(args: argparse.Namespace) -> None:
    """Answer the prompt, and print the round that accepted most."""
    transformers_logging.disable_progress_bar()
    console = Console(highlight=False)
    spec = SpecConfig(args.steps, args.draft_topk, args.nodes, adaptive=False)
    config = EngineConfig(max_batch_size=1, max_model_len=512, attention=args.attention)
    pair = Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp", config=config)
    assert pair.drafter is not None
    witness = Witness(pair.drafter)
    engine = Engine(pair.target, witness, tokenizer=pair.tokenizer, spec=spec, config=config)
    [out] = engine.generate(engine.chat_prompt(args.prompt), SamplingParams(max_new_tokens=args.max_new_tokens))
    if witness.best is None:
        raise SystemExit("the answer ended before a draft was verified; try another prompt")
    seen = witness.best
    tree, plan = seen.tree, seen.plan

    def text(token: int) -> str:
        return str(engine.tokenizer.decode([token]))

    committed = int(plan.committed_len[0])
    console.print(f"[bold]{args.prompt}[/]\n{out.text}\n")
    console.print(f"A round after S = {committed} committed tokens, sliding window {engine.target.layout.max_window}:")
    console.print(draw_tree(seen, text))

    mask = Table(title="row sees column (ancestor or self)", show_header=True)
    mask.add_column("node")
    for node in range(tree.num_nodes):
        mask.add_column(str(node))
    for node, row in enumerate(tree.ancestors[0].tolist()):
        mask.add_row(str(node), *("T" if seen else "." for seen in row))
    console.print(mask)

    for group, kept in engine.table.allocator.groups.items():
        table = plan.prefix.table(group)
        pages, start = table.pages[0].tolist(), table.begin[0].item()
        console.print(f"{kept.name}: the nodes' K/V go to slots {plan.write_slots(group).tolist()}")
        console.print(f"    prefix page table: {len(pages)} entries from position {start}: {pages[:6]} ...")
    console.print(
        f"accepted path {list(seen.accepted)}, bonus {text(seen.bonus)!r}: {len(seen.accepted)} tokens from one target "
        "forward; "
        f"over the whole answer {out.stats.acceptance_length:.2f}"
    )


if __name__ == "__main__":
    main()
