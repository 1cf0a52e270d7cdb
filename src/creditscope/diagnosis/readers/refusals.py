"""Programs whose logs are recognised and not read: the error names them."""

from __future__ import annotations

import re
from collections.abc import Collection

COLUMNS = "step, reward, reward_std, kl, entropy, grad_norm, learning_rate, completions/mean_length"
_MARKS = {
    "prime-rl": (r"SUCCESS Step \d+ \| Time: |orchestrator step|prime[-_]rl", {"reward/all/mean"}),
    "SkyRL": (r"skyrl", {"reward/avg_raw_reward", "loss/avg_raw_rewards", "loss/avg_final_rewards"}),
    "NeMo-RL": (r"nemo[-_]rl|• Avg Reward: ", {"total_reward_mean"}),
    "slime": (r"\bslime[/_.]|rollout/raw_reward", {"rollout/raw_reward"}),
    "open-instruct": (r"open[-_]instruct", {"objective/verifiable_reward", "objective/scores"}),
    "OpenRLHF": (r"openrlhf", {"policy_loss", "total_length"}),
    "trlx": (r"\btrlx\b", {"losses/total_loss", "policy/sqrt_kl"}),
    "rl_games": (r"rl_games|fps step: \d+ fps step and policy", {"rewards/step", "rewards/iter"}),
    "AReaL": (r"\bareal\b", {"ppo_actor/update/actor_loss/avg"}),
    "TRL's PPOTrainer": (r"objective/rlhf_reward", {"objective/rlhf_reward"}),
    "supervised training": (r"fsdp_sft_trainer|mean_token_accuracy|SFTTrainer", {"mean_token_accuracy", "token_acc"}),
}
"""Program -> (what its console prints, columns of its own). The first that fits is named."""
_CONSOLES = re.compile("|".join(f"(?P<m{at}>{text})" for at, (text, _) in enumerate(_MARKS.values())), re.IGNORECASE)


def program_of(line: str) -> str:
    """The program whose console prints such a line; empty for all others.

    >>> program_of("02:33:26 SUCCESS Step 28 | Time: 73.77s | Reward: 0.3887")
    'prime-rl'
    """
    found = _CONSOLES.search(line)
    return list(_MARKS)[int(found.lastgroup[1:])] if found and found.lastgroup else ""


def program_with(columns: Collection[str]) -> str:
    return next((name for name, (_, own) in _MARKS.items() if not own.isdisjoint(columns)), "")


def refusal(program: str) -> str:
    """What to say of a recognised program.

    >>> refusal("prime-rl")[:56]
    'this is a log of prime-rl, which is not read yet; write '
    """
    if program == "supervised training":
        return "this is a log of supervised training, which has no reward; give the log of the reinforcement learning"
    return (f"this is a log of {program}, which is not read yet; write one JSON object per step and line with these "
            f"columns: {COLUMNS}")
