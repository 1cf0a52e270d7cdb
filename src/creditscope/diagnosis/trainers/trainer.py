"""What is known of a trainer: its names of metrics and settings, its defaults, and what settings imply."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from creditscope.diagnosis.log import LogSettings as Settings
from creditscope.methods.axes import Method
from creditscope.runs import schema

FACTS = {
    "method": "the row of the table that the settings make, or None",
    "loss": "the same in the trainer's own words",
    "updates": "optimiser steps on each batch of rollouts: at 1 every ratio is 1; None where it is not known",
    "beta": "weight of the KL term in the loss; None where the log shows one of unknown weight",
    "group": "R, rollouts per prompt",
    "limit": "most tokens of an answer, where the logged share of cut ones is relative to the longest; else None",
    "masked": "whether truncated answers are left out of the loss",
    "ceiling": "CISPO's ceiling on the ratio, or None",
    "dropped": "whether dead groups are dropped before the loss",
    "dead_counted": "whether the logged share of dead groups counts groups",
    "per_token": "whether the logged entropy is nats per token",
    "sampler": "whether another engine than the trainer's own forward draws the samples",
    "horizon": "the constant that divides each answer's token sum, or None",
}
"""Name -> meaning. Every trainer has all of them."""
SETTINGS = {
    "learning_rate": "the largest learning rate of the schedule",
    "adam_epsilon": "Adam's ε",
    "weight_decay": "λ of AdamW",
    "grad_clip": "the norm that gradients are clipped to",
    "optimizer": "its name",
    "temperature": "of the sampler",
    "top_p": "of the sampler; 1 for the whole distribution",
    "top_k": "of the sampler; 0 or below for the whole vocabulary",
    "clip_low": "1 − ε_low is the lower bound of the ratio",
    "clip_high": "1 + ε_high is the upper bound of the ratio",
    "steps": "optimiser steps that were planned",
    "dtype": "of the weights",
    "limit": "most tokens of an answer",
    "group": "R, rollouts per prompt",
    "lora": "rank of the adapters that are trained in place of the weights; 0 for none",
}
"""Settings that rules read as they are -> meaning. A trainer need not have all."""
WORDS = {
    "beta": "weight of the KL term",
    "epochs": "passes over each batch of rollouts",
    "minibatch": "rollouts or prompts of one optimiser step",
    "prompts": "prompts of one batch",
    "warmup": "steps until the learning rate is whole",
    "schedule": "of the learning rate",
    "drop": "the setting that leaves unanimous groups out, with its value",
    "dump": "the setting that writes answers to a file, with its value",
    "master": "the setting that keeps weights in float32, with its value",
    "correction": "the setting that corrects for a sampler that is not the trainer, with its value",
    "even": "the setting that averages over tokens and not over answers, with its value",
}
"""Words of a change that no rule reads as a setting -> meaning. A trainer need not have all."""
COMMON = ("loss", schema.GRAD_NORM, "lr", schema.REWARD_MEAN, schema.REWARD_STD, schema.REWARD_MIN, schema.REWARD_MAX,
          "dead", "entropy", schema.LENGTH_MEAN, schema.LENGTH_MAX, "truncated", "clip", "kl", schema.SAMPLER_RATIO,
          schema.SAMPLER_GAP, schema.EVAL_REWARD)
"""Metrics that a trainer either names or says why it has none."""
NOTHING: dict[str, Callable[[Settings], Any]] = {
    "limit": lambda s: None, "masked": lambda s: False, "ceiling": lambda s: None, "dropped": lambda s: False}
"""Facts of a trainer that has no such setting."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    name: str
    version: str
    marks: frozenset[str]
    """Metrics that no other program writes: a log with one of them is this trainer's."""
    metrics: Mapping[str, str]
    """Our name -> its name in the version above; or a sum of its names, as "a + b" or "a - b"."""
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Our name -> its names in other versions and in programs that build on this trainer."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Setting, as in SETTINGS -> its path in the trainer's own settings."""
    defaults: Mapping[str, Any]
    facts: Mapping[str, Callable[[Settings], Any]]
    speech: str
    """Whose spelling `remedies.change` takes: trl, verl, creditscope, other, or own for `paths` and `words`."""
    proofs: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Metric -> the setting that alone writes it. Absent metrics prove nothing: an export may be partial."""
    logged: Mapping[str, str] = field(default_factory=dict)
    """Metric -> the setting whose value it is."""
    pairs: bool = False
    """Whether it learns from pairs of given answers: none is sampled, none has a reward. `rules.OF_PAIRS` apply."""
    gain: str = "reward"
    """What training raises, in words: the series under `schema.REWARD_MEAN`."""
    through: str = ""
    """The trainer whose names this one writes too: a log that fits both is this one's."""
    together: frozenset[str] = frozenset()
    """Names of the trainer in `through` that only this one writes in one log."""
    console: str = ""
    """A pattern of what its console prints and no other program's does; empty where its columns suffice."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Pattern of a column that has the user's own words in it -> the name in `metrics`."""
    held_out: str = ""
    """A pattern of the columns whose mean is the held-out reward."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Our name -> why the trainer's log has no such number."""
    flag: str = ""
    """What stands before a setting in its own spelling."""
    words: Mapping[str, str] = field(default_factory=dict)
    """What a change needs beside `paths`, as in WORDS -> the trainer's own spelling."""
    remedies: Mapping[str, str] = field(default_factory=dict)
    """Cause -> the change, where it is not that of its `speech`."""
    rollouts: str = ""
    """The file of answers that it writes and `creditscope inspect` reads, or why there is none."""

    def wrote(self, names: Set[str]) -> bool:
        """Whether a log with these columns is this trainer's."""
        return bool(self.marks & names) or (bool(self.together) and self.together <= names)

    @cached_property
    def spelled(self) -> Mapping[str, str]:
        """Every setting and word that a change may name, as the trainer spells it."""
        return {name: f"{self.flag}{text}" for name, text in {**self.paths, **self.words}.items()}


def parts(text: str) -> list[tuple[int, str]]:
    """(sign, column) of each part of a name in `metrics`.

    >>> parts("seq_len/avg - prompt_len/avg")
    [(1, 'seq_len/avg'), (-1, 'prompt_len/avg')]
    """
    first, *rest = re.split(r" ([+-]) ", text)
    return [(1, first), *((-1 if sign == "-" else 1, name) for sign, name in zip(rest[::2], rest[1::2], strict=True))]


def by_constant(row: Method | None) -> bool:
    return row is not None and row.aggregate == "constant"
