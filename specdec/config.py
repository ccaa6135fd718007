"""What a user may set, validated on construction. Frozen: "auto" values are resolved by making a new config."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch

from specdec.errors import ConfigError

MAX_TREE_NODES = 64
"""Verify width including the root: one 64-bit ancestor mask a node."""

ATTENTION_BACKENDS = ("auto", "torch", "triton")


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """Shape of the draft: `num_steps` levels, `topk` branches a node, `num_draft_tokens` verified nodes with the root.

    topk = 1 is a chain. Otherwise the best `topk` nodes of each level are expanded, and the best nodes of all levels
    are verified. num_draft_tokens None: 1 + topk * num_steps nodes, at most 64.
    """

    num_steps: int = 4
    topk: int = 1
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        _require_int("num_steps", self.num_steps, 1, MAX_TREE_NODES - 1)
        _require_int("topk", self.topk, 1, MAX_TREE_NODES - 1)
        if self.num_draft_tokens is not None:
            _require_int("num_draft_tokens", self.num_draft_tokens, 2, MAX_TREE_NODES)
            if self.num_draft_tokens > 1 + self._candidates(self.num_steps):
                raise ConfigError(
                    f"num_draft_tokens={self.num_draft_tokens}: {self.num_steps} steps of topk={self.topk} propose at "
                    f"most {1 + self._candidates(self.num_steps)} nodes, the root included; raise num_steps or topk, "
                    "or lower num_draft_tokens"
                )

    @property
    def num_nodes(self) -> int:
        """Verify width, the root included."""
        return self.num_draft_tokens or min(1 + self.topk * self.num_steps, MAX_TREE_NODES)

    def shortened(self, depth: int) -> tuple[int, int]:
        """(steps, nodes with the root) of a draft that no request can use beyond `depth` tokens."""
        steps = min(self.num_steps, depth, self.num_nodes - 1)
        return steps, min(self.num_nodes, 1 + self._candidates(steps))

    def _candidates(self, num_steps: int) -> int:
        """Nodes that `num_steps` levels propose: topk children of the root, then topk of each of topk nodes."""
        return self.topk + (num_steps - 1) * self.topk**2 if num_steps else 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and devices.

    max_model_len: longest prompt + output in tokens; None: the model's own limit, as far as memory goes.
    full_slots, swa_slots: usable KV slots (tokens) of each pool; None: enough for `max_batch_size` requests of
    `max_model_len`, within a share of the free memory. dtype: None is float32 on the CPU, the checkpoint's elsewhere.
    prefill_chunk: most prompt tokens of one request in one forward.
    attention: "torch" runs anywhere; "triton" uses the Triton kernels, which need a CUDA device (or, to try them on a
    CPU, TRITON_INTERPRET=1); "auto" is "triton" on a GPU that can run them, else "torch".
    """

    max_batch_size: int = 8
    max_model_len: int | None = None
    page_size: int = 1
    full_slots: int | None = None
    swa_slots: int | None = None
    attention: str = "auto"
    cuda_graphs: str | bool = "auto"
    deterministic: bool = False
    dtype: torch.dtype | None = None
    device: str | torch.device | None = None
    prefill_chunk: int = 512

    def __post_init__(self) -> None:
        _require_int("max_batch_size", self.max_batch_size, 1, 4096)
        _require_int("page_size", self.page_size, 1, 1024)
        _require_int("prefill_chunk", self.prefill_chunk, 1, 1 << 20)
        for name in ("max_model_len", "full_slots", "swa_slots"):
            value = getattr(self, name)
            if value is not None:
                _require_int(name, value, 1, 1 << 40)
        if self.attention not in ATTENTION_BACKENDS:
            raise ConfigError(f"attention={self.attention!r} is unknown; choose one of {', '.join(ATTENTION_BACKENDS)}")
        if self.cuda_graphs not in ("auto", False):
            raise ConfigError(f"cuda_graphs={self.cuda_graphs!r}: this version has none; use 'auto' or False")
        if self.deterministic is not False:
            raise ConfigError(
                f"deterministic={self.deterministic!r}: batch-invariant kernels are not available in this version; "
                "use False"
            )
        if self.device is not None:
            _require_device(self.device)
        dtype: object = self.dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"dtype={self.dtype!r}: a floating torch.dtype is wanted, such as torch.bfloat16")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is continued. temperature 0 is greedy; 0, 1.0 and 0.0 turn top_k, top_p and min_p off.

    Filters apply in the order of transformers: repetition penalty, temperature, top_k, top_p, min_p. With a `seed` the
    output is a pure function of model, prompt, parameters and seed, whatever the drafter and the batch; None draws one.
    stop: strings that end the text (they are cut off). logprobs: None, or how many alternatives to report per token.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        _require_int("max_new_tokens", self.max_new_tokens, 1, 1 << 30)
        _require_number("temperature", self.temperature, 0.0, math.inf)
        _require_int("top_k", self.top_k, 0, 1 << 30)
        _require_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        if self.seed is not None:
            _require_int("seed", self.seed, 0, (1 << 63) - 1)
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, 0, 1024)
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos={self.ignore_eos!r}: True or False is wanted")
        stops: object = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not (_is_collection(stops) and all(isinstance(stop, str) and stop for stop in stops)):
            raise ConfigError(f"stop={self.stop!r}: a non-empty string, or a sequence of them, is wanted; () for none")
        if not _is_collection(self.stop_token_ids):
            raise ConfigError(f"stop_token_ids={self.stop_token_ids!r}: a sequence of token ids is wanted; () for none")
        for token in self.stop_token_ids:
            _require_int("stop_token_ids", token, 0, 1 << 40)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _is_collection(value: object) -> TypeGuard[Collection[object]]:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))


def _require_device(device: object) -> None:
    try:
        if not isinstance(device, torch.device):
            torch.device(device if isinstance(device, str) else "")
    except RuntimeError:
        raise ConfigError(f"device={device!r}: a torch device is wanted, such as 'cpu', 'cuda' or 'cuda:1'") from None


def _require_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r}: an integer from {low} to {high} is wanted")


def _require_number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or value < low or value > high or (open_low and value == low):  # type: ignore[operator]
        span = f"above {low:g}" if open_low else f"from {low:g}"
        raise ConfigError(
            f"{name}={value!r}: a finite number {span}" + f" to {high:g}" * math.isfinite(high) + " is wanted"
        )
