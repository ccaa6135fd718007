"""Pairs of targets and drafters by short names: the bundled ones and those published on the hub, with settings and
the lengths that they are published to accept.

Steps of Gemma 4: the best of vLLM's figures for one H100 (PR 41745; 12B is not among them). Memory is for the weights
of both models, without encoders where these are quantised; the KV cache takes a share of the rest. Accepted lengths are
figures of others on their own data, there to be looked at; only those of bundled pairs were measured here.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedAcceptance:
    """num_steps: drafts a round. length: tokens a round, with the bonus. by_depth: share of the rounds that accepted
    drafts 1, 2, ..., where it is known. data, source: what it was measured on, and who says so."""

    num_steps: int
    length: float
    data: str
    source: str
    by_depth: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its drafter. num_steps: drafts a round. memory: weights of both in `dtype`; `quantised` ones of the
    target as they are stored."""

    name: str
    target: str
    drafter: str
    num_steps: int
    dtype: str
    memory: str
    quantised: str = ""

    @property
    def accepts(self) -> PublishedAcceptance | None:
        """None: no figure is known."""
        return ACCEPTED.get(self.drafter)


BUNDLED_MTP = Pair("tiny-gemma4", "tiny-gemma4", "tiny-gemma4-mtp", num_steps=4, dtype="float32", memory="0.05 GB")
BUNDLED_EAGLE3 = Pair("tiny-gemma4", "tiny-gemma4", "tiny-gemma4-eagle3", 4, "float32", "0.05 GB")
SMOLLM2 = Pair("SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-eagle3", 4, "float32", "0.6 GB")

GEMMA4_PAIRS = tuple(
    Pair(size, f"google/gemma-4-{size}-it", f"google/gemma-4-{size}-it-assistant", steps, "bfloat16", memory)
    for size, steps, memory in (
        ("E2B", 2, "12 GB"),
        ("E4B", 4, "18 GB"),
        ("12B", 4, "28 GB"),
        ("26B-A4B", 4, "59 GB"),
        ("31B", 8, "71 GB"),
    )
)
QAT_PAIRS = tuple(
    Pair(
        f"{size}-QAT",
        f"google/gemma-4-{size}-it-qat-w4a16-ct",
        f"google/gemma-4-{size}-it-qat-q4_0-unquantized-assistant",
        steps,
        "bfloat16",
        memory,
        "int4",
    )
    for size, steps, memory in (("E2B", 2, "6.8 GB"), ("E4B", 4, "9.5 GB"), ("12B", 4, "9.0 GB"), ("31B", 8, "20.3 GB"))
)
"""Targets trained for int4 (compressed-tensors), each with the assistant trained for it: that of the plain target is
accepted less."""
EAGLE3_PAIRS = tuple(
    Pair(name, target, head, steps, "bfloat16", memory, "MXFP4" if name.startswith("gpt-oss") else "")
    for name, target, head, steps, memory in (
        ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", 5, "17 GB"),
        ("Qwen3-8B", "Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.eagle3", 5, "18 GB"),
        ("Qwen3-32B", "Qwen/Qwen3-32B", "RedHatAI/Qwen3-32B-speculator.eagle3", 5, "69 GB"),
        ("gpt-oss-20b", "openai/gpt-oss-20b", "RedHatAI/gpt-oss-20b-speculator.eagle3", 3, "15 GB"),
        ("gpt-oss-120b", "openai/gpt-oss-120b", "lmsys/EAGLE3-gpt-oss-120b-bf16", 3, "70 GB"),
    )
)

BLOCK_PAIRS = tuple(
    Pair(name, target, drafter, steps, "bfloat16", memory, "MXFP4" if name.startswith("gpt-oss") else "")
    for name, target, drafter, steps, memory in (
        ("Qwen3-4B DFlash", "Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16", 15, "10 GB"),
        ("Qwen3-8B DFlash", "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", 15, "19 GB"),
        ("Qwen3-8B JetSpec", "Qwen/Qwen3-8B", "JetSpec/jetspec-qwen3-8b", 15, "19 GB"),
        ("Qwen3-8B DSpark", "Qwen/Qwen3-8B", "deepseek-ai/dspark_qwen3_8b_block7", 7, "19 GB"),
        ("Qwen3-14B DSpark", "Qwen/Qwen3-14B", "deepseek-ai/dspark_qwen3_14b_block7", 7, "33 GB"),
        ("gemma-4-12B DSpark", "google/gemma-4-12B-it", "deepseek-ai/dspark_gemma4_12b_block7", 7, "30 GB"),
        (
            *("Llama-3.1-8B DFlash", "meta-llama/Llama-3.1-8B-Instruct"),
            *("z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", 9, "18 GB"),
        ),
        ("gpt-oss-20b DFlash", "openai/gpt-oss-20b", "z-lab/gpt-oss-20b-DFlash", 7, "16 GB"),
        ("gpt-oss-20b JetSpec", "openai/gpt-oss-20b", "JetSpec/jetspec-gpt-oss-20b", 15, "16 GB"),
    )
)
"""Steps: what a block drafts, or fewer where its size was not found in a public file; more than a block drafts are
refused."""

PAIRS = (BUNDLED_MTP, BUNDLED_EAGLE3, SMOLLM2, *GEMMA4_PAIRS, *QAT_PAIRS, *EAGLE3_PAIRS, *BLOCK_PAIRS)

ACCEPTED = {
    "tiny-gemma4-mtp": PublishedAcceptance(
        num_steps=4,
        length=4.85,
        by_depth=(0.991, 0.985, 0.978, 0.970),
        data="200 held-out word problems, greedy",
        source="specdec/bundled/tiny-gemma4-mtp/README.md",
    ),
    "tiny-gemma4-eagle3": PublishedAcceptance(
        num_steps=4,
        length=3.01,
        by_depth=(0.72, 0.58, 0.43, 0.31),
        data="200 held-out word problems, greedy",
        source="specdec/bundled/tiny-gemma4-eagle3/README.md",
    ),
    "google/gemma-4-31B-it-assistant": PublishedAcceptance(
        num_steps=7,
        length=5.37,
        data="coding, temperature 1, bfloat16, B300",
        source="users' reports of vLLM, read 2026-11",
    ),
    "google/gemma-4-26B-A4B-it-assistant": PublishedAcceptance(
        num_steps=4,
        length=3.68,
        data="DGX Spark",
        source="users' reports, read 2026-11",
    ),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": PublishedAcceptance(
        num_steps=7,
        length=3.34,
        data="GSM8K, temperature 1 (MT-bench 2.77, HumanEval 3.49)",
        source="published figures of yuhuili's head in chains of 7, read 2026-11",
    ),
    "RedHatAI/Qwen3-8B-speculator.eagle3": PublishedAcceptance(
        num_steps=5,
        length=3.48,
        data="math, temperature 0.6 (HumanEval 3.24, all 2.82)",
        source="speculators, pull request 610, read 2026-11",
    ),
    "deepseek-ai/dspark_qwen3_8b_block7": PublishedAcceptance(
        num_steps=7,
        length=3.41,
        data="SPEED-Bench coding, temperature 1, in vLLM",
        source="model card of Dogacel/Qwen3-8B-DSpark, read 2026-11",
    ),
}
"""By drafter, each of which is in one pair."""


def published_acceptance(target: str, drafter: str | None) -> PublishedAcceptance | None:
    """Of a pair by the last parts of both names, whatever their case; None: nothing is known."""
    if drafter is None:
        return None
    asked = _last(target), _last(drafter)
    return next((pair.accepts for pair in PAIRS if (_last(pair.target), _last(pair.drafter)) == asked), None)


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines of text, columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def pair_table(pairs: Sequence[Pair]) -> str:
    """The pairs as lines of text under a line of headings."""
    rows = [("name", "target", "drafter", "steps", "memory")]
    rows += [(p.name, p.target, p.drafter, str(p.num_steps), f"{p.memory} {p.quantised or p.dtype}") for p in pairs]
    return text_table(rows)
