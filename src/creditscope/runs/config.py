"""Every setting of a training run, with what it means. The command line is made from this class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from creditscope.credit.table import ESTIMATORS, parse
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import OWN_CREDIT, Method
from creditscope.methods.find import find
from creditscope.optimizer.table import BRAKES, OPTIMIZERS, parse_brake
from creditscope.runs.adapt import ADAPTS, Setting, check_adapt, parse_adapt
from creditscope.runs.settings import (
    GROUPS,
    MOST,
    Keeping,
    Looking,
    Optimiser,
    Sampling,
    Schedule,
    Subject,
    check_kind,
    flag,
    in_range,
)


@dataclass(frozen=True, kw_only=True)
class Config(Keeping, Looking, Sampling, Optimiser, Schedule, Subject):
    """What to train, on what, how."""

    def __post_init__(self) -> None:
        for f in fields(Config):
            check_kind(f.name, str(f.type), getattr(self, f.name))
        for group in GROUPS:
            group.check(self)
        self._check_beta()
        if self.pairs is not None:  # first, because it sets the group's size
            self._check_pairs()
        if self.scope != "off":
            self._check_meeting(f"--scope {self.scope}", self.prompts // self.minibatches)
        if self.learned is not None and self.row.by_sign:
            raise CreditscopeError(f"--reward {self.reward}: method {self.method!r} labels an answer by whether its "
                                   f"reward is above 0, and a learned reward has no zero of its own; choose a method "
                                   f"of pairs, such as --method dpo, or leave --reward out")
        if self.row.centred and self.group < 2:
            raise CreditscopeError(f"--group {self.group}: method {self.method!r} compares a rollout with its group, "
                                   f"so a group of one has advantage 0; give --group 2 or more, or --method reinforce")
        BRAKES[parse_brake(self.brake)[0]].require(self.row, self.inner_steps * self.minibatches, self.memory)
        self._check_credit()
        check_adapt(self.adapt, Setting(self.group, self.estimator), self.rollouts, self.scope,
                    readings=math.ceil((self.steps - self.critic_warmup) / self.every))
        for option, spec in self._others:
            try:
                self.under(spec)
            except CreditscopeError as error:
                said = str(error).replace("leave --credit out", f"leave {option} out")
                raise CreditscopeError(f"{option} {spec}: {said}") from None

    def _check_meeting(self, what: str, prompts: int) -> None:
        """Two rollouts of a group are compared in a pass that has both."""
        if self.group > 1 and self.accumulate >= (rollouts := prompts * self.group):
            raise CreditscopeError(f"{what} compares rollouts two by two, but --accumulate {self.accumulate} would put "
                                   f"each of {rollouts} into a micro-batch of its own; give at most {rollouts - 1}")

    def _check_beta(self) -> None:
        if self.beta is not None and find(self.method).linked and not 0 < self.beta <= MOST:
            raise CreditscopeError(f"--beta must be above 0, and at most {MOST:g}, got {self.beta}: method "
                                   f"{self.method!r} multiplies its scores by it; leave it out for the method's own")
        in_range(self, "beta")

    def _check_pairs(self) -> None:
        if not (self.row.linked and self.row.link_over == "pair"):
            raise CreditscopeError(f"--pairs {self.pairs}: method {self.method!r} learns from sampled answers; choose "
                                   f"a method of pairs, such as --method dpo, or leave --pairs out")
        for name, value, idle in (("reward", self.reward if self.learned else None, None),
                                  ("rollouts", self.rollouts, 0), ("adapt", self.adapt, "none"),
                                  ("resample", self.resample, Schedule.resample)):
            if value != idle:
                raise CreditscopeError(f"{flag(name)} {value}: with --pairs no answer is sampled; leave it out")
        if self.group not in (2, Schedule.group):
            raise CreditscopeError(f"--group {self.group}: a pair of --pairs has two answers; leave --group out")
        object.__setattr__(self, "group", 2)

    def _check_credit(self) -> None:
        name, _ = parse(self.estimator)
        if self.critic_warmup >= self.steps:
            raise CreditscopeError(f"--critic-warmup {self.critic_warmup} leaves no step to the policy; give fewer "
                                   f"than --steps {self.steps}")
        if name not in ESTIMATORS:  # a user's own, of which nothing is known before it is imported
            return
        row = ESTIMATORS[name]
        if self.row.external and row.builds_on == "advantage":
            raise CreditscopeError(f"--credit {name} reshapes the method's own advantage, but method {self.method!r} "
                                   f"has none; choose gae, or another that is made from rewards: creditscope list "
                                   f"credits")
        if self.row.labels and row.builds_on == "reward" and name != OWN_CREDIT:
            raise CreditscopeError(f"--credit {name} is made from rewards, but method {self.method!r} labels its "
                                   f"answers +1 and −1; leave --credit out, or choose one that reshapes the label: "
                                   f"creditscope list credits")
        if "gram" in row.needs:
            self._check_meeting(f"--credit {name}", self.prompts)
        if row.siblings and self.group < 2:
            raise CreditscopeError(f"--group {self.group}: --credit {name} compares a rollout with its siblings; give "
                                   f"--group 2 or more")
        if "collision" in row.needs and self.top_p < 1:
            raise CreditscopeError(f"--top-p {self.top_p}: --credit {name} reads Σπ² of the distribution before top-p, "
                                   f"and the log-probs after it; give --top-p 1")
        if self.critic_warmup and "critic" not in row.needs:
            raise CreditscopeError(f"--critic-warmup {self.critic_warmup}: --credit {name} has no critic; use --credit "
                                   f"gae, or leave it out")

    @property
    def _others(self) -> list[tuple[str, str]]:
        """(flag, credit) of every credit that the run may meet besides its own."""
        to = parse_adapt(self.adapt)[1].get("to")
        return [("--also", spec) for spec in self.also] + ([("--adapt", to)] if to else [])

    @property
    def credits(self) -> tuple[str, ...]:
        """Every credit that the run may meet, its own first."""
        return tuple(dict.fromkeys([self.estimator, *(spec for _, spec in self._others)]))

    def under(self, credit: str) -> Config:
        """The same run with another --credit and none besides: refused where that credit could not be."""
        return replace(self, credit=credit, also=(), adapt="none", critic_warmup=0)

    @property
    def row(self) -> Method:
        """The method, with the run's own β."""
        row = find(self.method)
        if self.beta is None or self.beta == row.beta:
            return row
        if row.kl == "none" and not row.linked:
            raise CreditscopeError(f"--beta {self.beta}: method {self.method!r} has no KL term; choose one that has, "
                                   f"such as grpo, or leave --beta out")
        return row.replace(beta=self.beta)

    @property
    def estimator(self) -> str:
        """The credit estimator, as --credit spells it."""
        return self.row.default_credit if self.credit is None else self.credit

    @property
    def unscaled(self) -> bool:
        """True when a part of the gradient does not scale with reward: a KL term, or weight decay inside it."""
        return self.row.has_loss_kl or (self.weight_decay > 0 and not OPTIMIZERS[self.optimizer].decoupled)

    @property
    def needs_reference(self) -> bool:
        """True when a KL term or a score compares with a frozen reference policy, and under a learned reward, which was
        trained on answers near the reference."""
        return self.row.needs_reference or self.learned is not None

    @property
    def free(self) -> frozenset[str]:
        """Settings that may change when the run is resumed, because no step's result depends on them."""
        # A schedule knows where the run ends, and a user's own estimator may: it can read tools.progress.
        name, options = parse(self.estimator)
        follows = name not in ESTIMATORS or any(options.get(key) == value
                                                for key, value in ESTIMATORS[name].scheduled.items())
        scheduled = self.schedule != "constant" or follows
        longer: set[str] = set() if scheduled else {"steps", "rollouts"}
        if ADAPTS[parse_adapt(self.adapt)[0]].spends:  # by the budget it was given at the start
            longer -= {"rollouts"}
        # What does not scale with reward must be followed from the first step on.
        looks: set[str] = {"probe_every"} if self.unscaled else {"probe", "probe_every"}
        return frozenset({"log", "checkpoint_every", "keep_every", "keep_most", "also"} | longer | looks)

    def learning_rate(self, step: int) -> float:
        """lr of a step: linear warm-up, then the schedule's decay."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        factor = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[self.schedule]
        return self.lr * factor


def flags(config: Mapping[str, Any]) -> list[str]:
    """The words of `creditscope lab train` that give these settings: what is not a default. Settings that this version
    does not know are left out.

    >>> flags({"model": "tiny", "group": 4, "also": ["salt"], "log": [], "clip_norm": None, "recompute": True})
    ['tiny', '--group', '4', '--clip-norm', 'None', '--recompute', '--also', 'salt']
    """
    words = [str(config.get("model", "tiny"))]
    for f in fields(Config):
        value = config.get(f.name, f.default)
        values = value if isinstance(value, list | tuple) else [] if value is True else [value]
        if f.name != "model" and value != f.default and tuple(values) != f.default:
            words += [flag(f.name), *map(str, values)]
    return words
