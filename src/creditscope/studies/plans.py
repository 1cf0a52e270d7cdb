"""The runs behind the claims, as data: (folder, settings) of each. Nothing is run here.

No experiment is in a plan twice, because equal seeds would be counted twice: the runs at R = 8 are also those that are
read under other credits and with the full microscope.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from creditscope.errors import CreditscopeError
from creditscope.runs.config import Config
from creditscope.runs.kinds import KINDS
from creditscope.runs.settings import flag

GROUPS = (2, 4, 8, 16, 32)
"""R of arXiv:2606.29238, 2, 4 and 8, and larger."""
CLOSE = 8
"""The R at which the other credits and the optimal baseline are read: the largest of P1's own."""
UNLABELLED = ("leave_one_out", "optimal_scalar", "optimal_sequence", "optimal_token", "prefix_tree", "prefix_share",
              "entropy_mask", "entropy_shaping", "salt")
"""Credits that need nothing of the task and one or two backward passes per reading."""
LABELLED = ("step_reward", "step_return", "turn_return")
"""Credits that need judged steps, which the tasks of `STEPWISE` have."""
STEPWISE = ("arithmetic", "gsm8k")
SAMPLED = {"small": ("monte_carlo,samples=4",),
           "full": ("monte_carlo,samples=4", "spo_chain,samples=4,every=1,probability=1.0")}
"""Credits that need continuations: from the ends of steps, and from every token."""
RULES = ("raise_group", "denser_credit,to=step_reward", "late_group")
FIXED = (4, 8, 16)
"""R of the runs that the rules are compared with."""
ROLLOUTS = 3840
"""Of each run that is compared at equal rollouts: 60 steps of 8 × 8."""
LABEL_STEPS = 2
"""Steps, each of them read, of the runs whose continuations the user asks for."""
SHARED = ("model", "task", "answer", "prompts", "lr", "clip_norm", "temperature", "max_tokens", "accumulate", "dtype")
"""Options of `Size` that every run gets as they are."""
KEEP = 50
"""Steps between checkpoints: a killed run loses no more than these."""
WARM = "tiny-turns"
"""The folder of the model that was trained on the moves of `turns`."""
BRAKED = {"small": ("none", "recall", "shorten"), "full": ("none", "recall", "shorten", "kl_stop")}
PASSES = {"small": (4,), "full": (1, 2, 4, 8)}
"""μ."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The user's options of a sweep; None is the budget's default."""

    model: str = "tiny"
    """tiny (packaged), a folder in Hugging Face format, a .gguf file, or owner/name on the hub."""
    budget: Literal["small", "full"] = "small"
    """small: 3 seeds; 30 steps per run for p1, three brakes at μ = 4 for p2. full: 60 steps, and 5 seeds of schedules
    that read the rank for p1; 5 seeds of four brakes at μ = 1, 2, 4, 8 for p2."""
    task: str = "arithmetic"
    """As of creditscope lab train."""
    steps: int | None = None
    """Batches of each run; by default as the budget says."""
    answer: str = "strict"
    """As of creditscope lab train: strict or flexible."""
    prompts: int = 8
    """P, prompts per step."""
    lr: float = 1e-4
    """Learning rate."""
    clip_norm: float | None = 1.0
    """Largest gradient norm, or None: P2.3 is read only as long as no gradient was clipped."""
    temperature: float = 1.0
    """Sampling temperature."""
    max_tokens: int | None = None
    """Longest completion; by default the task's."""
    accumulate: int = 1
    """Micro-batches per optimiser step: less memory, the same gradient."""
    dtype: str = "float32"
    """float32, bfloat16 or float64."""
    seeds: int | None = None
    """Runs of each setting, with seeds from 0."""
    groups: tuple[int, ...] = GROUPS
    """R of p1's sweep."""
    readings: int | None = None
    """Readings of the microscope per run of p1; by default 6, and 12 with the full budget."""
    evaluations: int = 3
    """Evaluations along a run of p1, besides the one at the start. With 4, and --steps a multiple of 4, R = 2 to 32 are
    also compared at equal rollouts."""
    eval_problems: int | None = None
    """Test problems per evaluation; by default 400, and 1000 with the full budget."""
    sampled: tuple[str, ...] = ()
    """p1: credits that sample continuations, such as monte_carlo,samples=2. They are read in short runs of their own,
    two steps at R = 8, because they sample many times what a step does."""

    @property
    def full(self) -> bool:
        return self.budget == "full"

    @property
    def packaged(self) -> bool:
        """Whether all of p1's runs are possible: step labels, the task `turns`, seconds per run."""
        return (self.model, self.task) == ("tiny", "arithmetic")

    def common(self) -> dict[str, Any]:
        """The settings that all runs of a sweep share."""
        return {name: getattr(self, name) for name in SHARED} | {
            "eval_problems": self.eval_problems or (1000 if self.full else 400)}

    def check(self) -> None:
        for name in ("seeds", "steps", "readings", "evaluations", "eval_problems"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise CreditscopeError(f"{flag(name)} must be at least 1, got {value}")
        if not self.groups or len(set(self.groups)) < len(self.groups):
            raise CreditscopeError(f"--groups must name each R once, got {' '.join(map(str, self.groups)) or 'none'}; "
                                   f"the default is {' '.join(map(str, GROUPS))}")


Plan = tuple[tuple[str, Config], ...]
"""(folder, settings) of each run."""


def p1(size: Size) -> Plan:
    """R ∈ {2, 4, 8, 16, 32}, three seeds, read on a schedule; with `sampled` also short runs that read these credits;
    with the packaged model also turns, and with the full budget rank-aware schedules. Seed by seed, so that an early
    stop leaves every R."""
    size.check()
    steps = size.steps or (60 if size.full else 30)
    every = max(1, steps // (size.readings or (12 if size.full else 6)))
    base = Config(**size.common(), method="p1_grpo", steps=steps, scope="light", every=every, probe="off",
                  eval_every=max(1, steps // size.evaluations), keep_every=0, checkpoint_every=min(steps, KEEP))
    also = UNLABELLED + (LABELLED if size.task.partition(":")[0] in STEPWISE else ())
    also += SAMPLED[size.budget] if size.packaged else ()
    plan: list[tuple[str, Config]] = []
    for seed in range(size.seeds or 3):
        for group in size.groups:
            close = {"scope": "full", "also": also} if group == CLOSE else {}
            plan.append((f"r{group}/seed-{seed}", replace(base, group=group, seed=seed, **close)))  # type: ignore[arg-type]
        if size.sampled:  # fewer steps alone: one family with the run at R = 8, of which the longer counts elsewhere
            few = min(steps, LABEL_STEPS)
            plan.append((f"sampled/seed-{seed}", replace(base, group=CLOSE, seed=seed, steps=few, every=1, eval_every=0,
                                                         also=size.sampled, checkpoint_every=few)))
        if size.packaged:
            plan.append((f"turns/seed-{seed}", replace(base, model=WARM, task="turns", group=CLOSE, seed=seed,
                                                       scope="off", every=1, keep_every=1)))
    if size.packaged and size.full:
        plan += _rank_aware(size, base)
    return tuple(plan)


def _rank_aware(size: Size, base: Config) -> Iterator[tuple[str, Config]]:
    """Fixed R, denser credit from the start, and the three rules at equal rollouts. All may take as many steps as the
    smallest R needs."""
    steps = -(-ROLLOUTS // (size.prompts * min(FIXED)))
    base = replace(base, steps=steps, rollouts=ROLLOUTS, every=1, eval_every=0, eval_rollouts=ROLLOUTS // 4,
                   checkpoint_every=min(steps, KEEP))
    for seed in range(size.seeds or 5):
        for group in FIXED:
            yield f"schedules/fixed-{group}/seed-{seed}", replace(base, group=group, seed=seed)
        dense = RULES[1].partition("=")[2]  # the rule's credit from the start: is it the switch that helps?
        yield f"schedules/{dense}/seed-{seed}", replace(base, group=CLOSE, credit=dense, seed=seed)
        for rule in RULES:
            yield f"schedules/{rule.partition(',')[0]}/seed-{seed}", replace(base, group=CLOSE, adapt=rule, seed=seed)


def p2(size: Size) -> Plan:
    """Brakes at several updates per batch, probed after each: the runs of `creditscope lab compare brake`."""
    size.check()
    if size.groups != GROUPS:
        raise CreditscopeError(f"--groups {' '.join(map(str, size.groups))} is p1's; p2 has R = {CLOSE} alone")
    steps = size.steps or 60
    rollouts = steps * size.prompts * CLOSE
    base = Config(**size.common(), **KINDS["brake"].probe, method="grpo", group=CLOSE, steps=steps, rollouts=rollouts,
                  eval_rollouts=max(1, rollouts // 2), keep_every=0, checkpoint_every=min(steps, KEEP))
    return tuple((f"mu{passes}/{brake}/seed-{seed}", replace(base, inner_steps=passes, brake=brake, seed=seed))
                 for seed in range(size.seeds or (5 if size.full else 3)) for passes in PASSES[size.budget]
                 for brake in (BRAKED[size.budget] if passes > 1 else ("none",)))  # one update has nothing to brake


PLANS = {"p1": p1, "p2": p2}
