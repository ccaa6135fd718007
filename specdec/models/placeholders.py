"""Ids that stand for images, video and sound in a text: what a multimodal model embeds in their place.

Gemma 4 and others embed such an id as padding where no pixels are given, and so must we: it may stand in a prompt, and
a model may write it. What its own forward hands to the embedding says which id that is, whatever the family.
"""

from typing import Any, NamedTuple

import torch


class Placeholders(NamedTuple):
    """ids: [P] those that are replaced. embedded: [P] by what."""

    ids: torch.Tensor
    embedded: torch.Tensor

    def replaced_in(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens of any shape, as the model embeds them."""
        found = tokens[..., None] == self.ids
        return torch.where(found.any(-1), (found * self.embedded).sum(-1), tokens)


@torch.inference_mode()
def find_placeholders(model: Any, device: torch.device) -> Placeholders | None:
    """model: a copy, with its own attention. None: nothing is replaced. Nothing is run for a model of text alone."""
    config = model.config
    text = config.get_text_config()
    if text is config:
        return None
    named = {value for key, value in vars(config).items() if "token" in key and isinstance(value, int)}
    ids = sorted(value for value in named if 0 <= value < text.vocab_size)
    seen: list[torch.Tensor] = []
    tokens = torch.tensor([ids], dtype=torch.int64, device=device)
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        model(input_ids=tokens, use_cache=False)
    except Exception:  # it wants the image that an id stands for: then no such text is run here either
        return None
    finally:
        hook.remove()
    if not seen or seen[0].shape != tokens.shape:
        return None
    changed = (seen[0] != tokens)[0]
    return Placeholders(tokens[0, changed], seen[0][0, changed]) if bool(changed.any()) else None
