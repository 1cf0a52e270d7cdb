"""One reading from many ranks: exact Grams of the groups that a rank holds, and a sketch of all pairs.

    with Microscope(model, sketch=16) as scope:            # on every rank
        loss.backward()
    reading = across(scope, group)                         # on every rank, before clipping and the optimiser's step
    reading.blocks[7]                                      # (R, R) exact: group 7 lies on this rank
    reading.sketch.gram                                    # (N, N) of all ranks' rollouts, sketched

An engine adds up the ranks' gradients and multiplies by s, 1/W where it takes the mean of W ranks:

    ∇ = s Σ_ranks Σ_i g_i        K_ij = s²⟨g_i, g_j⟩

s is read from the engine and proven: a sketch is linear, so s Σ_i S_i over all ranks has to be the sketch of the
reduced gradient, to rounding, whatever k is. Exact and sketched entries are never in one matrix.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from creditscope.errors import CreditscopeError
from creditscope.microscope.geometry import by_group
from creditscope.microscope.proof import LEAST, WIDER
from creditscope.microscope.scope import GramCheck, Microscope
from creditscope.microscope.shards import block, local, many_ranks, parts
from creditscope.microscope.sketch import Sketch, Sketcher

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Found = TypeVar("Found")


@dataclass(frozen=True)
class RanksReading:
    """The reading of one step over all ranks. Rows are those of the reduced gradient, which the optimiser gets."""

    blocks: dict[int, Tensor]
    """Group → its exact (R, R) Gram, float64, for groups that lie whole in one micro-batch of this rank."""
    split: tuple[int, ...]
    """Groups that lie in several micro-batches or ranks: their pairs are in the sketch alone."""
    sketch: Sketch
    """All rollouts, rank after rank."""
    group: Tensor
    """(N,) the group of each row of the sketch."""
    rank: Tensor
    """(N,) the rank that each row came from, counted among those that share the data."""
    scale: float
    """s, by which the engine multiplies the sum over ranks."""
    check: GramCheck
    """Σ_ij of the sketched Gram against ‖sketch of ∇‖²; `error` is that of the sketch itself, entry by entry."""


def across(scope: Microscope | Sequence[Microscope], group: Tensor | Sequence[Tensor], *,
           engine: Any = None, scale: float | None = None, ranks: ProcessGroup | None = None) -> RanksReading:
    """One reading of all ranks' rollouts; every rank calls it, after backward and before clipping or a step.

    `group` (N,) names the group of each of the scope's rollouts, by the same numbers on all ranks. With gradient
    accumulation give the scopes and groups of all micro-batches of the step. `engine` is what reduces the gradients
    where that is not the model itself: the DistributedDataParallel or DeepSpeed engine around it; in a loop that
    reduces by hand, give `scale`, 1/W for a mean. `ranks` are those that share the data, where only some do (with
    tensor parallel: `mesh["dp"].get_group()`).
    """
    scopes = [scope] if isinstance(scope, Microscope) else list(scope)
    groups = [group] if isinstance(group, Tensor) else list(group)
    peers, mine, counts = meet(scopes, groups, engine, scale, ranks)
    s, rank = mine.scale, torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    rows = peers.gather(mine.sketch.rows, counts)
    everyone = replace(mine.sketch, rows=s * rows)
    ids, place = peers.gather(mine.places.to(rows.device), counts).cpu().unbind(1)
    split = _split(ids, rank, place)
    blocks = {g: s**2 * torch.from_numpy(k) for one, here in zip(scopes, groups, strict=True) if one.exact
              for g, k in by_group(one.gram, here.cpu()) if g not in split}
    check = check_sums(everyone, rank, s, reduced_sketch(scopes[0], engine, everyone.names), scopes[0].tolerance)
    return RanksReading(blocks, split, everyone, ids, rank, s, check)


def prove_rows(scope: Microscope | Sequence[Microscope], weights: Tensor | Sequence[Tensor], *, engine: Any = None,
               scale: float | None = None, ranks: ProcessGroup | None = None) -> GramCheck:
    """s Σ_ranks Σ_i h_i S_i = the sketch of ∇ Σ_i h_i J_i from passes without the microscope.

    Every rank calls it after plain passes over the same micro-batches, rollout i's loss times h_i, and before clipping
    or a step. `weights` holds h (N,) for each scope, as `draw_weights` draws them.
    """
    scopes = [scope] if isinstance(scope, Microscope) else list(scope)
    each = [weights] if isinstance(weights, Tensor) else list(weights)
    groups = [torch.zeros(len(h), dtype=torch.int64) for h in each]
    peers, mine, counts = meet(scopes, groups, engine, scale, ranks)
    weighted = mine.sketch.rows * torch.cat(each).to(mine.sketch.rows)[:, None]
    everyone = replace(mine.sketch, rows=mine.scale * peers.gather(weighted, counts))
    rank = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    try:
        return check_sums(everyone, rank, mine.scale, reduced_sketch(scopes[0], engine, everyone.names),
                      max(WIDER * scopes[0].tolerance, LEAST))
    except CreditscopeError as error:
        raise CreditscopeError(f"rows are not those of their rollouts: weighted at random, they do not add up to the "
                               f"gradient of the weighted losses ({error})") from error


def agreed(find: Callable[[], Found]) -> Found:
    """find() on this rank. Where it fails on one rank, all raise: none waits for another."""
    if not many_ranks():
        return find()
    mine: Found | None = None
    failed: Exception | None = None
    try:
        mine = find()
    except Exception as error:
        failed = error
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, None if failed is None else f"{type(failed).__name__}: {failed}")
    if failed is not None:
        raise failed
    wrong = next((rank for rank, why in enumerate(said) if why is not None), None)
    if wrong is not None:
        raise CreditscopeError(f"rank {wrong} could not take part in the reading: {said[wrong]}")
    return mine  # type: ignore[return-value]


def draw_weights(rollouts: int, seed: int, rank: int) -> Tensor:
    """(N,) float64 in ±[½, 1½], drawn by seed and rank; the global random state is not touched."""
    draw = torch.Generator().manual_seed(1_000_003 * seed + rank)
    size = 0.5 + torch.rand(rollouts, generator=draw, dtype=torch.float64)
    return size * (2 * torch.randint(0, 2, (rollouts,), generator=draw) - 1)


def loss_scale(model: Any, size: int) -> float:
    """s in ∇ = s Σ_ranks Σ_i g_i as set in the engine or the sharded model: 1/W for the mean of W ranks."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        if model._comm_hooks:
            raise CreditscopeError("this DistributedDataParallel has a communication hook, which may scale gradients "
                                   "as it likes; say by how much it multiplies their sum, scale=1/W for a mean")
        return 1 / int(model.process_group.size())
    if hasattr(model, "zero_optimization_stage"):  # deepspeed's engine
        return 1 / int(model.dp_world_size) if model.gradient_average else 1.0
    factors = {float(g.gradient_divide_factor or g.mesh_info.mesh.size()) for g in _sharded_groups(model)}
    if len(factors) > 1:
        raise CreditscopeError(f"fully_shard divides the gradients of different modules by different numbers, "
                               f"{sorted(factors)}, so the rows of the reduced gradient have no common scale; set one "
                               f"with model.set_gradient_divide_factor")
    if factors:
        return 1 / factors.pop()
    if size == 1:
        return 1.0
    raise CreditscopeError(f"{size} ranks share the data, but {type(model).__name__} does not say how their gradients "
                           f"are reduced; give engine=the DistributedDataParallel or DeepSpeed engine, or scale=1/W "
                           f"where your loop takes the mean, scale=1 where it adds up")


def _sharded_groups(model: nn.Module) -> list[Any]:
    states = [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]  # type: ignore[operator]
    groups = [g for state in states for g in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]]
    return [g for g in groups if g is not None]


def reduced_sketch(scope: Microscope, engine: Any, names: Sequence[str]) -> Tensor:
    """(k²,) float64: the sketch of the reduced gradient, each rank sketching the part it holds.

    With W ranks and m different parts, each part is held W/m times and counts m/W on each rank.
    """
    world = dist.get_world_size() if many_ranks() else 1
    assert scope.sketcher is not None
    k, seed = scope.sketcher.k, scope.sketcher.seed
    total = torch.zeros(k**2 + 1, dtype=torch.float64, device=next(iter(scope.parameters.values())).device)
    gone: list[str] = []
    whole = importlib.import_module("deepspeed.utils").safe_get_full_grad \
        if hasattr(engine, "zero_optimization_stage") else None
    for name in sorted(names):
        grad = whole(scope.parameters[name]) if whole is not None else scope.parameters[name].grad
        if grad is None:
            gone.append(name)
            continue
        mine, copies = local(grad.detach()), world / parts(grad)
        if mine.numel():  # a parameter with fewer rows than ranks leaves some without
            # A Sketcher of its own: signs in the gradient's precision are not kept beside those in the activations'.
            total[:-1] += Sketcher(k, seed).dense(name, mine[None], block(grad))[0].double() / copies
    total[-1] = len(gone)
    if many_ranks():
        dist.all_reduce(total)
    missing = int(total[-1])
    if missing:
        raise CreditscopeError(f"{missing} parameter(s) over all ranks have no reduced gradient"
                               f"{f', first {gone[0]!r}' if gone else ''}; call across after the step's last backward, "
                               f"with gradient sync on, and before optimizer.step() and zero_grad()")
    return total[:-1].cpu()


def check_sums(everyone: Sketch, rank: Tensor, scale: float, arrived: Tensor, tolerance: float) -> GramCheck:
    """s Σ_ranks Σ_i S_i = the sketch of ∇, or an error that names the s that would fit."""
    check = compare_sums(everyone.rows, rank, arrived, tolerance)
    if not check.error <= tolerance:
        summed = everyone.rows.double().cpu().sum(dim=0)
        fit = scale * float(summed @ arrived / summed.square().sum().clamp(min=1e-300))
        raise CreditscopeError(
            f"self-check failed: with s = {scale:.6g} the rows of all ranks do not add up to the reduced gradient "
            f"(off by {check.error:.2g}, tolerance {tolerance:.0g}; s = {fit:.3g} would fit best). The engine scales "
            f"gradients otherwise than it says, they were clipped or stepped already, or a micro-batch of the step is "
            f"missing")
    return check


def compare_sums(rows: Tensor, rank: Tensor, arrived: Tensor, tolerance: float) -> GramCheck:
    """Σ of the rows against what arrived; the error as a share of the ranks' gradients and the reduced one."""
    rows = rows.double().cpu()
    by_rank = torch.zeros(int(rank.max()) + 1, rows.shape[1], dtype=torch.float64).index_add_(0, rank, rows)
    summed = by_rank.sum(dim=0)
    size = float(by_rank.square().sum() + arrived.square().sum()) ** 0.5
    error = float((summed - arrived).norm()) / size if size > 0 else 0.0
    return GramCheck(float(summed.square().sum()), float(arrived.square().sum()), error, tolerance)


@dataclass(frozen=True)
class RankRows:
    """What one rank brings to a reading of all."""

    sketch: Sketch
    places: Tensor  # (N, 2): each rollout's group and micro-batch
    scale: float

    @property
    def agreement(self) -> dict[str, Any]:
        return {"sketch's k and seed": (self.sketch.k, self.sketch.seed), "parameters": sorted(self.sketch.names),
                "engine's scale": self.scale, "precision": self.sketch.rows.dtype}


def meet(scopes: Sequence[Microscope], groups: Sequence[Tensor], engine: Any, scale: float | None,
         ranks: ProcessGroup | None) -> tuple[_Peers, RankRows, list[int]]:
    """(the ranks that share the data, this one's part, rollouts of each); an error on all ranks if on one."""
    peers = _peers(scopes, ranks)
    mine: RankRows | CreditscopeError
    try:
        mine = _gather_here(scopes, groups, engine, scale, peers.size)
    except CreditscopeError as error:
        mine = error
    counts = peers.agree(mine)
    assert isinstance(mine, RankRows)
    return peers, mine, counts


def _gather_here(scopes: Sequence[Microscope], groups: Sequence[Tensor], engine: Any, scale: float | None,
                 size: int) -> RankRows:
    if len(scopes) != len(groups):
        raise CreditscopeError(f"give one tensor of group ids for each micro-batch's scope, got {len(scopes)} scope(s) "
                               f"and {len(groups)} tensor(s)")
    for one, ids in zip(scopes, groups, strict=True):
        if tuple(ids.shape) != (len(one.sketch.rows),) or ids.is_floating_point():
            raise CreditscopeError(f"group names the group of each rollout by a number: shape "
                                   f"({len(one.sketch.rows)},), got {tuple(ids.shape)} of {ids.dtype}")
    places = [torch.stack([ids.detach().cpu().long(), torch.full((len(ids),), i)], dim=1)
              for i, ids in enumerate(groups)]
    return RankRows(Sketch.cat([one.sketch for one in scopes]), torch.cat(places),
                 loss_scale(scopes[0].model if engine is None else engine, size) if scale is None else scale)


@dataclass(frozen=True)
class _Peers:
    """The ranks that share the data; alone, this process."""

    size: int
    group: ProcessGroup | None
    device: torch.device

    def all_gather(self, x: Tensor) -> list[Tensor]:
        if self.size == 1:
            return [x]
        found = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(found, x, group=self.group)
        return found

    def gather(self, mine: Tensor, counts: Sequence[int]) -> Tensor:
        """(N_rank, c) of each rank → (Σ N_rank, c), on every rank; padded to one length for the collective."""
        room = mine.new_zeros(max(counts), mine.shape[1])
        room[: len(mine)] = mine
        return torch.cat([one[:count] for one, count in zip(self.all_gather(room), counts, strict=True)])

    def agree(self, mine: RankRows | CreditscopeError) -> list[int]:
        """The number of rollouts of each rank. Where one rank fails, or ranks differ, all raise: none waits."""
        said = mine.agreement if isinstance(mine, RankRows) else {}
        counted = [len(mine.places) if isinstance(mine, RankRows) else -1]
        words = [*(_digest(x) for x in said.values()), 0, 0, 0, 0][:4]
        heard = torch.stack(self.all_gather(torch.tensor(counted + words, device=self.device))).cpu()
        if isinstance(mine, CreditscopeError):
            raise mine
        counts = heard[:, 0].tolist()
        if min(counts) < 0:
            raise CreditscopeError(f"rank {counts.index(-1)} could not take part in the reading; its own error says "
                                   f"why")
        for column, (what, here) in enumerate(said.items(), start=1):
            other = (heard[:, column] != heard[0, column]).nonzero().flatten().tolist()
            if other:
                raise CreditscopeError(f"ranks must agree on the {what}: rank {other[0]} differs from rank 0 (this one "
                                       f"has {str(here)[:80]}). Give every rank the same model and engine and the same "
                                       f"Microscope(model, sketch=Sketcher(k, seed))")
        return counts


def _peers(scopes: Sequence[Microscope], group: ProcessGroup | None) -> _Peers:
    if not scopes:
        raise CreditscopeError("no scope was given: give the step's Microscope, or those of all its micro-batches")
    device = next(iter(scopes[0].parameters.values())).device
    if not many_ranks():
        return _Peers(1, None, device)
    try:
        mesh = scopes[0].mesh
    except CreditscopeError:  # nothing was measured: `_gather_here` raises that on all ranks
        mesh = None
    if mesh is not None and group is None:
        if mesh.size() != dist.get_world_size():
            raise CreditscopeError(f"layers are cut over {mesh.size()} of {dist.get_world_size()} ranks, so only some "
                                   f"of the ranks share the data; give those, ranks=mesh[\"dp\"].get_group()")
        return _Peers(1, None, device)  # all ranks hold the same rollouts
    return _Peers(dist.get_world_size(group), group, device)


def _digest(x: Any) -> int:
    """63 bits of a published hash: Python's own differs between processes."""
    return int.from_bytes(hashlib.shake_128(repr(x).encode()).digest(8), "little") >> 1


def _split(ids: Tensor, rank: Tensor, place: Tensor) -> tuple[int, ...]:
    where = torch.unique(torch.stack([ids, rank, place], dim=1), dim=0)[:, 0]
    several, times = torch.unique(where, return_counts=True)
    return tuple(several[times > 1].tolist())
