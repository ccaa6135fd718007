"""A user's mistake is one sentence with the value and what is allowed, raised before anything changes."""

import copy
import json
import pickle
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from refusal_checks import one_sentence
from samplers import sampler_of
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    DiffLlamaConfig,
    FalconConfig,
    Gemma3TextConfig,
    GenerationConfig,
    Llama4TextConfig,
    MambaConfig,
    MiniMaxConfig,
    ModernBertDecoderConfig,
    RecurrentGemmaConfig,
    XGLMConfig,
)

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig, SpecDecError
from specdec.config import OpenDepth
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.errors import CapacityError, CheckpointError, ConfigError, UnsupportedModelError
from specdec.models.target import TargetModel

NAN, INF = float("nan"), float("inf")
SMALL = EngineConfig(max_model_len=64)
SHORT = SamplingParams(max_new_tokens=3)
SMALL_PAGE = EngineConfig(full_slots=8, swa_slots=3, page_size=4)
HUGE = EngineConfig(full_slots=1 << 40, max_model_len=64)


@pytest.fixture
def engine(make_target, make_engine):
    return make_engine(make_target("llama"), max_batch_size=2)


def is_untouched(engine):
    engine.table.check()
    return engine.scheduler.idle and engine.table.allocator.primary.held_pages == 0 and engine.stats().rounds == 0


# prompts


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ([[]], ["prompt 0 is empty", "at least one token"]),
        ([[1, 2], []], ["prompt 1 is empty"]),
        ([96], ["96", "vocabulary of 96"]),
        ([[1], [3, -1]], ["prompt 1", "-1", "vocabulary of 96"]),
        ([1 << 70], [str(1 << 70), "96"]),
        ([1.5], ["1.5"]),
        ([[1, 2.0]], ["2.0", "integers"]),
        ([[True]], ["True", "integers"]),
        ([1, "a"], ["1"]),
        ([["a"]], ["'a'", "integers"]),
        ([None], ["None", "token ids are integers"]),
        (5, ["5", "list of token ids"]),
        (None, ["None", "list of token ids"]),
        (torch.zeros(30, 30), ["0.0", "integers"]),
        (torch.zeros(2, 30, 30, dtype=torch.int64), ["[0, 0, 0", "integers"]),
        (nn.Linear(2, 2), ["<Linear>", "list of token ids"]),
        ([[torch.zeros(30, 30)]], ["shape (30, 30)", "integers"]),
        ((x for x in [1]), ["gen", "list of token ids"]),
        ([[np.bool_(True)]], ["True", "integers"]),
        (SamplingParams(), ["<SamplingParams>"]),
        (torch.tensor(3), ["3"]),
        ([[torch.tensor(1.5)]], ["1.5", "integers"]),
        (b"abc", ["b'abc'"]),
        (torch.empty(3, dtype=torch.int64, device="meta"), ["shape (3,)", "meta device"]),
        ([{"role": "user", "content": "hi"}], ["'role': 'user'", "Engine.chat_prompt"]),
        ({"input_ids": [1]}, ["list of token ids"]),
        ("a0b1", ["tokenizer=", "token ids"]),
        (["a0b1"], ["tokenizer=", "token ids"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, (Iterator, nn.Module, torch.Tensor)) else None,
)
def test_prompts(prompt, parts, engine):
    with one_sentence(ConfigError, *parts):
        engine.generate(prompt, SHORT)
    assert is_untouched(engine)


@pytest.mark.parametrize("call", ["submit", "stream"])
@pytest.mark.parametrize("number", [3, np.int64(3), torch.tensor(3)], ids=str)
def test_a_number_is_no_prompt_of_one_token(call, number, engine):
    with one_sentence(ConfigError, "prompt=3", "a list of token ids is expected"):
        getattr(engine, call)(number, SHORT)


@pytest.mark.parametrize(
    ("params", "parts"),
    [
        ([SHORT] * 3, ["3 SamplingParams for 2 prompts"]),
        ([], ["0 SamplingParams for 2 prompts"]),
        ([{"max_new_tokens": 1}] * 2, ["max_new_tokens", "SamplingParams"]),
        ({"max_new_tokens": 1}, ["SamplingParams"]),
        ([None, None], ["None", "SamplingParams"]),
        (5, ["5", "SamplingParams"]),
        (GenerationConfig(max_new_tokens=1), ["<GenerationConfig>", "SamplingParams"]),
        ([SHORT, None], ["<SamplingParams>, None"]),
    ],
    ids=["many", "none", "dicts", "dict", "nones", "number", "of transformers", "one missing"],
)
def test_params(params, parts, engine):
    with one_sentence(ConfigError, *parts):
        engine.generate([[1, 2], [3]], params)
    assert is_untouched(engine)


@pytest.mark.parametrize(
    ("call", "given", "part"),
    [
        *(("encode", text, "string is expected") for text in (5, None, ["a", "b"])),
        ("encode", "a\ud800b", "half a surrogate pair at character 2"),
        *(("decode", ids, part) for ids, part in (("ab", "'ab'"), (5, "5"), (None, "None"), ([1, -100], "-100"))),
        *(("decode", ids, part) for ids, part in (([1.5], "1.5"), ([[1]], "[1]"))),
        ("generate", "\u00ff" * 3, "vocabulary of 96"),  # a tokenizer with more tokens than the model
    ],
    ids=ascii,
)
def test_prompts_that_are_neither_text_nor_ids_are_refused(call, given, part, make_target, make_engine, byte_tokenizer):
    engine = make_engine(make_target("llama"), tokenizer=byte_tokenizer)
    with one_sentence(ConfigError, part):
        getattr(engine, call)(given)


def test_stop_strings_need_a_tokenizer(engine):
    for ask in (engine.generate, engine.stream):
        with one_sentence(ConfigError, "tokenizer=", "stop_token_ids"):
            ask([1, 2], SamplingParams(stop="x"))
        assert is_untouched(engine)


# settings

NUMBERS = {
    "max_new_tokens": ([0, -1, True, "5", 1.0, None, NAN], "integer from 1"),
    "temperature": ([-0.1, NAN, INF, -INF, True, "1", None], "finite number from 0"),
    "top_k": ([-1, 1.5, True, "3", None], "integer from 0"),
    "top_p": ([0, 0.0, -1, 1.5, NAN, True, "x", None], "above 0 to 1"),
    "min_p": ([-0.1, 1.1, NAN, True, "x", None], "from 0 to 1"),
    "top_n_sigma": ([NAN, INF, -INF, 1e7, True, "1", None], "from -1e+06 to 1e+06"),
    "repetition_penalty": ([0, -1, NAN, INF, True, "1", None, 1e-300, 9e-7, 1.1e6, 1e300], "from 1e-06 to 1e+06"),
    "seed": ([-1, 1 << 63, True, "1", 1.0], "integer from 0"),
    "logprobs": ([-1, True, "1", 2000, 0.5], "integer from 0 to 1024"),
    "prompt_logprobs": ([-1, True, "1", 2000, 0.5], "integer from 0 to 1024"),
    "stop": (["", [""], ["a", ""], [1], 5, b"x", None], "non-empty string"),
    "stop_token_ids": (["1", 3, 3.0, [1.0], [True], [-1], ["1"], None], ""),
    "min_tokens": ([-1, True, "1", 0.5], "integer from 0"),
    "allowed_token_ids": ([[], [1.5], [True]], ""),
    "include_stop_str_in_output": ([1, 0, None], "True or False"),
    "ignore_eos": ([1, 0, "yes", None], "True or False"),
    "presence_penalty": ([-2.1, 2.1, NAN, INF, True, "1", None], "from -2 to 2"),
    "frequency_penalty": ([-2.1, 2.1, NAN, INF, True, "1", None], "from -2 to 2"),
    "logit_bias": ([5, "1", [3], [(3, 1.0)]], "mapping of token ids to numbers"),
    "json_schema": ([5, ["type"], True, "{", "type: object"], "JSON"),
    "json_object": ([1, 0, "yes", None], "True or False"),
    "regex": (["", 5, b"a"], "non-empty string"),
    "choice": ([[], [""], ["a", 5], "ab", 5], "non-empty strings"),
    "n": ([0, -1, True, "2", 1.5, None], "integer from 1"),
    "cache_salt": (["", 7, b"x"], "1 to 1024 characters is expected"),
    "speculation": ([True, 0, 4, "no"], "None (as the engine), False (none) or a SpecConfig"),
}


CONFIG = {
    "max_batch_size": ([0, -1, True, "8", 1.0, None], "integer from 1"),
    "page_size": ([0, True, 1 << 20, "1"], "integer from 1 to 1024"),
    "prefill_chunk": ([0, True, "x"], "integer from 1"),
    "max_prefill_tokens": ([0, True, "x"], "integer from 1"),
    "max_model_len": ([0, -5, True, "x"], "integer from 1"),
    "full_slots": ([0, -5, True, "x"], "integer from 1"),
    "swa_slots": ([0, -5, True, "x"], "integer from 1"),
    "max_capture_bytes": ([0, -1, 1.5, "1GB", True], "integer from 1"),
    "attention": (["flash", None, ""], "torch"),
    "cuda_graphs": ([True, "on", None], "'auto' or False"),
    "prefix_cache": (["auto", 1, None], "True or False"),
    "kv_dtype": (["int8"], "choose one of fp8"),
    "deterministic": ([1, "yes", None], "False"),
    "fused": (["on", None, 1, ""], "'auto', True or False"),
    "dtype": (["float33", "int8", "nn", torch.int8, 32], "torch.dtype"),
    "device": (["gpu", 7.5, ""], "device"),
}


VALUES = [
    (make, name, value, allowed)
    for make, table in ((SamplingParams, NUMBERS), (EngineConfig, CONFIG))
    for name, (values, allowed) in table.items()
    for value in values
]


@pytest.mark.parametrize(("make", "name", "value", "allowed"), VALUES)
def test_a_value_that_a_setting_cannot_have(make, name, value, allowed, make_target):
    inside = value[-1] if make is SamplingParams and isinstance(value, list) and value else value
    with one_sentence(ConfigError, name, repr(inside), allowed):
        made = make(**{name: value})
        Engine.from_pretrained(make_target("llama"), config=made)  # which looks for the device


TOGETHER = {
    # what is given, words of the refusal
    SamplingParams: [
        ({"logit_bias": {-1: 1.0}}, ["logit_bias=-1", "integer"]),
        ({"logit_bias": {"5": 1.0}}, ["logit_bias='5'", "integer"]),
        ({"logit_bias": {True: 1.0}}, ["logit_bias=True", "integer"]),
        ({"logit_bias": {5: 100.5}}, ["logit_bias of token 5=100.5", "from -100 to 100"]),
        ({"logit_bias": {5: NAN}}, ["logit_bias of token 5=nan", "from -100 to 100"]),
        ({"logit_bias": {5: "1"}}, ["logit_bias of token 5='1'"]),
        ({"regex": "a", "choice": ["b"]}, ["regex and choice are both set", "leave one out"]),
        ({"json_schema": {}, "json_object": True}, ["json_schema and json_object are both set"]),
        ({"json_schema": {"a": {1, 2}}}, ["json_schema", "not JSON", "set"]),
        ({"json_object": True, "ignore_eos": True}, ["ignore_eos=True with json_object", "leave one out"]),
        ({"max_tokens": 3}, ["SamplingParams has no setting max_tokens", "did you mean max_new_tokens?"]),
        ({"do_sample": 3}, ["SamplingParams has no setting do_sample", "it has max_new_tokens, temperature"]),
    ],
    SpecConfig: [
        ({"num_steps": 0}, ["num_steps=0", "1 to 511"]),
        ({"num_steps": 512}, ["num_steps=512", "1 to 511"]),
        ({"num_steps": True}, ["True", "integer"]),
        ({"num_steps": "4"}, ["'4'", "integer"]),
        ({"topk": 0}, ["topk=0", "integer"]),
        ({"topk": 64}, ["topk=64", "integer"]),
        ({"topk": 2, "num_steps": 1, "num_draft_tokens": 4}, ["num_draft_tokens=4", "topk=2", "at most 3 nodes"]),
        ({"num_draft_tokens": 1}, ["num_draft_tokens=1", "2 to 512"]),
        ({"num_draft_tokens": 513, "topk": 9}, ["num_draft_tokens=513", "2 to 512"]),
        ({"num_draft_tokens": 6}, ["num_draft_tokens=6", "4 steps", "5 nodes"]),
        ({"steps": 3}, ["SpecConfig has no setting steps", "did you mean num_steps?"]),
    ],
    EngineConfig: [
        (
            {"gpu_memory_utilization": 3},
            ["EngineConfig has no setting gpu_memory", "it has max_batch_size"],
        ),
        ({"dtype": "b16"}, ["bfloat16 (bf16), float16 (fp16), float32 (fp32)"]),
    ],
}


@pytest.mark.parametrize(
    ("make", "settings", "parts"), [(make, *row) for make, rows in TOGETHER.items() for row in rows], ids=str
)
def test_settings_that_do_not_go_together_or_do_not_exist(make, settings, parts):
    with one_sentence(ConfigError, *parts):
        make(**settings)


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1.0, 1e300])
def test_extreme_sampling_parameters_leave_numbers(penalty, temperature):
    """The extremes that are allowed, together: weights of a distribution and never NaN."""
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty, top_p=1e-30, seed=1)
    sampling = sampler_of([params], [1])
    logits = torch.tensor([[[-1e4, 0.0, 1e4, 30.0]]])
    penalised = sampling.penalised(logits, torch.tensor([[[True, True, True, False]]]))
    assert penalised.isfinite().all()
    weights = sampling.log_weights(penalised).exp()
    assert weights.isfinite().all() and weights.sum() > 0
    assert 0 <= sampling.sample(penalised, torch.tensor([[5]])).item() < 4


def boxed(value):
    """A number in every box that it comes in."""
    kind = {bool: np.bool_, int: np.int64, float: np.float32}[type(value)]
    return [kind(value), np.array(value), torch.tensor(value)]


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        *((SamplingParams, name, value) for name, value in {"top_k": 3, "seed": 7, "logprobs": 2}.items()),
        *((SamplingParams, name, value) for name, value in {"temperature": 0.5, "ignore_eos": True}.items()),
        *((SpecConfig, name, value) for name, value in {"num_steps": 3, "num_draft_tokens": 2}.items()),
        *((EngineConfig, name, value) for name, value in {"max_batch_size": 3, "deterministic": False}.items()),
    ],
)
def test_scalars_of_numpy_and_torch_become_numbers(make, name, value):
    for box in boxed(value):
        stored = getattr(make(**{name: box}), name)
        assert stored == value and type(stored) is type(value)


def test_stop_ids_of_numpy_and_torch_become_integers():
    for ids in (np.array([3, 4]), torch.tensor([3, 4]), [np.int32(3), torch.tensor(4)], (3, np.int8(4))):
        assert list(SamplingParams(stop_token_ids=ids).stop_token_ids) == [3, 4]
    assert type(SamplingParams(stop_token_ids=[np.int32(3)]).stop_token_ids[0]) is int


@pytest.mark.parametrize("settings", [SamplingParams(), SpecConfig(), OpenDepth(), EngineConfig()])
@pytest.mark.parametrize("name", ["max_tokens", "topk", "max_new_tokens"])
def test_settings_do_not_change_and_say_so(settings, name):
    for change in (lambda: setattr(settings, name, 3), lambda: delattr(settings, name)):
        with pytest.raises(FrozenInstanceError, match=f"{name} cannot be set: .* make another"):
            change()
    assert copy.deepcopy(settings) == pickle.loads(pickle.dumps(settings)) == replace(settings) == settings


def test_dtypes_by_name():
    for name in ("bfloat16", "bf16", "torch.bfloat16", torch.bfloat16):
        assert EngineConfig(dtype=name).dtype is torch.bfloat16
        assert replace(EngineConfig(dtype=name), max_batch_size=2).dtype is torch.bfloat16
    names = {"fp32": torch.float32, "fp16": torch.float16, "half": torch.float16, "fp64": torch.float64}
    assert {name: EngineConfig(dtype=name).dtype for name in names} == names and EngineConfig().dtype is None


@pytest.mark.parametrize(
    "value", [torch.zeros(300, 300), nn.Linear(2, 2), [torch.zeros(9)] * 9, np.float32], ids=["t", "m", "list", "class"]
)
def test_a_setting_is_never_printed_whole(value):
    for make, names in ((SamplingParams, NUMBERS), (EngineConfig, CONFIG), (SpecConfig, ["topk"])):
        for name in names:
            with one_sentence(ConfigError, name):
                make(**{name: value})


@pytest.mark.parametrize(
    ("call", "keyword", "meant"),
    [
        ("generate", "temperature", "params=SamplingParams(temperature=...)"),
        ("generate", "max_tokens", "params=SamplingParams(max_new_tokens=...)"),
        ("generate", "sampling_params", "params=..."),
        ("generate", "use_tqdm", "progress=..."),
        ("generate", "max_batch_size", "config=EngineConfig(max_batch_size=...)"),
        ("chat", "temperature", "params=SamplingParams(temperature=...)"),
        ("chat", "temprature", "params=SamplingParams(temperature=...)"),
        ("chat", "sampling_params", "params=..."),
        ("chat", "max_tokens", "params=SamplingParams(max_new_tokens=...)"),
        ("chat", "chat_template_kwargs", "**template_kwargs"),
        ("stream", "stop", "params=SamplingParams(stop=...)"),
        ("submit", "priorty", "priority=..."),
        ("submit_many", "n", "params=SamplingParams(n=...)"),
    ],
)
def test_a_keyword_that_a_call_does_not_take(call, keyword, meant, engine):
    """It was a TypeError, and of a chat a variable that no template has, in silence."""
    with one_sentence(ConfigError, f"Engine.{call} takes no {keyword}", f"did you mean {meant}?"):
        getattr(engine, call)([5, 6], **{keyword: 1})
    assert is_untouched(engine)


@pytest.mark.parametrize(
    ("keyword", "says"),
    [
        ("drafter_", "takes no drafter_; did you mean drafter=...?"),
        ("tokeniser", "takes no tokeniser; did you mean tokenizer=...?"),
        ("max_model_length", "takes no max_model_length; did you mean config=EngineConfig(max_model_len=...)?"),
        ("temperature", "did you mean params=SamplingParams(temperature=...)?"),
        ("num_speculative_tokens", "num_speculative_tokens is not a loading argument of transformers"),
    ],
)
def test_a_keyword_that_from_pretrained_does_not_take(keyword, says, make_target, tmp_path):
    make_target("llama").save_pretrained(tmp_path)
    with one_sentence(ConfigError, says):
        Engine.from_pretrained(str(tmp_path), config=SMALL, **{keyword: 1})


@pytest.mark.parametrize(("prompt", "new"), [(64, 1), (70, 1), (70, 16), (64, 40)])
def test_a_prompt_that_leaves_no_room_does_not_speak_of_new_tokens(prompt, new, make_target, make_engine):
    """A server asked for one token where its client had named none, and said so; and "raise it" where none can."""
    model = make_target("llama", max_position_embeddings=64)
    engine = make_engine(model, max_model_len=64)
    with one_sentence(
        CapacityError, f"a prompt of {prompt} tokens leaves no room", f"shorten the prompt by {prompt - 63}"
    ) as error:
        engine.generate([[5] * prompt], SamplingParams(max_new_tokens=new))
    assert "max_new_tokens" not in str(error.value) and "larger" not in str(error.value)
    with one_sentence(CapacityError, "or make the engine with a larger max_model_len (at most 64)") as error:
        make_engine(model, max_model_len=32).generate([[5] * prompt], SamplingParams(max_new_tokens=new))


# names


class Model(NamedTuple):
    """A tiny model of a family, in the place of a name. headless: its decoder. empty: without weights."""

    family: str
    headless: bool = False
    empty: bool = False


BFLOAT16 = EngineConfig(dtype=torch.bfloat16)
LLAMA, NO_WEIGHTS, NO_HEAD = Model("llama"), Model("llama", empty=True), Model("qwen3", headless=True)
FLOAT32, DISAGREE = EngineConfig(dtype=torch.float32), ["bfloat16", "float32", "leave one out"]
CALLS = [
    # target, drafter, further arguments; the error, words of the refusal
    ("no-such-model", None, {}, CheckpointError, ["'no-such-model'", "tiny-gemma4"]),
    ("no/such-model", None, {}, CheckpointError, ["'no/such-model'", "tiny-gemma4"]),
    ("./no-such-folder", None, {}, CheckpointError, ["'./no-such-folder'", "not a folder"]),
    ("a/b/c", None, {}, CheckpointError, ["'a/b/c'", "not a folder"]),
    (5, None, {}, ConfigError, ["5", "transformers model"]),
    (torch.zeros(3, 4), None, {}, ConfigError, ["<Tensor of shape (3, 4)>"]),
    (None, None, {}, ConfigError, ["None", "transformers model"]),
    (b"x", None, {}, ConfigError, ["b'x'", "transformers model"]),
    (LLAMA, "ngrm", {}, SpecDecError, ["'ngrm'", "tiny-gemma4-mtp", "ngram"]),
    (LLAMA, "no/such-drafter", {}, SpecDecError, ["'no/such-drafter'", "tiny-gemma4-mtp", "ngram"]),
    (LLAMA, 5, {}, ConfigError, ["5", "ngram"]),
    (LLAMA, nn.Linear(2, 2), {}, UnsupportedModelError, ["Linear", "gemma4_assistant", "ngram"]),
    (LLAMA, NO_HEAD, {}, UnsupportedModelError, ["Qwen3Model", "gemma4_assistant", "ngram"]),
    (LLAMA, None, {"config": BFLOAT16}, ConfigError, ["bfloat16", "float32"]),
    (NO_HEAD, None, {}, UnsupportedModelError, ["Qwen3Model", "no language-model head"]),
    (NO_WEIGHTS, None, {}, UnsupportedModelError, ["LlamaForCausalLM", "is on the meta device, without weights"]),
    (LLAMA, None, {"tokenizer": "no-such-tokenizer"}, SpecDecError, ["'no-such-tokenizer'"]),
    *(
        (name, None, {}, CheckpointError, [f"{name!r} names no checkpoint"])
        for name in ("None", "none", "null", "", " ", "nan")
    ),
    ("tiny-gemma4", "None", {}, CheckpointError, ["'None' names no checkpoint", "for no drafter, pass None"]),
    # settings in the wrong place, of the wrong type, or that the machine cannot have
    (LLAMA, None, {"max_model_len": 3}, ConfigError, ["config=EngineConfig(max_model_len=...)"]),
    ("tiny-gemma4", None, {"num_steps": 3}, ConfigError, ["spec=SpecConfig(num_steps=...)"]),
    (LLAMA, None, {"spec": {"num_steps": 3}}, ConfigError, ["spec", "num_steps"]),
    (LLAMA, None, {"config": {"num_steps": 3}}, ConfigError, ["config", "num_steps"]),
    (LLAMA, None, {"config": HUGE}, CapacityError, [str(1 << 40), "GB", "lower full_slots"]),
    (Model("mistral"), None, {"config": SMALL_PAGE}, SpecDecError, ["swa_slots=3", "page size 4", "give"]),
    ("tiny-gemma4", None, {"dtype": "float32", "torch_dtype": "bfloat16"}, ConfigError, DISAGREE),
    ("tiny-gemma4", None, {"config": FLOAT32, "torch_dtype": torch.bfloat16}, ConfigError, DISAGREE),
    ("tiny-gemma4", None, {"config": EngineConfig(device="fpga")}, ConfigError, ["device='fpga' cannot be used"]),
]


@pytest.mark.usefixtures("shallow_pair", "bundled_once")
@pytest.mark.parametrize(("target", "drafter", "arguments", "error", "parts"), CALLS, ids=str)
def test_unusable_targets_and_drafters_are_refused(target, drafter, arguments, error, parts, make_target):
    def made(given):
        if not isinstance(given, Model):
            return given
        model = make_target(given.family, fresh=True).to("meta") if given.empty else make_target(given.family)
        return model.model if given.headless else model

    with one_sentence(error, *parts):
        Engine.from_pretrained(made(target), made(drafter), **arguments)


def test_an_engine_is_made_of_what_is_bound(make_target):
    model = make_target("llama")
    bound = TargetModel(model)
    for arguments, part in [
        (("tiny-gemma4",), "target is 'tiny-gemma4'"),
        ((model,), "target is <LlamaForCausalLM>"),
        ((bound, "ngram"), "drafter is 'ngram'"),
        ((bound, model), "drafter is <LlamaForCausalLM>"),
    ]:
        with one_sentence(ConfigError, part, "Engine.from_pretrained"):
            Engine(*arguments)
    with one_sentence(ConfigError, "tokenizer is 'tiny-gemma4'", "Engine.from_pretrained"):
        Engine(bound, tokenizer="tiny-gemma4")
    with one_sentence(ConfigError, "spec is", "SpecConfig"):
        Engine(bound, spec={"num_steps": 2})
    with one_sentence(ConfigError, "Engine takes no drafter_; did you mean drafter=...?"):
        Engine(bound, drafter_=None)


@pytest.mark.parametrize("changes", [{"hidden_size": 48}, {"vocab_size": 120}], ids=str)
def test_a_drafter_fitted_to_another_target(changes, make_target, make_assistant):
    one = TargetModel(make_target("gemma4-31b"))
    fitted = Gemma4MTPDrafter(make_assistant(one.model), one)
    for make in (Engine.from_pretrained, lambda model, drafter: Engine(TargetModel(model), drafter)):
        with one_sentence(UnsupportedModelError, "gemma4_mtp was fitted to a target of other layers, sizes"):
            make(make_target("gemma4-31b", **changes), fitted)


def test_an_engine_is_not_copied(engine):
    for twin in (copy.copy, copy.deepcopy, pickle.dumps):
        with one_sentence(SpecDecError, "make another"):
            twin(engine)


@pytest.mark.parametrize(
    ("family", "changes", "values"),
    [
        ("gemma4-31b", {"backbone_hidden_size": 40}, ["hidden size 40", "32"]),
        ("gemma4-31b", {"vocab_size": 120}, ["120 tokens", "96"]),
        ("llama", {}, ["layer 0 is sliding_attention", "['full_attention']"]),
    ],
    ids=["hidden", "vocab", "layer-types"],
)
def test_a_drafter_for_another_target(family, changes, values, make_target, make_assistant, tmp_path):
    """Given as a module and as a folder; the assistant itself is fit for the 31b target."""
    assistant = make_assistant(make_target("gemma4-31b"), **changes)
    assistant.save_pretrained(tmp_path)
    for drafter in (assistant, str(tmp_path)):
        with one_sentence(UnsupportedModelError, *values):
            Engine.from_pretrained(make_target(family), drafter, config=SMALL)


# checkpoints


@pytest.fixture
def checkpoint(make_target, tmp_path):
    make_target("llama").save_pretrained(tmp_path)
    return tmp_path


def config(text):
    return lambda folder: (folder / "config.json").write_text(text)


def with_three_layers(folder):
    described = json.loads((folder / "config.json").read_text())
    config(json.dumps(described | {"num_hidden_layers": 3}))(folder)


SPOILED = {
    # how a whole checkpoint is spoiled, words of the refusal
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "no JSON": (config("{nope"), []),
    "no type": (config("{}"), []),
    "an unknown type": (config('{"model_type": "no-such-type"}'), []),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["model.safetensors"]),
    "a layer too many": (with_three_layers, ["9 tensors", "model.layers.2."]),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_damaged_checkpoint_is_refused_and_not_repaired(how, checkpoint):
    spoil, parts = SPOILED[how]
    spoil(checkpoint)
    with one_sentence(CheckpointError, str(checkpoint), *parts) as error:
        Engine.from_pretrained(str(checkpoint), config=SMALL)
    assert isinstance(error.value, OSError) and "not a folder" not in str(error.value)


def test_an_encoder_is_no_drafter(checkpoint, make_target):
    described = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(described | {"architectures": ["LlamaModel"]}))
    with one_sentence(UnsupportedModelError, str(checkpoint), "'llama'", "gemma4_assistant"):
        Engine.from_pretrained(make_target("llama"), str(checkpoint))


# architectures

BASE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
OLD = {"vocab_size": 96, "hidden_size": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
UNSUPPORTED = {
    "alibi-bloom": (lambda: BloomConfig(**OLD, n_layer=2, n_head=4), "Bloom"),
    "bert": (lambda: BertConfig(**{**BASE, "is_decoder": True}), "Bert"),
    "modernbert": (  # its attribute `decoder` is its head
        lambda: ModernBertDecoderConfig(**BASE | dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id"), 1)),
        "the Linear that ModernBertDecoderForCausalLM.get_decoder() gives is not a stack of 2 decoder layers",
    ),
    "mamba": (lambda: MambaConfig(**OLD, num_hidden_layers=2, state_size=4), "MambaMixer"),
    "minimax": (lambda: MiniMaxConfig(**BASE, head_dim=8, num_local_experts=2), "linear_attention"),
    "recurrent-gemma": (
        lambda: RecurrentGemmaConfig(**{**BASE, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8}),
        "ecurrent",  # RecurrentGemma by its modules, or recurrent_gemma by layer types that newer configs have
    ),
    "two-attentions-a-layer": (lambda: DiffLlamaConfig(**BASE), "DiffLlama"),
    "chunked-llama4": (
        lambda: Llama4TextConfig(**BASE, head_dim=8, intermediate_size_mlp=48, num_local_experts=2),
        "attention_chunk_size=8192",
    ),
    "bidirectional-gemma3": (
        lambda: Gemma3TextConfig(**BASE, head_dim=8, sliding_window=8, use_bidirectional_attention=True),
        "use_bidirectional_attention=True",
    ),
    "own-attention-xglm": (lambda: XGLMConfig(**OLD, d_model=32, num_layers=2, attention_heads=4, ffn_dim=48), "XGLM"),
    "alibi-falcon": (lambda: FalconConfig(**BASE, alibi=True), "ALiBi biases (alibi=True)"),
}


@pytest.mark.parametrize(("attribute", "value"), [("alibi", True), ("attention_chunk_size", 1)])
def test_a_config_that_asks_for_other_attention_is_refused_by_name(attribute, value, make_target):
    """`True` equals 1, which passed."""
    model = make_target("llama", fresh=True)
    setattr(model.config, attribute, value)
    with one_sentence(UnsupportedModelError, f"({attribute}={value})"):
        Engine.from_pretrained(model, config=SMALL)
    setattr(model.config, attribute, False)
    Engine.from_pretrained(model, config=SMALL)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_architectures_are_refused_at_construction(name):
    make, part = UNSUPPORTED[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make()).eval()
    with one_sentence(UnsupportedModelError, part) as error:
        Engine.from_pretrained(model, config=SMALL)
    assert "set_attn_implementation" not in str(error.value)  # that would not help
