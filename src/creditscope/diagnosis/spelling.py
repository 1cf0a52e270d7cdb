"""Changes for trainers whose settings have names of their own: each cause once, with the roles of settings in braces.

A role is a name of `trainers.SETTINGS` or `trainers.WORDS`; its spelling comes from the trainer's row. Parts of a text
between commas stand alone: those with a role that the trainer does not have are left out. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PARTS = re.compile(r"(, (?:or |and )?|; )")
TEMPLATES: Mapping[str, str] = {
    "reward": "the reward function or the prompts, dump answers with {dump}",
    "one rollout": "{group}=8",
    "cold sampler": "{temperature}=1.0, {top_p}=1.0, no {top_k}",
    "hot sampler": "{temperature}=1.0",
    "too hard": "easier prompts, a reward that pays parts of an answer, or a larger {group}",
    "too easy": "harder prompts, or {drop}",
    "dead groups": "{drop}, prompts of middling difficulty, or a larger {group}",
    "dead counted": "none: `creditscope inspect` counts groups of dumped answers",
    "dilution": "{drop}, or prompts that leave fewer groups unanimous",
    "KL only": "{beta}=0, or prompts that leave fewer groups unanimous",
    "truncation": "{limit} (raise it)",
    "learning rate": "a larger {learning_rate}: ×10",
    "schedule": "a smaller {warmup}, or another {schedule}",
    "epsilon": "{adam_epsilon}=1e-8",
    "rounding": "{master}",
    "gradient clip": "{grad_clip} (raise it to the gradient's norm)",
    "frozen": "which weights are trained, or a larger {lora}",
    "small steps": "a larger {learning_rate}: ×10, or Adam ({optimizer})",
    "KL pull": "{beta} at most 0.1",
    "clip closed": "{clip_low}=0.2",
    "clip": "{epochs}=2, or a smaller {minibatch}, to reuse a batch; {clip_low} acts only then",
    "updates": "fewer updates per batch, a smaller {epochs}, or a larger {minibatch}",
    "length constant": "{limit} near the lengths that occur, or {even}",
    "step size": "a smaller {learning_rate}: a tenth",
    "weight decay": "{weight_decay}=0.0",
    "entropy": "a smaller {learning_rate}, or {clip_high}=0.28 with several updates per batch",
    "length drift": "{even}, or a length term in the reward",
    "length shrinks": "what the reward pays for short answers; a smaller {learning_rate}",
    "KL level": "a smaller {learning_rate}, or a larger {beta}",
    "gradient": "a smaller {learning_rate}, or {master}",
    "sampler": "{correction}, and the same dtype in sampler and trainer",
    "held out": "the reward: read answers that got a high one, dump them with {dump}",
    "reward trend": "a smaller {learning_rate}, or a larger {beta}; if only the prompts got harder, nothing",
    "signal": "more prompts per step: a larger {prompts}",
}
"""Cause -> its change. Causes without a setting have the plain words of `remedies.REMEDIES`."""


def spell(text: str, spelled: Mapping[str, str]) -> str:
    """A template in a trainer's spelling, less the parts with a role that it does not have.

    >>> spell("{temperature}=1.0, {top_p}=1.0, no {top_k}", {"temperature": "t", "top_k": "k"})
    't=1.0, no k'
    """
    pieces = PARTS.split(text)
    kept = [at for at in range(0, len(pieces), 2) if set(re.findall(r"\{(\w+)\}", pieces[at])) <= spelled.keys()]
    joined = "".join((pieces[at - 1] if at != kept[0] else "") + pieces[at] for at in kept)
    return joined.format_map(spelled)
