"""What tests of token caches share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.model.hf import HfModel, HfModelConfig


class CountingModel(HfModel):
    """Remembers what each call of `render` was given, and how often the tokenizer was loaded."""

    def __init__(self, folder: Path):
        super().__init__(HfModelConfig(path=str(folder)))
        self.calls: list[list[Any]] = []

    def render(self, tokenizer: Any, prompts: list[Any]) -> list[list[int]]:
        self.calls.append(list(prompts))
        return super().render(tokenizer, prompts)
