"""What the token ids of a folder's tokenizer stand for, read from its `tokenizer.json` without loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson


def difference(ours: Path, theirs: Path) -> str:
    """Why ids of the tokenizer file `ours` do not all mean the same in `theirs`; '' if they do, or if one of the files
    cannot be read, which loading it will tell. `theirs` may have further tokens."""
    try:
        one, other = ours.read_bytes(), theirs.read_bytes()
        if one == other:
            return ""
        known, given = _tokens(orjson.loads(other)), _tokens(orjson.loads(one))
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        return ""
    lost = {i: token for i, token in given.items() if known.get(i) != token}
    if not lost:
        return ""
    first = min(lost)
    there = f"'{known[first]}'" if first in known else "nothing"
    return f"{len(lost)} of {len(given)} token ids differ: {first} is '{lost[first]}' in {ours} and {there} in {theirs}"


def _tokens(tokenizer: dict[str, Any]) -> dict[int, str]:
    """Id to token. A vocabulary is an object of ids by token or, of a Unigram model, a list of [token, score]."""
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):
        tokens = {i: token for i, (token, _) in enumerate(vocabulary)}
    else:
        tokens = {i: token for token, i in vocabulary.items()}
    return tokens | {a["id"]: a["content"] for a in tokenizer.get("added_tokens") or ()}
