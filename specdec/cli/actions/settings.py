"""Helpers of all commands: from options to the runtime's settings, and an engine."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars
from transformers.utils import logging as transformers_logging

from specdec.cli.options import PairOptions
from specdec.config import EngineConfig, OpenDepth, SamplingParams, SpecConfig
from specdec.draft_models.registry import AUTO, NONE, drafter_parts
from specdec.engine import Engine
from specdec.errors import CapacityError, UnsupportedModelError
from specdec.models.published import nearest_recipe
from specdec.progress import Interrupted, working
from specdec.settings.sampling_numbers import SamplingNumbers


def quiet_libraries() -> None:
    """Switch off warnings and bars of transformers. A download, which may take long, shows a bar on a terminal. The
    hub's warnings go to the root logger alone: the hub's own handler would write each a second time."""
    hub = hub_logging.get_logger("huggingface_hub")
    for handler in [*hub.handlers]:
        hub.removeHandler(handler)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if sys.stderr.isatty():
        enable_progress_bars()
    else:
        disable_progress_bars()


def prepare_output(pair: PairOptions) -> None:
    """Quieten the libraries, and log specdec's own messages from --log-level on."""
    quiet_libraries()
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("specdec").setLevel((pair.log_level or "warning").upper())


@contextmanager
def shown_when_interrupted(table: Callable[[Any], str]) -> Iterator[None]:
    """After Ctrl-C in the block, print the report of what was finished."""
    try:
        yield
    except Interrupted as stop:
        if stop.report is not None:
            print(table(stop.report))
        raise


def shared_fields(options: Any, settings: type[Any]) -> dict[str, Any]:
    """Options that have the name of a field of `settings`."""
    names = {each.name for each in fields(options)} & {each.name for each in fields(settings)}
    return {name: getattr(options, name) for name in names}


def request_params(options: SamplingNumbers) -> SamplingParams:
    """Parameters of every request, from the options that have their names."""
    return SamplingParams(**shared_fields(options, SamplingNumbers))


def engine_config(options: PairOptions, batch_size: int, **changes: Any) -> EngineConfig:
    """Settings of an engine, from the options that have the name of one. changes: settings in place of these."""
    return EngineConfig(max_batch_size=batch_size, **shared_fields(options, EngineConfig) | changes)


def pair_arguments(pair: PairOptions, batch_size: int, **changes: Any) -> dict[str, Any]:
    """Arguments of `Engine.from_pretrained`: see `engine_config`."""
    others = pair.draft_topk, pair.num_draft_tokens, pair.adaptive
    spec = OpenDepth(4, *others) if pair.num_steps is None else SpecConfig(pair.num_steps, *others)
    drafter_options = {} if pair.drafter_revision is None else {"revision": pair.drafter_revision}
    names = {"target": pair.target, "drafter": drafter_name(pair), "drafter_options": drafter_options}
    return {**names, "spec": spec, "config": engine_config(pair, batch_size, **changes), **pair.loading()}


def load_engine(pair: PairOptions, batch_size: int, **changes: Any) -> Engine:
    """An engine of the pair. If a model of the hub is refused, the error also names the recipe of a similar model."""
    try:
        with working(f"loading {pair.target}"):
            return Engine.from_pretrained(**pair_arguments(pair, batch_size, **changes))
    except (CapacityError, UnsupportedModelError) as error:
        on_hub = "/" in pair.target and not Path(pair.target).exists()
        near = nearest_recipe(pair.target, cutoff=0.5) if on_hub else None
        if near is None:
            raise
        raise type(error)(f"{error}; what runs is `specdec recipe {near.name}`, of {near.target}") from error


def drafter_name(pair: PairOptions) -> str | None:
    """The drafter that the engine is given. 'auto' means the bundled target's own; the engine finds that of others."""
    if pair.target == "tiny-gemma4" and drafter_parts(pair.drafter)[0] == AUTO:
        return pair.drafter.replace(AUTO, "tiny-gemma4-mtp", 1)
    return None if pair.drafter == NONE else pair.drafter
