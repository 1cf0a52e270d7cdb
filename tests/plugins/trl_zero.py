"""Real TRL trainers under DeepSpeed ZeRO 0, 1 and 2 on two CPU processes. FILE gets what was found, as json.

    python tests/plugins/trl_zero.py FILE          needs deepspeed; `zero_0.19.8.json` was made by it

accelerate does not hand processes on CPUs to DeepSpeed, so it is told that gloo is its backend; the trainer, the
engine, its hooks and its step are their own. DeepSpeed has no float64. Answers are scripted as in `trl_two_ranks`, so
that other engines can be compared.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from creditscope.errors import CreditscopeError
from creditscope.plugins.trl import ScopeCallback
from creditscope.runs.record import Record
from plugins.trl_makers import model_folder, settle, trainer
from plugins.trl_two_ranks import EVEN, ended, scripted

RUN: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 2, "per_device_train_batch_size": 8,
                       "gradient_accumulation_steps": 2, "max_grad_norm": 0.01, "dtype": "float32"}
"""For one process: two micro-batches, and gradients that are clipped."""
KEPT = ("scope/agreement", "grad/norm", "gram/group/effective_rank", "gram/between", "w/top10_mass", "overshoot/kl",
        "update/zero", "update/ratio", "optimizer/lr", "objective/value", "scope/absent", "sketch/effective_rank")


def build(world: int, **more: Any) -> Any:
    settings = RUN | more
    settings["per_device_train_batch_size"] //= world
    return scripted(trainer(**settings, prompts=EVEN), masked=False)


def zero(stage: int) -> dict[str, Any]:
    return {"use_cpu": False, "dataloader_pin_memory": False, "deepspeed": {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage}}}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [{key: line[key] for key in KEPT if key in line} for line in Record.open(folder).steps()]


def compared(stage: int, folder: Path) -> dict[str, Any]:
    """The same training with and without readings, and the readings."""
    plain = build(2, **zero(stage))
    plain.train()
    live = build(2, **zero(stage))
    out = folder / str(stage)
    live.add_callback(ScopeCallback(live, every=1, out=out, groups=None))
    live.train()
    dist.barrier()
    engine = live.accelerator.deepspeed_engine_wrapped.engine
    return {"engine": type(engine).__name__, "stage": engine.zero_optimization_stage(), "steps": lines(out),
            "same": torch.equal(ended(plain), ended(live)), "norms": [entry["grad_norm"] for entry in
                                                                     live.state.log_history if "grad_norm" in entry],
            "unwrapped": "step" not in engine.__dict__}


def refused(stage: int) -> str:
    live = build(2, **zero(stage))
    try:
        ScopeCallback(live)
    except CreditscopeError as error:
        return str(error)
    return "no error"


def rank(number: int, port: int, folder: Path, file: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=number, world_size=2)
    deepspeed = importlib.import_module("deepspeed")
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    found: dict[str, Any] = {"deepspeed": deepspeed.__version__}
    # On a CPU it would compile an operation for shared memory first, which nothing here needs.
    with mock.patch.object(sys.modules["deepspeed.comm.torch"], "build_shm_op", return_value=None), \
            mock.patch.object(PartialState, "_prepare_backend", return_value=("gloo", DistributedType.MULTI_CPU)):
        for stage in (0, 1, 2):
            AcceleratorState._reset_state(reset_partial_state=True)
            found[f"zero {stage}"] = compared(stage, folder)
        AcceleratorState._reset_state(reset_partial_state=True)
        found["zero 3"] = refused(3)
    if number == 0:
        file.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    model_folder("float32")
    settle()
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        processes.start_processes(rank, (port, Path(scratch), Path(sys.argv[1]).resolve()), nprocs=2,
                                  start_method="fork")
