"""Every method against the twin of the surrogate, every exact verdict against the published one, and the optimiser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from importlib.resources import files

import torch
from torch.nn.utils.rnn import pad_sequence

from creditscope.batch.rollouts import Rollouts
from creditscope.claims.table import run_exact
from creditscope.exact import p2_optimizer
from creditscope.methods.axes import Method
from creditscope.methods.table import METHODS
from creditscope.objective.surrogate import effective_credit, surrogate
from creditscope.optimizer.carry import carry
from creditscope.optimizer.replay import adamw
from creditscope.selftest import twin
from creditscope.selftest.check import WorstError, worst_of
from creditscope.selftest.conformance import apart

MOVES = {"at ratio 1": 0.0, "near": 3e-4, "far": 0.8}
"""How far log π moved since sampling: not at all, to the bounds of a sequence ratio, past most bounds."""
TURNS = {"at the bounds": 0, "at the bounds again": 1}
BETA = 0.1
VERDICTS = "verdicts.json"


def methods(device: torch.device) -> WorstError:
    """max|Δw| / max|w| of every method, with KL where it has one, against the twin."""
    errors: dict[str, float] = {}
    for name, found in METHODS.items():
        m = found.replace(beta=BETA) if found.kl != "none" else found
        for place, rows, logp in _places(m):
            own = _outside(rows) if m.external else twin.advantages(m, rows)
            batch, live = _padded(rows).to(device), _pad(logp).to(device)
            given = _pad(own).to(device) if m.external else None
            fast = effective_credit(partial(surrogate, m, rollouts=batch, credit=given), live)
            errors[f"{name} {place}"] = apart(fast, _pad(twin.credit(m, rows, logp, own)).to(device))
    return worst_of(errors, f"cases ({len(METHODS)} methods)")


def _places(m: Method) -> Iterator[tuple[str, list[twin.TwinRollout], twin.Tokens]]:
    """Batches and policies: at fixed distances from the sampler, and at the method's own bounds."""
    for seed, (place, move) in enumerate(MOVES.items()):
        yield place, *twin.answers(move, seed)
    rows, _ = twin.answers(0.0, seed=len(MOVES))
    for place, turn in TURNS.items():
        yield place, rows, twin.at_the_bounds(m, rows, turn)


def _outside(rows: list[twin.TwinRollout]) -> twin.Tokens:
    """Credit for methods that have none of their own."""
    return [[row.reward - 0.5 + 0.1 * t for t in range(len(row.tokens))] for row in rows]


def _pad(rows: twin.Tokens) -> torch.Tensor:
    return pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


def _padded(rows: list[twin.TwinRollout]) -> Rollouts:
    return Rollouts(
        tokens=_pad([[float(x) for x in row.tokens] for row in rows]).long(),
        mask=_pad([[1.0] * len(row.tokens) for row in rows]).bool(), logp=_pad([row.old for row in rows]),
        reward=torch.tensor([row.reward for row in rows], dtype=torch.float64),
        group=torch.tensor([row.group for row in rows]), ref_logp=_pad([row.ref for row in rows]),
        entropy=_pad([row.entropy for row in rows]))


def exact_verdicts() -> dict[str, str]:
    return {f"{verdict.claim} | {verdict.definition} | {verdict.subject}": verdict.outcome for verdict in run_exact()}


def verdicts(device: torch.device) -> WorstError:
    """How many verdicts of `papers check --exact` differ from those of the package. On the CPU."""
    published = json.loads(files("creditscope.selftest").joinpath(VERDICTS).read_text(encoding="utf-8"))
    found = exact_verdicts()
    other = [name for name in published.keys() | found.keys() if published.get(name) != found.get(name)]
    detail = f"{min(other)}: {found.get(min(other))}, published {published.get(min(other))}" if other else \
        f"{len(found)} verdicts, closed forms and enumeration"
    return WorstError(len(other), detail)


def replayed(device: torch.device) -> WorstError:
    """max|Δθ| after eight steps: the closed form against torch.optim.AdamW on the device, each implementation."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-4, 0, 12, dtype=torch.float64)
    grads, start = torch.randn(8, 12, dtype=torch.float64, generator=draw) * sizes, torch.ones(12, dtype=torch.float64)
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}
    true = adamw(start, grads, **settings)  # type: ignore[arg-type]
    errors = {}
    for name, how in {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}.items():
        theta = torch.nn.Parameter(start.clone().to(device))
        optimizer = torch.optim.AdamW([theta], **settings, **how)  # type: ignore[arg-type]
        for g in grads:
            theta.grad = g.clone().to(device)
            optimizer.step()
        errors[name] = float((theta.detach().cpu() - true).abs().max())
    return worst_of(errors, "implementations of AdamW")


def carried(device: torch.device) -> WorstError:
    """C_{T,k} in closed form against what AdamW still moves when a constant gradient has stopped, in full steps."""
    errors = {f"T = {last}, k = {lag}, β = {betas}": abs(made - carry(last, lag, betas))
              for betas in ((0.9, 0.95), (0.9, 0.999), (0.8, 0.3)) for last in (2, 10, 50)
              for lag, made in enumerate(p2_optimizer.carried(last, betas, 4, device))}
    return worst_of(errors, "steps after the stop")
