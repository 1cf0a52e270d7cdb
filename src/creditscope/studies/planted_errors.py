"""Planted errors: a reference solution with one wrong number, which the policy continues to a wrong answer.

    68 / 2 = 34
    2 * 6 = 13          planted: 12 became 13
    34 - 13 = 21        by the policy: true given 13
    #### 21

The verifier marks every line that is not in the reference, so it marks all later lines too. The culprit is the planted
line: a rollout is kept only where each later line is true given the wrong number.

A planted number has a low probability under the policy. The policy's own errors, in the siblings, are the control:
their culprit is the first line that the verifier marks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.credit import ESTIMATORS
from creditscope.errors import CreditscopeError
from creditscope.lab.rollout import Drawn, roll_out
from creditscope.lab.tools import LabTools, task_gives
from creditscope.methods.find import find
from creditscope.policy.critic import Critic
from creditscope.policy.loading import Policy
from creditscope.policy.sampling import continue_from
from creditscope.policy.scoring import Tick, encode_exactly
from creditscope.runs.config import Config
from creditscope.studies.localise import Localiser, StudyResult, affordable, culprits, scored, yardsticks
from creditscope.tasks import Problem
from creditscope.tasks.arithmetic import LINE, Arithmetic

TRIES = 8
"""Ends sampled for each planted line; the first without another error is kept."""
TOGETHER = 20
"""Problems in a batch. Quantiles and whitening are over a batch."""
CRITIC_BATCHES = 40
"""Batches of 8 prompts of the train split, R answers each, that the critic is fitted to."""
CRITIC_EPOCHS = 4


@dataclass(frozen=True)
class Planted:
    """The reference solution up to and with its line number `line`, whose result is wrong."""

    line: int
    text: str
    wrong: int


def specs(samples: int) -> list[str]:
    """Every estimator of the table with its variants: GAE also with λ = 0."""
    return [spec for name, row in ESTIMATORS.items()
            for spec in (f"{name},samples={samples}" if "samples" in row.options else name, *row.variants)]


def plant(problem: Problem, rng: random.Random, largest: int = 99) -> Planted:
    """The reference up to a line drawn at random, whose result is made wrong.

    >>> problem = Problem("p", "", "19", {"chain": ("12 + 7 = 19",), "solution": "12 + 7 = 19\\n#### 19"})
    >>> plant(problem, random.Random(0)).text
    '12 + 7 = 29\\n'
    """
    chain = list(problem.meta["chain"])
    line = rng.randrange(len(chain))
    found = LINE.fullmatch(chain[line])
    assert found is not None, f"line {line} of the reference of problem {problem.id} is no equation"
    wrong = rng.choice(wrong_numbers(int(found[4]), largest))
    chain[line] = f"{chain[line][:found.start(4)]}{wrong}"
    return Planted(line, "\n".join(chain[:line + 1]) + "\n", wrong)


def wrong_numbers(right: int, largest: int) -> list[int]:
    """Off by one, off by ten, digits swapped; from 1 to `largest`, never the right one.

    >>> wrong_numbers(21, 99)
    [11, 12, 20, 22, 31]
    """
    slips = {right - 10, right - 1, right + 1, right + 10, int(str(right)[::-1])} - {right}
    return sorted(n for n in slips if 1 <= n <= max(largest, right))


def follows(task: Arithmetic, problem: Problem, planted: Planted, tail: str) -> bool:
    """Whether the answer is wrong and every later line is right given the wrong number.

    The verifier is asked without a reference, with the planted lines in the prompt and the last result as the answer.
    """
    results = [int(found[4]) for line in tail.splitlines() if (found := LINE.fullmatch(line.strip()))]
    given = Problem(problem.id, problem.prompt + planted.text, str(results[-1] if results else planted.wrong))
    verdict = task.verify(given, tail)
    return (verdict.reward > 0 and all(step.reward > 0 for step in verdict.steps)
            and task.verify(problem, planted.text + tail).reward == 0)


def planted_batch(policy: Policy, task: Arithmetic, problems: Sequence[Problem], config: Config, seed: int) -> \
        tuple[Drawn, Tensor] | None:
    """R − 1 answers of the policy and one with a planted line per problem; and (B,) the number of the planted line, −1
    for siblings. None where no planted text was kept."""
    rng = random.Random(f"plant/{seed}/{problems[0].id}")
    generator = torch.Generator(policy.device).manual_seed(rng.getrandbits(62))
    plan = [plant(problem, rng, task.largest) for problem in problems]
    kept = _taken_on(policy, task, problems, plan, config, generator)
    if not kept:
        return None
    problems = [problems[i] for i in kept]
    siblings = roll_out(policy, task, problems, config.group - 1, max_tokens=task.max_tokens,
                        temperature=config.temperature, top_p=config.top_p, generator=generator)
    prompts = siblings.rollouts.prompt_ids[:: config.group - 1]
    written = _judged(policy, task, problems, prompts, list(kept.values()), config.temperature)
    whole = Rollouts.cat([siblings.rollouts, written])
    culprit = torch.full((len(whole),), -1)
    culprit[len(siblings.rollouts):] = torch.tensor([plan[i].line for i in kept])
    finished = torch.cat([siblings.finished, torch.ones(len(kept), dtype=torch.bool, device=siblings.finished.device)])
    return Drawn(whole, siblings.problems + problems, finished, siblings.errors, len(whole)), culprit


def localise_planted(policy: Policy, task: Arithmetic, *, problems: int, group: int, samples: int, seed: int,
                     credit: Sequence[str] = (), critic: str = "head", tick: Tick | None = None) -> StudyResult:
    """Both tables: planted errors, and for control the policy's own, the first wrong sibling of each group."""
    method, config = find("grpo"), Config(group=group, seed=seed, critic=critic)
    run, skipped = affordable(credit or specs(samples), task_gives(task, next(task.problems("test"))),
                              f"task {task.name!r}", named=bool(credit))
    needs_critic = any("critic" in estimator.row.needs for estimator in run)
    asked = list(islice(task.problems("test"), problems))
    total = len(asked) + needs_critic * CRITIC_BATCHES * 8
    clock = {"critic": -time.perf_counter()}
    values, quality = _critic(policy, task, config, tick, total) if needs_critic else (None, {})
    clock["critic"] += time.perf_counter()
    found = {"planted": Localiser(seed), "own": Localiser(seed)}
    kept = 0
    for start in range(0, len(asked), TOGETHER):
        made = _timed(clock, "sample", planted_batch, policy, task, asked[start:start + TOGETHER], config, seed)
        if made is not None:
            batch, planted = made
            own = first_of_each_group(culprits(batch.rollouts).masked_fill(planted >= 0, -1), batch.rollouts.group)
            kept += int((planted >= 0).sum())
            tools = FewTools((planted >= 0) | (own >= 0), policy, task, config, batch, task.max_tokens,
                             seed * 1_000_003 + start, 0.0, values, accumulate=len(batch.rollouts.group.unique()))
            scores = dict(yardsticks(batch.rollouts))
            for estimator in run:
                scores[estimator.spec] = _timed(clock, estimator.spec, estimator, method, batch.rollouts, tools)
            for name, score in scores.items():
                found["planted"].add(name, score, batch.rollouts, planted)
                found["own"].add(name, score, batch.rollouts, own)
        if tick is not None:
            tick(total - len(asked) + min(start + TOGETHER, len(asked)), total)
    if not kept:
        raise CreditscopeError(f"of {len(asked)} planted errors none led model {policy.name!r} to a wrong answer by "
                               f"true lines alone; ask for more with --problems, or take a model that solves the task")
    facts = {"problems": len(asked), "kept": kept, "group": group, "samples": samples} | quality
    return StudyResult({name: table.findings() for name, table in found.items()}, facts, skipped, clock)


class FewTools(LabTools):
    """LabTools with continuations for the `read` rows alone, and one Gram for all estimators.

    The credit of the other rows is wrong and unused: values enter a row's own credit alone, and the common scale of a
    group does not change an order.
    """

    def __init__(self, read: Tensor, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._read = read
        self._gram: Tensor | None = None

    def values(self, cuts: Tensor, samples: int) -> Tensor:
        unread = ~self._read.to(cuts.device)[:, None]
        return super().values(cuts.masked_fill(unread, -1), samples).masked_fill(unread & (cuts >= 0), 0.0)

    def gram(self) -> Tensor:
        if self._gram is None:
            self._gram = super().gram()
        return self._gram


def first_of_each_group(culprit: Tensor, group: Tensor) -> Tensor:
    """`culprit` with −1 for all but the first row of each group that has one: a group counts once.

    >>> first_of_each_group(torch.tensor([-1, 2, 0, 1]), torch.tensor([0, 0, 0, 1])).tolist()
    [-1, 2, -1, 1]
    """
    out, seen = torch.full_like(culprit, -1), set()
    for i, (step, g) in enumerate(zip(culprit.tolist(), group.tolist(), strict=True)):
        if step >= 0 and g not in seen:
            seen.add(g)
            out[i] = step
    return out


def _taken_on(policy: Policy, task: Arithmetic, problems: Sequence[Problem], plan: Sequence[Planted], config: Config,
              generator: torch.Generator) -> dict[int, list[int]]:
    """Number of the problem -> tokens of its planted text and the first of TRIES ends without another error."""
    prefixes = [encode_exactly(policy, p.text, f"problem {q.id}") for p, q in zip(plan, problems, strict=True)]
    lengths = torch.tensor([len(ids) for ids in prefixes])
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in prefixes], batch_first=True)
    ends = continue_from(policy.model, [policy.encode(q.prompt) for q in problems], tokens, torch.arange(len(plan)),
                         lengths, TRIES, max_tokens=task.max_tokens, end=policy.end, temperature=config.temperature,
                         top_p=config.top_p, generator=generator)
    out: dict[int, list[int]] = {}
    tails = [ids[mask].tolist() for ids, mask in zip(ends.tokens.cpu(), ends.mask.cpu(), strict=True)]
    for n, (tail, finished) in enumerate(zip(tails, ends.finished.tolist(), strict=True)):
        i = n // TRIES
        if i not in out and finished and follows(task, problems[i], plan[i], policy.decode(tail)):
            out[i] = prefixes[i] + tail
    return out


def _judged(policy: Policy, task: Arithmetic, problems: Sequence[Problem], prompts: Sequence[Sequence[int]],
            written: Sequence[Sequence[int]], temperature: float) -> Rollouts:
    """Given completions as rollouts, one per group: judged by the task, scored under the policy."""
    texts = [policy.decode(ids) for ids in written]
    verdicts = [task.verify(problem, text) for problem, text in zip(problems, texts, strict=True)]
    return Rollouts(**scored(policy, prompts, written, verdicts, temperature), text=texts,
                    reward=torch.tensor([v.reward for v in verdicts], device=policy.device),
                    group=torch.arange(len(written), device=policy.device), prompt=[q.prompt for q in problems],
                    prompt_ids=prompts)


def _critic(policy: Policy, task: Arithmetic, config: Config, tick: Tick | None,
            total: int) -> tuple[Critic, dict[str, float]]:
    """A critic fitted to fresh answers to the train split, and its quality on the last batch."""
    critic = Critic(policy, kind=config.critic, epochs=CRITIC_EPOCHS, seed=config.seed)
    stream = task.problems("train", config.seed)
    generator = torch.Generator(policy.device).manual_seed(config.seed)
    quality: dict[str, float] = {}
    for n in range(CRITIC_BATCHES):
        batch = roll_out(policy, task, list(islice(stream, 8)), config.group, max_tokens=task.max_tokens,
                         temperature=config.temperature, top_p=config.top_p, generator=generator)
        quality = critic.fit(batch.rollouts)
        if tick is not None:
            tick(8 * (n + 1), total)
    return critic, quality


def _timed(clock: dict[str, float], name: str, job: Any, *args: Any) -> Any:
    began = time.perf_counter()
    found = job(*args)
    clock[name] = clock.get(name, 0.0) + time.perf_counter() - began
    return found


def check_sizes(problems: int, group: int, samples: int) -> None:
    for name, value, least in (("problems", problems, 1), ("group", group, 2), ("samples", samples, 1)):
        if value < least:
            raise CreditscopeError(f"--{name} must be at least {least}, got {value}")
