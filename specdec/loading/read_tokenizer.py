"""Reads a checkpoint's tokenizer: transformers' class of it, with what its own files say besides."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

SAMPLE = " Don't say 12 1234567,  e\u0301\u00e9 ABc\n\n  x_y \u4f60\u597d\t'LL don't!! 3.14 \ufb01"
"""A text that tokenizers of bytes cut into different pieces."""


def read_tokenizer(path: str, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer at a path or hub id, with its chat template. options: arguments of `from_pretrained`."""
    tokenizer = _with_own_steps(path, options)
    if isinstance(tokenizer.model_max_length, str):  # as some files have it; transformers compares it with numbers
        tokenizer.model_max_length = int(float(tokenizer.model_max_length))
    if tokenizer.chat_template is None:  # transformers reads this file for a processor alone
        tokenizer.chat_template = _stored(path, "chat_template.json", options).get("chat_template")
    return tokenizer


def _with_own_steps(path: str, options: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer. One of bytes cuts texts as its tokenizer.json says.

    transformers 5 takes the steps before the vocabulary from the class that a checkpoint names instead. DeepSeek's
    distilled Llamas and its coders name that of Llama 2, by which no space is read or written.
    """
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, **options)
    backend: Any = getattr(found, "backend_tokenizer", None)
    if backend is None or type(found) is PreTrainedTokenizerFast:  # which takes all from the file
        return found
    described = _stored(path, "tokenizer.json", options)
    if '"ByteLevel"' not in json.dumps(described.get("decoder")):
        return found
    described |= {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": [], "post_processor": None}
    if _pieces(Tokenizer.from_str(json.dumps(described))) == _pieces(backend):
        return found
    fast: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(path, **options)
    return fast


def _stored(path: str, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON file of the checkpoint; empty: there is none."""
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(path, name, **options, **quiet)
    return {} if file is None else dict(json.loads(Path(file).read_text("utf-8")))


def _pieces(backend: Any) -> list[Any]:
    """The pieces into which a tokenizer cuts SAMPLE before it looks them up."""
    text = SAMPLE if backend.normalizer is None else backend.normalizer.normalize_str(SAMPLE)
    return [text] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
