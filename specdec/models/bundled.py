"""The bundled checkpoints by name: a tiny pair with an EAGLE-3 head, and a head for SmolLM2."""

from pathlib import Path

BUNDLED_DIR = Path(__file__).parent.parent / "bundled"
BUNDLED_NAMES = ("tiny-gemma4", "tiny-gemma4-mtp", "tiny-gemma4-eagle3", "smollm2-135m-eagle3")
HELD_OUT_PROBLEMS = BUNDLED_DIR / "word_problems_heldout.jsonl"


def resolve_name(name: str) -> str:
    """The local path of a bundled name; any other name (a path, a hub id) is returned unchanged."""
    return str(BUNDLED_DIR / name) if name in BUNDLED_NAMES else name
