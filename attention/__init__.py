"""The hook into transformers, the plan of each forward, the keys of a draft in progress, page tables, and attention."""

from specdec.attention.plan import KVPlan, plan_chunk, plan_frozen, plan_verify
from specdec.attention.trees.tree import DraftTree

assert __name__ == "specdec.attention", "import specdec.attention, not attention"

__all__ = ["DraftTree", "KVPlan", "plan_chunk", "plan_frozen", "plan_verify"]
