"""K/V that a drafter's head keeps, by its config.json alone. Where tensors are read too, they count."""

from specdec.draft_models.checkpoints.config_reader import Config, HeadFiles, read_settings, read_windows
from specdec.draft_models.checkpoints.drafter_formats import (
    BLOCK_FORMATS,
    EAGLE3_FORMATS,
    GEMMA4_BLOCK,
    is_block_config,
)
from specdec.kvcache.layout import KVLayout


def kept_layout(config: Config) -> KVLayout:
    """K/V of an EAGLE-3 head or a block drafter. Raises CheckpointError and UnsupportedModelError, see
    `read_settings`."""
    formats = BLOCK_FORMATS if is_block_config(config) else EAGLE3_FORMATS
    form = next((each for each in formats if each.matches(config)), formats[-1])
    settings = read_settings(config, form)
    num_layers = settings.get("num_hidden_layers", 1)
    windows = (None,) * num_layers if form is GEMMA4_BLOCK else read_windows(form, settings, num_layers)
    if form is GEMMA4_BLOCK:  # its layers are the full ones of a Gemma 4
        settings["head_dim"] = config.get("global_head_dim") or settings["head_dim"]
        settings["num_key_value_heads"] = config.get("num_global_key_value_heads") or settings["num_key_value_heads"]
    fields = HeadFiles(form, config, settings, {}).fields()
    return KVLayout.of_windows(windows, fields["num_kv_heads"], fields["head_dim"])
