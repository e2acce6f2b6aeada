"""Make `data/tokenizer/`: one token a byte, and three special tokens.

A byte-level BPE without merges: any UTF-8 text survives encode and decode unchanged, newlines included, and a
digit is one token. Nothing is added around a text: what is encoded is what was written. The chat template writes what
the messages of a chat say, one after the other, and no more.

    python data/make_tokenizer.py
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<bos>", "<eos>")
MAX_LENGTH = 128
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def build() -> PreTrainedTokenizerFast:
    """Return the tokenizer: ids 0 to 2 are the specials, 3 to 258 the bytes."""
    symbols = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {symbol: index for index, symbol in enumerate(symbols)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    # use_regex=False: without merges there is nothing to protect from crossing a word boundary.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
        chat_template=CHAT_TEMPLATE,
    )


def main() -> None:
    """Write the tokenizer next to this script."""
    build().save_pretrained(Path(__file__).parent / "tokenizer")


if __name__ == "__main__":
    main()
