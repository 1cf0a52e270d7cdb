"""What the trainer gives to credit estimators: continuations, the critic's values, learned scores, a Gram."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from creditscope.credit.tools import Tools
from creditscope.errors import CreditscopeError
from creditscope.lab.rollout import Drawn
from creditscope.lab.step import PolicyPasses
from creditscope.policy.critic import Critic
from creditscope.policy.loading import Policy
from creditscope.policy.logp import padded
from creditscope.policy.reward_model import RewardModel
from creditscope.policy.sampling import continue_from
from creditscope.runs.config import Config
from creditscope.tasks import Problem, Task


class LabTools(Tools):
    """The tools for one batch."""

    def __init__(self, policy: Policy, task: Task, config: Config, batch: Drawn, max_tokens: int, seed: int,
                 progress: float, critic: Critic | None, learned: RewardModel | None = None,
                 accumulate: int | None = None) -> None:
        self._policy, self._task, self._config, self._batch = policy, task, config, batch
        self._max_tokens, self._seed, self._critic, self._learned = max_tokens, seed, critic, learned
        self._accumulate = config.accumulate if accumulate is None else accumulate
        self.progress = progress
        self.continuations = 0
        """Rollouts spent on values so far."""
        self.errors: list[str] = []
        """Continuations that the verifier could not judge."""

    def values(self, cuts: Tensor, samples: int) -> Tensor:
        """V at a cut = mean reward of `samples` continuations; equal prefixes of a group are continued once."""
        rollouts, config = self._batch.rollouts, self._config
        tokens = rollouts.tokens.tolist()
        groups = rollouts.group.tolist()
        where: dict[tuple[int, tuple[int, ...]], int] = {}
        index = torch.full(cuts.shape, -1)
        places: list[tuple[int, int]] = []
        for i, row in enumerate(cuts.tolist()):
            for c, cut in enumerate(row):
                if cut < 0:
                    continue
                key = groups[i], tuple(tokens[i][:cut])
                if key not in where:
                    where[key] = len(places)
                    places.append((i, cut))
                index[i, c] = where[key]
        out = torch.full(cuts.shape, torch.nan, dtype=torch.float32)
        if not places:
            return out.to(cuts.device)
        rows, at = (torch.tensor(column) for column in zip(*places, strict=True))
        generator = torch.Generator(self._policy.device).manual_seed(self._seed)
        found = continue_from(self._policy.model, rollouts.prompt_ids, rollouts.tokens, rows, at, samples,
                              max_tokens=self._max_tokens, end=self._policy.end, temperature=config.temperature,
                              top_p=config.top_p, generator=generator)
        self.continuations += len(found.tokens)
        tails = [x[mask].tolist() for x, mask in zip(found.tokens.cpu(), found.mask.cpu(), strict=True)]
        answers = [(i, [*tokens[i][:cut], *tail]) for n, (i, cut) in enumerate(places)
                   for tail in tails[n * samples:(n + 1) * samples]]
        value = self._rewards(answers).view(-1, samples).mean(dim=1)
        out[index >= 0] = value[index[index >= 0]]
        return out.to(cuts.device)

    def _rewards(self, answers: Sequence[tuple[int, list[int]]]) -> Tensor:
        """(N,) the reward of each (row of the batch that has its prompt, token ids), from what gives the run's own."""
        if self._learned is not None:
            tokens, mask = padded([ids for _, ids in answers], self._learned.device)
            return self._learned.scores([self._batch.rollouts.prompt_ids[i] for i, _ in answers], tokens, mask).cpu()
        verdicts = [self._task.verify(self._batch.problems[i], self._policy.decode(ids)) for i, ids in answers]
        self.errors += [verdict.error for verdict in verdicts if verdict.error]
        return torch.tensor([verdict.reward for verdict in verdicts])

    def scores(self) -> Tensor:
        if self._learned is None:
            return super().scores()
        rollouts = self._batch.rollouts
        return self._learned.prefix_scores(rollouts.prompt_ids, rollouts.tokens, rollouts.mask)

    def critic(self) -> Tensor:
        if self._critic is None:
            return super().critic()
        return self._critic.values(self._batch.rollouts, parts=self._accumulate)

    def gram(self) -> Tensor:
        """One pass whose cotangent is 1 on every chosen token: its rows are the scores ψ_i."""
        return PolicyPasses(self._policy, self._batch.rollouts, accumulate=self._accumulate,
                            temperature=self._config.temperature).score_gram()


def task_gives(task: Task, problem: Problem, learned: bool = False) -> frozenset[str]:
    """What the trainer has, and what the task's verifier tells besides the reward, seen on a problem's own solution.

    A learned reward tells of each token and of no step. Where a user's own function judges, its word on one solution
    proves nothing: `check_first` asks the first batch.
    """
    found = {"entropy", "collision", "continuations", "critic", "gram"}
    if learned:  # the verifier's steps are not what is paid
        return frozenset(found | {"scores"})
    if getattr(task, "may_tell_steps", False):
        return frozenset(found | {"steps", "states"})
    verdict = task.verify(problem, str(problem.meta.get("solution") or problem.answer))
    if verdict.steps:
        found.add("steps")
        if all(step.state is not None for step in verdict.steps):
            found.add("states")
    return frozenset(found)


def check_first(needs: tuple[str, ...], batch: Drawn, config: Config) -> None:
    """Refuse a run whose first answers lack what its credit needs; later batches may, by chance."""
    rollouts = batch.rollouts
    judge = f"; --reward {config.reward} must return (reward, [[start, end, reward], ...])" if config.reward else ""
    said = f"; it said of {batch.errors[0]}" if batch.errors else ""
    if "steps" in needs and (rollouts.step_reward is None or rollouts.step_reward.shape[1] == 0):
        raise CreditscopeError(f"--credit {config.estimator} needs steps, and none of the first {len(rollouts)} "
                               f"answers has one{judge}{said}")
    if "states" in needs and rollouts.step_state is None:
        raise CreditscopeError(f"--credit {config.estimator} needs the state in which each step begins, and the first "
                               f"answers' steps have none" + judge.replace("reward], ...", "reward, state], ..."))


