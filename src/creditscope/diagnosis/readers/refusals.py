"""Programs that are recognised by what they print; where a log is not read, the error names its program."""

from __future__ import annotations

import re
from collections.abc import Collection

from creditscope.diagnosis.trainers import READ

COLUMNS = "step, reward, reward_std, kl, entropy, grad_norm, learning_rate, completions/mean_length"
_MARKS = {
    **{trainer.name: (trainer.console, set[str]()) for trainer in READ if trainer.console},
    "prime-rl": (r"SUCCESS\s+Step \d+ \||orchestrator step|prime[-_]rl", set[str]()),
    "SkyRL": (r"skyrl", {"loss/avg_raw_rewards"}),
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
_VERSIONS = {trainer.name: trainer.version for trainer in READ}
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

    >>> refusal("slime")[:53]
    'this is a log of slime, which is not read yet; write '
    >>> refusal("SkyRL")[:66]
    'this is a log of SkyRL without a reward that version 0.3.0 writes;'
    """
    if program == "supervised training":
        return "this is a log of supervised training, which has no reward; give the log of the reinforcement learning"
    read = f" without a reward that version {_VERSIONS[program]} writes" if program in _VERSIONS else \
        ", which is not read yet"
    return (f"this is a log of {program}{read}; write one JSON object per step and line with these "
            f"columns: {COLUMNS}")
