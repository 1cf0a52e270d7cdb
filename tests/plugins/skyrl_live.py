"""SkyRL's own policy worker, trainer and callbacks on a CPU, with a SkyRLCallback.

Theirs: HFModelWrapper, the worker's `forward_backward`, `_forward_backward_micro` and `optim_step`, FSDPStrategy's
`backward` and `optimizer_step`, the losses of its registry, and RayPPOTrainer's `compute_advantages_and_returns`,
`train_critic_and_policy` and callback events. Ours: a model of 6 thousand weights, the batches, the name of the device,
and `Here`, which calls the one worker in this process. Not driven: fully_shard, Ray actors, vllm, flash attention and
the generator.

    python tests/plugins/skyrl_live.py tests/plugins/skyrl_0.3.0.npz
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace as Names
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

import numpy as np
import torch
from skyrl_peer import ready
from stored_peer import absent

GROUPS, SIZE, PROMPT, WIDTH = 4, 4, 4, 6


class Here:
    """A dispatch and an actor group of one worker, in this process."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def stage_data(self, model: str, data: Any, boundaries: list[tuple[int, int]]) -> list[Any]:
        return [data[start:end] for start, end in boundaries]

    def forward_backward_from_staged(self, model: str, chunk: Any) -> Any:
        return self._worker.forward_backward(chunk)

    def optim_step(self, model: str) -> Any:
        return self._worker.optim_step()

    def empty_cache(self) -> None:
        pass

    def async_run_ray_method(self, how: str, name: str) -> list[Any]:
        return [getattr(self._worker, name)()]


def configuration() -> Any:
    from skyrl.train.config import SkyRLTrainConfig

    cfg = SkyRLTrainConfig()
    own = cfg.trainer
    own.micro_train_batch_size_per_gpu, own.policy_mini_batch_size, own.train_batch_size = 4, 2, GROUPS
    own.update_epochs_per_batch, own.remove_microbatch_padding = 2, False
    own.algorithm.temperature, own.algorithm.use_kl_loss = 1.0, False
    own.placement.colocate_all, own.enable_ray_gpu_monitor = False, False
    cfg.generator.inference_engine.enable_ray_prometheus_stats = False
    cfg.generator.n_samples_per_prompt = SIZE
    own.policy.optimizer_config.lr = 1e-2
    return cfg


def make_worker(cfg: Any, scoped: bool = True) -> Any:
    """A policy worker as `init_model` leaves it, without fully_shard."""
    from skyrl.backends.skyrl_train.distributed.dispatch import MeshRank
    from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
    from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
    from transformers import LlamaConfig, LlamaForCausalLM

    from creditscope.plugins.skyrl.worker import ScopedPolicyWorker

    own = cfg.trainer
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64))
    worker = object.__new__(ScopedPolicyWorker if scoped else FSDPPolicyWorkerBase)
    worker.cfg, worker.profiler, worker.model = own, None, HFModelWrapper(model)
    worker.strategy = FSDPStrategy(own.policy.fsdp_config, own.policy.optimizer_config, own.policy.model)
    worker.strategy.world_size = 1
    worker.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    worker.scheduler = torch.optim.lr_scheduler.ConstantLR(worker.optimizer, 1.0)
    worker.mesh_rank = MeshRank(dp=0, sp=0, tp=0, pp=0, world_size=1, dp_size=1, pp_size=1)
    worker.device_mesh = torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "sp"))
    worker.policy_loss_fn = PolicyLossRegistry.get(own.algorithm.policy_loss_type)
    return worker


def batch(worker: Any, seed: int) -> Any:
    """A TrainingInputBatch of 4 groups of 4 answers, one group unanimous; two mini-batches."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    draw = torch.Generator().manual_seed(seed)
    rows = GROUPS * SIZE
    ids = torch.randint(1, 32, (rows, PROMPT + WIDTH), generator=draw)
    ids[:, :PROMPT] = ids[::SIZE, :PROMPT].repeat_interleave(SIZE, 0)
    lengths = torch.randint(2, WIDTH + 1, (rows,), generator=draw)
    attend = (torch.arange(PROMPT + WIDTH) < PROMPT + lengths[:, None]).long()
    mask = attend[:, PROMPT:]
    reward = torch.randint(0, 2, (rows,), generator=draw).float()
    reward[:SIZE] = 1.0
    rewards = torch.zeros(rows, WIDTH).scatter(1, lengths[:, None] - 1, reward[:, None])
    with torch.no_grad():
        old = worker.model(ids, WIDTH, attend)
    data = TrainingInputBatch({"sequences": ids, "attention_mask": attend, "response_mask": mask,
                               "loss_mask": mask.clone(), "rewards": rewards, "action_log_probs": old,
                               "base_action_log_probs": None, "values": None})
    data.metadata = {"uids": [str(i // SIZE) for i in range(rows)], "response_length": WIDTH,
                     "avg_response_length": float(lengths.float().mean()),
                     "policy_mini_batch_boundaries": [(0, 8), (8, 16)],
                     "policy_prompt_boundaries": [(i, i + SIZE) for i in range(0, rows, SIZE)]}
    return data


def drive(out: Path | None, batches: int = 2, scoped: bool = True,
          gram: bool = True) -> tuple[Any, list[dict[str, Any]]]:
    """(the worker, what SkyRL's trackers log of each batch)."""
    ready()
    absent()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29619")
    torch.cuda.current_device, torch.cuda.synchronize = (lambda: "cpu"), (lambda *_: None)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    from skyrl.train.trainer import RayPPOTrainer

    import creditscope.plugins.skyrl.callback as ours

    ours.ray = Names(get=lambda found: found)  # `Here` returns values, not references
    cfg = configuration()
    worker = make_worker(cfg, scoped)
    trainer = RayPPOTrainer(cfg, tracker=None, tokenizer=None, train_dataset=None, inference_engine_client=None,
                            generator=None)
    trainer.dispatch = trainer.policy_model = Here(worker)
    if scoped:
        trainer.add_callback(ours.SkyRLCallback(trainer, every=1, out=out, gram=gram))
    found = []
    for number in range(batches):
        data = trainer.compute_advantages_and_returns(batch(worker, number))
        data.pop("rewards")  # as its train() does
        data.metadata.pop("uids")
        status = trainer.train_critic_and_policy(data)
        trainer._fire("on_step_end", batch=data, metrics=status)
        logs: dict[str, Any] = {}
        trainer._fire("on_log", logs=logs)
        found.append(logs)
    trainer._fire("on_train_end")
    return worker, found


def stored(out: Path) -> dict[str, np.ndarray]:
    """The arrays of the record's readings, and the metrics in SkyRL's logs."""
    from creditscope.runs.record import Record

    _, logs = drive(out)
    record = Record.open(out)
    made = {f"group{step}/{name}": array for step in record.groups() for name, array in record.group(step).items()
            if array.dtype.kind in "fbi"}
    for number, line in enumerate(logs):
        made |= {f"names{number}": np.array(list(line)), f"values{number}": np.array(list(line.values()))}
    return made


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        np.savez_compressed(sys.argv[1], **stored(Path(folder) / "run"))
    print(f"wrote {sys.argv[1]}")
