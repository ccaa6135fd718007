"""Options that several commands take, and how their values are read. Nothing heavy is imported for them.

Options that always come together are the fields of a dataclass, which a command's own dataclass has as a field.
"""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from specdec.cli.command import shell_errors
from specdec.errors import ConfigError, shown
from specdec.evaluation.output_files import require_writable


def output_file(path: Path | None) -> Path | None:
    if path is not None:
        with shell_errors():
            require_writable(path)
    return path


def _loading(words: list[str]) -> list[str]:
    """NAME=VALUE each; read by `PairOptions.loading`, and refused here where it is not of that form."""
    for word in words:
        name, equals, _ = word.partition("=")
        if not (equals and name.isidentifier()):
            raise typer.BadParameter(f"{word!r} is not NAME=VALUE, such as subfolder=text")
    return words


Limit = Annotated[int, typer.Option(min=0, help="Only the first N prompts; 0: all.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Prompts at a time.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
LogLevel = Literal["debug", "info", "warning", "error"]
Raw = Annotated[bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", callback=output_file, help="Also as JSON in a file; '-' prints that alone."),
]
loading_option = partial(typer.Option, rich_help_panel="Loading")


@dataclass(frozen=True, kw_only=True, slots=True)
class PairOptions:
    """Which target and drafter, how they are loaded, and how they speculate: the same for every command."""

    target: Annotated[str, typer.Option(help="Hub id, folder or bundled name.")] = "tiny-gemma4"
    drafter: Annotated[
        str,
        typer.Option(
            help="Hub id, folder, bundled name, 'suffix', 'ngram' or 'none'; NAME,suffix: each round the one that "
            "pays; 'auto' is the drafter of a bundled target."
        ),
    ] = "auto"
    num_steps: Annotated[int, typer.Option(min=1, help="Levels of the draft; of a chain, its tokens.")] = 4
    draft_topk: Annotated[int, typer.Option(min=1, help="Branches a node of the draft tree; 1: a chain.")] = 1
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            help="Verified nodes, the root included; default: 1 + draft-topk * num-steps, of a tree at most 64."
        ),
    ] = None
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive/--fixed-drafts",
            help="Draft only as much as pays, down to nothing; or the same draft in every round.",
        ),
    ] = True
    finished_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tokens of outputs of finished requests from which 'suffix' drafts too; 0: a request's own text.",
        ),
    ] = 0
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 (bf16) or float16; default: float32 on the CPU."),
    ] = None
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: the first GPU, else the CPU.")
    ] = None
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="GPUs of this host that share every layer of the target, from the device on.")
    ] = 1
    revision: Annotated[str | None, loading_option(help="Branch, tag or commit of the target on the hub.")] = None
    drafter_revision: Annotated[str | None, loading_option(help="Branch, tag or commit of the drafter on the hub.")] = (
        None
    )
    trust_remote_code: Annotated[
        bool, loading_option("--trust-remote-code", help="Run model code from the checkpoint.")
    ] = False
    quantization: Annotated[
        str | None,
        loading_option(
            metavar="JSON",
            help="The quantization_config of transformers for the target, such as "
            '\'{"quant_method": "bitsandbytes", "load_in_8bit": true}\'.',
        ),
    ] = None
    load_option: Annotated[
        list[str],
        loading_option(
            callback=_loading,
            metavar="NAME=VALUE",
            help="Another argument of transformers' from_pretrained for the target; again for each.",
        ),
    ] = field(default_factory=list)
    memory_share: Annotated[
        float | None,
        loading_option(
            help="KV pools take at most this share of the memory that is free once the weights are loaded; "
            "default: 0.8 of a GPU, 0.25 on the CPU."
        ),
    ] = None
    prefix_cache: Annotated[
        bool, loading_option("--prefix-cache/--no-prefix-cache", help="Share K/V of common prompts.")
    ] = True
    log_level: Annotated[
        LogLevel | None, loading_option(help="Least serious message on standard error; default: warning, serve: info.")
    ] = None

    def loading(self) -> dict[str, Any]:
        """Arguments of transformers' `from_pretrained` for the target. A value that is JSON is read as such."""
        options: dict[str, Any] = {}
        for word in self.load_option:
            name, _, value = word.partition("=")
            try:
                options[name] = json.loads(value)
            except (ValueError, RecursionError):
                options[name] = value
        if self.revision is not None:
            options["revision"] = self.revision
        if self.trust_remote_code:
            options["trust_remote_code"] = True
        if self.quantization is not None:
            options["quantization_config"] = json_object("--quantization", self.quantization)
        return options

    def drafter_options(self) -> dict[str, Any]:
        """Those of the drafter alone; it also takes over the target's token and trust_remote_code."""
        return {} if self.drafter_revision is None else {"revision": self.drafter_revision}


def json_object(option: str, words: str) -> dict[str, Any]:
    """The JSON object that an option gives. Raises ConfigError."""
    try:
        value = json.loads(words)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{option} is {shown(words)}; a JSON object is expected")
    return value
