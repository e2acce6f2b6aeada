"""Several runs in one process, one after the other, so that what they import is imported once.

python tests/e2e/one_process.py '[["seed=0"], ["seed=1", "rollout=hf"]]': a command line of run.py for each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import run

if __name__ == "__main__":
    lines = json.loads(sys.argv[1])
    status = 0
    for line in lines:
        sys.argv = ["run.py", *line]  # where Hydra looks for it
        status = max(status, run.main(line))
    sys.exit(status)
