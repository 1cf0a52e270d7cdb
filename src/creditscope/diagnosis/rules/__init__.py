"""The rules, Log -> Finding, one per function, in the order of the questions: a later question is seldom a cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from creditscope.diagnosis.finding import Finding
from creditscope.diagnosis.log import Log
from creditscope.diagnosis.rules import contrast, direction, excess, movement, reward

Rule = Callable[[Log], Finding]

QUESTIONS: Mapping[str, Mapping[str, Rule]] = {
    "Is there a reward, and does it depend on the answer?": {
        "reward constant": reward.constant, "reward missing": reward.missing, "form": reward.form,
        "reward noise": reward.noise, "reward length": reward.length, "reward hacked": reward.hacked},
    "Is there contrast inside the groups?": {
        "one rollout": contrast.one_rollout, "cold sampler": contrast.cold, "hot sampler": contrast.hot,
        "truncation": contrast.truncation, "too hard": contrast.too_hard, "too easy": contrast.too_easy,
        "dead groups": contrast.dead, "saturation": contrast.saturation, "dilution": contrast.dilution,
        "KL only": contrast.kl_only},
    "Does the policy move?": {
        "learning rate": movement.learning_rate, "epsilon": movement.epsilon, "rounding": movement.rounding,
        "gradient clip": movement.grad_clip, "frozen": movement.frozen, "mask": movement.mask,
        "KL pull": movement.kl_pull, "clip": movement.clip, "cispo cap": movement.cispo,
        "small steps": movement.small_steps, "length constant": movement.horizon, "loss": movement.loss},
    "Does it move too far?": {
        "weight decay": excess.decay, "updates": excess.updates, "step size": excess.step_size,
        "length drift": excess.drift, "entropy": excess.entropy, "KL level": excess.kl_level,
        "gradient": excess.gradient, "sampler": excess.sampler},
    "Does it move in the right direction?": {
        "held out": direction.held_out, "memorised": direction.memorised, "reward trend": direction.reward,
        "displacement": direction.displacement, "signal": direction.signal, "no gain": direction.no_gain},
}
"""Question -> rule by name."""
OF_PAIRS = frozenset({"learning rate", "epsilon", "rounding", "gradient clip", "frozen", "weight decay", "gradient",
                      "reward trend", "displacement", "signal", "no gain", "held out"})
"""Rules that also apply where pairs of given answers are learnt from; the others ask of answers that are sampled."""
RULES: Mapping[str, Rule] = {name: rule for rules in QUESTIONS.values() for name, rule in rules.items()}
