"""A DPOTrainer under the callback on all ranks that torchrun starts: four pairs per step. FOLDER gets the record.

    torchrun --nproc_per_node 2 tests/plugins/trl_dpo_ranks.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from creditscope.plugins.trl import ScopeCallback
from plugins.trl_makers import dpo_trainer


def main(folder: Path) -> None:
    live = dpo_trainer(per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")), max_steps=2,
                       optim="sgd", learning_rate=0.1, max_grad_norm=0.0, ddp_find_unused_parameters=False)
    live.add_callback(ScopeCallback(live, every=1, out=folder, groups=None))
    live.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
