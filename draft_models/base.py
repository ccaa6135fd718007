"""What a drafter is: it proposes a tree behind each request's committed prefix, and is told what was accepted.

A drafter holds at most a little state per row of the request table (`start` sizes it). It sees KV only through its
view, and never decides anything about correctness: any tree gives the same output, better trees give it sooner.
`specdec.draft_models.conformance` checks an implementation against these rules.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from specdec.attention.tree import DraftTree
from specdec.kvcache.frozen import KVView
from specdec.kvcache.layout import KVLayout
from specdec.kvcache.mirror import IntArray
from specdec.kvcache.table import RequestTable

Sample = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [B, K, V], positions [B, K] of the tokens being drawn) -> tokens [B, K], with the requests' own parameters
and noise: a drafter that draws through it proposes what the target would draw from the same logits."""

Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The same arguments -> [B, K, V] float32 log-probabilities given the noise: their argmax is the draw, the runners-up
what the target draws where its logits differ a little. Trees branch by them."""


class TargetInfo(Protocol):
    """What a drafter may know about the target."""

    @property
    def name(self) -> str: ...
    @property
    def layout(self) -> KVLayout: ...
    @property
    def embed(self) -> nn.Module: ...
    @property
    def head(self) -> nn.Module: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """The requests to draft for.

    rows: [B] rows of the request table, on the host; row_index: the same on the device.
    root: [B] the previous bonus token, at position S, whose K/V does not exist yet.
    num_steps, topk, num_nodes: levels, branches and size (with the root) of the tree that is wanted; topk 1 is a chain.
    history: [B, L] every token of each request by position (root at index S); history_len: [B], S + 1.
    """

    table: RequestTable
    rows: IntArray
    row_index: torch.Tensor
    root: torch.Tensor
    history: torch.Tensor
    history_len: torch.Tensor
    num_steps: int
    topk: int
    num_nodes: int
    sample: Sample
    log_scores: Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the target made of the last forward (a verify, or a prefill chunk), once it is committed.

    rows: [B] rows of the request table, on the host; row_index: the same on the device; start: [B] S before the commit.
    tokens: [B, N] what was fed; hidden: [B, N, H] target states after the final norm; taps: [B, N, T * H] the states
    that the drafter asked for, side by side, or None.
    path: [B, D] accepted nodes in order, root first; length: [B] how many of them count, now committed at start, ...
    next_token: [B] the token behind the last of them: the new bonus, or the next one of the prompt.
    """

    table: RequestTable
    rows: IntArray
    row_index: torch.Tensor
    start: torch.Tensor
    tokens: torch.Tensor
    hidden: torch.Tensor
    taps: torch.Tensor | None
    path: torch.Tensor
    length: torch.Tensor
    next_token: torch.Tensor

    def last_hidden(self) -> torch.Tensor:
        """[B, H]: the state at the last committed token, the one that predicted the new bonus."""
        last_node = self.path.gather(1, (self.length - 1)[:, None])  # [B, 1]
        return self.hidden.gather(1, last_node[:, :, None].expand(-1, -1, self.hidden.shape[-1]))[:, 0]


class Drafter(Protocol):
    """One way of guessing. A class that names this one as its base inherits the defaults.

    `view`: the KV it may read just now (None: none). `taps`: target states it wants to see besides the final one, each
    named by the layer it enters (`num_layers`: what leaves the last layer, before the final norm).
    `bytes_per_slot`: K/V of its own, one row for each full slot of the target. `extra_keys`: committed keys on sliding
    layers that it reads beyond the target's own window.
    """

    name: str
    view: KVView | None
    taps: tuple[int, ...] = ()
    bytes_per_slot: int = 0
    extra_keys: int = 0

    def start(self, max_requests: int) -> None:
        """Make room for the state of that many rows; called once, before the first request."""

    def propose(self, batch: DraftBatch) -> DraftTree:
        """Guess: a tree of at most `num_nodes` nodes and `num_steps` levels a request, whose root is `batch.root`."""

    def observe(self, seen: Observation) -> None:
        """Learn what was committed."""
