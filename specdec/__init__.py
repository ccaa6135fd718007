"""Speculative decoding for PyTorch and transformers models, exact with sliding windows and shared KV.

Public names are loaded at their first use: `import specdec` and `specdec --help` do not import torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if not (Path(__file__).parent / "attention").exists():  # source checkout: sub-packages are siblings
    __path__.append(str(Path(__file__).parent.parent))

from specdec.lazy import load as _load

if TYPE_CHECKING:
    from specdec.attention.trees.tree import DraftTree
    from specdec.config import EngineConfig, SamplingParams, SpecConfig
    from specdec.draft_models.base import Drafter
    from specdec.engine import Engine
    from specdec.errors import SpecDecError
    from specdec.hf_generate import generate
    from specdec.runtime.calls.handle import Handle
    from specdec.runtime.request_output import GenerationOutput, RequestStats

__version__ = "0.2.0"
__all__ = [
    "DraftTree",
    "Drafter",
    "Engine",
    "EngineConfig",
    "GenerationOutput",
    "Handle",
    "RequestStats",
    "SamplingParams",
    "SpecConfig",
    "SpecDecError",
    "__version__",
    "generate",
]
_HOMES = {
    "DraftTree": "specdec.attention.trees.tree",
    "Drafter": "specdec.draft_models.base",
    "Engine": "specdec.engine",
    "EngineConfig": "specdec.config",
    "GenerationOutput": "specdec.runtime.request_output",
    "Handle": "specdec.runtime.calls.handle",
    "RequestStats": "specdec.runtime.request_output",
    "SamplingParams": "specdec.config",
    "SpecConfig": "specdec.config",
    "SpecDecError": "specdec.errors",
    "generate": "specdec.hf_generate",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # a type checker sees only the names imported above

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = _load(_HOMES[name], name)  # later look-ups find it directly
        return value
