"""tests/diagnosis/logs/openrlhf: rollout statistics, loss, clip ratio and the logger are OpenRLHF 0.11.2's own.

    pip download --no-deps openrlhf==0.11.2, unzip it, and
    PYTHONPATH=tests/diagnosis/make_trainers:UNZIPPED/openrlhf-0.11.2.data/purelib python
    tests/diagnosis/make_trainers/of_openrlhf.py
"""

import io
from types import SimpleNamespace

from draw import batches, home
from hollow import hollow

hollow("flash_attn", "vllm", "deepspeed")

from openrlhf.models.loss import PolicyLoss  # noqa: E402
from openrlhf.trainer.ppo_trainer import BasePPOTrainer, logger  # noqa: E402
from openrlhf.utils.logging_utils import _default_handler  # noqa: E402

out = io.StringIO()
_default_handler.stream = out
loss_of = PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.2)
for batch in batches():
    experience = SimpleNamespace(info={"reward": batch.reward}, response_length=batch.length,
                                 truncated=batch.length >= 64)
    loss, clip, kl, _, _ = loss_of(batch.new, batch.old, batch.advantage, action_mask=batch.mask)
    status = {"policy_loss": loss.item(), "entropy_loss": float((batch.entropy * batch.mask).sum() / batch.mask.sum()),
              "actor_lr": 5e-7, "actor_grad_norm": batch.grad_norm, "response_clip_ratio": 0.0,
              "reward": batch.reward.mean().item(), "kl": 0.001 * batch.step, "logprobs_diff": 0.0,
              "group_reward_std": float(batch.reward.view(-1, 4).std(1).mean()), "return": batch.reward.mean().item(),
              "ppo_clip_ratio": clip.item(), "ppo_kl": kl.item(), "response_length": batch.length.mean().item(),
              "timing/make_experience": 1.0, **BasePPOTrainer._compute_rollout_stats(None, [experience])}
    logger.info(f"✨ Global step {batch.step}: {status}")
    if batch.step % 6 == 0:
        logger.info(f"✨ Evaluation completed in 0:00:01, global_step {batch.step}, eval_metrics: "
                    f"{ {'eval_gsm8k_pass4': 0.8, 'eval_gsm8k_pass1': 0.4 + 0.01 * batch.step} }")
lines = [f"\x1b[36m(PPOTrainer pid=4242)\x1b[0m {line}\n" for line in out.getvalue().splitlines()]
(home("openrlhf") / "train.log").write_text(
    "python3 -m openrlhf.cli.train_ppo_ray --actor.adam.lr 5e-7 --algo.advantage.estimator group_norm "
    "--rollout.n_samples_per_prompt 4 --rollout.batch_size 16 --train.batch_size 64 --rollout.max_new_tokens 64\n"
    + "".join(lines))
