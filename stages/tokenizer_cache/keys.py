"""Under what name the ids of a prompt are kept: equal names mean equal ids, in any process."""

from __future__ import annotations

from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from stages.tokenizer_cache import TokenizerCacheConfig

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def fingerprint(folder: str, chat_template: str | dict[str, str] | None, cfg: TokenizerCacheConfig) -> bytes:
    """16 bytes over all that decides ids apart from the prompt: the content of the tokenizer's files, the chat
    template in use, the libraries, and how prompts are cut. Files, not the tokenizer object: that one changes
    when it is used (huggingface/datasets issue 5985)."""
    parts: list[bytes] = [version(p).encode() for p in ("tokenizers", "transformers")]
    for name in TOKENIZER_FILES:
        file = Path(folder) / name
        parts += [name.encode(), file.read_bytes() if file.is_file() else b""]
    parts += [repr(chat_template).encode(), str(cfg.max_prompt_tokens).encode(), cfg.truncation.encode()]
    return _digest(parts)


def key(fingerprint: bytes, prompt: bytes) -> bytes:
    """16 bytes for the JSON of a prompt. Its bytes as they are: the order of an object's keys can show in what
    a chat template writes, so sorting them could give one name to different ids."""
    return _digest([fingerprint, prompt])


def _digest(parts: list[bytes]) -> bytes:
    """Lengths go in as well, so that bytes cannot move from one part to the next unseen."""
    out = blake2b(digest_size=16)
    for part in parts:
        out.update(len(part).to_bytes(8, "little"))
        out.update(part)
    return out.digest()
