"""What an engine of a recipe takes, and how long its steps are, next to what `specdec recipe` says.

One engine a recipe, with the sizes and drafts of its command and random weights of its shape; on a GPU each in a
process of its own, as kernels and libraries that are loaded stay. Captures and the rest (activations, tables,
libraries) are one figure for all recipes.

Weights, K/V and all that is taken must be within 5 % of the recipe, and a plain step within 10 % on a GPU that the
recipe has a time for.
"""

import gc
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from bench.device import DEVICE, DTYPE, ON_CPU, free_memory  # isort: skip - before triton
import torch

from bench.report import Row
from bench.subjects import OPERATIONS, engine_of, pair_of, prompts_of, round_ms
from bench.verify import attempt
from specdec.config import SamplingParams, SpecConfig
from specdec.measurement.recipes import CONTEXT, REQUESTS, TOKENS, find_recipe
from tools.recipe_figures import recipe

MEMORY_BOUND, TIME_BOUND = 0.05, 0.1


def measured_rows(recipes: Sequence[str], layers: int, context: int) -> Iterator[Row]:
    for name in recipes:
        yield attempt(name, _row if ON_CPU else _row_of_process, name, layers, context or CONTEXT)
        free_memory()


def _row_of_process(*given: object) -> Row:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_row, *given).result()  # type: ignore[arg-type]


def _row(name: str, layers: int, context: int) -> Row:
    found = find_recipe(name)
    free_memory()
    taken, tensors = device_bytes(), tensor_bytes()
    pair = pair_of(f"{found.shape}:{found.form}".rstrip(":"), layers, operations=OPERATIONS)
    drafter, spec = pair.drafter("own"), SpecConfig(found.num_steps, adaptive=True)
    free_memory()
    weights = tensor_bytes() - tensors
    said = recipe(found, pair.shrink, DTYPE, DEVICE.type)
    want = {"weights": sum(said.weights.values())} | {each["name"]: each["batch_bytes"] for each in said.groups}
    with engine_of(pair.target, drafter, spec, max_batch_size=REQUESTS, max_model_len=TOKENS) as engine:
        prompts = prompts_of([context] * REQUESTS, pair.target.vocab_size, 0)
        engine.generate(prompts, SamplingParams(max_new_tokens=4, ignore_eos=True), progress=False)
        chain = SpecConfig(found.num_steps, adaptive=False)
        step, drafted = (round_ms(engine, prompts[:1], draft) for draft in (False, chain))
        parts, captures = {"weights": weights} | engine.cache.bytes_by_group(), engine.stats().captures.bytes
        everything = device_bytes() - taken or sum(parts.values())
    figures: dict[str, object] = {"layers": layers or "all"}
    figures["GB (to the recipe)"] = ", ".join(
        f"{part} {size / 1e9:.2f} ({size / want[part]:.3f})" for part, size in parts.items()
    )
    rest = everything - sum(parts.values()) - captures
    figures |= {"captures GB": f"{captures / 1e9:.2f}", "rest GB": f"{rest / 1e9:.2f}"}
    ratio = everything / (sum(want.values()) + said.rest)
    figures["all, to the recipe"] = f"{everything / 1e9:.2f} ({ratio:.3f})"
    known = {each.gpu: each.expected_ms for each in said.steps}
    expected = None if ON_CPU else next((ms for gpu, ms in known.items() if gpu in torch.cuda.get_device_name()), None)
    figures["step ms"] = f"{step:.2f}" + (f" ({step / expected:.3f} of {expected:.2f})" if expected else "")
    figures["round ms"] = f"{drafted:.2f}, {found.num_steps} drafts ({drafted / step:.2f} steps)"
    near = all(abs(size / want[part] - 1) <= MEMORY_BOUND for part, size in parts.items())
    near &= ON_CPU or layers > 0 or abs(ratio - 1) <= MEMORY_BOUND
    timely = not expected or layers > 0 or abs(step / expected - 1) <= TIME_BOUND
    return Row(name, ok=near and timely, figures=figures)


def device_bytes() -> int:
    """Bytes of the GPU that all processes use; 0 on a CPU."""
    if ON_CPU:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def tensor_bytes() -> int:
    """Bytes of all tensors."""
    if not ON_CPU:
        return torch.cuda.memory_allocated()
    gc.collect()
    live = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.device.type == "cpu")
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in live}  # views are of one
    return sum(storage.nbytes() for storage in storages.values())
