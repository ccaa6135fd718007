"""Names of transformers' modules in the tables of families."""

from torch import nn


def family_name(module: nn.Module) -> str:
    """The exact class of a module of transformers, "folder.Class"; "" for any other class."""
    kind = type(module)
    folder = kind.__module__.removeprefix("transformers.models.").partition(".")[0]
    known = kind.__module__ == f"transformers.models.{folder}.modeling_{folder}"
    return f"{folder}.{kind.__qualname__}" if known else ""
