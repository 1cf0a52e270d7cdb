"""Layers: share of the gradient's energy, and directions of a group, by parameter.

Of parameter l the microscope keeps the Gram of each group's rows, K^l_ij = ⟨g^l_i, g^l_j⟩; its trace is the energy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditscope.files.markup import Html, shown, tag
from creditscope.report.directions import Array, Part, fitted, normalised, numbers
from creditscope.report.remedies import words
from creditscope.report.run import Arrays, Run
from creditscope.report.section import Section, lacking

BUDGET = 200_000
LONGEST = 160
WRAPPERS = frozenset({"weight", "bias", "default", "base_layer", "lora_A", "lora_B"})
"""Last parts of a name that do not tell what the parameter does."""
COLUMNS = ("share", "effective_rank", "top1", "stable_rank")


def section(run: Run) -> Section:
    title, read = "Layers", run.record.readings()
    if not read:
        return Section(id="layers", title=title, body=lacking("The microscope read no layer of this run.",
                                                              run.config, "geometry"))
    looks = fitted(run, "layers", read, lambda step: look(run, step), BUDGET)
    if not looks:
        return Section(id="layers", title=title, body=lacking(
            "No reading of this run holds the Gram matrices of single parameters.", run.config, "geometry"))
    some = f"{len(looks)} of the {len(read)} readings are in this file. " if len(looks) < len(read) else ""
    no_matrices = all(value is None for one in looks for value in one["layers"]["stable_rank"])
    note = some + (f"No stable rank of the gradient matrices: {words(run.config, 'matrices')}." if no_matrices else "")
    names = looks[-1]["names"]
    data = {"steps": [one["step"] for one in looks], "names": [shown(name, LONGEST) for name in names],
            "kind": [shown(kind(name), LONGEST) for name in names],
            "layers": over_steps(looks, "names", "layers", names),
            "kinds": over_steps(looks, "kinds", "by_kind", looks[-1]["kinds"]),
            "kind_names": [shown(name, LONGEST) for name in looks[-1]["kinds"]]}
    return Section(
        id="layers", title=title, data=data, body=tag("p", note, class_="soft") if note else Html(),
        lead="Share: of the energy Σ‖g_i‖² of all rollouts. r_eff and top-1: of a group's rows in this parameter "
             "alone, mean of live groups. Stable rank: ‖∇W‖²_F / σ₁² of the parameter's own gradient matrix. "
             "The line is r_eff over the steps that were read.")


def kind(name: str) -> str:
    """What a parameter is, without its place.

    >>> kind("model.layers.3.self_attn.q_proj.weight"), kind("layers.0.q_proj.lora_A.default.weight"), kind("weight")
    ('q_proj', 'q_proj', 'weight')
    """
    parts = name.split(".")
    while len(parts) > 1 and parts[-1] in WRAPPERS:
        parts.pop()
    return parts[-1]


def look(run: Run, step: int) -> Part | None:
    """One reading, by parameter and by kind; None where it kept no Gram of single parameters."""
    arrays = run.reading(step)
    if arrays is None or "layers" not in arrays:
        return None
    names, each = [str(name) for name in arrays["layer_names"]], arrays["layers"].astype(np.float64)
    if each.ndim != 4 or len(each) != len(names) or each.shape[2] != each.shape[3] or not np.isfinite(each).all():
        raise ValueError(f"layers of shape {each.shape} for {len(names)} names, or not finite")
    found = {"share": shares(each), **geometry_of(each), "stable_rank": stable_ranks(arrays, names)}
    return {"step": step, "names": names, "layers": {key: numbers(found[key]) for key in COLUMNS},
            **by_kind([kind(name) for name in names], found)}


def shares(grams: Array) -> Array:
    """(L,) tr K^l / Σ_l tr K^l, over all groups; NaN where no row has a gradient."""
    energy = np.einsum("lgii->l", grams)
    return np.asarray(energy / energy.sum() if energy.sum() > 0 else np.full(len(energy), np.nan))


def geometry_of(grams: Array) -> dict[str, Array]:
    """(L,) r_eff = (Σσ)²/Σσ² and top-1 = σ₁²/Σσ², means over the groups with a gradient in the parameter, or NaN."""
    with np.errstate(invalid="ignore"):
        sigma = normalised(grams)
    return {"effective_rank": np.array([mean(each) for each in sigma.sum(axis=-1) ** 2]),
            "top1": np.array([mean(each) for each in sigma[..., 0] ** 2])}


def stable_ranks(arrays: Arrays, names: Sequence[str]) -> Array:
    """(L,) Σσ²/σ₁² of the gradient matrices, the middle of the interval that was read, or NaN."""
    interval: Mapping[str, NDArray[Any]] = dict(zip(
        map(str, arrays.get("matrix_names", ())), arrays.get("matrix_stable_rank", ()), strict=True))
    return np.array([np.mean(interval[name]) if name in interval else np.nan for name in names])


def by_kind(kinds: Sequence[str], found: Mapping[str, Array]) -> Part:
    """The same by kind: shares add, the others are means over the parameters that have them."""
    names = list(dict.fromkeys(kinds))
    rows = [np.flatnonzero(np.array(kinds) == name) for name in names]
    table = {key: [found[key][i].sum() if key == "share" else mean(found[key][i]) for i in rows] for key in COLUMNS}
    return {"kinds": names, "by_kind": {key: numbers(values) for key, values in table.items()}}


def mean(values: Array) -> float:
    return float(np.mean(values[np.isfinite(values)])) if np.isfinite(values).any() else float("nan")


def over_steps(looks: Sequence[Part], names: str, part: str, order: Sequence[str]) -> dict[str, list[list[Any]]]:
    """column -> for each name in `order` its values at the steps, None where a step lacks the name."""
    found = {key: [dict(zip(one[names], one[part][key], strict=True)) for one in looks] for key in COLUMNS}
    return {key: [[at_step.get(name) for at_step in steps] for name in order] for key, steps in found.items()}
