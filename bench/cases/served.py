"""Tokens a second of streamed chats over HTTP, next to `Engine.generate` in the same process. Clients have processes of
their own. Texts are of random words; prompts have a token for each character."""

import json
import os
import random
import signal
import statistics
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.device import ROOT  # isort: skip - before triton
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from bench.report import Row
from bench.subjects import OPERATIONS, engine_of, pair_of, prompts_of
from specdec import SamplingParams
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.server import listen, run_app
from specdec.serving.server_settings import ServeSettings

CONTROL = ["<eos>", "<unk>", "<user>"]
TEMPLATE = "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}"
PASSES = 4  # over HTTP; the last one counts, since others run and capture shapes for the first time


def tokenizer_of(vocab_size: int) -> PreTrainedTokenizerFast:
    draw, letters = random.Random(0), string.ascii_lowercase
    names = dict.fromkeys([*CONTROL, *letters])
    while len(names) < vocab_size:
        names["▁" * (draw.random() < 0.7) + "".join(draw.choices(letters, k=draw.randrange(2, 7)))] = None
    whole = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, [], unk_token="<unk>"))
    whole.normalizer, whole.decoder = normalizers.Replace(" ", "▁"), decoders.Replace("▁", " ")
    control = {"eos_token": "<eos>", "unk_token": "<unk>", "extra_special_tokens": CONTROL}
    return PreTrainedTokenizerFast(tokenizer_object=whole, chat_template=TEMPLATE, **control)


def streams_rows(shape: str, requests: Sequence[int], prompt: int, tokens: int, clients: int) -> Iterator[Row]:
    """requests: multiples of `clients`."""
    target = pair_of(shape, operations=OPERATIONS).target
    tokenizer = tokenizer_of(target.vocab_size)
    for count in requests:
        sizes = {"max_batch_size": count, "max_model_len": prompt + tokens + 64, "prefix_cache": False}
        with engine_of(target, tokenizer=tokenizer, **sizes) as engine:
            prompts = prompts_of([prompt] * count, target.vocab_size, 1)
            for _ in range(2):  # the first time shapes are captured
                begin = time.perf_counter()
                engine.generate(prompts, SamplingParams(max_new_tokens=tokens, ignore_eos=True), progress=False)
                spent = time.perf_counter() - begin
            alone = count * tokens / spent
            seconds, first, events = _serve(AsyncEngine(engine, max_waiting=count), clients, count, prompt, tokens)
        served = count * tokens / seconds
        figures = {"generate, tokens/s": f"{alone:,.0f}", "streamed": f"{served:,.0f} ({served / alone:.2f})"}
        figures |= {"first token, ms": f"{1e3 * first:.0f}", "events an answer": f"{events / count:.0f}"}
        yield Row(f"{count} of {prompt} + {tokens}", figures=figures)


def _serve(engine: AsyncEngine, clients: int, count: int, *load: int) -> tuple[float, float, int]:
    """Seconds of the last pass, the median until a first event, and the number of events."""
    bound, passes = listen("127.0.0.1", 0), list[list[Any]]()
    arguments = bound.getsockname()[1], count // clients, *load
    client = [sys.executable, str(ROOT / "bench" / "stream_clients.py"), *map(str, arguments)]

    def ask() -> None:
        while len(passes) < PASSES and not (passes and None in passes[-1]):
            running = [subprocess.Popen(client, stdout=subprocess.PIPE) for _ in range(clients)]
            passes.append([json.loads(each.communicate()[0] or "null") for each in running])
        os.kill(os.getpid(), signal.SIGTERM)  # ends the server

    asking = threading.Thread(target=ask)
    run_app(engine, ServeSettings(model_names=["random"]), bound, asking.start)
    asking.join()
    if None in (last := passes[-1]):  # the client has said why
        raise RuntimeError(f"{last.count(None)} of {clients} clients failed in pass {len(passes)}")
    seconds = max(part["end"] for part in last) - min(part["begin"] for part in last)
    first = statistics.median(first for part in last for first in part["firsts"])
    return seconds, first, sum(part["events"] for part in last)
