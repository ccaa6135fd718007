"""The bytes of one token, also where it is only a part of a character and decodes to U+FFFD by itself.

Two ways of writing bytes are known: the printable alphabet of byte-level BPE (GPT-2's), and <0x41> of byte fallback.
"""

import re
from functools import lru_cache
from typing import Any

REPLACEMENT = "\ufffd"
_BYTE = re.compile(r"<0[xX]([0-9a-fA-F]{2})>")


@lru_cache(maxsize=1 << 16)
def token_text(tokenizer: Any, token: int) -> str:
    """One token by itself, special ones written out."""
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return text


@lru_cache(maxsize=1 << 16)
def token_bytes(tokenizer: Any, token: int) -> bytes:
    """What it adds to the UTF-8 text. Bytes of the tokens of a text, joined, are the text."""
    text = token_text(tokenizer, token)
    if REPLACEMENT not in text:
        return text.encode(errors="replace")
    piece = getattr(tokenizer, "convert_ids_to_tokens", lambda _: None)(token)
    if not isinstance(piece, str):
        return text.encode()
    if found := _BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    alphabet = _alphabet()
    if all(char in alphabet for char in piece):
        return bytes(alphabet[char] for char in piece)
    return text.encode()


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, int]:
    """Byte-level BPE's: printable bytes are themselves, the others are shifted above 255 in their order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
