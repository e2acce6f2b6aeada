"""Make the digit prompts of the default run: `data/digits/train.jsonl` and `data/digits/heldout.jsonl`.

A prompt is four digits and an equals sign; a row holds the right answer of every skill, and the reward picks
the one that the run asks for. No prompt lies in both files, and base training never sees a held-out one.

    python data/make_prompts.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

SKILLS: dict[str, Callable[[str], str]] = {
    "copy": lambda digits: digits,
    "reverse": lambda digits: digits[::-1],
    "sort": lambda digits: "".join(sorted(digits)),
    "sort_down": lambda digits: "".join(sorted(digits, reverse=True)),
}

SEED = 20
TRAIN_PROMPTS = 4000
HELDOUT_PROMPTS = 512
# Share of prompts whose digits are in order already, so that copy or reverse gives the same answer as a sort.
# Four distinct answers at p = 1/4 give pass@8 = 1 - 0.75**8 = 0.8999, two at 1/2 give 0.996: these prompts
# lift the mean clearly over 0.90. Uniformly random digits have 14.2 %.
ORDERED_SHARE = 0.28


def answers(digits: str) -> dict[str, str]:
    """Return skill name -> right answer for `digits`."""
    return {name: skill(digits) for name, skill in SKILLS.items()}


def render(digits: str) -> str:
    """Return the prompt text for `digits`."""
    return f"{digits}="


def is_ordered(digits: str) -> bool:
    """Tell whether `digits` are sorted already, up or down (equal neighbours allowed)."""
    return digits in (SKILLS["sort"](digits), SKILLS["sort_down"](digits))


def all_digits() -> list[str]:
    """Return the 10,000 digit strings, in order."""
    return [f"{number:04d}" for number in range(10_000)]


def split(seed: int = SEED) -> tuple[list[str], list[str]]:
    """Return (train, heldout) digit strings: disjoint, no repeats, `ORDERED_SHARE` of each in order."""
    rng = random.Random(seed)
    ordered = [digits for digits in all_digits() if is_ordered(digits)]
    mixed = [digits for digits in all_digits() if not is_ordered(digits)]
    rng.shuffle(ordered)
    rng.shuffle(mixed)

    def take(count: int) -> list[str]:
        from_ordered = round(count * ORDERED_SHARE)
        pools = [ordered] * from_ordered + [mixed] * (count - from_ordered)
        taken = [pool.pop() for pool in pools]
        rng.shuffle(taken)
        return taken

    heldout = take(HELDOUT_PROMPTS)
    return take(TRAIN_PROMPTS), heldout


def write(path: Path, rows: Iterable[str]) -> None:
    """Write one JSON object a line: `prompt`, and `answer` by skill."""
    lines = [json.dumps({"prompt": render(digits), "answer": answers(digits)}) + "\n" for digits in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8", newline="\n")


def main() -> None:
    """Write both files next to this script."""
    folder = Path(__file__).parent / "digits"
    train, heldout = split()
    for name, rows in (("train", train), ("heldout", heldout)):
        write(folder / f"{name}.jsonl", rows)
        share = sum(map(is_ordered, rows)) / len(rows)
        print(f"{name}: {len(rows)} prompts, {share:.3f} of them in order already")


if __name__ == "__main__":
    main()
