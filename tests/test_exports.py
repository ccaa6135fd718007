"""The public names, pinned: a change here is a change of the API."""

from importlib.metadata import version

import specdec

EXPORTS = [
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


def test_exports_are_pinned_sorted_and_few():
    assert specdec.__all__ == EXPORTS == sorted(EXPORTS)
    assert len(EXPORTS) <= 12


def test_every_export_exists():
    assert [name for name in specdec.__all__ if not hasattr(specdec, name)] == []


def test_version_is_that_of_the_distribution():
    assert specdec.__version__ == version("specdec-runtime")
