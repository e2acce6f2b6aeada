"""Compose, plan, and stop or execute. Never started under torchrun: stages start what they need themselves.

python run.py                                   the default pipeline
python run.py pipeline=grpo reward.target=reverse run.steps=20
python run.py mode=plan                         check everything, print the plan, do nothing
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pipeline import entry


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 well, 1 a stage failed, 2 the configuration cannot run, 130 or 143 stopped by a signal."""
    line = entry.parse_or_explain(argv)
    if line is None:
        return 2
    if not line.inspects:
        plans = entry.plan_or_explain(line)
        if plans is None:
            return 2
        if not any(map(entry.is_execution, plans)):
            print(*map(entry.render, plans), sep="\n\n")
            return 0
    return entry.hydra_run(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
