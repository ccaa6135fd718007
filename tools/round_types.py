"""How many types does a round meet? Those of this package that a frame holds between `Engine.step` and its return.

    python tools/round_types.py

Steady rounds of the bundled pair on the CPU: two requests that decode, no prompt, no grammar. A type counts when an
instance of it is an argument, a local variable or a result of any function of specdec/engine.py and specdec/runtime on
the way. Modules of torch (layers), exceptions and enumerations do not count. Prints the types by the module that
defines them, with how many functions hold each; docs/life_of_a_request.md says what they are for.
"""

import enum
import sys
from collections import Counter, defaultdict
from types import FrameType
from typing import Any

from torch import nn

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig

PACKAGE = "specdec"
ROOMS = ("specdec.engine.", "specdec.runtime.")


def own(value: Any) -> type | None:
    """The type of a value, if it is one of this package that counts."""
    kind = type(value)
    if not kind.__module__.startswith(f"{PACKAGE}.") or issubclass(kind, nn.Module | BaseException | enum.Enum | type):
        return None
    return kind


def types_met(engine: Engine) -> dict[type, Counter[str]]:
    """Type -> the functions of `ROOMS` that hold an instance, in one step of an engine."""
    met: dict[type, Counter[str]] = defaultdict(Counter)

    def look(frame: FrameType, event: str, result: Any) -> None:
        if event != "return" or not f"{frame.f_globals.get('__name__', '')}.".startswith(ROOMS):
            return
        for value in (*frame.f_locals.values(), result):
            kind = own(value)
            if kind is not None:
                met[kind][f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"] += 1

    sys.setprofile(look)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return met


def types_of_a_round() -> dict[type, Counter[str]]:
    """Type -> the functions that hold an instance, in a steady round of the bundled pair."""
    spec, config = SpecConfig(4, adaptive=False), EngineConfig(max_batch_size=2, max_model_len=256, device="cpu")
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp", spec=spec, config=config) as engine:
        for text in ("Tom has 3 boxes.", "A farm has 7 hens."):
            engine.submit(engine.encode(text), SamplingParams(max_new_tokens=60, ignore_eos=True))
        for _ in range(4):
            engine.step()
        return types_met(engine)


def main() -> None:
    met = types_of_a_round()
    by_module: dict[str, list[type]] = defaultdict(list)
    for kind in met:
        by_module[kind.__module__].append(kind)
    for module in sorted(by_module):
        print(module)
        for kind in sorted(by_module[module], key=lambda kind: kind.__name__):
            print(f"    {kind.__name__:24} {len(met[kind]):3} functions")
    print(f"{len(met)} types")


if __name__ == "__main__":
    main()
