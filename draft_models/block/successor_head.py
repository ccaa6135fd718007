"""DSpark's successor head: what the token drafted before adds to the logits of a block's row.

    vanilla   bias = W2 W1[t]
    gated     bias = W2 (sigmoid(G [h, W1[t]] + g) * W1[t])
    rnn       z, c, o = J [s, W1[t], h] + j;   s' = sigmoid(z) s + (1 - sigmoid(z)) tanh(c);   bias = W2 tanh(o)

t is the token before, h the row's state, s what the rnn carries from row to row, zeros at first. So rows of a block are
drawn in order, but the layers run once: a step costs a product of rank r.
"""

import torch
from torch import nn

KINDS = ("vanilla", "gated", "rnn")


class SuccessorHead(nn.Module):
    """Names of its modules are those of the checkpoints."""

    def __init__(self, kind: str, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        assert kind in KINDS, kind
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def forward(
        self, before: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """before [B, M] tokens, hidden [B, H] of the row, state [B, M, r] or None -> bias [B, M, V], the next state."""
        token: torch.Tensor = self.markov_w1(before)  # [B, M, r]
        if self.kind == "vanilla":
            return self.markov_w2(token), None
        hidden = hidden[:, None].expand(-1, token.shape[1], -1)
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat([hidden, token], dim=-1)).sigmoid()
            return self.markov_w2(gate * token), None
        state = torch.zeros_like(token) if state is None else state
        keep, candidate, out = self.joint_proj(torch.cat([state, token, hidden], dim=-1)).chunk(3, dim=-1)
        keep = keep.sigmoid()
        return self.markov_w2(out.tanh()), keep * state + (1 - keep) * candidate.tanh()
