"""Does credit localise the wrong step? The area under the ROC curve of |A_it|, wrong step against the rest.

    AUC_i = P(|A_it| > |A_iu|) + ½ P(|A_it| = |A_iu|)        t a token of the culprit, u any other of the same rollout

Credit that is equal on all tokens has AUC 0.5, exactly. At AUC 1 every token of the culprit ranks above all others.
Tokens are compared within one rollout, so its length and the scale of its credit do not matter; then the mean over
rollouts is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.credit import Chosen, find_estimator
from creditscope.errors import CreditscopeError
from creditscope.lab.rollout import step_tensors
from creditscope.policy.loading import Policy
from creditscope.policy.scoring import Tick, score_tokens
from creditscope.tasks import Verdict

DRAWS = 2000
ROUNDING = 1e-6
"""Scores of a rollout that differ by less than this share of its largest are ties: the rounding of float32 sums."""


@dataclass(frozen=True)
class Average:
    """A mean over rollouts with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class ScoreResult:
    """How well one kind of score localises the culprits of n rollouts."""

    name: str
    n: int
    silent: int
    """Rollouts whose score is the same on all tokens (no credit at all, or outcome credit): 0.5 by construction."""
    size: Average
    """AUC of |A|."""
    blame: Average
    """AUC of −A."""
    hit: Average
    """Share of rollouts in which the step with the largest mean |A| is the culprit; ties share the hit."""
    chance: float
    """`hit` of a step drawn at random."""


@dataclass(frozen=True)
class StudyResult:
    """Tables by name, the numbers around them, estimator -> why it was skipped, part -> its seconds."""

    tables: dict[str, list[ScoreResult]]
    facts: dict[str, float]
    skipped: dict[str, str]
    seconds: dict[str, float]


def affordable(specs: Iterable[str], given: frozenset[str], source: str, named: bool) -> tuple[
        list[Chosen], dict[str, str]]:
    """The estimators whose needs are given, and why the others are skipped; one that the user named is an error."""
    kept, skipped = [], {}
    for estimator in map(find_estimator, specs):
        try:
            estimator.row.require(given, source)
            kept.append(estimator)
        except CreditscopeError as error:
            if named:
                raise
            skipped[estimator.spec] = str(error)
    return kept, skipped


def auc(score: Tensor, positive: Tensor) -> float:
    """Mann and Whitney's U / (n⁺ n⁻): the chance that a positive stands above a negative, ties counting ½.

    >>> auc(torch.tensor([3., 1., 2., 1.]), torch.tensor([True, True, False, False]))
    0.625
    """
    above, below = score[positive].contiguous(), score[~positive].sort().values
    # Twice the number of smaller negatives, an integer, so that ties give ½ exactly.
    twice = torch.searchsorted(below, above, right=False) + torch.searchsorted(below, above, right=True)
    return int(twice.sum()) / (2 * len(above) * len(below))


def step_hit(score: Tensor, step: Tensor, culprit: int) -> tuple[float, float]:
    """Whether the step with the largest mean score is the culprit, and the chance of that for a step drawn at random.

    Steps that tie for the first place share the hit, so that a constant score hits exactly as often as chance.

    >>> step_hit(torch.tensor([1., 3., 2., 2.]), torch.tensor([0, 0, 1, 1]), 1)
    (0.5, 0.5)
    """
    inside = step >= 0
    steps, index, count = torch.unique(step[inside], return_inverse=True, return_counts=True)
    mean = torch.zeros(len(steps), dtype=score.dtype).index_add_(0, index, score[inside]) / count
    first = mean >= mean.max() - ROUNDING * mean.max().abs()
    return float(first[steps == culprit].sum()) / int(first.sum()), 1 / len(steps)


def bootstrap(values: Sequence[float], seed: int, draws: int = DRAWS) -> Average:
    """The mean, and the middle 95 % of the means of `draws` samples of the same size with replacement.

    >>> bootstrap([0.5, 0.5], seed=0)
    Average(mean=0.5, low=0.5, high=0.5)
    """
    known = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    means = known[torch.randint(len(known), (draws, len(known)), generator=generator)].mean(dim=1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Average(float(known.mean()), low, high)


class Localiser:
    """Collects scores batch by batch; `findings` is how well each kind localises the culprits.

    A culprit is a step's number, −1 for a rollout that is left out.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rows: dict[str, list[tuple[float, float, float, float, bool]]] = {}

    def add(self, name: str, score: Tensor, rollouts: Rollouts, culprit: Tensor) -> None:
        """`score` (B, T) signed credit, `culprit` (B,) the wrong step; needs `rollouts.step`."""
        step = rollouts.require("step", "localise").cpu()
        mask, score = rollouts.mask.cpu(), score.detach().cpu().double()
        rows = self._rows.setdefault(name, [])
        for i in (culprit >= 0).nonzero()[:, 0].tolist():
            here = mask[i]
            signed, steps = _clean(score[i, here]), step[i, here]
            positive = steps == int(culprit[i])
            hit, chance = step_hit(signed.abs(), steps, int(culprit[i]))
            rows.append((auc(signed.abs(), positive), auc(-signed, positive), hit, chance,
                         bool(signed.min() == signed.max())))

    def findings(self) -> list[ScoreResult]:
        out = []
        for name, rows in self._rows.items():
            if rows:
                *scores, chance, silent = zip(*rows, strict=True)
                size, blame, hit = (bootstrap(values, self._seed) for values in scores)
                out.append(ScoreResult(name, len(rows), sum(silent), size, blame, hit, sum(chance) / len(rows)))
        return out


def scored(policy: Policy, prompts: Sequence[Sequence[int]], written: Sequence[Sequence[int]],
           verdicts: Sequence[Verdict], temperature: float = 1.0, tick: Tick | None = None) -> dict[str, Any]:
    """Fields of Rollouts for given completions: padded, scored under the policy, with the steps of the verdicts."""
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in written], batch_first=True).to(policy.device)
    lengths = torch.tensor([len(ids) for ids in written], device=policy.device)
    mask = torch.arange(tokens.shape[1], device=policy.device) < lengths[:, None]
    scores = score_tokens(policy, prompts, tokens, mask, temperature, tick=tick)
    pieces = [policy.pieces(ids) for ids in written]
    step, step_reward, _ = step_tensors(verdicts, pieces, tokens.shape[1])
    return {"tokens": tokens, "mask": mask, "pieces": pieces, **vars(scores), "step": step.to(policy.device),
            "step_reward": step_reward.to(policy.device)}


def yardsticks(rollouts: Rollouts) -> Mapping[str, Tensor]:
    """Scores to compare the estimators with, which are no credit: surprise = log π(y_t), entropy = −H_t and
    early = t − T, the place alone, because culprits may be unevenly spread over a text."""
    place = torch.arange(rollouts.tokens.shape[1], device=rollouts.mask.device).expand_as(rollouts.mask)
    entropy = rollouts.require("entropy", "localise")
    return {"surprise": rollouts.logp, "entropy": -entropy, "early": (place - place.shape[1]).double()}


def culprits(rollouts: Rollouts) -> Tensor:
    """(B,) the first step that the verifier marks wrong, −1 for right answers and for rows with nothing to compare.

    Later wrong steps may follow from the first.
    """
    step, reward = rollouts.require("step", "localise"), rollouts.require("step_reward", "localise")
    out = torch.full((len(rollouts),), -1)
    for i in range(len(rollouts)):
        steps = step[i][rollouts.mask[i]]
        present = torch.unique(steps[steps >= 0]).tolist()
        wrong = [s for s in present if float(reward[i, s]) <= 0]
        if float(rollouts.reward[i]) <= 0 and wrong and bool((steps != wrong[0]).any()):
            out[i] = wrong[0]
    return out


def _clean(score: Tensor) -> Tensor:
    top = score.abs().max()
    return (score / (top * ROUNDING)).round() if bool(top > 0) else score
