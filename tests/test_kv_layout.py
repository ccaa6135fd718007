"""Layouts read from Hugging Face configs: who owns K/V, of what shape, kept for how long; and what is refused."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from kv_rig import KEEP_ALL, KVLayout, Retention, layout_from_config

from specdec.errors import UnsupportedModelError

SLIDING, FULL = "sliding_attention", "full_attention"
SMALL = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 32, "num_attention_heads": 4, "bos_token_id": 0}
SMALL |= {"eos_token_id": 1, "pad_token_id": 2}
GQA = SMALL | {"num_key_value_heads": 2}


def rows(layout: KVLayout) -> list[tuple[int, int, int, int | None]]:
    """(owner, kv heads, head size, window) per layer; a spec's own number is its place."""
    assert [spec.layer for spec in layout.layers] == list(range(len(layout.layers)))
    assert all(spec.v[1:3] == spec.k[1:3] for spec in layout.layers)
    return [(s.owner, s.k.heads, s.k.dim, s.window) for s in layout.layers]


GEMMA4_E = transformers.Gemma4TextConfig(
    **GQA, num_hidden_layers=8, layer_types=[SLIDING, SLIDING, SLIDING, FULL] * 2, head_dim=16, global_head_dim=32,
    num_kv_shared_layers=3, sliding_window=8, hidden_size_per_layer_input=4, vocab_size_per_layer_input=32,
)  # fmt: skip
GEMMA4_31B = transformers.Gemma4TextConfig(
    **SMALL, num_hidden_layers=6, num_key_value_heads=4, head_dim=16, global_head_dim=32,
    num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=8, hidden_size_per_layer_input=0,
)  # fmt: skip


def test_gemma4_e_shares_kv_and_has_two_head_sizes():
    layout = layout_from_config(GEMMA4_E)
    sliding, full = (2, 16, 8), (2, 32, None)
    owned = [(0, *sliding), (1, *sliding), (2, *sliding), (3, *full), (4, *sliding)]
    assert rows(layout) == [*owned, (4, *sliding), (4, *sliding), (3, *full)]  # the last that are not shared
    assert layout.max_window == 8
    assert [spec.layer for spec in layout.owners] == [0, 1, 2, 3, 4]
    assert [layout.last_owner(kind).layer for kind in (SLIDING, FULL)] == [4, 3]
    assert layout.last_owner("linear_attention") is None
    assert layout.slot_bytes(Retention(8), torch.float16) == 2 * 4 * 2 * 2 * 16  # layers, K and V, heads, size
    assert layout.slot_bytes(KEEP_ALL, torch.float16) == 2 * 1 * 2 * 2 * 32


def test_gemma4_31b_has_its_own_kv_heads_on_full_layers():
    layout = layout_from_config(GEMMA4_31B)
    assert rows(layout) == [(i, 4, 16, 8) for i in range(5)] + [(5, 1, 32, None)]
    assert [layout.last_owner(kind).layer for kind in (SLIDING, FULL)] == [4, 5]
    assert layout.slot_bytes(KEEP_ALL, torch.float16) == 2 * 2 * 32  # K and V share weights, not rows: both are stored
    assert layout.slot_bytes(Retention(8), torch.float16) == 2 * 5 * 2 * 4 * 16


OTHERS: dict[str, tuple[transformers.PreTrainedConfig, list[tuple[int, int, int, int | None]]]] = {
    "llama": (transformers.LlamaConfig(**GQA, num_hidden_layers=2), [(i, 2, 16, None) for i in range(2)]),
    "llama-mha": (transformers.LlamaConfig(**SMALL, num_hidden_layers=1), [(0, 4, 16, None)]),
    "qwen3": (transformers.Qwen3Config(**GQA, num_hidden_layers=1, head_dim=32), [(0, 2, 32, None)]),
    "qwen3-window-off": (
        transformers.Qwen3Config(**GQA, num_hidden_layers=1, sliding_window=8),
        [(0, 2, 128, None)],
    ),
    "qwen3-window-on": (
        transformers.Qwen3Config(
            **GQA, num_hidden_layers=2, use_sliding_window=True, sliding_window=8, max_window_layers=1
        ),
        [(0, 2, 128, None), (1, 2, 128, 8)],
    ),
    "mistral-no-window": (
        transformers.MistralConfig(**GQA, num_hidden_layers=1, sliding_window=None),
        [(0, 2, 16, None)],
    ),
    "gemma3": (
        transformers.Gemma3TextConfig(**GQA, num_hidden_layers=7, head_dim=16, sliding_window=8),
        [(i, 2, 16, None if i == 5 else 8) for i in range(7)],
    ),
    "gpt-oss": (
        transformers.GptOssConfig(**GQA, num_hidden_layers=3, head_dim=16, sliding_window=8),
        [(0, 2, 16, 8), (1, 2, 16, None), (2, 2, 16, 8)],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name: str):
    config, expected = OTHERS[name]
    assert rows(layout_from_config(config)) == expected


def test_a_window_without_layer_types_is_on_every_layer():
    config = transformers.MistralConfig(**GQA, num_hidden_layers=2, sliding_window=8)
    assert getattr(config, "layer_types", None) is None
    layout = layout_from_config(config)
    assert rows(layout) == [(0, 2, 16, 8), (1, 2, 16, 8)]
    assert layout.slot_bytes(KEEP_ALL, torch.float16) == 0


def plain(**changes: object) -> SimpleNamespace:
    base = {"model_type": "made_up", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    return SimpleNamespace(**(base | changes))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            transformers.Gemma4TextConfig(**GQA, num_hidden_layers=2, use_bidirectional_attention="all"),
            r"gemma4_text: use_bidirectional_attention='all' makes text attention non-causal",
        ),
        (plain(use_bidirectional_attention=True), "use_bidirectional_attention=True"),
        (
            plain(layer_types=["hyperbolic", "full_attention"]),
            r"made_up: layer types \['hyperbolic'\] have no paged KV cache here; "
            "supported: full_attention, sliding_attention, conv, linear_attention",
        ),
        (transformers.Llama4TextConfig(**GQA, num_hidden_layers=4), r"llama4_text: .*'chunked_attention'"),
        (
            transformers.Gemma4TextConfig(
                **GQA, num_hidden_layers=4, layer_types=[FULL, FULL, SLIDING, FULL], num_kv_shared_layers=2
            ),
            r"kv-shared layer 2 \(sliding_attention\) has no earlier layer of its type to read from; "
            r"the 2 layers before the shared ones are \['full_attention'\]",
        ),
        (plain(num_kv_shared_layers=4), r"kv-shared layer 0 \(full_attention\) has no earlier layer"),
        (plain(layer_types=[SLIDING] * 4), "sliding layers need a positive sliding_window, got None"),
        (plain(layer_types=[SLIDING] * 4, sliding_window=0), "sliding layers need a positive sliding_window, got 0"),
    ],
    ids=["all", "true", "unknown", "chunked", "no-source", "all-shared", "no-window", "window-0"],
)
def test_unsupported_configs_are_refused(config: transformers.PreTrainedConfig, message: str):
    with pytest.raises(UnsupportedModelError, match=message):
        layout_from_config(config)


def test_bidirectional_vision_is_causal_text():
    config = transformers.Gemma4TextConfig(**GQA, num_hidden_layers=2, use_bidirectional_attention="vision")
    assert [row[-1] for row in rows(layout_from_config(config))] == [config.sliding_window, None]


def test_multimodal_config_is_read_through_its_text_part():
    whole = transformers.Gemma3Config(text_config=GQA | {"num_hidden_layers": 1, "head_dim": 16, "sliding_window": 8})
    assert rows(layout_from_config(whole.get_text_config())) == [(0, 2, 16, 8)]
