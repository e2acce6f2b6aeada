"""Reward by a model that was trained to judge: sequence classification in Hugging Face format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.context import Context
from pipeline.errors import Problem, listed, near
from pipeline.plan import Facts
from pipeline.registry import backend
from pipeline.stage import setting
from stages.batching import cut
from stages.device import Parcel, ahead
from stages.model import Model, context_length
from stages.model.vocabulary import difference
from stages.records import RewardBatch, RolloutBatch, Status
from stages.reward import Reward, RewardConfig
from stages.reward.assembly import Outcomes, assemble, measure
from stages.reward.prompt_ids import PromptIds
from stages.reward.workers import Outcome

if TYPE_CHECKING:
    import torch

TOKENIZERS = ("own", "policy")


@dataclass(slots=True, kw_only=True)
class ModelRewardConfig(RewardConfig):
    """Code from the folder is never run, pickled weights are never opened, and nothing is fetched."""

    path: str = setting(doc="folder of a sequence-classification model (`...ForSequenceClassification`), safetensors")
    tokenizer: str = setting("own", doc="own: the folder's; policy: the policy's, which must have the same ids")
    label: str = setting("", doc="the label, by name or index, whose logit is the score; '': the only one")
    correct_at: float = setting(0.0, doc="a score from here on counts as right in reward/accuracy and eval/accuracy")
    dtype: str = setting("float32", doc="of the weights and the arithmetic: float32 or bfloat16")
    micro_tokens: int = setting(8192, min=1, doc="tokens, padding and prompts included, of one forward pass")
    close_turn: bool = setting(
        True, doc="tokenizer=own: after a chat's response comes what the template writes after an assistant's message"
    )


@backend("reward", "model")
class ModelReward(Reward):
    """The score is the raw logit of one label for prompt and response; for a model with a single label, as reward
    models are, `correct_at=0` is where its probability, the sigmoid of the logit, passes one half.

    With `tokenizer=policy` the model reads the ids of the prompt and those of the response as they were sampled, its
    end token included: nothing is tokenised. With `tokenizer=own` it reads the prompt through its own chat template
    (a plain text with its own special tokens), then the text of the response; each distinct prompt is tokenised once,
    the responses of a batch in one call. What a response spells like a special token stays text.

    A row that is longer than the model's positions, or whose score is not finite, is unscored. Rows of like length are
    computed together, within `micro_tokens`. What is padded is masked, and pooled as transformers pools a row alone.
    No state; the answers of the data file are not looked at.
    """

    grain = "batch"  # whole batches, so that their parts, and so the last bits of a score, are the same in every run
    requires = ("torch", "transformers")

    def __init__(self, cfg: ModelRewardConfig, model: Model):
        self.cfg, self._policy = cfg, model
        self._judge = model.at(cfg.path, cfg.dtype)
        self._classifier: Classifier | None = None
        self._outcomes = Outcomes()

    # -- plan time -----------------------------------------------------------------------------------------------

    def check(self, facts: Facts) -> Iterator[Problem]:
        cfg, key = self.cfg, facts.key
        yield from self._judge.check(facts)
        yield from self._check_head(key)
        if not math.isfinite(cfg.correct_at):
            yield Problem(where=f"{key}.correct_at", what=f"{cfg.correct_at} is not allowed", hint="a finite number")
        if cfg.tokenizer not in TOKENIZERS:
            hint = near(cfg.tokenizer, TOKENIZERS)
            yield Problem(where=f"{key}.tokenizer", what=f"no tokenizer '{cfg.tokenizer}'", hint=hint)
        yield from self._check_policys(facts) if cfg.tokenizer == "policy" else self._check_own(facts)
        if cfg.target:
            what = f"'{cfg.target}' has no effect: a model judges prompt and response, and sees no answer"
            yield Problem(where=f"{key}.target", what=what, hint=f"set {key}.target=''", level="warning")

    def _check_head(self, key: str) -> Iterator[Problem]:
        config = self._judge.config()
        if not config:
            return  # told with the folder
        kinds = config.get("architectures") or []
        if not any(str(k).endswith("ForSequenceClassification") for k in kinds):
            what = f"{self._judge.path} holds a {listed(map(str, kinds)) or 'model of no named kind'}"
            hint = "a sequence-classification model is needed: its config.json names `...ForSequenceClassification`"
            yield Problem(where=f"{key}.path", what=what, hint=hint)
        elif isinstance(place := label_index(self.cfg.label, labels(config)), str):
            yield Problem(where=f"{key}.label", what=place, hint=near(self.cfg.label, labels(config)))

    def _check_policys(self, facts: Facts) -> Iterator[Problem]:
        """Ids must mean the same to both, and the longest row must fit."""
        ours, theirs = (Path(m.path) / "tokenizer.json" for m in (self._policy, self._judge))
        if why := difference(ours, theirs):
            hint = f"set {facts.key}.tokenizer=own, or choose a reward model that was trained with this tokenizer"
            yield Problem(where=f"{facts.key}.tokenizer", what=f"is policy, and {why}", hint=hint)
        limit, new = context_length(self._judge.config()), facts.values.get("max_new_tokens", 0)
        prompt = max(1, facts.values.get("max_prompt_tokens", 0))
        if limit is not None and prompt + new > limit:
            what = f"has {limit} positions, too few for {new} new tokens after a prompt of {prompt}"
            hint = f"lower rollout.max_new_tokens to {limit - prompt} or less, or choose another model"
            yield Problem(where=f"{facts.key}.path", what=what, hint=hint)

    def _check_own(self, facts: Facts) -> Iterator[Problem]:
        if facts.values.get("chat_prompts") and not self._judge.facts().get("chat_template", True):
            what = "prompts are chats, and the reward model's tokenizer has no chat template"
            hint = "choose another model, or prompts that are texts"
            yield Problem(where=f"{facts.key}.path", what=what, hint=hint)

    # -- the run -------------------------------------------------------------------------------------------------

    def open(self, ctx: Context) -> None:
        import torch

        super().open(ctx)
        torch.set_num_threads(ctx.threads)
        place = label_index(self.cfg.label, labels(self._judge.config()))
        if isinstance(place, str):
            raise ValueError(f"{ctx.node}.label: {place}")
        module = self._judge.load_classifier(ctx.device)
        self._classifier = Classifier(module, place, self.cfg.micro_tokens)
        self._limit = context_length(self._judge.config()) or math.inf
        if self.cfg.tokenizer == "own":
            self._limit = min(self._limit, self._judge.tokenizer().model_max_length)
            self._texts = OwnTokens(self._judge, ctx.run_dir, self.cfg.close_turn)

    def close(self) -> None:
        self._classifier = None

    def run(self, rollouts: RolloutBatch) -> RewardBatch:
        """ValueError if no row at all can be scored."""
        if self._classifier is None:
            raise RuntimeError("open() comes first")
        rows = np.flatnonzero(rollouts.status == Status.OK)
        rows = rows[np.argsort(rollouts.row_id[rows], kind="stable")]  # so that their order changes no bit
        tokens = dict(zip(rows.tolist(), self._read(rollouts.take(rows)), strict=True))
        outcomes: list[Outcome | None] = [None] * len(rollouts)
        for i, ids in tokens.items():
            if why := self._refusal(ids, self._classifier.vocabulary):
                outcomes[i] = Outcome(reason=why)
        good = [i for i in tokens if outcomes[i] is None]
        for i, score in zip(good, self._classifier.scores([tokens[i] for i in good]).tolist(), strict=True):
            outcomes[i] = self._outcome(score)
        self._outcomes.complain_if_never_scored(outcomes)
        rewards = assemble(rollouts, outcomes)
        measure(self.ctx.meter, rewards, rollouts.purpose)
        return rewards

    def _read(self, rollouts: RolloutBatch) -> list[np.ndarray]:
        """Token ids of each row, prompt and response."""
        if self.cfg.tokenizer == "own":
            return self._texts.of(rollouts)
        pairs = zip(rollouts.prompt_ids.rows(), rollouts.response_ids.rows(), strict=True)
        return [np.concatenate(pair) for pair in pairs]

    def _refusal(self, ids: np.ndarray, vocabulary: int) -> str:
        """Why the model cannot take these; '' if it can."""
        if len(ids) > self._limit:
            return f"too long: {len(ids)} tokens, and the reward model takes {self._limit:.0f}"
        if not len(ids):
            return "prompt and response have no tokens"
        if (worst := int(ids.max())) >= vocabulary:
            return f"token {worst} is not among the {vocabulary} of the reward model"
        return ""

    def _outcome(self, score: float) -> Outcome:
        if not math.isfinite(score):
            return Outcome(reason=f"the reward model's score is {score}")
        return Outcome(score=score, accuracy=float(score >= self.cfg.correct_at))


def labels(config: dict[str, Any]) -> list[str]:
    """Names of a classifier's labels by index; transformers writes none of two labels without names."""
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        return [str(named[i]) for i in sorted(named, key=int)]
    return [f"LABEL_{i}" for i in range(config.get("num_labels", 2))]


def label_index(label: str, names: Sequence[str]) -> int | str:
    """The index of a label, or why there is none."""
    if not label:
        return 0 if len(names) == 1 else f"must be given: the model has {len(names)} labels ({listed(names)})"
    if label in names:
        return names.index(label)
    if label.isdecimal() and int(label) < len(names):
        return int(label)
    return f"no label '{label}': the model has {listed(names)}"


class OwnTokens:
    """Rows as the reward model's own tokenizer reads them: prompt, response, and what ends an assistant's turn."""

    def __init__(self, model: Model, run_dir: Path, close_turn: bool):
        self._tokenizer: Any = model.tokenizer()
        self._tokenizer.backend_tokenizer.no_truncation()  # a file may have kept what it was trained with
        self._tokenizer.backend_tokenizer.no_padding()
        self._prompts = PromptIds(model, run_dir)
        self._end = np.array(self._turn_end() if close_turn else [], np.int32)

    def of(self, rollouts: RolloutBatch) -> list[np.ndarray]:
        prompts = self._prompts.of(rollouts.prompt)
        responses = self._encode([rollouts.response.text(i) for i in range(len(rollouts))])
        chats = [row.tobytes().lstrip().startswith(b"[") for row in rollouts.prompt.rows()]  # in JSON
        return [
            np.concatenate([p, np.array(r, np.int32), self._end[: None if chat else 0]])
            for p, r, chat in zip(prompts, responses, chats, strict=True)
        ]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """A response cannot write special tokens: it would end its turn, or begin another one, as it likes."""
        core = self._tokenizer.backend_tokenizer
        core.encode_special_tokens = True
        try:
            return [e.ids for e in core.encode_batch(texts, add_special_tokens=False)]
        finally:
            core.encode_special_tokens = False

    def _turn_end(self) -> list[int]:
        """Ids of what the chat template writes after the text of an assistant's message."""
        if not self._tokenizer.chat_template:
            return []
        mark = "the text of a response"
        turns = [{"role": "user", "content": "the text of a prompt"}, {"role": "assistant", "content": mark}]
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception as e:  # templates raise whatever they like
            raise ValueError(f"the chat template renders no assistant's message ({e}); set close_turn=false") from e
        _, found, end = text.rpartition(mark)
        if not found:
            raise ValueError("the chat template changes an assistant's message; set close_turn=false")
        return self._tokenizer(end, add_special_tokens=False, verbose=False)["input_ids"] if end else []


class Classifier:
    """Logits of one label by a transformers model, in batches of like length."""

    def __init__(self, module: Any, label: int, micro_tokens: int):
        self._module, self._label, self._budget = module, label, micro_tokens
        self._config = module.config.get_text_config()
        self._pad: int | None = self._config.pad_token_id
        self._device: torch.device = module.device
        self.vocabulary = int(module.get_input_embeddings().num_embeddings)

    def scores(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """float32 [R], for rows of token ids."""
        import torch

        if not rows:
            return np.empty(0, np.float32)
        parts = list(self._parts(rows))
        with torch.inference_mode():
            parcels = (self._parcel([rows[i] for i in part]) for part in parts)
            found = [self._forward(*sent) for sent in ahead(parcels)]
            logits = torch.cat(found).float().cpu().numpy()
        out = np.empty(len(rows), np.float32)
        out[np.concatenate(parts)] = logits
        return out

    def _parts(self, rows: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """Positions of the rows of each forward pass."""
        for part in cut(np.array([len(r) for r in rows]), self._budget):
            can_pad = self._padding([rows[i] for i in part]) is not None
            yield from [part] if can_pad else part[:, None]

    def _padding(self, rows: Sequence[np.ndarray]) -> int | None:
        """The token to pad with. Models pool at the last token that is not this one, so where a model has none, any
        will do that no row holds, and a row is pooled at its end as it is alone. None: there is no such token."""
        if self._pad is not None and 0 <= self._pad < self.vocabulary:
            return self._pad
        used = np.unique(np.concatenate(rows))
        gaps = np.flatnonzero(used != np.arange(len(used)))
        free = int(gaps[0]) if len(gaps) else len(used)
        return free if free < self.vocabulary else None

    def _parcel(self, rows: Sequence[np.ndarray]) -> tuple[Parcel, int | None]:
        """What goes to the device, and the token that pads it."""
        pad, shape = self._padding(rows), (len(rows), max(map(len, rows)))
        parcel = Parcel(self._device, ids=(shape, np.int64), mask=(shape, np.int64))
        ids, mask = parcel.host["ids"], parcel.host["mask"]
        ids[:] = pad or 0
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
            mask[i, : len(row)] = 1
        return parcel.send(), pad

    def _forward(self, parcel: Parcel, pad: int | None) -> torch.Tensor:
        """Logits [R] of the label, on the device."""
        self._config.pad_token_id = pad
        sent = parcel.receive()
        return self._module(input_ids=sent["ids"], attention_mask=sent["mask"]).logits[:, self._label]
