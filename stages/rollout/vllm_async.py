"""vLLM's asynchronous engine in a process of its own: continuous batching, prefix reuse, rows as they finish."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline.config import Device, Mode
from pipeline.context import Context
from pipeline.errors import Problem
from pipeline.plan import has_cuda
from pipeline.records import Snapshot
from pipeline.registry import backend
from pipeline.stage import setting
from stages import footprint
from stages.model import Model, context_length, text_config
from stages.records import Finish, RolloutBatch, TokenBatch
from stages.rollout import Rollout, RolloutConfig
from stages.rollout.assembly import (
    Draft,
    SampleRows,
    Settings,
    assemble,
    expand,
    measure,
    require_room,
    resolve,
    settings_problems,
    sizes,
    without_prompt,
)
from stages.sampler import Sampler, VllmSampling
from stages.vllm_engine import Engine, EngineError, Request, Response

if TYPE_CHECKING:
    from pipeline.config import RootConfig
    from pipeline.plan import Facts

CPU_HEADS = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
"""Head sizes of vLLM's CPU attention; others start, and fail at the first token."""


@dataclass(slots=True, kw_only=True)
class VllmAsyncRolloutConfig(RolloutConfig):
    """vLLM's own names where it has them."""

    max_model_len: int = setting(0, min=0, doc="tokens of prompt and response; 0: the model's, at most 4096")
    max_num_seqs: int = setting(256, min=1, doc="responses that are decoded together")
    gpu_memory_utilization: float = setting(0.4, above=0, max=1, doc="share of a GPU's memory for weights and KV")
    cpu_kv_cache_gb: float = setting(0.5, above=0, doc="on CPU: gigabytes of KV cache")
    enforce_eager: bool = setting(False, doc="on CUDA: no graphs; starts sooner, decodes slower")
    start_s: float = setting(600.0, above=0, doc="seconds the engine may take to start")
    silence_s: float = setting(600.0, above=0, doc="seconds without any finished response until it counts as dead")


@backend("rollout", "vllm_async")
class VllmAsyncRollout(Rollout):
    """Log-probs: temperature scales the logits inside the engine and requests are sampled at temperature 1, so that
    vLLM's raw log-probs are those at the temperature, before filters, with any sampler.

    The named sampler must have run: kernels are counted in the engine, and a batch in which another kernel sampled, or
    none, is an error. What is guaranteed of seeds: on CPU in float32 a row's tokens do not depend on its batch.
    """

    provides = frozenset({"streaming"})
    needs = frozenset({"vllm_sampler"})
    requires = ("torch", "transformers", "vllm")

    def __init__(self, cfg: VllmAsyncRolloutConfig, model: Model, sampler: Sampler):
        self.cfg, self.model, self.sampler = cfg, model, sampler
        self._engine: Engine | None = None

    def facts(self) -> Mapping[str, Any]:
        return {"samples_per_prompt": self.cfg.n, "max_new_tokens": self.cfg.max_new_tokens}

    def check(self, facts: Facts) -> Iterable[Problem]:
        yield from settings_problems(self.cfg, self.model, facts)
        yield from self._length_problems(facts)
        size = head_size(self.model.config())
        if size is not None and size not in CPU_HEADS and _on_cpu(facts.root):
            what = f"has heads of size {size}, which vLLM's CPU build cannot compute"
            hint = f"a model with one of {', '.join(map(str, sorted(CPU_HEADS)))}, a CUDA device, or another rollout"
            yield Problem(where="model.path", what=what, hint=hint, level=_level(facts.root))

    def sizes(self, facts: Facts) -> dict[str, int | str]:
        return sizes(self.cfg, facts) | {"tokens of prompt and response": f"at most {self._most_tokens():,}"}

    def memory(self, facts: Facts) -> dict[str, int]:
        """Weights in the model's dtype, and the cache that the engine takes: `cpu_kv_cache_gb`, or on CUDA the rest of
        its share of the device, activations included. New weights lie on the host in float32 while they are pushed."""
        shape = footprint.shape_of(self.model)
        if shape is None:
            return {}
        weights, cache = footprint.itemsize(self.model) * shape.parameters, int(self.cfg.cpu_kv_cache_gb * 2**30)
        known = {"weights": weights, "host/snapshot": footprint.FLOAT32 * shape.parameters}
        if facts.device == "cuda":
            if facts.device_memory is None:  # the plan is made on another machine
                return known
            cache = max(int(facts.device_memory * self.cfg.gpu_memory_utilization) - weights, 0)
        return {**known, "kv_cache": cache}

    def _length_problems(self, facts: Facts) -> Iterator[Problem]:
        """What does not fit the engine; what does not fit the model either is said by the settings' own check."""
        cfg, where = self.cfg, f"{facts.key}.max_model_len"
        context, limit = context_length(self.model.config()), self._most_tokens()
        prompt = max(1, facts.values.get("max_prompt_tokens", 0))
        if context is not None and cfg.max_model_len > context:
            what = f"{cfg.max_model_len} tokens are more than the model's {context} positions"
            yield Problem(where=where, what=what, hint=f"at most {context}, or 0")
        elif limit < prompt + cfg.max_new_tokens <= (context or math.inf):
            what = f"{cfg.max_new_tokens} new tokens after a prompt of {prompt} do not fit the engine's {limit} tokens"
            hint = f"at least {prompt + cfg.max_new_tokens}, or lower {facts.key}.max_new_tokens, or shorten prompts"
            yield Problem(where=where, what=what, hint=hint)

    def _most_tokens(self) -> int:
        """Tokens of prompt and response that the engine takes."""
        return self.cfg.max_model_len or min(context_length(self.model.config()) or 4096, 4096)

    # -- life ------------------------------------------------------------------------------------------------

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._vllm: VllmSampling = self.sampler.vllm()
        self._tokenizer = self.model.tokenizer()
        self._end_ids = list(self.model.end_ids())
        self._limit = self._most_tokens()
        self._counted: dict[str, int] = {}
        environment = dict(self._vllm.environment)
        if ctx.device == "cpu" or self.cfg.enforce_eager:
            environment["TORCHDYNAMO_DISABLE"] = "1"  # vLLM compiles two small functions even when told to be eager
        self._engine = Engine(self._arguments(ctx), environment, self.cfg.silence_s)
        self._engine.open(self.cfg.start_s)

    def _arguments(self, ctx: Context) -> dict[str, Any]:
        common = {
            "model": self.model.path,
            "dtype": self.model.dtype_name,
            "skip_tokenizer_init": True,  # ids in, ids out
            "generation_config": "vllm",  # the model folder's generation_config.json decides nothing
            "max_model_len": self._limit,
            "max_num_seqs": self.cfg.max_num_seqs,
            "enable_prefix_caching": True,
            "logprobs_mode": "raw_logprobs",
            "seed": int(ctx.seed(ctx.node, 0, 0)) % 2**31,  # of rows without a seed of their own
            "worker_extension_cls": "stages.vllm_worker.WorkerExtension",
            "use_tqdm_on_load": False,
            "disable_log_stats": True,
            "enable_log_requests": False,
        }
        if ctx.device != "cpu":
            own = {"gpu_memory_utilization": self.cfg.gpu_memory_utilization, "enforce_eager": self.cfg.enforce_eager}
            return common | own
        return common | {
            "enforce_eager": True,
            "kv_cache_memory_bytes": int(self.cfg.cpu_kv_cache_gb * 2**30),
            "block_size": 32,  # prefixes are shared in whole blocks; the CPU kernels want multiples of 32
            # A seeded row whose prefill is split kills the engine ("CPU Generator does not use offset").
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(2048, self._limit),
        }

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine:
            engine.close()

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("the rollout is not open")
        return self._engine

    def receive(self, snapshot: Snapshot) -> None:
        self.engine.push(snapshot)

    # -- generation ------------------------------------------------------------------------------------------

    def run(self, tokens: TokenBatch) -> RolloutBatch:
        whole = RolloutBatch.concat(list(self.stream(tokens)))
        return whole.take(np.argsort(whole.row_id))

    def stream(self, tokens: TokenBatch) -> Iterator[RolloutBatch]:
        """First the rows that cannot be made, then a part for the responses that finished at the same time."""
        settings = resolve(self.cfg, tokens.sampling)
        require_room(tokens, settings, self._limit)
        rows = expand(tokens, settings.n)
        failed = without_prompt(tokens, rows, self.engine.version)
        if failed or not len(rows):
            yield assemble(tokens, rows, failed, settings, self._tokenizer)
        servable = np.setdiff1d(np.arange(len(rows)), [draft.row for draft in failed])
        if not len(servable):
            return
        requests = self._requests(tokens, rows, servable)
        started = time.perf_counter()
        for responses in self.engine.stream(requests, self._sampling(settings), _scale(settings)):
            drafts = [_draft(r, int(servable[r.index])) for r in responses]
            part = assemble(tokens, rows, drafts, settings, self._tokenizer)
            measure(self.ctx.meter, part, time.perf_counter() - started)
            yield part
            started = time.perf_counter()  # the consumer's time is not ours
        self._require_sampler(settings, tokens)

    def _requests(self, tokens: TokenBatch, rows: SampleRows, servable: np.ndarray) -> list[Request]:
        seeds = rows.seeds(self.ctx, tokens).tolist() if self._vllm.seeded else [None] * len(rows)
        return [Request(tokens.prompt_ids[int(rows.prompt[row])], seeds[row]) for row in servable.tolist()]

    def _sampling(self, settings: Settings) -> dict[str, Any]:
        """Every parameter that decides the distribution, none left to vLLM's defaults."""
        from vllm.sampling_params import RequestOutputKind

        p = settings.params
        greedy = p.temperature == 0
        unfiltered = p.top_k == 0 and p.top_p == 1 and not greedy
        return {
            "n": 1,
            "temperature": 0.0 if greedy else 1.0,
            "top_k": 0 if greedy else p.top_k,
            "top_p": 1.0 if greedy else self._vllm.no_filter_top_p if unfiltered else p.top_p,
            "min_p": 0.0 if greedy else p.min_p,
            "max_tokens": settings.max_new_tokens,
            "min_tokens": 0,
            "stop_token_ids": self._end_ids,
            "ignore_eos": True,  # the ids above are the only ends
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 0,  # of the sampled token
            "flat_logprobs": True,
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }

    def _require_sampler(self, settings: Settings, tokens: TokenBatch) -> None:
        """The kernels that ran since the last batch are those of the sampler that was asked for, and no others."""
        before, self._counted = self._counted, self.engine.kernel_counts()
        ran = {name: n for name, calls in self._counted.items() if (n := calls - before.get(name, 0))}
        if settings.params.temperature == 0:
            return  # greedy rows are not sampled
        asked = {name: n for name, n in ran.items() if name.startswith(self._vllm.kernels)}
        if not asked or asked != ran:
            what = (
                f"sampler={self.sampler.backend} was asked for, but vLLM sampled with {ran or 'none that is counted'}"
            )
            raise EngineError(f"{what}; it falls back in silence where a kernel does not support a request")
        if tokens.purpose == "train":
            self.ctx.meter.add("rollout/sampler_calls", sum(asked.values()), "sum")


def head_size(config: dict[str, Any]) -> int | None:
    """Size of a head of the language model, from its `config.json`; None if the file does not say."""
    text = text_config(config)
    hidden, heads = text.get("hidden_size", text.get("n_embd")), text.get("num_attention_heads", text.get("n_head"))
    return text.get("head_dim") or (hidden // heads if hidden and heads else None)


def _on_cpu(root: RootConfig) -> bool:
    return root.run.device is Device.cpu or (root.run.device is Device.auto and not has_cuda())


def _level(root: RootConfig) -> Literal["error", "warning"]:
    """A plan that is only looked at may be for another machine."""
    return "warning" if root.mode is Mode.plan and root.run.device is Device.auto else "error"


def _scale(settings: Settings) -> float:
    return 1.0 / settings.params.temperature if settings.params.temperature else 1.0


def _draft(response: Response, row: int) -> Draft:
    finish = Finish.FAILED if response.error else Finish.STOP if response.stopped else Finish.LENGTH
    return Draft(
        row=row,
        ids=response.ids,
        log_probs=response.log_probs,
        finish=finish,
        version_min=response.version_min,
        version_max=response.version_max,
        reason=response.error,
    )
