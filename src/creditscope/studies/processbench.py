"""ProcessBench (arXiv:2412.06559): solutions by other models, in each of which people marked the first wrong step.

One JSON list of objects: id, problem, steps (texts), final_answer_correct, label (the first wrong step, −1 for none).
The policy scores them in one forward pass, so only credit that needs no sampling can be measured. Few problems have two
solutions, and a group of one has no advantage, so the whole file is one group: its baseline is the file's mean reward.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.credit import ESTIMATORS
from creditscope.credit.tools import Tools
from creditscope.errors import CreditscopeError
from creditscope.files.jsonlines import encodable, parse_json, read_whole
from creditscope.methods.find import find
from creditscope.policy.loading import Policy
from creditscope.policy.scoring import Tick, encode_exactly
from creditscope.studies.localise import Localiser, StudyResult, affordable, scored, yardsticks
from creditscope.tasks import Step, Verdict

MOST_BYTES = 64 * 2**20
"""Largest file accepted: a hundred times ProcessBench's own."""
BETWEEN = "\n\n"
GIVEN = frozenset({"entropy", "collision"})


@dataclass(frozen=True)
class Solution:
    """One entry of the file."""

    id: str
    problem: str
    steps: tuple[str, ...]
    right: bool
    label: int
    """The first wrong step, −1 where none is."""

    @property
    def text(self) -> str:
        return BETWEEN.join(self.steps)

    @property
    def spans(self) -> tuple[Step, ...]:
        """The span of each step in the text, with the blank line that ends it. No rewards: those are the labels."""
        ends = accumulate(len(step) + len(BETWEEN) for step in self.steps)
        return tuple(Step(start, end, 0.0) for start, end in pairwise((0, *ends)))


def read_processbench(path: Path) -> list[Solution]:
    """All solutions of a file; an entry that is not one is an error."""
    try:
        found = parse_json(read_whole(path, MOST_BYTES))
    except CreditscopeError:
        raise
    except OSError as error:
        raise CreditscopeError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # neither JSON nor UTF-8
        raise CreditscopeError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, list) or not found:
        raise CreditscopeError(f"{path} must hold a list of at least one solution, got "
                               f"{'an empty list' if found == [] else type(found).__name__}")
    return [_solution(entry, f"{path}, entry {n}") for n, entry in enumerate(found)]


def localise_processbench(policy: Policy, solutions: Sequence[Solution], *, seed: int, problems: int | None = None,
                          credit: Sequence[str] = (), tick: Tick | None = None) -> StudyResult:
    """How well credit from a forward pass localises the marked step; `problems` solutions drawn at random, or all."""
    if problems is not None and problems < 1:
        raise CreditscopeError(f"--problems must be at least 1, got {problems}")
    if problems is not None and problems < len(solutions):
        drawn = sorted(random.Random(seed).sample(range(len(solutions)), problems))
        solutions = [solutions[i] for i in drawn]
    if len(solutions) < 2:
        raise CreditscopeError("one solution has no other to be compared with; give a file of two or more, or a larger "
                               "--problems")
    chosen, skipped = affordable(credit or ESTIMATORS, GIVEN, "a file of solutions", named=bool(credit))
    skipped |= {estimator.spec: f"credit {estimator.row.name!r} compares the beginnings of answers to one prompt, and "
                "most problems of the file have one answer" for estimator in chosen if estimator.row.one_prompt}
    began = time.perf_counter()
    rollouts = as_rollouts(policy, solutions, tick)
    seconds = {"score": time.perf_counter() - began}
    culprit = askable(rollouts, torch.tensor([s.label for s in solutions]))
    if not bool((culprit >= 0).any()):
        raise CreditscopeError(f"none of the {len(solutions)} solutions has a step marked wrong beside another; give a "
                               f"larger --problems, or another file")
    found = Localiser(seed)
    for name, score in yardsticks(rollouts).items():
        found.add(name, score, rollouts, culprit)
    for estimator in chosen:
        if estimator.spec not in skipped:
            found.add(estimator.spec, estimator(find("grpo"), rollouts, Tools()), rollouts, culprit)
    count = Counter(s.problem for s in solutions)
    facts = {"solutions": len(solutions), "evaluated": int((culprit >= 0).sum()),
             "marked wrong": sum(s.label >= 0 for s in solutions),
             "marked wrong, answer right": sum(s.label >= 0 and s.right for s in solutions),
             "problems": len(count), "problems with siblings": sum(n > 1 for n in count.values()),
             "mean reward": float(rollouts.reward.mean()), "tokens": int(rollouts.mask.sum())}
    return StudyResult({"processbench": found.findings()}, facts, skipped, seconds)


def as_rollouts(policy: Policy, solutions: Sequence[Solution], tick: Tick | None = None) -> Rollouts:
    """The solutions as one group, scored under the policy; r_i = 1 where the final answer is right."""
    prompts = [policy.encode(s.problem) for s in solutions]
    written = [encode_exactly(policy, s.text, f"solution {s.id!r}") for s in solutions]
    fields = scored(policy, prompts, written, [Verdict(0.0, s.spans) for s in solutions], tick=tick)
    del fields["step_reward"]  # that would be the labels
    return Rollouts(**fields, prompt=[s.problem for s in solutions], text=[s.text for s in solutions],
                    reward=torch.tensor([float(s.right) for s in solutions], device=policy.device),
                    group=torch.zeros(len(written), dtype=torch.int64, device=policy.device))


def askable(rollouts: Rollouts, label: Tensor) -> Tensor:
    """The labels, −1 also where the marked step has no token of its own, or all of them: nothing to compare."""
    step = rollouts.require("step", "localise").cpu()
    inside = ((step == label[:, None]) & rollouts.mask.cpu()).sum(dim=1)
    return label.masked_fill((inside == 0) | (inside == rollouts.lengths.cpu()), -1)


def _solution(entry: Any, where: str) -> Solution:
    if not isinstance(entry, dict):
        raise CreditscopeError(f"{where} must be an object, got {type(entry).__name__}")
    if isinstance(entry.get("id"), str):
        where += f" ({entry['id'][:40]!r})"
    kinds = {"id": str, "problem": str, "steps": list, "final_answer_correct": bool, "label": int}
    for name, kind in kinds.items():
        if name not in entry:
            raise CreditscopeError(f"{where} has no {name!r}; it needs {', '.join(kinds)}")
        value = entry[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CreditscopeError(f"{where}: {name} must be {kind.__name__}, got {type(value).__name__} "
                                   f"{str(value)[:40]!r}")
    steps, label = entry["steps"], entry["label"]
    for name, empty in (("problem", not entry["problem"].strip()), ("steps", not steps)):
        if empty:
            raise CreditscopeError(f"{where}: {name} is empty; give its text")
    for i, step in enumerate(steps):
        if not isinstance(step, str) or not step:
            raise CreditscopeError(f"{where}: steps[{i}] must be a text that is not empty, got {type(step).__name__} "
                                   f"{str(step)[:40]!r}")
    if not all(map(encodable, (entry["id"], entry["problem"], *steps))):
        raise CreditscopeError(f"{where} has half a character (a lone surrogate), which cannot be tokenised; write "
                               f"whole characters")
    if not -1 <= label < len(steps):
        raise CreditscopeError(f"{where}: label must be a step from 0 to {len(steps) - 1}, or -1 for none, got {label}")
    return Solution(entry["id"], entry["problem"], tuple(steps), entry["final_answer_correct"], label)
