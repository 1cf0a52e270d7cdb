"""OpenRLHF's own ActorPPOTrainer and DeepspeedStrategy on a CPU, with a ScopeHook.

Theirs: Actor, PolicyLoss, DeepspeedStrategy with DeepSpeed's engine (ZeRO 0 or 2, float32, gloo), the replay buffer,
`ppo_train` and `training_step`. Ours: a model of 6 thousand weights, the batches, and the name of the device, since
OpenRLHF asks CUDA for it. Not driven: vllm, flash attention, the Ray cluster and the experience maker.

    DS_ACCELERATOR=cpu python tests/plugins/openrlhf_live.py tests/plugins/openrlhf_0.11.2.npz
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
from stored_peer import absent

GROUPS, SIZE, PROMPT, WIDTH, MICRO = 4, 4, 4, 6, 8


def settings(stage: int = 0) -> Names:
    """The arguments that the trainer and its strategy read, as OpenRLHF's command nests them."""
    return Names(
        local_rank=-1,
        ds=Names(param_dtype="fp32", packing_samples=False, tensor_parallel_size=1, ring_attn_size=1, zero_stage=stage),
        train=Names(dynamic_batch_enable=False, max_epochs=2, colocate_all=False, async_enable=False, seed=0,
                    batch_size=GROUPS * SIZE),
        rollout=Names(n_samples_per_prompt=SIZE, batch_size=GROUPS, temperature=1.0),
        actor=Names(eps_clip_low_high=(0.2, 0.28), dual_clip=None, loss_agg_mode="token-mean", policy_loss_type="ppo",
                    aux_loss_coef=0.0, entropy_coef=None, adam=Names(lr=1e-2, weight_decay=0.0)),
        algo=Names(advantage=Names(estimator="dr_grpo", is_correction_level="off", is_correction_mode="mask",
                                   is_correction_gating="ratio", is_correction_threshold=(0.5, 5.0)),
                   kl=Names(use_loss=False, init_coef=0.0, estimator="k3", unbiased_gradient=False)),
        vllm=Names())


def make_trainer(stage: int = 0) -> Any:
    """An ActorPPOTrainer of OpenRLHF over DeepSpeed's engine."""
    absent()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "-1",
                   "DS_ACCELERATOR": "cpu"}
    os.environ.setdefault("MASTER_PORT", "29617")
    import openrlhf.trainer.ray.ppo_actor as theirs
    import openrlhf.utils.deepspeed.deepspeed as engine
    from openrlhf.models import Actor
    from transformers import LlamaConfig, LlamaForCausalLM

    real = engine.init_device_mesh
    engine.init_device_mesh = lambda kind, *args, **kwargs: real("cpu", *args, **kwargs)
    strategy = engine.DeepspeedStrategy(seed=0, max_norm=1.0, micro_train_batch_size=MICRO,
                                        train_batch_size=GROUPS * SIZE, zero_stage=stage, args=settings(stage))
    strategy.setup_distributed()
    plain = strategy.get_ds_train_config

    def config(optim_dict: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        if optim_dict:
            optim_dict["params"]["torch_adam"] = True  # DeepSpeed's own Adam is compiled first
        return plain(optim_dict, **kwargs)

    strategy.get_ds_train_config = config
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64))
    actor = Actor(model)
    actor.packing_samples = False
    actor, optimizer, scheduler = strategy.prepare((actor, {
        "optim": "adam", "adam": {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0},
        "lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "max_norm": 1.0, "scheduler_steps": 10}))
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: 0  # for a device that the replay buffer names and does not use
    trainer = theirs.ActorPPOTrainer(strategy, actor, None, optimizer, scheduler, micro_train_batch_size=MICRO,
                                     dataloader_pin_memory=False)
    torch.cuda.current_device = lambda: "cpu"
    return trainer


def batch(trainer: Any, seed: int) -> Any:
    """An Experience of 4 groups of 4 answers, one group unanimous, prompts of one length and answers of several."""
    from openrlhf.trainer.ppo_utils.experience import Experience

    draw = torch.Generator().manual_seed(seed)
    rows = GROUPS * SIZE
    ids = torch.randint(1, 32, (rows, PROMPT + WIDTH), generator=draw)
    ids[:, :PROMPT] = ids[::SIZE, :PROMPT].repeat_interleave(SIZE, 0)
    lengths = torch.randint(2, WIDTH + 1, (rows,), generator=draw)
    attend = (torch.arange(PROMPT + WIDTH) < PROMPT + lengths[:, None]).long()
    mask = attend.bool()[:, 1:].clone()
    mask[:, :PROMPT - 1] = False
    reward = torch.randint(0, 2, (rows,), generator=draw).float()
    reward[:SIZE] = 1.0
    advantages = (reward - reward.view(-1, SIZE).mean(1).repeat_interleave(SIZE))[:, None] * mask
    with torch.no_grad():
        old = trainer.actor(ids, mask, attend)
    return Experience(sequences=ids, attention_mask=attend, action_mask=mask, action_log_probs=old,
                      advantages=advantages, returns=advantages, rewards=reward, response_length=lengths.float(),
                      total_length=attend.sum(1).float(), truncated=torch.zeros(rows),
                      prompts=[str(i // SIZE) for i in range(rows)], labels=[""] * rows, images=[None] * rows,
                      mm_train_inputs=[None] * rows, info={"reward": reward})


def drive(out: Path | None, batches: int = 2, stage: int = 0, scoped: bool = True,
          gram: bool = True) -> tuple[Any, list[dict[str, Any]]]:
    """(the trainer, what `ppo_train` returned for each batch): what OpenRLHF's trackers log."""
    from creditscope.plugins.openrlhf import ScopeHook

    trainer = make_trainer(stage)
    scope = ScopeHook(trainer, every=1, out=out, gram=gram) if scoped else None
    found = []
    for number in range(batches):
        torch.manual_seed(number)  # for the order of rows
        trainer.replay_buffer.clear()
        trainer.replay_buffer.append(batch(trainer, number))
        found.append(trainer.ppo_train(0.0))
    if scope is not None:
        scope.close()
    return trainer, found


def stored(out: Path) -> dict[str, np.ndarray]:
    """The arrays of the record's readings, and the metrics in OpenRLHF's logs."""
    from creditscope.runs.record import Record

    _, logs = drive(out)
    record = Record.open(out)
    made = {f"group{step}/{name}": array for step in record.groups() for name, array in record.group(step).items()
            if array.dtype.kind in "fbi"}
    for number, line in enumerate(logs):
        told = {name: value for name, value in line.items() if name.startswith("creditscope/")}
        made |= {f"names{number}": np.array(list(told)), f"values{number}": np.array(list(told.values()))}
    return made


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        np.savez_compressed(sys.argv[1], **stored(Path(folder) / "run"))
    print(f"wrote {sys.argv[1]}")
