"""Drafts of MTP modules after every place of texts, in a few dense forwards, for training and for measurement.

    place p, draft j + 1     token t_{p+1+j}, the text's own; predicts t_{p+2+j}
    state                    j = 0: the target's, of row p          j > 0: what row (p, j - 1) hands on

One module (form R) runs again for each draft; the rows of a place see keys of true states up to p, and their own, as in
the draft block. With several modules, each runs over the whole text: its rows follow from the tokens alone. Nothing is
paged. Texts may be packed into rows: position 0 begins one.
"""

from collections.abc import Iterator, Sequence

import torch

from specdec.attention.bridge import AttentionCall
from specdec.attention.draft_attention import ChainAttention
from specdec.draft_models.native_mtp.mtp_drafter import ModuleRows, NativeMtpDrafter


class ChainContext:
    """Attention of modules over positions [B, T], for layers that run packed rows."""

    def __init__(self, windows: Sequence[int | None], pos: torch.Tensor) -> None:
        self.batch = len(pos)
        self.chains = ChainAttention(windows, 1.0, pos)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return call.answer(self, *call.rows())

    def destination(self, layer: int) -> None:
        """Nothing is stored."""

    def attend_rows(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        *,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [B * T, Hq, D], k and v [B * T, Hkv, D] -> [B * T, Hq, D]."""
        assert k is not None and v is not None, "a module has K/V of its own"
        q, k, v = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q, k, v))
        return self.chains(layer, q * scaling, k, v, softcap, sinks).flatten(0, 1).contiguous()


def chained_rows(
    drafter: NativeMtpDrafter,
    tokens: torch.Tensor,
    states: torch.Tensor,
    pos: torch.Tensor,
    num_steps: int,
    places: torch.Tensor | None = None,
) -> Iterator[ModuleRows]:
    """Rows [B, T, H] that draft 1, 2, ... is drawn from, at each place of tokens and pos [B, T].

    states: of the target, [B, T, H], as the drafter's conventions say. places [P]: the only ones that are looked at.
    """
    recurrent = drafter.form == "R"
    context = ChainContext(drafter.windows, pos)
    at: slice | torch.Tensor = slice(None) if places is None else places
    here: slice | torch.Tensor = slice(None) if recurrent else at
    for step in range(num_steps):
        context.chains.step = step if recurrent else 0
        row_tokens, row_pos = tokens.roll(-1 - step, 1), pos + step
        if recurrent and step:
            row_tokens, row_pos = row_tokens[:, at], row_pos[:, at]
        out = drafter.run(0 if recurrent else step, row_tokens, states, row_pos, context)
        if recurrent and not step:
            context.chains.rows = places
            out = ModuleRows(*(part[:, at] for part in out))
        yield ModuleRows(*(part[:, here] for part in out))
        states = drafter.carried_state(out)
