"""tests/diagnosis/logs/nemo_rl: the TensorBoard writer and the dump of answers (tests/offline/dumps/nemo_rl) are
NeMo-RL 0.6.0's own; console.log has the lines that grpo_train prints.

    PYTHONPATH=tests/diagnosis/make_trainers:REPOSITORY python tests/diagnosis/make_trainers/of_nemo_rl.py
"""

import shutil
from types import SimpleNamespace

import torch
from draw import LOGS, batches, home
from hollow import hollow

hollow("mlflow", "swanlab", "wandb", "prometheus_client")

from nemo_rl.utils.logger import Logger, TensorboardLogger  # noqa: E402

folder = home("nemo_rl")
shutil.rmtree(folder / "tensorboard", ignore_errors=True)
writer = TensorboardLogger({}, log_dir=str(folder / "tensorboard"))
lines = []
for batch in batches():
    kept = (batch.advantage * batch.mask)[batch.mask.bool()]
    rollouts = {"mean_gen_tokens_per_sample": batch.length.mean().item(), "truncation_rate": 0.0,
                "max_gen_tokens_per_sample": batch.length.max().item(), "avg_turns_per_sample": 1.0}
    metrics = {"loss": -0.001 * batch.step, "grad_norm": batch.grad_norm, "reward": batch.reward.mean().item(),
               "lr": 5e-6, "advantages/mean": kept.mean().item(), "advantages/max": kept.max().item(),
               "advantages/min": kept.min().item(), "probs_ratio": 1.0, "kl_penalty": 0.0001 * batch.step,
               "gen_kl_error": 0.0004, "token_mult_prob_error": 1.01, "sampling_importance_ratio": 0.999,
               "approx_entropy": batch.entropy.mean().item(), **rollouts}
    writer.log_metrics(metrics, batch.step, prefix="train")
    if batch.step % 6 == 0:
        writer.log_metrics({"accuracy": 0.4 + 0.01 * batch.step, "avg_length": 40.0}, batch.step, prefix="validation")
    lines += [f"\n{'=' * 25} Step {batch.step}/12 {'=' * 25}", "▶ Preparing batch...", "\n📊 Training Results:",
              f"  • Loss: {metrics['loss']:.4f}", f"  • Generation KL Error: {metrics['gen_kl_error']:.4f}",
              f"  • Avg Reward: {metrics['reward']:.4f}",
              f"  • Mean Generation Length: {metrics['mean_gen_tokens_per_sample']:.4f}", "\n⏱️  Timing:",
              "  • Total step time: 12.34s"]
writer.writer.close()
made = next((folder / "tensorboard").iterdir())
made.rename(made.with_name("events.out.tfevents.0.host.0.0"))
(folder / "console.log").write_text("\n".join(lines) + "\n")
dumps = LOGS.parents[1] / "offline" / "dumps" / "nemo_rl"
dumps.mkdir(parents=True, exist_ok=True)
for batch in list(batches())[:2]:
    prompt = [[5, 6, 7 + row // 4] for row in range(8)]
    ids = torch.tensor([first + list(range(100, 104)) + [0] for first in prompt])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0]] * 8)
    data = {"content": [f"What is {row // 4}?{batch.text[row]}" for row in range(8)],
            "rewards": batch.reward[:8].tolist(), "input_lengths": [7] * 8, "token_ids": ids.tolist(),
            "token_loss_mask": mask.tolist(), "sample_loss_mask": [1.0] * 8,
            "advantages": batch.advantage[:8, :8].tolist(),
            "generation_logprobs": (batch.old[:8, :8] * mask).tolist(),
            "prev_logprobs": (batch.new[:8, :8].clamp(max=0) * mask).tolist()}
    Logger.log_batched_dict_as_jsonl(SimpleNamespace(base_log_dir=str(dumps)), data,
                                     f"train_data_step{batch.step}.jsonl")
