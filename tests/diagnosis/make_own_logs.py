"""How creditscope's records beside this file were made: real runs, cut down to what the doctor reads.

    python tests/diagnosis/make_own_logs.py RUN NAME

`ours-fell`, `ours-fell-early` and `ours-braked` are 60 steps of grpo on arithmetic with the packaged model and
`--inner-steps 8 --probe light`: seeds 0 and 1, and seed 0 with `--brake shorten`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from creditscope.diagnosis.trainers import OURS
from creditscope.runs.record import Record

LOGS = Path(__file__).parent / "logs"
KEPT = frozenset(OURS.metrics.values())


def cut(run: Path, out: Path) -> None:
    """A record with the run's settings, and of its steps the metrics that a rule reads."""
    record = Record.open(run)
    config = {name: record.config[name] for name in ("model", "task", "seed", "lr", "brake", *OURS.defaults)}
    with Record.create(out, config, {}) as small:
        for step in record.steps():
            small.append(step["step"], {name: value for name, value in step.items() if name in KEPT})
    (out / "run.lock").unlink()


if __name__ == "__main__":
    cut(Path(sys.argv[1]), LOGS / sys.argv[2])
