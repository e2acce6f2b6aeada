"""What a whole run tokenises: each distinct prompt once, by the stage whose task it is, and nobody tokenises again.

Two epochs of eight prompts, three evaluations of sixteen, a critic, and a reward model in a process of its own. The
model component of a user's own (mine/my_stages.py) writes down every text that enters a tokenizer. The cases:
`memory` and `shared` are token caches, with a reward model that has its own tokenizer; with `policy` it reads the
policy's token ids.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import OWN, ROOT, Ended, differences, lines, numbers, run
from tests.tiny_models import TOKENIZER, VOCABULARY, save_classifier

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CASES = ("memory", "shared", "policy")
STEPS, TRAINED, HELD_OUT, SAMPLES = 4, 8, 16, 4


def sweep(folder: Path) -> Ended:
    shutil.copytree(TOKENIZER, folder / "judge")
    save_classifier(folder / "judge", vocab_size=VOCABULARY)
    small = ["loader.batch_size=4", f"loader.limit={TRAINED}", f"rollout.n={SAMPLES}", "trainer.mini_batch=0"]
    counts = [f"run.steps={STEPS}", "eval.every=2", f"eval_loader.limit={HELD_OUT}"]
    cases = f"+case={','.join(f'counted_{c}' for c in CASES)}"
    return run(folder, "-m", *OWN, f"hydra.sweep.dir={folder}/sweep", cases, *small, *counts)


RUNS = {"sweep": sweep}


def run_dir(runs, case: str) -> Path:
    return runs("sweep").folder / "sweep" / str(CASES.index(case))


def calls(runs, case: str, folder: Path) -> list[dict[str, Any]]:
    """Those into the tokenizer of a model folder."""
    noted = lines(runs("sweep").folder / f"counted_{case}.jsonl")
    assert {call["folder"] for call in noted} <= {str(ROOT / "data" / "base"), str(runs("sweep").folder / "judge")}
    return [call for call in noted if call["folder"] == str(folder)]


def once_each() -> Counter[str]:
    """The distinct prompts of the run."""
    files = {"train": TRAINED, "heldout": HELD_OUT}
    prompts = [r["prompt"] for n, rows in files.items() for r in lines(ROOT / "data" / "digits" / f"{n}.jsonl")[:rows]]
    assert len(set(prompts)) == TRAINED + HELD_OUT
    return Counter(prompts)


def test_it_ends_well_and_leaves_nothing(runs):
    ended = runs("sweep")

    assert (ended.code, ended.left) == (0, {}), ended.err[-3000:]
    for case in CASES:
        rows = lines(run_dir(runs, case) / "rollouts.jsonl")
        assert len(rows) == STEPS * 4 * SAMPLES + 3 * HELD_OUT
        assert {r["status"] for r in rows} == {"ok"}


@pytest.mark.parametrize("case", CASES)
def test_the_policys_tokenizer_sees_each_prompt_once_and_nothing_else(runs, case: str):
    noted = calls(runs, case, ROOT / "data" / "base")

    assert Counter(text for call in noted for text in call["texts"]) == once_each()
    assert len({call["pid"] for call in noted}) == 1, "not the process of the reward, too"


@pytest.mark.parametrize("case", ["memory", "shared"])
def test_a_reward_models_own_tokenizer_sees_each_prompt_once_and_the_responses_of_a_batch_together(runs, case: str):
    noted = calls(runs, case, runs("sweep").folder / "judge")
    prompts = [call["texts"] for call in noted if call["special"]]
    responses = [call["texts"] for call in noted if not call["special"]]
    (policy,) = {call["pid"] for call in calls(runs, case, ROOT / "data" / "base")}

    assert Counter(text for texts in prompts for text in texts) == once_each()
    assert [len(texts) for texts in responses] == [HELD_OUT, 16, 16, HELD_OUT, 16, 16, HELD_OUT]
    assert policy not in {call["pid"] for call in noted}
    written = [r["response"] for r in lines(run_dir(runs, case) / "rollouts.jsonl")]
    assert Counter(text for texts in responses for text in texts) == Counter(written)


def test_with_the_policys_tokens_a_reward_model_tokenises_nothing(runs):
    assert calls(runs, "policy", runs("sweep").folder / "judge") == []


def test_the_reward_reads_prompts_from_the_arena_where_there_is_one(runs):
    """Each row's prompt, in each step; nothing had to be sent after all, and no number is another."""
    by_case = {case: numbers(run_dir(runs, case)) for case in CASES}
    named = {case: [s.get("reward/by_reference") for s in steps[1:]] for case, steps in by_case.items()}
    plain, shared = (numbers(run_dir(runs, c), ("tokenizer_cache/", "reward/by_")) for c in ("memory", "shared"))

    assert named == {"memory": [None] * STEPS, "shared": [16] * STEPS, "policy": [16] * STEPS}
    assert [k for steps in by_case.values() for s in steps for k in s if k.endswith("/sent_again")] == []
    assert differences(plain, shared) == []


def test_the_score_is_the_reward_models(runs):
    """The rows of a step by hand, one at a time."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = runs("sweep").folder / "judge"
    module = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row in [r for r in lines(run_dir(runs, "shared") / "rollouts.jsonl") if r["step"] == 1][:16]:
        ids = tokenizer(row["prompt"])["input_ids"] + tokenizer(row["response"], add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            assert row["reward"] == pytest.approx(module(torch.tensor([ids])).logits.item(), abs=1e-5)
