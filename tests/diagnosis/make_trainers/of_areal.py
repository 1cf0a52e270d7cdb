"""tests/diagnosis/logs/areal: the tracker of statistics, the table and the logger are AReaL 1.0.4's own, and so is
the dump of answers, tests/offline/dumps/areal.

    pip download --no-deps areal==1.0.4, unzip it, and
    PYTHONPATH=tests/diagnosis/make_trainers:UNZIPPED python tests/diagnosis/make_trainers/of_areal.py
"""

import asyncio
import io
import shutil
import sys
from types import SimpleNamespace

import torch
from draw import LOGS, batches, home
from hollow import hollow

hollow("flask", "uvloop", "hydra", "lark", "numba", "einops", "swanlab", "trackio", "wandb", "pybase64")

out = sys.stdout = io.StringIO()

from areal.infra.workflow_executor import WorkflowExecutor  # noqa: E402
from areal.utils import stats_tracker  # noqa: E402
from areal.utils.stats_logger import StatsLogger  # noqa: E402

commits = SimpleNamespace(ft_spec=SimpleNamespace(total_train_epochs=1, steps_per_epoch=12, total_train_steps=12),
                          _last_commit_step=-1, summary_writer=None)
commits.print_stats = lambda stats: StatsLogger.print_stats(commits, stats)
for batch in batches():
    ones = torch.ones_like(batch.reward, dtype=torch.bool)
    with stats_tracker.scope("ppo_actor"):
        stats_tracker.denominator(n_seqs=ones, n_valid_tokens=batch.mask.bool())
        stats_tracker.stat(advantages=batch.advantage, final_reward=batch.advantage, kl_rewards=0 * batch.advantage,
                           denominator="n_valid_tokens")
        stats_tracker.stat(no_eos_ratios=(batch.length == batch.length.max()).float(), task_reward=batch.reward,
                           prompt_len=20 * torch.ones_like(batch.length), seq_len=20 + batch.length,
                           denominator="n_seqs")
        stats_tracker.scalar(mask_no_eos_with_zero=False, eps_clip=0.4, use_dual_clip=0)
        with stats_tracker.scope("update"):
            ratio = (batch.new - batch.old).exp()
            stats_tracker.denominator(n_valid_tokens=batch.mask.bool())
            stats_tracker.stat(importance_weight=ratio, approx_kl=batch.old - batch.new, entropy=batch.entropy,
                               actor_loss=-batch.advantage * ratio, clip_ratio=(ratio > 1.4).float(),
                               behave_imp_weight=ratio, denominator="n_valid_tokens")
            stats_tracker.scalar(update_successful=1.0, grad_norm=batch.grad_norm, lr=1e-5)
    with stats_tracker.scope("rollout"):
        stats_tracker.scalar(reward=batch.reward.mean().item())
    StatsLogger.commit(commits, 0, batch.step - 1, batch.step - 1, stats_tracker.export_all())
sys.stdout = sys.__stdout__
(home("areal") / "trainer.log").write_text(out.getvalue())
(home("areal") / "config.yaml").write_text(
    "gconfig:\n  n_samples: 4\n  max_new_tokens: 64\n  temperature: 1.0\nactor:\n  ppo_n_minibatches: 1\n"
    "  recompute_logprob: true\n  eps_clip: 0.4\n  kl_ctl: 0.0\n  optimizer:\n    lr: 1.0e-05\n"
    "  reward_norm:\n    mean_level: group\n    std_level: group\n    group_size: 4\n")


class Letters:
    """A tokenizer whose ids are characters."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))


folder = LOGS.parents[1] / "offline" / "dumps" / "areal"
shutil.rmtree(folder, ignore_errors=True)
for batch in list(batches())[:2]:
    for group in range(2):
        texts = batch.text[4 * group:4 * group + 4]
        prompt, size = [ord(c) for c in f"What is {group}?"], max(map(len, texts))
        rows = [prompt + [ord(c) for c in text] for text in texts]
        wide = len(prompt) + size
        trajectory = {
            "input_ids": torch.tensor([row + [0] * (wide - len(row)) for row in rows]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (wide - len(row)) for row in rows]),
            "loss_mask": torch.tensor([[0] * len(prompt) + [1] * (len(row) - len(prompt)) + [0] * (wide - len(row))
                                       for row in rows]),
            "rewards": batch.reward[4 * group:4 * group + 4],
            "versions": torch.full((4, wide), batch.step - 1)}
        executor = SimpleNamespace(_get_dump_dir=lambda is_eval: str(folder), _get_tokenizer=Letters)
        name = next(name for name in dir(WorkflowExecutor) if "dump" in name and name != "_get_dump_dir")
        asyncio.run(getattr(WorkflowExecutor, name)(executor, trajectory, f"{batch.step}{group}", False))
