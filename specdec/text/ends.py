"""Where a text ends: which token ids a model and its tokenizer say so of."""

from typing import Any

from transformers import PreTrainedModel


def end_tokens(model: PreTrainedModel, tokenizer: Any | None) -> frozenset[int]:
    """Ids that end a text: of the generation config, else of the config, else of the tokenizer."""
    for source in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, (list, tuple)) else [ids])
    return frozenset()
