"""The parts of the rule reward: each looks at one response and the answer, and gives a number in 0..1.

This module is what a worker imports, so it stays light; math-verify comes in only where it has a weight.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from decimal import Decimal, DecimalException
from functools import lru_cache
from typing import Any

from stages.reward.workers import Outcome, Sample, Unscorable

Part = Callable[[Sample], float]

# A sign counts where no operand stands before it ("3-4" ends in 4), before or after a dollar sign. Commas
# count between groups of three digits only.
_NUMBER = re.compile(
    r"(?P<before>(?<![\w)\]])[-−])?(?:\\?\$)?(?P<after>(?<=\$)[-−])?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?P<exponent>[eE][-+]?[0-9]{1,6})?"
)


class RuleScorer:
    """A weighted sum of parts. `weights`: those that are not zero, by name."""

    def __init__(self, weights: dict[str, float], pattern: str, min_tokens: int, max_tokens: int):
        self._weights = weights
        most = max_tokens or float("inf")
        makers: dict[str, Callable[[], Part]] = {
            "exact": lambda: exact,
            "numeric": lambda: numeric,
            "contains": lambda: contains,
            "regex": lambda: regex(pattern),
            "length": lambda: lambda sample: float(min_tokens <= sample.tokens <= most),
            "maths_verify": maths_verify,
        }
        self._parts = {name: makers[name]() for name in weights}
        self._decisive = [n for n, w in weights.items() if w > 0 and n != "length"] or list(weights)

    def __call__(self, sample: Sample) -> Outcome:
        parts = {name: part(sample) for name, part in self._parts.items()}
        score = sum(weight * parts[name] for name, weight in self._weights.items())
        right = all(parts[name] == 1.0 for name in self._decisive)
        return Outcome(score=score, accuracy=float(right), parts=parts)


def exact(sample: Sample) -> float:
    """The response without surrounding space is the answer; an answer that is a number is compared as one."""
    said = sample.response.strip()
    if said == text_of(sample.answer):
        return 1.0
    if isinstance(sample.answer, str):
        return 0.0
    value = number(said)
    return float(value is not None and value == number(text_of(sample.answer)))


def numeric(sample: Sample) -> float:
    """The last number in the response equals the answer's: "so $1,234.50" is 1234.5, and 18.0 is 18."""
    wanted = number(text_of(sample.answer))
    if wanted is None:
        raise Unscorable(f"the answer {_shown(sample.answer)} is not a number, which the part 'numeric' needs")
    said = numbers(sample.response)
    return float(bool(said) and said[-1] == wanted)


def contains(sample: Sample) -> float:
    """The answer's text stands somewhere in the response."""
    text = text_of(sample.answer)
    if not text:
        raise Unscorable("the answer is empty text, which every response contains")
    return float(text in sample.response)


def regex(pattern: str) -> Part:
    """The pattern is found in the response (re.search). A group named `answer` must also hold the answer, as
    text or as a number."""
    compiled = re.compile(pattern)
    names_answer = "answer" in compiled.groupindex

    def part(sample: Sample) -> float:
        found = compiled.search(sample.response)
        if not found or not names_answer:
            return float(bool(found))
        said, wanted = (found["answer"] or "").strip(), text_of(sample.answer)
        value = number(said)
        return float(said == wanted or (value is not None and value == number(wanted)))

    return part


def maths_verify() -> Part:
    """math-verify finds the response mathematically equal to the answer (plain or LaTeX).

    Its own timeouts use signals and do not stop a loop in C; they are off, for the worker is killed instead.
    """
    from math_verify import parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).addFilter(lambda record: "Timeout is disabled" not in record.getMessage())

    def read(text: str) -> list[Any]:
        return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    @lru_cache(maxsize=64)  # the samples of a prompt share it
    def read_answer(text: str) -> list[Any]:
        return read(text if any(mark in text for mark in ("$", "\\boxed", "\\(", "\\[")) else f"${text}$")

    def part(sample: Sample) -> float:
        gold = read_answer(text_of(sample.answer))
        if not gold:
            raise Unscorable(f"math-verify cannot read the answer {_shown(sample.answer)}")
        return float(verify(gold, read(sample.response), timeout_seconds=None))

    verify(read("$1$"), read("$1$"), timeout_seconds=None)  # builds its grammar, which no row should pay for
    return part


def text_of(answer: Any) -> str:
    """An answer as text: a number as JSON writes it. Unscorable if it is an object, a list or nothing."""
    if isinstance(answer, str):
        return answer.strip()
    if isinstance(answer, (bool, int, float)):
        return json.dumps(answer)
    if isinstance(answer, dict):
        raise Unscorable(f"the ground truth holds several answers ({', '.join(answer)}): reward.target must choose one")
    raise Unscorable(f"the ground truth {_shown(answer)} is neither text nor a number")


def number(text: str) -> Decimal | None:
    """The number that the whole text is, or None."""
    found = _NUMBER.fullmatch(text.strip())
    return _decimal(found) if found else None


def numbers(text: str) -> list[Decimal | None]:
    """All numbers of a text, from left to right, exact; None where one is beyond what Decimal can hold."""
    return [_decimal(found) for found in _NUMBER.finditer(text)]


def _decimal(found: re.Match[str]) -> Decimal | None:
    sign = "-" if found["before"] or found["after"] else ""
    try:
        return Decimal(sign + found["digits"].replace(",", "") + (found["exponent"] or ""))
    except DecimalException:
        return None


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."
