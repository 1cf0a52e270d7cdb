"""Every method of the table against the slow twin of the surrogate; every exact verdict against the published one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import torch

from creditscope.batch.rollouts import Rollouts
from creditscope.claims.table import run_exact
from creditscope.claims.verdict import Verdict
from creditscope.methods.axes import Method
from creditscope.methods.table import METHODS
from creditscope.objective.surrogate import effective_credit, surrogate
from creditscope.optimizer.replay import adamw, carry
from creditscope.selftest import twin
from creditscope.selftest.check import Measured, worst_of

MOVES = {"at ratio 1": 0.0, "near": 3e-4, "far": 0.8}
"""How far log π went since sampling: not at all, to the bounds of a sequence ratio, past most bounds."""
TURNS = {"at the bounds": 0, "at the bounds again": 1}
BETA = 0.1
VERDICTS = "verdicts.json"


def methods(device: torch.device) -> Measured:
    """max|Δw| / max|w| of every method, with KL where it has one, against the twin."""
    errors: dict[str, float] = {}
    for name, found in METHODS.items():
        m = found.replace(beta=BETA) if found.kl != "none" else found
        for place, rows, logp in _places(m):
            own = _outside(rows) if m.external else twin.advantages(m, rows)
            batch, live = _padded(rows, logp, device)
            errors[f"{name} {place}"] = _apart(m, batch, live, own, twin.credit(m, rows, logp, own))
    return worst_of(errors, f"cases ({len(METHODS)} methods)")


def _places(m: Method) -> Iterator[tuple[str, list[twin.TwinRollout], twin.Tokens]]:
    """Batches and the policies that are asked: at fixed distances from the sampler, and at the method's own bounds."""
    for seed, (place, move) in enumerate(MOVES.items()):
        yield place, *twin.answers(move, seed)
    rows, _ = twin.answers(0.0, seed=len(MOVES))
    for place, turn in TURNS.items():
        yield place, rows, twin.at_the_bounds(m, rows, turn)


def _outside(rows: list[twin.TwinRollout]) -> twin.Tokens:
    """A critic's credit, for methods that have none of their own."""
    return [[row.reward - 0.5 + 0.1 * t for t in range(len(row.tokens))] for row in rows]


def _apart(m: Method, batch: Rollouts, logp: torch.Tensor, own: twin.Tokens, slow: twin.Tokens) -> float:
    given = _pad(own).to(logp.device) if m.external else None
    fast = effective_credit(lambda lp: surrogate(m, lp, batch, given), logp)
    true = _pad(slow).to(logp.device)
    return float((fast - true).abs().max() / true.abs().max())


def _pad(rows: twin.Tokens) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)


def _padded(rows: list[twin.TwinRollout], logp: twin.Tokens, device: torch.device) -> tuple[Rollouts, torch.Tensor]:
    """The same batch as tensors."""
    lengths = torch.tensor([len(row.tokens) for row in rows])
    width = int(lengths.max())
    batch = Rollouts(
        tokens=_pad([[float(x) for x in row.tokens] for row in rows]).long().to(device),
        mask=(torch.arange(width) < lengths[:, None]).to(device), logp=_pad([row.old for row in rows]).to(device),
        reward=torch.tensor([row.reward for row in rows], dtype=torch.float64, device=device),
        group=torch.tensor([row.group for row in rows], device=device),
        ref_logp=_pad([row.ref for row in rows]).to(device), entropy=_pad([row.entropy for row in rows]).to(device))
    return batch, _pad(logp).to(device)


# -- exact verdicts ----------------------------------------------------------------------------------------------------


def key(verdict: Verdict) -> str:
    return f"{verdict.claim} | {verdict.definition} | {verdict.subject}"


def verdicts(device: torch.device) -> Measured:
    """How many of the verdicts of `check --exact` are not those that came with the package. On the CPU."""
    published = json.loads(files("creditscope.selftest").joinpath(VERDICTS).read_text(encoding="utf-8"))
    found = {key(verdict): verdict.outcome for verdict in run_exact()}
    other = [name for name in published.keys() | found.keys() if published.get(name) != found.get(name)]
    detail = f"{min(other)}: {found.get(min(other))}, published {published.get(min(other))}" if other else \
        f"{len(found)} verdicts, closed forms and enumeration"
    return Measured(len(other), detail)


def write_verdicts(path: Path) -> None:
    """The file that `verdicts` compares with."""
    found = {key(verdict): verdict.outcome for verdict in run_exact()}
    path.write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


# -- the optimiser -----------------------------------------------------------------------------------------------------


def replayed(device: torch.device) -> Measured:
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


def carried(device: torch.device) -> Measured:
    """C_{T,k} in closed form against what AdamW still moves when a constant gradient has stopped, in full steps."""
    errors = {}
    for betas in ((0.9, 0.95), (0.9, 0.999), (0.8, 0.3)):
        for last in (2, 10, 50):
            theta = torch.zeros(1, dtype=torch.float64, device=device, requires_grad=True)
            optimizer = torch.optim.AdamW([theta], lr=1.0, betas=betas, weight_decay=0.0, foreach=False)
            for t in range(1, last + 5):
                theta.grad = torch.full_like(theta, 1e6 * (t < last))
                before = float(theta.detach())
                optimizer.step()
                if t >= last:
                    made = before - float(theta.detach())
                    errors[f"T = {last}, k = {t - last}, β = {betas}"] = abs(made - carry(last, t - last, betas))
    return worst_of(errors, "steps after the stop")
