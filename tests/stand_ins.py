"""Random prompts, drafters scripted by a test, readable tokenizers, and the drafts of an engine.

A plugin of conftest.py.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast

from specdec import DraftTree, Engine
from specdec.draft_models.base import DraftBatch, StatelessDrafter
from specdec.kvcache.table import Rows

from tiny_families import VOCAB


@pytest.fixture(scope="session")
def random_prompt() -> Callable[..., list[int]]:
    """random_prompt(length, seed=0, vocab=96): token ids."""

    def make(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
        rng = random.Random(1000 * seed + length)
        return [rng.randrange(vocab) for _ in range(length)]

    return make


class Made(TorchDispatchMode):
    """Records the results of operators: the last tensor in each storage, by address."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.seen[out.untyped_storage().data_ptr()] = out
        return out


class Proposal(NamedTuple):
    """A draft for one request. text: its tokens; the last is the root. logits: [levels, V] of a chain; [M, V] of the
    nodes of all levels of a tree."""

    text: list[int]
    tokens: list[int]
    parents: list[int]
    logits: torch.Tensor


def watch_proposals(engine: Engine) -> list[Proposal]:
    """Return a list to which all later drafts of the engine are added."""
    worker, own, seen = engine.state.worker, engine.state.worker.propose, list[Proposal]()

    def propose(batch: DraftBatch) -> DraftTree:
        drawn: list[torch.Tensor] = []

        def noting(draw: Callable[..., Any]) -> Callable[..., Any]:
            return lambda logits, *rest: drawn.append(logits.clone()) or draw(logits, *rest)  # type: ignore[func-returns-value]

        tree = own(replace(batch, sample=noting(batch.sample), best=noting(batch.best), params=None))
        for i, (row, length) in enumerate(zip(batch.rows.index.tolist(), batch.history_len.tolist(), strict=True)):
            if row != engine.table.padding_row:
                text, logits = batch.history[i, :length].tolist(), torch.cat([level[i] for level in drawn])
                seen.append(Proposal(text, tree.tokens[i].tolist(), tree.parents[i].tolist(), logits))
        return tree

    worker.propose = propose
    return seen


class ScriptedDrafter(StatelessDrafter):
    """A drafter that a test scripts: `script(tokens, n)` returns n draft tokens after `tokens`, and their parents.

    Parents are numbers of nodes; the root is 0. None: a chain.
    """

    name = "scripted"

    def __init__(self, script: Callable[[list[int], int], tuple[list[int], list[int] | None]]) -> None:
        self.script = script
        self.rounds = 0

    def propose(self, batch: DraftBatch) -> DraftTree:
        self.rounds += 1
        tokens, parents = [], []
        for row, length in zip(batch.history.tolist(), batch.history_len.tolist(), strict=True):
            drafts, above = self.script(row[:length], batch.num_steps)
            tokens.append([row[length - 1], *drafts])
            parents.append([-1, *(range(batch.num_steps) if above is None else above)])
        return DraftTree.from_parents(torch.tensor(tokens), torch.tensor(parents))


def following(texts: Sequence[Sequence[int]]) -> Callable[[list[int], int], tuple[list[int], None]]:
    """Make a script of right drafts, which continues the text that begins with the tokens."""

    def script(tokens: list[int], n: int) -> tuple[list[int], None]:
        text = next(text for text in texts if list(text[: len(tokens)]) == tokens)
        return list(text[len(tokens) : len(tokens) + n]), None

    return script


@pytest.fixture(scope="session")
def scripted() -> type[ScriptedDrafter]:
    """The class `ScriptedDrafter`."""
    return ScriptedDrafter


def random_trees(
    truths: Sequence[Sequence[int]], vocab: int = VOCAB, hit: float = 0.7
) -> Callable[[list[int], int], tuple[list[int], list[int] | None]]:
    """Make a script of random trees: script(tokens, n, depth=None) returns n nodes, none deeper than `depth`.

    truths: whole sequences. A draft after a path along one of them continues it with probability `hit`, at a random
    place among its siblings. The tree depends on the tokens only, so it is the same in any batch.
    """

    def script(tokens: list[int], n: int, depth: int | None = None) -> tuple[list[int], list[int] | None]:
        rng = random.Random(str(tokens))
        paths = [list(tokens)]  # by node
        parents: list[int] = []
        while len(paths) <= n:
            deepest = len(tokens) + (n if depth is None else depth)
            newest = [i for i, path in enumerate(paths) if len(path) < deepest][-3:]
            parent = newest[rng.randrange(len(newest))]
            above = paths[parent]
            true = [t[len(above)] for t in truths if len(t) > len(above) and list(t[: len(above)]) == above]
            token = true[0] if true and rng.random() < hit else rng.randrange(vocab)
            if [*above, token] not in paths:  # siblings differ
                paths.append([*above, token])
                parents.append(parent)
        return [path[-1] for path in paths[1:]], parents

    return script


@pytest.fixture(scope="session")
def tree_script() -> Callable[..., Callable[[list[int], int], tuple[list[int], list[int] | None]]]:
    """tree_script(truths, vocab=96, hit=0.7): the function `random_trees`."""
    return random_trees


@pytest.fixture(scope="session")
def pair_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 96 tokens with two characters each, a0 to j5: stop strings can cross their borders."""
    vocab = {f"{'abcdefghij'[i // 10]}{i % 10}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[a-j][0-9]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_level(merges: Iterable[tuple[str, str]] = (), symbols: Sequence[str] = (), **options: bool) -> Tokenizer:
    """Build a byte-level BPE tokenizer: a token for each symbol (by default each byte) and for each merged pair."""
    merges = list(merges)
    vocab = {symbol: i for i, symbol in enumerate(symbols or sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for pair in merges:
        vocab.setdefault("".join(pair), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte, and <eos> = 256. Some characters need several tokens."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def history_batch(histories: list[list[int]], steps: int, topk: int = 1, num_nodes: int | None = None) -> DraftBatch:
    """Build a batch of requests with these texts, whose last token is the root. Padding tokens must not matter."""
    length = max(map(len, histories))
    return DraftBatch(
        rows=Rows(torch.arange(len(histories)), length),
        root=torch.tensor([h[-1] for h in histories]),
        read_history=lambda: torch.tensor([[*h, *[h[-1]] * (length - len(h))] for h in histories]),
        history_len=torch.tensor([len(h) for h in histories]),
        num_steps=steps,
        topk=topk,
        num_nodes=num_nodes or 1 + steps,
        sample=None,
        best=None,
    )
