"""`specdec.generate` against `model.generate`: the same tensors for padded batches, or one clear refusal."""

import copy
import inspect
import itertools
import json

import numpy as np
import pytest
import torch
from refusal_checks import one_sentence
from transformers import (
    GenerationConfig,
    MinLengthLogitsProcessor,
    PreTrainedTokenizerFast,
    TextStreamer,
    WatermarkingConfig,
)
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import MaxTimeCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import specdec
from specdec import EngineConfig, SpecConfig, SpecDecError

from marks import deep, deep_cases, each_value, pairs, usual, usual_cases
from tiny_tokenizers import byte_level

PROMPTS = [[5, 9, 31, 7, 22, 9, 31], [11, 3], [8, 8, 8, 40, 2]]
ONE = torch.tensor(PROMPTS[:1])


def padded(prompts, side, pad=0):
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        where = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, where] = torch.tensor(prompt)
        mask[row, where] = 1
    return ids, mask


def as_transformers(model, ids=ONE, drafter="ngram", ours=None, **kwargs):
    """The tensor that both return. ours: arguments that `specdec.generate` gets in the place of transformers'."""
    want = model.generate(ids, **kwargs)
    given = {"drafter": drafter, "input_ids": ids, **kwargs} | (ours or {})
    got = specdec.generate(model, **{name: value for name, value in given.items() if value is not LEFT_OUT})
    assert type(got) is type(want)
    ours, theirs = (x if isinstance(x, torch.Tensor) else x.sequences for x in (got, want))
    assert ours.tolist() == theirs.tolist() and ours.dtype == torch.int64
    return ours


LEFT_OUT = object()
BATCH, MASK = padded(PROMPTS, "left")
GREEDY = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@usual_cases("ngram-gemma4-e2b")
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4-e2b"])
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_greedy_batch_equals_transformers_generate(make_target, family, drafter):
    as_transformers(make_target(family), BATCH, drafter, attention_mask=MASK, **GREEDY)


@pytest.mark.parametrize(("pad", "masked"), each_value(pairs([0, None, 1], [True, False])))
def test_rows_end_at_eos_and_are_padded_like_transformers(pad, masked, model):
    free = model.generate(BATCH, attention_mask=MASK, **GREEDY)
    ends = [int(free[0, 10]), int(free[1, 13])]  # which rows 0 and 1 emit early
    kwargs = {**GREEDY, "eos_token_id": ends, "pad_token_id": pad, "attention_mask": MASK if masked else None}
    found = as_transformers(model, BATCH, **kwargs)
    assert (found[0, 11:] == (ends[0] if pad is None else pad)).all(), "the case must show padding"


def test_right_padding_is_stripped_by_the_mask(make_target):
    model = make_target("llama")
    kwargs = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    left = specdec.generate(model, None, *padded(PROMPTS, "left"), **kwargs)
    right = specdec.generate(model, None, *padded(PROMPTS, "right"), **kwargs)
    assert left[:, 7:].tolist() == right[:, 7:].tolist()
    assert right[:, :7].tolist() == padded(PROMPTS, "right")[0].tolist()


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


# settings, wherever they are made


@pytest.fixture
def model(make_target):
    """A model whose configs and mode may be changed: they are put back."""
    model = make_target("llama")
    config, generation_config = copy.deepcopy(vars(model.config)), copy.deepcopy(model.generation_config)
    yield model
    vars(model.config).clear()
    vars(model.config).update(config)
    model.generation_config = generation_config
    model.eval()


class Recorder(BaseStreamer):
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.seen.append("end")


REFUSED = {
    "sequence_bias": {(3,): 9.0},
    "encoder_repetition_penalty": 1.5,
    "encoder_no_repeat_ngram_size": 2,
    "exponential_decay_length_penalty": (2, 1.5),
    "watermarking_config": WatermarkingConfig(),
    "max_time": 0.5,
    "top_h": 0.4,
    "dola_layers": "low",
    "prompt_lookup_num_tokens": 3,
    "num_beams": 2,
    "no_repeat_ngram_size": 2,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "min_length": 30,
    "min_new_tokens": 2,
    "bad_words_ids": [[3]],
    "suppress_tokens": [3],
    "begin_suppress_tokens": [3],
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 3,
    "guidance_scale": 1.5,
    "penalty_alpha": 0.5,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "token_healing": True,
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "assistant_early_exit": 2,
    "is_assistant": True,
    "diversity_penalty": 0.5,
    "num_beam_groups": 2,
    "constraints": [1],
    "force_words_ids": [[1]],
    "length_penalty": 2.0,
    "early_stopping": True,
    "cache_implementation": "quantized",
    "a_field_of_the_future": 1,
}
PLACES = ["keyword", "given", "own"]


@pytest.mark.parametrize(
    ("name", "where"),
    usual(
        [(name, where) for name in REFUSED for where in PLACES],
        lambda name, where: where == PLACES[list(REFUSED).index(name) % 3],
    ),
)
def test_every_setting_that_is_not_honoured_is_refused_wherever_it_is_made(name, where, model):
    value, ids = REFUSED[name], ONE
    kwargs = {}
    if where == "keyword":
        kwargs = {name: value}
    else:
        config = kwargs["generation_config"] = GenerationConfig() if where == "given" else model.generation_config
        setattr(config, name, value)
        if where == "own":
            del kwargs["generation_config"]
    with one_sentence(SpecDecError, f"{name}="):
        specdec.generate(model, None, ids, max_new_tokens=3, pad_token_id=0, **kwargs)
    kwargs |= {name: None}
    assert specdec.generate(model, None, ids, max_new_tokens=3, pad_token_id=0, **kwargs).shape == (1, 10)


def test_a_field_that_transformers_adds_is_refused_unless_at_its_default(model, monkeypatch):
    """The table of harmless fields is closed; what GenerationConfig may hold is not."""
    make = GenerationConfig.__init__

    def newer(self, **kwargs):
        self.think_twice = kwargs.pop("think_twice", None)
        make(self, **kwargs)

    monkeypatch.setattr(GenerationConfig, "__init__", newer)
    as_transformers(model, generation_config=GenerationConfig(max_new_tokens=2))
    with one_sentence(SpecDecError, "think_twice=2"):
        specdec.generate(model, None, ONE, generation_config=GenerationConfig(think_twice=2), max_new_tokens=2)


NO_CHANGE = {
    "num_beams": 1, "num_return_sequences": 1, "min_length": 0, "min_new_tokens": 0, "typical_p": 1.0,
    "use_cache": True, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "length_penalty": 1.0, "early_stopping": False, "guidance_scale": 1.0,
    "repetition_penalty": 1.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "output_scores": False,
    "return_dict_in_generate": False, "renormalize_logits": False, "token_healing": False, "is_assistant": False,
    "cache_implementation": "dynamic", "disable_compile": True, "num_assistant_tokens": 5, "suppress_tokens": [],
    "num_assistant_tokens_schedule": "constant", "diversity_penalty": 0.0, "num_beam_groups": 1, "bos_token_id": 4,
}  # fmt: skip


SIGNATURE = (
    {"logits_processor": LogitsProcessorList(), "stopping_criteria": StoppingCriteriaList(), "synced_gpus": False}
    | dict.fromkeys(["prefix_allowed_tokens_fn", "negative_prompt_ids", "custom_generate", "past_key_values"])
    | dict.fromkeys(["assistant_tokenizer", "trust_remote_code", "position_ids", "inputs_embeds", "streamer"])
    | {"token_type_ids": torch.zeros(1, 7, dtype=torch.int64)}
)


@pytest.mark.parametrize("values", [NO_CHANGE, dict.fromkeys(NO_CHANGE)], ids=["given", "None"])
def test_values_that_change_nothing_pass(values, model):
    kwargs = {"attention_mask": MASK, "max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None}
    as_transformers(model, BATCH, None, ours=values, **kwargs)


def test_arguments_that_ask_for_nothing_pass(model):
    """None of transformers' own parameters may fall on the floor, nor be taken for a typing mistake."""
    own = dict.fromkeys(inspect.signature(model.generate).parameters.keys() - {"inputs", "kwargs"})
    for name, value in (own | SIGNATURE).items():
        assert specdec.generate(model, None, ONE, max_new_tokens=1, **{name: value}).shape == (1, 8), name


@pytest.mark.parametrize(
    ("kwargs", "parts"),
    [
        ({"logits_processor": LogitsProcessorList([MinLengthLogitsProcessor(3, 1)])}, ["MinLengthLogitsProcessor"]),
        ({"logits_processor": [MinLengthLogitsProcessor(3, 1)]}, ["logits_processor=[", "MinLengthLogitsProcessor"]),
        (
            {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(1.0)])},
            ["stopping_criteria=[", "MaxTimeCriteria"],
        ),
        ({"position_ids": torch.arange(7)[None]}, ["position_ids", "(1, 7)"]),
        ({"token_type_ids": torch.ones(1, 7)}, ["token_type_ids"]),
        ({"max_new_token": 3}, ["max_new_token=3", "did you mean max_new_tokens?"]),
        ({"_private": 3}, ["_private=3"]),
        ({"do_smaple": False}, ["do_smaple=False", "did you mean do_sample?"]),
        ({"stop_string": []}, ["stop_string=[]", "did you mean stop_strings?"]),
        ({"watermarking_config": {}}, ["watermarking_config={}"]),
        ({"assistant_tokenizer": 3}, ["assistant_tokenizer=3", "generate; leave it out, or use model.generate"]),
        ({"generation_config": {"top_k": 3}}, ["generation_config={'top_k': 3}", "GenerationConfig"]),
        ({"prompt_lookup_num_tokens": 3}, ["drafter='ngram'"]),
        ({"prefix_allowed_tokens_fn": len}, ["prefix_allowed_tokens_fn"]),
        ({"num_return_sequences": 2}, ["num_return_sequences=2", "do_sample"]),
        ({"num_return_sequences": 0}, ["num_return_sequences=0"]),
        ({"num_assistant_tokens": 512}, ["num_assistant_tokens=512", "511"]),
        ({"max_new_tokens": 0}, ["max_new_tokens=0"]),
        ({"max_new_tokens": 4096}, ["a prompt of 7 tokens", "ask for at most 4089 new tokens"]),
        ({"max_length": 3}, ["max_length=3"]),
        ({"max_length": 7}, ["max_length=7", "7 tokens"]),
        ({"max_length": 2.5}, ["max_length=2.5", "integer"]),
        ({"eos_token_id": "x"}, ["eos_token_id='x'"]),
        ({"pad_token_id": 1.5}, ["pad_token_id=1.5"]),
        ({"do_sample": True, "temperature": "hot"}, ["temperature='hot'"]),
        ({"stop_strings": "x"}, ["stop_strings='x'", "tokenizer="]),
        ({"stop_strings": [1]}, ["stop=[1]"]),
        ({"streamer": 3}, ["a transformers streamer, with put and end, is expected"]),
        ({"streamer": "text"}, ["a transformers streamer, with put and end, is expected"]),
        ({"streamer": TextStreamer}, ["streamer=<TextStreamer>", "with put and end, is expected"]),
        ({"streamer": Recorder(), "input_ids": torch.tensor(PROMPTS[:1] * 2)}, ["one row, not 2"]),
        ({"stop_strings": "?", "tokenizer": "byte_words"}, ["stop_strings='?'", "vocabulary"]),
        ({"inputs": torch.tensor([[1]])}, ["input_ids", "inputs"]),
        ({"assistant_model": "ngram", "drafter": "ngram"}, ["drafter", "assistant_model"]),
        # things in wrong places
        ({"model": "tiny-gemma4"}, ["model='tiny-gemma4'", "Engine"]),
        ({"model": torch.zeros(2, 3)}, ["shape (2, 3)"]),
        ({"drafter": ONE, "input_ids": LEFT_OUT}, ["generate(model, drafter, input_ids)"]),
        ({"input_ids": [[1, 2]]}, ["[[1, 2]]", "tensor"]),
        ({"input_ids": torch.ones(1, 3)}, ["torch.float32", "integers"]),
        ({"attention_mask": [[1]]}, ["attention_mask", "[[1]]"]),
        ({"input_ids": LEFT_OUT}, ["input_ids", "bos_token_id"]),
        ({"input_ids": torch.tensor([1, 2, 3])}, ["(3,)"]),
        ({"attention_mask": torch.ones(1, 2)}, ["attention_mask"]),
        ({"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.zeros(1, 2)}, ["empty"]),
        ({"input_ids": torch.tensor([[5] * 4097])}, ["4097 tokens, and the model 4096 positions; shorten"]),
    ],
    ids=lambda value: str(value).partition(" object at ")[0],
)
def test_refusals_say_what_to_do(kwargs, parts, model, byte_words):
    if "tokenizer" in kwargs:
        kwargs = {**kwargs, "tokenizer": byte_words}
    given = {"model": model, "input_ids": ONE, **kwargs}
    with one_sentence(SpecDecError, *parts):
        specdec.generate(**{name: value for name, value in given.items() if value is not LEFT_OUT})


def test_a_generation_setting_in_the_models_config_is_refused_as_in_transformers(model):
    model.config.repetition_penalty = 1.5
    with pytest.raises(ValueError, match="repetition_penalty"):
        model.generate(ONE)
    with one_sentence(SpecDecError, "repetition_penalty=1.5", "generation_config"):
        specdec.generate(model, None, ONE)


# how settings are merged: against transformers

OWN = {"max_new_tokens": 5, "eos_token_id": [31, 8], "pad_token_id": 3, "repetition_penalty": 1.3}


@deep_cases(
    *("{}-None-{}", "{'max_length': 12}-{'max_new_tokens': 9, 'pad_token_id': 1}-{'max_new_tokens': 6}"),
    "{}-{'max_length': 11}-{}",
)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(
    ("own", "given", "kwargs"),
    each_value(
        pairs(
            [{}, OWN, {"max_length": 12}],
            [
                *(None, {}, {"repetition_penalty": 2.0}, {"max_new_tokens": 9, "pad_token_id": 1}),
                *({"max_length": 20}, {"max_length": 11}),
            ],
            [{}, {"max_new_tokens": 6}, {"eos_token_id": 40}, {"max_length": 20}],
        ),
    ),
    ids=str,
)
def test_a_given_config_is_filled_from_the_models_own(own, given, kwargs, model):
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    if given is not None:
        kwargs = {**kwargs, "generation_config": GenerationConfig(**given)}
    before = copy.deepcopy(kwargs), model.generation_config.to_dict()
    as_transformers(model, **kwargs)
    assert (str(kwargs), model.generation_config.to_dict()) == (str(before[0]), before[1])


@deep_cases("40-0-left", "[0, 40]-40-none", "-1-None-left")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "pad", "side"),
    each_value(
        pairs(
            [None, 40, [40, 77], [0, 40], -1, [-1], 10**6, torch.tensor([40, 77])], [None, 0, 40, 1], ["left", "none"]
        )
    ),
    ids=str,
)
def test_padding_and_ends_without_a_mask(side, end, pad, model):
    """The mask comes from the padding where padding can be told from an end, as in transformers."""
    ids = padded(PROMPTS, side, pad=0)[0] if side == "left" else torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    kwargs = {"max_new_tokens": 12, "eos_token_id": end, "pad_token_id": pad}
    if end == [0, 40] and side == "left":
        return  # the prompts would be full of ends
    model.generation_config.eos_token_id = None
    as_transformers(model, ids, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "ours"),
    [
        ({}, {"input_ids": LEFT_OUT, "inputs": ONE, "drafter": LEFT_OUT, "assistant_model": "ngram"}),
        ({}, {"max_new_tokens": np.int64(5)}),
        ({}, {"max_new_tokens": torch.tensor(5), "do_sample": np.bool_(False)}),
        ({}, {"max_new_tokens": None, "max_length": np.int32(12), "num_assistant_tokens": np.int8(2)}),
        ({}, {"spec": SpecConfig(num_steps=2), "num_assistant_tokens": 5}),
        ({"ids": ONE.int()}, {}),
        ({"ids": None}, {}),
        ({"return_dict_in_generate": True}, {}),
    ],
    ids=["aliases", "numpy", "torch", "length", "spec", "int32", "no prompt", "dict"],
)
def test_aliases_and_arrays_of_arguments_are_understood(kwargs, ours, model):
    model.generation_config.bos_token_id = 5
    as_transformers(model, ours=ours, **{"max_new_tokens": 5, **kwargs})


@pytest.mark.parametrize("length", [8, 9, 20, 27])
def test_max_length_given_explicitly(length, model):
    """20 is also transformers' default number of new tokens if the caller sets none."""
    kwargs = {"attention_mask": MASK, "max_length": length, "pad_token_id": 0, "eos_token_id": None}
    assert as_transformers(model, BATCH, None, **kwargs).shape == (3, length)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(("limit", "width"), [(16, 16), (4096, 7 + 20)])
def test_the_default_length_ends_at_the_models_limit(limit, width, make_target):
    assert as_transformers(make_target("llama", max_position_embeddings=limit)).shape == (1, width)


def test_a_drafter_and_a_tokenizer_by_path(make_target, make_assistant, byte_words, tmp_path):
    target = make_target("gemma4-e2b")
    make_assistant(target, ordered=True).save_pretrained(tmp_path / "drafter")
    byte_words.save_pretrained(tmp_path / "words")
    kwargs = {"max_new_tokens": 9, "stop_strings": ["a", "b", "1", "x"], "tokenizer": byte_words}
    as_transformers(target, drafter=tmp_path / "drafter", ours={"tokenizer": tmp_path / "words"}, **kwargs)


def test_num_return_sequences_repeats_rows(model):
    ids, mask = padded(PROMPTS, "left")
    kwargs = {"max_new_tokens": 6, "do_sample": True, "temperature": 3.0, "top_k": 0, "pad_token_id": 0, "seed": 4}
    out = specdec.generate(model, "ngram", ids, mask, num_return_sequences=2, **kwargs)
    assert out[:, :7].tolist() == ids.repeat_interleave(2, dim=0).tolist()
    assert len({tuple(row) for row in out.tolist()}) == 6
    repeated = specdec.generate(model, None, *(x.repeat_interleave(2, dim=0) for x in (ids, mask)), **kwargs)
    assert out.tolist() == repeated.tolist()


def test_filters_at_none_are_off(model):
    """An unset top_k is 50, one that is passed as None is off: in transformers, and here."""
    ids = ONE
    kwargs = {"max_new_tokens": 12, "do_sample": True, "seed": 1, "temperature": 3.0}
    none = specdec.generate(model, None, ids, top_k=None, top_p=None, min_p=None, **kwargs).tolist()
    default = specdec.generate(model, None, ids, **kwargs).tolist()
    assert none == specdec.generate(model, None, ids, top_k=0, **kwargs).tolist()
    assert default == specdec.generate(model, None, ids, top_k=50, **kwargs).tolist()
    assert none != default
    best = specdec.generate(model, None, ids, **{**kwargs, "top_p": 0.0})
    assert best.tolist() == model.generate(ids, max_new_tokens=12).tolist()


# streamers and stop strings


@deep_cases("None")
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_a_streamer_sees_what_it_sees_in_transformers(drafter, model, byte_words, capsys):
    want, got = Recorder(), Recorder()
    as_transformers(model, drafter=drafter, max_new_tokens=9, streamer=want, ours={"streamer": got})
    assert got.seen == want.seen
    texts = [TextStreamer(byte_words), TextStreamer(byte_words)]
    as_transformers(model, drafter=drafter, max_new_tokens=9, streamer=texts[0], ours={"streamer": texts[1]})
    printed = capsys.readouterr().out
    assert printed[: len(printed) // 2] == printed[len(printed) // 2 :] != ""


@pytest.mark.parametrize("stop_strings", [None, ["zz"]])
def test_a_streamed_token_does_not_copy_the_whole_text(stop_strings, model, byte_words, monkeypatch):
    """`[-0:]` is everything: without stop strings the prompt was copied into a tensor for every token."""
    made, tensor = list[int](), torch.tensor

    def counted(data, *args, **kwargs):
        out = tensor(data, *args, **kwargs)
        made.append(out.numel())
        return out

    ids = torch.randint(2, 90, (1, 400), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(torch, "tensor", counted)
    kwargs = {"max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0, "stop_strings": stop_strings}
    specdec.generate(model, None, ids, streamer=Recorder(), tokenizer=byte_words, **kwargs)
    assert max(made) < 400, "a tensor of the whole prompt was made for a token"
    assert sum(made) <= 30 * 8 + 400


@pytest.fixture(scope="module")
def byte_words():
    """96 tokens of byte-level BPE: letters, digits, words of them, three special ones."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789ABC", "Ġ", "Ã", "©"]
    tokenizer = byte_level(itertools.product("abcdefghijklmnopq", "xyz"), letters)
    tokenizer.add_special_tokens(["<|im_end|>", "<s>", "<pad>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")


@deep_cases("1", "3", "5")
@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed if seed < 6 else deep(seed) for seed in range(16)])
def test_stop_strings_end_where_transformers_ends(seed, model, byte_words):
    """Strings out of the true continuation: across tokens, begun in the prompt, special, and some that never come."""
    torch.manual_seed(seed)
    ids = torch.randint(0, 93, (1, 6))
    tail = model.generate(ids, max_new_tokens=12)[0]
    pieces = [byte_words.convert_tokens_to_string([byte_words.convert_ids_to_tokens(int(t))]) for t in tail]
    text, prompt_len = "".join(pieces), len("".join(pieces[:6]))
    start = int(torch.randint(max(0, prompt_len - 4), len(text) - 1, ()))
    stops = [text[start : start + int(torch.randint(1, 5, ()))], "<|im_end|>", "never"]
    kwargs = {"max_new_tokens": 12, "stop_strings": stops, "tokenizer": byte_words, "pad_token_id": 95}
    for drafter in ("ngram", None):
        as_transformers(model, ids, drafter, **kwargs)


def test_rows_stop_on_their_own(model, byte_words):
    """With an end token rows that stopped are padded, as in transformers."""
    ids, mask = padded(PROMPTS, "left", pad=95)
    free = model.generate(ids, attention_mask=mask, max_new_tokens=12, pad_token_id=95)
    stops = [byte_words.decode(free[0, 9:11]), byte_words.decode(free[2, 12:14])]
    kwargs = {"max_new_tokens": 12, "stop_strings": stops, "eos_token_id": 94, "pad_token_id": 95}
    want = model.generate(ids, attention_mask=mask, tokenizer=byte_words, **kwargs)
    assert (want == 95)[:, 7:].any()
    for config in (None, EngineConfig(max_batch_size=2, max_model_len=40)):
        got = specdec.generate(model, "ngram", ids, mask, tokenizer=byte_words, engine_config=config, **kwargs)
        assert got.tolist() == want.tolist()


# effects on the model and the process


@pytest.mark.parametrize("fails", [False, True])
def test_modes_and_settings_of_the_model_are_kept(fails, model, monkeypatch):
    model.train()
    model.model.layers[1].eval()
    modes, attention = [module.training for module in model.modules()], model.config._attn_implementation
    before = json.dumps(model.generation_config.to_dict(), sort_keys=True)
    kwargs = {"max_new_tokens": 3, "pad_token_id": 0}
    if fails:
        streamer = Recorder()
        monkeypatch.setattr(streamer, "put", lambda value: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            specdec.generate(model, "ngram", ONE, streamer=streamer, **kwargs)
        with pytest.raises(SpecDecError):
            specdec.generate(model, "no/such-drafter", ONE, **kwargs)
    else:
        specdec.generate(model, "ngram", ONE, **kwargs)
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == attention and not model.model.layers[0]._forward_pre_hooks
    assert json.dumps(model.generation_config.to_dict(), sort_keys=True) == before
