"""`specdec models --memory`: memory of any pair by cache group. `specdec recipe`: memory of a published pair, its
command, and the time of a step. No weights are read."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from specdec.cli.bodies.settings import engine_config, pair_arguments, prepare_output, quiet_libraries, shared_fields
from specdec.cli.commands import ListOptions, RecipeOptions
from specdec.config import EngineConfig
from specdec.evaluation.memory_plan import memory_plan
from specdec.evaluation.output_files import write_report
from specdec.evaluation.recipes import CONTEXT, HEADS, REQUESTS, TOKENS, Recipe, StepTime, find_recipe, recipe, row
from specdec.models.published import RECIPES, text_table


def show_memory(options: ListOptions) -> None:
    prepare_output(options.pair)
    config = engine_config(options.pair, options.batch_size, **shared_fields(options, EngineConfig))
    arguments = pair_arguments(options.pair, config)
    plan = memory_plan(**arguments)
    if write_report({"target": arguments["target"], "drafter": arguments["drafter"], **plan}, options.json_file):
        print("\n".join(memory_lines(plan)))


def show_recipe(options: RecipeOptions) -> None:
    quiet_libraries()
    if options.model is not None:
        found = recipe(find_recipe(options.model))
        if write_report(asdict(found), options.json_file):
            print("\n".join(recipe_lines(found)))
        return
    table = [recipe(pair) for pair in RECIPES.values()]
    if write_report([*map(asdict, table)], options.json_file):
        print(text_table([HEADS, *map(row, table)]))


def memory_lines(plan: dict[str, Any]) -> Iterator[str]:
    batch, length = plan["batch_size"], plan["max_model_len"]
    yield f"{plan['dtype']} on {plan['device']}, requests of {length:,} tokens, pages of {plan['page_size']}"
    rows = [("cache group", "layers", "heads x size", "bytes a token", "a request", f"{batch} requests")]
    for group in plan["groups"]:
        figures = f"{group['token_bytes']:,}", size(group["request_bytes"]), size(group["batch_bytes"])
        for kept in group["kept"] or [{"layers": 0, "fields": {}}]:
            fields = ", ".join(f"{name} {heads} x {dim}" for name, (heads, dim) in kept["fields"].items())
            rows.append((group["name"], str(kept["layers"]), fields, *figures))
            figures = "", "", ""  # a group's figures stand once
    yield text_table(rows)
    yield weights_line(plan["weights"])
    yield from plan["notes"]


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


def weights_line(weights: Mapping[str, int | None], share: str = "") -> str:
    """Bytes by role; a role with 0 is left out. share: says which devices hold them."""
    unknown = "unknown without its files"
    sizes = (f"{role} {unknown if count is None else size(count)}" for role, count in weights.items() if count != 0)
    return f"weights{share}: {', '.join(sizes)}"


def size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.2f} MB"
