"""Run by torchrun: TRL on two ranks, plain, watched, with our row, and with our row wrongly scaled. Prints JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from creditscope.plugins.trl import ScopeCallback, ScopedGRPOTrainer
from creditscope.plugins.trl.batch import ALPHA
from creditscope.record import Record
from plugins.test_trl_mixin import exactly
from plugins.trl_makers import in_double, trainer, weights
from small_models import apart

SETTINGS: dict[str, Any] = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "num_iterations": 2,
                            "optim": "sgd", "learning_rate": 0.1, "ddp_find_unused_parameters": False}


class Wrong(ScopedGRPOTrainer):
    """Forgets that ranks average their gradients."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        return found | {ALPHA: found[ALPHA] / self.accelerator.num_processes}


def main() -> None:
    torch.set_num_threads(1)
    ended: dict[str, torch.Tensor] = {}
    out = Path(tempfile.mkdtemp()) / "run"
    with in_double():
        for name, kind, extra in (("plain", None, None), ("watched", None, None),
                                  ("ours", ScopedGRPOTrainer, {"method": "trl_dapo"}),
                                  ("wrong", Wrong, {"method": "trl_dapo"})):
            live = exactly(trainer(kind, **SETTINGS, extra=extra))
            start = weights(live).clone()
            if name == "watched":
                live.add_callback(ScopeCallback(live, every=1, out=out))
            live.train()
            ended[name] = weights(live) - start
    if live.is_world_process_zero():
        lines = Record.open(out).steps()
        print(json.dumps({
            "ranks": live.accelerator.num_processes, "same": torch.equal(ended["plain"], ended["watched"]),
            "ours": apart(ended["ours"], ended["plain"]), "wrong": apart(ended["wrong"], ended["plain"]),
            "groups": lines[0]["signal/groups"], "read": "gram/group/effective_rank" in lines[0]}))


if __name__ == "__main__":
    main()
