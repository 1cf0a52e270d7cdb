"""verl's own FSDP2 engine on two CPU processes, with our advantages, our losses and the microscope, in float64.

Needs verl, which cannot live in our test environment; what it found is stored and read back by `test_verl_engine.py`.
In an environment that has verl:

    cd tests/plugins
    PYTHONPATH=../../src:.. torchrun --nproc_per_node 2 verl_two_ranks.py verl_golden/engine.npz

verl has no CPU platform, so one is registered here the way its plugins for other hardware do it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

os.environ |= {"VERL_ENGINE_VENDOR": "creditscope", "CREDITSCOPE_EVERY": "1", "CUDA_VISIBLE_DEVICES": ""}

import numpy as np
import torch
import torch.distributed as dist

if importlib.util.find_spec("verl") is None:  # pytest reads this file too, looking for doctests
    import pytest

    pytest.skip("verl lives in its own environment", allow_module_level=True)

import verl
from tensordict import NonTensorStack, TensorDict
from verl.plugin.platform import PlatformBase, set_platform
from verl.utils.torch_dtypes import PrecisionType

TINY = Path(__file__).parents[2] / "src/creditscope/models/tiny"


class Cpu(PlatformBase):
    """The little that the engine asks of a platform; whatever else it asks is an error."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = torch.cpu

    def current_device(self) -> Any:
        return torch.device("cpu")


def _never(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the CPU platform of this test was asked for more than it has")


for name in PlatformBase.__abstractmethods__ - vars(Cpu).keys():
    setattr(Cpu, name, _never)
Cpu.__abstractmethods__ = frozenset()
set_platform(Cpu())
PrecisionType.to_dtype = staticmethod(lambda precision: torch.float64)

from verl.trainer.ppo.core_algos import get_adv_estimator_fn  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils.metric import Metric, reduce_metrics  # noqa: E402
from verl.utils.py_functional import append_to_dict, rename_dict  # noqa: E402
from verl.utils.torch_functional import allgather_dict_into_dict  # noqa: E402
from verl.workers.config import (  # noqa: E402
    ActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
)
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402

import creditscope.plugins.verl.plugin  # noqa: E402, F401
from creditscope.plugins.verl import assert_registered  # noqa: E402
from plugins import verl_batch  # noqa: E402


def build(packed: bool) -> Any:
    """A fresh engine on the packaged model: verl's registry finds ours by its vendor."""
    from verl.trainer.config import CheckpointConfig

    engine = EngineRegistry.new(
        "language_model", "fsdp2",
        model_config=HFModelConfig(path=str(TINY), use_remove_padding=packed, enable_gradient_checkpointing=True,
                                   override_config={"attn_implementation": "sdpa"}),
        engine_config=FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision={
            "param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}),  # float64, see to_dtype above
        optimizer_config=FSDPOptimizerConfig(lr=verl_batch.LR, optimizer="SGD", optimizer_impl="torch.optim",
                                             weight_decay=0.0, clip_grad=1e9, total_training_steps=2),
        checkpoint_config=CheckpointConfig())
    engine.initialize()
    return engine


def sampled() -> list[torch.Tensor]:
    """log π_old of this rank's rows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64)
    with torch.no_grad():
        return [verl_batch.logp(model, row) + row.drift for row in verl_batch.rows(dist.get_rank())]


def batch_of(rank: int, advantages: torch.Tensor, packed: bool) -> TensorDict:
    """The rank's rows without padding, as verl's workers get them."""
    mine = verl_batch.rows(rank)
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    whole = [torch.cat([row.prompt, row.response]) for row in mine]
    fields = {
        "input_ids": nested(whole), "position_ids": nested([torch.arange(len(ids)) for ids in whole]),
        "prompts": nested([row.prompt for row in mine]), "responses": nested([row.response for row in mine]),
        "response_mask": nested([row.mask.long() for row in mine]),
        "loss_mask": nested([row.mask.long() for row in mine]),
        "old_log_probs": nested(sampled()),
        "advantages": nested([a[: len(row.mask)] for a, row in zip(advantages, mine, strict=True)]),
        "uid": NonTensorStack(*(row.uid for row in mine)),
    }
    data = TensorDict(fields, batch_size=len(mine))
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=4, use_remove_padding=packed,
                         global_batch_size=len(verl_batch.everyone()), temperature=1.0)
    return data


def train(method: str, loss_mode: str, packed: bool = False) -> dict[str, np.ndarray]:
    """Two updates on one batch; what the engine says of each, and this rank's exact Grams."""
    rank, everyone = dist.get_rank(), verl_batch.everyone()
    rewards = torch.zeros(len(everyone), verl_batch.LIMIT)
    for i, row in enumerate(everyone):
        rewards[i, len(row.mask) - 1] = row.reward
    mask = verl_batch.padded([row.mask for row in everyone])
    advantages, _ = get_adv_estimator_fn(f"creditscope_{method}")(
        token_level_rewards=rewards, response_mask=mask.long(), index=np.array([row.uid for row in everyone]))
    mine = torch.tensor_split(advantages, dist.get_world_size())[rank]
    actor = ActorConfig(strategy="fsdp2", rollout_n=4, ppo_micro_batch_size_per_gpu=4,
                        policy_loss=PolicyLossConfig(loss_mode=loss_mode), loss_scale_factor=verl_batch.LIMIT)
    engine = build(packed)
    out: dict[str, np.ndarray] = {}
    for update in range(2):
        with engine.train_mode():
            told = engine.train_batch(batch_of(rank, mine, packed), partial(ppo_loss, actor))
        said = {"loss": sum(told["loss"])} | {name: value.aggregate() if isinstance(value, Metric) else np.mean(value)
                                              for name, value in told["metrics"].items()}
        for kind, numbers in (("said", said), ("logged", logged(told["metrics"]))):
            out |= {f"{update}/{kind}/names": np.array(list(numbers)),
                    f"{update}/{kind}/values": np.array(list(numbers.values()))}
        out |= {f"{update}/block/{uid}": gram for uid, gram in engine.blocks.items()}
    return out


def logged(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics on their way into verl's log, by verl's own functions.

    verl's worker and trainer call them in this order; their modules cannot be imported without an inference server.
    """
    gathered = allgather_dict_into_dict({k: v for k, v in metrics.items() if k != "grad_norm"}, dist.group.WORLD)
    flat: dict[str, Any] = {}
    append_to_dict(flat, {name: Metric.aggregate_dp(parts) if isinstance(parts[0], Metric)
                          else list(chain.from_iterable(parts)) for name, parts in gathered.items()})
    found: dict[str, float] = reduce_metrics(rename_dict(flat, "actor/"))
    return found


def main() -> None:
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    torch.set_default_dtype(torch.float64)
    assert_registered("creditscope_dapo")
    found = {method: train(method, f"creditscope_{method}") for method in verl_batch.METHODS}
    found["vanilla"] = train("grpo", "vanilla")
    found["packed"] = train("dapo", "creditscope_dapo", packed=True)
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, found)
    if dist.get_rank() == 0:
        stored = {"verl": np.array(verl.__version__), "torch": np.array(torch.__version__)}
        for rank, part in enumerate(parts):
            for method, numbers in part.items():
                stored |= {f"{method}/{rank}/{name}": value for name, value in numbers.items()}
        np.savez_compressed(sys.argv[1], **stored)
        print(f"wrote {len(stored)} arrays, {Path(sys.argv[1]).stat().st_size / 1000:.0f} kB")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
