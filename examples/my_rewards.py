"""A reward function of one's own, for prompts of one's own. It runs in a process that can be killed.

    creditscope lab train --task jsonl:examples/problems.jsonl --reward examples.my_rewards:score --max-tokens 64
"""

import re


def score(text, row):
    """1 where the last number of the answer is the row's answer, otherwise 0."""
    numbers = re.findall(r"-?\d+", text)
    return float(bool(numbers) and numbers[-1] == row["answer"])
