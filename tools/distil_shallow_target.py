"""Makes the target of 10 layers that tests use in the place of the bundled one of 30.

    python tools/distil_shallow_target.py --out tests/shallow_target      some minutes on one core of a CPU

It has ten of the bundled target's layers, and is trained on generated word problems to say what all thirty say
(divergence of their tokens) and to hold the states that drafters read (the last one, and the three of the EAGLE-3
head), so that the bundled drafters fit it. `tests/shallow_pair.py` puts it in its place; it is no part of the package.
"""

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec.models.bundled import BUNDLED_DIR

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from tiny_gemma4_data import PAD, TURN_END, prompt_text
from word_problems import heldout_questions, stream

KEPT = (0, 2, 4, 7, 9, 13, 18, 19, 27, 29)
"""Layers of both kinds that own K/V, with the last of each, whose K/V others borrow, and one of each that borrows."""
READ = (1, 14, 26)
"""Layers whose outputs the EAGLE-3 head reads."""


def place(layer: int) -> int:
    """The index, among the kept layers, of the one after which the state stands for that after `layer`."""
    return sum(kept <= layer for kept in KEPT) - 1


def config_of(config: dict[str, object]) -> dict[str, object]:
    layers, heads, types = config["num_hidden_layers"], config["per_layer_config"], config["layer_types"]
    owners = layers - config["num_kv_shared_layers"]
    return config | {
        "num_hidden_layers": len(KEPT),
        "layer_types": [types[layer] for layer in KEPT],
        "num_kv_shared_layers": sum(layer >= owners for layer in KEPT),
        "per_layer_config": {f"{i:02}": heads[f"{k:02}"] for i, k in enumerate(KEPT) if f"{k:02}" in heads},
    }


def kept_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    kept = {}
    for name, weight in weights.items():
        _, found, rest = name.partition("model.layers.")
        layer, _, part = rest.partition(".")
        if name == "model.embed_tokens_per_layer.weight":  # [V, layers * width]
            weight = weight.unflatten(1, (30, -1))[:, list(KEPT)].flatten(1)
        elif name == "model.per_layer_model_projection.weight":  # [layers * width, hidden]
            weight = weight.unflatten(0, (30, -1))[list(KEPT)].flatten(0, 1)
        if not found:
            kept[name] = weight
        elif int(layer) in KEPT:
            kept[f"model.layers.{KEPT.index(int(layer))}.{part}"] = weight
    return kept


def write(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((BUNDLED_DIR / "tiny-gemma4" / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config_of(config), indent=2) + "\n", "utf-8")
    rounded = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(rounded, folder / "model.safetensors", {"format": "pt"})


def loss_of(student: PreTrainedModel, teacher: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    """Loss of a batch of padded rows: how far tokens and states are from the teacher's."""
    real = ids != PAD
    mine = student(ids, use_cache=False, output_hidden_states=True)
    with torch.no_grad():
        wanted = teacher(ids, use_cache=False, output_hidden_states=True)
    said, meant = mine.logits[real].log_softmax(-1), wanted.logits[real].log_softmax(-1)
    parts = [F.kl_div(said, meant, reduction="batchmean", log_target=True)]
    for layer, at in [(layer, place(layer) + 1) for layer in READ] + [(29, len(KEPT))]:
        state, target = mine.hidden_states[at][real], wanted.hidden_states[layer + 1][real]
        parts.append(F.mse_loss(state, target) / target.var())
    right = (said.argmax(-1) == meant.argmax(-1)).float().mean()
    return parts[0] + 0.5 * sum(parts[1:]), [*(float(part.detach()) for part in parts), float(right)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    bundled = BUNDLED_DIR / "tiny-gemma4"
    write(args.out, kept_weights(load_file(bundled / "model.safetensors")))
    teacher = AutoModelForCausalLM.from_pretrained(bundled, dtype=torch.float32).eval()
    student = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
    tokenizer, problems = AutoTokenizer.from_pretrained(bundled), stream(10, heldout_questions())
    optimizer = torch.optim.AdamW(student.parameters(), args.lr, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps, pct_start=0.1)
    for step in range(args.steps):
        texts = [(prompt_text(each["question"]), each["answer"]) for each in islice(problems, args.rows)]
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        rows = [torch.tensor([*encode(asked), *encode(answer), TURN_END]) for asked, answer in texts]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        loss, parts = loss_of(student, teacher, ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 10 == 0 or step + 1 == args.steps:
            print(step, " ".join(f"{part:.3f}" for part in parts), flush=True)
        if step % 50 == 49 or step + 1 == args.steps:
            names = load_file(args.out / "model.safetensors").keys()
            state = student.state_dict()
            write(args.out, {name: state[name].detach() for name in names})


if __name__ == "__main__":
    main()
