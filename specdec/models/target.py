"""The target: a Hugging Face causal LM that runs over the paged KV cache.

It finds the text decoder, the head and the final softcap of a model, and runs B * N packed rows through them under a
plan. Invariant: the user's module is never changed. A private copy over the same weights runs; any number of engines
and threads may share it.
"""

import logging
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.attention.bridge import ForwardContext, record_states
from specdec.attention.plan import KVPlan
from specdec.errors import SpecDecError, UnsupportedModelError
from specdec.gpu.operations import KERNELS, Operations
from specdec.gpu.ranks import Ranks
from specdec.kvcache.frozen import KVView
from specdec.kvcache.layer_context import EarlyExit, Narrowing
from specdec.kvcache.layout import KVLayout
from specdec.layers.decoder import FusedDecoder
from specdec.layers.description.decoder_parts import DecoderParts, Unfusable
from specdec.layers.description.merge import held_storages
from specdec.layers.fuse import fuse, fuse_linear
from specdec.models.batch_invariance import VectorwiseMode, rowwise
from specdec.models.described_model import DescribedModel, GeometryContext
from specdec.models.paused_forward import collected, start_forward_of
from specdec.models.placeholders import Placeholders, find_placeholders
from specdec.models.probe import (
    LogitRule,
    ProbeResult,
    depends_on_others,
    logit_rules,
    probe_texts,
    prove,
    refusing,
    require_finite,
)
from specdec.models.shared_weights import describe_divisible, difference_on_ranks, on_ranks, share_among
from specdec.modules.private_copy import private_copy
from specdec.modules.transformers_names import layers_of
from specdec.modules.weight_watch import Weights
from specdec.sampling.softcap import softcap

logger = logging.getLogger("specdec")


class StatesNeeded(Enum):
    """The tokens of a prompt forward whose states after the final norm are computed."""

    EVERY = "of every token"
    LAST = "of the last token of each run"
    NONE = "of no token"


class TargetModel(DescribedModel):
    """A causal LM, probed and ready to run.

    Raises UnsupportedModelError if the model cannot run exactly over a paged cache: every layer is probed.

    ops: operations of fused layers; None: transformers' modules run. `unfused`: why fused layers do not run; None: they
        run.
    deterministic: the bits of a row do not depend on the other rows of a forward; this is checked at construction.
        Fused layers on kernels have this property; the products of all others run in tiles of rows (`in_tiles`).
    ranks: devices that share its layers. The model is probed where it is (such as in host memory), then the shares are
        compared with it. Raises ConfigError if the layers cannot be divided.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ops: Operations | None = None,
        *,
        deterministic: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(getattr(model.config, "_name_or_path", "") or type(model).__name__, model, placed=True)
        self.given_ops = ops
        self.deterministic = deterministic
        self.in_tiles = False
        self.ops = ops = rowwise(ops) if deterministic else ops
        self.ranks = ranks
        self.placeholders = Placeholders()
        if ranks is not None:  # before the probe, which may take minutes in host memory
            with refusing(self.name, "its layers cannot be shared"):
                parts = describe_divisible(self.name, self.decoder, ops, ranks)
        proof = self._probe()
        self.windows: Sequence[int | None] = tuple(spec.window for spec in self.layout.layers)
        self.last_storing_layer = max(spec.owner for spec in self.layout.layers)
        self.logit_rule: LogitRule = proof.rule
        self.unfused: str | None = "it was made without operations for fused layers"
        whole = self.decoder, self.head
        if ranks is not None:
            self._share(parts, proof, ranks)
            self.unfused = None
        elif ops is not None:
            self.unfused = self._fuse(ops, proof)
        # a state into which a part has folded its tokens cannot be read again
        self.start_forward = None if self.recurrent else start_forward_of(self.decoder, proof)
        self.in_tiles = deterministic and (self.unfused is not None or ops is not KERNELS)
        if deterministic:
            self._prove_bits()
        ordinary = probe_texts(model.config, self.vocab_size)[0, 0]
        self.placeholders = find_placeholders(model, self.user_decoder, ordinary.to(self.home), self.device)
        record_states(list(layers_of(self.decoder) or ()))
        if ranks is None:
            running = self.decoder, self.head
            self.weights = Weights(self.name, *running, original=self.original, copy_again=self._copy_again)
        else:
            self.weights = Weights(self.name, *whole, original=self.original, split=True)

    def as_deterministic(self) -> "TargetModel":
        """Returns this model in deterministic form (itself, if it is already)."""
        return self if self.deterministic else TargetModel(self.model, self.ops, deterministic=True, ranks=self.ranks)

    def on_ranks(self, ranks: Ranks) -> "TargetModel":
        """Returns this model with its layers divided among ranks; the user's model stays whole where it is. Raises
        ConfigError or UnsupportedModelError if they cannot be divided."""
        return TargetModel(self.model, self.given_ops, deterministic=self.deterministic, ranks=ranks)

    def _copy_again(self) -> Weights:
        """Copy and probe the user's modules again after they changed. Returns the new weights.

        If they cannot be served or the K/V would not fit, raises UnsupportedModelError and changes nothing."""
        logger.info("%s: modules, hooks or adapters have changed; it is copied and proved again", self.name)
        new = TargetModel(self.model, self.given_ops, deterministic=self.deterministic)
        for what, now, before in (
            ("layers", new.layout, self.layout),
            ("vocabulary", new.vocab_size, self.vocab_size),
            ("dtype", new.dtype, self.dtype),
            ("device", new.device, self.device),
        ):
            if now != before:
                raise UnsupportedModelError(
                    f"the {what} of {self.name} changed after its engine was made, so its K/V no longer fit; make a "
                    f"new engine{'' if what == 'layers' else f' ({before} before, {now} now)'}"
                )
        vars(self).update({**vars(new), "weights": self.weights})
        return new.weights

    @property
    def stored_layout(self) -> KVLayout:
        """Layout of the K/V that one device stores."""
        return self.layout if self.ranks is None else self.layout.share(len(self.ranks))

    @property
    def max_position_embeddings(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def max_positions(self) -> int | None:
        """Positions below this can be computed; None: all."""
        return self.context_length.end

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices of the model, in the order of ranks."""
        if self.ranks is not None:
            return self.ranks.devices
        weight: torch.Tensor = self.embed.weight  # type: ignore[assignment]
        return (weight.device,)

    @property
    def dtype(self) -> torch.dtype:
        weight: torch.Tensor = self.embed.weight  # type: ignore[assignment]
        return weight.dtype

    def narrows_at(self, aux_layers: Sequence[int] = ()) -> int | None:
        """The layer after which a forward over prompts may continue with fewer tokens: those whose final states are
        needed.

        It is the last layer that stores K/V, or the last of `aux_layers` if that is later. None: `aux_layers` includes
        the last layer's output, or layers are not fused.
        """
        layer = max((self.last_storing_layer, *aux_layers))
        if layer >= len(self.layout.layers) or self.in_tiles or not isinstance(self.decoder, FusedDecoder):
            return None
        return layer

    def forward(
        self,
        tokens: torch.Tensor,
        plan: KVPlan,
        view: KVView,
        aux_layers: Sequence[int] = (),
        last_plan: KVPlan | None = None,
        *,
        kv_only: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run tokens [B, N] under `plan` and write their K/V.

        Returns states after the final norm [B, N, H], and the concatenated states that enter `aux_layers` (num_layers:
        the last layer's output) [B, N, A * H], or None. last_plan: the plan of `plan_last` for the pack of `plan`, with
        R runs. After layer `narrows_at` only the last token of each run continues, and the final states are theirs, [1,
        R, H]. kv_only: no token continues after that layer; the final states are zeros [B, 1, H].
        """
        context, narrowing = self._context(plan, view, aux_layers, last_plan, kv_only=kv_only)
        hidden = self.run(tokens, plan.positions, context, narrowing)
        return hidden, collected(context, aux_layers, tokens.shape)

    @property
    def can_pause(self) -> bool:
        """Can a forward pause between two layers? Not in tiles, nor on several devices."""
        return self.start_forward is not None and not self.in_tiles and self.ranks is None

    def forward_in_parts(
        self,
        tokens: torch.Tensor,
        plan: KVPlan,
        view: KVView,
        aux_layers: Sequence[int],
        layer_ends: Sequence[int],
        last_plan: KVPlan | None = None,
        *,
        kv_only: bool = False,
    ) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor | None]]:
        """`forward`, paused after each part but the last; each ends before a layer of `layer_ends`. Requires
        `can_pause`, and the inference mode of the caller."""
        assert self.can_pause and self.start_forward is not None
        context, narrowing = self._context(plan, view, aux_layers, last_plan, kv_only=kv_only)
        paused = self.start_forward(*self._decoder_inputs(tokens, plan.positions), context, narrowing)
        for end in layer_ends:
            paused.advance(end)
            if end < layer_ends[-1]:
                yield
        return self._unpack_states(paused.finish(), len(tokens)), collected(context, aux_layers, tokens.shape)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., H] -> logits [..., V] in the model's dtype, scaled and softcapped like the model's."""
        with self._mode():
            logits = self.head(hidden)
            return self.logit_rule(logits) if self.ops is None else self.logit_rule(logits, self.ops(softcap))

    def uncapped_logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, float | None]:
        """Logits before the softcap, and the cap or None. Only on a GPU, where rows need no tiles."""
        assert not self.in_tiles
        return self.logit_rule.scaled(self.head(hidden)), self.logit_rule.softcap

    def _mode(self) -> AbstractContextManager[object]:
        return VectorwiseMode() if self.in_tiles else nullcontext()

    def _context(
        self, plan: KVPlan, view: KVView, aux_layers: Sequence[int], last_plan: KVPlan | None, *, kv_only: bool
    ) -> tuple[ForwardContext, Narrowing | EarlyExit | None]:
        """The context of a forward with the weights as they are now, and where it continues with fewer tokens."""
        self.weights.generation()
        context = ForwardContext.from_plan(plan, view, self.windows, aux_layers)
        if last_plan is None and not kv_only:
            return context, None
        layer = self.narrows_at(aux_layers)
        assert layer is not None, f"no layer can be skipped: {aux_layers=}"
        if last_plan is None:
            return context, EarlyExit(layer)
        assert plan.pack is not None, "only the last token of a run goes on alone"
        return context, Narrowing(layer, plan.pack.last, ForwardContext.from_plan(last_plan, view, self.windows))

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: object,
        narrowing: Narrowing | EarlyExit | None = None,
    ) -> torch.Tensor:
        """tokens, positions [B, N] -> states after the final norm [B, N, H]; with `narrowing`, of fewer rows."""
        ids, places = self._decoder_inputs(tokens, positions)
        narrowed = {} if narrowing is None else {"narrowing": narrowing}
        with self._mode():
            out = self.decoder(input_ids=ids, position_ids=places, use_cache=False, specdec_ctx=context, **narrowed)
        return self._unpack_states(out.last_hidden_state, len(tokens))

    def _decoder_inputs(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pack tokens, positions [B, N] for the decoder: [1, B * N]."""
        tokens = self.placeholders.replaced_in(tokens)
        if self.max_positions is not None:  # for drafts and padding after the end, whose output is not read
            positions = positions.clamp(max=self.max_positions - 1)
        return tokens.reshape(1, -1), positions.reshape(1, -1)

    def _unpack_states(self, hidden: torch.Tensor | None, batch: int) -> torch.Tensor:
        """The decoder's result as [B, N, H]; zeros if the forward ended early (None)."""
        if hidden is None:
            hidden = torch.zeros((1, batch, self.hidden_size), dtype=self.dtype, device=self.device)
        return hidden.view(batch, -1, hidden.shape[-1])

    def _fuse(self, ops: Operations, proof: ProbeResult) -> str | None:
        """Replace the decoder's layers and the head's product by fused ones. Returns the reason if that is
        impossible."""
        plain = decoder, head = self.decoder, self.head
        held = held_storages(decoder)  # keep until the comparison is done
        level = logging.WARNING
        try:
            with refusing(self.name, "its fused layers do not run"), torch.inference_mode():
                self.decoder, self.head = fuse(decoder, ops), fuse_linear(head, ops)
                with torch.autocast(self.device.type, enabled=False):
                    what = proof.difference(self.run)
                    if what is None and not proof.tolerance.holds(self.head(proof.states), head(proof.states), 0):
                        what = "the logits"
            reason = None if what is None else f"{what} of its fused layers are not {type(decoder).__name__}'s own"
        except UnsupportedModelError as error:
            reason = str(error)
            level = logging.INFO if isinstance(error, Unfusable) else level
        if reason is not None:
            self.decoder, self.head = plain  # weights may stay merged: views with the same values
            logger.log(level, "%s runs unfused: %s", self.name, reason)
        del held
        return reason

    def _share(self, parts: DecoderParts, proof: ProbeResult, ranks: Ranks) -> None:
        """Place shares of the decoder and the head on ranks, and check them. Raises like the class."""
        decoder, head = self.decoder, self.head
        assert self.ops is not None, "a described decoder has operations"
        with refusing(self.name, "its shared layers do not run"), torch.inference_mode():
            self.decoder, self.head = share_among(parts, decoder, head, self.ops, ranks)
            self.embed = self.decoder.get_input_embeddings()
            with torch.autocast(self.device.type, enabled=False):
                what = difference_on_ranks(proof, self.run, ranks, self.head, head)
        if what is not None:
            reason = f"{what} of its shared layers are not {type(decoder).__name__}'s own"
            raise UnsupportedModelError(f"tensor_parallel={len(ranks)} cannot split {self.name}: {reason}")

    @torch.inference_mode()
    def _prove_bits(self) -> None:
        """Raise UnsupportedModelError unless the bits of a row are independent of the other rows of a forward."""
        if self.in_tiles and self.device.type != "cpu":
            raise UnsupportedModelError(
                f"deterministic=True on {self.device} needs fused layers on Triton kernels; {self.name} runs without: "
                f"{self.unfused or 'its operations are the reference'}; use deterministic=False"
            )
        texts = probe_texts(self.model.config, self.vocab_size).to(self.device)
        run = self.run if self.ranks is None else on_ranks(self.run, self.ranks)
        with torch.autocast(self.device.type, enabled=False), refusing(self.name, "it does not run row by row"):
            what = depends_on_others(self.name, self.layout, texts, run, self.logits)
        if what is not None:
            raise UnsupportedModelError(
                f"{self.name}: {what} of a token depend on the other rows of a forward in the last bits, so "
                "deterministic=True cannot be kept; use deterministic=False"
            )

    def _own_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the model's own forward: tokens [B, T] -> [B, T, V]."""
        kind = type(self.model).__name__
        with refusing(self.name, f"{kind} does not run a forward of its own over text"):
            model: Any = private_copy(self.model, "eager")
            logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
            require_finite(self.name, self.model, logits)
            return logits

    @torch.inference_mode()
    def _probe(self) -> ProbeResult:
        """Measure each layer's K/V, check that the model can be served, and find its logit rule."""
        kind = type(self.model).__name__
        texts = probe_texts(self.model.config, self.vocab_size).to(self.home)
        unpaged = f"{kind} does not run through the attention interface of transformers"

        try:
            with torch.autocast(self.home.type, enabled=False), refusing(self.name, unpaged):
                geometry = GeometryContext()
                self.run(texts[:1], torch.arange(texts.shape[1], device=self.home)[None], geometry)
                self.layout = geometry.measured(self.layout, self.context_length.max_len)
                return prove(
                    self.name,
                    self.layout,
                    texts,
                    run=self.run,
                    head=self.head,
                    own=self._own_logits,
                    rules=logit_rules(self.config),
                    exact=self.home.type == "cpu" and not getattr(self.model, "is_quantized", False),
                )
        except UnsupportedModelError:
            raise
        except SpecDecError as error:  # from our attention function, if called without its context
            dropped = "(it drops the keyword arguments of a forward)"
            raise UnsupportedModelError(f"{self.name}: {unpaged} {dropped}") from error
