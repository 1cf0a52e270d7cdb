"""The numbers of `optimizer_numbers` in sentences, by rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from creditscope.diagnosis.optimizer_numbers import Findings
from creditscope.diagnosis.thresholds import BLIND, CARRY_CLOSE, CORRELATED, FOLLOWS, HELD, LOST, TURNED
from creditscope.runs.correlation import ROUNDING
from creditscope.runs.intervals import Interval

DECIDING = {"held": HELD, "close": CARRY_CLOSE, "blind": BLIND, "follows": FOLLOWS, "turned": TURNED, "lost": LOST,
            "signal": CORRELATED}
"""Name in --json -> threshold. Each is printed in the sentence that it decides."""
NAME = 32
"""Characters of a brake's or a method's name that are printed."""


def as_dict(found: Findings) -> dict[str, Any]:
    return asdict(found) | {"verdicts": verdicts(found), "thresholds": dict(DECIDING)}


def verdicts(found: Findings) -> dict[str, str]:
    """One sentence per block; a block that was not measured has none."""
    said = {"overshoot": _on_overshoot(found), "scale": _on_scale(found), "update": _on_update(found.update),
            "progress": _on_progress(found)}
    return {block: sentence for block, sentence in said.items() if sentence}


def _share(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %"


def last_update(found: Findings) -> tuple[str, Mapping[str, Interval]]:
    """(words, overshoot) after the last inner update."""
    if not found.by_update:
        return "After the last update", found.overshoot
    k = max(found.by_update)
    return f"After {k} update{'s' * (k > 1)}", found.by_update[k]


def _on_overshoot(found: Findings) -> str:
    when, row = last_update(found)
    if "past" not in row:
        return ""
    past = row["past"].mean
    if past < HELD:
        said = f"{when} {_share(past, 2)} of tokens are past the bound, less than {_share(HELD)}: the bound holds."
    else:
        said = f"{when} {_share(past, 1)} of tokens are past the bound" + (
            f", by {row['distance'].mean:.2g} nats on average" if "distance" in row else "") + (
            f"; {_after(found, row['after'].mean)}." if "after" in row else ".")
    if "carry" in found.overshoot and "carry_predicted" in found.overshoot:
        seen, told = found.overshoot["carry"].mean, found.overshoot["carry_predicted"].mean
        near = abs(seen - told) <= CARRY_CLOSE * abs(told)
        said += f" The carry is {seen:.2f} where momentum alone predicts {told:.2f}" + (
            f", under the brake {found.brake:.{NAME}}." if found.brake else
            f": {'within' if near else 'apart by more than'} {_share(CARRY_CLOSE)}.")
    return said


def _after(found: Findings, share: float) -> str:
    since = "their own gradient had stopped" if found.stops in (None, "zero") else "they had crossed"
    if share < 0:
        return f"on the whole they came back after {since}"
    return f"{_share(share)} of that was moved after {since}"


def _on_scale(found: Findings) -> str:
    known = found.scale_change or found.scale_change_now
    if known is None:
        return ""
    change, since = known.mean, "" if found.scale_change else ", from the step itself on,"
    if change < BLIND:
        what = f"less than {_share(BLIND)}: the optimiser is blind to the size of the credit"
    elif change > FOLLOWS:
        what = f"more than {_share(FOLLOWS)}: the update follows the size of the credit"
    else:
        what = f"between {_share(BLIND)} and {_share(FOLLOWS)}: the size of the credit comes through in part"
    return f"Credit a tenth as large{since} would have changed the update by {_share(change, 2)}, {what}."


def _on_update(update: Mapping[str, Interval]) -> str:
    said = []
    if "cosine" in update:
        cosine = update["cosine"].mean
        said.append(f"The update's cosine with the downhill gradient is {cosine:.2f}, "
                    + (f"below {TURNED:g}: the optimiser sets the direction more than this batch does." if
                       cosine < TURNED else f"at least {TURNED:g}: it goes where this batch points."))
    if "momentum" in update:
        said.append(f"{_share(update['momentum'].mean)} of it comes from momentum.")
    if "zero_bf16" in update and update["zero_bf16"].mean > LOST:
        said.append(f"In bfloat16 {_share(update['zero_bf16'].mean)} of the weights would not move, more than "
                    f"{_share(LOST)}.")
    return " ".join(said)


def _on_progress(found: Findings) -> str:
    law, said = found.law.sentence if found.law else "", j_and_reward(found)
    return f"{said}. {law}".rstrip() if said else law


def j_and_reward(found: Findings) -> str:
    """Whether J went with the reward in this run; empty where no step has both."""
    seen = found.progress
    if not seen:
        return ""
    if seen["largest"] <= ROUNDING:
        said = f"J stayed within {ROUNDING:g} of 0"
    elif seen["r"] is None:
        said = f"J or the reward did not vary over {seen['steps']} steps"
    elif seen["low"] is None:
        said = f"{seen['steps']} steps are too few to say whether J goes with the reward"
    elif (around_zero := seen["low"] * seen["high"] <= 0) or abs(seen["r"]) < CORRELATED:
        why = "its interval holds 0" if around_zero else f"below {CORRELATED:g} in size"
        said = f"J says little of the reward: r = {seen['r']:.2f}, {why}"
    else:
        way = "rose and fell with" if seen["r"] > 0 else "went against"
        said = f"In this run J {way} the reward: r = {seen['r']:.2f}, at least {CORRELATED:g} in size"
    return said
