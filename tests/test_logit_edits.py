"""Edits of logits before a token is drawn: bias, presence and frequency penalty, in their order, along each path."""

import copy
import pickle
from collections import deque

import numpy as np
import pytest
import torch
from samplers import EDITS, sampler_of

from specdec import DraftTree, SamplingParams
from specdec.sampling.kernel_sampler import KernelSampler
from specdec.sampling.reference_sampler import EditInputs, ReferenceSampler, RootMaskedSampler, output_counts
from specdec.sampling.sampling_table import SamplerFeatures, SamplingTable, bias_room, pack_bias, unpack_bias

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def edited_on_paper(logits, params, prompt, output):
    """One row of logits, a token at a time, as the docstring of SamplingParams has it."""
    edited = []
    for token, x in enumerate(logits.tolist()):
        x += (params.logit_bias or {}).get(token, 0)
        if token in prompt or token in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(token)
        x -= params.presence_penalty * (token in output)
        edited.append(x)
    return torch.tensor(edited)


def test_counts_are_of_the_output_along_each_path():
    """prompt 4 4, output 5 5 6; the root is the 6; 1 and 2 are children of the root, 3 a child of 1."""
    history, length = torch.tensor([[4, 4, 5, 5, 6, 9]]), torch.tensor([5])  # the 9 is after the end
    tree = DraftTree.from_parents(torch.tensor([[6, 5, 7, 5]]), torch.tensor([[-1, 0, 0, 1]]))
    counts = output_counts(EditInputs(length, tree, lambda: history, torch.tensor([2])), 10)[0]
    assert [{v: int(n) for v, n in enumerate(row) if n} for row in counts.tolist()] == [
        {5: 2, 6: 1},
        {5: 3, 6: 1},
        {5: 2, 6: 1, 7: 1},
        {5: 4, 6: 1},
    ]
    first = output_counts(EditInputs(torch.tensor([2]), None, lambda: history, torch.tensor([2])), 10)
    assert first.shape == (1, 1, 10) and not first.any()  # after the prompt nothing has been said


@pytest.mark.parametrize("kind", [ReferenceSampler, KernelSampler])
@pytest.mark.parametrize("with_tree", [False, True], ids=["first", "tree"])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_edits_match_their_definition(kind, with_tree, softcap, kernels_run):
    """Every setting, and a request that asks for nothing, in one batch, on every node; drawn greedily."""
    params = [SamplingParams(**{**s, "temperature": 0, "seed": None}) for s in [{}, *EDITS.values()]]
    generator = torch.Generator().manual_seed(3)
    count, vocab = len(params), 96
    history = torch.randint(0, vocab, (count, 9), generator=generator)
    history[:, 4:8] = history[:, 3:4]  # the same again and again
    length, prompt_len = torch.randint(4, 10, (count,), generator=generator), torch.full((count,), 3)
    tokens = torch.randint(0, vocab, (count, 4), generator=generator)
    tokens[:, 0] = history[torch.arange(count), length - 1]
    tree = DraftTree.from_parents(tokens, torch.tensor([[-1, 0, 0, 2]] * count))
    logits = torch.randn(count, 4 if with_tree else 1, vocab, generator=generator) * 3
    sampler = sampler_of(params, [7] * count, DEVICE, kind)
    tree_there = DraftTree.from_parents(tokens.to(DEVICE), tree.parents.to(DEVICE))
    before = tree_there if with_tree else None
    inputs = EditInputs(length.to(DEVICE), before, lambda: history.to(DEVICE), prompt_len.to(DEVICE))
    positions = torch.zeros(logits.shape[:2], dtype=torch.int64, device=DEVICE)
    drawn = sampler.draw(logits.to(DEVICE), positions, inputs, softcap).cpu()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    for b, one in enumerate(params):
        known = history[b, : length[b]].tolist()
        for node in range(logits.shape[1]):
            path = [tokens[b, a].item() for a in range(1, 4) if tree.ancestors[b, node, a]] if with_tree else []
            expected = edited_on_paper(logits[b, node], one, known[:3], known[3:] + path)
            best = expected.topk(2)
            assert best.values[0] - best.values[1] > 1e-4  # no tie
            assert drawn[b, node] == best.indices[0], f"{b=} {node=}"


@pytest.mark.parametrize("kind", [ReferenceSampler, KernelSampler])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_that_a_grammar_forbids_is_drawn(kind, temperature, kernels_run):
    """One token, two, one that the model rules out, and all of them; draws follow the plain distribution."""
    vocab, may_follow = 70, [[5], [3, 69], [8], list(range(70))]
    bits = np.zeros((1, 4, 96), dtype=np.uint8)
    for node, tokens in enumerate(may_follow):
        bits[0, node, tokens] = 1
    allowed = torch.from_numpy(np.packbits(bits, axis=2, bitorder="little").view(np.int32)).to(DEVICE)
    logits = torch.randn(1, 4, vocab, generator=torch.Generator().manual_seed(1)) * 4
    logits[0, 2, 8] = -torch.inf
    params = SamplingParams(temperature=temperature, top_p=0.9 if temperature else 1.0, regex="a")
    sampler = sampler_of([params], [3], DEVICE, kind)
    history = torch.zeros(1, 3, dtype=torch.int64, device=DEVICE)
    inputs = EditInputs(torch.tensor([2], device=DEVICE), None, lambda: history, None, allowed)
    positions = torch.arange(4, device=DEVICE)[None]
    assert sampler.features.edits
    drawn = sampler.draw(logits.to(DEVICE), positions, inputs)[0].tolist()
    assert all(token in tokens for token, tokens in zip(drawn, may_follow, strict=True))
    free = sampler.sample(logits.to(DEVICE), positions)[0].tolist()
    assert drawn[3] == free[3]
    two = torch.full_like(logits[:, 1:2], -torch.inf)
    two[0, 0, [3, 69]] = logits[0, 1, [3, 69]]
    assert drawn[1] == sampler.sample(two.to(DEVICE), positions[:, 1:2])[0, 0]


def test_drafts_after_the_root_are_masked_and_others_are_not():
    """The grammar allows token 0 at position 7; at 8 the mask is not known yet, and token 2 is the best."""
    draws = RootMaskedSampler(
        sampler_of([SamplingParams(regex="a")], [0]),
        torch.tensor([7]),
        torch.tensor([[1]], dtype=torch.int32),
    )
    logits = torch.tensor([[[1.0, 2.0, 3.0]] * 2])
    assert draws.sample(logits, torch.tensor([[7, 8]])).tolist() == [[0, 2]]
    best = draws.best(logits, torch.tensor([[7, 8]]), 2)
    assert best.tokens[0, 0, 0] == 0 and best.scores[0, 0].tolist() == [0.0, -torch.inf]
    assert best.tokens[0, 1].tolist() == [2, 1]


def test_biases_are_packed_and_a_row_forgets_the_last_one():
    bias = {5: 2.5, (1 << 31) - 1: -0.125}
    token, value = unpack_bias(torch.from_numpy(pack_bias(bias, 16)[None].copy()))
    assert token[0, :3].tolist() == [5, (1 << 31) - 1, 0] and value[0, :3].tolist() == [2.5, -0.125, 0.0]
    assert [bias_room(n) for n in (0, 1, 16, 17, 300, 4096)] == [0, 16, 16, 32, 512, 4096]
    table = SamplingTable(3, torch.device("cpu"))
    two = [SamplingParams(logit_bias={1: 1.0}), SamplingParams()]
    features = SamplerFeatures.from_params(two)
    for order in (two, two[::-1]):  # the rows are taken by the other one
        table.load_biases(torch.tensor([0, 2]).numpy(), order, features)
        edited = ReferenceSampler(*table.row_params(torch.tensor([0, 2]), features)).biased(torch.zeros(2, 1, 3))
        assert edited[:, 0].tolist() == [[0.0, 1.0 if one.logit_bias else 0.0, 0.0] for one in order]


def test_requests_without_edits_pay_nothing():
    free = [SamplingParams(), SamplingParams(temperature=1.0, repetition_penalty=1.2)]
    assert not SamplerFeatures.from_params(free).edits
    assert SamplerFeatures.from_params([SamplingParams(presence_penalty=0.1)]).counts
    assert SamplerFeatures.from_params([*free, SamplingParams(logit_bias={1: 0.5})]).bias == 16
    assert not SamplerFeatures.from_params([SamplingParams(logit_bias={})]).edits


@pytest.mark.parametrize("setting", ["bias", "every edit", "wanted again"])
def test_greedy_is_an_independent_loop(setting, make_target, make_engine, random_prompt, hf_forward):
    model, prompt = make_target("llama"), random_prompt(9)
    params = SamplingParams(max_new_tokens=20, **EDITS[setting])
    output: list[int] = []
    while len(output) < 20:
        logits = hf_forward(model, [*prompt, *output]).logits[0, -1]
        output.append(int(edited_on_paper(logits, params, prompt, output).argmax()))
    assert make_engine(model, "ngram").generate(prompt, params)[0].token_ids == output


def test_a_preempted_request_counts_its_output_alone(make_target, make_engine, random_prompt):
    """Its prompt is where it was, though its K/V are made again from prompt and output."""
    model = make_target("llama")
    prompts = [random_prompt(12, seed=seed) for seed in range(3)]
    params = SamplingParams(max_new_tokens=24, presence_penalty=1.2, frequency_penalty=0.8)
    alone = [make_engine(model).generate(p, params)[0].token_ids for p in prompts]
    engine = make_engine(model, max_batch_size=3, full_slots=72)
    outs = engine.generate(prompts, params)
    assert engine.stats().preemptions and [out.token_ids for out in outs] == alone


def test_params_are_copied_at_submission():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias, json_schema=None)
    bias[2] = 3.0
    assert params.logit_bias == {1: 2.0}
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert hash(SamplingParams(json_schema={"type": "object"})) == hash(
        SamplingParams(json_schema='{"type": "object"}')
    )
    assert len({SamplingParams(), SamplingParams(regex="a"), SamplingParams(regex="a")}) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop_token_ids", 3), ("allowed_token_ids", 3), ("stop", "a"), ("choice", "a"), ("logit_bias", 3)],
)
def test_params_made_of_any_collection_are_hashed_compared_and_pickled(name, value):
    given = {value: 1.0}
    collections = [[value], (value,), {value}, given.keys(), {1.0: value}.values(), deque([value])]
    for one in [given] if name == "logit_bias" else collections:
        params = SamplingParams(**{name: one})
        assert {params, pickle.loads(pickle.dumps(params)), SamplingParams(**{name: one})} == {params}
    assert SamplingParams(stop_token_ids=range(3, 5)) == SamplingParams(stop_token_ids=np.array([3, 4]))
    assert SamplingParams(stop_token_ids=range(3, 5)) == SamplingParams(stop_token_ids=(3, 4))


def test_a_bias_outside_of_the_vocabulary(make_target, make_engine):
    with pytest.raises(ValueError, match=r"logit_bias holds token id 96, outside the vocabulary of 96"):
        make_engine(make_target("llama")).generate([1, 2], SamplingParams(logit_bias={3: 1, 96: 1}))
