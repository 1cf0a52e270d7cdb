"""One reading from the rows of all ranks: each rank measures its own, and the first joins them.

A rank's loss is scaled so that the engine's mean over ranks is the loss of the step. So its rows count s = 1/W:

    ∇ = s Σ_ranks Σ_i g_i        J = s Σ_ranks J_rank        w_it = s ∂J_rank/∂log π(y_it)

s is read from the engine and proven by `microscope.distributed`. Nothing is sent on a step without a reading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from creditscope.batch.rollouts import Rollouts
from creditscope.microscope import distributed as ranks
from creditscope.microscope import geometry
from creditscope.microscope.observer import Block
from creditscope.microscope.shards import is_shard, local, many_ranks, parts
from creditscope.runs import schema

Found = TypeVar("Found")

SKETCHED = ("effective_rank", "top1", "conflict", "group/effective_rank", "group/top1", "group/conflict")
"""Readings of all pairs and of all groups, cut ones too, from the sketches of all ranks."""


@dataclass(frozen=True)
class Rows:
    """Rows of one step before it: a rank's own, or all of them."""

    rollouts: Rollouts
    credit: Tensor  # (B, T) A
    live: Tensor  # (B, T) log π
    w: Tensor  # (B, T) ∂J/∂log π of the step
    value: float  # their part of J
    blocks: list[Block]  # the Grams of rows of one pass, in the units of the step's gradient

    def in_step(self, s: float, cut: Sequence[int]) -> Rows:
        """On the CPU, w and J times s, Grams times s² and without the groups that were cut."""
        away = torch.isin(self.rollouts.group.cpu(), torch.tensor(cut, dtype=torch.int64))
        blocks = []
        for block in self.blocks:
            keep = (~away[block.rows.cpu()]).nonzero().squeeze(1)
            at = np.ix_(keep.numpy(), keep.numpy())
            layers = {name: s**2 * k[at] for name, k in block.layers.items()}
            blocks.append(Block(block.rows.cpu()[keep], s**2 * block.gram[at], layers, block.eps))
        return Rows(self.rollouts.to("cpu"), self.credit.cpu(), self.live.cpu(), s * self.w.cpu(), s * self.value,
                    [block for block in blocks if len(block.rows)])


def joined(found: Sequence[Rows]) -> Rows:
    if len(found) == 1:
        return found[0]
    first = np.cumsum([0, *(len(one.live) for one in found)])
    blocks = [replace(block, rows=block.rows + int(start)) for one, start in zip(found, first, strict=False)
              for block in one.blocks]
    return Rows(Rollouts.cat([one.rollouts for one in found]), stacked([one.credit for one in found]),
                stacked([one.live for one in found]), stacked([one.w for one in found]),
                sum(one.value for one in found), blocks)


def stacked(found: Sequence[Tensor]) -> Tensor:
    """(Σ B, T) of (B, T) tensors that may differ in T, padded with 0."""
    width = max(x.shape[1] for x in found)
    return torch.cat([nn.functional.pad(x, (0, width - x.shape[1])) for x in found])


def to_first(mine: Found) -> list[Found]:
    """The values of all ranks on the first; [] on the others."""
    if not many_ranks():
        return [mine]
    found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, found)
    return found or []


def most(count: int, device: torch.device) -> int:
    if not many_ranks():
        return count
    found = torch.tensor(count, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def run(model: nn.Module, passes: Sequence[Callable[[], None]], idle: Callable[[], None]) -> None:
    """All passes of this rank; where one fails on any rank, all raise.

    Where weights are sharded every rank takes part in every pass: one with fewer passes runs `idle`, and a rank whose
    pass failed continues.
    """
    cut = sharded(model)
    rounds = most(len(passes), next(model.parameters()).device) if cut else len(passes)
    failed: list[Exception] = []
    for number in range(rounds):
        try:
            (passes[number] if number < len(passes) else idle)()
        except Exception as error:
            failed.append(error)
            if not cut:
                break
    if cut:  # a forward without a backward leaves gathered weights in place, which the coming step would not update
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()  # type: ignore[operator]

    def outcome() -> None:
        if failed:
            raise failed[0]

    ranks.agreed(outcome)


def sharded(model: nn.Module) -> bool:
    return any(is_shard(p) for p in model.parameters())


def scale(model: nn.Module) -> float:
    """s, by which the sum of the ranks' gradients is multiplied: by the engine, or without shards by `reduce`."""
    world = dist.get_world_size()
    return ranks.loss_scale(model, world) if sharded(model) else 1 / world


def reduce(model: nn.Module) -> None:
    """.grad becomes the mean over ranks, as in a step under DistributedDataParallel; fully_shard has done it."""
    if sharded(model):
        return
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # it may have a gradient on other ranks
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def products(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float, float]:
    """⟨a, b⟩, ‖a‖² and ‖b‖² over all pairs of gradients; a part that c ranks hold counts 1/c on each."""
    world = dist.get_world_size() if many_ranks() else 1
    sums = torch.zeros(3, dtype=torch.float64, device=pairs[0][0].device if pairs else None)
    for a, b in pairs:
        x, y = (local(g.detach()).double().flatten() for g in (a, b))
        sums += torch.stack([x @ y, x @ x, y @ y]) * parts(b) / world
    if many_ranks():
        dist.all_reduce(sums)
    dot, ours, theirs = sums.tolist()
    return dot, ours, theirs


def sketched(found: ranks.RanksReading, eps: float) -> dict[str, float]:
    """`sketch/…`: all pairs of all ranks' rollouts, with the sketch's error; and the number of cut groups."""
    about = geometry.summary(found.sketch.gram.numpy(), group=found.group.numpy(), eps=eps)
    out = {f"sketch/{name}": about[f"gram/{name}"] for name in SKETCHED if f"gram/{name}" in about}
    out |= {schema.SKETCH_RELATIVE_ERROR: found.sketch.relative_error} if out else {}
    return out | {schema.GRAM_CUT_GROUPS: float(len(found.split))}
