"""Every setting of a training run, with what it means. The command line is made from this class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from creditscope.credit.table import ESTIMATORS, parse
from creditscope.errors import CreditscopeError, unknown
from creditscope.methods.axes import Method
from creditscope.methods.find import find
from creditscope.optimizer.table import BRAKES, OPTIMIZERS, parse_brake
from creditscope.runs.adapt import ADAPTS, Setting, check_adapt, parse_adapt

MOST_DRAWS = 99
LARGEST = 2**63 - 1
MOST = 1e12
"""Largest rate, norm or factor: the product of two is still a number in float32."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to train, on what, how."""

    model: str = "tiny"
    """tiny (packaged), a folder in Hugging Face format, a .gguf file, or owner/name on the hub."""
    task: str = "arithmetic"
    """arithmetic; turns; gsm8k:FILE, gsm8k:FOLDER or gsm8k:OWNER/NAME; jsonl:FILE (with --reward)."""
    reward: str | None = None
    """module:function for --task jsonl: f(text, row) -> reward, or (reward, steps) for credit by steps, each step
    [start, end, reward] or [start, end, reward, state]; row is the line of the file as a dict; 5 s an answer."""
    method: str = "grpo"
    """A row of the table: creditscope methods."""
    beta: float | None = None
    """Weight of the method's KL term; by default the row's own, which is 0 for most."""
    credit: str | None = None
    """Who gets the credit: a name of the list (creditscope credit), with options after commas (monte_carlo,samples=8),
    or your own module:function. By default outcome, and gae for methods that take their credit from a critic."""
    critic: str = "head"
    """The critic of --credit gae: head (a value head on the policy) or model (a copy of the policy with its own)."""
    critic_lr: float | None = None
    """Learning rate of the critic; by default 1e-3 for a head, 3e-4 for a model."""
    critic_warmup: int = 0
    """Steps at the start in which the critic alone learns."""

    group: int = 8
    """R, rollouts per prompt."""
    prompts: int = 8
    """P, prompts per step."""
    steps: int = 60
    """Batches to sample."""
    rollouts: int = 0
    """Stop once so many rollouts were spent, continuations for values included; 0 stops after --steps alone."""
    inner_steps: int = 1
    """μ, passes over each batch."""
    minibatches: int = 1
    """Optimiser steps per pass: the groups are dealt out evenly."""
    accumulate: int = 1
    """Micro-batches per optimiser step: less memory, the same gradient, one more forward pass."""
    adapt: str = "none"
    """When R or the credit changes on the way: none; raise_group or denser_credit, when the effective rank falls;
    late_group, the control, when half of --rollouts was spent; with options after commas (raise_group,most=16)."""
    resample: int = 3
    """How often a step may replace unanimous groups by fresh prompts, for methods that drop them (DAPO)."""

    optimizer: str = "adamw"
    """adamw, adam (its weight decay is L2, inside the moments) or sgd."""
    lr: float = 3e-5
    """Learning rate."""
    schedule: str = "constant"
    """constant, linear or cosine decay to 0 over --steps."""
    warmup: int = 0
    """Steps of linear warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay (AdamW), or L2 (Adam, SGD)."""
    momentum: float = 0.0
    """Momentum of SGD."""
    beta1: float = 0.9
    """Decay of Adam's first moment; 0 for no momentum."""
    beta2: float = 0.999
    """Decay of Adam's second moment."""
    eps: float = 1e-8
    """ε of Adam, beside which small gradients no longer count."""
    clip_norm: float | None = 1.0
    """Largest gradient norm, or None."""
    brake: str = "none"
    """What holds tokens at their bound over several --inner-steps: none, recall, shorten, restart or kl_stop, with
    options after commas (shorten,share=0.02): creditscope optimizer --brakes."""

    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Nucleus sampling. Below 1 the training forward no longer has the sampler's distribution; the gap is reported."""
    max_tokens: int | None = None
    """Longest completion; by default the task's."""

    seed: int = 0
    """Fixes prompts, samples and adapters. On a CPU two runs with one seed are equal bit by bit."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 ..."""
    dtype: str = "float32"
    """float32, bfloat16 or float64."""
    lora: int = 0
    """Rank of LoRA adapters to train in place of the weights; 0 trains the weights."""
    chat: str = "auto"
    """on, off, or auto: wrap prompts in the chat template where the tokenizer has one."""

    scope: str = "off"
    """off; light: the exact Gram of per-rollout gradients inside each backward pass; full: also the unweighted scores
    (a second pass), nulls, the optimal baseline, spectra of each layer's gradient, and the path over steps."""
    every: int = 1
    """Steps between readings of the microscope."""
    also: tuple[str, ...] = ()
    """Other credits, written as for --credit, under which each reading looks at the same rollouts. Each takes a pass
    from which nothing is learnt, and what it samples is not counted as spent."""
    probe: str = "light"
    """What the optimiser does to the credit: off; light: overshoot, reward scale and update geometry, from what the
    step has at hand; full: also a forward pass after the last update, what momentum did to the overshoot (a backward
    pass), every coordinate, and the sweep over reward scales."""
    probe_every: int = 30
    """Steps between the readings of --probe that need a pass of their own, or the whole model."""

    eval_every: int = 0
    """Steps between evaluations on the test split; 0 evaluates before the first and after the last step."""
    eval_rollouts: int = 0
    """Rollouts between evaluations, for runs that are compared by what they spend; 0 for none of these."""
    eval_problems: int = 400
    """Test problems per evaluation; 0 for none."""
    eval_seed: int = 0
    """Random numbers of the evaluations: the same for every --seed, so that runs differ by what they learnt."""
    checkpoint_every: int = 20
    """Steps between checkpoints."""
    keep_every: int = 10
    """Steps between kept rollouts (groups/*.npz); 0 keeps none."""
    keep_most: int = 0
    """Most files of each kind (groups, scope, optimizer) that are kept, spread evenly over the run: each time there
    would be more, every second goes. 0 keeps all."""
    log: tuple[str, ...] = ()
    """Trackers by name (tensorboard, wandb, trackio, mlflow), through accelerate."""

    def __post_init__(self) -> None:
        for f in fields(Config):
            _check_kind(f.name, str(f.type), getattr(self, f.name))
        at_least = dict.fromkeys(("group", "prompts", "steps", "inner_steps", "minibatches", "accumulate",
                                  "checkpoint_every", "every", "probe_every"), 1)
        at_least |= dict.fromkeys(("resample", "warmup", "eval_every", "rollouts", "eval_rollouts", "eval_problems",
                                   "keep_every", "keep_most", "lora", "critic_warmup"), 0)
        for name, low in at_least.items():
            if getattr(self, name) < low:
                raise CreditscopeError(f"--{name.replace('_', '-')} must be at least {low}, got {getattr(self, name)}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise CreditscopeError(f"--max-tokens must be at least 1, got {self.max_tokens}; or leave it out")
        for name in ("seed", "eval_seed"):
            if not 0 <= getattr(self, name) < 2**31:
                flag = name.replace("_", "-")
                raise CreditscopeError(f"--{flag} must be in 0 .. 2^31 - 1, got {getattr(self, name)}")
        if self.resample > MOST_DRAWS:
            raise CreditscopeError(f"--resample must be at most {MOST_DRAWS}, got {self.resample}: each draw of a step "
                                   f"has random numbers of its own, and they are dealt out for so many")
        if not 0 < self.top_p <= 1:
            raise CreditscopeError(f"--top-p must be above 0 and at most 1, got {self.top_p}; 1 keeps every token")
        for name in ("lr", "weight_decay", "momentum", "beta1", "beta2", "eps", "temperature", "clip_norm", "beta",
                     "critic_lr"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MOST:
                raise CreditscopeError(f"--{name.replace('_', '-')} must be a number from 0 to {MOST:g}, got {value}")
        for name in ("momentum", "beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise CreditscopeError(f"--{name} must be below 1, got {getattr(self, name)}")
        if not self.lr > 0:
            raise CreditscopeError(f"--lr must be above 0, got {self.lr}")
        if not self.temperature > 0:
            raise CreditscopeError(f"--temperature must be above 0 to train on samples, got {self.temperature}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise CreditscopeError(f"--clip-norm must be above 0 or None, got {self.clip_norm}")
        for name, choices in {"optimizer": tuple(OPTIMIZERS), "schedule": ("constant", "linear", "cosine"),
                              "chat": ("auto", "on", "off"), "scope": ("off", "light", "full"),
                              "probe": ("off", "light", "full"), "critic": ("head", "model")}.items():
            if getattr(self, name) not in choices:
                raise unknown(f"--{name}", getattr(self, name), choices)
        if self.minibatches > self.prompts:
            raise CreditscopeError(f"--minibatches {self.minibatches} cannot deal out --prompts {self.prompts} groups; "
                                   f"give at most one minibatch a prompt")
        if self.scope != "off" and self.accumulate > self.prompts // self.minibatches:
            raise CreditscopeError(f"--scope {self.scope} compares rollouts inside one micro-batch, but --accumulate "
                                   f"{self.accumulate} would cut groups apart: --prompts {self.prompts} and "
                                   f"--minibatches {self.minibatches} allow at most {self.prompts // self.minibatches}")
        if self.row.centred and self.group < 2:
            raise CreditscopeError(f"--group {self.group}: method {self.method!r} compares a rollout with its group, "
                                   f"so a group of one has advantage 0; give --group 2 or more, or --method reinforce")
        memory = OPTIMIZERS[self.optimizer].memory
        if self.momentum and memory != "momentum":
            raise CreditscopeError(f"--momentum {self.momentum} is SGD's; --optimizer {self.optimizer} has --beta1")
        BRAKES[parse_brake(self.brake)[0]].require(self.row, self.inner_steps * self.minibatches,
                                                   getattr(self, memory))
        self._check_credit()
        self._check_also()
        check_adapt(self.adapt, Setting(self.group, self.estimator), self.rollouts, self.scope,
                    readings=math.ceil((self.steps - self.critic_warmup) / self.every))
        for flag, spec in self._others:
            try:
                self.under(spec)
            except CreditscopeError as error:
                raise CreditscopeError(f"{flag} {spec}: {error}") from None

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
                                   f"has none; choose gae, or another that is made from rewards: creditscope credit")
        if "gram" in row.needs and self.accumulate > self.prompts:
            raise CreditscopeError(f"--credit {name} compares the rollouts of a group in one backward pass, but "
                                   f"--accumulate {self.accumulate} would cut groups apart; give at most "
                                   f"{self.prompts}")
        if row.siblings and self.group < 2:
            raise CreditscopeError(f"--group {self.group}: --credit {name} compares a rollout with its siblings; give "
                                   f"--group 2 or more")
        if "collision" in row.needs and self.top_p < 1:
            raise CreditscopeError(f"--top-p {self.top_p}: --credit {name} reads Σπ² of the distribution before top-p, "
                                   f"and the log-probs after it; give --top-p 1")
        if self.critic_warmup and "critic" not in row.needs:
            raise CreditscopeError(f"--critic-warmup {self.critic_warmup}: --credit {name} has no critic; use --credit "
                                   f"gae, or leave it out")

    def _check_also(self) -> None:
        if self.also and self.scope == "off":
            raise CreditscopeError(f"--also {' '.join(self.also)}: other credits are read under the microscope, and "
                                   f"--scope is off; give --scope light")
        for spec in self.also:
            if self.also.count(spec) > 1:
                raise CreditscopeError(f"--also {spec} is given twice; a reading needs it once")

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
        if row.kl == "none":
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
        """True when the KL term compares with a frozen reference policy."""
        return self.row.beta != 0.0 and self.row.kl_to == "ref"

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


def _check_kind(name: str, kind: str, value: Any) -> None:
    """Refuse a value that is not what the field says: a record is a file, and anybody may have written it."""
    first, *rest = kind.split(" | ")
    if first == "tuple[str, ...]":
        right = isinstance(value, tuple) and all(isinstance(word, str) for word in value)
    else:
        right = isinstance(value, {"str": str, "int": int, "float": int | float}[first]) and not isinstance(value, bool)
    huge = isinstance(value, int) and abs(value) > LARGEST
    if not (right or (rest and value is None)) or huge:
        what = {"str": "a text", "int": "a whole number below 2^63", "float": "a number"}.get(first, "a list of texts")
        raise CreditscopeError(f"--{name.replace('_', '-')} must be {what}{' or None' if rest else ''}, got "
                               f"{f'one of {value.bit_length():,} bits' if huge else f'{value!r:.60}'}")


def flags(config: Mapping[str, Any]) -> list[str]:
    """The words of `creditscope train` that give these settings: what is not a default. Settings that this version does
    not know are left out.

    >>> flags({"model": "tiny", "group": 4, "also": ["salt"], "log": [], "clip_norm": None})
    ['tiny', '--group', '4', '--clip-norm', 'None', '--also', 'salt']
    """
    words = [str(config.get("model", "tiny"))]
    for f in fields(Config):
        value = config.get(f.name, f.default)
        values = value if isinstance(value, list | tuple) else [value]
        if f.name != "model" and value != f.default and tuple(values) != f.default:
            words += [f"--{f.name.replace('_', '-')}", *map(str, values)]
    return words
