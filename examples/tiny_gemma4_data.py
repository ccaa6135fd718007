"""Tokenizer, batches and answers of the bundled tiny Gemma 4; it knows nothing of optimisers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.utils.data import DataLoader, IterableDataset
from transformers import Gemma4ForCausalLM, PreTrainedTokenizerFast
from word_problems import generate, heldout_questions, stream

from specdec import Engine, EngineConfig, SamplingParams
from specdec.evaluation.accuracy_report import is_correct
from specdec.models.target import TargetModel
from specdec.training.packed_rows import Document, pack_documents, to_arrays

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
PAD, EOS, BOS, UNK, TURN, TURN_END = range(6)
VOCAB = 2048
CHAT_TEMPLATE = """{{ bos_token }}{% if tools %}{{ '<|turn>system\\nTools: ' }}{{ tools | tojson }}
{{ 'Call them as <tool_call>{"name": ..., "arguments": {...}}</tool_call><turn|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' }}
{{- m['content'] or '' }}
{%- for call in m['tool_calls'] or [] %}{{ '<tool_call>' }}{{ call['function'] | tojson }}
{{- '</tool_call>' }}{% endfor %}
{{- '<turn|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"""


def prompt_text(question: str) -> str:
    """What the chat template renders for one user turn and the generation prompt."""
    return f"<bos><|turn>user\n{question}<turn|>\n<|turn>model\n"


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits; a plain string gets one <bos>, a rendered chat none on top of its own."""
    core = Tokenizer(models.BPE(unk_token=None))
    split_digits = pre_tokenizers.Split(Regex(r"\d"), behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([split_digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        additional_special_tokens=["<|turn>", "<turn|>"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )


def read_gsm8k(path: Path, dev: int = 200) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The training problems and the last `dev` of the file, which no training sees."""
    problems = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return problems[:-dev], problems[-dev:]


def encode(tokenizer: Tokenizer, problems: list[dict[str, str]], limit: int) -> list[Document]:
    """Prompt and answer are encoded apart, exactly as inference sees them; overlong problems are dropped."""
    texts = [t for p in problems for t in (prompt_text(p["question"].strip()), p["answer"].strip())]
    ids = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    pairs = zip(ids[::2], ids[1::2], strict=True)
    return [(np.array([*q, *a, TURN_END], np.int32), len(q)) for q, a in pairs if len(q) + len(a) < limit]


class PackedProblems(IterableDataset):
    """Endless batches: fresh generated problems with a share of GSM8K documents, encoded in the worker process."""

    def __init__(self, tokenizer_json: str, gsm8k: list[Document], share: float, rows: int, length: int, seed: int):
        self.tokenizer_json, self.gsm8k, self.share = tokenizer_json, gsm8k, share
        self.rows, self.length, self.seed = rows, length, seed

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        info = torch.utils.data.get_worker_info()
        worker = info.id if info else 0
        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        problems = stream(self.seed * 1000 + worker, heldout_questions())
        rng = random.Random(self.seed * 1000 + worker + 500)
        waiting: list[Document] = []
        while True:
            while sum(len(d[0]) for d in waiting) < 1.05 * self.rows * self.length:
                waiting += encode(tokenizer, [next(problems) for _ in range(512)], self.length)
                if self.gsm8k:
                    waiting += rng.choices(self.gsm8k, k=round(512 * self.share / (1 - self.share)))
            rows = pack_documents(waiting, self.length)
            rng.shuffle(rows)
            # rows beyond the batch wait for the next one, so nothing is lost and no row is half empty
            waiting = [doc for row in rows[self.rows :] for doc in row]
            yield to_arrays(rows[: self.rows], self.length, np.int16)


def _same(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return batch  # arrays travel through a pipe; tensors would need shared memory, which is scarce in containers


def batches(dataset: PackedProblems, workers: int) -> Iterator[dict[str, np.ndarray]]:
    prefetch = 8 if workers else None
    return iter(DataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=_same, prefetch_factor=prefetch))


def accuracy(
    model: Gemma4ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[dict[str, str]], max_new: int
) -> float:
    """Share of problems whose greedy final answer is right."""
    was_training, config = model.training, EngineConfig(max_batch_size=256, max_model_len=1024)
    model.eval()
    with (
        torch.compiler.set_stance("force_eager"),  # lengths change every step; compiling each would be hopeless
        Engine(TargetModel(model), None, tokenizer=tokenizer, config=config) as engine,
    ):
        prompts = [engine.chat_prompt(problem["question"]) for problem in problems]
        outputs = engine.generate(prompts, SamplingParams(max_new), progress=False)
    model.train(was_training)
    right = [is_correct(out.text, problem["answer"]) for out, problem in zip(outputs, problems, strict=True)]
    return sum(right) / len(right)


def tokenizer_corpus(gsm8k: list[dict[str, str]], seed: int, count: int) -> list[str]:
    problems = [*gsm8k, *generate(seed, count, heldout_questions())]
    return [text for p in problems for text in (p["question"], p["answer"])]
