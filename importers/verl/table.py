"""The table: every key of verl 0.9's `ppo_trainer` configuration, and what it is here, or why it has no equal.

The page `docs/verl.md` is made of these rules (`python -m importers.verl.page`), and so is every imported recipe. Where
a note says something else than a key's name suggests, that is what verl 0.9.1 was found to do with it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from importers.verl import values as v
from importers.verl.source import Config
from importers.verl.values import AL, RO, A, Fill

When = Callable[[Config], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line of the table.

    `keys` is a key, or a pattern with `*`. `here` are our settings; a group of options begins with '/'. `how` is what
    to know of units; `note` what differs, or, where nothing is `here`, why there is no equal and what to do. `same`:
    whether, in this configuration, nothing is lost and the note does not matter. `fill` gives settings; None: the
    value as it is. `given`: only carried over if the user's file sets the key, for it changes no number.
    """

    keys: str
    here: tuple[str, ...] = ()
    how: str = ""
    note: str = ""
    same: When | None = None
    fill: Fill | None = None
    given: bool = False
    open: bool = False
    """verl takes such a key though its configuration does not have it."""

    def settings(self, c: Config) -> dict[str, Any]:
        """What it sets here. ValueError if the file does not tell the value."""
        if not self.here or (self.given and self.keys not in c.given):
            return {}
        made = self.fill(c) if self.fill else dict.fromkeys(self.here, c[self.keys])
        return {k: v for k, v in made.items() if v is not None}


def rule(keys: str, *here: str, **more: Any) -> Rule:
    return Rule(keys=keys, here=here, **more)


def none(keys: str, note: str, *values: Any, same: When | None = None, open: bool = False) -> Rule:
    """A key without an equal; at one of `values` nothing is lost."""

    def at(c: Config) -> bool:
        return c[keys] in values

    return Rule(keys=keys, note=note, same=same or (at if values else None), open=open)


def find(key: str) -> Rule | None:
    """The rule of a key: one that names it, else the longest pattern that fits."""
    exact, patterns = _by_key()
    if key in exact:
        return exact[key]
    return next((r for r in patterns if fnmatch.fnmatchcase(key, r.keys)), None)


@lru_cache(maxsize=1)
def _by_key() -> tuple[dict[str, Rule], list[Rule]]:
    patterns = sorted((r for r in RULES if "*" in r.keys), key=lambda r: -len(r.keys))
    return {r.keys: r for r in RULES if "*" not in r.keys}, patterns


def at(key: str, *values: Any) -> When:
    return lambda c: c[key] in values


def _kl_why(which: str) -> str:
    return f"no reference policy yet, so {which}"


CORRECTION = "with bypass_mode only"
ONE_GPU = "one GPU holds trainer and engine: nothing is sharded"
DESCENT = "the learning rate is constant"
TEXT_ONLY = "text alone: no pictures, video or sound"
ENGINE = "verl's engine for its own workers: nothing to set here"
NOT_SAVED = "no checkpoints yet: the model is saved at the end, in `final/`"

_MODEL = (
    rule(
        "actor_rollout_ref.model.path",
        "model.path",
        note="must be a Hugging Face folder with safetensors: nothing is downloaded",
        same=lambda c: v.is_folder(c["actor_rollout_ref.model.path"]),
    ),
    none("actor_rollout_ref.model.tokenizer_path", "the tokenizer is that of the model's folder", None),
    none("actor_rollout_ref.model.hf_config_path", "the configuration is that of the model's folder", None),
    none("actor_rollout_ref.model.trust_remote_code", "code from a model's folder is never run", False),
    none("actor_rollout_ref.model.custom_chat_template", "put it into the folder, as `chat_template.jinja`", None),
    none("actor_rollout_ref.model.external_lib", "`plugins=[module]` imports stages of your own", None),
    none("actor_rollout_ref.model.override_config.*", "change the folder's `config.json`", open=True),
    none("actor_rollout_ref.model.override_config", "change the folder's `config.json`", {}, None),
    none("actor_rollout_ref.model.lora_rank", "no LoRA: all weights learn", 0),
    none("actor_rollout_ref.model.lora_adapter_path", "no LoRA: merge the adapter into the folder", None),
    none("actor_rollout_ref.model.lora_alpha", "no LoRA", same=v.no_lora),
    none("actor_rollout_ref.model.target_modules", "no LoRA", same=v.no_lora),
    none("actor_rollout_ref.model.exclude_modules", "no LoRA", same=v.no_lora),
    none("actor_rollout_ref.model.lora.*", "no LoRA; verl reads it with Megatron"),
    none(
        "actor_rollout_ref.model.use_remove_padding", "always: rows are ragged, and padding is no part of a loss", True
    ),
    none("actor_rollout_ref.model.enable_gradient_checkpointing", "memory: lower `trainer.micro_tokens`", False),
    none("actor_rollout_ref.model.enable_activation_offload", "memory: lower `trainer.micro_tokens`", False),
    none("actor_rollout_ref.model.use_shm", "weights are read from the folder", False),
    none("actor_rollout_ref.model.use_liger", "transformers' own kernels", False),
    none("actor_rollout_ref.model.use_fused_kernels", "transformers' own kernels", False),
    none("actor_rollout_ref.model.fused_kernel_options.*", "transformers' own kernels"),
    none("actor_rollout_ref.model.tiled_mlp.*", "transformers' own kernels"),
    none("actor_rollout_ref.model.mtp.*", "no multi-token prediction"),
    none("actor_rollout_ref.hybrid_engine", "trainer and engine are always two stages with weights of their own", True),
    none("actor_rollout_ref.nccl_timeout", ONE_GPU),
)

_DATA = (
    rule(
        "data.train_files",
        "/loader",
        "loader.path",
        "loader.fields.ground_truth",
        how="`.parquet` or JSONL on a local disk, in verl's columns",
        fill=v.data_files("data.train_files", "loader"),
    ),
    rule(
        "data.val_files",
        "/loader@eval_loader",
        "eval_loader.*",
        how="path, verl's columns; all rows are one evaluation",
        fill=v.data_files("data.val_files", "eval_loader"),
    ),
    rule(
        "data.train_max_samples",
        "loader.limit",
        note="the first rows, where verl draws some at random",
        same=at("data.train_max_samples", -1),
        fill=lambda c: {"loader.limit": v.optional(c["data.train_max_samples"])},
    ),
    rule(
        "data.val_max_samples",
        "eval_loader.limit",
        note="the first rows, where verl draws some at random",
        same=at("data.val_max_samples", -1),
        fill=lambda c: {"eval_loader.limit": v.optional(c["data.val_max_samples"])},
    ),
    rule(
        "data.prompt_key",
        "loader.fields.prompt",
        "eval_loader.fields.prompt",
        fill=v.both_loaders("fields.prompt", "data.prompt_key"),
    ),
    rule(
        "data.reward_fn_key",
        "loader.fields.data_source",
        "eval_loader.fields.data_source",
        fill=v.both_loaders("fields.data_source", "data.reward_fn_key"),
    ),
    rule(
        "data.max_prompt_length",
        "loader.max_prompt_tokens",
        "eval_loader.max_prompt_tokens",
        how="counted after the chat template",
        fill=v.prompt_limit,
    ),
    rule(
        "data.filter_overlong_prompts",
        "loader.max_prompt_tokens",
        "eval_loader.max_prompt_tokens",
        note="always on; verl without it cuts long prompts",
        same=v.filters,
        fill=v.prompt_limit,
    ),
    none("data.truncation", "no prompt is cut: longer ones are left out", same=v.filters),
    rule("data.max_response_length", "rollout.max_new_tokens", fill=v.response),
    rule("data.train_batch_size", "loader.batch_size", how="prompts a step, in both"),
    none("data.gen_batch_size", "a step generates what it learns from", None),
    none("data.val_batch_size", "all rows of an evaluation are one batch; the engine bounds what runs together", None),
    rule("data.shuffle", "loader.shuffle", how="a seeded permutation each epoch"),
    rule(
        "data.seed",
        "seed",
        note="seeds everything, not the order alone; the random numbers are others than verl's",
        same=at("data.seed", None),
        fill=lambda c: {"seed": c["data.seed"]},
    ),
    rule("data.validation_shuffle", "eval_loader.shuffle"),
    none("data.apply_chat_template_kwargs", "write them into the folder's `chat_template.jinja`", {}, None),
    none("data.apply_chat_template_kwargs.*", "write them into the folder's `chat_template.jinja`", open=True),
    none("data.tokenizer", "the tokenizer is that of the model's folder", None),
    none("data.trust_remote_code", "code from a model's folder is never run", False),
    none(
        "data.custom_cls.path",
        "a loader is one Python file and one YAML: CONTRIBUTING.md",
        None,
        "pkg://stages.loader.verl_dataset",
    ),
    none(
        "data.custom_cls.name",
        "a loader is one Python file and one YAML: CONTRIBUTING.md",
        None,
        "MappedRLHFDataset",
    ),
    none("data.filter_overlong_prompts_workers", "counted in parallel, and kept for the next run"),
    none("data.dataloader_num_workers", "one thread prepares batches ahead: `loader.prefetch`"),
    none("data.use_shm", "files are read where they lie", False),
    none("data.return_raw_input_ids", "token ids and the chat always come along"),
    none("data.return_raw_chat", "token ids and the chat always come along"),
    none("data.return_full_prompt", "token ids and the chat always come along"),
    none("data.return_multi_modal_inputs", TEXT_ONLY),
    none("data.image_key", TEXT_ONLY, "images"),
    none("data.video_key", TEXT_ONLY, "videos"),
    none("data.audio_key", TEXT_ONLY, "audios"),
    none("data.image_patch_size", TEXT_ONLY, 14),
    none("data.mm_processor_kwargs", TEXT_ONLY, {}, None),
    none("data.mm_processor_kwargs.*", TEXT_ONLY, open=True),
    none("data.tool_config_path", "no tools: one turn a row", None),
    none("data.function_tool_path", "no tools: one turn a row", None),
)

_ROLLOUT = (
    rule(
        f"{RO}.name",
        "/rollout",
        how="vllm: vllm_async; hf: hf",
        note="sglang and trtllm are not here: vllm_async takes their place",
        same=at(f"{RO}.name", "vllm", "hf"),
        fill=lambda c: {"/rollout": v.engine(c)},
    ),
    rule(f"{RO}.n", "rollout.n"),
    rule(f"{RO}.temperature", "rollout.temperature"),
    rule(
        f"{RO}.top_k",
        "rollout.top_k",
        how="-1 there, 0 here: no filter",
        fill=lambda c: {"rollout.top_k": v.optional(c[f"{RO}.top_k"])},
    ),
    rule(f"{RO}.top_p", "rollout.top_p"),
    none(f"{RO}.do_sample", "`rollout.temperature=0` is greedy; verl's vLLM rollout does not read it either", True),
    rule(f"{RO}.response_length", "rollout.max_new_tokens", fill=v.response),
    rule(
        f"{RO}.prompt_length",
        "loader.max_prompt_tokens",
        "eval_loader.max_prompt_tokens",
        note="read if nothing is filtered; nothing is cut",
        same=lambda c: v.filters(c) and c[f"{RO}.prompt_length"] == c["data.max_prompt_length"],
        fill=v.prompt_limit,
    ),
    rule(
        f"{RO}.val_kwargs.temperature",
        "eval_loader.sampling.temperature",
        fill=v.validation("temperature"),
    ),
    rule(f"{RO}.val_kwargs.top_p", "eval_loader.sampling.top_p", fill=v.validation("top_p")),
    rule(
        f"{RO}.val_kwargs.top_k",
        "eval_loader.sampling.top_k",
        how="-1 there, 0 here: no filter",
        fill=v.validation("top_k", v.optional),
    ),
    rule(f"{RO}.val_kwargs.n", "eval_loader.sampling.n", fill=v.validation("n")),
    none(f"{RO}.val_kwargs.do_sample", "the temperature alone decides, as in verl's vLLM rollout"),
    rule(
        f"{RO}.dtype",
        "model.dtype",
        note="one for engine and trainer: bfloat16 if either is; no float16",
        same=v.one_dtype,
        fill=v.dtype,
    ),
    rule(
        f"{RO}.gpu_memory_utilization",
        "rollout.gpu_memory_utilization",
        note="also held while the trainer works",
        same=lambda c: not v.is_vllm(c),
        fill=v.if_vllm(f"{RO}.gpu_memory_utilization", "gpu_memory_utilization"),
        given=True,
    ),
    rule(
        f"{RO}.max_model_len",
        "rollout.max_model_len",
        how="null: prompt and v.response, where they are more than 4096",
        fill=v.context,
    ),
    rule(
        f"{RO}.max_num_seqs", "rollout.max_num_seqs", fill=v.if_vllm(f"{RO}.max_num_seqs", "max_num_seqs"), given=True
    ),
    rule(
        f"{RO}.enforce_eager",
        "rollout.enforce_eager",
        fill=v.if_vllm(f"{RO}.enforce_eager", "enforce_eager"),
        given=True,
    ),
    none(f"{RO}.tensor_model_parallel_size", ONE_GPU, 1),
    none(f"{RO}.data_parallel_size", ONE_GPU, 1),
    none(f"{RO}.expert_parallel_size", ONE_GPU, 1),
    none(f"{RO}.pipeline_model_parallel_size", ONE_GPU, 1),
    none(f"{RO}.nnodes", ONE_GPU, 0, 1),
    none(f"{RO}.n_gpus_per_node", ONE_GPU, 1),
    none(f"{RO}.mode", "rows stream out of the engine as they finish", "async"),
    none(f"{RO}.seed", "every row has a seed of its own, from `seed`"),
    none(f"{RO}.full_determinism", "rows are seeded; see the sampler's capability `seeded_rows`", False),
    none(f"{RO}.ignore_eos", "a response ends at an end token", False),
    none(f"{RO}.calculate_log_probs", "always: the engine's log-probs come with the rows", True),
    none(f"{RO}.logprobs_mode", "log-probs are those before filters (ADR 0005)", "processed_logprobs"),
    none(f"{RO}.over_sample_rate", "no more rows are generated than are learned from", 0),
    none(f"{RO}.multi_turn.enable", "one turn a row", False),
    none(f"{RO}.multi_turn.*", "one turn a row", same=lambda c: not c[f"{RO}.multi_turn.enable"]),
    none(f"{RO}.agent.*", "one turn a row, in the engine itself"),
    none(f"{RO}.engine_kwargs.*", "vLLM's own settings are those of `rollout`", open=True),
    none(f"{RO}.quantization", "the engine computes in `model.dtype`", None),
    none(f"{RO}.quantization_config_file", "the engine computes in `model.dtype`", None),
    none(f"{RO}.qat*", "the engine computes in `model.dtype`"),
    none(f"{RO}.mtp*", "no speculative decoding"),
    none(f"{RO}.log_prob_*", "the trainer computes log-probs within `trainer.micro_tokens`"),
    none(f"{RO}.max_num_batched_tokens", "vLLM decides"),
    none(f"{RO}.enable_chunked_prefill", "vLLM decides"),
    none(f"{RO}.enable_prefix_caching", "vLLM decides"),
    none(f"{RO}.cudagraph_capture_sizes", "vLLM decides"),
    none(f"{RO}.scheduling_policy", "vLLM decides"),
    none(f"{RO}.disable_log_stats", "vLLM decides"),
    none(f"{RO}.free_cache_engine", "the KV cache is held during training too"),
    none(f"{RO}.multi_stage_wake_up", "the KV cache is held during training too"),
    none(f"{RO}.load_format", "weights come from the folder, then from the trainer after each step"),
    none(f"{RO}.layered_summon", "weights come from the folder, then from the trainer after each step"),
    none(f"{RO}.checkpoint_engine.*", "weights come from the folder, then from the trainer after each step"),
    none(f"{RO}.skip_tokenizer_init", "token ids go in and out"),
    none(f"{RO}.trace.*", "`rollouts.jsonl` has every row"),
    none(f"{RO}.prometheus.*", "`metrics.jsonl` has every metric"),
    none(f"{RO}.disaggregation.*", ONE_GPU),
    none(f"{RO}.router_config_path", ONE_GPU, None),
    none(f"{RO}.enable_rollout_routing_replay", "no replay of expert routes", False),
    none(f"{RO}.moe_load_balance_metrics_interval", "no replay of expert routes", 0),
)


def _learner(node: str, section: str, rate: str) -> tuple[Rule, ...]:
    """What actor and critic have in common. `rate` is what to know of clipping."""
    critic = node == "critic"
    same = v.no_critic if critic else None

    def fill(key: str, setting: str) -> Fill | None:
        return v.if_critic(key, setting) if critic else None

    def value(name: str, setting: str, **more: Any) -> Rule:
        return rule(f"{section}.{name}", f"{node}.{setting}", fill=fill(f"{section}.{name}", setting), **more)

    def micro(name: str, how: str) -> Rule:
        made = v.micro_tokens(node, section, "ppo_max_token_len_per_gpu")
        return rule(f"{section}.{name}", f"{node}.micro_tokens", how=how, fill=made, given=True)

    def schedule(name: str, *values: Any) -> Rule:
        key = f"{section}.optim.{name}"
        return none(key, DESCENT, same=lambda c: c[key] in values or (critic and v.no_critic(c)))

    return (
        value("optim.lr", "lr"),
        value("optim.weight_decay", "weight_decay"),
        rule(f"{section}.optim.betas", f"{node}.beta1", f"{node}.beta2", fill=v.betas(node, section)),
        value("optim.clip_grad", "clip_grad"),
        none(f"{section}.grad_clip", rate, same=lambda c: c[f"{section}.grad_clip"] == c[f"{section}.optim.clip_grad"]),
        schedule("lr_warmup_steps", -1, 0, None),
        schedule("lr_warmup_steps_ratio", 0, None),
        schedule("lr_scheduler_type", "constant"),
        schedule("warmup_style", None, "constant"),
        none(f"{section}.optim.min_lr_ratio", DESCENT, same=at(f"{section}.optim.lr_scheduler_type", "constant")),
        none(f"{section}.optim.num_cycles", DESCENT, same=at(f"{section}.optim.lr_scheduler_type", "constant")),
        none(f"{section}.optim.zero_indexed_step", DESCENT, same=at(f"{section}.optim.lr_scheduler_type", "constant")),
        none(f"{section}.optim.total_training_steps", "the steps of the run count: `run.steps`", -1),
        none(f"{section}.optim.optimizer", "AdamW", "AdamW", "adam"),
        none(f"{section}.optim.optimizer_impl", "AdamW of torch", "torch.optim"),
        none(f"{section}.optim.override_optimizer_config", "`lr`, `beta1`, `beta2`, `weight_decay` are all", None),
        none(f"{section}.optim.*", "AdamW at a constant rate"),
        rule(
            f"{section}.ppo_mini_batch_size",
            f"{node}.mini_batch",
            how="prompts there, rows here: times n; 0 for the whole step",
            fill=v.mini_batch(node, f"{section}.ppo_mini_batch_size"),
        ),
        micro("ppo_micro_batch_size_per_gpu", "times the longest row: tokens; no loss changes"),
        micro("ppo_micro_batch_size", "times the longest row: tokens; no loss changes"),
        micro("ppo_max_token_len_per_gpu", "with use_dynamic_bsz"),
        micro("use_dynamic_bsz", "always: a forward pass is bounded by tokens"),
        value("ppo_epochs", "epochs"),
        none(
            f"{section}.shuffle",
            "mini-batches are always drawn in a seeded order, where verl takes them as they come",
            same=lambda c: (
                bool(c[f"{section}.shuffle"])
                or int(c[f"{section}.ppo_mini_batch_size"]) >= int(c["data.train_batch_size"])
                or (critic and v.no_critic(c))
            ),
        ),
        rule(
            f"{section}.loss_scale_factor",
            f"{node}.loss_scale_factor",
            how="null: the response's greatest length, which is verl's padded width",
            fill=v.scale(node, section),
        ),
        none(f"{section}.data_loader_seed", "`seed` seeds the order"),
        none(f"{section}.rollout_n", "`rollout.n`"),
        none(f"{section}.ulysses_sequence_parallel_size", ONE_GPU, 1),
        none(f"{section}.checkpoint.*", NOT_SAVED),
        none(f"{section}.strategy", ENGINE, same=same),
    )


_ACTOR = (
    *_learner("trainer", A, "verl 0.9.1 reads optim.clip_grad and not this: so does the recipe"),
    rule(
        f"{A}.clip_ratio",
        "trainer.clip_ratio",
        note="read only where clip_ratio_low or _high is null, as in verl",
        same=lambda c: (
            v.clip_counts(c) or {c[f"{A}.clip_ratio_low"], c[f"{A}.clip_ratio_high"]} == {c[f"{A}.clip_ratio"]}
        ),
        fill=v.clip_ratio,
    ),
    rule(f"{A}.clip_ratio_low", "trainer.clip_ratio_low", fill=v.clip("low")),
    rule(f"{A}.clip_ratio_high", "trainer.clip_ratio_high", fill=v.clip("high")),
    rule(f"{A}.clip_ratio_c", "trainer.clip_ratio_c", fill=v.of_loss(f"{A}.clip_ratio_c", "clip_ratio_c")),
    rule(
        f"{A}.loss_agg_mode",
        "trainer.loss_agg_mode",
        how="verl's token-mean goes to every loss; sapo and geo_mean ignore it, in both",
        fill=v.aggregation,
    ),
    rule(f"{A}.entropy_coeff", "trainer.entropy_coef"),
    rule(
        f"{A}.policy_loss.loss_mode",
        "trainer.policy_loss",
        how="verl's own losses, by the same names",
        fill=lambda c: {"trainer.policy_loss": v.loss_of(c)},
    ),
    *(
        rule(f"{A}.policy_loss.{name}", f"trainer.{name}", fill=v.of_loss(f"{A}.policy_loss.{name}", name))
        for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
    ),
    *(rule(f"{A}.{name}", f"trainer.{name}", fill=v.of_loss(f"{A}.{name}", name)) for name in ("tau_pos", "tau_neg")),
    none(f"{A}.use_kl_loss", _kl_why("the loss has no KL term"), False),
    none(f"{A}.kl_loss_coef", _kl_why("the loss has no KL term"), same=v.no_kl),
    none(f"{A}.kl_loss_type", _kl_why("the loss has no KL term"), same=v.no_kl),
    rule(
        f"{A}.fsdp_config.dtype",
        "model.dtype",
        note="one for engine and trainer: bfloat16 if either is; no float16",
        same=v.one_dtype,
        fill=v.dtype,
    ),
    none(f"{A}.fsdp_config.model_dtype", "weights, gradients and moments are float32", "fp32", "float32"),
    none(f"{A}.fsdp_config.*", ENGINE),
    none(f"{A}.calculate_entropy", "always measured: `policy/entropy`"),
    none(f"{A}.calculate_sum_pi_squared", "the sum of squared probabilities is not computed", False),
    none(f"{A}.use_prefix_grouper", "rows are batched by length", False),
    none(f"{A}.freeze_vision_tower", TEXT_ONLY, False),
    none(f"{A}.use_torch_compile", ENGINE),
    none(f"{A}.use_fused_kernels", "transformers' own kernels", False),
    none(f"{A}.use_remove_padding", "always: rows are ragged", True),
    none(f"{A}.entropy_*", ENGINE),
    none(f"{A}.pad_to_length*", "rows are ragged"),
    none(f"{A}.qat.*", "no quantised training"),
    none("actor_rollout_ref.ref.*", "no reference policy yet", same=v.no_reference),
)

_CRITIC = (
    rule(
        "critic.enable",
        "/pipeline",
        note="a critic goes with estimator gae, and with no other",
        same=lambda c: v.has_critic(c) == (v.estimator(c) == "gae"),
        fill=lambda c: {"/pipeline": v.pipeline(c)["/pipeline"]},
    ),
    *_learner("critic", "critic", "verl 0.9.1 reads optim.clip_grad and not this: so does the recipe"),
    rule(
        "critic.cliprange_value",
        "critic.cliprange_value",
        fill=v.if_critic("critic.cliprange_value", "cliprange_value"),
    ),
    rule("critic.loss_agg_mode", "critic.loss_agg_mode", fill=v.if_critic("critic.loss_agg_mode", "loss_agg_mode")),
    none(
        "critic.model.path",
        "the critic begins as the policy's model, with a value head",
        same=lambda c: v.no_critic(c) or c["critic.model.path"] == c["actor_rollout_ref.model.path"],
    ),
    none("critic.model.tokenizer_path", "token ids are the policy's"),
    none("critic.model.use_remove_padding", "always: rows are ragged", True),
    none("critic.model.enable_gradient_checkpointing", "memory: lower `critic.micro_tokens`", False),
    none("critic.model.*", "the critic begins as the policy's model, with a value head", same=v.no_critic),
    none("critic.fsdp.*", ENGINE, same=v.no_critic),
    none("critic.nccl_timeout", ONE_GPU),
    none("critic.forward_*", "values are computed within `critic.micro_tokens`"),
)

_ALGORITHM = (
    rule(
        f"{AL}.adv_estimator",
        "/pipeline",
        "advantage.estimator",
        how="gae: ppo; all others: grpo",
        note="not remax, nor the token baselines",
        same=lambda c: v.estimator(c) not in ("remax", "optimal_token_baseline", "tir_optimal_token_baseline"),
        fill=v.pipeline,
    ),
    rule(f"{AL}.gamma", "advantage.gamma", how="where the estimator reads it", fill=v.of_estimator("gamma")),
    rule(f"{AL}.lam", "advantage.lam", how="where the estimator reads it", fill=v.of_estimator("lam")),
    rule(
        f"{AL}.norm_adv_by_std_in_grpo",
        "advantage.norm_adv_by_std_in_grpo",
        note="verl 0.9.1 drops it for gdpo, grpo_vectorized",
        same=lambda c: bool(c[f"{AL}.norm_adv_by_std_in_grpo"]) or v.estimator(c) not in ("gdpo", "grpo_vectorized"),
        fill=v.of_estimator("norm_adv_by_std_in_grpo"),
    ),
    none(f"{AL}.use_kl_in_reward", _kl_why("the reward has no KL term"), False),
    none(f"{AL}.kl_penalty", _kl_why("the reward has no KL term"), same=v.no_kl_reward),
    none(f"{AL}.kl_ctrl.*", _kl_why("the reward has no KL term"), same=v.no_kl_reward),
    none(
        f"{AL}.filter_groups.enable",
        "all groups stay; `advantage/zero_variance_groups` counts the flat",
        False,
    ),
    none(f"{AL}.filter_groups.*", "groups are not filtered", same=lambda c: not c[f"{AL}.filter_groups.enable"]),
    none(f"{AL}.use_pf_ppo", "rows are not resampled by their score", False),
    none(f"{AL}.pf_ppo.*", "rows are not resampled by their score", same=lambda c: not c[f"{AL}.use_pf_ppo"]),
    none(f"{AL}.gdpo_reward_keys", "`gdpo` takes all parts of the reward", None, open=True),
    rule(f"{AL}.gdpo_reward_weights", "advantage.reward_weights", how="in the order of the parts' names", open=True),
    rule(
        f"{AL}.rollout_correction.bypass_mode",
        "trainer.policy_loss",
        fill=lambda c: {"trainer.policy_loss": v.loss_of(c)},
    ),
    rule(
        f"{AL}.rollout_correction.rollout_is",
        "trainer.rollout_correction.rollout_is",
        note=CORRECTION,
        same=lambda c: v.bypasses(c) or c[f"{AL}.rollout_correction.rollout_is"] is None,
        fill=v.rollout_is,
    ),
    *(
        rule(
            f"{AL}.rollout_correction.{name}",
            f"trainer.rollout_correction.{name}",
            note=CORRECTION,
            same=lambda c, n=name, d=default: v.bypasses(c) or c[f"{AL}.rollout_correction.{n}"] in (None, d),
            fill=v.correction(name),
        )
        for name, default in (
            ("rollout_is_threshold", 2.0),
            ("rollout_is_batch_normalize", False),
            ("rollout_rs", None),
            ("rollout_rs_threshold", None),
            ("loss_type", "ppo_clip"),
        )
    ),
)


def _scoring(section: str, old: bool) -> tuple[Rule, ...]:
    """The reward function, in the new place and in the old one at the top."""
    key = f"{'' if old else 'reward.'}custom_reward_function"

    def loads(c: Config) -> bool:
        return not str(v.reward_function(c)[0] or "").startswith("pkg://")

    return (
        rule(
            f"{key}.path",
            "/reward",
            "reward.path",
            "reward.name",
            note="a module (pkg://) must be given as its file",
            same=loads,
            fill=v.scorer,
        ),
        rule(f"{key}.name", "reward.name", fill=lambda c: {k: v for k, v in v.scorer(c).items() if k == "reward.name"}),
        rule(f"{key}.reward_kwargs.*", "reward.kwargs.*", fill=v.reward_kwargs(f"{key}.reward_kwargs"), open=True),
        rule(f"{section}.num_workers", "reward.workers", fill=v.workers(f"{section}.num_workers"), given=True),
        none(f"{section}.reward_kwargs.*", "put such a penalty into `compute_score`", open=True),
    )


def _judging(enable: str, path: str) -> tuple[Rule, ...]:
    return (
        rule(
            enable,
            "/reward",
            "reward.path",
            note="a sequence classifier; it is not served to functions",
            same=lambda c: v.reward_model(c) is None and not c[enable],
            fill=lambda c: v.scorer(c) if v.reward_model(c) is not None else {},
        ),
        rule(
            path,
            "reward.path",
            note="a folder for sequence classification, in safetensors",
            same=lambda c: v.reward_model(c) is None,
            fill=lambda c: {"reward.path": v.reward_model(c)} if v.reward_model(c) is not None else {},
        ),
    )


MANAGER = "scored row by row, as by `naive`; put penalties and limits into `compute_score`"
_REWARD = (
    *_scoring("reward", old=False),
    *_scoring("reward_model", old=True),
    *_judging("reward.reward_model.enable", "reward.reward_model.model_path"),
    *_judging("reward_model.enable", "reward_model.model.path"),
    none("reward.reward_manager.name", MANAGER, "naive"),
    none("reward_model.reward_manager", MANAGER, None, "naive"),
    none("reward.reward_manager.*", MANAGER),
    none("reward_model.reward_loop_*", MANAGER, same=lambda c: c["reward_model.reward_loop_source"] is None),
    none("reward.reward_model.*", "how verl serves its reward model"),
    none("reward_model.*", "how verl serves its reward model"),
    none("reward.sandbox_fusion.*", "call the sandbox from your own `compute_score`"),
    none("sandbox_fusion.*", "call the sandbox from your own `compute_score`"),
)

_TRAINER = (
    rule(
        "trainer.total_epochs",
        "run.steps",
        how="times whole batches of the files",
        note="no rows are left out at the end of an epoch",
        same=lambda c: c["trainer.total_training_steps"] is not None,
        fill=v.run_steps,
    ),
    rule("trainer.total_training_steps", "run.steps", fill=v.run_steps),
    rule(
        "trainer.test_freq",
        "eval.every",
        how="-1 there, 0 here",
        note="0 evaluates before the first and after the last step all the same",
        same=lambda c: c["trainer.test_freq"] > 0,
        fill=v.evaluation_steps,
    ),
    none("trainer.val_before_train", "always", True),
    none("trainer.val_only", "`run.steps=0` evaluates twice and trains nothing", False),
    none("trainer.save_freq", NOT_SAVED, -1),
    none("trainer.resume_mode", NOT_SAVED, "disable"),
    none("trainer.resume_from_path", NOT_SAVED, None),
    none("trainer.max_actor_ckpt_to_keep", NOT_SAVED),
    none("trainer.max_critic_ckpt_to_keep", NOT_SAVED),
    none("trainer.del_local_ckpt_after_load", NOT_SAVED),
    none("trainer.checkpoint_callback_class", NOT_SAVED, None),
    none("trainer.esi_redundant_time", NOT_SAVED, 0),
    none("trainer.default_local_dir", "`hydra.run.dir`: a new directory each run"),
    none("trainer.default_hdfs_dir", "`hydra.run.dir`: a local directory", None),
    none("trainer.project_name", "one name a run: that of the experiment"),
    rule(
        "trainer.experiment_name",
        "name",
        how="letters, digits, '.', '_' and '-'; other characters become '-'",
        fill=lambda c: {"name": v.tidy(c["trainer.experiment_name"])},
        given=True,
    ),
    none(
        "trainer.logger",
        "the terminal and `metrics.jsonl`, an object a step; other loggers are not here",
        same=lambda c: set(v.files(c["trainer.logger"])) <= {"console", "file"},
    ),
    rule("trainer.log_val_generations", "tracker.samples", how="shown in the terminal", given=True),
    none("trainer.rollout_data_dir", "always: `rollouts.jsonl` in the run's directory"),
    none("trainer.validation_data_dir", "always: `rollouts.jsonl` in the run's directory"),
    none("trainer.n_gpus_per_node", ONE_GPU, 1),
    none("trainer.nnodes", ONE_GPU, 1),
    rule(
        "trainer.device",
        "run.device",
        how="cuda: auto",
        note="cuda and cpu are here",
        same=at("trainer.device", "cuda", "cpu"),
        fill=lambda c: {"run.device": "cpu"} if c["trainer.device"] == "cpu" else {},
        given=True,
    ),
    none("trainer.critic_warmup", "critic and policy learn from the first step", 0),
    none("trainer.balance_batch", ONE_GPU),
    none("trainer.ray_wait_register_center_timeout", "no Ray"),
    none("trainer.use_v1", "`runner=sync`, or `overlap` with the same numbers"),
    none("trainer.v1.trainer_mode", "on-policy; `runner=overlap` scores rows while others are generated", "sync"),
    none("trainer.v1.*", "on-policy; `runner=overlap` scores rows while others are generated"),
)

_REST = (
    none("distillation.enabled", "no teacher", False),
    none("distillation.*", "no teacher", same=at("distillation.enabled", False)),
    none("ray_kwargs.*", "no Ray", open=True),
    none("transfer_queue.*", "records go from stage to stage in shared memory"),
    none("global_profiler.*", "`time/<node>_s` of each step; see `mode=compare`"),
    none("skip.*", "nothing of a step is replayed from disk"),
    none("actor_rollout_ref.*.profiler.*", "`time/<node>_s` of each step; see `mode=compare`"),
    none("critic.profiler.*", "`time/<node>_s` of each step; see `mode=compare`"),
    *(
        none(f"{p}.{e}*", ENGINE)
        for p in ("actor_rollout_ref.*", "critic")
        for e in ("megatron", "torchtitan", "veomni")
    ),
    none("*_target_", "names of verl's classes"),
)

SECTIONS: Sequence[tuple[str, Sequence[Rule]]] = (
    ("Model", _MODEL),
    ("Data", _DATA),
    ("Rollout", _ROLLOUT),
    ("Actor", _ACTOR),
    ("Critic", _CRITIC),
    ("Algorithm", _ALGORITHM),
    ("Reward", _REWARD),
    ("Trainer", _TRAINER),
    ("The rest", _REST),
)
RULES = tuple(r for _, rules in SECTIONS for r in rules)
