"""Several devices, the same bits: ranks that share every layer give the logits of one device.

On a CPU the ranks are one device, one after the other; `PeerRanks`, which exchange by flags and addresses, run there in
Triton's interpreter. What two GPUs do is for `python -m bench two-gpus`.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from threading import Thread
from typing import Any

import pytest
import torch
from split_engines import (
    LATENTS,
    TARGETS,
    WIDE,
    accepted_trees,
    answers,
    cached_tokens_of_two_ranks,
    engine_of,
    new_target,
    target_of,
    use_peers,
)

import specdec.engine
import specdec.gpu.ranks
from specdec import Engine, EngineConfig, SamplingParams
from specdec.errors import ConfigError, DeviceLostError, SpecDecError
from specdec.gpu import exchange_kernels
from specdec.gpu.exchange_kernels import EMPTY, STEPS, TAGGED
from specdec.gpu.ranks import PeerRanks, Ranks, make_ranks, map_tensors
from specdec.layers.gemm.linear import linear, linear_parts, reference_linear_parts
from specdec.layers.gemm.product import split_k_of
from specdec.layers.split.layer_shares import embedding_share
from specdec.layers.split.split_decoder import side_by_side

from engine_internals import REFERENCE, TargetModel
from marks import deep_cases, examples, is_deep, usual_cases
from tiny_families import VOCAB, build_target

CPUS = [torch.device("cpu")] * 2


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    use_peers(monkeypatch)


class Forgetful(Ranks):
    """An exchange overwrites the result of the previous one with NaN, so a late read fails."""

    last: torch.Tensor | None = None

    def gather(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._forget(super().gather(parts))

    def select(self, parts: Sequence[torch.Tensor], owners: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._forget(super().select(parts, owners))

    def _forget(self, outs: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.last is not None:
            self.last.fill_(torch.nan)
        self.last = outs[0]
        return outs


@usual_cases(
    *("2-1-gemma4-e2b", "4-4-olmo2", "4-4-qwen2", "4-1-gemma4-moe"),
    *("2-4-deepseek_v3", "2-4-qwen3_5"),  # qwen3_next and other latents: test_split_loading.py
)
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(("count", "page_size"), [(2, 1), (2, 4), (4, 1), (4, 4)])
def test_ranks_have_the_bits_of_one_device(
    name: str,
    count: int,
    page_size: int,
    scripted: Callable[..., Any],
    tree_script: Callable[..., Any],
    three_prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
):
    """In trees, whose accepted paths move within pages, in chunks, and next to others."""
    monkeypatch.setattr(specdec.engine, "make_ranks", lambda device, count: Forgetful([device] * count))
    asked = three_prompts if is_deep() else three_prompts[::2]
    engine = accepted_trees(target_of(name), count, asked, scripted, tree_script, page_size=page_size)
    assert engine.stats().acceptance_length > 1.2
    assert target_of(name).ranks is None, "the engine splits a copy"


NARROW: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 4, "num_key_value_heads": 4}


@deep_cases("16-4")
@pytest.mark.parametrize(("intermediate", "count"), [(16, 2), (16, 4), (24, 4)])
def test_shares_of_fewer_than_16_rows_have_the_bits_of_one_device(intermediate, count, random_prompt):
    """On a CPU products of fewer than 16 columns were summed another way, and a share may have fewer than the whole."""
    torch.manual_seed(intermediate)
    model = build_target("llama", **NARROW, intermediate_size=intermediate).eval()
    target, asked = TargetModel(model, REFERENCE, deterministic=True), [random_prompt(9, seed=1)]
    alone = answers(engine_of(target, 1, max_batch_size=1), asked)
    assert answers(engine_of(target, count), asked) == alone


@usual_cases("qwen3_5")
@pytest.mark.parametrize("name", TARGETS)
def test_preemption_and_cached_prefixes_change_no_bit(name: str, three_prompts: list[list[int]]):
    target = target_of(name)
    alone = answers(engine_of(target, 1, max_batch_size=1), three_prompts)
    cached = cached_tokens_of_two_ranks(target, three_prompts, alone)
    assert cached == 16 + 32 if name == "qwen3_5" else cached > 0  # states of recurrent layers: every 16 tokens


def test_per_layer_embeddings_lie_with_the_ranks_of_their_layers():
    """Six layers on four ranks: 2, 2, 2, 0; the product that goes into them is whole on each."""
    parts = target_of("gemma4-e2b").decoder.parts.embeddings
    columns = [embedding_share(parts, rank, 4).table.shape[1] for rank in range(4)]
    width = len(parts.norm.weight)
    assert columns == [2 * width, 2 * width, 2 * width, 0]
    engine = engine_of(target_of("gemma4-e2b"), 4)
    assert [share.embeddings.table.shape[1] for share in engine.target.decoder.parts] == columns


@pytest.mark.parametrize(("name", "copies"), [("llama", 1), ("one head", 4)])
def test_each_rank_stores_its_own_head_or_a_copy_and_its_memory_is_counted(name: str, copies: int):
    one, engine = (engine_of(target_of(name), count, full_slots=64, swa_slots=64) for count in (1, 4))
    heads = [layer.k.shape[1] for store in engine.cache.stores for layer in store.layers.values()]
    assert len(heads) >= 4 and set(heads) == {1}
    assert engine.cache.bytes_by_group() == {key: copies * size for key, size in one.cache.bytes_by_group().items()}


@pytest.mark.usefixtures("interpreted")
def test_parts_of_ranks_are_those_of_the_whole_weight():
    torch.manual_seed(0)
    x, weight = torch.randn(3, 1024), torch.randn(32, 1024) / 32
    split_k = split_k_of(weight)
    assert split_k == (4, 256)
    whole = linear(x, weight, keep_parts=True).parts
    for count in (2, 4):
        shares = zip(x.chunk(count, 1), weight.chunk(count, 1), strict=True)
        parts = [linear_parts(some.contiguous(), columns, split_k.share(count)) for some, columns in shares]
        assert torch.equal(torch.cat([product.parts for product in parts]), whole)
    torch.testing.assert_close(reference_linear_parts(x, weight, split_k).parts, whole)


# what is refused


HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6}
LINEAR_HEADS = {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
UNSHARED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    # family, fields of its config, devices, words of the refusal
    "experts": ("qwen3_moe", {"num_experts": 3}, 2, "has 3 experts, which 2 devices cannot"),
    "experts of groups": ("deepseek_v3", {"n_routed_experts": 6}, 4, "has 6 experts, which 4 devices cannot"),
    "K/V heads": (
        "llama",
        {**HEADS, "hidden_size": 96, "num_key_value_heads": 3},
        2,
        "6 query heads and 3 K/V heads; a",
    ),
    "heads of latents": ("deepseek_v3", HEADS, 4, "has 6 query heads and 6 K/V heads; a number of"),
    "one head": ("llama", dict.fromkeys(HEADS, 1), 2, "must divide the query heads, and divide"),
    "odd": ("llama", {"intermediate_size": 642}, 2, "has a down weight of 64 rows and 642 columns, and 2 devices"),
    "linear heads": ("qwen3_5", LINEAR_HEADS, 2, "has 3 key heads and 6 value heads of linear attention; a number of"),
    "unfused": ("lfm2", {}, 2, "Lfm2Model has no fused form"),
}


@pytest.mark.parametrize(("family", "fields", "count", "said"), UNSHARED.values(), ids=UNSHARED)
def test_models_that_cannot_be_divided_are_refused(family: str, fields: dict[str, Any], count: int, said: str):
    """A model, and a target that is whole."""
    sizes = {**WIDE, **LATENTS} if family == "deepseek_v3" else {} if family == "lfm2" else WIDE
    model = build_target(family, **{**sizes, **fields}).eval()
    config = EngineConfig(fused=True, tensor_parallel=count, device="cpu")
    with pytest.raises(SpecDecError, match=said):
        Engine.from_pretrained(model, config=config)
    with pytest.raises(SpecDecError, match=said):
        Engine(TargetModel(model, REFERENCE), config=config)


def test_unfused_engines_and_too_many_devices_are_refused():
    model = build_target("llama", **WIDE)
    with pytest.raises(ConfigError, match=r"splits fused layers, and .* runs unfused"):
        Engine.from_pretrained(model, config=EngineConfig(tensor_parallel=2))
    with pytest.raises(ConfigError, match="tensor_parallel=9"):
        EngineConfig(tensor_parallel=9)


@pytest.mark.parametrize(("there", "access", "said"), [(1, True, "sees 1 in all"), (2, False, "no peer access")])
def test_gpus_that_are_not_there_or_apart_are_refused(
    there: int, access: bool, said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: access)
    with pytest.raises(ConfigError, match=said):
        make_ranks(torch.device("cuda", 0), 2)


def test_what_cannot_be_shared_is_refused_before_a_model_runs_and_missing_gpus_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
):
    """A large model ran in host memory for minutes first."""
    config = EngineConfig(fused=True, tensor_parallel=2, device="cpu")
    monkeypatch.setattr(TargetModel, "_probe", lambda target: pytest.fail("the model ran"))
    with pytest.raises(SpecDecError, match="has 3 experts, which 2 devices cannot"):
        Engine.from_pretrained(build_target("qwen3_moe", **WIDE, num_experts=3), config=config)

    def refuse(device: torch.device, count: int) -> Ranks:
        raise ConfigError(f"{count} of {device}")

    monkeypatch.setattr(specdec.engine, "make_ranks", refuse)
    monkeypatch.setattr(specdec.engine, "load_target", lambda *args, **options: pytest.fail("the model was read"))
    with pytest.raises(ConfigError, match="2 of cpu"):
        Engine.from_pretrained("tiny-gemma4", config=config)


# the exchange


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("tagged", [0, TAGGED], ids=["flags", "tagged"])
def test_a_gather_is_in_the_order_of_ranks_and_sends_are_copies(tagged: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exchange_kernels, "TAGGED", tagged)
    for ranks in (Ranks(CPUS), PeerRanks(CPUS)):
        ranks.reserve(64)
        for _ in range(2):  # another round
            ranks.begin()
            here = {"ids": torch.tensor([[3, 4], [5, 6]]).t(), "mask": torch.tensor([True, False, True]), "none": None}
            first, second = ranks.send(here)
            assert first is here
            assert map_tensors(second, torch.Tensor.tolist) == {
                "ids": [[3, 5], [4, 6]],
                "mask": [True, False, True],
                "none": None,
            }
            for number in range(3):
                parts = [torch.full((2, 1, 3), float(10 * rank + number)) for rank in range(2)]
                for whole in ranks.gather(parts):
                    assert whole[:, 0, 0].tolist() == [number, number, 10 + number, 10 + number]
            assert [len(whole) for whole in ranks.gather([torch.zeros(2, 0, 3)] * 2)] == [4, 4], "of no rows"
            ranks.end()
        ranks.check()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("tagged", [0, TAGGED], ids=["flags", "tagged"])
def test_a_forward_may_have_more_exchanges_than_a_round_has_steps(tagged: int, monkeypatch: pytest.MonkeyPatch):
    """A prompt of 65,536 tokens in one chunk has that many in 80 layers: it ended in an AssertionError."""
    monkeypatch.setattr(exchange_kernels, "TAGGED", tagged)
    monkeypatch.setattr(specdec.gpu.ranks, "STEPS", 8)
    ranks = PeerRanks(CPUS)
    ranks.reserve(8)
    ranks.max_polls = 3
    for _ in range(2):
        ranks.begin()
        ranks.send(())
        for number in range(20):
            for whole in ranks.gather([torch.full((1, 2), 10.0 * rank + number) for rank in range(2)]):
                assert whole.tolist() == [[number] * 2, [10.0 + number] * 2]
        ranks.end()
    ranks.check()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("num_rows", [1, 2])
def test_columns_put_side_by_side_outlive_later_exchanges(num_rows: int):
    """Gemma 4 reads its per-layer embeddings in every layer."""
    ranks = PeerRanks(CPUS)
    ranks.reserve(64)
    ranks.begin()
    columns = [torch.full((num_rows, 4), float(1 + rank)) for rank in range(2)]
    products = side_by_side(columns, ranks)
    for _ in range(2):  # into each half of the buffers
        ranks.gather([torch.full((1, num_rows, 4), 9.0)] * 2)
    for product in products:
        assert product.parts[0].tolist() == [[1.0] * 4 + [2.0] * 4] * num_rows


def halves_of_an_exchange(tagged: bool, *launches: tuple[int, str], left: int = 0) -> PeerRanks:
    """Two ranks with 1,500 numbers each, after these launches. left: what all flags were before."""
    ranks = PeerRanks(CPUS)
    ranks.reserve(3000)
    ranks.max_polls = 3
    ranks.begin()
    for flags in ranks._flags:
        flags.fill_(left)
    for rank, halves in launches:
        part = torch.arange(1500.0) + 1500 * rank
        if tagged:
            ranks._launch_tagged(rank, part, ranks._buffers[rank], halves=halves)
        else:
            ranks._launch(rank, 1500, 2, part, 1500 * rank, halves=halves)
    return ranks


BOTH_FORMS = pytest.mark.parametrize("tagged", [False, True], ids=["flags", "tagged"])


@pytest.mark.usefixtures("interpreted")
@BOTH_FORMS
def test_a_launch_that_pushes_and_waits_is_a_push_and_then_a_wait(tagged: bool):
    """Here a rank can only wait for what has run: the one that does both comes last, as if it were late."""
    ranks = halves_of_an_exchange(tagged, (1, "push"), (0, "push and wait"), (1, "wait"))
    ranks.check()
    for buffer in ranks._buffers:
        assert buffer[:3000].equal(torch.arange(3000.0)) and not buffer[3000:].any()


@pytest.mark.usefixtures("interpreted")
@BOTH_FORMS
@pytest.mark.parametrize("halves", ["wait", "push and wait"])
def test_a_wait_for_a_rank_that_has_not_pushed_ends(tagged: bool, halves: str):
    ranks = halves_of_an_exchange(tagged, (0, halves))
    with pytest.raises(DeviceLostError, match="did not answer within seconds"):
        ranks.check()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("left", "pushed"), [(STEPS + 1, True), (2 * STEPS - 1, True), (2**31 - 1, False)])
def test_a_flag_of_a_much_earlier_exchange_is_ignored(left: int, pushed: bool):
    """A program that only large exchanges have may be asked again when half of all targets have passed."""
    ranks = halves_of_an_exchange(False, (0, "wait"), left=left)
    with nullcontext() if pushed else pytest.raises(DeviceLostError):
        ranks.check()


@pytest.mark.usefixtures("interpreted")
def test_a_word_that_was_read_is_not_taken_for_a_new_one():
    """2^20 rounds later the target is the same number, and a word that nothing has overwritten was taken for a new one:
    as here, where no round has passed. Nor does a word that was never written have any target."""
    ranks = halves_of_an_exchange(True, (0, "push"), (1, "push"), (0, "wait"), (1, "wait"))
    ranks.check()
    assert all((words == EMPTY).all() for words in ranks._words)
    ranks._launch_tagged(0, torch.arange(1500.0), ranks._buffers[0], halves="wait")
    with pytest.raises(DeviceLostError):
        ranks.check()
    assert EMPTY >> 32 == -1  # the target of a last step, which no round has: see STEPS


@usual_cases("gpt_oss")  # a dense model: test_split_layers.py
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma4-moe"])
def test_an_engine_on_peers_answers_as_on_one_device(name: str, monkeypatch: pytest.MonkeyPatch):
    layer: dict[str, Any] = {"num_hidden_layers": 1} | (
        {} if name == "llama" else {"layer_types": ["full_attention"], "vocab_size_per_layer_input": VOCAB}
    )
    target = new_target(name, **layer)
    params = SamplingParams(max_new_tokens=examples(2, 3), logprobs=VOCAB, ignore_eos=True)
    [alone] = engine_of(target, 1).generate([1, 2, 3, 4], params)
    use_peers(monkeypatch)
    [out] = engine_of(target, 2).generate([1, 2, 3, 4], params)
    assert (out.token_ids, out.logprobs) == (alone.token_ids, alone.logprobs)


def test_a_rank_that_stops_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch):
    target = new_target("llama", num_hidden_layers=1)
    made = use_peers(monkeypatch)
    with engine_of(target, 2) as engine:
        [ranks] = made
        ranks.max_polls = 2
        launch = ranks._launch

        def all_but_pushes_of_rank_1(rank: int, *rest: Any, halves: str) -> None:
            if (rank, halves) != (1, "push"):
                launch(rank, *rest, halves=halves)

        monkeypatch.setattr(ranks, "_launch", all_but_pushes_of_rank_1)
        with pytest.raises(DeviceLostError, match="did not answer within seconds"):
            engine.generate([[1, 2, 3, 4]], SamplingParams(max_new_tokens=3))
        with pytest.raises(DeviceLostError):  # it cannot go on
            engine.generate([[5]], SamplingParams(max_new_tokens=1))


def test_engines_in_threads_take_turns_on_the_ranks_that_they_share(monkeypatch: pytest.MonkeyPatch):
    """The steps of both were counted as those of one forward, on which each rank waited for another's numbers."""
    made, params = use_peers(monkeypatch), SamplingParams(max_new_tokens=2, ignore_eos=True)
    with engine_of(new_target("llama", num_hidden_layers=1), 2) as first, engine_of(first.target, 2) as second:
        [ranks], calls = made, list[int]()
        [alone] = first.generate([1, 2, 3], params)
        other = Thread(target=lambda: calls.extend(second.generate([1, 2, 3], params)[0].token_ids))
        begin = ranks.begin

        def begin_while_the_other_asks() -> None:
            monkeypatch.setattr(ranks, "begin", begin)
            other.start()
            other.join(timeout=0.2)
            assert calls == []
            begin()

        monkeypatch.setattr(ranks, "begin", begin_while_the_other_asks)
        [out] = first.generate([1, 2, 3], params)
        other.join()
        assert out.token_ids == calls == alone.token_ids
