"""Preference pairs from a policy's own answers: of each group the best and the worst, by the task's verifier.

    chosen = y_argmax r,  rejected = y_argmin r        over the answers of a group that end by themselves

A group whose rewards are equal gives no pair. An answer that was cut at the limit is left out: its text does not say
so, and a reader would take it for one that ended.
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from creditscope.batch.groups import Groups
from creditscope.batch.pairs import Pair, write_pairs
from creditscope.errors import CreditscopeError
from creditscope.files.writing import check_new_file
from creditscope.lab.rollout import Drawn, roll_out
from creditscope.lab.setup import problem_stream, stream_seed
from creditscope.policy.loading import Policy, load_policy
from creditscope.runs.config import Config
from creditscope.tasks import find_task


def make_pairs(config: Config, out: Path, groups: int) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Sample `groups` groups, config.prompts at a time, and write their pairs, all or none. Yields the counts."""
    check_new_file(out)
    policy = load_policy(config.model, device=config.device, dtype=config.dtype, chat=config.chat, seed=config.seed)
    task = find_task(config.task, **config.task_options)
    problems = islice(problem_stream(task, config.seed, skip=0), groups)
    found: list[Pair] = []
    cut = sampled = 0
    for step in range(config.steps):
        generator = torch.Generator(policy.device).manual_seed(stream_seed(config.seed, step, 0))
        batch = roll_out(policy, task, list(islice(problems, config.prompts)), config.group,
                         max_tokens=config.max_tokens or task.max_tokens, temperature=config.temperature,
                         top_p=config.top_p, generator=generator)
        found += best_and_worst(policy, batch)
        cut += int((~batch.finished).sum())
        sampled += len(batch.finished)
        yield {"step": step + 1, "steps": config.steps, "groups": min(groups, (step + 1) * config.prompts),
               "pairs": len(found)}
    if not found:
        raise CreditscopeError(f"none of {groups} groups has two finished answers with different rewards, so there is "
                               f"no pair ({cut / sampled:.0%} of the answers were cut); raise --max-tokens, "
                               f"--temperature or --group, or warm the model up first")
    write_pairs(out, found)
    return {"groups": groups, "pairs": len(found)}


def best_and_worst(policy: Policy, batch: Drawn) -> list[Pair]:
    """One pair of each group that has one; of equal rewards the first answer."""
    rollouts, pairs = batch.rollouts, []
    assert rollouts.text is not None
    assert rollouts.prompt is not None
    for group in Groups(rollouts.group).ids.tolist():
        # Only a text that gives its own tokens back can be learnt from.
        rows = [i for i in (rollouts.group == group).nonzero().flatten().tolist()
                if bool(batch.finished[i]) and rollouts.text[i]
                and policy.decode(policy.tokenize(rollouts.text[i])) == rollouts.text[i]]
        if not rows:
            continue
        best, worst = (pick(rows, key=lambda i: float(rollouts.reward[i])) for pick in (max, min))
        if rollouts.reward[best] > rollouts.reward[worst] and rollouts.text[best] != rollouts.text[worst]:
            pairs.append(Pair(rollouts.prompt[best], rollouts.text[best], rollouts.text[worst]))
    return pairs
