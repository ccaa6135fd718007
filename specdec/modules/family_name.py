"""Names of transformers' modules, as the family tables use them."""

from torch import nn


def family_name(module: nn.Module) -> str:
    """The class of a transformers module as "folder.Class"; "" for any other class."""
    kind = type(module)
    folder = kind.__module__.removeprefix("transformers.models.").partition(".")[0]
    known = kind.__module__ == f"transformers.models.{folder}.modeling_{folder}"
    return f"{folder}.{kind.__qualname__}" if known else ""
