"""Compose, plan, and stop or execute. Never started under torchrun: stages start what they need themselves.

python run.py                                   the default pipeline
python run.py pipeline=grpo reward.target=reverse run.steps=20
python run.py mode=plan                         check everything, print the plan, do nothing
python run.py mode=diff plan.a=DIR plan.b=DIR   what differs between two runs or plans
python run.py -m seed=0,1,2                     a sweep: every point is checked first, each is a process of its own
python run.py mode=compare compare.axis=rollout compare.options=[hf,torch]      times, memory and log-probs of each
python run.py import.verl=PATH                  a recipe from a command line or a configuration of verl
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM came before a run or a sweep had begun to listen."""


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 well, 1 a stage or a job of a sweep failed (mode=diff: the two differ), 2 the configuration cannot
    run, 130 or 143 stopped by a signal."""
    from pipeline import entry  # here, so that a signal is answered while this is imported, too

    if entry.asks_for_import(argv):
        return entry.bring(argv)
    line = entry.parse_or_explain(argv)
    if line is None:
        return 2
    if not line.inspects:
        plans = entry.plan_or_explain(line)
        if plans is None:
            return 2
        if not any(map(entry.is_execution, plans)):
            return entry.tell(plans)
        if line.multirun:
            return entry.sweep(line, plans)
        if entry.is_comparison(plans[0]):
            return entry.compare(line, plans)
    return entry.hydra_run(line)


def _terminate(*_: Any) -> None:
    raise Terminated


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    try:
        from pipeline import entry

        entry.begin()
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt as e:  # while planning; a run and a sweep end in their own ways
        print("\nstopped; nothing was started", file=sys.stderr)
        status = 143 if isinstance(e, Terminated) else 130
    except BrokenPipeError:  # the reader has seen enough: `python run.py mode=plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    for number in (signal.SIGINT, signal.SIGTERM):  # it has ended, and its status says how
        signal.signal(number, signal.SIG_IGN)
    sys.exit(status)
