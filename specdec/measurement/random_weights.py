"""Random weights for a shape, made on the device that uses them: there is no checkpoint, and no copy on the CPU.

Their scales keep activations near 1 through all layers: products keep the variance, and norms and attention scores are
about 1. As in trained models, an embedding outweighs what all layers add to it. So if rounding makes one router choose
another expert, the routers of later layers still choose the same ones.

Packed weights replace the layers of a model on `meta`, so that the unpacked model is never in memory. Weights that
published checkpoints leave in 16 bits stay in 16 bits; in MXFP4 only experts are packed, as in GPT-OSS.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import floor, gcd, log2
from time import perf_counter
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.config import EngineConfig, SpecConfig
from specdec.draft_models.base import Drafter, TargetInfo
from specdec.draft_models.block.block_drafter import BlockDrafter
from specdec.draft_models.block.block_head import BlockHead, BlockSpec
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.eagle3.head import Eagle3Head, Eagle3Spec
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter, constructible_assistants
from specdec.draft_models.heads.head_modules import HeadSpec
from specdec.draft_models.native_mtp.mtp_checkpoint import family_of
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpDrafter
from specdec.draft_models.native_mtp.mtp_module import MtpModule, empty_layer, nearest_mlp, read_parts
from specdec.errors import CapacityError, ConfigError, require_one_of
from specdec.gpu.memory import free_bytes
from specdec.gpu.operations import choose_operations
from specdec.layers.description.families import FAMILIES
from specdec.layers.description.moe_families import experts_of
from specdec.layers.packed.packed_modules import PackedExperts, PackedLinear, packed_of
from specdec.layers.packed.packed_weight import BITS, PackedWeight
from specdec.loading.model_loading import pick_device, pick_dtype
from specdec.measurement.model_shapes import ModelShape, MtpSpec, Shrink
from specdec.measurement.phase_run import BenchSubject
from specdec.models.described_model import META, ModelOnMeta
from specdec.models.target import TargetModel
from specdec.models.weight_storage import StoredWeights, stored_weights
from specdec.modules.transformers_names import auto_class, family_name
from specdec.progress import working
from specdec.runtime.sizing import KV_SHARE

COLUMN_MULTIPLE = 32
"""K of every packed weight is a multiple of this: the order of a word and the smallest group need it."""

RANDOM_WORDS = {"int4": (0x11111111, -1, 4.5826), "e2m1": (0, -1, 2.9262), "e4m3": (0, ~0x44004400, 0.5984)}
"""(bits that are set, bits that are kept, root mean square of the numbers) of random words, by code. int4: odd numbers,
since 0 to 15 minus 8 would have a mean of -0.5. e4m3: without the highest bit of the exponent, so that no number is
infinite or NaN."""

SPREAD = 0.5
"""Scales lie between 1 - SPREAD and 1 + SPREAD times their mean."""


@dataclass(frozen=True, slots=True)
class RandomPacking:
    """How `specdec bench --weights` packs the layers. group: most columns per scale; None: one scale per row."""

    name: str
    code: str
    group: int | None
    experts_only: bool = False

    def group_of(self, columns: int) -> int:
        """The largest group up to `group` that divides K. Raises ConfigError if K cannot be packed."""
        if columns % COLUMN_MULTIPLE:
            raise ConfigError(f"weights={self.name!r}: {columns} columns are not a multiple of {COLUMN_MULTIPLE}")
        return columns if self.group is None else gcd(self.group, columns)


UNPACKED = "bf16"
FORMS = {
    form.name: form
    for form in (
        RandomPacking("int4-g32", "int4", 32),
        RandomPacking("int4-g128", "int4", 128),
        RandomPacking("fp8", "e4m3", None),
        RandomPacking("mxfp4", "e2m1", 32, experts_only=True),
    )
}

MakePacked = Callable[[torch.Size], PackedWeight]
"""[.., N, K] -> a packed weight of that shape."""


def find_form(name: str) -> RandomPacking | None:
    """The form of that name; None: bfloat16, not packed. Raises ConfigError with the list of names."""
    require_one_of("weights", name, (UNPACKED, *FORMS))
    return FORMS.get(name)


def empty_packed(form: RandomPacking, device: torch.device, shape: torch.Size) -> PackedWeight:
    *leading, rows, columns = shape
    group = form.group_of(columns)
    words = torch.empty((*leading, rows, columns * BITS[form.code] // 32), dtype=torch.int32, device=device)
    scales = torch.empty((*leading, columns // group, rows), dtype=torch.bfloat16, device=device)
    return PackedWeight(form.code, words, scales, None, group)


def fill_packed(weight: PackedWeight, generator: torch.Generator | None = None) -> PackedWeight:
    """Fill a weight in place with random numbers, on its device: nothing else is allocated there. Returns it.
    generator: None: torch's own."""
    set_bits, kept_bits, root_mean_square = RANDOM_WORDS[weight.code]
    weight.words.random_(-(2**31), 2**31, generator=generator).bitwise_or_(set_bits).bitwise_and_(kept_bits)
    middle = weight.shape[-1] ** -0.5 / root_mean_square
    if weight.code != "e2m1":
        middle /= (1 + SPREAD**2 / 3) ** 0.5
        weight.scales.uniform_((1 - SPREAD) * middle, (1 + SPREAD) * middle, generator=generator)
        return weight
    # each scale is one of the two powers of two around the middle, drawn so that their mean square is its square
    below = 2.0 ** floor(log2(middle))
    weight.scales.bernoulli_((4 - (middle / below) ** 2) / 3, generator=generator).sub_(2).mul_(-below)
    return weight


def pack_layers(model: PreTrainedModel, form: RandomPacking, make: MakePacked) -> None:
    """Replace linears and experts of the layers by packed modules. Raises ConfigError if there are none to replace."""
    layers: Any = model.get_decoder().layers
    packed = 0
    for parent in [module for layer in layers for module in layer.modules()]:
        for name, child in list(parent.named_children()):
            new = _packed_module(parent, child, form, make)
            if new is not None:
                setattr(parent, name, new)
                packed += 1
    if not packed:
        raise ConfigError(f"weights={form.name!r} packs experts, and this shape has none; choose int4-g32 or fp8")


def _packed_module(parent: nn.Module, child: nn.Module, form: RandomPacking, make: MakePacked) -> nn.Module | None:
    """The packed module that replaces `child`; None: it stays."""
    experts = experts_of(child)
    if experts is not None:
        weights: Any = {name: make(getattr(experts, name).shape) for name in ("gate_up", "down")}
        return PackedExperts(experts._replace(**weights))
    if form.experts_only or not isinstance(child, nn.Linear) or type(parent).__name__.endswith("Router"):
        return None
    return PackedLinear(make(child.weight.shape), child.bias)


def target_on_meta(
    shape: ModelShape, shrink: Shrink, dtype: torch.dtype, form: RandomPacking | None
) -> PreTrainedModel:
    """The target on `meta`, where nothing is allocated. form: of its layers; all else is in `dtype`."""
    model: PreTrainedModel = build_model(shape.target(shrink), META, dtype)
    if form is not None:
        pack_layers(model, form, partial(empty_packed, form, META))
    return model


@torch.no_grad()
def leave_meta(model: PreTrainedModel, device: torch.device) -> None:
    """Allocate all tensors that are on `meta`. Weights get any values, other buffers (rotary frequencies) theirs."""
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    model.tie_weights()
    model.initialize_weights()


ROUTER_SCORES = 4.0
"""Factor of a router's random weights."""
ROUTER_CORRECTION = 1e-3
"""Spread of a router's correction biases: smaller than the differences of scores, so that different tokens choose
different experts, as the memory floor expects."""
MIXTURE_GAIN = 0.5
"""Factor of the norm after the experts in layers that also have a dense MLP."""


def count_weights(
    shape: ModelShape, shrink: Shrink, dtype: torch.dtype = torch.bfloat16, form: RandomPacking | None = None
) -> tuple[StoredWeights, StoredWeights]:
    """Weights of the target and of its drafter."""
    target = target_on_meta(shape, shrink, dtype, form)
    described = shape.drafter(target.config.get_text_config(), shrink)
    return stored_weights(target), count_drafter(described, ModelOnMeta(shape.name, target))


def count_drafter(described: PreTrainedConfig | HeadSpec | MtpSpec, target: ModelOnMeta) -> StoredWeights:
    """Weights of a drafter on `meta`; of MTP modules without the embedding and head that they share with the target."""
    if isinstance(described, MtpSpec):
        block, own = described_module(described, target)
        numbers = described.modules * (stored_weights(block).numbers + sum(shape.numel() for shape in own.values()))
        return StoredWeights(numbers, numbers * target.dtype.itemsize, "")
    return stored_weights(build_model(described, META, target.dtype))


def require_room(
    name: str, target: StoredWeights, drafter: StoredWeights, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise CapacityError with the numbers if the weights leave no room on the device."""
    needed, free = target.bytes + drafter.bytes, free_bytes(device)
    if needed > free * KV_SHARE.get(device.type, 0.5):
        raise CapacityError(
            f"{name} takes {needed / 1e9:.1f} GB of weights in {target.summary(dtype)} and "
            f"{free / 1e9:.1f} GB are free on {device}, of which K/V need a part; make it smaller with --layers or "
            "--shrink, or use another device"
        )


def make_target(
    shape: ModelShape,
    shrink: Shrink,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    form: RandomPacking | None = None,
) -> PreTrainedModel:
    model = target_on_meta(shape, shrink, dtype, form)
    leave_meta(model, device)
    randomise(model, seed)
    model.generation_config.eos_token_id = None  # random tokens end no text
    return model


def drafter_of(described: PreTrainedConfig | HeadSpec | MtpSpec, target: TargetModel, seed: int) -> Drafter:
    if isinstance(described, MtpSpec):
        modules = make_modules(described, target)
        for number, module in enumerate(modules):
            randomise(nn.ModuleDict(module.parts()), seed + number, target.user_decoder)
        return NativeMtpDrafter(modules, family_of(target), target)
    model = build_model(described, target.device, target.dtype)
    randomise(model, seed)
    if isinstance(described, BlockSpec):
        return BlockDrafter(model, target)
    if isinstance(described, Eagle3Spec):
        assert described.draft_vocab_size is not None
        step = described.vocab_size / described.draft_vocab_size
        # ascending, distinct
        model.target_ids = (torch.arange(described.draft_vocab_size, device=target.device) * step).long()
        return Eagle3Drafter(model, target)
    if model.masked_embedding is not None:
        ordering: torch.Tensor = model.masked_embedding.token_ordering
        ordering.copy_(torch.randperm(len(ordering), device=ordering.device))
    return Gemma4MTPDrafter(model, target)


def _mean_and_deviation(
    path: str, weight: torch.Tensor, part: nn.Module, layers: int, gain: float
) -> tuple[float, float]:
    """The normal distribution of a parameter. part: its module. gain: mean gain of the family's norms, as stored."""
    name = path.rpartition(".")[2]
    if name.endswith("correction_bias"):
        return 0.0, ROUTER_CORRECTION  # [1, E] in ERNIE
    if weight.dim() > 1:
        plain = isinstance(part, nn.Embedding) and not hasattr(part, "embed_scale")
        return 0.0, (2 * layers) ** 0.5 if plain else weight.shape[-1] ** -0.5
    if name == "sinks":
        return 0.0, 1.0
    if name.endswith("bias"):
        return 0.0, 0.02
    if name == "A_log":
        return -2.0, 0.05  # states that remember some ten tokens
    if type(part).__name__.endswith("RMSNormGated"):
        return 1.0, 0.05  # even if the family's other norms store their gain minus 1
    return gain if "norm" in path else 1.0, 0.05  # gains of norms, scales of routers


@torch.no_grad()
def randomise(module: nn.Module, seed: int, decoder: nn.Module | None = None) -> None:
    """Fill every parameter and packed weight in place, on its device. decoder: the text model whose kind of norms the
    module has; None: the module's own."""
    layers = getattr(getattr(module, "config", None), "num_hidden_layers", 1)
    names = [family_name(part) for part in (decoder or module).modules()]
    gain = 0.0 if any(name in FAMILIES and FAMILIES[name].norm_form.plus_one for name in names) else 1.0
    for number, (path, weight) in enumerate(module.named_parameters(), start=1):  # a tied head is its embedding
        part = module.get_submodule(path.rpartition(".")[0])
        mean, std = _mean_and_deviation(path, weight, part, layers, gain)
        weight.normal_(mean, std, generator=torch.Generator(weight.device).manual_seed(seed + number))
    parts: list[Any] = list(module.modules())
    for number, packed in enumerate(weight for part in parts for weight in packed_of(part)):
        fill_packed(packed, torch.Generator(packed.device).manual_seed(seed + number))
    for part in parts:
        if getattr(part, "scaling", None) == 1.0 and hasattr(part, "q_norm"):
            part.q_norm.weight.mul_(part.head_dim**-0.5)
        if type(part).__name__.endswith("Router"):
            scores = part.proj if hasattr(part, "proj") else part
            scores.weight.mul_(ROUTER_SCORES / getattr(part, "scalar_root_size", 1.0))
        if hasattr(part, "experts") and hasattr(part, "post_feedforward_layernorm_2"):
            part.post_feedforward_layernorm_2.weight.mul_(MIXTURE_GAIN)


def make_modules(spec: MtpSpec, target: TargetInfo) -> list[MtpModule]:
    """MTP modules of zeros for a target, on its device."""
    decoder, like = cast(Any, target.user_decoder), family_of(target).like
    block, shapes = described_module(spec, target)
    shapes |= {f"block.{name}": tensor.shape for name, tensor in block.state_dict().items()}
    zeros = decoder.norm.weight.new_zeros
    states = [{place: zeros(shape) for place, shape in shapes.items()} for _ in range(spec.modules)]
    return [MtpModule(read_parts(state, decoder, like), decoder, like, number) for number, state in enumerate(states)]


def described_module(spec: MtpSpec, target: TargetInfo) -> tuple[nn.Module, dict[str, torch.Size]]:
    """The block of each module, without weights, and the shapes of its other tensors by place."""
    decoder, like = cast(Any, target.user_decoder), family_of(target).like
    mlp = None if spec.dense is None else nearest_mlp(decoder, like, not spec.dense)
    gain, table = decoder.norm.weight.shape, decoder.get_input_embeddings().weight.shape
    shapes = dict.fromkeys(("enorm", "hnorm", "norm"), gain) | dict.fromkeys(("head", "embed"), table)
    shapes["proj"] = torch.Size((*gain, 2 * gain[0]))
    own = {f"{part}.weight": shapes[part] for part in ("enorm", "hnorm", "proj", *spec.parts)}
    return empty_layer(decoder, like, mlp), own


def build_model(described: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A transformers model of a config, or the head of a spec."""
    with device, constructible_assistants():
        if isinstance(described, Eagle3Spec | BlockSpec):
            head = Eagle3Head(described) if isinstance(described, Eagle3Spec) else BlockHead(described)
            return head.place(device, dtype).eval()
        return auto_class(described).from_config(described, dtype=dtype).eval()


def random_subject(
    shape: ModelShape,
    drafts: Mapping[str, SpecConfig | None],
    *,
    weights: str | None,
    layers: int | None,
    divisor: int,
    config: EngineConfig,
    assumed: Sequence[float] = (),
    seed: int = 0,
) -> BenchSubject:
    """Random weights and prompts of random tokens, to be measured. weights: a name of `FORMS`, "bf16", or None: all in
    the dtype. layers, divisor: of `Shrink`. config: the device, the dtype, and whether layers are fused.
    """
    form = None if weights is None else find_form(weights)
    shrink = Shrink(layers, divisor, COLUMN_MULTIPLE if form else 8)
    where = pick_device(config.device)
    dtype = pick_dtype(config.dtype, where, shape.target(shrink))
    if weights == UNPACKED:
        if config.dtype not in (None, torch.bfloat16):
            raise ConfigError(f"weights={UNPACKED!r} and dtype={config.dtype} contradict each other; give one of them")
        dtype = torch.bfloat16
    require_room(shape.name, *count_weights(shape, shrink, dtype, form), where, dtype)
    with working(f"making {shape.name}"):
        operations = choose_operations(config.fused, config.attention, where, dtype)  # as Engine.from_pretrained does
        model = make_target(shape, shrink, where, dtype, seed, form)
        begin = perf_counter()
        target = TargetModel(model, operations)
        drafter = drafter_of(shape.drafter(target.config, shrink), target, seed + 1) if any(drafts.values()) else None
        prepared = perf_counter() - begin

    def prompts(batch: int, context: int) -> list[list[int]]:
        draw = random.Random(f"{seed} {batch} {context}")
        return [[draw.randrange(target.vocab_size) for _ in range(context)] for _ in range(batch)]

    return BenchSubject(
        name=f"random weights{f' ({form.name})' if form else ''} at the shape of {shape.published}"
        + (f", on {config.tensor_parallel} devices" if config.tensor_parallel > 1 else ""),
        shrunk=shrink.summary,
        target=target,
        drafter=drafter,
        drafts=drafts,
        prompts=prompts,
        assumed=assumed,
        prepared=prepared,
        tensor_parallel=config.tensor_parallel,
    )
