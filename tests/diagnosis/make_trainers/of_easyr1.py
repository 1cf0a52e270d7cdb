"""tests/diagnosis/logs/easyr1: metrics of the batch, loss, and both loggers (file and console) are EasyR1's own, at
b44b311.

    PYTHONPATH=tests/diagnosis/make_trainers:REPOSITORY python tests/diagnosis/make_trainers/of_easyr1.py
"""

import io
from contextlib import redirect_stdout

import torch
from draw import batches, home
from verl.protocol import DataProto
from verl.trainer.core_algos import compute_policy_loss
from verl.trainer.metrics import compute_data_metrics
from verl.utils.logger.logger import ConsoleLogger, FileLogger

folder = home("easyr1")
config = {"algorithm": {"adv_estimator": "grpo", "kl_coef": 0.01, "use_kl_loss": True, "disable_kl": False,
                        "online_filtering": False},
          "data": {"max_response_length": 64, "rollout_batch_size": 16},
          "trainer": {"save_checkpoint_path": str(folder), "max_steps": 12},
          "worker": {"actor": {"global_batch_size": 16, "loss_type": "default", "loss_avg_mode": "token",
                               "ppo_epochs": 1, "optim": {"lr": 1e-6, "strategy": "adamw"}},
                     "rollout": {"n": 4, "temperature": 1.0, "top_p": 1.0}}}
out = io.StringIO()
with redirect_stdout(out):
    file, console = FileLogger(config), ConsoleLogger(config)
    for batch in batches(ratio_one=True):
        wide = 64
        pad = (0, wide - batch.mask.shape[1])
        mask, advantage, old = (torch.nn.functional.pad(each, pad) for each in (batch.mask, batch.advantage, batch.old))
        scores = torch.zeros(mask.shape)
        scores[torch.arange(len(mask)), batch.length.long() - 1] = batch.reward
        loss, found = compute_policy_loss(old, old, advantage, mask, 0.2, 0.3, 3.0, 1.0, 1.05, "default", "token")
        data = DataProto.from_dict({
            "token_level_scores": scores, "token_level_rewards": scores, "advantages": advantage, "returns": advantage,
            "responses": torch.zeros(mask.shape), "response_mask": mask,
            "attention_mask": torch.cat([torch.ones(len(mask), 20), mask], 1)})
        metrics = {"reward/overall": batch.reward.mean().item(), "reward/accuracy": batch.reward.mean().item(),
                   "actor/kl_loss": 0.0002 * batch.step, "actor/kl_coef": 0.01,
                   **{f"actor/{name}": value for name, value in found.items()}, "actor/pg_loss": loss.item(),
                   "actor/grad_norm": batch.grad_norm, "actor/lr": 1e-6, **compute_data_metrics(data),
                   **({"val/reward_score": 0.4 + 0.01 * batch.step} if batch.step % 6 == 0 else {})}
        file.log(metrics, batch.step)
        console.log(metrics, batch.step)
(folder / "generations.log").unlink()
written = folder / "experiment_config.json"
written.write_text(written.read_text().replace(str(folder), "checkpoints/easy_r1/demo"))
home("easyr1-console")
(folder.with_name("easyr1-console") / "console.log").write_text("".join(
    f"\x1b[36m(Runner pid=4242)\x1b[0m {line}\n" for line in out.getvalue().replace(str(folder), "DIR").splitlines()))
