"""What verl's configuration amounts to, and how values become ours: the functions behind the rules of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from importers.verl.source import Config
from stages.trainer.policy_loss import ONE_AGGREGATION
from stages.verl_door import Signature, estimators, policy_losses

Fill = Callable[[Config], Mapping[str, Any]]

DEFAULT_REWARD = "importers/verl/default_reward.py"
"""verl's own scorers as a file; relative to the checkout."""

A, RO, AL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"

# -- what verl's configuration amounts to ------------------------------------------------------------------------


def estimator(c: Config) -> str:
    return str(c[f"{AL}.adv_estimator"])


def has_critic(c: Config) -> bool:
    """As verl decides it: `critic.enable`, or if that is null, for gae."""
    enabled = c["critic.enable"]
    return estimator(c) == "gae" if enabled is None else bool(enabled)


def bypasses(c: Config) -> bool:
    return bool(c[f"{AL}.rollout_correction.bypass_mode"])


def loss_of(c: Config) -> str:
    return "bypass_mode" if bypasses(c) else str(c[f"{A}.policy_loss.loss_mode"])


def row_tokens(c: Config) -> int:
    return int(c[f"{RO}.prompt_length"]) + int(c[f"{RO}.response_length"])


def is_vllm(c: Config) -> bool:
    return engine(c) == "vllm_async"


def engine(c: Config) -> str:
    name = c[f"{RO}.name"]
    return "hf" if name == "hf" else "vllm_async"


def reward_function(c: Config) -> tuple[str | None, str]:
    """Path and name; verl moves the old top-level section over the new one if anything is set in it."""
    path, name = c["custom_reward_function.path"], c["custom_reward_function.name"]
    if path is None and name is None:
        path, name = c["reward.custom_reward_function.path"], c["reward.custom_reward_function.name"]
    return path, str(name or "compute_score")


def reward_model(c: Config) -> str | None:
    """Folder of the reward model that scores, if one does: a function of the user's comes first."""
    enabled = c["reward_model.enable"]
    enabled = c["reward.reward_model.enable"] if enabled is None else enabled
    if not enabled or reward_function(c)[0]:
        return None
    return str(c["reward_model.model.path"] or c["reward.reward_model.model_path"] or "")


def reads(table: Mapping[str, Signature], name: str, setting: str) -> bool:
    """Whether verl's function of that name reads a setting; assumed where it is not known."""
    return name not in table or table[name].takes(setting)


def files(value: Any) -> list[str]:
    return [str(f) for f in value] if isinstance(value, list) else [] if value is None else [str(value)]


def is_folder(path: Any) -> bool:
    return Path(str(path)).expanduser().is_dir()


def optional(count: Any) -> int:
    """verl's -1 and null, for "no limit", are 0 here."""
    return 0 if count is None or int(count) < 0 else int(count)


# -- fills -------------------------------------------------------------------------------------------------------


def data_files(key: str, node: str) -> Fill:
    def fill(c: Config) -> Mapping[str, Any]:
        paths = files(c[key])
        kinds = {Path(p).suffix for p in paths}
        loader = "parquet" if kinds <= {".parquet"} else "standard" if kinds & {".gz", ".zst"} else "mmap"
        group = "/loader" if node == "loader" else f"/loader@{node}"
        out = {group: loader, f"{node}.path": paths[0] if len(paths) == 1 else paths}
        out[f"{node}.fields.ground_truth"] = "reward_model.ground_truth"
        return out if node == "loader" else out | {f"{node}.batch_size": 0, f"{node}.purpose": "eval"}

    return fill


def both_loaders(name: str, key: str) -> Fill:
    return lambda c: {f"loader.{name}": c[key], f"eval_loader.{name}": c[key]}


def prompt_limit(c: Config) -> Mapping[str, Any]:
    most = c["data.max_prompt_length"] if c["data.filter_overlong_prompts"] else c[f"{RO}.prompt_length"]
    return {"loader.max_prompt_tokens": most, "eval_loader.max_prompt_tokens": most}


def response(c: Config) -> Mapping[str, Any]:
    return {"rollout.max_new_tokens": c[f"{RO}.response_length"]}


def pipeline(c: Config) -> Mapping[str, Any]:
    critic = has_critic(c) and estimator(c) == "gae"
    return {"/pipeline": "ppo" if critic else "grpo", "advantage.estimator": estimator(c)}


def of_estimator(setting: str) -> Fill:
    """Only if the estimator reads it: the others do not in verl either."""

    def fill(c: Config) -> Mapping[str, Any]:
        read = reads(estimators(), estimator(c), setting)
        return {f"advantage.{setting}": c[f"{AL}.{setting}"]} if read else {}

    return fill


def of_loss(key: str, setting: str) -> Fill:
    """Only if the policy loss reads it."""

    def fill(c: Config) -> Mapping[str, Any]:
        return {f"trainer.{setting}": c[key]} if reads(policy_losses(), loss_of(c), setting) else {}

    return fill


def clip(side: str) -> Fill:
    """`clip_ratio` counts in verl only for a side that is null."""

    def fill(c: Config) -> Mapping[str, Any]:
        value, name = c[f"{A}.clip_ratio_{side}"], f"clip_ratio_{side}"
        whole = c[f"{A}.clip_ratio"] if clip_counts(c) else 0.2
        read = reads(policy_losses(), loss_of(c), name) or loss_of(c) == "bypass_mode"
        return {f"trainer.{name}": value} if read and value is not None and value != whole else {}

    return fill


def clip_counts(c: Config) -> bool:
    return None in (c[f"{A}.clip_ratio_low"], c[f"{A}.clip_ratio_high"])


def clip_ratio(c: Config) -> Mapping[str, Any]:
    return {"trainer.clip_ratio": c[f"{A}.clip_ratio"]} if clip_counts(c) else {}


def mini_batch(node: str, key: str) -> Fill:
    """Prompts become rows; a mini-batch of at least the whole step is 0."""

    def fill(c: Config) -> Mapping[str, Any]:
        if node == "critic" and not has_critic(c):
            return {}
        prompts = int(c[key])
        return {f"{node}.mini_batch": 0 if prompts >= int(c["data.train_batch_size"]) else prompts * int(c[f"{RO}.n"])}

    return fill


def micro_tokens(node: str, section: str, tokens: str) -> Fill:
    """Memory: rows of a forward pass, or tokens with dynamic batches, as tokens."""

    def fill(c: Config) -> Mapping[str, Any]:
        if node == "critic" and not has_critic(c):
            return {}
        dynamic = bool(c[f"{section}.use_dynamic_bsz"])
        rows = c[f"{section}.ppo_micro_batch_size_per_gpu"] or c[f"{section}.ppo_micro_batch_size"]
        if dynamic:
            return {f"{node}.micro_tokens": c[f"{section}.{tokens}"]}
        return {f"{node}.micro_tokens": int(rows) * row_tokens(c)} if rows else {}

    return fill


def betas(node: str, section: str) -> Fill:
    def fill(c: Config) -> Mapping[str, Any]:
        one, two = c[f"{section}.optim.betas"]
        return {f"{node}.beta1": one, f"{node}.beta2": two} if node != "critic" or has_critic(c) else {}

    return fill


def if_critic(key: str, setting: str) -> Fill:
    return lambda c: {f"critic.{setting}": c[key]} if has_critic(c) else {}


def aggregation(c: Config) -> Mapping[str, Any]:
    """verl hands its `token-mean` to every loss, also to those with another of their own."""
    loss, mode = loss_of(c), c[f"{A}.loss_agg_mode"]
    if loss in ONE_AGGREGATION:
        return {}
    known = policy_losses().get(loss)
    return (
        {} if known and known.defaults.get("loss_agg_mode", "token-mean") == mode else {"trainer.loss_agg_mode": mode}
    )


def scale(node: str, section: str) -> Fill:
    """Of null, verl divides by the padded width, which is the response's greatest length."""

    def fill(c: Config) -> Mapping[str, Any]:
        if c[f"{section}.loss_agg_mode"] != "seq-mean-token-sum-norm" or (node == "critic" and not has_critic(c)):
            return {}
        return {f"{node}.loss_scale_factor": c[f"{section}.loss_scale_factor"] or c[f"{RO}.response_length"]}

    return fill


def correction(name: str) -> Fill:
    return lambda c: {f"trainer.rollout_correction.{name}": c[f"{AL}.rollout_correction.{name}"]} if bypasses(c) else {}


def rollout_is(c: Config) -> Mapping[str, Any]:
    """null must be said: ours is not null by itself."""
    if not bypasses(c):
        return {}
    return {"trainer.rollout_correction.rollout_is": c[f"{AL}.rollout_correction.rollout_is"] or NULL}


NULL = object()
"""Written as YAML's null; None is no setting."""


def validation(name: str, convert: Callable[[Any], Any] = lambda v: v) -> Fill:
    """What differs from the training's own."""

    def fill(c: Config) -> Mapping[str, Any]:
        value, training = convert(c[f"{RO}.val_kwargs.{name}"]), convert(c[f"{RO}.{name}"])
        return {f"eval_loader.sampling.{name}": value} if value != training else {}

    return fill


def if_vllm(key: str, setting: str) -> Fill:
    return lambda c: {f"rollout.{setting}": c[key]} if is_vllm(c) else {}


def context(c: Config) -> Mapping[str, Any]:
    if not is_vllm(c):
        return {}
    needed = row_tokens(c)
    return {"rollout.max_model_len": c[f"{RO}.max_model_len"] or (needed if needed > 4096 else 0)}


def dtype(c: Config) -> Mapping[str, Any]:
    low = {"bfloat16", "bf16", "float16", "fp16", "half"}
    names = {str(c[f"{RO}.dtype"]), str(c[f"{A}.fsdp_config.dtype"])}
    return {"model.dtype": "bfloat16" if names & low else "float32"}


def one_dtype(c: Config) -> bool:
    short = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
    names = {short.get(str(d), str(d)) for d in (c[f"{RO}.dtype"], c[f"{A}.fsdp_config.dtype"])}
    return len(names) == 1 and "float16" not in names


def scorer(c: Config) -> Mapping[str, Any]:
    path, name = reward_function(c)
    if path:
        return {"/reward": "function", "reward.path": path, "reward.name": name}
    if (folder := reward_model(c)) is not None:
        return {"/reward": "model", "reward.path": folder}
    return {"/reward": "function", "reward.path": DEFAULT_REWARD}


def reward_kwargs(key: str) -> Fill:
    def fill(c: Config) -> Mapping[str, Any]:
        given = {k.removeprefix(f"{key}."): c[k] for k in c.given if k.startswith(f"{key}.")}
        return {f"reward.kwargs.{k}": v for k, v in given.items()} if reward_model(c) is None else {}

    return fill


def workers(key: str) -> Fill:
    return lambda c: {"reward.workers": c[key]} if reward_model(c) is None else {}


def run_steps(c: Config) -> Mapping[str, Any]:
    return {"run.steps": steps(c)[0]}


UNTOLD = "${give_run_steps}"
"""A value that composes, that any `run.steps=...` replaces, and with which nothing runs: it refers to nothing. YAML's
'???' would leave our own default standing."""


def steps(c: Config) -> tuple[int | str, str]:
    """Steps of the run, or `UNTOLD` if the files that decide it are not here; and how they come about."""
    if (given := c["trainer.total_training_steps"]) is not None:
        return int(given), ""
    paths = [Path(p).expanduser() for p in files(c["data.train_files"])]
    epochs, batch = int(c["trainer.total_epochs"]), int(c["data.train_batch_size"])
    if not paths or not all(p.is_file() for p in paths):
        return UNTOLD, f"{epochs} x the batches of files that are not here: give run.steps, or import where they are"
    rows = sum(map(rows_of, paths))
    most = optional(c["data.train_max_samples"])
    rows = min(rows, most) if most else rows
    made = max(1, epochs * (rows // batch))
    return made, f"{epochs} x {rows // batch} batches of the {rows} rows, before the length filter"


def rows_of(path: Path) -> int:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.read_metadata(path).num_rows
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def evaluation_steps(c: Config) -> Mapping[str, Any]:
    return {"eval.every": optional(c["trainer.test_freq"])}


# -- sameness ----------------------------------------------------------------------------------------------------


def no_kl(c: Config) -> bool:
    return not c[f"{A}.use_kl_loss"]


def no_kl_reward(c: Config) -> bool:
    return not c[f"{AL}.use_kl_in_reward"]


def no_reference(c: Config) -> bool:
    return no_kl(c) and no_kl_reward(c)


def no_critic(c: Config) -> bool:
    return not has_critic(c)


def filters(c: Config) -> bool:
    return bool(c["data.filter_overlong_prompts"])


def no_lora(c: Config) -> bool:
    return not c["actor_rollout_ref.model.lora_rank"]


def tidy(name: Any) -> str:
    """A name that the run directory can have."""
    text = "".join(ch if ch.isalnum() or ch in "._-" else "-" for ch in str(name)).strip("-")
    return text.encode()[:100].decode(errors="ignore") or "imported"
