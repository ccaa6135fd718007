"""`specdec models --memory`: memory of any pair by cache group. No weights are read."""

from collections.abc import Iterator
from typing import Any

from specdec.cli.actions.list_pairs import size, weights_line
from specdec.cli.actions.settings import pair_arguments, prepare_output
from specdec.cli.commands import ListOptions
from specdec.cli.output_files import write_report
from specdec.errors import counted
from specdec.measurement.memory_plan import memory_plan
from specdec.models.published import text_table


def show_memory(options: ListOptions) -> None:
    prepare_output(options)
    arguments = pair_arguments(options, options.batch_size)
    plan = memory_plan(**arguments)
    report = {"target": arguments["target"], "drafter": arguments["drafter"], **plan}
    write_report(report, "\n".join(memory_lines(plan)), options.json_file)


def memory_lines(plan: dict[str, Any]) -> Iterator[str]:
    batch, length = plan["batch_size"], plan["max_model_len"]
    yield f"{plan['dtype']} on {plan['device']}, requests of {length:,} tokens, pages of {plan['page_size']}"
    rows = [("cache group", "layers", "heads x size", "bytes a token", "a request", counted(batch, "request"))]
    for group in plan["groups"]:
        figures = f"{group['token_bytes']:,}", size(group["request_bytes"]), size(group["batch_bytes"])
        for kept in group["kept"] or [{"layers": 0, "fields": {}}]:
            fields = ", ".join(f"{name} {heads} x {dim}" for name, (heads, dim) in kept["fields"].items())
            rows.append((group["name"], str(kept["layers"]), fields, *figures))
            figures = "", "", ""  # a group's figures stand once
    yield text_table(rows)
    yield weights_line(plan["weights"])
    yield from plan["notes"]
