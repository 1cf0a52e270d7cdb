"""Makes the sample files of this folder again: answers of the packaged model, as a trainer would log them.

    python examples/sample_files.py

    rollouts.jsonl    prompt, text, reward and group, with tokens and their log-probs
    labelled.jsonl    the same, and the reasoning step of each token with the reward of each step
    problems.jsonl    prompts and answers, for a reward function of one's own (my_rewards.py)
"""

import json
import sys
from itertools import islice
from pathlib import Path

import torch

from creditscope.lab.rollout import roll_out
from creditscope.policy.loading import load_policy
from creditscope.tasks import find_task

HERE = Path(__file__).parent


def rows(rollouts):
    """One dictionary per rollout, without padding; numbers with six digits."""
    def rounded(values):
        return [round(value, 6) for value in values.tolist()]

    for i, length in enumerate(rollouts.lengths.tolist()):
        step, reward = rollouts.step[i, :length].tolist(), rollouts.step_reward[i].tolist()
        plain = {"group": int(rollouts.group[i]), "prompt": rollouts.prompt[i], "text": rollouts.text[i],
                 "reward": float(rollouts.reward[i]), "tokens": rollouts.tokens[i, :length].tolist(),
                 "pieces": list(rollouts.pieces[i]), "logp": rounded(rollouts.logp[i, :length]),
                 "entropy": rounded(rollouts.entropy[i, :length])}
        yield plain, {"step": step, "step_reward": reward[:max(step) + 1]}


def write_lines(file, lines):
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    print(f"wrote {file}")


def main(folder=HERE, prompts=4, group=4, seed=2):
    policy, task = load_policy("tiny", device="cpu"), find_task("arithmetic")
    batch = roll_out(policy, task, list(islice(task.problems("train", seed), prompts)), group, max_tokens=64,
                     temperature=1.0, top_p=1.0, generator=torch.Generator().manual_seed(seed)).rollouts
    found = list(rows(batch))
    write_lines(folder / "rollouts.jsonl", [plain for plain, _ in found])
    write_lines(folder / "labelled.jsonl", [plain | steps for plain, steps in found])
    write_lines(folder / "problems.jsonl", [{"id": problem.id, "prompt": problem.prompt, "answer": problem.answer}
                                            for problem in islice(task.problems("train", seed), 40)])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
