"""Our rows against what TRL's and verl's own code gave the same batches, stored in goldens.npz; and against live TRL.

The goldens hold the batches, the settings of the library, the row of ours that claims to equal them, and the library's
w, all in float64. They are written by tests/selftest/make_goldens.py where the libraries are installed.
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
from creditscope.selftest.check import Measured, worst_of

GOLDENS = "goldens.npz"
TensorBatch = dict[str, Tensor]


@dataclass(frozen=True)
class Golden:
    """What a library gave one batch under one setting."""

    library: str
    row: str
    changes: dict[str, Any]
    """What `.but(...)` changes in the row."""
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
        found = DIALECTS[self.row]
        return found.replace(**self.changes) if self.changes else found


@cache
def _stored() -> dict[str, NDArray[Any]]:
    with files("creditscope.selftest").joinpath(GOLDENS).open("rb") as file, np.load(file, allow_pickle=False) as found:
        return dict(found)


def library_version(library: str) -> str:
    """The version whose code made the goldens."""
    return str(_stored()[f"{library}/version"])


@cache
def batch_of(name: str) -> TensorBatch:
    prefix = f"batch/{name}/"
    return {key.removeprefix(prefix): torch.from_numpy(value) for key, value in _stored().items()
            if key.startswith(prefix)}


def goldens(library: str) -> Iterator[Golden]:
    """Every stored case of a library."""
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


# -- the checks --------------------------------------------------------------------------------------------------------


def stored(library: str, device: torch.device) -> Measured:
    """The largest error over the stored cases, in tolerances of their own: verl adds 1e-8 to some denominators."""
    errors = {f"{g.row} ({g.text}) on {g.batch}": apart(ours(g), g.w) / g.tolerance for g in goldens(library)}
    return worst_of(errors, f"cases of {library} {library_version(library)}")


def live(device: torch.device) -> Measured:
    """max|Δw| / max|w| of every TRL row as it stands, against the trainers of the TRL that is installed here."""
    from creditscope.selftest.trl_live import advantage_and_credit

    errors = {}
    for golden in goldens("trl"):
        if golden.batch in ("trl_off_policy", "trl_graded") and "beta" not in golden.settings | golden.changes:
            _, w = advantage_and_credit(golden.config, golden.settings, batch_of(golden.batch))
            errors[f"{golden.row} ({golden.text}) on {golden.batch}"] = apart(ours(golden), w)
    return worst_of(errors, "cases of TRL's own trainers")
