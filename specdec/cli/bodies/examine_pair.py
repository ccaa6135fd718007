"""`specdec doctor`: prints a diagnosis as tables or JSON; the exit status says whether a cause was named."""

from pathlib import Path

import typer
from rich.table import Table

from specdec.cli.bodies.settings import drafter_name, engine_config, load_engine, prepare_output, table_console
from specdec.cli.commands import DoctorOptions
from specdec.doctor import Diagnosis, diagnose
from specdec.draft_models.model_and_lookup import model_of
from specdec.draft_models.native_mtp.mtp_checkpoint import write_conventions
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpDrafter
from specdec.draft_models.native_mtp.mtp_families import MtpFamily
from specdec.errors import ConfigError
from specdec.evaluation.output_files import write_report
from specdec.text.prompt_files import read_prompts


def examine_pair(options: DoctorOptions) -> None:
    if drafter_name(options.pair) is None:
        raise ConfigError("the doctor looks at a drafter; give --drafter a hub id, a folder or a bundled name")
    prepare_output(options.pair)
    questions = None
    if options.prompts is not None:
        questions = [problem.text for problem in read_prompts(options.prompts, options.limit)]
    with load_engine(options.pair, engine_config(options.pair, batch_size=1)) as engine:
        drafter = None if engine.drafter is None else model_of(engine.drafter)
        folder = drafter.source if isinstance(drafter, NativeMtpDrafter) else None
        if options.write_conventions and folder is None:
            raise ConfigError("--write-conventions is about MTP modules in a folder; give --drafter mtp or that folder")
        found = diagnose(engine, questions, chat=not options.raw, max_new_tokens=options.max_new_tokens)
    if options.write_conventions and folder is not None and found.conventions is not None:
        write_conventions(Path(folder), MtpFamily(**found.conventions))
    if write_report(found.as_json(), options.json_file):
        show_diagnosis(found)
    if not found.healthy:
        raise typer.Exit(1)


def show_diagnosis(found: Diagnosis) -> None:
    console = table_console(160)
    for table in (facts(found), acceptance(found), trials(found)):
        console.print(table)
    for note in found.notes:
        console.print(note, markup=False)
    for finding in found.findings:
        gained = (
            "" if finding.after is None else f" (expected accepted length {finding.before:.2f} -> {finding.after:.2f})"
        )
        console.print(f"{finding.cause}: {finding.what}{gained}\n    {finding.do}", markup=False)
    if found.healthy:
        console.print(f"nothing wrong was found, in {found.seconds:.0f} s")


def facts(found: Diagnosis) -> Table:
    """Table of the facts that were read, the reference, and memory."""
    table = Table("read", "", title="the pair", title_justify="left")
    for name, text in found.read.items():
        table.add_row(name, text)
    if found.reference is not None:
        says = "the same" if found.reference.holds else "DIFFERENT"
        table.add_row("logits", f"{says} as the dense reference's, to {found.reference.difference:.1e}")
    pools = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in found.memory.items())
    table.add_row("memory of K/V", pools)
    return table


def acceptance(found: Diagnosis) -> Table:
    """Table of the share of accepted drafts by depth, next to the published figures."""
    depths = [str(depth + 1) for depth in range(len(found.acceptance.by_depth))]
    table = Table("acceptance", "length", *depths, "of", title="acceptance by draft", title_justify="left")
    shares = [f"{share:.2f}" for share in found.acceptance.by_depth]
    table.add_row("here", f"{found.acceptance.length:.2f}", *shares, f"{found.prompts} prompts, greedy")
    if (figure := found.published) is not None:
        known = [f"{share:.2f}" for share in figure.by_depth][: len(depths)]
        known += [""] * (len(depths) - len(known))
        table.add_row(
            "published", f"{figure.length:.2f}", *known, f"{figure.num_steps} drafts; {figure.data}; {figure.source}"
        )
    return table


def trials(found: Diagnosis) -> Table:
    """Table of the changes that were tried."""
    table = Table("cause", "change", "gain", "greedy", "t", "", title="changes tried", title_justify="left")
    for trial in found.trials:
        figures = f"{trial.gain:+.3f}", f"{trial.greedy:+.3f}", f"{trial.t:.1f}"
        table.add_row(trial.cause, trial.what, *figures, "helps" if trial.named else "")
    return table
