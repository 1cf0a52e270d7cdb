"""w of our rows against w of TRL's and verl's own code on the same batches (goldens.npz), and against live TRL.

The goldens hold the batches, the library's settings, our row for them, and the library's w, all in float64. They are
written by tests/selftest/make_goldens.py where the libraries are installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.methods.axes import Method
from creditscope.methods.dialects import DIALECTS
from creditscope.objective.surrogate import effective_credit, surrogate
from creditscope.selftest.check import WorstError, worst_of

GOLDENS = "goldens.npz"


@dataclass(frozen=True)
class Golden:
    """w of a library on one batch under one setting."""

    library: str
    row: str
    changes: dict[str, Any]
    """Changes to the row."""
    config: str
    """TRL's configuration class; empty for verl."""
    settings: dict[str, Any]
    text: str
    """The library's settings in its own words."""
    tolerance: float
    batch: str
    w: Tensor
    credit: Tensor | None
    """(B, T) credit from outside, where the row has none of its own."""

    @property
    def method(self) -> Method:
        return DIALECTS[self.row].replace(**self.changes)


@cache
def _stored() -> dict[str, NDArray[Any]]:
    with files("creditscope.selftest").joinpath(GOLDENS).open("rb") as file, np.load(file, allow_pickle=False) as found:
        return dict(found)


@cache
def batch_of(name: str) -> dict[str, Tensor]:
    prefix = f"batch/{name}/"
    return {key.removeprefix(prefix): torch.from_numpy(value) for key, value in _stored().items()
            if key.startswith(prefix)}


def goldens(library: str) -> Iterator[Golden]:
    stored = _stored()
    cases = [json.loads(str(text)) for text in stored[f"{library}/cases"]]
    for key in stored:
        if key.startswith(f"{library}/w/"):
            batch = key.removeprefix(f"{library}/w/")
            for number, w in zip(stored[f"{library}/index/{batch}"].tolist(), stored[key], strict=True):
                outside = stored.get(f"{library}/credit/{batch}/{number}")
                yield Golden(library=library, batch=batch, w=torch.from_numpy(w), **cases[number],
                             credit=None if outside is None else torch.from_numpy(outside))


def ours(golden: Golden) -> Tensor:
    """(B, T) w of our row on the golden's batch."""
    batch = batch_of(golden.batch)
    rollouts = Rollouts(tokens=batch["tokens"], mask=batch["mask"], logp=batch["old"], reward=batch["reward"],
                        group=batch["group"], ref_logp=batch["ref"], entropy=batch["entropy"],
                        collision=batch["collision"])
    return effective_credit(lambda logp: surrogate(golden.method, logp, rollouts, golden.credit), batch["logp"])


def apart(w: Tensor, theirs: Tensor) -> float:
    """max|Δw| / max|w|."""
    return float((w - theirs).abs().max() / theirs.abs().max())


def stored(library: str, device: torch.device) -> WorstError:
    """The largest error over the stored cases, in units of each case's tolerance (verl adds 1e-8 to denominators)."""
    errors = {f"{g.row} ({g.text}) on {g.batch}": apart(ours(g), g.w) / g.tolerance for g in goldens(library)}
    return worst_of(errors, f"cases of {library} {_stored()[f'{library}/version']}")


def live(device: torch.device) -> WorstError:
    """max|Δw| / max|w| of every TRL row against the trainers of the installed TRL."""
    from creditscope.selftest.trl_live import advantage_and_credit

    errors = {}
    for golden in goldens("trl"):
        if golden.batch in ("trl_off_policy", "trl_graded") and "beta" not in golden.settings | golden.changes:
            _, w = advantage_and_credit(golden.config, golden.settings, batch_of(golden.batch))
            errors[f"{golden.row} ({golden.text}) on {golden.batch}"] = apart(ours(golden), w)
    return worst_of(errors, "cases of TRL's own trainers")
