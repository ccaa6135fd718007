"""`specdec models`: lists bundled models and known pairs. Reads no checkpoint and imports no torch."""

from dataclasses import asdict
from typing import Any

from specdec.cli.commands import ListOptions
from specdec.evaluation.output_files import write_report
from specdec.models.bundled import BUNDLED_DIR, BUNDLED_NAMES
from specdec.models.published import PAIRS_BY_TITLE, PublishedPair, pair_table, text_table


def list_pairs(options: ListOptions) -> None:
    pairs = {title: list(map(_as_record, listed)) for title, listed in PAIRS_BY_TITLE.items()}
    sizes = {name: {"bytes": size_of(name), "folder": str(BUNDLED_DIR / name)} for name in BUNDLED_NAMES}
    if write_report({"bundled": sizes, "pairs": pairs}, options.json_file):
        rows = [("bundled", "size"), *((name, f"{size_of(name) / 1e6:.1f} MB") for name in BUNDLED_NAMES)]
        tables = [text_table(rows), *(f"{title}:\n{pair_table(listed)}" for title, listed in PAIRS_BY_TITLE.items())]
        print("\n\n".join(tables))


def _as_record(pair: PublishedPair) -> dict[str, Any]:
    return asdict(pair) | {"accepts": None if pair.accepts is None else asdict(pair.accepts)}


def size_of(name: str) -> int:
    """Bytes of a bundled checkpoint's files."""
    return sum(path.stat().st_size for path in (BUNDLED_DIR / name).rglob("*") if path.is_file())
