"""`specdec models --memory`: what a pair keeps, by cache group, and its weights. No weights are read."""

from collections.abc import Iterator
from typing import Any

from specdec.cli.bodies.settings import pair_arguments, prepare_output, shared_fields
from specdec.cli.commands import ListOptions
from specdec.config import EngineConfig
from specdec.evaluation.memory_plan import memory_plan
from specdec.evaluation.output_files import write_report
from specdec.models.published import text_table


def show_memory(options: ListOptions) -> None:
    prepare_output(options.pair)
    config = EngineConfig(
        max_batch_size=options.batch_size,
        max_model_len=options.max_model_len,
        page_size=options.page_size,
        **shared_fields(options.pair, EngineConfig),
    )
    arguments = pair_arguments(options.pair, config)
    plan = memory_plan(**arguments, **options.pair.loading())
    if write_report({"target": arguments["target"], "drafter": arguments["drafter"], **plan}, options.json_file):
        print("\n".join(lines(plan)))


def lines(plan: dict[str, Any]) -> Iterator[str]:
    batch, length = plan["batch_size"], plan["max_model_len"]
    yield f"{plan['dtype']} on {plan['device']}, requests of {length:,} tokens, pages of {plan['page_size']}"
    rows = [("cache group", "layers", "heads x size", "bytes a token", "a request", f"{batch} requests")]
    for group in plan["groups"]:
        figures = f"{group['token_bytes']:,}", size(group["request_bytes"]), size(group["batch_bytes"])
        for kept in group["kept"] or [{"layers": 0, "fields": {}}]:
            fields = ", ".join(f"{name} {heads} x {dim}" for name, (heads, dim) in kept["fields"].items())
            rows.append((group["name"], str(kept["layers"]), fields, *figures))
            figures = "", "", ""  # those of the group stand once
    yield text_table(rows)
    yield "weights: " + ", ".join(
        f"{role} {'unknown' if count is None else size(count)}" for role, count in plan["weights"].items()
    )
    yield from plan["notes"]


def size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.2f} MB"
