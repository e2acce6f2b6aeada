"""Under what name the ids of a prompt are kept: equal names mean equal ids, in any process, run and machine."""

from __future__ import annotations

from itertools import pairwise

from xxhash import xxh3_128_digest

from pipeline.records import Ragged
from stages.model import Model
from stages.model.fingerprint import digest
from stages.tokenizer_cache import TokenizerCacheConfig


def fingerprint(model: Model, cfg: TokenizerCacheConfig) -> bytes:
    """16 bytes over all that decides ids apart from the prompt: the model's tokenizer, its files, its chat template and
    how it is called, and how prompts are cut. No tokenizer is loaded."""
    return digest([model.fingerprint(), str(cfg.max_prompt_tokens).encode(), cfg.truncation.encode()])


def key(fingerprint: bytes, prompt: bytes) -> bytes:
    """16 bytes for the JSON of a prompt (ADR 0009). Its bytes as they are: the order of an object's keys can show in
    what a chat template writes, so sorting them could give one name to different ids. The fingerprint has always the
    same length, so no byte can move from it to the prompt."""
    return xxh3_128_digest(fingerprint + prompt)


def keys(fingerprint: bytes, prompts: Ragged) -> list[bytes]:
    """The key of each row."""
    whole, offsets = prompts.values.tobytes(), prompts.offsets.tolist()
    return [key(fingerprint, whole[a:b]) for a, b in pairwise(offsets)]
