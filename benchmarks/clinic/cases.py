"""The clinic's table: one row per case, each one change to a healthy setting that learns.

A case has the causes that a right diagnosis may name first (names of rules, the expected one first), the change for
each engine, and the remedy: the one further change that a right diagnosis implies. `half` is fixed here, before any
threshold is set. No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

STEPS = 40
SEEDS = (0, 1, 2)
LIMIT = 80

TRL_BASE: Mapping[str, Any] = {
    "learning_rate": 2e-4, "max_steps": STEPS, "num_generations": 8, "per_device_train_batch_size": 64,
    "max_completion_length": LIMIT, "loss_type": "dapo", "beta": 0.0, "logging_steps": 1}
"""GRPOConfig of the healthy TRL run; what is not named is TRL's default (linear decay, one update per batch)."""

LAB_BASE: Mapping[str, Any] = {
    "lr": 2e-4, "steps": STEPS, "group": 8, "prompts": 8, "method": "grpo", "max_tokens": LIMIT, "schedule": "linear",
    "scope": "light", "probe": "light", "every": 5, "probe_every": 5, "eval_every": 10, "eval_problems": 64,
    "keep_every": 0, "checkpoint_every": 1000}
"""Config of the healthy lab run."""

REAL_BASE: Mapping[str, Any] = {
    "lr": 2e-6, "steps": 24, "group": 8, "prompts": 8, "method": "grpo", "temperature": 0.7, "max_tokens": 300,
    "accumulate": 8, "scope": "light", "probe": "light", "every": 4, "probe_every": 4, "eval_problems": 200,
    "keep_every": 8, "checkpoint_every": 1000}
"""Config of the lab's run of a real model, Qwen2.5-Coder-0.5B-Instruct on GSM8K, which learns."""

REAL: Mapping[str, Mapping[str, Any]] = {
    "plain": {}, "adam-epsilon": {"eps": 1.0}, "lr-high": {"lr": 2e-4}, "reward-shuffled": {},
    "cut": {"max_tokens": 60}}
"""Case -> its change of REAL_BASE; the reward is the case's own."""

USUAL_LR = 5e-5
"""The remedy for a learning rate: the default of transformers' TrainingArguments, not the healthy run's value."""

BF16_LR = 2e-5
"""float32 still learns; in bfloat16 every weight above 0.008 stays where it is, since half its spacing is 3e-5."""

Kind = Literal["fault", "healthy"]
Half = Literal["tune", "seen", "held-out"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """What differs from the healthy setting."""

    trl: Mapping[str, Any] = field(default_factory=dict)
    """Settings of GRPOConfig."""
    lab: Mapping[str, Any] = field(default_factory=dict)
    """Settings of creditscope's Config."""
    reward: str = "right"
    """A function of rewards.py."""
    data: str = "all"
    """all; hard: larger numbers; easy: one step, from prompts.json; four: the first four problems."""
    model: str = "plain"
    """plain; bf16: weights in bfloat16; frozen: the last norm alone is trained."""
    hook: str = ""
    """TRL alone. short-schedule: the scheduler is made for SHORT steps."""


SHORT = 4
"""Steps of the scheduler under `short-schedule`."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table."""

    name: str
    kind: Kind
    change: Change
    causes: tuple[str, ...] = ()
    """Rules that may be the first cause, the expected one first; () for a healthy case."""
    remedy: Change | None = None
    """The whole setting after the remedy; None where one change does not repair the run."""
    engines: tuple[str, ...] = ("trl", "lab")
    evals: bool = True
    """Whether the TRL run evaluates held-out prompts every ten steps; half of the users do."""
    note: str = ""
    """Measured effect, or why the case is here."""


def fault(name: str, causes: str, change: Change, remedy: Change | None = None, **more: Any) -> Case:
    return Case(name=name, kind="fault", causes=tuple(causes.split(" | ")), change=change, remedy=remedy, **more)


def healthy(name: str, change: Change, **more: Any) -> Case:
    return Case(name=name, kind="healthy", change=change, **more)


def both(trl: Mapping[str, Any], lab: Mapping[str, Any] | None = None, **more: Any) -> Change:
    """A change by settings; without `lab` the case is TRL's alone."""
    return Change(trl=trl, lab=lab or {}, **more)


PLAIN = Change()
TRL_ONLY: dict[str, Any] = {"engines": ("trl",)}
LAB_ONLY: dict[str, Any] = {"engines": ("lab",)}
LR = both({"learning_rate": USUAL_LR}, {"lr": USUAL_LR})

CASES: tuple[Case, ...] = (
    # -- the optimiser moves nothing ------------------------------------------------------------------------------
    fault("lr-tiny", "learning rate", both({"learning_rate": 1e-9}, {"lr": 1e-9}), LR),
    fault("warmup-long", "learning rate", both({"warmup_steps": 20_000}, {"warmup": 20_000}),
          both({"warmup_steps": 6}, {"warmup": 6}), evals=False),
    fault("schedule-dead", "learning rate", Change(hook="short-schedule"), PLAIN, **TRL_ONLY),
    fault("adam-epsilon", "epsilon | small steps", both({"adam_epsilon": 1.0}, {"eps": 1.0}), PLAIN),
    fault("bf16-weights", "rounding", both({"learning_rate": BF16_LR}, {"lr": BF16_LR, "dtype": "bfloat16"},
                                              model="bf16"),
          both({"learning_rate": BF16_LR}, {"lr": BF16_LR}), evals=False,
          note="TRL at 3e-6: accuracy +0.004 in 40 steps"),
    fault("sgd", "small steps | learning rate", both({"optim": "sgd"}, {"optimizer": "sgd"}), PLAIN),
    fault("grad-clip", "gradient clip", both({"max_grad_norm": 1e-9}, {"clip_norm": 1e-9}),
          both({"max_grad_norm": 1.0}, {"clip_norm": 1.0}), evals=False),
    fault("frozen", "frozen", Change(model="frozen"), PLAIN),
    fault("kl-heavy", "KL pull", both({"beta": 100.0}, {"beta": 100.0}), both({"beta": 0.001}, {"beta": 0.001}),
          note="TRL, seed 0, β = 10: accuracy +0.02, reward 0.52 to 0.57"),
    fault("clip-closed", "clip", both({"epsilon": 1e-7, "num_iterations": 8, "max_steps": 64}),
          both({"epsilon": 0.2, "num_iterations": 8, "max_steps": 64}), evals=False, **TRL_ONLY),
    # -- the optimiser moves too far ------------------------------------------------------------------------------
    fault("lr-high", "step size", both({"learning_rate": 2e-3}, {"lr": 2e-3}), LR),
    fault("many-updates", "updates | step size", both({"num_iterations": 16, "max_steps": 16 * 8},
                                                      {"inner_steps": 16, "steps": 10}), PLAIN, evals=False),
    fault("weight-decay", "weight decay", both({"weight_decay": 300.0}, {"weight_decay": 300.0}),
          both({"weight_decay": 0.0}, {"weight_decay": 0.0})),
    # -- the reward -----------------------------------------------------------------------------------------------
    fault("reward-zero", "reward constant | dead groups", Change(reward="zero"), PLAIN),
    fault("reward-one", "reward constant | dead groups", Change(reward="one"), PLAIN, evals=False),
    fault("reward-shuffled", "reward noise", Change(reward="shuffled"), PLAIN),
    fault("reward-noise", "reward noise", Change(reward="noise"), PLAIN, evals=False),
    fault("reward-missing", "reward missing", Change(reward="missing"), PLAIN),
    fault("reward-inverted", "held out", Change(reward="inverted"), PLAIN),
    fault("reward-other", "too hard | reward constant | dead groups | reward noise", Change(reward="other"), PLAIN),
    fault("reward-length", "reward length", Change(reward="length"), PLAIN),
    fault("form", "form | too hard | reward constant", Change(reward="form"), PLAIN),
    fault("by-prompt", "dead groups | reward constant", Change(reward="by_prompt"), PLAIN),
    # -- contrast -------------------------------------------------------------------------------------------------
    fault("cold", "cold sampler", both({"temperature": 0.05}, {"temperature": 0.05}),
          both({"temperature": 1.0}, {"temperature": 1.0}), evals=False),
    fault("top-p", "cold sampler", both({"top_p": 0.05}, {"top_p": 0.05}), both({"top_p": 1.0}, {"top_p": 1.0})),
    fault("top-k", "cold sampler", both({"top_k": 1}), both({"top_k": 0}), evals=False, **TRL_ONLY),
    fault("hot", "hot sampler", both({"temperature": 5.0}, {"temperature": 5.0}),
          both({"temperature": 1.0}, {"temperature": 1.0})),
    fault("cut", "truncation", both({"max_completion_length": 12}, {"max_tokens": 12}),
          both({"max_completion_length": 128}, {"max_tokens": 128})),
    fault("cut-masked", "truncation", both({"max_completion_length": 12, "mask_truncated_completions": True}),
          both({"max_completion_length": 128, "mask_truncated_completions": True}), evals=False, **TRL_ONLY),
    fault("too-hard", "too hard", Change(data="hard"), Change(data="all"), evals=False),
    fault("too-easy", "too easy", Change(data="easy"), Change(data="all")),
    fault("four-prompts", "memorised", Change(data="four"), Change(data="all"), **LAB_ONLY,
          note="TRL makes no step of fewer prompts than a batch has"),
    # -- healthy, some odd ----------------------------------------------------------------------------------------
    healthy("plain", PLAIN, note="loss near 0, clip ratio 0. Seed 0: TRL 0.527 to 0.630, lab 0.527 to 0.585"),
    healthy("constant-lr", both({"lr_scheduler_type": "constant"}, {"schedule": "constant"})),
    healthy("two-iterations", both({"num_iterations": 2, "max_steps": 2 * STEPS}, {"inner_steps": 2}), evals=False),
    healthy("small-rewards", Change(reward="thousandth"), note="rewards × 1e-3"),
    healthy("negative-rewards", Change(reward="minus_one"), note="rewards −1 and 0", evals=False),
    healthy("levels", Change(reward="levels"), note="reward: share of right lines and the answer"),
    healthy("small-group", both({"num_generations": 4}, {"group": 4, "prompts": 16})),
    healthy("cool", both({"temperature": 0.7}, {"temperature": 0.7}), note="low entropy from the start", evals=False),
    healthy("small-kl", both({"beta": 0.001}, {"beta": 0.001})),
    healthy("dr-grpo", both({"loss_type": "dr_grpo", "scale_rewards": "none"}, {"method": "dr_grpo"})),
    healthy("rloo", both({"loss_type": "dr_grpo", "scale_rewards": "none", "learning_rate": 1.5e-4},
                         {"method": "rloo"}), evals=False, engines=("lab",)),
    healthy("gspo", both({"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4,
                          "epsilon_high": 4e-4}, {"method": "gspo"})),
    healthy("cispo", both({"loss_type": "cispo", "epsilon_high": 5.0}, {"method": "cispo"}), evals=False),
    healthy("dapo", both({"loss_type": "dapo", "epsilon_high": 0.28}, {"method": "dapo"}), engines=("lab",)),
    healthy("long-limit", both({"max_completion_length": 128}, {"max_tokens": 128}), evals=False),
    healthy("sgd-suited", both({"optim": "sgd", "learning_rate": 0.1}, {"optimizer": "sgd", "lr": 0.1}),
            note="TRL, seed 0, accuracy in 40 steps: +0.02 at 0.03, −0.49 at 0.5"),
    healthy("decay", both({"weight_decay": 0.1}, {"weight_decay": 0.1}), evals=False),
)
BY_NAME = {case.name: case for case in CASES}


def half(case: Case, seed: int) -> Half:
    """Half of the cases, by the hash of their name, are held out; of the others, seed 2 is.

    The first cases of each kind by hash are held out, so that both kinds are cut in half. Seed 0 of the held-out cases
    is `seen`: it was judged first, and some of its misses were repaired before seeds 1 and 2 were made.
    """
    mine = sorted((c for c in CASES if c.kind == case.kind), key=lambda c: _hash(c.name))
    if case in mine[:len(mine) // 2]:
        return "held-out" if seed else "seen"
    return "held-out" if seed == 2 else "tune"


def _hash(name: str) -> str:
    return hashlib.blake2b(f"clinic/{name}".encode(), digest_size=8).hexdigest()
