"""Whether what was computed is right: the distance from a reference, equal bits, equal answers."""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from bench.device import DEVICE, ON_CPU, free_memory  # isort: skip - before triton
import torch

from bench.report import Row
from specdec.engine import Engine
from specdec.errors import error_summary
from specdec.gpu.ranks import map_tensors
from specdec.kvcache.fp8_pool import Fp8Pool
from specdec.kvcache.layout import ByGroup

DTYPES = {"bf16": (torch.bfloat16, 1e-2), "fp16": (torch.float16, 2e-3), "fp32": (torch.float32, 2e-6)}
"""Dtypes of kernels, and how far each may be from float64. The interpreter has no bf16."""
if ON_CPU:
    del DTYPES["bf16"]


def attempt(name: str, make: Callable[..., Row], *arguments: Any, **options: Any) -> Row:
    """The row that `make` returns, or one that failed: the other rows of a case are still of interest."""
    try:
        return make(*arguments, **options)
    except Exception as error:
        traceback.print_exc()
        return Row(name, error_summary(error), ok=False)


def attempt_all(name: str, rows: Iterable[Row]) -> Iterator[Row]:
    """The rows, up to an exception, which becomes a row that failed."""
    try:
        yield from rows
    except Exception as error:
        traceback.print_exc()
        yield Row(name, error_summary(error), ok=False)


def rows_of_each(names: Iterable[str], rows_of: Callable[[str], Iterator[Row]]) -> Iterator[Row]:
    """The rows of one name after the other; one that raises does not stop the others, and leaves no memory held."""
    for name in names:
        yield from attempt_all(name, rows_of(name))
        free_memory()


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||; infinite where something is not finite."""
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
    return error if error == error and got.isfinite().all() else float("inf")


def in_float64(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a reference: every tensor of numbers in float64, and pools of 8 bits as what kernels attend to."""

    def exact(value: Any) -> Any:
        if isinstance(value, Fp8Pool):
            return value.numbers().double() * value.scales.double()[..., None]
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return cast(dict[str, Any], map_tensors(dict(arguments), exact, Fp8Pool))


def poison() -> None:
    """Fill what the next `torch.empty` will get with NaN."""
    torch.full((1 if ON_CPU else 64 << 20,), torch.nan, device=DEVICE)


def closeness_row(name: str, error_in: Callable[[torch.dtype], float]) -> Row:
    """The distance from float64 in every dtype, each within its limit."""
    errors = {label: (error_in(dtype), limit) for label, (dtype, limit) in DTYPES.items()}
    found = ", ".join(f"{label} {error:.1e}" for label, (error, _) in errors.items())
    return Row(name, found, ok=all(error < limit for error, limit in errors.values()))


def require_same(name: str, got: Any, want: Any) -> None:
    """Exact equality of tensors, tuples of them (numbers and None too) and values by group."""
    if isinstance(got, torch.Tensor):
        torch.testing.assert_close(got, want, rtol=0, atol=0, msg=lambda text: f"{name}: {text}")
    elif isinstance(got, tuple | ByGroup):
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            require_same(f"{name}[{i}]", one, other)
    else:
        assert got == want, f"{name}: {got} {want}"


def bits_row(name: str, comparisons: Iterable[tuple[str, bool]]) -> Row:
    """Comparisons in words, and whether each had the same bits."""
    checked = list(comparisons)
    other = [what for what, equal in checked if not equal]
    found = f"other bits: {'; '.join(map(str, other))}" if other else f"{len(checked)} equal"
    return Row(name, found, ok=not other)


def company_bits(
    compute: Callable[[slice], torch.Tensor], most: int, counts: Sequence[int]
) -> Iterator[tuple[str, bool]]:
    """Does a row have the same bits among any number of rows? compute: the product of these of `most` rows."""
    whole = compute(slice(0, most))
    for count in (count for count in counts if count < most):
        yield f"the first {count}", torch.equal(compute(slice(0, count)), whole[:count])
    for number in range(0, most, max(1, most // 18)):
        yield f"row {number} alone", torch.equal(compute(slice(number, number + 1))[0], whole[number])
    yield "again", all(torch.equal(compute(slice(0, most)), whole) for _ in range(2 if ON_CPU else 8))


def answers_row(name: str, found: Sequence[Any], want: Sequence[Any], note: str = "", *, ok: bool = True) -> Row:
    """How many answers are those that are expected, and which are not."""
    wrong = [number for number, (a, b) in enumerate(zip(found, want, strict=True)) if a != b]
    text = f"{len(want) - len(wrong)} of {len(want)} equal" + (f"; not {wrong[:10]}" if wrong else "")
    return Row(name, text, note, ok and not wrong)


def level_row(engine: Engine, work: Callable[[], Any], rounds: int, held: Callable[[], Sequence[int]]) -> Row:
    """`work` until `rounds` ran: it gives what it gave first, and in the second half nothing of `held` grows."""
    first, begin = work(), time.perf_counter()
    levels, same = [held()], True
    while engine.stats().batches < rounds:
        same &= work() == first
        levels.append(held())
    half = levels[len(levels) // 2 :]
    grown = [last - middle for last, middle in zip(half[-1], half[0], strict=True)]
    found = f"{grown} more in the second half; answers {'as at first' if same else 'CHANGED'}"
    seconds = f"{time.perf_counter() - begin:.0f} s"
    return Row(f"memory over {engine.stats().batches} rounds", found, seconds, same and max(grown, default=0) <= 0)
