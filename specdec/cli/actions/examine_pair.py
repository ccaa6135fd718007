"""`specdec doctor`: prints a diagnosis as tables or JSON; the exit status says whether a cause was named."""

from collections.abc import Iterator
from pathlib import Path

import typer

from specdec.cli.actions.settings import drafter_name, load_engine, prepare_output
from specdec.cli.commands import DoctorOptions
from specdec.cli.output_files import write_report
from specdec.doctor import Diagnosis, diagnose
from specdec.draft_models.model_and_lookup import model_of
from specdec.draft_models.native_mtp.mtp_checkpoint import write_conventions
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpDrafter
from specdec.draft_models.native_mtp.mtp_families import MtpFamily
from specdec.errors import ConfigError
from specdec.models.published import HELD_OUT_PROBLEMS, text_table
from specdec.text.prompt_files import read_prompts


def examine_pair(options: DoctorOptions) -> None:
    if drafter_name(options) is None:
        raise ConfigError("the doctor looks at a drafter; give --drafter a hub id, a folder or a bundled name")
    prepare_output(options)
    questions = [problem.text for problem in read_prompts(options.prompts or HELD_OUT_PROBLEMS, options.limit)]
    with load_engine(options, batch_size=1) as engine:
        drafter = None if engine.drafter is None else model_of(engine.drafter)
        folder = drafter.source if isinstance(drafter, NativeMtpDrafter) else None
        if options.write_conventions and folder is None:
            raise ConfigError("--write-conventions is about MTP modules in a folder; give --drafter mtp or that folder")
        found = diagnose(engine, questions, chat=not options.raw, max_new_tokens=options.max_new_tokens)
    if options.write_conventions and folder is not None and found.conventions is not None:
        write_conventions(Path(folder), MtpFamily(**found.conventions))
    write_report(found.as_json(), "\n".join(report_lines(found)), options.json_file)
    if not found.healthy:
        raise typer.Exit(1)


def report_lines(found: Diagnosis) -> Iterator[str]:
    """Three tables (facts of the pair, acceptance by draft, changes that were tried), then notes and findings."""
    facts = [("the pair", ""), *found.read.items()]
    if found.reference is not None:
        says = "the same" if found.reference.holds else "DIFFERENT"
        facts.append(("logits", f"{says} as the dense reference's, to {found.reference.difference:.1e}"))
    pools = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in found.memory.items())
    yield text_table([*facts, ("memory of K/V", pools)])
    yield "\n" + text_table(acceptance_rows(found))
    tried = [
        (each.cause, each.what, f"{each.gain:+.3f}", f"{each.greedy:+.3f}", f"{each.t:.1f}", "helps" * each.named)
        for each in found.trials
    ]
    yield "\n" + text_table([("cause", "change", "gain", "greedy", "t", ""), *tried]) + "\n"
    yield from found.notes
    for each in found.findings:
        lengths = "" if each.after is None else f" (expected accepted length {each.before:.2f} -> {each.after:.2f})"
        yield f"{each.cause}: {each.what}{lengths}\n    {each.do}"
    if found.healthy:
        yield f"nothing wrong was found, in {found.seconds:.0f} s"


def acceptance_rows(found: Diagnosis) -> list[tuple[str, ...]]:
    """Share of accepted drafts by depth, next to the published figures."""
    here, published = found.acceptance, found.published
    depths = range(len(here.by_depth))
    rows = [("acceptance", "length", *(str(depth + 1) for depth in depths), "of")]
    shares = (f"{share:.2f}" for share in here.by_depth)
    rows.append(("here", f"{here.length:.2f}", *shares, f"{found.prompts} prompts, greedy"))
    if published is not None:
        known = dict(enumerate(published.by_depth))
        shares = (f"{known[depth]:.2f}" if depth in known else "" for depth in depths)
        source = f"{published.num_steps} drafts; {published.data}; {published.source}"
        rows.append(("published", f"{published.length:.2f}", *shares, source))
    return rows
