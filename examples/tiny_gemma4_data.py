"""Tokenizer, packing and answer generation for the bundled tiny Gemma 4 pair.

It turns word problems into rows of token ids with in-document positions, and prompts into answers. It knows nothing of
optimisers or of the drafter. Invariant: a document never spans two rows, and position 0 starts a new document.
"""

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
from word_problems import final_answer, generate, heldout_questions, stream

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
PAD, EOS, BOS, UNK, TURN, TURN_END = range(6)
VOCAB = 2048
QUESTION, ANSWER = 1, 2  # kind of each token; 0 is padding
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' + m['content'] + '<turn|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
)
Document = tuple[np.ndarray, int]  # token ids, number of those that belong to the prompt


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


def pack(documents: list[Document], length: int) -> list[list[Document]]:
    """First fit, longest first: rows of whole documents."""
    rows: list[list[Document]] = []
    room: list[int] = []
    first = 0  # rows before it are too full for even a short document
    for doc in sorted(documents, key=lambda d: -len(d[0])):
        row = next((i for i in range(first, len(rows)) if room[i] >= len(doc[0])), None)
        if row is None:
            rows.append([])
            room.append(length)
            row = len(rows) - 1
        rows[row].append(doc)
        room[row] -= len(doc[0])
        while first < len(rows) and room[first] < 40:
            first += 1
    return rows


def to_arrays(
    rows: list[list[Document]], length: int, dtype: type[np.signedinteger] = np.int16
) -> dict[str, np.ndarray]:
    """ids, positions inside the document, and kind; the padding behind the last document is one more document.

    `dtype` of ids and positions: int16 holds the bundled vocabulary, int32 any.
    """
    shape = (len(rows), length)
    ids, kind = np.full(shape, PAD, dtype), np.zeros(shape, np.uint8)
    pos = np.zeros(shape, dtype)
    for r, row in enumerate(rows):
        at = 0
        for tokens, prompt_len in row:
            end = at + len(tokens)
            ids[r, at:end], pos[r, at:end] = tokens, np.arange(len(tokens))
            kind[r, at : at + prompt_len], kind[r, at + prompt_len : end] = QUESTION, ANSWER
            at = end
        pos[r, at:] = np.arange(length - at)
    return {"ids": ids, "pos": pos, "kind": kind}


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
            rows = pack(waiting, self.length)
            rng.shuffle(rows)
            # rows beyond the batch wait for the next one, so nothing is lost and no row is half empty
            waiting = [doc for row in rows[self.rows :] for doc in row]
            yield to_arrays(rows[: self.rows], self.length)


def _same(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return batch  # arrays travel through a pipe; tensors would need shared memory, which is scarce in containers


def batches(dataset: PackedProblems, workers: int) -> Iterator[dict[str, np.ndarray]]:
    prefetch = 8 if workers else None
    return iter(DataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=_same, prefetch_factor=prefetch))


def masks(pos: torch.Tensor, window: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Additive causal masks [B, 1, T, T] of packed rows; a sliding layer sees `window` keys including itself."""
    doc = (pos == 0).cumsum(1)
    t = torch.arange(pos.shape[1], device=pos.device)
    behind = t[:, None] - t[None, :]
    full = (doc[:, :, None] == doc[:, None, :]) & (behind >= 0)
    return {
        "full_attention": additive(full, dtype),
        "sliding_attention": additive(full & (behind < window), dtype),
    }


def additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, T, T] bool -> [B, 1, T, T] of 0 and -inf."""
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return zeros.masked_fill_(~allowed, float("-inf")).unsqueeze(1)


@torch.no_grad()
def answer(
    model: Gemma4ForCausalLM, prompts: list[list[int]], max_new: int, batch: int, temperature: float = 0.0
) -> list[list[int]]:
    """The model's own answers, without the prompt, up to and including the token that ends the turn."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # equal lengths together: little padding
    out: list[list[int]] = [[] for _ in prompts]
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    was_training = model.training
    model.eval()
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        width = max(len(prompts[i]) for i in part)
        ids = torch.full((len(part), width), PAD)
        for r, i in enumerate(part):
            ids[r, width - len(prompts[i]) :] = torch.tensor(prompts[i])
        ids = ids.to(model.device)
        settings = {"do_sample": False, "max_new_tokens": max_new, **sampling}
        with torch.compiler.set_stance("force_eager"):  # lengths change every step; compiling each would be hopeless
            new = model.generate(ids, attention_mask=(ids != PAD).long(), **settings)[:, width:].tolist()
        for r, i in enumerate(part):
            stop = next((k for k, token in enumerate(new[r]) if token in (TURN_END, EOS)), len(new[r]) - 1)
            out[i] = new[r][: stop + 1]
    model.train(was_training)
    return out


def accuracy(
    model: Gemma4ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[dict[str, str]], max_new: int
) -> tuple[float, list[list[int]]]:
    """Share of problems whose greedy final answer is right, and the answers."""
    prompts = tokenizer([prompt_text(p["question"]) for p in problems], add_special_tokens=False)["input_ids"]
    answers = answer(model, prompts, max_new, batch=1024)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    right = [final_answer(t) == final_answer(p["answer"]) for t, p in zip(texts, problems, strict=True)]
    return sum(right) / len(right), answers


def tokenizer_corpus(gsm8k: list[dict[str, str]], seed: int, count: int) -> list[str]:
    problems = [*gsm8k, *generate(seed, count, heldout_questions())]
    return [text for p in problems for text in (p["question"], p["answer"])]
