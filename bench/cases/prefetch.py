"""Plain steps of one request while each product's next weight is asked for ahead (`specdec/layers/prefetch.py`)."""

from collections.abc import Iterator, Sequence

from bench.device import DEVICE  # isort: skip - before triton
import torch

from bench.report import Row
from bench.subjects import answers, engine_of, pair_of, prompts_of, round_ms
from specdec.config import SamplingParams
from specdec.layers.prefetch import AHEAD


def steps_rows(
    shapes: Sequence[str], megabytes: Sequence[int], forms: Sequence[str], context: int, layers: int
) -> Iterator[Row]:
    """A row a size and form, between two without."""
    for shape in shapes:
        pair = pair_of(shape, layers)
        [prompt] = prompts_of([context], pair.target.vocab_size, 0)
        asked = SamplingParams(max_new_tokens=64, ignore_eos=True, logprobs=1)
        plain, right = 0.0, None
        runs = [(form, size) for form in forms for size in megabytes]
        for form, size in [("without", 0), *runs, ("without", 0)]:
            AHEAD.most, AHEAD.streams = size << 20, [torch.cuda.Stream(DEVICE)] if form == "stream" else []
            with engine_of(pair.target, max_batch_size=1, prefix_cache=False) as engine:
                ms = round_ms(engine, [prompt])
            found = answers(engine_of(pair.target, max_batch_size=1, prefix_cache=False), [prompt], [asked])
            plain, right = plain or ms, right or found
            figures = {"form": form, "MB": size, "ms": f"{ms:.3f}", "of plain": f"{ms / plain:.3f}"}
            yield Row(shape, ok=found == right, figures=figures)
        AHEAD.most, AHEAD.streams = 0, []
