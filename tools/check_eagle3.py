"""Compare EAGLE-3 heads with the modules of the packages that train them: speculators and SpecForge.

For a grid of flags a random head is made by the package, saved in the package's own format, read here, and run beside
the package's module over several draft steps of its training-time test: what leaves the layers, the logits, what is fed
back. Knows nothing of the engine. The packages are imported when they are asked for:

    pip install --no-deps speculators==0.9.0 specforge==0.2.0   # then what they miss: openai aiohttp loguru ...
    python tools/check_eagle3.py
"""

import argparse
import contextlib
import importlib.metadata
import io
import itertools
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console
from rich.table import Table

from specdec.draft_models.checkpoints.checkpoint_files import TargetShape
from specdec.draft_models.eagle3.checkpoint import read_head
from specdec.draft_models.eagle3.head import Eagle3Head, embed_raw
from specdec.errors import SpecDecError

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 32, 4, 2, 16, 48
VOCAB, DRAFT_VOCAB, LAYERS, LENGTH = 96, 40, 8, 24
TOLERANCE = 1e-5  # of float32 norms and rotations, against the largest number of its kind
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
}
Flags = dict[str, Any]


class Steps(NamedTuple):
    """Records every draft step: a and what is fed back [T, H], logits [T, draft V]."""

    a: list[torch.Tensor]
    logits: list[torch.Tensor]
    fed_back: list[torch.Tensor]


class Chains:
    """`Attend` of the training-time test: a row sees the first step's keys up to its own, and its own later keys."""

    def __init__(self, head: Eagle3Head) -> None:
        self.windows, self.scaling = head.spec.windows, head.spec.head_dim**-0.5
        self.k: list[list[torch.Tensor]] = [[] for _ in self.windows]
        self.v: list[list[torch.Tensor]] = [[] for _ in self.windows]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        self.k[layer].append(k.repeat_interleave(group, 1))
        self.v[layer].append(v.repeat_interleave(group, 1))
        steps, length = len(self.k[layer]), q.shape[2]
        row = torch.arange(length)
        behind = row[:, None] - row
        seen = behind >= 0
        if self.windows[layer] is not None:  # of rows, as both packages train, not of positions
            seen = seen & (behind < self.windows[layer])
        visible = torch.cat([seen, *[torch.eye(length, dtype=torch.bool)] * (steps - 1)], dim=1)
        scores = q @ torch.cat(self.k[layer], dim=2).mT * self.scaling
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return (weights @ torch.cat(self.v[layer], dim=2)).transpose(1, 2)


def shifted(tokens: torch.Tensor, by: int) -> torch.Tensor:
    return torch.cat([tokens[by:], tokens.new_zeros(by)])


@torch.no_grad()
def run_specdec(head: Eagle3Head, states: torch.Tensor, tokens: torch.Tensor, steps: int) -> Steps:
    """states [T, A * H] and tokens [T], row i holding token i + 1."""
    assert head.embed_tokens is not None, "both packages save the table"
    attend, found = Chains(head), Steps([], [], [])
    hidden = head.features(states[None])
    for step in range(steps):
        embeds = embed_raw(head.embed_tokens.weight, shifted(tokens, step)[None])
        a = head(embeds, hidden, torch.arange(LENGTH)[None] + step, attend)
        hidden = head.feedback(a)
        for kept, x in zip(found, (a, head.logits(a), hidden), strict=True):
            kept.append(x[0])
    return found


def randomise(module: torch.nn.Module, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        noise = torch.randn(weight.shape, generator=rng)
        if name.endswith("bias"):
            weight.data = 0.3 * noise
        else:
            weight.data = 1 + 0.3 * noise if weight.ndim == 1 else noise * 1.5 * weight.shape[-1] ** -0.5


def draft_vocabulary(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(d2t, t2d) of every other token."""
    ids = torch.arange(size) * (VOCAB // size)
    return ids - torch.arange(size), torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)


def layer_fields(flags: Flags) -> dict[str, Any]:
    """Llama fields that both packages take."""
    rope = ROPES[flags.get("rope", "default")] | {"rope_theta": 10000.0}
    fields = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    fields |= {"head_dim": HEAD_DIM, "intermediate_size": INNER, "vocab_size": VOCAB, "rope_parameters": rope}
    fields |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": flags.get("hidden_act", "silu")}
    return fields | {key: flags[key] for key in ("sliding_window", "layer_types", "use_sliding_window") if key in flags}


class Speculators:
    """Heads of speculators, as its own class makes, saves and runs them."""

    name = "speculators"

    @staticmethod
    def grid() -> Iterator[Flags]:
        norms: tuple[Flags, ...] = ({}, {"norm_before_fc": True}, {"fc_norm": True})
        for kind, before, norm, output in itertools.product(("llama", "qwen3"), (False, True), norms, (False, True)):
            yield {"kind": kind, "norm_before_residual": before, **norm, "norm_output": output}
        for kind in ("llama", "qwen3"):
            for rope in ("linear", "llama3", "yarn"):
                yield {"kind": kind, "rope": rope}
            yield {"kind": kind, "sliding_window": 5}
            yield {"kind": kind, "layers": 2, "sliding_window": 5, "layer_types": ["full", "sliding"]}
            yield {"kind": kind, "layers": 2, "norm_before_residual": True, "norm_output": True}
            yield {"kind": kind, "draft_vocab": VOCAB}
            yield {"kind": kind, "aux": 4, "fc_norm": True}
            yield {"kind": kind, "attention_bias": True, "hidden_act": "gelu"}
        yield {"kind": "qwen3", "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}

    def make(self, flags: Flags, folder: Path, seed: int) -> Callable[[torch.Tensor, torch.Tensor, int], Steps]:
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig

        fields = layer_fields(flags) | {"num_hidden_layers": flags.get("layers", 1)}
        if "layer_types" in flags:
            fields |= {"layer_types": [f"{kind}_attention" for kind in flags["layer_types"]]}
            fields |= {"use_sliding_window": True}
        fields |= {key: flags[key] for key in ("attention_bias", "max_window_layers") if key in flags}
        kind = transformers.LlamaConfig if flags["kind"] == "llama" else transformers.Qwen3Config
        layer_config = kind(**fields)
        layer_config._attn_implementation = "eager"
        norms = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        size = flags.get("draft_vocab", DRAFT_VOCAB)
        model = Eagle3DraftModel(
            Eagle3SpeculatorConfig(
                transformer_layer_config=layer_config,
                draft_vocab_size=size,
                eagle_aux_hidden_state_layer_ids=[2, 4, 5, 7][: flags.get("aux", 3)],
                speculators_config=SpeculatorsConfig(
                    algorithm="eagle3",
                    proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
                    default_proposal_method="greedy",
                    verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
                ),
                **{key: flags[key] for key in norms if key in flags},
            )
        ).eval()
        randomise(model, seed)
        if size < VOCAB:
            d2t, t2d = draft_vocabulary(size)
            model.load_vocab_mappings(t2d, d2t)
        model.save_pretrained(folder)

        def run(states: torch.Tensor, tokens: torch.Tensor, steps: int) -> Steps:
            found = Steps([], [], [])
            hooks = [
                model.layers[-1].register_forward_hook(lambda m, args, out: found.a.append(out[0])),
                model.lm_head.register_forward_hook(lambda m, args, out: found.logits.append(out[0])),
                model.rotary_emb.register_forward_pre_hook(  # is given cat[embeds, hidden]
                    lambda m, args: found.fed_back.append(args[0][0, :, HIDDEN:])
                ),
            ]
            ids = torch.zeros(1, LENGTH, dtype=torch.long)
            model(hidden_states=states[None], input_ids=tokens[None], document_ids=ids, ttt_steps=steps + 1)
            for hook in hooks:
                hook.remove()
            return Steps(found.a[:steps], found.logits[:steps], found.fed_back[1:])

        return run


class SpecForge:
    """Heads of SpecForge's Llama class."""

    name = "specforge"

    @staticmethod
    def grid() -> Iterator[Flags]:
        outputs: tuple[Flags, ...] = ({}, {"norm_output": True}, {"norm_output": False})
        for output, fc_norm, rope in itertools.product(outputs, (False, True), ROPES):
            yield {**output, "fc_norm": fc_norm, "rope": rope}
        yield {"sliding_window": 5}
        yield {"sliding_window": 5, "use_sliding_window": True}
        yield {"draft_vocab": VOCAB}
        yield {"target_hidden_size": HIDDEN + 16, "fc_norm": True}
        yield {"hidden_act": "gelu"}

    def make(self, flags: Flags, folder: Path, seed: int) -> Callable[[torch.Tensor, torch.Tensor, int], Steps]:
        from specforge.modeling.auto import AutoDraftModelConfig
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

        size = flags.get("draft_vocab", DRAFT_VOCAB)
        written = layer_fields(flags) | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
        written |= {"draft_vocab_size": size, "pad_token_id": 0, "tie_word_embeddings": False}
        written |= {key: flags[key] for key in ("norm_output", "fc_norm", "target_hidden_size") if key in flags}
        (folder / "given.json").write_text(json.dumps(written), "utf-8")
        model = LlamaForCausalLMEagle3(AutoDraftModelConfig.from_file(str(folder / "given.json"))).eval()
        randomise(model, seed)
        if flags.get("norm_output") is False:  # this version reads nothing after its norm, so that stays as it was made
            torch.nn.init.ones_(model.norm.weight)
        if size < VOCAB:
            model.d2t, model.t2d = draft_vocabulary(size)
        model.save_pretrained(folder)

        def run(states: torch.Tensor, tokens: torch.Tensor, steps: int) -> Steps:
            found, keys = Steps([], [], []), [[], []]
            mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
            hidden = model.project_hidden_states(states[None])
            for step in range(steps):
                hidden = model.backbone(
                    input_embeds=model.embed_input_ids(shifted(tokens, step)[None]),
                    hidden_states=hidden,
                    cache_hidden=keys,
                    attention_mask=mask,
                    position_ids=torch.arange(LENGTH)[None],
                )
                for kept, x in zip(found, (hidden, model.compute_logits(hidden), hidden), strict=True):
                    kept.append(x[0])
            return found

        return run


def relative_gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def compare(package: Any, flags: Flags, steps: int, seed: int) -> tuple[float, float, float]:
    """Largest relative gaps of a, logits and feedback, over all rows and steps. Raises SpecDecError when refused."""
    width = flags.get("target_hidden_size", HIDDEN)
    target = TargetShape(name="random", num_layers=LAYERS, hidden_size=width, vocab_size=VOCAB)
    rng = torch.Generator().manual_seed(seed)
    states = torch.randn(LENGTH, flags.get("aux", 3) * width, generator=rng)
    tokens = torch.randint(VOCAB, (LENGTH,), generator=rng)
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run = package.make(flags, Path(folder), seed)
        with torch.no_grad():
            theirs = run(states, tokens, steps)
        head = read_head(folder, target).head.eval()
    ours = run_specdec(head, states, tokens, steps)
    assert all(len(x) == len(y) == steps for x, y in zip(ours, theirs, strict=True))
    gaps = [relative_gap(torch.stack(x), torch.stack(y)) for x, y in zip(ours, theirs, strict=True)]
    return gaps[0], gaps[1], gaps[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", help="speculators, specforge; default: both")
    parser.add_argument("--steps", type=int, default=4, help="draft steps")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # both packages compile small functions, no use for a comparison
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("specdec").setLevel(logging.ERROR)  # the two readings of norm_output are what is checked
    console, wrong, checked = Console(width=120), 0, 0
    for package in (Speculators(), SpecForge()):
        if args.packages and package.name not in args.packages:
            continue
        try:
            version = importlib.metadata.version(package.name)
        except importlib.metadata.PackageNotFoundError:
            console.print(f"{package.name} is not installed: pip install --no-deps {package.name}")
            continue
        table = Table("flags", "layers", "logits", "feedback", "", title=f"{package.name} {version}")
        for flags in package.grid():
            said = ", ".join(f"{key}={value}" for key, value in flags.items()) or "none"
            try:
                gaps = compare(package, flags, args.steps, args.seed)
            except SpecDecError as error:
                table.add_row(said, "", "", "", f"refused: {error}")
                wrong += 1
                continue
            except ModuleNotFoundError as error:
                console.print(f"{package.name} needs {error.name}: pip install {error.name}")
                return 2
            good = max(gaps) < TOLERANCE
            checked, wrong = checked + 1, wrong + (not good)
            table.add_row(said, *(f"{gap:.1e}" for gap in gaps), "equal" if good else "DIFFERENT")
        console.print(table)
    console.print(
        f"{checked} heads compared over {args.steps} draft steps, {wrong} wrong; torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
    return int(wrong > 0) if checked else 2


if __name__ == "__main__":
    sys.exit(main())
