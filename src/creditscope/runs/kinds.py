"""What may differ between compared runs: credit and brake, one row each with names, numbers and verdicts, and every
other setting that changes what is learnt, by one rule."""

from __future__ import annotations

import contextlib
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from types import MappingProxyType
from typing import Any

from creditscope.credit.table import parse
from creditscope.errors import unknown
from creditscope.methods.find import credit_of
from creditscope.optimizer.table import BRAKES, parse_brake
from creditscope.runs import schema
from creditscope.runs.compare import FREE, Candidate, CandidateRun, Comparison, Kind
from creditscope.runs.config import Config
from creditscope.runs.intervals import Interval, mean_interval
from creditscope.runs.numbers import in_percent, in_points, percent
from creditscope.runs.settings import check_kind

ENOUGH = 3
"""Seeds below which nothing is judged."""
MEASURES = ("distance", "overshoot")
"""Nats past the bound, mean of the tokens past it, and mean of all bounded tokens."""
HALF = -0.5
"""The interval of the relative change must lie below it for "at least by half"."""


def estimator_of(config: Mapping[str, Any]) -> str:
    credit = credit_of(config)
    parse(credit)
    return credit


def brake_of(config: Mapping[str, Any]) -> str:
    """Runs that are older than brakes had none."""
    brake = str(config.get("brake", "none"))
    parse_brake(brake)
    return brake


def relative_change(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval | None:
    """The interval of ours/theirs − 1 over the seeds that both have, where theirs is not 0.

    >>> relative_change({0: 0.25, 1: 0.75, 2: 1.0}, {0: 0.5, 1: 1.0, 3: 1.0}).mean  # (0.5 + 0.75)/2 − 1
    -0.375
    """
    seeds = sorted(seed for seed in ours.keys() & theirs.keys() if theirs[seed])
    return mean_interval([ours[seed] / theirs[seed] - 1 for seed in seeds]) if seeds else None


def held(runs: Sequence[CandidateRun], base: Sequence[CandidateRun]) -> dict[str, Any]:
    """Relative change of the overshoot, paired by seed; std (n − 1) and minimum of the final accuracies."""
    def by_seed(some: Sequence[CandidateRun], name: str) -> dict[int, float]:
        return {run.seed: run.readings[name] for run in some if name in run.readings}

    ends = [run.end for run in runs]
    changes = {name: relative_change(by_seed(runs, name), by_seed(base, name)) for name in MEASURES}
    return {f"{name}_change": change for name, change in changes.items()} | {
        "spread": statistics.stdev(ends) if len(ends) > 1 else None, "worst": min(ends)}


def verdicts(found: Comparison) -> list[str]:
    """What the numbers say, by rule. Two seeds that agree by chance have an interval of no width, so it takes three."""
    kind, base = found.kind, found.baseline
    if base is None:
        return [f"{kind.baseline} was not run, so nothing is compared with it; name it too"]
    others = [line for line in found.lines if line is not base]
    if not others:
        return [f"{base.name} alone: {percent(base.accuracy)} {_where(found)}; name another {kind.noun} to compare it "
                f"with"]
    decided = [line for line in others if line.overlaps is not None]
    fewest = min(len(line.seeds) for line in found.lines)
    if not decided or fewest < ENOUGH:
        return [f"undecided: {fewest} seed{'s' * (fewest > 1)} of {kind.one} cannot tell luck from {kind.luck}; give "
                f"--seeds {ENOUGH} or more"]
    return kind.judge(found, base, decided)


def judge_accuracy(found: Comparison, base: Candidate, others: Sequence[Candidate]) -> list[str]:
    """A value beats the baseline where its interval lies above the baseline's."""
    where = _where(found)
    apart = [line for line in others if line.overlaps is False]
    above = [line for line in apart if line.accuracy.mean > base.accuracy.mean]
    out = [f"{line.name} beats {base.name} {where}: {percent(line.accuracy)} against {percent(base.accuracy)}; "
           f"intervals do not overlap" for line in above]
    if not above:
        best = others[0]
        out.append(f"no {found.kind.noun}'s interval lies above {base.name}'s {where}: the best of the others is "
                   f"{best.name}, {percent(best.accuracy)} against {percent(base.accuracy)}")
    out += [f"{line.name} is below {base.name} {where}: {percent(line.accuracy)} against {percent(base.accuracy)}; "
            f"intervals do not overlap" for line in apart if line not in above]
    for line in others:
        gap = line.difference
        if line.overlaps and gap is not None and gap.excludes_zero:
            out.append(f"{line.name}: the intervals of the means overlap, but paired by seed it is "
                       f"{'above' if gap.mean > 0 else 'below'} {base.name} by {in_points(gap)} points")
    return out


def judge_brakes(found: Comparison, base: Candidate, others: Sequence[Candidate]) -> list[str]:
    """A brake cuts at least by half where the interval of the relative change, paired by seed, lies below −50 %.

    Accuracy is lost where the interval of the paired difference lies below 0, and within intervals where it holds 0.
    """
    out = []
    changes = {line.name: _changes(line) for line in others}
    for line in others:
        gap, own = line.difference, changes[line.name]
        if gap is None or gap.n < ENOUGH:
            out.append(f"{line.name} shares fewer than {ENOUGH} seeds with {base.name}, so the two are not compared")
            continue
        accuracy = "within intervals" if not gap.excludes_zero else "gained" if gap.mean > 0 else "lost"
        halved = [measure for measure, change in own.items() if _halves(change)]
        if halved:
            numbers = ", ".join(f"{measure} {in_percent(change)}" for measure, change in own.items())
            out.append(f"{line.name} cuts the {' and the '.join(halved)} past the bound at least by half: {numbers}; "
                       f"accuracy {accuracy}: {in_points(gap)} points")
        elif gap.excludes_zero:
            out.append(f"{line.name}: accuracy {accuracy} {_where(found)}: {percent(line.accuracy)} against "
                       f"{percent(base.accuracy)}, paired by seed {in_points(gap)} points")
    for measure in MEASURES:
        known = {name: own[measure] for name, own in changes.items() if measure in own}
        if known and not any(map(_halves, known.values())):
            nearest = min(known, key=lambda name: known[name].mean)
            out.append(f"no brake is known to cut the {measure} past the bound by half: nearest comes {nearest}, "
                       f"{in_percent(known[nearest])}")
    if base.numbers["past"] is None:
        out.append("overshoot was not read in these runs; train with --probe light --probe-every 1")
    elif not any(changes.values()):
        out.append(f"overshoot is not judged: in fewer than {ENOUGH} shared seeds a token of {base.name} went past its "
                   f"bound; give more seeds, or raise --inner-steps or --lr")
    return out


def _changes(line: Candidate) -> dict[str, Interval]:
    found = {measure: line.numbers[f"{measure}_change"] for measure in MEASURES}
    return {measure: change for measure, change in found.items() if change is not None and change.n >= ENOUGH}


def _halves(change: Interval) -> bool:
    return change.high is not None and change.high < HALF


def _where(found: Comparison) -> str:
    return f"at {found.budget:,} rollouts"


def command(found: Comparison) -> str:
    """The command that makes the page."""
    kind = found.kind
    seeds = sorted({seed for line in found.lines for seed in line.seeds})
    flags = {"seeds": seeds[-1] - seeds[0] + 1, "first-seed": seeds[0], "rollouts": found.budget,
             "points": len(found.grid) - 1}
    flags |= {name.replace("_", "-"): found.settings[name] for name in
              ("group", "prompts", "lr", "method", "model", "task", "eval_problems", "scope", "every")
              if name != kind.setting}
    if kind.setting != "inner_steps" and found.settings["inner_steps"] != kind.inner_steps:
        flags["inner-steps"] = found.settings["inner_steps"]
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    values = [kind.value(line.name) for line in found.lines]
    if found.baseline is not None and kind.prefix:  # the first value is the one that the others are compared with
        values.sort(key=lambda value: value != kind.value(kind.baseline))
    return shlex.join(["creditscope", "lab", "compare", kind.setting, *values, *words])


def as_dict(line: Candidate, kind: Kind) -> dict[str, Any]:
    """A line as JSON: its name under the setting, the kind's numbers beside the others."""
    found = asdict(line)
    name, numbers = found.pop("name"), found.pop("numbers")
    return {kind.setting: kind.value(name), **found, **numbers}


KINDS: Mapping[str, Kind] = MappingProxyType({kind.setting: kind for kind in (
    Kind(
        setting="credit", noun="estimator", luck="credit", baseline="outcome", name=estimator_of,
        default=("outcome", "optimal_scalar", "optimal_sequence", "optimal_token", "step_reward", "prefix_tree", "gae",
                 "entropy_mask", "salt", "monte_carlo"),
        readings={"effective_rank": schema.GRAM_GROUP_EFFECTIVE_RANK, "within": schema.CREDIT_WITHIN,
                  "dead_credit": schema.CREDIT_DEAD_GROUPS, "dead_signal": schema.SIGNAL_DEAD_GROUPS},
        more=lambda runs, base: {}, judge=judge_accuracy,
        inner_steps=1, scope="light", probe={"probe": "off"}, free=FREE | {"probe", "probe_every"}, out="runs/compare"),
    Kind(
        setting="brake", noun="brake", luck="what it does", baseline="none", name=brake_of, default=tuple(BRAKES),
        readings={"past": schema.OVERSHOOT_PAST, "distance": schema.OVERSHOOT_DISTANCE,
                  "overshoot": schema.OPTIMIZER_OVERSHOOT,
                  "after": schema.OVERSHOOT_AFTER, "kl": schema.OVERSHOOT_KL, "updates": schema.OPTIMIZER_UPDATES,
                  "train": schema.TIME_TRAIN},
        more=held, judge=judge_brakes,
        # Every batch is read after its last update.
        inner_steps=4, scope="off", probe={"probe": "light", "probe_every": 1}, out="runs/brakes"),
)})

NOT_COMPARED = FREE | {
    "seed", "steps", "rollouts", "eval_every", "eval_rollouts", "eval_problems", "eval_seed",  # alike in all runs
    "scope", "every", "also", "probe", "probe_every", "device", "recompute"}  # change no result
COMPARED: Mapping[str, str] = MappingProxyType(
    {f.name: str(f.type) for f in fields(Config) if f.name not in NOT_COMPARED and f.name not in KINDS})
"""Every other setting that changes what is learnt -> its type."""


def read_value(setting: str, word: str) -> Any:
    """The word as the setting's type has it; a word that is none is refused.

    >>> read_value("group", "16"), read_value("lr", "5e-5"), read_value("clip_norm", "none")
    (16, 5e-05, None)
    """
    first, *rest = COMPARED[setting].split(" | ")
    value: Any = word
    if rest and word.lower() == "none":
        value = None
    elif first in ("int", "float"):
        with contextlib.suppress(ValueError):  # else it stays a text, which is refused below
            value = int(word) if first == "int" else float(word)
    check_kind(setting, COMPARED[setting], value)
    return value


def kind_of(setting: str, values: Sequence[str] = ()) -> Kind:
    """How runs that differ in a setting are compared: credit and brake by their own rows, any other as credit, with the
    first value as the baseline; without values it is the setting's default."""
    if setting in KINDS:
        return KINDS[setting]
    if setting not in COMPARED:
        raise unknown("setting", setting, [*KINDS, *COMPARED], see="creditscope lab train --help")
    default = getattr(Config(), setting)

    def name(config: Mapping[str, Any]) -> str:
        value = config.get(setting, default)
        check_kind(setting, COMPARED[setting], value)
        return f"{setting}={value}"

    baseline = name({setting: read_value(setting, values[0])} if values else {})
    return replace(KINDS["credit"], setting=setting, noun="value", luck=f"the effect of {setting}", default=(),
                   baseline=baseline, name=name, free=KINDS["credit"].free | {"steps"}, out=f"runs/compare-{setting}",
                   prefix=f"{setting}=")


def with_baseline(kind: Kind, names: Sequence[str]) -> Kind:
    """The kind with its baseline among the names: where it is not, the least number, or the first by the alphabet."""
    if not kind.prefix or kind.baseline in names:
        return kind
    return replace(kind, baseline=min(names, key=lambda name: (_number_in(kind.value(name)), name)))


def _number_in(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
