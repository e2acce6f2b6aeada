"""What stands for a tokenizer: equal fingerprints mean equal token ids of equal prompts."""

from __future__ import annotations

from datetime import date
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from xxhash import xxh3_128_digest

RENDERING = b"1: add_generation_prompt; special tokens for plain text only, one BOS; messages as they are"
"""How `Model.render` calls the tokenizer. To be changed whenever it would give other ids for the same prompt."""
LIBRARIES = ("tokenizers", "transformers", "jinja2")
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)


def of_folder(folder: str) -> bytes:
    """16 bytes over the content of all files of a model folder that decide ids, how they are used, and by which
    versions of which libraries; the day as well, if a chat template writes it into the prompt.

    Files, not the tokenizer object, which changes when it is used (huggingface/datasets issue 5985), and which takes
    long to load."""
    parts, dated = [RENDERING, *(f"{name} {version(name)}".encode() for name in LIBRARIES)], False
    for file in sorted({f for pattern in _FILES for f in Path(folder).glob(pattern)}):
        content = file.read_bytes()
        parts += [file.relative_to(folder).as_posix().encode(), xxh3_128_digest(content)]  # some have many megabytes
        dated |= b"strftime_now" in content
    if dated:
        parts.append(date.today().isoformat().encode())
    return digest(parts)


def digest(parts: list[bytes]) -> bytes:
    """16 bytes. Lengths go in as well, so that bytes cannot move from one part to the next unseen."""
    out = blake2b(digest_size=16)
    for part in parts:
        out.update(len(part).to_bytes(8, "little"))
        out.update(part)
    return out.digest()
