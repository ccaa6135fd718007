"""Checkpoints onto several devices: a device gets its share and nothing else, and the bits are those of one device.

On a CPU the ranks are one device; tensors put on a rank are copied there and counted.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_checkpoints import FORMS, quantise
from split_engines import DETERMINISTIC, TREE, WIDE, answers

import specdec.engine
from specdec import Engine, EngineConfig, SamplingParams
from specdec.errors import ConfigError, UnsupportedModelError
from specdec.gpu.operations import REFERENCE
from specdec.gpu.ranks import Ranks
from specdec.layers.description.merge import is_merged
from specdec.layers.packed.packed_weight import PackedWeight
from specdec.layers.split.split_decoder import SplitDecoder, SplitHead
from specdec.measurement.transformers_peer import assisted_peer
from specdec.models.target import TargetModel

from marks import deep, deep_cases, is_deep
from tiny_families import FULL, build_target, random_eagle3, spread

NARROW: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 640, "num_attention_heads": 8, "head_dim": 16}
NARROW |= {"num_key_value_heads": 4, "num_hidden_layers": 2}  # one range of K, and three
LATENTS = {"num_key_value_heads": 8, "head_dim": 8, "qk_rope_head_dim": 8, "q_lora_rank": 32, "kv_lora_rank": 32}
RECURRENT = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
RECURRENT |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", FULL]}
GEMMA = {"num_global_key_value_heads": 4, "global_head_dim": 128}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ranges": ("llama", WIDE),
    "latents": ("deepseek_v3", {**NARROW, **LATENTS, "q_lora_rank": None, "n_routed_experts": 8}),
    "rows": ("llama", NARROW),
    "rows, biases": ("qwen2", NARROW),
    "merged, tied": ("phi3", {**NARROW, "tie_word_embeddings": True}),
    "per-layer embeddings": ("gemma4-e2b", {**WIDE, **GEMMA}),
    "recurrent": ("qwen3_next", {**NARROW, **RECURRENT, "num_experts": 4}),
    "experts": ("gpt_oss", {**NARROW, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48}),
}
if not is_deep():
    CASES["experts"][1].update(num_hidden_layers=1, layer_types=[FULL])
QUICK_FORMS = [("mistral", "fp8-block"), ("gpt_oss", "mxfp4"), ("qwen3_5", "int4-g32"), ("deepseek_v3", "fp8-block")]
DEEP_FORMS = [
    *(("llama", "int4-g32"), ("deepseek_v3", "int4-g32"), ("glm4_moe_lite", "awq"), ("qwen2", "awq")),
    *(("qwen3", "gptq-zeros"), ("llama", "fp8-channel"), ("qwen3_moe", "gptq-v2"), ("llama", "int4-zeros")),
    ("qwen3_next", "fp8-block"),
]


class Counted(Ranks):
    """What is put on a rank is a copy, which is counted while it lives."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices)
        self.live: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()
        self.largest: Counter[int] = Counter()
        self.seen: set[tuple[torch.Size, int]] = set()

    def put(self, rank: int, pieces: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        copy = super().put(rank, pieces, dim).detach().clone()
        self.seen.add(mark_of(copy))
        self.live[rank] += copy.nbytes
        self.peak[rank] = max(self.peak[rank], self.live[rank])
        self.largest[rank] = max(self.largest[rank], copy.nbytes)
        weakref.finalize(copy, self.live.subtract, {rank: copy.nbytes})
        return copy


def mark_of(tensor: torch.Tensor) -> tuple[torch.Size, int]:
    """Equal for equal tensors, and hardly for others."""
    return tensor.shape, hash(tensor.detach().contiguous().numpy().tobytes())


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    """The ranks of engines from now on."""
    made: list[Counted] = []

    def make(device: torch.device, count: int) -> Counted:
        made.append(Counted([device] * count))
        return made[-1]

    monkeypatch.setattr(specdec.engine, "make_ranks", make)
    return made


def saved(family: str, fields: dict[str, Any], folder: Path) -> Path:
    torch.manual_seed(0)
    spread(build_target(family, **fields)).save_pretrained(folder)
    return folder


def loaded(folder: Any, count: int, drafter: Any = None, **config: Any) -> Engine:
    settings = EngineConfig(tensor_parallel=count, device="cpu", **{**DETERMINISTIC, **config})
    return Engine.from_pretrained(folder, drafter, spec=TREE, config=settings)


@pytest.fixture
def asked(three_prompts: list[list[int]]) -> list[list[int]]:
    """Two prompts, one of a single token; all three with `make test-deep`."""
    return three_prompts if is_deep() else [three_prompts[0][:12], three_prompts[2]]


@deep_cases("2-ranges", "2-rows", "4-ranges", "4-rows")
@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [2, deep(4)])
def test_a_checkpoint_on_ranks_has_the_bits_of_one_device(
    case: str, count: int, tmp_path: Path, asked: list[list[int]]
):
    folder = saved(*CASES[case], tmp_path)
    alone = answers(loaded(folder, 1, max_batch_size=1), asked)
    engine = loaded(folder, count, "ngram", prefill_chunk=8)
    assert isinstance(engine.target.decoder, SplitDecoder) and isinstance(engine.target.head, SplitHead)
    assert answers(engine, asked) == alone


@pytest.mark.parametrize(("family", "form"), [*QUICK_FORMS, *(deep(*case) for case in DEEP_FORMS)])
def test_packed_weights_on_ranks_have_the_bits_of_one_device(
    family: str, form: str, tmp_path: Path, asked: list[list[int]]
):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": 2}
    if family == "gpt_oss":
        sizes |= {"num_hidden_layers": 1, "layer_types": [FULL]}
    if "qwen3_" in family:
        sizes |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    if family in ("qwen3_5", "qwen3_next"):
        sizes |= RECURRENT
    if family in ("deepseek_v3", "glm4_moe_lite"):
        sizes |= {**LATENTS, "moe_intermediate_size": 32, "num_hidden_layers": 1, "mlp_layer_types": ["sparse"]}
    folder, _ = quantise(saved(family, sizes, tmp_path / "given"), FORMS[form], tmp_path)
    alone = answers(loaded(folder, 1, max_batch_size=1), asked)
    engine = loaded(folder, 2, "ngram")
    weights = [share.layers[0].qkv for share in engine.target.decoder.parts]
    assert all(isinstance(weight, PackedWeight) for weight in weights) or family == "gpt_oss"
    assert answers(engine, asked) == alone


@pytest.mark.parametrize(
    "case", [case if case in ("rows", "merged, tied", "experts") else deep(case) for case in CASES]
)
def test_a_device_never_holds_more_than_its_share_and_one_tensor(case: str, tmp_path: Path, counted: list[Counted]):
    folder = saved(*CASES[case], tmp_path)
    engine = loaded(folder, 2)
    [ranks] = counted
    model: Any = engine.target.model
    products = [p for name, p in model.named_parameters() if "_proj" in name and "layer_" not in name and p.ndim > 1]
    assert len(products) >= 4
    whole = {mark_of(p.transpose(1, 2) if case == "experts" and p.ndim == 3 else p) for p in products}
    assert not whole & ranks.seen, "a weight that ranks share was put on one of them as a whole"
    for rank in range(2):
        assert ranks.peak[rank] <= ranks.live[rank] + ranks.largest[rank]
    shared = sum(p.nbytes for name, p in model.named_parameters() if ".layers." in name)
    assert ranks.live[1] <= 0.6 * shared, "half of the layers, and what is narrow"
    assert engine.target.home.type == "cpu"


def test_a_checkpoint_stays_mapped_and_nothing_is_merged_in_host_memory(tmp_path: Path):
    folder = saved("llama", WIDE, tmp_path)
    engine = loaded(folder, 2)
    model: Any = engine.target.model
    mlp = model.model.layers[0].mlp
    assert not is_merged([mlp.gate_proj.weight, mlp.up_proj.weight])
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in mapped]
    for param in model.parameters():
        assert any(first <= param.data_ptr() < last for first, last in spans)


def test_a_drafter_may_share_a_head_that_ranks_share(tmp_path: Path, asked: list[list[int]]):
    folder = saved("llama", WIDE, tmp_path)
    alone = answers(loaded(folder, 1, max_batch_size=1), asked)
    with loaded(folder, 2) as engine:
        target, head = engine.target, random_eagle3(engine.target.model)
    again = Engine(target, head, spec=TREE, config=engine.config)
    assert again.target is target
    assert answers(again, asked) == alone


def test_a_shared_target_is_for_as_many_devices(tmp_path: Path):
    with loaded(saved("llama", WIDE, tmp_path), 2) as engine:
        target = engine.target
    with pytest.raises(ConfigError, match="tensor_parallel=1, but the target is shared by 2 devices already"):
        Engine(target, config=EngineConfig(deterministic=True))


@pytest.mark.parametrize("read", [True, False], ids=["read", "in memory"])
def test_weights_that_change_after_they_were_split_are_refused(read: bool, tmp_path: Path):
    with loaded(saved("llama", WIDE, tmp_path) if read else build_target("llama", **WIDE), 2) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))
        model: Any = engine.target.model
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(2)
        with pytest.raises(UnsupportedModelError, match="weights, modules or hooks of "):
            engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))


def test_an_engine_on_one_device_may_merge_weights_that_others_have_split():
    """It moves them in memory, and they keep their values. A later change is refused as before."""
    model, params = build_target("llama", **NARROW), SamplingParams(max_new_tokens=2)
    with loaded(model, 2) as split, loaded(model, 1) as whole:
        mlp: Any = model.model.layers[0].mlp
        assert is_merged([mlp.gate_proj.weight, mlp.up_proj.weight])
        [expected], [found] = (engine.generate([[1, 2, 3]], params) for engine in (whole, split))
        assert found.token_ids == expected.token_ids
        mlp.gate_proj.weight.data = torch.zeros_like(mlp.gate_proj.weight)
        whole.generate([[1, 2, 3]], params)  # merges them again
        with pytest.raises(UnsupportedModelError, match="changed after they were split"):
            split.generate([[1, 2, 3]], params)


@pytest.mark.usefixtures("shallow_pair", "bundled_once")
def test_transformers_assists_no_target_in_host_memory():
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp") as engine:
        assert len(assisted_peer(engine, SamplingParams(), 2)) == 1
        engine.target.home = torch.device("meta")
        assert assisted_peer(engine, SamplingParams(), 2) == {}


def test_room_for_exchanges_that_is_enough_is_kept(monkeypatch):
    """Captured rounds of another engine hold its address."""
    ranks, target = Ranks([torch.device("cpu")] * 2), TargetModel(spread(build_target("llama", **NARROW)), REFERENCE)
    target.on_ranks(ranks)
    monkeypatch.setattr(ranks, "reserve", lambda numbers: pytest.fail("reserved again"))
    assert target.on_ranks(ranks).ranks is ranks


def test_a_head_that_does_not_divide_shares_the_embedding_that_it_is_tied_to():
    sizes = {**NARROW, "tie_word_embeddings": True, "vocab_size": 97}
    target = TargetModel(spread(build_target("llama", **sizes)), REFERENCE)
    target = target.on_ranks(Counted([torch.device("cpu")] * 2))
    assert target.head.weight.data_ptr() == target.decoder.get_input_embeddings().weight.data_ptr()
