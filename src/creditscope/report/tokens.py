"""The data of the token view: every token of some groups, with all that was recorded of it.

A page cannot hold every kept rollout of a long run. It holds steps that are evenly spaced over the run, and of each as
many groups as fit, those whose rewards differ first; what is left out is counted on the page.
"""

from __future__ import annotations

import functools
import json
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditscope.files.markup import LONGEST, Html, join, shown, tag
from creditscope.report.prefixes import extents, tree
from creditscope.report.run import Arrays, Run
from creditscope.report.section import Section, lacking, missing, rounded, spaced
from creditscope.runs import schema

BUDGET = 800_000
"""Bytes of gzipped JSON: 1.07 MB of base64, so that a page stays within 2.5 MB with the charts' library in it."""
MOST_STEPS = 60
LEAST_GROUPS = 2
"""Up to so many groups of a step are preferred to another step."""
LONGEST_PROMPT = 4_000
EMPTY = "⟨empty⟩"
"""In place of a text that was recorded and has no character."""

NUMBERS, TEXT = "biuf", "U"

Json = dict[str, Any]


@dataclass(frozen=True)
class Quantity:
    """A number that a token can be coloured by."""

    name: str
    kind: str
    """signed: around 0; ratio: around 1, in logs; amount: from 0 on; surprise: the same, of a log-prob; flag."""
    means: str


QUANTITIES = {
    "w": Quantity("w", "signed", "effective credit ∂J/∂log π, what the objective gives the token"),
    "A": Quantity("A", "signed", "credit, what the estimator gave it before ratio, bound and aggregate"),
    "ratio": Quantity("ratio", "ratio", "π/π_old in the recorded pass"),
    "after": Quantity("ratio after", "ratio", "π/π_old after the last update on this batch"),
    "entropy": Quantity("entropy", "amount", "of the policy before the token, in nats"),
    "clipped": Quantity("clipped", "flag", "past its bound in the recorded pass: its own term is stopped"),
    "past": Quantity("past the bound", "amount", "nats past the bound after the last update"),
    "logp": Quantity("log π_old", "surprise", "as sampled"),
}
OTHER = "also:"
DIGITS = {"ratio": 4, "after": 4}
"""Significant digits where they are not three: ratios differ from 1 in the third."""


def other_credit(key: str) -> Quantity:
    return Quantity(f"A by {key.removeprefix(OTHER)}", "signed", "credit by another estimator of --also")


def section(run: Run) -> Section:
    title, lead = "Tokens", "One group side by side. Colour is the chosen number; point at a token to see all of them."
    kept, found = len(run.record.groups()), select(run)
    if found is None:
        return Section(id="tokens", title=title, body=missing(
            f"None of the {kept} kept steps can be shown: their files are damaged, or hold no tokens.") if kept else
            lacking("This run kept no rollouts, so there is no token to show.", run.config, "rollouts"))
    return Section(id="tokens", title=title, lead=lead, data=found.data(),
                   body=join(tag("p", found.note, class_="soft"), tag("div", id="token-view"), *lacks(run, found)))


@dataclass(frozen=True)
class KeptBatch:
    """A kept step, as far as its arrays fit together."""

    tokens: NDArray[Any]
    mask: NDArray[np.bool_]
    group: NDArray[Any]
    values: dict[str, NDArray[Any]]
    """(B, T) by quantity."""
    arrays: Arrays

    def groups(self) -> list[int]:
        """Group ids: those whose rewards differ first."""
        reward = self.optional("reward", self.group.shape)
        ids = np.unique(self.group).tolist()
        return sorted(ids, key=lambda g: reward is None or len(np.unique(reward[self.group == g])) < 2)

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """Token id -> name, of special tokens: they have no text."""
        size = np.shape(self.arrays.get("special_ids", ()))
        ids, names = self.optional("special_ids", size, "iu"), self.optional("special_names", size, TEXT)
        if ids is None or names is None or len(size) != 1:
            return {}
        return {i: shown(name, LONGEST) for i, name in zip(ids.tolist(), names.tolist(), strict=True)}

    def optional(self, name: str, shape: tuple[int, ...], kinds: str = NUMBERS) -> NDArray[Any] | None:
        """An array that older records may lack."""
        return fitting(self.arrays, name, shape, kinds)


def fitting(arrays: Arrays, name: str, shape: tuple[int, ...], kinds: str = NUMBERS) -> NDArray[Any] | None:
    """The array of that name, None where its shape or kind is another."""
    found = arrays.get(name)
    return found if found is not None and found.shape == shape and found.dtype.kind in kinds else None


def read(run: Run, step: int) -> KeptBatch | None:
    arrays = run.rollouts(step) or {}
    shape = arrays["mask"].shape if "mask" in arrays else ()
    mask, tokens = fitting(arrays, "mask", shape, "b"), fitting(arrays, "tokens", shape, "iu")
    group = fitting(arrays, "group", shape[:1], "iu")
    if mask is None or tokens is None or group is None or mask.ndim != 2 or not mask.any():
        return None
    return KeptBatch(tokens, mask, group, values_of(arrays, shape), arrays)


def values_of(arrays: Arrays, shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    """(B, T) of every quantity that was recorded, rounded; ρ = exp(log π − log π_old)."""
    plain = {"w": "w", "A": "credit", "entropy": "entropy", "clipped": "clipped", "past": "after_past", "logp": "logp"}
    out = {key: found for key, name in plain.items() if (found := fitting(arrays, name, shape)) is not None}
    for key, name in (("ratio", "live_logp"), ("after", "after_logp")):
        live = fitting(arrays, name, shape)
        if live is not None and "logp" in out:
            with np.errstate(over="ignore", invalid="ignore"):
                out[key] = np.exp(live.astype(np.float64) - out["logp"])
    names = np.atleast_1d(arrays.get("other_names", np.array([])))
    others = fitting(arrays, "other_credit", (len(names), *shape))
    if others is not None:
        out |= {f"{OTHER}{shown(str(name))}": other for name, other in zip(names.tolist(), others, strict=True)}
    return {key: significant(value, DIGITS.get(key, 3)) for key, value in out.items()}


@dataclass(frozen=True)
class Selection:
    """The part of a record that is in the file."""

    steps: dict[int, list[Json]]
    kept: int
    groups: int
    """Groups of the largest step."""
    unread: list[int]
    words: list[str]
    quantities: list[str]
    graded: bool
    """Whether a step reward other than 0 and 1 occurs."""

    @property
    def note(self) -> str:
        each = min(len(groups) for groups in self.steps.values())
        which = "all groups of each" if each == self.groups else \
            f"{each} of {self.groups} groups each, those with mixed rewards first"
        unread = f" Not to be read: step {', '.join(map(str, self.unread))}." if self.unread else ""
        return f"{len(self.steps)} of {self.kept} kept steps are in this file, {which}.{unread}"

    def data(self) -> Json:
        named = {key: QUANTITIES.get(key) or other_credit(key) for key in self.quantities}
        return {"steps": [{"step": step, "groups": groups} for step, groups in self.steps.items()],
                "words": self.words, "graded": self.graded,
                "quantities": [{"key": key, "name": q.name, "kind": q.kind, "means": q.means}
                               for key, q in named.items()]}


def select(run: Run, budget: int = BUDGET) -> Selection | None:
    """As many steps as fit the budget with two groups each, or more groups of each where every step fits.

    The newest step tells the size of a group; where not even one fits, answers are cut. One step is in memory at a
    time.
    """
    kept = run.record.groups()
    readable = ((step, batch) for step in reversed(kept) if (batch := read(run, step)) is not None)
    newest, last = next(readable, (-1, None))
    if last is None:
        return None
    longest = sys.maxsize
    while (size := weight(group_data(last, last.groups()[0], longest))) > budget and longest > 1:
        longest = max(1, int(min(longest, last.mask.shape[1]) * 0.9 * budget / size))
    groups, room = len(last.groups()), budget // size
    count = max(1, min(len(kept), MOST_STEPS, room // min(LEAST_GROUPS, groups)))
    each = max(1, room // count)

    made: dict[int, list[Json]] = {}
    unread, graded = [step for step in kept if step > newest], False
    for step in spaced([step for step in kept if step <= newest], count):
        batch = last if step == newest else read(run, step)
        if batch is None:
            unread.append(step)
            continue
        made[step] = [group_data(batch, group, longest) for group in batch.groups()[:each]]
        groups, graded = max(groups, len(batch.groups())), graded or is_graded(batch)
    steps, each = list(made), min(each, groups)
    weights = {step: [weight(data) for data in made[step]] for step in steps}
    while sum(sum(weights[step][:each]) for step in steps) > budget and (len(steps) > 1 or each > 1):
        if each > LEAST_GROUPS or len(steps) == 1:
            each -= 1
        else:
            steps = spaced(steps, len(steps) - 1)

    inside = {step: sorted(made[step][:each], key=lambda data: int(data["group"])) for step in steps}
    answers = [answer for found in inside.values() for data in found for answer in data["answers"]]
    keys = dict.fromkeys(key for answer in answers for key in answer["values"])
    order = [*(key for key in QUANTITIES if key in keys), *(key for key in keys if key not in QUANTITIES)]
    return Selection(inside, len(kept), groups, unread, shared(answers), order, graded)


def weight(data: Json) -> int:
    """Bytes of a group in the file, before base64."""
    return len(zlib.compress(json.dumps(data, separators=(",", ":")).encode()))


def shared(answers: Iterable[Json]) -> list[str]:
    """The texts of all tokens, each once; in the answers they are replaced by their index."""
    numbers: dict[str, int] = {}
    for found in answers:
        found["tokens"] = [numbers.setdefault(text, len(numbers)) for text in found["tokens"]]
    return list(numbers)


def group_data(batch: KeptBatch, group: int, longest: int) -> Json:
    rows = np.flatnonzero(batch.group == group)
    prompt = batch.optional("prompt", batch.group.shape, TEXT)
    text = "" if prompt is None else shown(str(prompt[rows[0]]), LONGEST_PROMPT) or EMPTY
    w = batch.optional("w", batch.mask.shape)
    lines = [] if w is None else tree(batch.tokens[rows], batch.mask[rows], w[rows])
    return {"group": int(group), "prompt": text,
            "answers": [answer(batch, int(row), longest) for row in rows],
            "tree": [[line.parent, [int(rows[i]) for i in line.rows], line.start, line.stop, rounded(line.low, 3),
                      rounded(line.high, 3)] for line in lines]}


def answer(batch: KeptBatch, row: int, longest: int) -> Json:
    """One answer: its tokens, those that the policy did not choose (`given`), and one column per quantity."""
    extent = int(extents(batch.mask[row:row + 1])[0])
    width = min(extent, longest)
    chosen = batch.mask[row, :width]
    pieces = batch.optional("pieces", batch.mask.shape, TEXT)
    texts = [""] * extent if pieces is None else [str(piece) for piece in pieces[row, :extent]]
    reward = batch.optional("reward", batch.group.shape)
    return {"row": row, "reward": None if reward is None else rounded(float(reward[row])),
            "length": int(batch.mask[row].sum()), "extent": extent,
            "tokens": [word(text) or batch.names.get(token) or f"⟨#{token}⟩"
                       for text, token in zip(texts[:width], batch.tokens[row, :width].tolist(), strict=True)],
            "given": np.flatnonzero(~chosen).tolist(),
            "rest": shown(uncovered(batch, row, "".join(texts)), LONGEST_PROMPT),
            "steps": steps_of(batch, row, width),
            "values": {key: column(value[row, :width], chosen) for key, value in batch.values.items()}}


@functools.lru_cache(maxsize=4096)
def word(text: str) -> str:
    return shown(text, LONGEST)


def column(value: NDArray[np.float64], chosen: NDArray[np.bool_]) -> list[float | None]:
    """The values, None where the policy did not choose the token or the value is not finite."""
    known = chosen & np.isfinite(value)
    return [v if k else None for v, k in zip(value.tolist(), known.tolist(), strict=True)]


def significant(value: NDArray[Any], digits: int) -> NDArray[np.float64]:
    """`section.rounded` of a whole array. Powers of ten up to 22 are exact, so values print in as few digits as they
    have.

    >>> significant(np.array([0.123456, -98765.0, 0.0, np.nan]), 3).tolist()
    [0.123, -98800.0, 0.0, nan]
    """
    value = value.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        place = np.nan_to_num(np.floor(np.log10(np.abs(value))), posinf=0, neginf=0) - (digits - 1)
        up, down = 10.0 ** np.clip(place, 0, 300), 10.0 ** np.clip(-place, 0, 300)
        return np.asarray(np.round(value / up * down) / down * up)


def uncovered(batch: KeptBatch, row: int, covered: str) -> str:
    """The end of the answer's text that has no token."""
    text = batch.optional("text", batch.group.shape, TEXT)
    whole = "" if text is None else str(text[row])
    return whole[len(covered):] if whole.startswith(covered) else ""


def steps_of(batch: KeptBatch, row: int, width: int) -> list[tuple[int, int, int, float | None]]:
    """(number, start, stop, reward) of the labelled steps of an answer, in columns."""
    step, reward = batch.optional("step", batch.mask.shape), step_reward(batch)
    if step is None or reward is None:
        return []
    out, start = [], 0
    for number, run in groupby(step[row, :width].tolist()):
        stop = start + len(list(run))
        if 0 <= number < reward.shape[1]:
            out.append((number, start, stop, rounded(float(reward[row, number]))))
        start = stop
    return out


def step_reward(batch: KeptBatch) -> NDArray[Any] | None:
    steps = np.atleast_2d(batch.arrays.get("step_reward", np.zeros(0))).shape[1]
    return batch.optional("step_reward", (len(batch.mask), steps))


def is_graded(batch: KeptBatch) -> bool:
    reward = step_reward(batch)
    return reward is not None and not bool(np.isin(reward, (0, 1)).all())


def lacks(run: Run, found: Selection) -> list[Html]:
    have, kept = set(found.quantities), set(run.record.groups())
    out = []
    if not have & {"w", "A"}:
        out.append(missing("These rollouts carry no credit: only their text is shown."))
    if "after" not in have:
        seen = run.config.get("probe") in ("light", "full") and not kept.isdisjoint(
            step for step, _ in run.series(schema.OVERSHOOT_PAST))
        out.append(unkept("Where tokens stood after the last update was not recorded.", seen, run, "after"))
    if not any(key.startswith(OTHER) for key in have):
        seen = bool(run.config.get("also")) and not kept.isdisjoint(run.record.readings())
        out.append(unkept("No other estimator's credit was recorded.", seen, run, "also"))
    return out


def unkept(what: str, seen: bool, run: Run, part: str) -> Html:
    """What is missing. Where the run computed it at a kept step (`seen`), no flag of the command would help."""
    return missing(f"{what} The run had it, but an older creditscope did not keep it by token: train it again.") \
        if seen else lacking(what, run.config, part)
