"""Train `data/base/`: a tiny Llama that copies, reverses, sorts up or sorts down, picked at random.

Every batch holds all four answers of each of its prompts, so the loss is the exact cross-entropy to the even
mixture and the model can be balanced per prompt, which one sampled answer a prompt would make noisy. Held-out
prompts are never trained on. At the end the checkpoint is read back from disk and measured on them, exactly
(teacher forcing).

    python data/train_base.py
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path

import torch
from make_prompts import SKILLS, all_digits, answers, render, split
from make_tokenizer import SPECIALS
from make_tokenizer import build as build_tokenizer
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

DATA = Path(__file__).parent
PASS_AT = 8


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the untrained policy: float32, tied embeddings, heads of 32 (the least vLLM takes on CPU)."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=SPECIALS.index("<pad>"),
        bos_token_id=SPECIALS.index("<bos>"),
        eos_token_id=SPECIALS.index("<eos>"),
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, digits: list[str]) -> Tensor:
    """Return int64 [prompts, skills, tokens]: prompt, answer and end token of each skill (equally long)."""
    eos = str(tokenizer.eos_token)
    texts = [render(row) + answer + eos for row in digits for answer in answers(row).values()]
    ids = torch.tensor(tokenizer(texts)["input_ids"])
    return ids.view(len(digits), len(SKILLS), -1)


def prompt_length(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the number of tokens of a prompt."""
    return len(tokenizer(render("0000"))["input_ids"])


def answer_log_probs(model: LlamaForCausalLM, ids: Tensor, prompt_tokens: int) -> Tensor:
    """Return the log-probability [rows, answer tokens] of each answer token of `ids` [rows, tokens]."""
    answer_tokens = ids.shape[1] - prompt_tokens
    # The end token predicts nothing, so it is not fed.
    logits = model(input_ids=ids[:, :-1], logits_to_keep=answer_tokens, use_cache=False).logits
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(-1, ids[:, prompt_tokens:, None])[..., 0]


def learning_rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    """Return the rate of `step`: linear warm-up, then a cosine to zero, which settles the mixture."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def train(model: LlamaForCausalLM, examples: Tensor, prompt_tokens: int, args: argparse.Namespace) -> None:
    """Train in place on `examples` [prompts, skills, tokens], in shuffled passes."""
    decay = args.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=decay)
    order, started = torch.randperm(len(examples)), time.perf_counter()
    for step in range(args.steps):
        if len(order) < args.batch:
            order = torch.randperm(len(examples))
        batch, order = order[: args.batch], order[args.batch :]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        loss = -answer_log_probs(model, examples[batch].flatten(0, 1), prompt_tokens).sum(-1).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 500 == 0 or step == args.steps - 1:
            # Four distinct answers, evenly mixed, cost ln 4 = 1.386 nats; coincidences cost less.
            seconds = time.perf_counter() - started
            print(f"step {step:5d}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face model folder whose generation settings change no distribution."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=SPECIALS.index("<pad>"),
        bos_token_id=SPECIALS.index("<bos>"),
        eos_token_id=SPECIALS.index("<eos>"),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def measure(model: LlamaForCausalLM, examples: Tensor, prompt_tokens: int) -> dict[str, dict[str, float]]:
    """Return by skill: greedy accuracy, probability and pass@8 at temperature 1; `all` has the total mass.

    pass@8 is exact: the mean over prompts of 1 - (1 - p)**8, p that of the answer with its end token.
    """
    prompts, skills, _ = examples.shape
    log_probs = answer_log_probs(model, examples.flatten(0, 1), prompt_tokens).sum(-1).view(prompts, skills)
    probs = log_probs.exp()
    wanted = examples[:, :, prompt_tokens:]
    greedy = greedy_answers(model, examples[:, 0, :prompt_tokens], wanted.shape[-1])
    hits = (greedy[:, None] == wanted).all(-1).float()
    table = {
        name: {
            "greedy": hits[:, index].mean().item(),
            "p": probs[:, index].mean().item(),
            "p_min": probs[:, index].min().item(),
            f"pass@{PASS_AT}": (1 - (1 - probs[:, index]) ** PASS_AT).mean().item(),
        }
        for index, name in enumerate(SKILLS)
    }
    # An answer that two skills share counts once.
    same = (wanted[:, :, None] == wanted[:, None]).all(-1).tril(-1).any(-1)
    mass = probs.masked_fill(same, 0).sum(-1)
    any_hit = hits.amax(1).mean().item()
    table["all"] = {"greedy": any_hit, "mass": mass.mean().item(), "mass_min": mass.min().item()}
    return table


@torch.no_grad()
def greedy_answers(model: LlamaForCausalLM, prompts: Tensor, new_tokens: int) -> Tensor:
    """Return the `new_tokens` most likely continuations [rows, new_tokens] of `prompts` [rows, tokens]."""
    ids = prompts
    for _ in range(new_tokens):
        logits = model(input_ids=ids, logits_to_keep=1, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids[:, prompts.shape[1] :]


def report(title: str, table: dict[str, dict[str, float]]) -> None:
    """Print one line a skill."""
    print(title)
    for name, numbers in table.items():
        print(f"  {name:10s}" + "".join(f"  {key} {value:.4f}" for key, value in numbers.items()))


def parse_args() -> argparse.Namespace:
    """Read the command line; the defaults made the committed checkpoint."""
    parser = argparse.ArgumentParser(description="Train data/base, save it and measure it.")
    parser.add_argument("--out", type=Path, default=DATA / "base")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=64, help="prompts a step; each brings four answers")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    return parser.parse_args()


def main() -> None:
    """Train, save, read back and measure."""
    args = parse_args()
    # Two threads on a model this small spend their time waiting for each other.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    _, heldout = split()
    seen = sorted(set(all_digits()) - set(heldout))
    random.Random(args.seed).shuffle(seen)
    prompt_tokens = prompt_length(tokenizer)

    model = build_model(tokenizer)
    print(f"{model.num_parameters()} parameters, {len(seen)} prompts to train on, {len(heldout)} held out")
    train(model, encode(tokenizer, seen), prompt_tokens, args)
    save(model, tokenizer, args.out)

    saved = LlamaForCausalLM.from_pretrained(args.out).eval()
    report("held out", measure(saved, encode(tokenizer, heldout), prompt_tokens))
    report("trained on", measure(saved, encode(tokenizer, seen[:2000]), prompt_tokens))


if __name__ == "__main__":
    main()
