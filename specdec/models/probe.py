"""The probe that a model must pass to be served: paged, packed attention must compute the same as its own forward.

Two short texts run in three ways: in the model's own forward; each alone through the attention interface; and mixed,
with shuffled rows, in two forwards (the second reads K/V of the first), next to a row of another text. Queries, keys,
values and logits must agree: closely, or to the bit where rows must not depend on others (`depends_on_others`). This
file knows no pools, plans or requests. Invariant: a model that fails is refused in one sentence.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from specdec.errors import SpecDecError, UnsupportedModelError, error_summary
from specdec.kvcache.layout import KVLayout
from specdec.models.batch_invariance import ROWS
from specdec.models.probe_context import ProbeContext
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

MANY_ROWS = 80
"""Rows of a forward, more than the smallest tiles of its products hold."""

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
    return torch.tensor(picked, device="cpu").view(2, TEXT_LEN)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed difference of rows [T, ...] from the same rows run alone.

    exact: all rows must agree, otherwise the median row. noise: difference of the model's own forward in a larger
    batch. bits: no difference is allowed.
    """

    exact: bool
    noise: Callable[[], float]
    bits: bool = False

    def difference(self, found: torch.Tensor, expected: torch.Tensor) -> float:
        """Difference relative to the expected rows."""
        found, expected = (x.flatten(1).float() for x in (found, expected))
        error = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-12)
        return float(error.max() if self.exact else error.median())

    def holds(self, found: torch.Tensor, expected: torch.Tensor, depth: int) -> bool:
        """Do the rows agree after `depth` layers? NaN agrees with nothing."""
        if self.bits:
            return torch.equal(found, expected)
        bound = EXACT_BOUND if self.exact else COARSE_BOUND * math.sqrt(1 + depth)
        return self.is_within(self.difference(found, expected), bound)

    def is_within(self, difference: float, bound: float) -> bool:
        """Is a difference within this bound or, if larger, close to the noise? Only then is the noise measured."""
        if difference <= bound or self.exact or not difference <= NOISE_BOUND:
            return difference <= bound
        return difference <= NOISE_TIMES * self.noise()


def _mixed(steps: Sequence[int]) -> list[tuple[int, int]]:
    """(text, step) of the rows of both texts at these steps, alternating between the texts, later steps first."""
    return [(text, step) for step in reversed(steps) for text in (1, 0)]


Mixture = Sequence[tuple[Sequence[tuple[int, int]], int]]
"""Forwards that together have all rows of both texts: (text, step) of the rows of each, and the number of rows of other
texts that follow."""

TWO_FORWARDS: Mixture = ((_mixed(range(PREFIX_LEN)), 1), (_mixed(range(PREFIX_LEN, TEXT_LEN)), 1))
FOUR_FORWARDS: Mixture = (
    (_mixed(range(3)), MANY_ROWS),
    ([(0, 3)], 0),
    ([(1, 3)], ROWS),
    (_mixed(range(4, TEXT_LEN)), 1),
)


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

    def difference(self, run: Run, forwards: Mixture = TWO_FORWARDS) -> str | None:
        """The difference if the rows of both texts run mixed, as the end of a sentence."""
        length, device = self.texts.shape[1], self.texts.device
        layout = self.alone[0].layout
        past: ProbeContext | None = None
        for order, num_others in forwards:
            rows = torch.tensor([text * length + step for text, step in order], device=device)
            others = torch.arange(len(self.texts), len(self.texts) + num_others, device=device)
            # a row of another text at an existing position, like a wrong draft or padding
            tokens = torch.cat([self.texts.flatten()[rows], self.texts[0, :1].expand(num_others)])
            positions = torch.cat([rows % length, (rows[:1] % length).expand(num_others)])
            mixed = ProbeContext(layout, torch.cat([rows // length, others]), positions, past, self.tolerance.bits)
            found = run(tokens[None], positions[None], mixed)[0, : len(rows)]
            mixed.verify(self.name)
            for layer in sorted(mixed.rows):
                for kind, what in enumerate(("queries", "keys", "values")):
                    expected = torch.cat([context.rows[layer][kind] for context in self.alone])[rows]
                    if not self.tolerance.holds(mixed.rows[layer][kind][: len(rows)], expected, layer):
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
    alone, states = _run_alone(name, layout, texts, run)

    @cache
    def noise() -> float:
        crowd = own(texts.repeat(CROWD, 1))[: len(texts)]
        return tolerance.difference(_centred(crowd.flatten(0, 1)), own_logits)

    tolerance = Tolerance(exact and states.dtype in (torch.float32, torch.float64), noise)
    raw = head(states)
    errors = [tolerance.difference(_centred(rule(raw)), own_logits) for rule in rules]
    best = errors.index(min(errors))
    if not tolerance.is_within(errors[best], EXACT_BOUND if tolerance.exact else COARSE_LOGITS_BOUND):
        finite = math.isfinite(errors[best])
        by = f"by {errors[best]:.1%}" if finite else "in masked or overflowing numbers"
        raise UnsupportedModelError(
            f"{name}: its logits through the attention interface of transformers differ from those of its own forward "
            f"{by}, so something in it is not plain causal attention, and it cannot be served exactly"
        )
    proof = ProbeResult(name, texts, rules[best], alone, states, tolerance)
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


def depends_on_others(
    name: str, layout: KVLayout, texts: torch.Tensor, run: Run, logits: Callable[[torch.Tensor], torch.Tensor]
) -> str | None:
    """The first part of a row whose bits depend on other rows, as the end of a sentence; None: no part's do. texts: [2,
    T] tokens. Rows run among few and many others, and alone."""
    alone, states = _run_alone(name, layout, texts, run, by_row=True)
    proof = ProbeResult(name, texts, LogitRule(), alone, states, Tolerance(exact=True, noise=float, bits=True))
    what = proof.difference(run, FOUR_FORWARDS)
    if what is not None:
        return what
    many, each = logits(states.repeat(1, 8, 1)), torch.cat([logits(row[None]) for row in states.split(1)], dim=1)
    return None if torch.equal(many, each.repeat(1, 8, 1)) else "the logits"


def _run_alone(
    name: str, layout: KVLayout, texts: torch.Tensor, run: Run, *, by_row: bool = False
) -> tuple[list[ProbeContext], torch.Tensor]:
    """Run each text alone -> its context, and the states of all [2 * T, H]. Raises UnsupportedModelError for a layer
    whose calls the cache cannot serve."""
    steps = torch.arange(texts.shape[1], device=texts.device)
    alone = [ProbeContext(layout, torch.full_like(steps, i), steps, by_row=by_row) for i in range(len(texts))]
    states = []
    for text, context in zip(texts, alone, strict=True):
        states.append(run(text[None], steps[None], context)[0])
        context.verify(name)
    return alone, torch.cat(states)


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


@contextmanager
def refusing(name: str, what: str) -> Iterator[None]:
    """Convert any error of a foreign model in the block to one sentence, except out of memory."""
    try:
        yield
    except (SpecDecError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{name}: {what} ({error_summary(error)})") from error
