"""Maximum sequence length of a model, read from its config.

Invariant: up to `max_len` tokens, the encoding of a position does not depend on the other rows of a forward, so neither
a batch nor a draft can change a request. RoPE of the types `longrope` and `dynamic` changes its frequencies for all
rows if the longest position of a forward exceeds a limit; so longer sequences are refused.
"""

from typing import Any, NamedTuple

from specdec.errors import ConfigError


class ContextLength(NamedTuple):
    """How many tokens of a sequence a model can serve.

    default: length if the user sets none. max_len: the largest allowed length (None: any). why: reason of that limit.
    end: the first position that cannot be computed, or not independently of other rows. None: all positions can be
    computed, even beyond the model's training; only drafters use these.
    """

    default: int | None
    max_len: int | None
    why: str
    end: int | None

    def require(self, max_model_len: int, name: str) -> None:
        """Raise ConfigError if the model called `name` must not run sequences of this length."""
        if self.max_len is not None and max_model_len > self.max_len:
            raise ConfigError(
                f"max_model_len={max_model_len}: {name} serves at most {self.max_len} tokens, {self.why}; "
                f"set max_model_len to {self.max_len} or less, or leave it None"
            )


def context_length(config: Any) -> ContextLength:
    """Read a text config: `max_position_embeddings`, extended by static RoPE scaling and limited by dynamic kinds."""
    stated = getattr(config, "max_position_embeddings", None)
    stated = int(stated) if stated else None
    limits: list[tuple[int, str]] = []
    stretched = stated
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in by_layer_type or [parameters]:
        kind = str(rope.get("rope_type") or rope.get("type") or "default")
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if kind == "longrope" and (original or stated):
            limit = int(original or stated or 0)
            limits.append((limit, f"since its longrope frequencies change beyond {limit}, for a whole batch at once"))
        elif "dynamic" in kind and stated:
            limits.append((stated, f"since its dynamic RoPE frequencies change beyond {stated}, for a whole batch"))
        elif kind in ("yarn", "linear") and stated:
            base = original if kind == "yarn" and original else stated
            stretched = max(stretched or 0, int(base * (rope.get("factor") or 1)))
    if limits:
        most, why = min(limits)
        return ContextLength(min(most, stated or most), most, why, most)
    end = None if parameters else stated  # without RoPE, positions may be rows of a table
    return ContextLength(stated, stretched, "the positions that its config states", end)
