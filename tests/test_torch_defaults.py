"""The default dtype and device of torch, which a program may set for its own tensors, change nothing in an engine."""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_layout import named_nodes, product_sources

from specdec import SamplingParams, SpecConfig

INTS = {"arange", "full", "randint", "randperm", "tensor"}
FLOATS = {"linspace", "ones", "rand", "randn", "zeros"}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("llama", {"kv_dtype": "fp8"}),  # scales had the default dtype
        ("gemma4-moe", {"fused": True}),  # outputs of experts were rounded to it
        ("qwen3_5", {}),
    ],
)
@pytest.mark.parametrize(
    "default", [lambda: default_dtype(torch.bfloat16), lambda: torch.device("meta")], ids=["dtype", "device"]
)
def test_defaults_of_torch_around_an_engine_change_nothing(
    default: Callable[[], Any], family, setting, make_target, make_engine, random_prompt
) -> None:
    model = make_target(family, fresh=True)
    params = SamplingParams(max_new_tokens=20, temperature=0.8, seed=1, logprobs=2)
    prompts = [random_prompt(3), random_prompt(25)]

    def answers() -> list[Any]:
        engine = make_engine(model, "suffix", spec=SpecConfig(2), **setting)
        return [(out.token_ids, out.logprobs) for out in engine.generate(prompts, params)]

    wanted = answers()
    with default():
        assert answers() == wanted


def test_every_tensor_is_made_on_a_named_device_and_floats_in_a_named_dtype() -> None:
    """The host's copy of a round, made where `torch.set_default_device` says, could not be pinned."""
    silent = []
    for module, text in product_sources().items():
        for call in (node for node in named_nodes(text) if isinstance(node, ast.Call)):
            room, _, maker = ast.unparse(call.func).rpartition(".")
            named = {word.arg for word in call.keywords}
            needed = {"device"} if maker in INTS else {"device", "dtype"} if maker in FLOATS else set()
            if room == "torch" and not needed <= named and None not in named:
                silent.append(f"{module}:{call.lineno}: {ast.unparse(call)}")
    assert silent == []
