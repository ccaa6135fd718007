"""Runs MTP modules' drafts from every place of texts in a few dense forwards, for training and measurement.

    place p, draft j + 1     token t_{p+1+j}, the text's own; predicts t_{p+2+j}
    state                    j = 0: the target's at row p           j > 0: the state that row (p, j - 1) passes on

One module (form R) runs again for each draft; a place's rows see keys of true states up to p and their own keys, as in
the draft block. Several modules run over the whole text one after another, since their rows depend only on the tokens.
Nothing is paged. Several texts may be packed into a row; position 0 begins a text.
"""

from collections.abc import Iterator, Sequence

import torch

from specdec.attention.bridge import AttentionCall
from specdec.attention.draft_attention import ChainAttention
from specdec.draft_models.native_mtp.mtp_drafter import ModuleRows, NativeMtpDrafter


class ChainContext:
    """A forward context for modules over positions [B, T], whose layers run packed rows."""

    def __init__(self, windows: Sequence[int | None], pos: torch.Tensor) -> None:
        self.batch = len(pos)
        self.chains = ChainAttention(windows, 1.0, pos)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return call.answer(self, *call.rows())

    def destination(self, layer: int) -> None:
        """None: nothing is stored."""

    def attend_tokens(
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
    """States [B, T, H] from which draft 1, 2, ... is drawn, at each place of tokens and pos [B, T].

    states: of the target, [B, T, H], as the drafter's conventions require. places [P]: only these places are used.
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
