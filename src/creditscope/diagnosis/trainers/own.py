"""creditscope's own record: of `creditscope lab train`, of TRL's loop under it, or of ScopeCallback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from creditscope.diagnosis.log import LogSettings as Settings
from creditscope.diagnosis.trainers.trainer import NOTHING, Trainer, by_constant
from creditscope.diagnosis.trainers.trl import TRL
from creditscope.diagnosis.trainers.trl_dpo import TRL_DPO
from creditscope.methods.axes import OWN_CREDIT, Method
from creditscope.methods.find import row_of
from creditscope.runs import schema


def _own_method(s: Settings) -> Method | None:
    row = row_of({"method": s.word("method"), "beta": s.optional("beta")})
    return None if row is None else row.under(s.get("credit"))


OURS = Trainer(
    name="creditscope", version="", speech="creditscope",
    marks=frozenset({schema.CREDIT_DEAD_GROUPS, schema.SIGNAL_DEAD_GROUPS, schema.POLICY_SAMPLER_GAP,
                     schema.PAIRS_MARGIN}),
    metrics={
        **{key: key for key in (schema.GRAD_NORM, schema.REWARD_MEAN, schema.REWARD_STD, schema.LENGTH_MEAN,
                                schema.LENGTH_MAX, schema.EVAL_LOW, schema.EVAL_HIGH)},
        "loss": schema.OBJECTIVE_VALUE, "lr": schema.OPTIMIZER_LR, "dead": schema.CREDIT_DEAD_GROUPS,
        "entropy": schema.ENTROPY_MEAN, "truncated": schema.LENGTH_TRUNCATED, "past": schema.OVERSHOOT_PAST,
        "eval": schema.EVAL_ACCURACY, schema.SAMPLER_GAP: schema.POLICY_SAMPLER_GAP,
    },
    aliases={"dead": (schema.SIGNAL_DEAD_GROUPS,)},  # where credit was not recorded
    defaults={"method": "grpo", "credit": None, "beta": None, "inner_steps": 1, "minibatches": 1, "group": 8,
              "max_tokens": None},
    paths={
        "learning_rate": "lr", "adam_epsilon": "eps", "weight_decay": "weight_decay", "grad_clip": "clip_norm",
        "optimizer": "optimizer", "temperature": "temperature", "top_p": "top_p", "steps": "steps", "dtype": "dtype",
        "limit": "max_tokens", "group": "group", "lora": "lora",
    },
    facts={
        "method": _own_method,
        "loss": lambda s: f"--method {s.word('method')}" + (f" --credit {s.word('credit')}" if s.get("credit") else ""),
        "updates": lambda s: int(s.number("inner_steps") * s.number("minibatches")),
        "beta": lambda s: None if (row := _own_method(s)) is None else row.beta if row.has_loss_kl else 0.0,
        "group": lambda s: s.number("group"),
        **NOTHING,
        "dropped": lambda s: (row := _own_method(s)) is not None and row.keep == "live_groups",
        "dead_counted": lambda s: True,
        "per_token": lambda s: True,
        "sampler": lambda s: False,
        "horizon": lambda s: s.optional("max_tokens") if by_constant(_own_method(s)) else None,
    },)


def _trl_fact(name: str, trainer: Trainer = TRL) -> Callable[[Settings], Any]:
    """A fact of TRL's from the settings that a record keeps under `trl`."""
    def fact(s: Settings) -> Any:
        theirs = s.get("trl")
        given = theirs if isinstance(theirs, Mapping) else {}
        return trainer.facts[name](Settings(given, {}, trainer.defaults, s.source))

    return fact


BY_TRL = replace(OURS, metrics={**OURS.metrics, "dead": schema.SIGNAL_DEAD_GROUPS})
"""A record that TRL's loop wrote: credit is read at some steps, rewards at every step."""
SCRIPT = replace(
    BY_TRL, defaults={**OURS.defaults, "trl": None},
    paths={**{name: f"trl.{path}" for name, path in TRL.paths.items()}, "dtype": "dtype", "steps": "steps"},
    facts={**OURS.facts, **{name: _trl_fact(name) for name in ("masked", "ceiling", "sampler")},
           "loss": lambda s: s.word("method") + (f" with credit {s.word('credit')}" if s.get("credit") else "")},
    speech="trl")
"""A record that TRL's callback wrote in the user's own script, with TRL's settings."""
SCRIPT_OF_PAIRS = replace(
    SCRIPT, pairs=True, gain=TRL_DPO.gain, remedies=TRL_DPO.remedies,
    metrics={"loss": schema.OBJECTIVE_VALUE, "lr": schema.OPTIMIZER_LR, "entropy": schema.ENTROPY_MEAN,
             schema.GRAD_NORM: schema.GRAD_NORM, schema.REWARD_MEAN: schema.PAIRS_MARGIN}, aliases={},
    facts={name: _trl_fact(name, TRL_DPO) for name in TRL_DPO.facts})
"""The same of a DPOTrainer."""


OURS_OF_PAIRS = replace(
    OURS, pairs=True, gain=TRL_DPO.gain,
    remedies={"held out": "the pairs: read some of --pairs, and see whether the chosen answer is the better one; or a "
                          "smaller --lr"},
    metrics={**{name: key for name, key in OURS.metrics.items() if name != schema.REWARD_STD},
             schema.REWARD_MEAN: schema.PAIRS_MARGIN})
"""A record of lab train --pairs."""


def who_wrote(given: Mapping[str, Any]) -> Trainer:
    """The variant of OURS that wrote a record. Under token credit a group with one reward need not be dead."""
    if given.get("engine") != "trl":
        return OURS if given.get("pairs") is None else OURS_OF_PAIRS
    if given.get("data") == "pairs":
        return SCRIPT_OF_PAIRS
    found = SCRIPT if is_script(given) else BY_TRL
    return found if given.get("credit") in (None, OWN_CREDIT) else replace(found, metrics=OURS.metrics, aliases={})


def is_script(given: Mapping[str, Any]) -> bool:
    """Whether a script of the user's own trained, and TRL's callback wrote the record."""
    return given.get("engine") == "trl" and isinstance(given.get("trainer"), str)
