"""Small tokenizers in Hugging Face format: one token a byte, with special tokens and, if wanted, a chat template."""

from __future__ import annotations

from pathlib import Path

PAD, BOS, EOS, USER, SYSTEM, ASSISTANT = range(6)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<user>", "<system>", "<assistant>")

_TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def ids_of(text: str) -> list[int]:
    """The ids of a text without special tokens: each byte after the special ones."""
    return [len(SPECIAL) + b for b in text.encode()]


def write_tokenizer(
    folder: Path, *, template: bool = True, template_bos: bool = False, adds_bos: bool = False, has_bos: bool = True
) -> Path:
    """Write `tokenizer.json` and its config into `folder`, which is returned.

    `template_bos`: the chat template begins with BOS; `adds_bos`: the tokenizer puts BOS before a text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {t: i for i, t in enumerate(SPECIAL)} | {c: len(SPECIAL) + b for b, c in _byte_letters().items()}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    core.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>" if has_bos else None, eos_token="<eos>", pad_token="<pad>"
    )
    if template:
        fast.chat_template = ("{{ bos_token }}" if template_bos else "") + _TURNS
    fast.save_pretrained(folder)
    return folder


def _byte_letters() -> dict[int, str]:
    """Byte to letter, as GPT-2's byte-level alphabet has it: printable bytes stand for themselves, the others
    for letters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}
