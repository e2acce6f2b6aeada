"""A folder in Hugging Face format: safetensors, a fast tokenizer, code that transformers brings itself."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import Problem, near
from pipeline.plan import Facts
from pipeline.registry import backend
from pipeline.stage import setting
from stages.model import Model, context_length, text_config
from stages.model.fingerprint import of_folder
from stages.paths import instead_of, resolve

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16")
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")


@dataclass(slots=True, kw_only=True)
class HfModelConfig:
    """Code from the folder is never run, pickled weights are never opened, and nothing is fetched."""

    path: str = setting(doc="a model folder; a relative path is looked for here, then in the checkout")
    dtype: str = setting("float32", doc="of the weights and the arithmetic: float32 or bfloat16")
    attn_implementation: str = setting("sdpa", doc="attention of transformers: eager, sdpa, flash_attention_2, ...")


@backend("model", "hf")
class HfModel(Model):
    """Loaded by transformers' Auto classes."""

    def __init__(self, cfg: HfModelConfig):
        self.cfg = cfg
        self._tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def path(self) -> str:
        return str(resolve(self.cfg.path))

    @property
    def dtype_name(self) -> str:
        return self.cfg.dtype

    def at(self, path: str, dtype: str) -> HfModel:
        return type(self)(replace(self.cfg, path=path, dtype=dtype, attn_implementation="sdpa"))

    @property
    def attention(self) -> str:
        return self.cfg.attn_implementation

    def config(self) -> dict[str, Any]:
        return _json_object(Path(self.path) / "config.json")

    def parameters(self) -> int | None:
        """From the headers of the weight files. A tied output matrix may lie in the file too; it is loaded once."""
        shapes: dict[str, list[int]] = {}
        for file in _weight_files(Path(self.path)):
            if not _is_safetensors(file):
                return None
            shapes |= {n: t["shape"] for n, t in _header(file).items() if n != "__metadata__"}
        config = self.config()
        tied = config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings", True))
        counted = (math.prod(s) for n, s in shapes.items() if not (tied and n.endswith("lm_head.weight")))
        return sum(counted) or None

    def facts(self) -> Mapping[str, Any]:
        cfg, folder = text_config(self.config()), Path(self.path)
        known = {
            "context_length": context_length(cfg),
            "vocab_size": cfg.get("vocab_size"),
            "hidden_size": cfg.get("hidden_size", cfg.get("n_embd")),
            "layers": cfg.get("num_hidden_layers", cfg.get("n_layer")),
        }
        templates = [folder / "chat_template.jinja", folder / "chat_template.json"]
        in_config = bool(_json_object(folder / "tokenizer_config.json").get("chat_template"))
        has_template = in_config or any(t.is_file() for t in templates)
        return {k: v for k, v in known.items() if v is not None} | {"chat_template": has_template}

    def check(self, facts: Facts) -> Iterable[Problem]:
        for why, hint in _folder_problems(Path(self.path)):
            yield Problem(where=f"{facts.key}.path", what=why, hint=hint)
        for name, allowed in (("dtype", DTYPES), ("attn_implementation", ATTENTION)):
            if (value := getattr(self.cfg, name)) not in allowed:
                yield Problem(where=f"{facts.key}.{name}", what=f"no {name} '{value}'", hint=near(value, allowed))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self.path, local_files_only=True, trust_remote_code=False
            )
            if not tokenizer.is_fast:
                raise ValueError(
                    f"{self.path} gives a slow tokenizer ({type(tokenizer).__name__}); a fast one is needed"
                )
            self._tokenizer = tokenizer
        return self._tokenizer

    def load(self, device: str) -> PreTrainedModel:
        from transformers import AutoModelForCausalLM

        module = self._load(AutoModelForCausalLM, device, self.cfg.attn_implementation)
        module.generation_config = self._plain_generation_config()
        return module

    def load_classifier(self, device: str) -> PreTrainedModel:
        """With the attention that transformers finds best: an encoder may know fewer kinds."""
        from transformers import AutoModelForSequenceClassification

        return self._load(AutoModelForSequenceClassification, device, None)

    def _load(self, kind: Any, device: str, attention: str | None) -> PreTrainedModel:
        import torch

        with _no_progress_bar():
            module, info = kind.from_pretrained(
                self.path,
                dtype=getattr(torch, self.cfg.dtype),
                attn_implementation=attention,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        lost = [*info["missing_keys"], *(str(k) for k in info["mismatched_keys"])]
        if lost:  # transformers would fill them with random numbers
            raise ValueError(f"{self.path} lacks weights of {type(module).__name__}: {', '.join(sorted(lost)[:8])}")
        return module.to(device).eval()

    def end_ids(self) -> tuple[int, ...]:
        folder = Path(self.path)
        generation = folder / "generation_config.json"
        named = _json_object(generation if generation.is_file() else folder / "config.json").get("eos_token_id")
        own: Any = self.tokenizer().eos_token_id
        ids = {own, *(named if isinstance(named, list) else [named])} - {None}
        return tuple(sorted(ids))

    def render(self, tokenizer: PreTrainedTokenizerBase, prompts: list[Any]) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in prompts]
        for is_chat in (False, True):
            places = [i for i, p in enumerate(prompts) if isinstance(p, list) is is_chat]
            texts = [_chat_text(tokenizer, prompts[i]) if is_chat else prompts[i] for i in places]
            for i, ids in zip(places, _encode(tokenizer, texts, special=not is_chat), strict=True):
                out[i] = ids
        return out

    def fingerprint(self) -> bytes:
        return of_folder(self.path)

    def save(self, module: PreTrainedModel | torch.nn.Module, folder: str) -> None:
        from transformers import PreTrainedModel

        if not isinstance(module, PreTrainedModel):
            raise TypeError(f"{type(module).__name__} cannot be saved in Hugging Face format: not a PreTrainedModel")
        module.generation_config = self._plain_generation_config()
        with _no_progress_bar():
            module.save_pretrained(folder)
        self.tokenizer().save_pretrained(folder)

    def _plain_generation_config(self) -> GenerationConfig:
        """Token ids only: a sampling value that a checkpoint brings along must not decide in silence."""
        from transformers import GenerationConfig

        tokenizer, ends = self.tokenizer(), list(self.end_ids())
        return GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=ends[0] if len(ends) == 1 else ends or None,
            pad_token_id=tokenizer.pad_token_id,
        )


def _chat_text(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    if not tokenizer.chat_template:
        raise ValueError(f"a prompt is a chat, and the tokenizer in {tokenizer.name_or_path} has no chat template")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as e:  # templates raise whatever they like; the messages' roles are most often why
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise ValueError(f"the chat template refuses a prompt with roles {roles}: {e}") from e
    assert isinstance(text, str)
    return text


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool) -> list[list[int]]:
    """Ids of all texts by one call into the tokenizer, with exactly one BOS where the tokenizer puts one.

    A template may write BOS itself or leave it to the tokenizer, and a text may come with it: encoding with
    special tokens then gives two, without them none. So what the tokenizer does by itself decides.
    """
    if not texts:
        return []
    encoded: Any = tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)
    rows: list[list[int]] = encoded["input_ids"]
    bos: Any = tokenizer.bos_token_id
    if bos is None:
        return rows
    if special:
        return [ids[1:] if ids[:2] == [bos, bos] else ids for ids in rows]
    adds_bos = tokenizer("a", verbose=False)["input_ids"][:1] == [bos]
    return [[bos, *ids] if adds_bos and ids[:1] != [bos] else ids for ids in rows]


def _folder_problems(folder: Path) -> Iterator[tuple[str, str]]:
    """What is wrong with a model's folder, and what to do."""
    if not folder.is_dir():
        a_folder = "a model is a folder in Hugging Face format: config.json, tokenizer.json, *.safetensors"
        gone = not folder.exists()
        what = f"there is no folder {folder}" if gone else f"{folder} is not a folder"
        yield what, f"{instead_of(folder)}; {a_folder}" if gone else a_folder
        return
    if not _json_object(folder / "config.json").get("model_type"):
        hint = "give the folder that transformers' save_pretrained wrote, or a checkpoint's folder inside it"
        yield f"{folder} has no usable config.json (a JSON object with 'model_type')", hint
    if not (folder / "tokenizer.json").is_file():
        hint = "put the base model's there: AutoTokenizer.from_pretrained(BASE).save_pretrained(FOLDER)"
        yield f"{folder} has no tokenizer.json: a fast tokenizer is needed", hint
    files = _weight_files(folder)
    if not files:
        pickled = next(folder.glob("*.bin"), None) or next(folder.glob("*.pt"), None)
        also = f" ({pickled.name} holds pickled weights, which can run code: convert it)" if pickled else ""
        hint = "save them with save_pretrained(FOLDER, safe_serialization=True)"
        yield f"{folder} has no weights in safetensors format{also}", hint
    for file in files:
        if not _is_safetensors(file):
            hint = "fetch it again; for a pointer: git lfs pull"
            yield f"{file} is missing, cut short, or no safetensors file (a Git LFS pointer?)", hint


def _weight_files(folder: Path) -> list[Path]:
    index = _json_object(folder / "model.safetensors.index.json").get("weight_map", {})
    return sorted({folder / name for name in index.values()} or folder.glob("*.safetensors"))


def _header(file: Path) -> dict[str, Any]:
    """Of a file that is safetensors: name -> dtype, shape and place of each tensor."""
    with file.open("rb") as f:
        return json.loads(f.read(int.from_bytes(f.read(8), "little")))


def _is_safetensors(file: Path) -> bool:
    """Whether its header, a little-endian length and JSON (safetensors' format description), fits the file."""
    if not file.is_file():
        return False
    with file.open("rb") as f:
        head = f.read(9)
    return len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") + 8 <= file.stat().st_size


def _json_object(file: Path) -> dict[str, Any]:
    """{} where there is no such object: `check` says what is missing, and loading fails on it."""
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """The terminal has one progress bar, which is the run's."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
