"""verl's dataset on this project's index: `data.custom_cls.path=pkg://stages.loader.verl_dataset`
`data.custom_cls.name=MappedRLHFDataset` (docs/verl.md).

What is done to a row is verl's own code. Below it, rows are read by position through the index that loaders use, and
the length filter's token counts are made by several processes, and kept for the next run. Importing this module loads
neither verl nor torch: the class is made when it is first asked for, also by pickle in another process.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import date
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.loader import sidecar
from stages.loader.files import LENGTHS
from stages.loader.length_file import REFUSED
from stages.loader.lengths import Counter, FileLengths, open_file, stamp_key
from stages.loader.verl_rows import FileRows, Frame, open_frame
from stages.model import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from verl.utils.dataset.rl_dataset import RLHFDataset as _Base
else:
    _Base = object

NAME = "MappedRLHFDataset"

_BY_TOKENIZER = {"padding", "truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"}
"""Arguments of `apply_chat_template` that reach past the text: with one of them, prompts are counted one by one."""


class Mapped(_Base):
    """What is put over verl's `RLHFDataset`; everything else is inherited from it.

    `dataframe` is a `Frame`. It is pickled with the dataset, as a few paths and the rows that were chosen, so that a
    worker that was spawned has it too.
    """

    def _read_files_and_tokenize(self) -> None:
        frame = open_frame([str(f) for f in self.data_files], self.config.get("index_dir", ""))
        print(f"dataset len: {len(frame)}")
        if 0 < self.max_samples < len(frame):
            print(f"selected {self.max_samples} random samples out of {len(frame)}")
            frame = frame.select(self._sample(len(frame)))
        self.dataframe: Any = self.maybe_filter_out_long_prompts(frame)

    def _sample(self, rows: int) -> np.ndarray:
        """The rows that verl would choose."""
        if not self.shuffle:
            return np.arange(self.max_samples)
        return np.random.default_rng(self.seed).choice(rows, size=self.max_samples, replace=False)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        if not self.filter_overlong_prompts:
            return dataframe
        if self.processor is not None:  # pictures are part of the length: verl looks at them, row by row
            return super().maybe_filter_out_long_prompts(dataframe)
        counts = self._counts(dataframe)
        fits = (counts != REFUSED) & (counts <= self.max_prompt_length)
        if refused := int(np.count_nonzero(counts == REFUSED)):
            print(f"{refused} prompts are left out: the chat template refuses them")
        frame = dataframe.select(np.flatnonzero(fits)) if not fits.all() else dataframe
        print(f"filter dataset len: {len(frame)}")
        return frame

    def _counts(self, frame: Frame) -> np.ndarray:
        """Tokens of each row's prompt, int32."""
        arguments = dict(self.apply_chat_template_kwargs)
        if self.tool_schemas is not None:
            arguments["tools"] = self.tool_schemas
        for name in ("tokenize", "return_dict", "return_tensors"):
            arguments.pop(name, None)
        rows, out, start = np.asarray(frame.rows, np.int64), np.empty(len(frame), np.int32), 0
        for file, end in zip(frame.files, frame.ends.tolist(), strict=True):
            here = (rows >= start) & (rows < end)
            count = partial(ChatCounter, file, self.tokenizer, self.prompt_key, arguments)
            out[here] = _counts(
                file, count, rows[here] - start, self.config.get("index_dir", ""), self.num_workers or 1
            )
            start = end
        return out

    def split(self, num_splits: int) -> list[Any]:
        """As verl's, without reading the files once more for each part."""
        if not isinstance(num_splits, int) or num_splits <= 0:
            raise ValueError(f"num_splits must be a positive integer, got {num_splits}")
        size = len(self.dataframe) // num_splits
        if not len(self.dataframe):
            raise ValueError("Cannot split an empty dataset")
        parts = [copy.copy(self) for _ in range(num_splits)]
        for i, part in enumerate(parts):
            part.dataframe = self.dataframe.select(range(i * size, (i + 1) * size))
        return parts

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


class ChatCounter(Counter):
    """Of prompts as verl's filter renders them: `apply_chat_template` with these arguments, and no tokens added."""

    def __init__(self, file: FileRows, tokenizer: PreTrainedTokenizerBase, key: str, arguments: dict[str, Any]):
        self._file, self._tokenizer, self._key, self._arguments = file, tokenizer, key, arguments

    def count(self, rows: Sequence[int]) -> np.ndarray:
        return np.array(self._lengths([self._file.row(r)[self._key] for r in rows]), np.int32)

    def _lengths(self, chats: list[Any]) -> list[int]:
        if len(chats) == 1 or not _BY_TOKENIZER.isdisjoint(self._arguments):
            return [self._length(chat) for chat in chats]
        if all(isinstance(chat, list) and chat for chat in chats):
            try:
                texts: Any = self._tokenizer.apply_chat_template(
                    chats, add_generation_prompt=True, tokenize=False, **self._arguments
                )
                encoded: Any = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
                return [len(ids) for ids in encoded["input_ids"]]
            except Exception:  # templates raise whatever they like; one of these chats is why
                pass
        half = len(chats) // 2
        return self._lengths(chats[:half]) + self._lengths(chats[half:])

    def _length(self, chat: Any) -> int:
        try:
            return self._render(chat)
        except Exception:  # verl leaves such a row out, whatever was raised
            return REFUSED

    def _render(self, chat: Any) -> int:
        from verl.utils.tokenizer import normalize_token_ids

        ids = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, **self._arguments)
        return len(normalize_token_ids(ids))

    def why(self, row: int) -> str:
        try:
            self._render(self._file.row(row)[self._key])
        except Exception as e:
            return f"row {row} of {self._file.path}: {type(e).__name__}: {e}"
        return f"row {row} of {self._file.path} has a length"

    def settings(self) -> bytes:
        """16 bytes over all that decides the counts, apart from the file."""
        tokenizer: Any = self._tokenizer
        whole = (
            tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
        )
        _, _, lasting = whole.partition('"added_tokens"')  # before it: cutting and padding, set anew by every call
        said = (
            type(tokenizer).__qualname__,
            lasting or whole,
            repr(tokenizer.chat_template),
            repr(tokenizer.special_tokens_map),
            repr(self._arguments),
            self._key,
            repr(self._file.features),
            date.today().isoformat() if "strftime_now" in str(tokenizer.chat_template) else "",
            *(version(name) for name in (*fingerprint.LIBRARIES, "datasets")),
        )
        return fingerprint.digest([s.encode() for s in said])


def _counts(file: FileRows, make: partial[ChatCounter], rows: np.ndarray, index_dir: str, processes: int) -> np.ndarray:
    """Tokens of some rows of a file, int32. All of it is counted, unless few rows are asked for."""
    every = range(len(file))
    names = sidecar.places(file.path, index_dir, LENGTHS)
    kept = open_file(names, stamp_key(file.stamp), make().settings(), every, len(file))
    lengths = FileLengths(kept, make, make, every, limit=0, where="data.max_prompt_length")
    try:
        if len(rows) * 4 >= len(file):
            lengths.finish("verl dataset", processes)
        return lengths.counts(rows)
    finally:
        lengths.close()


def __getattr__(name: str) -> Any:
    """The class itself, made when it is asked for."""
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in globals():
        from verl.utils.dataset.rl_dataset import RLHFDataset

        about = {"__module__": __name__, "__doc__": "verl's `RLHFDataset` on an index, with kept token counts."}
        globals()[name] = type(name, (Mapped, RLHFDataset), about)
    return globals()[name]
