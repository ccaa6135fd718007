"""Block drafters in engines: a hundred of them decode as without a drafter, trees are the best ones, and a round is the
same on both backends, captured or not."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from block_heads import KINDS, random_block, random_head
from capturable import capturable
from kv_rig import KVRig
from random_loads import check_tokens, random_config, random_requests

from specdec import DraftTree, Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.attention.kernels.draft_block import CopiedDraft, Draft, Order
from specdec.attention.torch_backend import TorchBackend
from specdec.attention.triton_backend import TritonBackend
from specdec.draft_models.base import Binding, DraftBatch, Observation
from specdec.draft_models.block.block_drafter import BlockDrafter
from specdec.draft_models.block.fused_block import FusedBlock
from specdec.draft_models.conformance import check_drafter
from specdec.errors import ConfigError
from specdec.gpu.operations import KERNELS, REFERENCE, Operations
from specdec.kvcache.table import Rows
from specdec.models.target import TargetModel

from marks import deep, deep_cases, slow
from tiny_models import FAMILIES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPERATIONS: dict[str, Operations | None] = {"modules": None, "torch": REFERENCE, "kernels": KERNELS}
BACKENDS = {"torch": TorchBackend, "triton": TritonBackend}

# engines

CASES, ALWAYS = 100, 2


def spec_of(rng: random.Random) -> SpecConfig:
    depth, topk = rng.randint(1, 8), rng.choice((1, 1, 2, 4, 8))
    most = 1 + topk + (depth - 1) * topk**2
    nodes = None if topk == 1 else rng.randint(min(8, most), min(128, most))
    return SpecConfig(num_steps=depth, topk=topk, num_draft_tokens=nodes)


@deep_cases("0")
@pytest.mark.parametrize("seed", [*range(ALWAYS), *(deep(seed) for seed in range(ALWAYS, CASES))])
def test_tokens_of_plain_decoding(
    seed: int, make_target: Callable[..., Any], make_engine: Callable[..., Any], random_prompt: Callable[..., Any]
) -> None:
    rng = random.Random(f"block {seed}")
    model = make_target(rng.choice(FAMILIES))
    kind, deterministic = rng.choice(list(KINDS)), rng.random() < 0.25
    prompts, params = random_requests(rng, random_prompt)
    spec = spec_of(rng)
    slots = rng.choice((None, 90 + spec.num_nodes))  # few: requests are preempted
    config = random_config(rng, slots, deterministic=deterministic)
    alone = [replace(each, speculation=None) for each in params]
    plain = make_engine(model, None, max_model_len=128, deterministic=deterministic)
    want = [out.token_ids for out in plain.generate(prompts, alone)]
    ops = rng.choice((None, REFERENCE))
    drafter = random_block(model, kind, ops=ops, block_size=9)
    assert isinstance(drafter.form, FusedBlock) == (ops is not None and kind != "dspark-gemma4"), drafter.unfused
    engine = Engine(TargetModel(model), drafter, spec=spec, config=config)
    check_tokens(engine, prompts, params, want)


def test_more_steps_than_a_block_drafts_are_refused(make_target: Callable[..., Any]) -> None:
    """They were cut without a word: rounds verified nodes that nothing had drafted."""
    model = make_target("llama")
    for kind, most in (("dflash", 5), ("dspark", 6)):  # of blocks of 6
        drafter = random_block(model, kind)
        Engine(TargetModel(model), drafter, spec=SpecConfig(most)).close()
        with pytest.raises(ConfigError, match=rf"num_steps={most + 1}.* at most {most} tokens.*num_steps={most}\)"):
            Engine(TargetModel(model), drafter, spec=SpecConfig(most + 1))


@pytest.mark.parametrize("kind", ["dflash", slow("jetspec"), slow("dspark-rnn")])
@pytest.mark.parametrize("topk", [1, 3])
def test_conformance(kind: str, topk: int, make_target: Callable[..., Any], random_prompt: Callable[..., Any]) -> None:
    target = TargetModel(make_target("gemma4-e2b"))
    drafter: Any = random_block(target.model, kind)
    rounds = 0

    def bind(binding: Binding) -> Any:
        worker = BlockDrafter.bind(drafter, binding)
        propose = worker.propose

        def checked(batch: DraftBatch) -> DraftTree:
            nonlocal rounds
            rounds += 1
            rules: dict[str, Any] = {"target_store": binding.target_store, "aux_layers": drafter.aux_layers}
            worker.propose = propose  # type: ignore[method-assign]
            try:
                return check_drafter(worker, batch, binding.cache, target, **rules)
            finally:
                worker.propose = checked  # type: ignore[method-assign]

        worker.propose = checked  # type: ignore[method-assign]
        return worker

    drafter.bind = bind
    spec = SpecConfig(4, topk, None if topk == 1 else 9)
    config = EngineConfig(max_model_len=128, max_batch_size=3, page_size=4)
    with Engine(target, drafter, spec=spec, config=config) as engine:
        engine.generate([random_prompt(n) for n in (1, 9, 30)], SamplingParams(max_new_tokens=10))
    assert rounds >= 5


def test_a_prefix_hit_drafts_what_a_fresh_prompt_does(
    make_target: Callable[..., Any], random_prompt: Callable[..., Any]
) -> None:
    model, prompt = make_target("llama"), random_prompt(40)
    drafter = random_block(model)
    seen: list[torch.Tensor] = []
    logits = drafter.form.logits
    drafter.form.logits = lambda states: seen.append(logits(states)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
    config = EngineConfig(max_model_len=128, page_size=4, prefill_chunk=7)
    with Engine(TargetModel(model), drafter, spec=SpecConfig(5), config=config) as engine:
        firsts = []
        for _ in range(2):
            seen.clear()
            engine.generate([prompt], SamplingParams(max_new_tokens=9, ignore_eos=True))
            firsts.append(seen[0])
        assert engine.stats().cached_tokens > 30
    torch.testing.assert_close(firsts[1], firsts[0], atol=1e-5, rtol=1e-5)


# trees


class Scene:
    """A worker over requests of some lengths whose K/V are a function of (request, position), NaN elsewhere."""

    def __init__(
        self, model: Any, kind: str, backend: str, lengths: Sequence[int], page_size: int = 4, ops: str = "modules"
    ) -> None:
        target = TargetModel(model)
        target.ops = OPERATIONS[ops]  # of the head alone: the model is not ours to change
        self.drafter = BlockDrafter(random_head(target, kind), target)
        assert self.drafter.unfused is None and isinstance(self.drafter.form, FusedBlock) == (ops != "modules")
        self.lengths, self.target = lengths, target
        self.rig = KVRig(
            target.layout,
            full_pages=200,
            swa_pages=200,
            page_size=page_size,
            max_requests=len(lengths) + 2,
            max_len=160,
            lookahead=12,
            device=DEVICE,
            backend=BACKENDS[backend](),
        )
        self.worker = self.drafter.bind(Binding(self.rig, self.rig.backend, self.rig.store))
        table = self.rig.table
        table.ensure_slots(table.open_row(), 9)  # so that rows and requests have other numbers
        self.rows = np.array([table.open_row() for _ in lengths])
        for row, length in zip(self.rows, lengths, strict=True):
            table.ensure_slots(row, length + 12)
            self.rig.commit(np.array([row]), np.array([length]))
        for pool in self.pools():
            pool.fill_(torch.nan)
            for row, length in zip(self.rows, lengths, strict=True):
                pool[table.slots.tensor[row, :length]] = self._random(int(row), length, *pool.shape[1:])
        self.drawn_from: list[torch.Tensor] = []
        self.rig.flush()

    def pools(self) -> list[torch.Tensor]:
        return [pool for kept in self.worker.store.layers.values() for pool in (kept.k, kept.v)]

    def _random(self, seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)

    def batch(self, seats: Sequence[int | None], longest: int, steps: int, topk: int, num_nodes: int) -> DraftBatch:
        """seats: requests by number, None for padding."""
        table = self.rig.table
        rows = torch.tensor([table.padding_row if s is None else self.rows[s] for s in seats], device=DEVICE)
        length = torch.tensor([0 if s is None else self.lengths[s] for s in seats], device=DEVICE)

        def sample(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            assert logits.shape[:2] == positions.shape
            self.drawn_from.append(logits)
            return logits.argmax(-1)

        def best(logits: torch.Tensor, positions: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            assert logits.shape[:2] == positions.shape
            self.drawn_from.append(logits)
            scores, tokens = logits.log_softmax(-1).topk(count, dim=-1)
            return tokens, scores

        return DraftBatch(
            rows=Rows(rows, longest),
            root=torch.tensor([0 if s is None else 3 + s for s in seats], device=DEVICE),
            history=torch.zeros((len(seats), longest + 1), dtype=torch.int64, device=DEVICE),
            history_len=length + 1,
            num_steps=steps,
            topk=topk,
            num_nodes=num_nodes,
            sample=sample,
            best=best,
        )

    def observation(self, batch: DraftBatch, seats: Sequence[int | None]) -> Observation:
        """Of 7 nodes request i has accepted i % 3 + 1, the last ones that are possible; padding one, as a walk says."""
        accepted = [1 if s is None else s % 3 + 1 for s in seats]
        path = [[0, *range(7 - n + 1, 7), *[0] * (3 - n)] for n in accepted]
        states = [self._random(200 + (9 if s is None else s), 7, 3 * self.target.hidden_size) for s in seats]
        return Observation(
            rows=batch.rows,
            start=batch.history_len - 1,
            tokens=(batch.root[:, None] + torch.arange(7, device=DEVICE)) % self.target.vocab_size,
            hidden=torch.stack(states)[:, :, : self.target.hidden_size],
            aux_states=torch.stack(states)[:, :, self.target.hidden_size :],
            path=torch.tensor(path, device=DEVICE),
            length=torch.tensor(accepted, device=DEVICE),
            next_token=batch.root + 1,
        )


class Outcome(NamedTuple):
    """Of the real rows, in order of request: the tree, what it was drawn from, and K/V of what was accepted."""

    tokens: list[list[int]]
    parents: list[list[int]]
    logits: list[torch.Tensor]
    kept: list[torch.Tensor]


def round_of(scene: Scene, seats: Sequence[int | None], longest: int, shape: tuple[int, int, int]) -> Outcome:
    """Propose and observe without any work of the host."""
    batch = scene.batch(seats, longest, *shape)
    seen = scene.observation(batch, seats)
    before = [pool.clone() for pool in scene.pools()]
    DraftTree.chain(batch.root[:, None].expand(-1, 1 + shape[0]))  # a shape's first round, which makes its constants
    with capturable():
        tree = scene.worker.propose(batch)
    tree.check()
    torch.testing.assert_close(scene.pools(), before, rtol=0, atol=0, equal_nan=True)
    with capturable():
        scene.worker.observe(seen)
    real = sorted((i for i, s in enumerate(seats) if s is not None), key=lambda i: seats[i] or 0)
    table, kept = scene.rig.table, []
    written = torch.zeros(len(before[0]), dtype=torch.bool, device=DEVICE)
    written[: table.allocator.page_size] = True  # the null page
    for i in real:
        seat = seats[i] or 0
        slots = table.slots.tensor[scene.rows[seat], : scene.lengths[seat] + int(seen.length[i])]
        kept += [pool[slots] for pool in scene.pools()]
        written[slots[scene.lengths[seat] :]] = True
    for pool, old in zip(scene.pools(), before, strict=True):
        torch.testing.assert_close(pool[~written], old[~written], rtol=0, atol=0, equal_nan=True)
    picked = torch.tensor(real, device=DEVICE)
    logits = [level[picked] for level in scene.drawn_from]
    return Outcome(tree.tokens[picked].tolist(), tree.parents[picked].tolist(), logits, kept)


SHAPES = {"chain": (4, 1, 5), "tree": (4, 3, 9), "short": (2, 2, 4)}
LENGTHS = (9, 1, 14)


@deep_cases("dflash-tree-4")
@pytest.mark.parametrize(
    ("kind", "shape", "page_size"),
    [
        ("dflash", "tree", 4),
        deep("jetspec", "chain", 1),
        deep("jetspec", "short", 4),
        slow("dspark", "tree", 1),
        deep("dspark-rnn", "tree", 4),
        deep("dspark-gated", "chain", 4),
    ],
)
def test_a_round_is_the_same_however_it_runs(
    kind: str, shape: str, page_size: int, make_target: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch with the true lengths and no other row, against both backends in a captured round's surroundings."""
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = make_target("llama", vocab_size=24, num_hidden_layers=2).to(DEVICE)
    want = round_of(Scene(model, kind, "torch", LENGTHS, page_size), [0, 1, 2], max(LENGTHS), SHAPES[shape])
    for backend, ops in (("torch", "torch"), ("triton", "kernels")):
        scene = Scene(model, kind, backend, LENGTHS, page_size, ops)
        got = round_of(scene, [2, None, 0, 1, None], 40, SHAPES[shape])
        assert (got.tokens, got.parents) == (want.tokens, want.parents)
        torch.testing.assert_close(got.logits, want.logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got.kept, want.kept, atol=1e-4, rtol=1e-4)


def scripted_scene(model: Any, rows: list[list[float]]) -> Scene:
    """One request, and a head whose row d has these probabilities for tokens 0, 1, .."""
    scene = Scene(model, "dflash", "torch", (9,))
    vocab = scene.target.vocab_size
    logits = torch.full((1, len(rows), vocab), -1e4)
    for level, row in enumerate(rows):
        logits[0, level, : len(row)] = torch.tensor(row).log()
    scene.drafter.form.logits = lambda states: logits[:, : states.shape[1]]  # type: ignore[method-assign]
    return scene


def test_a_literal_tree(make_target: Callable[..., Any]) -> None:
    """
    row      candidates       root 3 -+- 0 (.9) -+- 1 (.63) -+- 2 (.504)
    1        0 .9   1 .1              |          |           +- 0 (.126)
    2        1 .7   0 .3              |          +- 0 (.27) --- 2 (.216)
    3        2 .8   0 .2              +- 1 (.1)
    """
    scene = scripted_scene(make_target("llama"), [[0.9, 0.1], [0.3, 0.7], [0.2, 0.0, 0.8]])
    tree = scene.worker.propose(scene.batch([0], 9, 3, 2, 7))
    assert tree.tokens.tolist() == [[3, 0, 1, 0, 2, 0, 2]]
    assert tree.parents.tolist() == [[-1, 0, 1, 1, 2, 2, 3]]
    chain = scene.worker.propose(scene.batch([0], 9, 3, 1, 4))
    assert chain.tokens.tolist() == [[3, 0, 1, 2]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_nodes", [2, 9, 40])
def test_trees_are_the_best_among_all_paths(seed: int, num_nodes: int, make_target: Callable[..., Any]) -> None:
    """Of the product of the marginals, the most probable paths; a beam of 5 loses none among 4 candidates a row."""
    torch.manual_seed(seed)
    marginals = torch.rand(4, 4).softmax(-1)
    scene = scripted_scene(make_target("llama"), marginals.tolist())
    tree = scene.worker.propose(scene.batch([0], 9, 4, 4, num_nodes))
    paths = [p for depth in range(1, 5) for p in itertools.product(range(4), repeat=depth)]
    score = {p: float(np.prod([marginals[i, t] for i, t in enumerate(p)])) for p in paths}
    best = sorted(score.values(), reverse=True)[: num_nodes - 1]
    got = []
    for node in range(1, num_nodes):
        on_path = tree.ancestors[0, node].nonzero()[1:, 0]  # without the root
        got.append(score[tuple(tree.tokens[0, on_path].tolist())])
    if num_nodes < 20:  # of a larger tree a beam of 4 nodes a level may miss some
        torch.testing.assert_close(sorted(got, reverse=True), best, atol=1e-6, rtol=1e-5)
    else:
        assert sum(got) >= 0.9 * sum(best)


# what rows of a block see


@pytest.mark.parametrize("order", [Order.CAUSAL, Order.MUTUAL])
def test_rows_see_each_other_both_ways_or_up_to_themselves(order: Order, make_target: Callable[..., Any]) -> None:
    scene = Scene(make_target("llama"), "dflash", "torch", (3, 2))
    batch = scene.batch([0, 1], 3, 3, 1, 4)
    draft = Draft(scene.rig.table, batch.rows, batch.positions()[:1], 3, (None, 2), order)
    assert draft.key_positions().tolist() == [[3, 4, 5], [2, 3, 4]]
    block = CopiedDraft(scene.worker.store, draft)
    block.enter_level(None)
    T, F = True, False
    full = [[T, F, F], [T, T, F], [T, T, T]] if order is Order.CAUSAL else [[T, T, T]] * 3
    windowed = [[T, F, F], [T, T, F], [F, T, T]] if order is Order.CAUSAL else [[T, T, T], [T, T, T], [F, T, T]]
    assert block._seen(None)[0].tolist() == [[T, T, T, *row] for row in full]
    assert block._seen(None)[1].tolist() == [[T, T, F, *row] for row in full]
    # through a window of 2 the first row sees one committed key, and rows after it see none
    assert block._seen(2)[0].tolist() == [[first, *row] for first, row in zip((T, F, F), windowed, strict=True)]
