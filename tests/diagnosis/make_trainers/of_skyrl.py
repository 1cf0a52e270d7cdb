"""tests/diagnosis/logs/skyrl: the console logger, rollout metrics and reduction are SkyRL 0.3.0's own; so is the dump
of an evaluation, tests/offline/dumps/skyrl.

    pip download --no-deps skyrl==0.3.0, unzip it, and
    PYTHONPATH=tests/diagnosis/make_trainers:UNZIPPED:UNZIPPED/skyrl-gym python
    tests/diagnosis/make_trainers/of_skyrl.py
"""

import io
import typing
from pathlib import Path

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # pydantic asks for it before Python 3.12

from draw import LOGS, batches, home  # noqa: E402
from hollow import hollow  # noqa: E402

hollow("jaxtyping", "flash_attn", "vllm")

from loguru import logger  # noqa: E402
from skyrl.backends.skyrl_train.workers.worker_utils import reduce_metrics  # noqa: E402
from skyrl.train.generators.utils import get_rollout_metrics  # noqa: E402
from skyrl.train.utils.tracking import ConsoleLogger  # noqa: E402
from skyrl.train.utils.trainer_utils import dump_per_dataset_eval_results  # noqa: E402

out = io.StringIO()
logger.remove()
logger.add(out, format="{time:YYYY-MM-DD HH:mm:ss.SSS} | {level} | {name}:{function}:{line} - {message}")
console = ConsoleLogger()
for batch in batches():
    answers = [[1] * int(size) for size in batch.length]
    status = reduce_metrics({
        "final_loss": [0.01], "policy_loss": [-0.002 * batch.step], "policy_entropy": [float(batch.entropy.mean())],
        "response_length": [64.0], "policy_lr": [1e-6], "loss_metrics/clip_ratio": [0.01, 0.02],
        "policy_kl": [0.0002 * batch.step], "grad_norm": [batch.grad_norm]})
    console.log({
        "trainer/epoch": 0, "trainer/global_step": batch.step, **get_rollout_metrics(answers, batch.reward.tolist()),
        "reward/avg_pass_at_4": float(batch.reward.view(-1, 4).max(1).values.mean()),
        "reward/avg_raw_reward": batch.reward.mean().item(), "reward/mean_positive_reward": batch.reward.mean().item(),
        "loss/avg_final_rewards": batch.reward.mean().item(), "loss/avg_raw_advantages": 0.0,
        "loss/avg_raw_advantages_abs": batch.grad_norm,
        "policy/rollout_train_logprobs_abs_diff_mean": float((batch.new - batch.old).abs().mean()),
        **{f"policy/{name}": value for name, value in status.items()},
        **({"eval/all/avg_score": 0.4 + 0.01 * batch.step} if batch.step % 6 == 0 else {}),
        "timing/generate": 1.5}, batch.step)
(home("skyrl") / "console.log").write_text("".join(
    f"\x1b[36m(skyrl_entrypoint pid=4242)\x1b[0m {line}\n" for line in out.getvalue().splitlines()))


class Words:
    """A tokenizer with one id per answer."""

    def decode(self, ids: list[str]) -> str:
        return " ".join(ids)


first = next(iter(batches()))
folder = LOGS.parents[1] / "offline" / "dumps" / "skyrl" / "global_step_1_evals"
folder.mkdir(parents=True, exist_ok=True)
dump_per_dataset_eval_results(
    Path(folder), Words(), {
        "prompt_token_ids": [[f"What is {row // 4}?"] for row in range(8)],
        "response_ids": [[text] for text in first.text],
        "rewards": first.reward[:8].tolist(), "stop_reasons": ["stop"] * 8}, ["gsm8k"] * 8, ["gsm8k"] * 8, [{}] * 8, {})
(folder / "aggregated_results.jsonl").unlink()
