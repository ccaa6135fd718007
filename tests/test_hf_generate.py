"""`specdec.generate` against `model.generate`: the same tensors for padded batches, or one clear refusal."""

import pytest
import torch

import specdec
from specdec import SpecDecError

PROMPTS = [[5, 9, 31, 7, 22, 9, 31], [11, 3], [8, 8, 8, 40, 2]]


def padded(prompts, side, pad=0):
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        where = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, where] = torch.tensor(prompt)
        mask[row, where] = 1
    return ids, mask


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4-e2b"])
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_greedy_batch_equals_transformers_generate(make_target, family, drafter):
    model = make_target(family)
    ids, mask = padded(PROMPTS, "left")
    kwargs = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    want = model.generate(ids, attention_mask=mask, **kwargs)
    got = specdec.generate(model, drafter, ids, attention_mask=mask, **kwargs)
    assert got.tolist() == want.tolist()


def test_rows_end_at_eos_and_are_padded_like_transformers(make_target):
    model = make_target("llama")
    ids, mask = padded(PROMPTS, "left")
    free = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    eos = int(free[0, ids.shape[1] + 3])  # a token that row 0 emits early
    kwargs = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 1, "eos_token_id": [eos, 96]}
    want = model.generate(ids, attention_mask=mask, **kwargs)
    assert (want[0] == 1).any(), "the case must show padding"
    assert specdec.generate(model, "ngram", ids, attention_mask=mask, **kwargs).tolist() == want.tolist()


def test_right_padding_is_stripped_by_the_mask(make_target):
    model = make_target("llama")
    kwargs = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    left = specdec.generate(model, None, *padded(PROMPTS, "left"), **kwargs)
    right = specdec.generate(model, None, *padded(PROMPTS, "right"), **kwargs)
    assert left[:, 7:].tolist() == right[:, 7:].tolist()
    assert right[:, :7].tolist() == padded(PROMPTS, "right")[0].tolist()


def test_max_length_counts_the_padded_prompt(make_target):
    model = make_target("llama")
    ids, mask = padded(PROMPTS, "left")
    out = specdec.generate(model, None, ids, mask, max_length=10, eos_token_id=None, pad_token_id=0)
    assert out.shape == (3, 10)


def test_the_default_is_twenty_new_tokens(make_target):
    model = make_target("llama")
    ids = torch.tensor([PROMPTS[0]])
    assert specdec.generate(model, None, ids, eos_token_id=None, pad_token_id=0).shape == (1, 7 + 20)


def test_sampling_follows_the_global_seed_and_rows_differ(make_target):
    model = make_target("llama")
    ids = torch.tensor([PROMPTS[0]] * 3)
    kwargs = {"max_new_tokens": 10, "do_sample": True, "temperature": 1.0, "top_k": 0, "pad_token_id": 0}

    def run(drafter):
        torch.manual_seed(3)
        return specdec.generate(model, drafter, ids, eos_token_id=None, **kwargs).tolist()

    first = run(None)
    assert first == run(None) == run("ngram")
    assert len({tuple(row) for row in first}) == 3


def test_top_k_defaults_to_that_of_transformers(make_target):
    """do_sample without top_k means top_k=50 there, so it must here."""
    model = make_target("llama")
    ids = torch.tensor([PROMPTS[0]])
    kwargs = {"max_new_tokens": 24, "do_sample": True, "temperature": 3.0, "pad_token_id": 0, "eos_token_id": None}
    default = specdec.generate(model, None, ids, seed=1, **kwargs)
    assert default.tolist() == specdec.generate(model, None, ids, seed=1, top_k=50, **kwargs).tolist()
    assert default.tolist() != specdec.generate(model, None, ids, seed=1, top_k=0, **kwargs).tolist()


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"num_return_sequences": 2}, "num_return_sequences=2"),
        ({"prefix_allowed_tokens_fn": len}, "prefix_allowed_tokens_fn"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size=2"),
        ({"max_length": 3}, "max_length=3"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(make_target, kwargs, says):
    with pytest.raises(SpecDecError, match=says):
        specdec.generate(make_target("llama"), None, torch.tensor([PROMPTS[0]]), **kwargs)


def test_shapes_are_checked(make_target):
    model = make_target("llama")
    with pytest.raises(SpecDecError, match=r"\(3,\)"):
        specdec.generate(model, None, torch.tensor([1, 2, 3]))
    with pytest.raises(SpecDecError, match="attention_mask"):
        specdec.generate(model, None, torch.tensor([[1, 2, 3]]), torch.ones(1, 2))
    with pytest.raises(SpecDecError, match="empty"):
        specdec.generate(model, None, torch.tensor([[1, 2]]), torch.zeros(1, 2), max_new_tokens=2)


def test_the_model_is_left_as_it_was(make_target):
    model = make_target("gemma3")
    before = model.config._attn_implementation
    specdec.generate(model, "ngram", torch.tensor([PROMPTS[0]]), max_new_tokens=4, pad_token_id=0)
    assert model.config._attn_implementation == before
    assert not model.model.layers[0]._forward_pre_hooks
