"""`specdec models`: lists bundled models and known pairs. `specdec recipe`: command, memory and step time of published
pairs. Reads no checkpoint and imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from specdec.cli.commands import ListOptions, RecipeOptions
from specdec.cli.output_files import write_report
from specdec.measurement.recipes import CONTEXT, HEADS, REQUESTS, TOKENS, Recipe, StepTime, find_recipe, recipes, row
from specdec.models.published import BUNDLED_DIR, BUNDLED_NAMES, PAIRS_BY_TITLE, pair_table, text_table

KEY_OF_TABLE = (
    f"K/V: {REQUESTS} requests of {TOKENS:,} tokens, by cache group. 24 GB, ...: how many of these requests fit; "
    "-: the weights leave no room.\n"
    f"H100, H200: milliseconds of a plain step of one request of {CONTEXT:,} tokens: at least, expected "
    "(~: assumed from a similar pair)."
)


def list_pairs(options: ListOptions) -> None:
    pairs = {
        title: [asdict(pair) | {"accepts": pair.accepts and asdict(pair.accepts)} for pair in listed]
        for title, listed in PAIRS_BY_TITLE.items()
    }
    sizes = {name: {"bytes": size_of(name), "folder": str(BUNDLED_DIR / name)} for name in BUNDLED_NAMES}
    rows = [("bundled", "size"), *((name, f"{size_of(name) / 1e6:.1f} MB") for name in BUNDLED_NAMES)]
    tables = [text_table(rows), *(f"{title}:\n{pair_table(listed)}" for title, listed in PAIRS_BY_TITLE.items())]
    write_report({"bundled": sizes, "pairs": pairs}, "\n\n".join(tables), options.json_file)


def size_of(name: str) -> int:
    """Bytes of a bundled checkpoint's files."""
    return sum(path.stat().st_size for path in (BUNDLED_DIR / name).rglob("*") if path.is_file())


def show_recipe(options: RecipeOptions) -> None:
    if options.model is not None:
        found = recipes()[find_recipe(options.model).name]
        write_report(asdict(found), "\n".join(recipe_lines(found)), options.json_file)
    else:
        table = recipes().values()
        text = f"{text_table([HEADS, *map(row, table)])}\n\n{KEY_OF_TABLE}"
        write_report([*map(asdict, table)], text, options.json_file)


def recipe_lines(found: Recipe) -> Iterator[str]:
    yield found.command
    share = "" if found.pair.gpus == 1 else f", which {found.pair.gpus} GPUs share"
    yield f"\n{weights_line(found.weights, share)}; K/V of {REQUESTS} requests of {TOKENS:,} tokens, and what fits:"
    rows = [("GPU", *(group["name"] for group in found.groups), "requests", "tokens")]
    rows.append(
        ("needed", *(size(group["batch_bytes"]) for group in found.groups), str(REQUESTS), f"{REQUESTS * TOKENS:,}")
    )
    for card in found.cards:
        pools = (size(count) for count in card.pools.values()) if card.pools else ("-" for _ in found.groups)
        rows.append((f"{card.gigabytes} GB", *pools, str(card.requests), f"{card.tokens:,}"))
    yield text_table(rows)
    yield f"\nalso needed on each GPU: {size(found.rest)} for captures, activations and libraries"
    yield f"\na plain step of one request of {CONTEXT:,} tokens:"
    yield from map(step_line, found.steps)
    yield f"\non a smaller GPU: {found.on_less}"


def step_line(step: StepTime) -> str:
    floor = f"{step.gpu}: at least {step.floor_ms:.2f} ms to read its weights and K/V"
    source = "measured" if step.measured else "assumed from a similar pair"
    return f"{floor}; expected {step.expected_ms:.2f} ms, {step.multiple:.2f} times that ({source})"


def weights_line(weights: Mapping[str, int | None], share: str = "") -> str:
    """Bytes by role; a role with 0 is left out. share: says which devices hold them."""
    unknown = "unknown without its files"
    sizes = (f"{role} {unknown if count is None else size(count)}" for role, count in weights.items() if count != 0)
    return f"weights{share}: {', '.join(sizes)}"


def size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.2f} MB"
