"""The probe that a model must pass to be served: paged, packed attention must compute the same as its own forward.

Two short texts run in three ways: in the model's own forward; each alone through the attention interface; and mixed,
with shuffled rows, in two forwards (the second reads K/V of the first), next to a row of another text. Queries, keys,
values and logits must agree. This file knows no pools, plans or requests. Invariant: a model that fails is refused in
one sentence.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Unpack

import torch
from torch import nn

from specdec.attention.bridge import IGNORED_KWARGS, AttentionCall
from specdec.attention.dense import bias_of, dense_attention
from specdec.errors import SpecDecError, UnsupportedModelError, error_summary
from specdec.kvcache.layer_context import OwnRows, Recurrence, ScoreOptions
from specdec.kvcache.layout import KVLayout
from specdec.models.recurrent_probe import TextPaths
from specdec.sampling.softcap import reference_softcap

TEXT_LEN = 6
"""Tokens per text: enough that a permutation moves every row, few enough for the largest model."""
PREFIX_LEN = 3
"""Tokens of each text in the first of the two mixed forwards."""

EXACT_BOUND = 1e-3
"""Largest allowed relative difference of any row, for unquantised weights of 32 bits or more on a CPU, where a row's
product does not depend on other rows."""
COARSE_BOUND = 0.03
"""Largest allowed relative difference of the median row for other weights and devices, per square root of the layers,
since rounding errors grow. Products in 16 bits, TF32 or quantised depend on the shape, and a router may then choose
another expert in a few rows. An unsupported architecture differs in nearly all rows, by about 1."""
COARSE_LOGITS_BOUND = 0.2
"""COARSE_BOUND for logits, for any number of layers."""
NOISE_TIMES = 2.0
"""Bound for deep mixtures in 16 bits, in multiples of their noise. The noise is the difference of their own forward
between two batch sizes: after rounding, routers choose other experts."""
NOISE_BOUND = 0.5
"""Largest relative difference that noise may excuse."""
CROWD = 16
"""Copies of both texts in the batch of the other size."""

Run = Callable[[torch.Tensor, torch.Tensor, object], torch.Tensor]
"""tokens [1, T], positions [1, T] and an attention context -> states after the final norm [1, T, H]."""

Softcap = Callable[[torch.Tensor, float], torch.Tensor]
"""(logits, cap) -> capped logits, possibly in place."""


@dataclass(frozen=True, slots=True)
class LogitRule:
    """A model's changes to its head's output: a multiplier, a divisor, then a softcap."""

    times: float = 1.0
    over: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: torch.Tensor, softcap: Softcap = reference_softcap) -> torch.Tensor:
        logits = self.scaled(logits)
        return logits if self.softcap is None else softcap(logits, self.softcap)

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the multiplier and divisor, before the softcap."""
        if self.times != 1:
            logits = logits * self.times
        if self.over != 1:
            logits = logits / self.over
        return logits


LOGIT_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
"""Config attributes by which some models multiply and others divide their logits."""


def logit_rules(config: Any) -> list[LogitRule]:
    """The rules that a config allows; the model's own forward decides which one is right."""
    softcap = getattr(config, "final_logit_softcapping", None)
    rules = [LogitRule(softcap=softcap)]
    for attribute in LOGIT_FACTORS:
        factor = getattr(config, attribute, None)
        if isinstance(factor, int | float) and factor not in (0, 1):
            rules += [LogitRule(times=float(factor), softcap=softcap), LogitRule(over=float(factor), softcap=softcap)]
    return rules


def probe_texts(config: Any, vocab_size: int) -> torch.Tensor:
    """Two texts [2, TEXT_LEN] of tokens that the config does not name. Uses no random state."""
    whole = (config, config.get_text_config())
    named = {value for part in whole for key, value in vars(part).items() if "token" in key and isinstance(value, int)}
    ordinary = [token for token in range(min(vocab_size, 4096)) if token not in named] or [0]
    picked = [ordinary[(len(ordinary) // 3 + 37 * i) % len(ordinary)] for i in range(2 * TEXT_LEN)]
    return torch.tensor(picked).view(2, TEXT_LEN)


@dataclass(slots=True)
class ProbeContext:
    """Records each layer's attention call, and computes dense causal attention within each text.

    text, positions: [T] of the packed tokens. past: an earlier forward whose K/V, and earlier ones, these rows see too.
    by_row: compute each row alone, so that its bits do not depend on other rows.
    """

    layout: KVLayout
    text: torch.Tensor
    positions: torch.Tensor
    past: "ProbeContext | None" = None
    by_row: bool = False
    rows: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # q, k, v [T, h, D]
    convolutions: dict[int, torch.Tensor] = field(default_factory=dict)  # inputs [T, C]
    recurrences: dict[int, Recurrence] = field(default_factory=dict)  # in float32
    faults: dict[int, str] = field(default_factory=dict)
    states: dict[int, torch.Tensor | None] = field(default_factory=dict)  # states that enter the layers of its keys
    shares: "Sequence[ProbeContext]" = ()  # one per rank, if several run the forward
    other_ranks: "Sequence[ProbeContext]" = ()  # on the first rank's context: those of the others

    def divide(self, devices: Sequence[torch.device]) -> "Sequence[ProbeContext]":
        """See `shared_weights.py`."""
        layout = self.layout.share(len(devices))
        pasts = [None] * len(devices) if self.past is None else self.past.shares
        self.shares = [
            ProbeContext(layout, self.text.to(device), self.positions.to(device), past, self.by_row)
            for device, past in zip(devices, pasts, strict=True)
        ]
        return self.shares

    def unite(self, shares: "Sequence[ProbeContext]") -> None:
        """Merge the ranks' records: heads in the order of ranks, repeated heads once. See `shared_weights.py`."""
        home = self.text.device
        for layer in shares[0].rows:
            distinct = shares[:: len(shares) // shares[0].layout.layers[layer].shares]
            kinds = enumerate((shares, distinct, distinct))
            q, k, v = (torch.cat([rank.rows[layer][kind].to(home) for rank in ranks], dim=1) for kind, ranks in kinds)
            self.rows[layer] = q, k, v

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer, query = call.layer, call.query
        fault = self._fault(call)
        if fault is None and layer in self.rows:
            fault = "calls attention more than once in a forward, and has one K/V slot a token"
        if fault is None and self.layout.layers[layer].owner not in {layer, *self.rows}:
            fault = "reads the K/V of a layer that has not run"
        if fault is not None:
            self.faults[layer] = fault
            return query.new_zeros((len(query), query.shape[2], query.shape[1], call.value.shape[3]))
        return call.answer(self, *call.rows())

    def destination(self, layer: int) -> None:
        """None: fused layers store nothing here; their calls are recorded."""

    def attend_tokens(
        self, layer: int, q: torch.Tensor, k: OwnRows, v: OwnRows, **options: Unpack[ScoreOptions]
    ) -> torch.Tensor:
        """q [T, Hq, D], k [T, Hkv, D] and v [T, Hkv, DV], or None: the owner's -> [T, Hq, DV]."""
        spec = self.layout.layers[layer]
        if k is None or v is None:
            _, k, v = self.rows[spec.owner]
        self.rows[layer] = q, k, v
        keys, values = (torch.cat([context.rows[spec.owner][kind] for context in self._seen()]) for kind in (1, 2))
        text, positions = self._places()
        distance = self.positions[:, None] - positions
        visible = (self.text[:, None] == text) & (distance >= 0)  # [T, L]
        if spec.window is not None:
            visible &= distance < spec.window
        if not self.by_row:
            return _attended(q, keys, values, visible, options)
        order = positions.argsort()
        outs = []
        for row, mask in zip(q.split(1), visible, strict=True):
            cells = order[mask[order]]
            outs.append(_attended(row.clone(), keys[cells], values[cells], mask.new_ones((1, len(cells))), options))
        return torch.cat(outs)

    def convolve(
        self, layer: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `RecurrentContext`."""
        self.convolutions[layer] = inputs
        return self._paths().convolved([context.convolutions[layer] for context in self._seen()], weight, bias)

    def recur(self, layer: int, rows: Recurrence) -> torch.Tensor:
        """See `RecurrentContext`."""
        self.rows[layer] = rows.q, rows.k, rows.v
        self.recurrences[layer] = rows.map(torch.Tensor.float)
        return self._paths().recurred([context.recurrences[layer] for context in self._seen()])

    def _paths(self) -> TextPaths:
        return TextPaths.of(self.text, self.positions, *self._places())

    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Text and position of all rows that these rows see, [L] each."""
        seen = self._seen()
        return torch.cat([context.text for context in seen]), torch.cat([context.positions for context in seen])

    def _seen(self) -> "list[ProbeContext]":
        """The forwards whose K/V these rows see, earliest first."""
        return [self] if self.past is None else [*self.past._seen(), self]

    def _fault(self, call: AttentionCall) -> str | None:
        if not 0 <= call.layer < len(self.layout.layers):
            return f"reports layer_idx {call.layer}, but the config has {len(self.layout.layers)} layers"
        spec = self.layout.layers[call.layer]
        query, key, value = call.query, call.key, call.value
        kept = [(field.heads, field.dim) for field in spec.fields]
        if [(key.shape[1], key.shape[3]), (value.shape[1], value.shape[3])] != kept or spec.k.heads != spec.v.heads:
            return f"has K {tuple(key.shape)} and V {tuple(value.shape)}, but its owner keeps heads x size {kept}"
        if not query.dtype == key.dtype == value.dtype:
            return f"has queries in {query.dtype}, K in {key.dtype} and V in {value.dtype}; one dtype is supported"
        if query.shape[3] != spec.k.dim or query.shape[1] % spec.k.heads:
            return f"has queries {tuple(query.shape)} that do not group over {kept[0]} keys"
        if not key.shape[2] == value.shape[2] == query.shape[2] or query.shape[0] * query.shape[2] != len(self.text):
            return f"asks for {query.shape[2]} queries and {key.shape[2]} keys for {len(self.text)} tokens"
        if call.sliding_window != spec.window:
            return f"uses sliding_window={call.sliding_window}, but the config says {spec.window}"
        if call.sinks is not None and call.sinks.shape != (query.shape[1],):
            return f"has attention sinks of shape {tuple(call.sinks.shape)}; one per query head is supported"
        odd = sorted(k for k, v in call.extra.items() if k not in IGNORED_KWARGS and isinstance(v, torch.Tensor))
        return f"passes {odd} to attention, which specdec does not know how to honour" if odd else None

    def verify(self, name: str) -> None:
        """Raise UnsupportedModelError unless every layer called attention, and with supported arguments only."""
        called = {*self.rows, *self.faults, *self.convolutions}
        missing = [spec.layer for spec in self.layout.layers if spec.fields and spec.layer not in called]
        if missing:
            raise UnsupportedModelError(
                f"{name}: layers {missing} never called the attention interface of transformers, so their K/V cannot "
                "be paged; the architecture must support AttentionInterface"
            )
        faults = [f"layer {layer} {fault}" for layer, fault in sorted(self.faults.items())]
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise UnsupportedModelError(f"{name}: {faults[0]}{more}")


def _attended(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, options: ScoreOptions
) -> torch.Tensor:
    """q [T, Hq, D], keys and values [L, Hkv, D], visible [T, L] -> [T, Hq, D]."""
    query, keys, values = (x.float().transpose(0, 1)[None] for x in (q, keys, values))  # [1, heads, T or L, D]
    return dense_attention(query, keys, values, bias_of(visible[None]), **options)[0].to(q.dtype)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed difference of rows [T, ...] from the same rows run alone.

    exact: all rows must agree, otherwise the median row. noise: difference of the model's own forward in a larger
    batch.
    """

    exact: bool
    noise: Callable[[], float]

    def difference(self, found: torch.Tensor, expected: torch.Tensor) -> float:
        """Difference relative to the expected rows."""
        found, expected = (x.flatten(1).float() for x in (found, expected))
        error = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-12)
        return float(error.max() if self.exact else error.median())

    def holds(self, found: torch.Tensor, expected: torch.Tensor, depth: int) -> bool:
        """Do the rows agree after `depth` layers? NaN agrees with nothing."""
        bound = EXACT_BOUND if self.exact else COARSE_BOUND * math.sqrt(1 + depth)
        return self.is_within(self.difference(found, expected), bound)

    def is_within(self, difference: float, bound: float) -> bool:
        """Is a difference within this bound or, if larger, close to the noise? Only then is the noise measured."""
        if difference <= bound or self.exact or not difference <= NOISE_BOUND:
            return difference <= bound
        return difference <= NOISE_TIMES * self.noise()


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Results of the probe: the model's logit rule, and each text run alone, for comparison with other forms of the
    model.

    alone: one context per text with all layers' calls; states [2 * T, H] after the final norm.
    """

    name: str
    texts: torch.Tensor
    rule: LogitRule
    alone: Sequence[ProbeContext]
    states: torch.Tensor
    tolerance: Tolerance

    def difference(self, run: Run) -> str | None:
        """The difference if the rows of both texts run mixed in two forwards, as the end of a sentence."""
        length, device = self.texts.shape[1], self.texts.device
        layout = self.alone[0].layout
        past: ProbeContext | None = None
        for order in (_mixed(range(PREFIX_LEN), length), _mixed(range(PREFIX_LEN, length), length)):
            rows = torch.tensor(order, device=device)
            # a row of another text at an existing position, like a wrong draft or padding
            tokens = torch.cat([self.texts.flatten()[rows], self.texts[0, :1]])
            positions = torch.cat([rows % length, rows[:1] % length])
            text = torch.cat([rows // length, rows.new_tensor([len(self.texts)])])
            mixed = ProbeContext(layout, text, positions, past)
            found = run(tokens[None], positions[None], mixed)[0, :-1]
            mixed.verify(self.name)
            for layer in sorted(mixed.rows):
                for kind, what in enumerate(("queries", "keys", "values")):
                    expected = torch.cat([context.rows[layer][kind] for context in self.alone])[rows]
                    if not self.tolerance.holds(mixed.rows[layer][kind][:-1], expected, layer):
                        return f"the {what} of layer {layer}"
            if not self.tolerance.holds(found, self.states[rows], len(layout.layers)):
                return "the final states"
            past = mixed
        return None


def prove(
    name: str,
    layout: KVLayout,
    texts: torch.Tensor,
    *,
    run: Run,
    head: Callable[[torch.Tensor], torch.Tensor],
    own: Callable[[torch.Tensor], torch.Tensor],
    rules: Sequence[LogitRule],
    exact: bool,
) -> ProbeResult:
    """Find the rule by which states and head give the model's own logits. Raises UnsupportedModelError if there is
    none.

    texts: [2, T] tokens. own: tokens [B, T] -> logits [B, T, V] of the model's own forward. exact: a row's product does
    not depend on other rows.
    """
    own_logits = _centred(own(texts).flatten(0, 1))
    steps = torch.arange(texts.shape[1], device=texts.device)
    alone = [ProbeContext(layout, torch.full_like(steps, i), steps) for i in range(len(texts))]
    states = []
    for i, context in enumerate(alone):
        states.append(run(texts[i : i + 1], steps[None], context)[0])
        context.verify(name)

    @cache
    def noise() -> float:
        crowd = own(texts.repeat(CROWD, 1))[: len(texts)]
        return tolerance.difference(_centred(crowd.flatten(0, 1)), own_logits)

    tolerance = Tolerance(exact and states[0].dtype in (torch.float32, torch.float64), noise)
    raw = head(torch.cat(states))
    errors = [tolerance.difference(_centred(rule(raw)), own_logits) for rule in rules]
    best = errors.index(min(errors))
    if not tolerance.is_within(errors[best], EXACT_BOUND if tolerance.exact else COARSE_LOGITS_BOUND):
        raise UnsupportedModelError(
            f"{name}: its logits through the attention interface of transformers differ from those of its own forward "
            f"by {errors[best]:.1%}, so something in it is not plain causal attention, and it cannot be served exactly"
        )
    proof = ProbeResult(name, texts, rules[best], alone, torch.cat(states), tolerance)
    what = proof.difference(run)
    if what == "the final states":
        raise UnsupportedModelError(
            f"{name}: {what} of a token depend on the other rows of the forward, so rows of several requests cannot "
            "share one"
        )
    if what is not None:
        raise UnsupportedModelError(
            f"{name}: {what} do not follow from the token and its position_ids alone (a model that counts positions "
            "itself, or mixes neighbouring rows), so rows of several requests cannot share a forward"
        )
    return proof


def require_finite(name: str, model: nn.Module, logits: torch.Tensor) -> None:
    """Raise UnsupportedModelError if the model's own forward gives NaN or infinite logits, with the faulty weight."""
    if logits.isfinite().all():
        return
    weights = itertools.chain(model.named_parameters(), model.named_buffers())
    damaged = (key for key, weight in weights if weight.is_floating_point() and not weight.float().isfinite().all())
    first = next(damaged, None)
    blamed = "all weights are finite; try another dtype" if first is None else f"{first} holds such values too"
    raise UnsupportedModelError(f"{name}: its own forward gives logits that are NaN or infinite; {blamed}")


def _centred(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() - logits.float().mean(dim=-1, keepdim=True)


def _mixed(steps: Sequence[int], length: int) -> list[int]:
    """Row numbers text * length + step, alternating between both texts, later steps first."""
    return [text * length + step for step in reversed(steps) for text in (1, 0)]


@contextmanager
def refusing(name: str, what: str) -> Iterator[None]:
    """Convert any error of a foreign model in the block to one sentence, except out of memory."""
    try:
        yield
    except (SpecDecError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{name}: {what} ({error_summary(error)})") from error
