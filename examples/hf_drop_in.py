"""From `model.generate` to `specdec.generate`: one changed line, the same tensor, sooner.

    python examples/hf_drop_in.py                                  # the bundled pair
    python examples/hf_drop_in.py --target google/gemma-4-E4B-it --assistant google/gemma-4-E4B-it-assistant

Model, assistant and tokenizer are loaded by transformers and know nothing of specdec. The last line says whether the
two calls returned the same tensor; the exit code is 1 if not.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

import specdec
from specdec.draft_models.gemma4_mtp import constructible_assistants
from specdec.draft_models.registry import NAMES
from specdec.errors import SpecDecError
from specdec.models.published import BUNDLED_NAMES, resolve_name

PROMPTS = (
    "Tom has 3 boxes of 12 pencils. He gives away 7 pencils. How many pencils are left?",
    "One machine makes 8 toys an hour. A workshop runs 7 such machines for 8 hours. How many toys does it make?",
    "Amelia is 19 years old. Colin is twice as old as Amelia. How old is Colin?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny-gemma4", help="hub id, folder or bundled name")
    parser.add_argument(
        "--assistant", default="tiny-gemma4-mtp", help=f"hub id, folder or bundled name, or one of {', '.join(NAMES)}"
    )
    parser.add_argument("--max-new-tokens", type=int, default=96)
    args = parser.parse_args()
    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens {args.max_new_tokens}: at least one token is expected")
    try:
        compare(args)
    except (SpecDecError, OSError) as error:
        parser.error(str(error))


def compare(args: argparse.Namespace) -> None:
    if args.target in BUNDLED_NAMES:
        transformers_logging.disable_progress_bar()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "auto" if device == "cuda" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(resolve_name(args.target), padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(resolve_name(args.target), dtype=dtype).to(device).eval()
    assistant = args.assistant
    if assistant not in NAMES:
        with constructible_assistants():  # some releases of transformers refuse to build an assistant
            assistant = AutoModelForCausalLM.from_pretrained(resolve_name(assistant), dtype=dtype).to(device).eval()

    batch = tokenizer.apply_chat_template(
        [[{"role": "user", "content": prompt}] for prompt in PROMPTS],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        padding=True,
    ).to(device)
    input_ids, mask = batch["input_ids"], batch["attention_mask"]
    settings = {"max_new_tokens": args.max_new_tokens, "do_sample": False}

    def before() -> torch.Tensor:
        return model.generate(input_ids, attention_mask=mask, **settings)

    def after() -> torch.Tensor:
        return specdec.generate(model, assistant, input_ids, attention_mask=mask, **settings)  # the changed line

    results, seconds = [], []
    for generate in (before, after):
        generate()  # warm up
        start = time.perf_counter()
        results.append(generate())
        seconds.append(time.perf_counter() - start)

    for prompt, row in zip(PROMPTS, results[1], strict=True):
        print(f"{prompt}\n{tokenizer.decode(row[input_ids.shape[1] :], skip_special_tokens=True)}\n")
    same = torch.equal(*results)
    print(f"model.generate    {seconds[0]:6.2f} s")
    print(f"specdec.generate  {seconds[1]:6.2f} s, {seconds[0] / seconds[1]:.2f}x")
    print(f"identical to model.generate: {'yes' if same else 'NO'}, {tuple(results[1].shape)}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
