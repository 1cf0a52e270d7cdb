"""From problems to Rollouts: sample each prompt R times, judge every answer, and line the steps up with the tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from creditscope.batch.groups import Groups
from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError
from creditscope.files.memory import enough_memory
from creditscope.policy.loading import Policy
from creditscope.policy.reward_model import RewardModel
from creditscope.policy.sampling import sample
from creditscope.tasks import Problem, Step, Task, Verdict

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Drawn:
    """Judged answers, and what the trainer needs besides."""

    rollouts: Rollouts
    problems: list[Problem]
    """What each row answers."""
    finished: Tensor
    """(B,) False where the answer was cut at the limit."""
    errors: list[str]
    """What the verifier could not judge."""
    sampled: int
    """Rollouts spent, replaced groups included."""
    lost: Tensor | None = None
    """(B,) True where a whole answer earned nothing for its form alone; None where the task does not look."""
    gold: Tensor | None = None
    """(B,) the verifier's reward, where a learned one is trained on."""

    @property
    def dead(self) -> Tensor:
        """(B,) True in groups whose rewards are all equal."""
        return Groups(self.rollouts.group).unanimous(self.rollouts.reward)


@enough_memory("sampling answers", "lower --max-tokens, or --prompts and --group; in an evaluation, "
               "--eval-problems")
def roll_out(policy: Policy, task: Task, problems: Sequence[Problem], group: int, *, max_tokens: int,
             temperature: float, top_p: float, generator: torch.Generator) -> Drawn:
    """R answers to each problem, judged."""
    encoded = [policy.encode(problem.prompt) for problem in problems]
    room = getattr(policy.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for problem, prompt in zip(problems, encoded, strict=True):
        if room is not None and len(prompt) + max_tokens > room:
            raise CreditscopeError(f"problem {problem.id} has a prompt of {len(prompt)} tokens and --max-tokens is "
                                   f"{max_tokens}: together over the context of {room} of model {policy.name!r}; give "
                                   f"--max-tokens {max(1, room - len(prompt))} or less, shorten or drop that problem, "
                                   f"or take a model with more room")
    samples = sample(policy.model, encoded, group, max_tokens=max_tokens, end=policy.end, temperature=temperature,
                     top_p=top_p, generator=generator)
    rows = [problem for problem in problems for _ in range(group)]
    ids = [tokens[mask].tolist() for tokens, mask in zip(samples.tokens.cpu(), samples.mask.cpu(), strict=True)]
    texts = [policy.decode(row) for row in ids]
    verdicts = [task.verify(problem, text) for problem, text in zip(rows, texts, strict=True)]
    pieces = [policy.pieces(row) for row in ids]
    step, step_reward, step_state = step_tensors(verdicts, pieces, samples.tokens.shape[1])
    device = samples.tokens.device
    rollouts = Rollouts(
        tokens=samples.tokens, mask=samples.mask, logp=samples.logp, entropy=samples.entropy,
        collision=samples.collision,
        reward=torch.tensor([v.reward for v in verdicts], dtype=torch.float32, device=device),
        group=torch.arange(len(problems), device=device).repeat_interleave(group),
        step=step.to(device), step_reward=step_reward.to(device),
        step_state=None if step_state is None else step_state.to(device),
        prompt=[problem.prompt for problem in rows], prompt_ids=[prompt for prompt in encoded for _ in range(group)],
        text=texts, pieces=pieces)
    errors = [v.error for v in verdicts if v.error]
    lost = None
    if all(v.lost is not None for v in verdicts):  # a cut answer is lost to the limit, not to its form
        lost = torch.tensor([bool(v.lost) for v in verdicts], device=device) & samples.finished
    return Drawn(rollouts, rows, samples.finished, errors, len(rows), lost)


def by_reward_model(model: RewardModel, drawn: Drawn) -> Drawn:
    """The same answers with the learned reward; the verifier's is gold, and the form that it asks for earns nothing."""
    rollouts = drawn.rollouts
    reward = model.scores(rollouts.prompt_ids, rollouts.tokens, rollouts.mask).to(rollouts.reward)
    return replace(drawn, rollouts=replace(rollouts, reward=reward), gold=rollouts.reward, lost=None)


def replace_dead(batch: Drawn, fresh: Drawn) -> Drawn:
    """The batch with its unanimous groups replaced, one for one, by groups of `fresh` that are not."""
    groups = batch.rollouts.group
    dead = Groups(groups[batch.dead]).ids.tolist()
    spare = Groups(fresh.rollouts.group[~fresh.dead]).ids.tolist()
    swap = dict(zip(dead, spare, strict=False))
    keep = torch.tensor([g not in swap for g in groups.tolist()], device=groups.device)
    taken = torch.tensor([g in swap.values() for g in fresh.rollouts.group.tolist()], device=groups.device)
    spent = batch.sampled + fresh.sampled
    if not swap:
        return replace(batch, sampled=spent, errors=batch.errors + fresh.errors)
    back = {new: old for old, new in swap.items()}
    renamed = torch.tensor([back[g] for g in fresh.rollouts.group[taken].tolist()], device=groups.device)
    problems = [*_where(batch.problems, keep), *_where(fresh.problems, taken)]
    joined = Rollouts.cat([batch.rollouts.rows(keep), replace(fresh.rollouts.rows(taken), group=renamed)])
    finished = torch.cat([batch.finished[keep], fresh.finished[taken]])
    lost, gold = (None if mine is None or other is None else torch.cat([mine[keep], other[taken]])
                  for mine, other in ((batch.lost, fresh.lost), (batch.gold, fresh.gold)))
    return Drawn(joined, problems, finished, batch.errors + fresh.errors, spent, lost, gold)


def step_tensors(verdicts: Sequence[Verdict], pieces: Sequence[Sequence[str]],
                 width: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """(B, T) step index of each token, -1 for none, (B, S) step rewards, and (B, S) states where the task names them.

    S = 0 where no answer has steps. A state is a number that stands for its text, the same in every batch and run.
    """
    most = max((len(v.steps) for v in verdicts), default=0)
    step = torch.full((len(verdicts), width), -1, dtype=torch.int64)
    reward = torch.zeros(len(verdicts), most)
    for i, (verdict, row) in enumerate(zip(verdicts, pieces, strict=True)):
        reward[i, : len(verdict.steps)] = torch.tensor([s.reward for s in verdict.steps])
        for t, index in enumerate(_step_of_each(verdict.steps, row)):
            step[i, t] = index
    names = [[s.state for s in v.steps] for v in verdicts]
    if not most or any(name is None for row in names for name in row):
        return step, reward, None
    state = torch.tensor([[*(state_number(str(name)) for name in row), *[-1] * (most - len(row))] for row in names])
    return step, reward, state


def state_number(name: str) -> int:
    """A number of 63 bits for a state's text: batches are joined and records compared, so no batch may count its own.

    >>> state_number("turn 0, rung 2") == state_number("turn 0, rung 2") != state_number("turn 1, rung 2")
    True
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1


def _step_of_each(steps: Sequence[Step], pieces: Sequence[str]) -> Iterator[int]:
    """For each token the step in which its first character stands, -1 for none."""
    at, index = 0, 0
    for piece in pieces:
        while index < len(steps) and at >= steps[index].end:
            index += 1
        yield index if piece and index < len(steps) and at >= steps[index].start else -1
        at += len(piece)


def _where(values: list[Kind], keep: Tensor) -> list[Kind]:
    return [value for value, kept in zip(values, keep.tolist(), strict=True) if kept]
