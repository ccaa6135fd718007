"""`specdec train`: a drafter for a target, from a file of prompts."""

import os

from specdec.cli.settings import quiet_libraries
from specdec.progress import Interrupted
from specdec.training.train_drafter import train_drafter
from specdec.training.train_settings import TrainSettings


def train(*, settings: TrainSettings) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    quiet_libraries()
    try:
        train_drafter(settings)
    except KeyboardInterrupt:
        kept = settings.out / "training"
        raise Interrupted(f"what is done is kept in {kept}, the same command goes on") from None
