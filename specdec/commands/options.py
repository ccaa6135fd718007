"""Options that several commands take, and how their values are read. Nothing heavy is imported for them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from specdec.errors import SpecDecError
from specdec.evaluation.files import require_writable

DTYPES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
DTYPES |= {name: name for name in ("float32", "bfloat16", "float16")}


@contextmanager
def shell_errors() -> Iterator[None]:
    """One sentence for whoever sits at the shell, instead of a traceback."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # whoever read has gone: typer ends quietly
    except (SpecDecError, OSError) as error:  # OSError: a folder that cannot be made, a full disk
        print(f"specdec: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as stop:
        print(f"specdec: interrupted{f'; {stop}' if str(stop) else ''}", file=sys.stderr)
        raise typer.Exit(130) from stop


def _dtype(name: str | None) -> str | None:
    if name is not None and name not in DTYPES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name] if name else None


def output_file(path: Path | None) -> Path | None:
    if path is not None:
        with shell_errors():
            require_writable(path)
    return path


Target = Annotated[str, typer.Option(help="Hub id, folder or bundled name.")]
DrafterName = Annotated[
    str,
    typer.Option(help="Hub id, folder, bundled name, 'ngram' or 'none'; 'auto' is the bundled target's own drafter."),
]
Limit = Annotated[int, typer.Option(min=0, help="Only the first so many; 0: all.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Prompts at a time.")]
NumSteps = Annotated[int, typer.Option(min=1, help="Levels of the draft; of a chain, its tokens.")]
DraftTopK = Annotated[int, typer.Option(min=1, help="Branches a node of the draft tree; 1: a chain.")]
NumDraftTokens = Annotated[
    int | None,
    typer.Option(help="Verified nodes, the root included; default: 1 + draft-topk * num-steps, of a tree at most 64."),
]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 discourages repetition.")]
Seed = Annotated[int | None, typer.Option(help="Makes a sampled output repeatable.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
KeepK = Annotated[int, typer.Option("--top-k", help="Keep the k most likely tokens; 0: all.")]
KeepP = Annotated[float, typer.Option("--top-p", help="Keep the smallest set of this mass; 1: all.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the most likely; 0: none.")]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
DtypeName = Annotated[
    str | None, typer.Option(callback=_dtype, help="float32, bfloat16 (bf16) or float16; default: float32 on the CPU.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: the first GPU, else the CPU.")]
Raw = Annotated[bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", callback=output_file, help="Also as JSON in a file; '-' prints that alone."),
]
