"""Role `model`: which language model, in which precision; what stages that compute with it hold."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.stage import Component

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """What a `config.json` says of the language model: a model that also sees or hears nests it."""
    return config.get("text_config") or config


def context_length(config: dict[str, Any]) -> int | None:
    """Positions that a model has, from its `config.json`; None if the file does not say."""
    text = text_config(config)
    return text.get("max_position_embeddings", text.get("n_positions"))


class Model(Component):
    """A causal language model folder in Hugging Face format. Each call of `load` makes new weights: a stage
    owns the weights it computes with, and they reach another stage only by publish and receive."""

    role: ClassVar[str] = "model"

    @property
    @abstractmethod
    def path(self) -> str:
        """The absolute folder."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The folder's `config.json`; {} if there is none."""

    def parameters(self) -> int | None:
        """How many weights the model has, tied ones counted once; None if the folder does not tell."""
        return None

    @property
    def attention(self) -> str:
        """What transformers calls the attention it computes with: `sdpa`, `eager`, ..."""
        return "sdpa"

    @abstractmethod
    def at(self, path: str, dtype: str) -> Model:
        """A component of this kind for another folder; as cheap as a constructor."""

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The folder's tokenizer; it must be a fast one."""

    @abstractmethod
    def load(self, device: str) -> PreTrainedModel:
        """The model in eval mode, in the configured dtype, on `device`."""

    @abstractmethod
    def load_classifier(self, device: str) -> PreTrainedModel:
        """As `load`, for a folder that holds a model of whole sequences: it gives a logit for each label."""

    @property
    @abstractmethod
    def dtype_name(self) -> str:
        """`float32` or `bfloat16`."""

    @abstractmethod
    def end_ids(self) -> tuple[int, ...]:
        """Token ids that end a response: of the generation config and the tokenizer."""

    @abstractmethod
    def render(self, tokenizer: PreTrainedTokenizerBase, prompts: list[Any]) -> list[list[int]]:
        """Token ids of prompts (a string, or chat messages through the chat template), special tokens once.

        All prompts go to the Rust tokenizer in one call. ValueError if a chat comes and there is no template.
        """

    @abstractmethod
    def fingerprint(self) -> bytes:
        """16 bytes over all that decides what `render` gives, apart from the prompt; the same in every process and on
        every machine. Cheap: it loads no tokenizer."""

    @abstractmethod
    def save(self, module: PreTrainedModel | torch.nn.Module, folder: str) -> None:
        """Write weights, config and tokenizer, so that `from_pretrained(folder)` loads."""
