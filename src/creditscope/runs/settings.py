"""The settings of a training run in six groups, each with the rules that its own values must follow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from creditscope.errors import CreditscopeError, unknown
from creditscope.optimizer.table import OPTIMIZERS

MOST_DRAWS = 99
LEARNED = "model:"
"""What --reward begins with where a model gives the reward."""
LARGEST = 2**63 - 1
MOST = 1e12
"""Largest rate, norm or factor: the product of two is still a number in float32."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What learns what: the model, the task, the method and its credit."""

    model: str = "tiny"
    """tiny (packaged), a folder in Hugging Face format, a .gguf file, or owner/name on the hub."""
    task: str = "arithmetic"
    """arithmetic; turns; gsm8k:FILE, gsm8k:FOLDER or gsm8k:OWNER/NAME; jsonl:FILE (with --reward)."""
    reward: str | None = None
    """module:function for --task jsonl: f(text, row) -> reward, or (reward, steps) for credit by steps, each step
    [start, end, reward] or [start, end, reward, state]; row is the line of the file as a dict; 5 s an answer. For any
    other task model:FOLDER, a learned reward (creditscope lab reward), beside which the task's verifier is recorded."""
    answer: str = "strict"
    """Which number of a text is its answer, for arithmetic and gsm8k: strict, the one that is marked (####, or a box in
    gsm8k); flexible, where none is marked, the last one."""
    method: str = "grpo"
    """A row of the table: creditscope list methods."""
    pairs: str | None = None
    """A file of preference pairs in TRL's format (prompt, chosen, rejected, as text or messages), learnt from in place
    of sampled answers: --prompts pairs per step, for methods of pairs such as dpo. --task evaluates alone."""
    beta: float | None = None
    """Weight of the method's KL term, or factor on the scores of a preference method; by default the row's own."""
    credit: str | None = None
    """Who gets the credit: a name of the list (creditscope list credits), with options after commas
    (monte_carlo,samples=8), or your own module:function. By default outcome, and gae for methods that take
    their credit from a critic."""
    critic: str = "head"
    """The critic of --credit gae: head (a value head on the policy) or model (a copy of the policy with its own)."""
    critic_lr: float | None = None
    """Learning rate of the critic; by default 1e-3 for a head, 3e-4 for a model."""
    critic_warmup: int = 0
    """Steps at the start in which the critic alone learns."""

    def check(self) -> None:
        at_least(self, 0, "critic_warmup")
        in_range(self, "critic_lr")
        one_of(self, "critic", ("head", "model"))
        one_of(self, "answer", ("strict", "flexible"))
        if self.learned == "":
            raise CreditscopeError(f"--reward {self.reward} names no folder; write --reward model:FOLDER, a folder of "
                                   f"creditscope lab reward")
        if self.learned is not None and self.task.partition(":")[0] == "jsonl":
            raise CreditscopeError(f"--reward {self.reward}: task 'jsonl' has no verifier to record beside a learned "
                                   f"reward; give it your own, --reward module:function, or choose another --task")

    @property
    def learned(self) -> str | None:
        """The folder of a learned reward; None where the task's verifier gives the reward."""
        return learned_reward(self.reward)

    @property
    def task_options(self) -> dict[str, Any]:
        """What `tasks.find_task` is given besides --task: the settings that are not defaults."""
        given = {"reward": None if self.learned else self.reward, "answer": self.answer}
        return {name: value for name, value in given.items() if value != getattr(Subject, name)}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How much is sampled, and what a batch is used for."""

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
    """Micro-batches per optimiser step: less memory, the same gradient, one more forward pass. More than --prompts cut
    groups apart: a reading is as exact then, by passes of its own. Of a group cut into M parts of an even number of
    rows they cost 2M − 1 times a pass over the group; of an odd number, up to 3M times."""
    adapt: str = "none"
    """When R or the credit changes on the way: none; raise_group or denser_credit, when the effective rank falls;
    late_group, the control, when half of --rollouts was spent; with options after commas (raise_group,most=16)."""
    resample: int = 3
    """How often a step may replace unanimous groups by fresh prompts, for methods that drop them (DAPO)."""

    def check(self) -> None:
        at_least(self, 1, "group", "prompts", "steps", "inner_steps", "minibatches", "accumulate")
        at_least(self, 0, "resample", "rollouts")
        if self.resample > MOST_DRAWS:
            raise CreditscopeError(f"--resample must be at most {MOST_DRAWS}, got {self.resample}: each draw of a step "
                                   f"has random numbers of its own, and they are dealt out for so many")
        if self.minibatches > self.prompts:
            raise CreditscopeError(f"--minibatches {self.minibatches} cannot deal out --prompts {self.prompts} groups; "
                                   f"give at most one minibatch per prompt")


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """The optimiser, its learning rate over the run, and its brake."""

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
    options after commas (shorten,share=0.02): creditscope list brakes."""

    def check(self) -> None:
        at_least(self, 0, "warmup")
        in_range(self, "lr", "weight_decay", "momentum", "beta1", "beta2", "eps", "clip_norm")
        for name in ("momentum", "beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise CreditscopeError(f"--{name} must be below 1, got {getattr(self, name)}")
        if not self.lr > 0:
            raise CreditscopeError(f"--lr must be above 0, got {self.lr}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise CreditscopeError(f"--clip-norm must be above 0 or None, got {self.clip_norm}")
        one_of(self, "optimizer", OPTIMIZERS)
        one_of(self, "schedule", ("constant", "linear", "cosine"))
        if self.momentum and OPTIMIZERS[self.optimizer].memory != "momentum":
            raise CreditscopeError(f"--momentum {self.momentum} is SGD's; --optimizer {self.optimizer} has --beta1")

    @property
    def memory(self) -> float:
        """The decay of the optimiser's first moment, 0 for none."""
        decay: float = getattr(self, OPTIMIZERS[self.optimizer].memory)
        return decay


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The policy as a sampler, and where it runs."""

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
    """float32, float64 or bfloat16, which samples and differentiates in bfloat16 and trains float32 copies of the
    weights."""
    recompute: bool = False
    """Keep each layer's input alone and compute its activations again in the backward pass: less memory, the same
    gradient, about one more forward pass."""
    lora: int = 0
    """Rank of LoRA adapters to train in place of the weights; 0 trains the weights."""
    chat: str = "auto"
    """on, off, or auto: wrap prompts in the chat template where the tokenizer has one."""

    def check(self) -> None:
        at_least(self, 0, "lora")
        seeds(self, "seed")
        in_range(self, "temperature")
        one_of(self, "chat", ("auto", "on", "off"))
        if self.max_tokens is not None and self.max_tokens < 1:
            raise CreditscopeError(f"--max-tokens must be at least 1, got {self.max_tokens}; or leave it out")
        if not 0 < self.top_p <= 1:
            raise CreditscopeError(f"--top-p must be above 0 and at most 1, got {self.top_p}; 1 keeps every token")
        if not self.temperature > 0:
            raise CreditscopeError(f"--temperature must be above 0 to train on samples, got {self.temperature}")


@dataclass(frozen=True, kw_only=True)
class Looking:
    """What is read of a step besides its own numbers."""

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

    def check(self) -> None:
        at_least(self, 1, "every", "probe_every")
        one_of(self, "scope", ("off", "light", "full"))
        one_of(self, "probe", ("off", "light", "full"))
        if self.also and self.scope == "off":
            raise CreditscopeError(f"--also {' '.join(self.also)}: other credits are read under the microscope, and "
                                   f"--scope is off; give --scope light")
        for spec in self.also:
            if self.also.count(spec) > 1:
                raise CreditscopeError(f"--also {spec} is given twice; a reading needs it once")


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Evaluations, checkpoints and what stays on disk."""

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

    def check(self) -> None:
        at_least(self, 1, "checkpoint_every")
        at_least(self, 0, "eval_every", "eval_rollouts", "eval_problems", "keep_every", "keep_most")
        seeds(self, "eval_seed")


def learned_reward(reward: str | None) -> str | None:
    """The folder of `model:FOLDER`; None for any other reward.

    >>> learned_reward("model:runs/reward"), learned_reward("my_rewards:score")
    ('runs/reward', None)
    """
    return reward.removeprefix(LEARNED) if reward is not None and reward.startswith(LEARNED) else None


GROUPS = (Subject, Schedule, Optimiser, Sampling, Looking, Keeping)


def flag(name: str) -> str:
    """A setting as the command line spells it."""
    return f"--{name.replace('_', '-')}"


def at_least(settings: Any, low: int, *names: str) -> None:
    for name in names:
        if getattr(settings, name) < low:
            raise CreditscopeError(f"{flag(name)} must be at least {low}, got {getattr(settings, name)}")


def in_range(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 <= value <= MOST:
            raise CreditscopeError(f"{flag(name)} must be a number from 0 to {MOST:g}, got {value}")


def one_of(settings: Any, name: str, choices: Iterable[str]) -> None:
    if getattr(settings, name) not in choices:
        raise unknown(flag(name), getattr(settings, name), choices)


def seeds(settings: Any, name: str) -> None:
    if not 0 <= getattr(settings, name) < 2**31:
        raise CreditscopeError(f"{flag(name)} must be in 0 .. 2^31 - 1, got {getattr(settings, name)}")


def check_kind(name: str, kind: str, value: Any) -> None:
    """Refuse a value that is not what the field says: a record is a file, and anybody may have written it."""
    first, *rest = kind.split(" | ")
    if first == "tuple[str, ...]":
        right = isinstance(value, tuple) and all(isinstance(word, str) for word in value)
    elif first == "bool":
        right = isinstance(value, bool)
    else:
        right = isinstance(value, {"str": str, "int": int, "float": int | float}[first]) and not isinstance(value, bool)
    huge = isinstance(value, int) and abs(value) > LARGEST
    if not (right or (rest and value is None)) or huge:
        what = {"str": "a text", "int": "a whole number below 2^63", "float": "a number",
                "bool": "True or False"}.get(first, "a list of texts")
        raise CreditscopeError(f"{flag(name)} must be {what}{' or None' if rest else ''}, got "
                               f"{f'one of {value.bit_length():,} bits' if huge else f'{value!r:.60}'}")
