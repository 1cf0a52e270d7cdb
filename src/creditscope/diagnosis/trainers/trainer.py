"""What is known of a trainer: its names of metrics and settings, its defaults, and what settings imply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from creditscope.diagnosis.log import LogSettings as Settings
from creditscope.methods.axes import Method

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
    """Our name -> its name in the version above."""
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Our name -> its names in other versions and in programs that build on this trainer."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Setting, as in SETTINGS -> its path in the trainer's own settings."""
    defaults: Mapping[str, Any]
    facts: Mapping[str, Callable[[Settings], Any]]
    speech: str
    """Whose spelling `remedies.change` takes."""
    proofs: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Metric -> the setting that alone writes it. Absent metrics prove nothing: an export may be partial."""
    logged: Mapping[str, str] = field(default_factory=dict)
    """Metric -> the setting whose value it is."""
    pairs: bool = False
    """Whether it learns from pairs of given answers: none is sampled, none has a reward. `rules.OF_PAIRS` apply."""
    gain: str = "reward"
    """What training raises, in words: the series under `schema.REWARD_MEAN`."""


def by_constant(row: Method | None) -> bool:
    return row is not None and row.aggregate == "constant"
