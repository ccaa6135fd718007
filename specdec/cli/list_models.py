"""`specdec models`: which names stand for something. Reads no checkpoint and imports no torch."""

import json
from dataclasses import asdict, dataclass

from specdec.cli.command import command
from specdec.cli.options import JsonFile
from specdec.evaluation.output_files import STDOUT, write_file
from specdec.models.bundled import BUNDLED_DIR, BUNDLED_NAMES
from specdec.models.published import (
    BLOCK_PAIRS,
    BUNDLED_EAGLE3,
    BUNDLED_MTP,
    EAGLE3_PAIRS,
    GEMMA4_PAIRS,
    QAT_PAIRS,
    SMOLLM2,
    pair_table,
    text_table,
)

PAIRS = {
    "pairs with bundled models": (BUNDLED_MTP, BUNDLED_EAGLE3, SMOLLM2),
    "published Gemma 4 and their MTP assistants": GEMMA4_PAIRS,
    "published Gemma 4 trained for int4 (QAT); such a target wants its QAT assistant, and accepts less of the other": (
        QAT_PAIRS
    ),
    "published EAGLE-3 heads and their targets": EAGLE3_PAIRS,
    "published block drafters and their targets": BLOCK_PAIRS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ListOptions:
    json_file: JsonFile = None


@command()
def list_models(options: ListOptions) -> None:
    if options.json_file is not None:
        pairs = {title: [asdict(pair) for pair in listed] for title, listed in PAIRS.items()}
        sizes = {name: {"bytes": size_of(name), "folder": str(BUNDLED_DIR / name)} for name in BUNDLED_NAMES}
        write_file(options.json_file, json.dumps({"bundled": sizes, "pairs": pairs}, indent=2))
    if options.json_file != STDOUT:
        rows = [("bundled", "size"), *((name, f"{size_of(name) / 1e6:.1f} MB") for name in BUNDLED_NAMES)]
        tables = [text_table(rows), *(f"{title}:\n{pair_table(listed)}" for title, listed in PAIRS.items())]
        print("\n\n".join(tables))


def size_of(name: str) -> int:
    """Bytes of a bundled checkpoint's files."""
    return sum(path.stat().st_size for path in (BUNDLED_DIR / name).rglob("*") if path.is_file())
