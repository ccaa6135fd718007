"""`specdec train`: a drafter for a target, from a file of prompts. Its options are `TrainSettings`."""

import os

from specdec.cli.command import command
from specdec.lazy import load
from specdec.progress import Interrupted
from specdec.training.train_settings import TrainSettings


@command(no_args_is_help=True)
def train(settings: TrainSettings) -> None:
    """The same command goes on where it was stopped. Several GPUs: accelerate launch -m specdec.cli train ..."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    load("specdec.cli.bodies.settings", "quiet_libraries")()
    try:
        load("specdec.training.train_drafter", "train_drafter")(settings)
    except KeyboardInterrupt:
        kept = settings.out / "training"
        raise Interrupted(f"what is done is kept in {kept}, the same command goes on") from None
