"""Arrays that a trainer's own code gave, stored because its package cannot live in our test environment, beside ours.

A peer's module has CASES, the version that it was run with, and `credit(case, batch) -> (advantages, w)`, which needs
the package. In an environment that has it:

    python tests/conformance/openrlhf_peer.py tests/conformance/openrlhf_0.11.2.npz
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batches import Batch, batches
from torch import Tensor

EXACT = 1e-12
SINGLE = 1e-6
"""Where the peer computes a part in float32 whatever it is given: rounding, relative to the largest value."""
PER_SEQUENCE = 1.1e-8  # a sequence's sum is divided by L + 1e-8, and L = 1 occurs


@dataclass(frozen=True)
class PeerCase:
    """One of our rows, `changes` made to it, and the settings of the peer that it claims to equal."""

    row: str
    settings: Mapping[str, Any]
    label: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = EXACT
    advantages: float = EXACT
    """Tolerance of the advantages alone."""
    apart: tuple[str, ...] = ()
    """Batches on which the peer computes something that no row has; a test says what."""

    @property
    def name(self) -> str:
        return f"{self.row}{'+' if self.label else ''}{self.label}"

    @property
    def told(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.settings.items())


@dataclass(frozen=True)
class Stored:
    """The stored arrays of one peer."""

    path: Path
    cases: Sequence[PeerCase]
    batches: tuple[str, ...]

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        with np.load(self.path, allow_pickle=False) as stored:
            return dict(stored)

    def theirs(self, case: PeerCase, batch: str) -> tuple[Tensor, Tensor]:
        """(advantages, w) as the peer's code gave them."""
        row = self.arrays["cases"].tolist().index(case.name)
        return tuple(torch.from_numpy(self.arrays[f"{what}/{batch}"][row]) for what in ("advantages", "w"))

    def ours(self, case: PeerCase, batch: str) -> tuple[Tensor, Tensor]:
        """(advantages, w) of our row. A row that takes credit from outside is given the peer's."""
        from ours import as_rollouts

        from creditscope import effective_credit, surrogate
        from creditscope.methods.dialects import DIALECTS
        from creditscope.objective.advantages import token_advantage

        row, here = DIALECTS[case.row], batches()[batch]
        method = row.replace(**case.changes) if case.changes else row
        rollouts = as_rollouts(here)
        outside = self.theirs(case, batch)[0] if method.external else None
        credit = token_advantage(method, rollouts) if outside is None else outside
        w = effective_credit(lambda logp: surrogate(method, logp, rollouts, outside), here["logp"])
        return credit.expand_as(here["logp"]), w

    def differences(self, case: PeerCase, batch: str) -> tuple[float, float]:
        """How far our advantages and our w stand from the peer's, relative to the peer's largest."""
        mask = batches()[batch]["mask"]
        (our_a, our_w), (their_a, their_w) = self.ours(case, batch), self.theirs(case, batch)
        return _apart(our_a[mask], their_a[mask]), _apart(our_w, their_w)  # w must be 0 on padding too

    def table(self) -> list[dict[str, object]]:
        """One entry per case, for docs/conformance.md."""
        out: list[dict[str, object]] = []
        for case in self.cases:
            worst = max(max(self.differences(case, batch)) for batch in self.batches if batch not in case.apart)
            limit = max(case.tolerance, case.advantages)
            out.append({"case": case.name, "row": case.row, "changes": dict(case.changes), "peer": case.told,
                        "difference": worst, "tolerance": limit, "passes": worst <= limit})
        return out


def _apart(a: Tensor, b: Tensor) -> float:
    """max |a − b| / max |b|; the difference itself where b is 0 throughout."""
    return float((a - b).abs().max() / (b.abs().max() or 1.0))


ABSENT = {"flash_attn": (), "flash_attn.utils": (), "flash_attn.utils.distributed": ("all_gather",),
          "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
          "vllm": (), "vllm.inputs": ("TokensPrompt",), "vllm.utils": ("random_uuid",)}
"""Modules that OpenRLHF or SkyRL imports and none of this calls, with the names that they take from them."""


def absent(modules: dict[str, tuple[str, ...]] = ABSENT) -> None:
    """Empty modules in place of those that are not installed; a call of one of their names is an error."""
    missing = {name for name in modules if "." not in name and importlib.util.find_spec(name) is None}
    for name, names in modules.items():
        if name.partition(".")[0] in missing and name not in sys.modules:
            module = types.ModuleType(name)
            module.__path__ = []
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            for one in names:
                setattr(module, one, type(one, (), {"__init__": _refuse}))
            sys.modules[name] = module


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("not installed here: no test may call it")


Credit = Callable[[Any, Batch], tuple[Tensor, Tensor]]


@contextmanager
def in_float64() -> Iterator[None]:
    """Both libraries make tensors from lists of floats, in the default type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def goldens(package: str, version: str, cases: Sequence[PeerCase], credit: Credit,
            names: Sequence[str]) -> dict[str, np.ndarray]:
    """For each batch `w/BATCH` and `advantages/BATCH`, (cases, B, T) float64; `cases` names the rows, in order."""
    stored: dict[str, np.ndarray] = {package: np.array(version), "torch": np.array(torch.__version__),
                                     "cases": np.array([case.name for case in cases])}
    for name in names:
        with in_float64():
            pairs = [credit(case, batches()[name]) for case in cases]
        stored[f"advantages/{name}"] = np.stack([advantages.double().numpy() for advantages, _ in pairs])
        stored[f"w/{name}"] = np.stack([w.double().numpy() for _, w in pairs])
    return stored


def write(made: dict[str, np.ndarray]) -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} OUT.npz")
    np.savez_compressed(sys.argv[1], **made)
    print(f"wrote {len(made['cases'])} cases to {sys.argv[1]}, {Path(sys.argv[1]).stat().st_size / 1000:.0f} kB")
