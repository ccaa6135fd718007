"""Speculative decoding for PyTorch and transformers models, exact with sliding windows and shared KV."""

from pathlib import Path

if not (Path(__file__).parent / "attention").exists():  # source checkout: sub-packages are siblings
    __path__.append(str(Path(__file__).parent.parent))

from specdec.attention.tree import DraftTree
from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.base import Drafter
from specdec.engine import Engine
from specdec.errors import SpecDecError
from specdec.hf_generate import generate
from specdec.request import GenerationOutput, RequestStats

__version__ = "0.1.0"
__all__ = [
    "DraftTree",
    "Drafter",
    "Engine",
    "EngineConfig",
    "GenerationOutput",
    "RequestStats",
    "SamplingParams",
    "SpecConfig",
    "SpecDecError",
    "__version__",
    "generate",
]
