"""Options shared by several commands, and how their values are read. Nothing heavy is imported.

Options that always occur together form a dataclass, which each command's own dataclass inherits.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from specdec.cli.command import shell_errors
from specdec.cli.output_files import require_writable
from specdec.errors import ConfigError, shown
from specdec.settings.declared_fields import loading_option, option


def output_file(path: Path | None) -> Path | None:
    if path is not None:
        with shell_errors():
            require_writable(path)
    return path


def read_text_file(path: Path, what: str) -> str:
    """The file in UTF-8. Raises ConfigError, which calls it `what`, for one that is not, or that cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{what} {str(path)!r} cannot be read: {reason}") from None


Raw = Annotated[bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.")]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", callback=output_file, help="Also write JSON to a file; '-' prints that alone."
    ),
]


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """Which target and drafter, how they are loaded, and how they speculate: the same for every command."""

    target: str = option("tiny-gemma4", "Hub id, folder or bundled name.")
    drafter: str = option(
        "auto",
        "Hub id, folder, bundled name, 'mtp', 'suffix', 'ngram' or 'none'; NAME,suffix: in each round the faster one; "
        "'auto': the MTP modules of the target's checkpoint, else its published drafter if it is on disk, else suffix.",
    )
    num_steps: int | None = option(
        None, "Levels of the draft (drafted tokens of a chain); default: 4; MTP modules: 3, or one per module.", min=1
    )
    draft_topk: int = option(1, "Branches per node of the draft tree; 1: a chain.", min=1)
    num_draft_tokens: int | None = option(
        None, "Verified nodes, the root included; default: 1 + draft-topk * num-steps, for a tree at most 64."
    )
    adaptive: bool = option(
        True,
        "Choose each round's draft (or none) by its expected speed, or use the same draft in every round.",
        "--adaptive/--fixed-drafts",
    )
    finished_tokens: int = option(
        0, "Output tokens of finished requests that 'suffix' also drafts from; 0: only the request's own text.", min=0
    )
    dtype: str | None = option(None, "float32, bfloat16 (bf16) or float16; default: float32 on the CPU.")
    kv_dtype: str | None = option(None, "fp8: K/V in 8 bits; default: the model's dtype.")
    device: str | None = option(None, "cpu, cuda, cuda:1, ...; default: the first GPU, else the CPU.")
    tensor_parallel: int = option(1, "Number of GPUs, from --device on, that share every layer of the target.", min=1)
    revision: str | None = loading_option(None, "Branch, tag or commit of the target on the hub.")
    drafter_revision: str | None = loading_option(None, "Branch, tag or commit of the drafter on the hub.")
    trust_remote_code: bool = loading_option(False, "Run model code from the checkpoint.", "--trust-remote-code")
    quantization: str | None = loading_option(
        None,
        "The quantization_config of transformers for the target, such as "
        '\'{"quant_method": "bitsandbytes", "load_in_8bit": true}\'.',
        metavar="JSON",
    )
    load_option: list[str] = loading_option(
        [], "Another argument of transformers' from_pretrained for the target; may be repeated.", metavar="NAME=VALUE"
    )
    memory_share: float | None = loading_option(
        None,
        "Share for K/V pools of the memory that the weights leave; default: 0.8 on a GPU, 0.25 on the CPU.",
    )
    prefix_cache: bool = loading_option(True, "Share K/V of common prefixes.", "--prefix-cache/--no-prefix-cache")
    log_level: Literal["debug", "info", "warning", "error"] | None = loading_option(
        None, "Lowest level of messages on standard error; default: warning; info for serve."
    )

    def loading(self) -> dict[str, Any]:
        """Arguments of transformers' `from_pretrained` for the target. Raises ConfigError."""
        options: dict[str, Any] = {}
        for word in self.load_option:
            name, equals, value = word.partition("=")
            if not (equals and name.isidentifier()):
                raise ConfigError(f"--load-option {word!r} is not NAME=VALUE, such as subfolder=text")
            options[name] = _read_value(value)
        if self.revision is not None:
            options["revision"] = self.revision
        if self.trust_remote_code:
            options["trust_remote_code"] = True
        if self.quantization is not None:
            options["quantization_config"] = _read_value(self.quantization)
            if not isinstance(options["quantization_config"], dict):
                raise ConfigError(f"--quantization is {shown(self.quantization)}; a JSON object is expected")
        return options


def _read_value(words: str) -> Any:
    """A value as JSON if it parses, otherwise as text."""
    try:
        return json.loads(words)
    except (ValueError, RecursionError):
        return words
