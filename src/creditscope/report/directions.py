"""Directions: which rollouts of a group push the same way, how many directions they span, and the nulls.

Row i of a group's matrix is g_i = Σ_t w_it ∇ log π(y_it). Everything here is computed from K_ij = ⟨g_i, g_j⟩.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditscope.errors import CreditscopeError
from creditscope.files.markup import Html, shown, tag
from creditscope.microscope import geometry
from creditscope.microscope.spectrum import spectrum
from creditscope.report.chart import DASHED, Spec, marked, spec_of
from creditscope.report.remedies import command
from creditscope.report.run import Arrays, Run
from creditscope.report.section import Section, lacking, rounded, spaced
from creditscope.runs import schema
from creditscope.runs.figures import COLOURS
from creditscope.runs.schema import Metric

Array = NDArray[np.float64]
Part = dict[str, Any]

MOST = 40
BUDGET, TEXTS = 210_000, 80_000
"""Characters of JSON for numbers and for answers."""
LONGEST = 300
"""Characters of an answer beside another one; the token view has all of it."""
DRAWS = 100
"""Shuffles of w, as many as for `null/group/…`."""
_SHUFFLED = Metric("shuffled", "null, w shuffled", "directions", "Effective rank with w permuted inside the group.",
                   "mean r_eff over permutations", writer="")
DEFINITIONS = (*(schema.READINGS[name] for name in (
    "effective_rank", "entropy_rank", "participation_ratio", "stable_rank", "energy_rank_90", "energy_rank_99",
    "numerical_rank", "effective_rank_truncated_2", "centred_effective_rank", "top1", "norm_null", "w_null")),
    _SHUFFLED)
CURVES = ("sigma", "orthogonal", "low", "high")
WEIGHTED, UNWEIGHTED = "g = w·ψ, as trained", "ψ, without w"


def section(run: Run) -> Section:
    title, read = "Directions", run.record.readings()
    if not read:
        return Section(id="directions", title=title, body=lacking("The microscope read no step of this run.",
                                                                  run.config, "geometry"))
    looks = fitted(run, "directions", read, lambda step: look(run, step), BUDGET)
    if not looks:
        return Section(id="directions", title=title, body=lacking(
            f"None of the {len(read)} readings of this run can be used: {'; '.join(run.faults[:2])}", run.config,
            "geometry"))
    kept = set(run.record.groups())
    by_step = {one["step"]: one for one in looks if one["step"] in kept}
    told = fitted(run, "answers", list(by_step), lambda step: answers(run, by_step[step]), TEXTS)
    texts = {part["step"]: part["texts"] for part in told}
    kinds = number_kinds(looks)
    data = {"looks": [one | {"kept": one["step"] in kept, "texts": texts.get(one["step"])} for one in looks],
            "definitions": [{"name": one, "title": one.name, "equation": one.equation, "says": one.sentence}
                            for one in DEFINITIONS],
            "kinds": kinds, "chart": spectrum_chart(looks), "keep": command(run.config, "rollouts")}
    some = f"{len(looks)} of the {len(read)} readings are in this file." if len(looks) < len(read) else ""
    return Section(
        id="directions", title=title, data=data, body=tag("p", some, class_="soft") if some else Html(),
        lead="Rollout i pulls the weights along its row g_i = Σ_t w_it ∇log π(y_it). The cosines say which rollouts "
             "pull together, the ranks how many directions that leaves. A rank means nothing without its null.")


def fitted(run: Run, what: str, steps: Sequence[int], make: Callable[[int], Part | None], budget: int) -> list[Part]:
    """`make` of as many steps as fit a budget of JSON characters, by the size of the last one; damage is a fault."""
    made: dict[int, Part | None] = {}

    def of(step: int) -> Part | None:
        if step not in made:
            try:
                made[step] = make(step)
            except (CreditscopeError, KeyError, IndexError, ValueError, TypeError) as error:
                made[step] = None
                run.faults.append(f"{what} of step {step}: not as a run has it ({type(error).__name__}: {error})")
        return made[step]

    last = next((part for step in reversed(steps) if (part := of(step)) is not None), None)
    if last is None:
        return []
    most = max(1, min(MOST, budget // size(last)))
    while True:
        parts = [part for step in spaced(steps, most) if (part := of(step)) is not None] or [last]
        if size(parts) <= budget or most == 1:
            return parts
        most = max(1, min(most - 1, most * budget // size(parts)))


def size(part: object) -> int:
    return len(json.dumps(part, separators=(",", ":")))


def look(run: Run, step: int) -> Part | None:
    arrays = run.reading(step)
    if arrays is None or not len(arrays["group"]):
        return None
    group, shapes = arrays["group"], {name: arrays[name].shape for name in ("gram", "reward")}
    if shapes != {"gram": (len(group), len(group)), "reward": (len(group),)}:
        raise ValueError(f"group has {len(group)} rows beside {shapes}")
    each = [of_group(arrays, np.flatnonzero(group == name)) | {"id": int(name)} for name in np.unique(group)]
    mean = mean_of(each)
    return {"step": step, "groups": [compact(one) for one in each], "mean": compact(mean), "between": between(arrays)}


def of_group(arrays: Arrays, rows: NDArray[np.intp]) -> Part:
    """The block of a group, best reward first. A group without gradient has rewards and, where read, scores."""
    order = np.argsort(-arrays["reward"][rows].astype(np.float64), kind="stable")
    block, eps = block_of(arrays["gram"], rows), float(arrays["eps"])
    w = arrays["row_w"][rows].astype(np.float64) if "row_w" in arrays else None
    scores = block_of(arrays["scores"], rows) if "scores" in arrays else None
    out: Part = {"rows": rows[order].tolist(), "reward": numbers(arrays["reward"][rows[order]]),
                 "w": None if w is None else numbers(w[order]), "ranks": {}}
    if scores is not None and scores.any():
        out["ranks"][UNWEIGHTED] = ranks_of(scores, eps)
    for name, other in zip(arrays.get("other_names", ()), arrays.get("other_grams", ()), strict=True):
        if (inner := block_of(other, rows)).any():
            out["ranks"][shown(f"also {name}", 80)] = ranks_of(inner, eps)
    if not block.any():
        return out
    ranks, ordered = ranks_of(block, eps), block[np.ix_(order, order)]
    out |= {"norm": numbers(norms(ordered), 3), "cos": cosines(ordered), "sigma": normalised(block),
            "orthogonal": normalised(np.diag(np.diag(block)))}
    if w is not None and w.any():
        found = {"w_null": geometry.w_null(w),
                 "centred_effective_rank": geometry.centred_rank(block, w, eps, scores)}
        if scores is None and geometry.live(w).all():
            scores = geometry.unweighted(block, w)
        if scores is not None and len(draws := shuffled(scores, w)):
            low, high = np.quantile(draws, (0.025, 0.975), axis=0)
            out |= {"low": low, "high": high}
            found["shuffled"] = float((draws.sum(axis=1) ** 2).mean())
        ranks |= {name: value for name, value in found.items() if value is not None}
    out["ranks"][WEIGHTED] = ranks
    return out


def block_of(gram: NDArray[Any], rows: NDArray[np.intp]) -> Array:
    return gram[np.ix_(rows, rows)].astype(np.float64)


def norms(gram: Array) -> Array:
    return np.asarray(np.sqrt(np.clip(np.diag(gram), 0.0, None)))


def ranks_of(block: Array, eps: float) -> dict[str, float]:
    """Every definition, and r_eff of orthogonal rows of the same norms."""
    null = geometry.norm_null(block)
    return geometry.ranks(spectrum(block, eps)) | ({} if null is None else {"norm_null": null})


def normalised(gram: Array) -> Array:
    """σ_k / √Σσ², descending, of one Gram or of many; (Σ_k)² is r_eff."""
    values = np.sqrt(np.clip(np.linalg.eigvalsh(gram)[..., ::-1], 0.0, None))
    return np.asarray(values / np.sqrt((values**2).sum(axis=-1, keepdims=True)))


def shuffled(scores: Array, w: Array, draws: int = DRAWS, seed: int = 0) -> Array:
    """(draws, R) `normalised` of the rows w_π(i) ψ_i for random π; a draw without a row that is not 0 is left out."""
    random = np.random.default_rng(seed)
    dealt = np.stack([w[random.permutation(len(w))] for _ in range(draws)])
    grams = scores * dealt[:, :, None] * dealt[:, None, :]
    return normalised(grams[grams.any(axis=(1, 2))])


def cosines(gram: Array) -> str:
    """cos(g_i, g_j) for i < j, row by row, in hundredths, a byte each, in base64; −128 beside a row of norm 0.

    >>> np.frombuffer(base64.b64decode(cosines(np.array([[1.0, -1, 0], [-1, 4, 0], [0, 0, 0]]))), np.int8).tolist()
    [-50, -128, -128]
    """
    norm = norms(gram)
    above = np.triu_indices(len(gram), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = np.clip(gram[above] / norm[above[0]] / norm[above[1]], -1, 1)
    hundredths = np.where(np.isfinite(cosine), np.round(100 * cosine), -128).astype(np.int8)
    return base64.b64encode(hundredths.tobytes()).decode()


def between(arrays: Arrays) -> Part | None:
    """Cosines and norms of the groups' mean rows; None where pairs of groups were never in one pass."""
    gram, group = arrays["gram"], arrays["group"]
    if not np.isfinite(gram).all() or len(np.unique(group)) < 2:
        return None
    pooled, (names, counts) = geometry.pooled(gram, group), np.unique(group, return_counts=True)
    mean = pooled / np.outer(counts, counts)
    return {"ids": names.tolist(), "cos": cosines(mean), "norm": numbers(norms(mean), 3)}


def mean_of(groups: Sequence[Part]) -> Part:
    """Means over the groups that have the reading: for the trained rows these are the live ones."""
    out: Part = {"live": sum("cos" in one for one in groups), "ranks": {}}
    for kind in dict.fromkeys(kind for one in groups for kind in one["ranks"]):
        have = [one["ranks"][kind] for one in groups if kind in one["ranks"]]
        out["ranks"][kind] = {name: float(np.mean([ranks[name] for ranks in have if name in ranks]))
                              for name in dict.fromkeys(name for ranks in have for name in ranks)}
    for name in CURVES:
        have = [one[name] for one in groups if name in one]
        if have and len({len(values) for values in have}) == 1:
            out[name] = np.mean(have, axis=0)
    return out


def compact(part: Part) -> Part:
    """A group, or the mean of groups, as JSON: ranks in the order of the definitions, numbers rounded."""
    ranks = {kind: numbers([found.get(one) for one in DEFINITIONS]) for kind, found in part["ranks"].items()}
    # Values are shares of 1: what is below 1e-4 cannot be seen.
    curves = {name: numbers(np.round(part[name], 4)) for name in CURVES if name in part}
    return part | {"ranks": ranks} | curves


def number_kinds(looks: Sequence[Part]) -> list[str]:
    """The kinds of rows that any reading has; in the readings each name is replaced by its index here."""
    parts = [part for one in looks for part in (one["mean"], *one["groups"])]
    found = dict.fromkeys([WEIGHTED, UNWEIGHTED, *(kind for part in parts for kind in part["ranks"])])
    kinds = [kind for kind in found if any(kind in part["ranks"] for part in parts)]
    for part in parts:
        part["ranks"] = [part["ranks"].get(kind) for kind in kinds]
    return kinds


def answers(run: Run, read: Part) -> Part | None:
    """The texts of a reading's rollouts, by row; None where the kept rollouts are not those that were read."""
    kept = run.rollouts(read["step"])
    groups = {row: group["id"] for group in read["groups"] for row in group["rows"]}
    if kept is None or dict(enumerate(kept["group"].tolist())) != groups:
        return None
    return {"step": read["step"], "texts": [shown(str(text), LONGEST) for text in kept["text"]]}


def numbers(values: Any, digits: int = 4) -> list[float | None]:
    """Each rounded, and without a decimal point where it has no use for one; None where it is not a number.

    >>> numbers([1.0, 0.123456, float("nan")])
    [1, 0.1235, None]
    """
    found = [rounded(value if value is None else float(value), digits) for value in values]
    return [int(x) if x is not None and x.is_integer() else x for x in found]


def spectrum_chart(looks: Sequence[Part]) -> Spec:
    """σ_k/√Σσ² as measured, of orthogonal rows of the same norms, and the band of shuffled w, on one scale.

    The script adds the rows: k, measured, orthogonal, shuffled_low, shuffled_high.
    """
    groups = [group for one in looks for group in one["groups"]]
    top = max([0.1, *(value for group in groups for name in CURVES for value in group.get(name, ()))])
    most = max([2, *(len(group["rows"]) for group in groups)])
    measured, orthogonal, chance = names = ("measured", "orthogonal rows, same norms", "w shuffled, 95 %")
    colours = dict(zip(names, COLOURS, strict=False))
    ticks = list(range(1, most + 1, -(-most // 12)))
    x = {"field": "k", "type": "quantitative", "title": "direction k", "axis": {"values": ticks, "grid": False},
         "scale": {"nice": False, "domain": [1, most]}}

    def y(field: str) -> Spec:
        return {"field": field, "scale": {"domain": [0, top]}, "axis": {"tickCount": 4}}

    return spec_of("Singular values, σ / √Σσ²", [
        marked({"type": "area", "opacity": 0.3}, x, y("shuffled_low"), chance, colours, y2={"field": "shuffled_high"}),
        marked({"type": "line", "strokeDash": DASHED}, x, y("orthogonal"), orthogonal, colours),
        marked({"type": "line", "strokeWidth": 2, "point": {"aria": False}}, x, y("measured"), measured, colours)],
        "Singular values of the group's matrix, largest first, beside two nulls")
