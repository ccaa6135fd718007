"""Interface of drafters. A drafter proposes a tree after each request's committed prefix, then observes the result.

    Drafter       weights fitted to a target; it holds no engine's state, so several engines may share it
      .bind() ->
    DraftWorker   a drafter with the state of one engine: its rows, its K/V store, its view

Every tree gives the same output; better trees give it sooner. `specdec.draft_models.conformance` checks
implementations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import nn

from specdec.attention.backend import Backend
from specdec.attention.kernels.page_table import PageTables
from specdec.attention.plan import Pack
from specdec.attention.trees.tree import DraftTree
from specdec.gpu.operations import Operations
from specdec.kvcache.cache import KVCache
from specdec.kvcache.frozen import KVView
from specdec.kvcache.layout import KVLayout
from specdec.kvcache.store import KVStore
from specdec.kvcache.table import Rows
from specdec.modules.weight_watch import Weights
from specdec.sampling.sampling_table import ParamVectors

SampleFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [B, K, V], positions [B, K] of the tokens being drawn) -> tokens [B, K], with the requests' own parameters
and noise. A drafter that draws with it proposes the token that the target would draw from the same logits."""

BestOf = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""(logits [B, K, V], positions [B, K], count C) -> tokens [B, K, C] and their log-probabilities given the noise,
float32, best first. The first is the token that `SampleFunction` draws; trees branch to the others, which the target
may draw if its logits differ a little from the drafter's."""


class TargetInfo(Protocol):
    """The part of a target that drafters use. user_decoder: its text model as the user gave it. model_types: of the
    text config and of the whole config. ops: operations of fused layers; None: no layer is fused."""

    name: str
    model_types: tuple[str, str]
    layout: KVLayout
    user_decoder: nn.Module
    embed: nn.Module
    head: nn.Module
    vocab_size: int
    ops: Operations | None

    @property
    def hidden_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


class Fit(NamedTuple):
    """Properties of a target that a fitted drafter depends on. The drafter runs only with targets whose `Fit` is
    equal."""

    layout: KVLayout
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, target: TargetInfo) -> "Fit":
        return cls(target.layout, target.hidden_size, target.vocab_size, target.dtype, target.device)


@dataclass(frozen=True, kw_only=True)
class DraftBatch:
    """The requests to draft for.

    rows: their rows of the request table.
    root: [B] the previous bonus token, at position S, whose K/V does not exist yet.
    num_steps, topk, num_nodes: levels, branches and size (with the root) of the requested tree; topk 1 is a chain.
    read_history: copies `history`; called only if `propose` reads it.
    history_len: [B], S + 1.
    prefix: the backend's tables of the committed prefixes, if already made.
    level_pos: the result of `positions`, if already made.
    by_lookup: the lookup drafts, not the model next to it (`lookup.py`).
    params: the sampling parameters of `sample` and `best`, for operations that draw without full logits; None: draw
        through `sample` and `best`.
    """

    rows: Rows
    root: torch.Tensor
    read_history: Callable[[], torch.Tensor]
    history_len: torch.Tensor
    num_steps: int
    topk: int
    num_nodes: int
    sample: SampleFunction
    best: BestOf
    params: ParamVectors | None = None
    prefix: PageTables | None = None
    level_pos: torch.Tensor | None = None
    by_lookup: bool = False

    @cached_property
    def history(self) -> torch.Tensor:
        """All tokens of each request by position [B, L]; the root is at index S."""
        return self.read_history()

    def positions(self) -> torch.Tensor:
        """Positions of the tokens on each level [num_steps + 1, B], the root's first."""
        if self.level_pos is not None:
            return self.level_pos
        return self.history_len - 1 + torch.arange(self.num_steps + 1, device=self.history_len.device)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The target's results of the last verify, or of rounds without drafts, after their commit on the device.

    rows: the rows of the request table.
    start: [B] S before the commit.
    tokens: [B, N] tokens fed to the target.
    hidden: [B, N, H] the target's states after the final norm.
    aux_states: [B, N, A * H] states of `Drafter.aux_layers`, concatenated, or None.
    path: [B, D] accepted nodes in order, root first.
    length: [B] number of accepted nodes, which are committed at positions start, start + 1, ...
    next_token: [B] the token after the last accepted node: the new bonus token.
    """

    rows: Rows
    start: torch.Tensor
    tokens: torch.Tensor
    hidden: torch.Tensor
    aux_states: torch.Tensor | None
    path: torch.Tensor
    length: torch.Tensor
    next_token: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptObservation:
    """The target's results of a forward over prompts: runs of many requests in one row of T places. Their tokens count
    as committed.

    pack: rows of the request table and the places of their tokens; values in padding places are undefined.
    tokens: [T] fed to the target.
    following: [T] the token after each, even after the last of a run.
    hidden: [T, H] target states after the final norm; None if the drafter does not read every state.
    last_hidden: [R, H] the state of each run's last token; zeros if no prompt ends with the runs.
    aux_states: [T, A * H] as in `Observation`.
    """

    pack: Pack
    tokens: torch.Tensor
    following: torch.Tensor
    hidden: torch.Tensor | None
    last_hidden: torch.Tensor
    aux_states: torch.Tensor | None


class Binding(NamedTuple):
    """Parts of an engine that a worker gets: KV cache, backend, the target's K/V, and the number of tokens of finished
    requests to keep for drafts (0: none)."""

    cache: KVCache
    backend: Backend
    target_store: KVStore
    finished_tokens: int = 0


class DraftWorker(Protocol):
    """A drafter bound to one engine. `view`: K/V of another model that it may read now, or None. A worker may also have
    `finished`, a `FinishedTexts` to which the engine adds outputs of finished requests."""

    view: KVView | None = None

    def propose(self, batch: DraftBatch) -> DraftTree:
        """A tree per request, of at most `num_nodes` nodes and `num_steps` levels, whose root is `batch.root`."""

    def observe(self, seen: Observation) -> None:
        """Learn which tokens a round has committed; by default nothing."""
        return

    def observe_prompts(self, seen: PromptObservation) -> None:
        """Learn prompt tokens; by default nothing. Tokens whose K/V came from the prefix cache are not reported."""
        return


class Drafter(Protocol):
    """One way of drafting. Subclasses inherit the defaults.

    - `aux_layers`: target states that it reads besides the final one, each named by the layer it enters (`num_layers`:
      the output of the last layer, before the final norm)
    - `kv_layout`: layers with K/V of its own, at the slots of the target's tokens, each in the group of its window;
      None: it keeps none. K/V of a token may depend only on the tokens up to the next one, since the prefix cache
      shares them
    - `extra_keys`: committed keys on sliding layers that it reads beyond a window
    - `reread`: tokens at the end of a cached prefix that it observes again, without storing
    - `reads_every_state`: it reads the final state of every prompt token; False: at most that of the last one, so the
      target may skip its last layers for the others
    - `fit`: the target that it was fitted to; None: it runs with any
    - `unfused`: why its own modules run although fused layers were requested; None: fused layers run, or it has none
    - `weights`: parameters that it reads and that callers may re-point; None: it has none
    - `may_lag`: observing takes a forward, so an engine may show it several rounds without drafts at once; False: it is
      shown every round
    - `max_steps`: upper bound on the levels of a draft; None: no bound. `default_steps`: levels if the user sets none;
      None: 4
    - `max_positions`: it drafts and reads only at positions below this; None: at any
    - `reads_finished`: it can propose from outputs of finished requests
    - `has_lookup`: a lookup may draft in its place (`lookup.py`)
    """

    name: str
    aux_layers: tuple[int, ...] = ()
    kv_layout: KVLayout | None = None
    extra_keys: int = 0
    reread: int = 0
    reads_every_state: bool = True
    fit: Fit | None = None
    unfused: str | None = None
    weights: Weights | None = None
    may_lag: bool = False
    max_steps: int | None = None
    default_steps: int | None = None
    max_positions: int | None = None
    reads_finished: bool = False
    has_lookup: bool = False

    def bind(self, binding: Binding) -> DraftWorker:
        """Make a worker for one engine."""


class StatelessDrafter(Drafter, DraftWorker, Protocol):
    """A drafter that is its own worker in every engine: engines share its state, if it has any."""

    def bind(self, binding: Binding) -> DraftWorker:
        return self


class _WithDefaults:
    """A drafter whose missing attributes have the defaults of `Drafter`. The drafter itself is not changed: it may be
    frozen."""

    def __init__(self, drafter: object) -> None:
        self._drafter = drafter

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The user's class, for `isinstance` and logs."""
        return type(self._drafter)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # methods that `copy` looks for before `_drafter` is set
            raise AttributeError(name)
        return getattr(self._drafter if hasattr(self._drafter, name) else Drafter, name)


def with_defaults(drafter: Drafter) -> Drafter:
    """Returns the drafter itself, or, if it lacks attributes of `Drafter`, a wrapper that adds their defaults."""
    if all(hasattr(drafter, name) for name in Drafter.__annotations__):
        return drafter
    return cast(Drafter, _WithDefaults(drafter))
