"""An ordinary TRL script with a ScopeCallback, for launchers. FOLDER gets the record, and each rank's count of ranks.

    accelerate launch --multi_gpu --num_processes 2 tests/plugins/trl_launched.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from creditscope.plugins.trl import ScopeCallback
from plugins.trl_makers import trainer

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    live = trainer(per_device_train_batch_size=8, max_steps=2, use_cpu=True)
    live.add_callback(ScopeCallback(live, every=1, out=folder / "record", groups=None))
    live.train()
    state = live.accelerator
    (folder / f"{state.process_index}.txt").write_text(f"{state.num_processes} {state.distributed_type.value}")
