"""Tokenizers whose tokens a reader can tell: two characters each, or bytes.

A plugin of conftest.py.
"""

from collections.abc import Iterable, Sequence

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny_families import VOCAB


@pytest.fixture(scope="session")
def pair_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 96 tokens with two characters each, a0 to j5: stop strings can cross their borders."""
    vocab = {f"{'abcdefghij'[i // 10]}{i % 10}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[a-j][0-9]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_level(merges: Iterable[tuple[str, str]] = (), symbols: Sequence[str] = (), **options: bool) -> Tokenizer:
    """Build a byte-level BPE tokenizer: a token for each symbol (by default each byte) and for each merged pair."""
    merges = list(merges)
    vocab = {symbol: i for i, symbol in enumerate(symbols or sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for pair in merges:
        vocab.setdefault("".join(pair), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte, and <eos> = 256. Some characters need several tokens."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
