"""The table of cases, `cases.toml`: what each measures, at which shapes, formats and batch sizes, and next to what.

module    its file in cases/, where that has another name; a part NAME is the function `NAME_rows` there
what      what it measures
against   what that is compared with
parts     what it does, in this order; the `timed` ones only where no check before them failed
options   arguments of the parts that the command line can give, with what they usually are
cpu       options and parts on a CPU, with interpreted kernels; without it the case needs a GPU
quick     options and parts of a short run on a GPU
gpus      devices that it needs; 0: it runs on any CPU, kernels not interpreted
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the registry."""

    name: str
    what: str
    against: str
    parts: list[str]
    module: str = ""
    timed: list[str] = field(default_factory=list)
    options: Mapping[str, Any] = field(default_factory=dict)
    cpu: Mapping[str, Any] | None = None
    quick: Mapping[str, Any] = field(default_factory=dict)
    gpus: int = 1

    @property
    def path(self) -> str:
        """The module of its parts."""
        return f"bench.cases.{self.module or self.name.replace('-', '_')}"

    def values(self, on_cpu: bool = False, quick: bool = False) -> dict[str, Any]:
        """Every option in this kind of run, `parts` among them."""
        small = self.cpu if on_cpu else self.quick if quick else None
        return {"parts": self.parts, **self.options, **(small or {})}


_TABLE = tomllib.loads(Path(__file__).with_name("cases.toml").read_text("utf-8"))
CASES = {name: Case(name=name, **fields) for name, fields in _TABLE.items()}
