"""`specdec recipe`: a published pair's command, memory and time of a step; without a name, all of them in a table."""

from collections.abc import Iterator
from dataclasses import asdict

from specdec.cli.bodies.settings import quiet_libraries
from specdec.cli.bodies.show_memory import size
from specdec.cli.commands import RecipeOptions
from specdec.evaluation.output_files import write_report
from specdec.evaluation.recipes import CONTEXT, HEADS, REQUESTS, TOKENS, Recipe, StepTime, find_recipe, recipe, row
from specdec.models.published import RECIPES, text_table


def show_recipe(options: RecipeOptions) -> None:
    quiet_libraries()
    if options.model is not None:
        found = recipe(find_recipe(options.model))
        if write_report(as_json(found), options.json_file):
            print("\n".join(lines(found)))
        return
    table = [recipe(pair) for pair in RECIPES.values()]
    if write_report([as_json(found) for found in table], options.json_file):
        print(text_table([HEADS, *map(row, table)]))


def as_json(found: Recipe) -> dict[str, object]:
    steps = [asdict(step) | {"expected_ms": step.expected_ms} for step in found.steps]
    return {**asdict(found), "steps": steps}


def lines(found: Recipe) -> Iterator[str]:
    yield found.command
    share = "" if found.pair.gpus == 1 else f", which {found.pair.gpus} GPUs share"
    weights = ", ".join(f"{role} {size(count)}" for role, count in found.weights.items() if count)
    yield f"\nweights{share}: {weights}; K/V of {REQUESTS} requests of {TOKENS:,} tokens, and what fits:"
    rows = [("GPU", *(group["name"] for group in found.groups), "requests", "tokens")]
    rows.append(
        ("any", *(size(group["batch_bytes"]) for group in found.groups), str(REQUESTS), f"{REQUESTS * TOKENS:,}")
    )
    for card in found.cards:
        pools = (size(count) for count in card.pools.values()) if card.pools else ("-" for _ in found.groups)
        rows.append((f"{card.gigabytes} GB", *pools, str(card.requests), f"{card.tokens:,}"))
    yield text_table(rows)
    yield f"\nbesides: {size(found.rest)} of captures, activations and libraries, on each GPU"
    yield f"\na plain step of one request of {CONTEXT:,} tokens:"
    yield from map(step_line, found.steps)
    yield f"\non less: {found.on_less}"


def step_line(step: StepTime) -> str:
    floor = f"{step.gpu}: at least {step.floor_ms:.2f} ms to read its weights and K/V"
    if step.expected_ms is None:
        return f"{floor}; no figure of such layers is known"
    source = "measured" if step.measured else "assumed, as of a pair like it"
    return f"{floor}; expected {step.expected_ms:.2f} ms, {step.multiple:.2f} times that ({source})"
