"""The output folder of a run. Before anything is written, it must be empty or belong to the run.

A run owns the folder whose `training/settings.json` it wrote, and continues there with the same settings. Any other
folder with files is refused, so that a mistyped --out loses no model; --overwrite replaces the model in it. The
target's own folder is always refused.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError
from specdec.loading.model_loading import Checkpoint
from specdec.training.train_settings import TrainSettings

FREE_SETTINGS = frozenset(
    {"out", "minutes", "answer_minutes", "answers", "steps", "log_every", "device", "report_count", "cache_gb", "batch"}
    | {"overwrite"}
)
"""Settings that a resumed run may change."""
RUN_FILES = ("settings.json", "state.pt", "report.json", "answers*.jsonl")
"""Files that a run leaves under `training`."""
MODEL_FILES = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("pytorch_model*.bin", "pytorch_model*.bin.index.json"),
)
"""Files that a drafter is read from. An old shard left there would be read together with the drafter's tensors."""


def require_free_folder(settings: TrainSettings) -> None:
    """Raises ConfigError unless --out is new, empty, an earlier run's, or may be overwritten. Nothing is changed."""
    out = settings.out
    if out.is_dir() and out.samefile(Checkpoint.from_name(settings.target).config_file.parent):
        raise ConfigError(f"--out {out} is the target's own folder; give another one, the drafter has its own weights")
    if settings.overwrite or not out.is_dir() or _settings_of_run(out) is not None:
        return
    held = sorted(path.name for path in out.iterdir())
    if held:
        more = f" and {len(held) - 3} more" if len(held) > 3 else ""
        raise ConfigError(
            f"--out {out} holds files that no training run made ({', '.join(held[:3])}{more}); give an empty or a new "
            "folder, or --overwrite to replace the model in it"
        )


def claim_folder(settings: TrainSettings) -> None:
    """Write the settings of a new run; keep those of a resumed run. Raises ConfigError if they differ, unless they may
    be overwritten."""
    named = ((k, v) for k, v in asdict(settings).items() if k not in FREE_SETTINGS)
    asked = {k: str(v) if isinstance(v, Path) else v for k, v in named}  # as they are read again
    asked["prompts"] = [hashlib.sha256(file.read_bytes()).hexdigest() for file in settings.prompts]
    folder, before = settings.out / "training", _settings_of_run(settings.out)
    if before is not None:
        changed = _changed(before, asked)
        if not changed:
            return
        if not settings.overwrite:
            raise ConfigError(
                f"{settings.out} holds a run with other settings ({'; '.join(changed)}); give another --out or those "
                "settings, or --overwrite to start over"
            )
    _remove(settings.out, MODEL_FILES)
    _remove(folder, RUN_FILES)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(asked, indent=2) + "\n", "utf-8")


def _settings_of_run(out: Path) -> dict[str, Any] | None:
    """The settings of the run that owns the folder; None: no run does."""
    try:
        settings = json.loads((out / "training" / "settings.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return settings if isinstance(settings, dict) and {"target", "kind", "prompts"} <= settings.keys() else None


def _changed(before: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    names = [name for name, value in asked.items() if before.get(name) != value and name != "prompts"]
    changed = [f"--{name.replace('_', '-')} was {before.get(name)}, is {asked[name]}" for name in names]
    if asked["prompts"] != before["prompts"]:
        changed.append("the content of --prompts has changed")
    return changed


def _remove(folder: Path, patterns: tuple[str, ...]) -> None:
    """Removes links, but not their targets: a snapshot of the hub's cache consists of links."""
    for pattern in patterns:
        for file in folder.glob(pattern):
            file.unlink()
