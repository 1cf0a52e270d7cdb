"""`prove` on several ranks: every row of every rank is that of its rollout, in the place where the reading has it.

    prove_ranks(scope, backward, len(ids), engine=ddp)          # on every rank, each with its own rollouts

Rollouts are numbered over all ranks, h is 0 or 1 for each of them, ∇ is the reduced gradient:

    on each rank, every parameter      h_i = 0  ⇒  row i is 0        hᵀ K h = ‖∇_local Σ_i h_i J_i‖²
    over all ranks                     s Σ_ranks Σ_i h_i S_i = sketch(∇ Σ_ranks Σ_i h_i J_i)

The first line is `proof`'s, with the norm of the gradient as it arrives, before an engine adds other ranks to it. The
second holds to rounding, because a sketch is linear. h runs over the bits of the rollouts' numbers, so rows that change
places inside a rank, or between ranks, change one of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from creditscope.errors import CreditscopeError
from creditscope.microscope import proof
from creditscope.microscope.distributed import RankRows, agreed, check_sums, compare_sums, meet, reduced_sketch
from creditscope.microscope.scope import Microscope
from creditscope.microscope.shards import is_shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def prove_ranks(scope: Microscope, backward: Callable[[Tensor], None], rollouts: int, *, seed: int | None = None,
                engine: Any = None, scale: float | None = None, ranks: ProcessGroup | None = None,
                reduce: Callable[[], None] | None = None) -> float:
    """The largest error found on this rank, as a share of the tolerance; an exception on all ranks where one is above.

    Every rank calls it, with a scope that keeps a sketch. `backward(weights)` runs forward and backward of this rank's
    Σ_i weights_i J_i, weights (rollouts,) in float64. It takes 2 + ⌈log₂ N⌉ passes for the N rollouts of all ranks, or
    3 with a `seed`, which draws one half; under DDP one more. `engine`, `scale` and `ranks` are those of `across`.
    Where `backward` does not reduce, `reduce` does it.

    An error on one rank is raised on all. The exception: an error inside `backward` whose gradients have not all
    arrived, under an engine that reduces or gathers there, is raised on that rank alone, and the others wait for it as
    they would in training, until the engine's timeout. Under DDP the first pass sends nothing, to find such errors.
    """
    if hasattr(engine, "zero_optimization_stage"):
        raise CreditscopeError("ZeRO keeps the gradients of earlier passes outside .grad, so passes cannot be repeated "
                               "for a proof; prove the model under DDP or FSDP 2, or before deepspeed.initialize")
    talks = reduce is None and (engine is not None or any(is_shard(p) for p in scope.model.parameters()))
    every = torch.ones(rollouts, dtype=torch.float64)
    with proof.as_before(scope.model) as restart:

        def run(weights: Tensor, watched: bool, sends: bool = talks) -> None:
            def mine() -> None:
                restart()
                with scope if watched else nullcontext():
                    backward(weights)

            _together(mine, scope.model, sends)
            if reduce is not None:
                reduce()

        if talks and isinstance(engine, nn.parallel.DistributedDataParallel):
            with _silent(engine):
                run(every, watched=False, sends=False)
        run(every, watched=True)
        under = proof.projected(scope.model)
        peers, rows, counts = meet([scope], [torch.zeros(rollouts, dtype=torch.int64)], engine, scale, ranks)
        layers, checks = dict(scope.layers), dict(scope.checks)
        rounding = (proof.WIDER * scope.eps) ** 2 * float(scope.gram.trace())
        first = sum(counts[: dist.get_rank(ranks) if peers.size > 1 else 0])
        everyone = peers.gather(rows.sketch.rows, counts)
        agreed(lambda: _require_place(everyone, rows, first))
        tolerance = max(proof.WIDER * scope.tolerance, proof.LEAST)

        rank = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        whole = replace(rows.sketch, rows=rows.scale * everyone)
        worst = check_sums(whole, rank, rows.scale, reduced_sketch(scope, engine, whole.names),
                           tolerance).error / tolerance
        run(every, watched=False)
        scaled = {name: rows.scale**2 * gram for name, gram in layers.items()}
        worst = max(worst, agreed(lambda: proof.compare_gradients(scope, under, scaled, checks, rounding)))
        for half in proof.halves(sum(counts)) if seed is None else proof.drawn(sum(counts), seed):
            mine = half[first : first + rollouts]
            run(mine, watched=True)

            def own(mine: Tensor = mine) -> float:
                proof.require_silence(scope, mine)
                norms = [scope.checks[name].from_grad if name in scope.checks else 0.0 for name in layers]
                return proof.compare_rows(scope, mine, layers, checks, rounding, norms)

            worst = max(worst, agreed(own))
            sums = compare_sums(whole.rows * half.to(whole.rows)[:, None], rank,
                                reduced_sketch(scope, engine, whole.names), tolerance)
            if not sums.error <= tolerance:
                raise CreditscopeError(
                    f"the rows that the ranks report are not those of their rollouts: the losses of rollouts "
                    f"{half.nonzero().flatten().tolist()[:4]} … of all ranks have another gradient than the sum of "
                    f"these rows (off by {sums.error:.2g}, tolerance {tolerance:.0g}); a rank sent another's rows, or "
                    f"they changed places on the way")
            worst = max(worst, sums.error / tolerance)
    return worst


def _together(run: Callable[[], None], model: nn.Module, sends: bool) -> None:
    """A pass on this rank; an error on all ranks if on one, unless the others wait inside the pass."""
    try:
        agreed(lambda: _finished(run, model, sends))
    except _Halfway as halfway:
        raise CreditscopeError(f"a pass ended before its gradients had arrived, on this rank: {halfway.__cause__}. "
                               f"Other ranks wait in the engine's collective until its timeout, as in "
                               f"training") from halfway.__cause__


def _finished(run: Callable[[], None], model: nn.Module, sends: bool) -> None:
    try:
        run()
    except Exception as error:
        if sends and any(p.requires_grad and p.grad is None for p in model.parameters()):
            raise _Halfway from error
        raise
    finally:
        for module in model.modules():  # a forward without a backward leaves gathered weights in place
            if hasattr(module, "reshard"):
                module.reshard()  # type: ignore[operator]


class _Halfway(BaseException):
    """Not an Exception: `agreed` lets it pass, because the other ranks are not there to hear of it."""


@contextmanager
def _silent(engine: nn.parallel.DistributedDataParallel) -> Iterator[None]:
    """Inside, the engine neither reduces gradients nor sends buffers."""
    before, engine.require_forward_param_sync = engine.require_forward_param_sync, False
    try:
        with engine.no_sync():
            yield
    finally:
        engine.require_forward_param_sync = before


def _require_place(everyone: Tensor, mine: RankRows, first: int) -> None:
    rows = mine.sketch.rows
    if not torch.equal(everyone[first : first + len(rows)], rows):
        raise CreditscopeError(f"the rows of rollouts {first} to {first + len(rows) - 1} of all ranks are not those "
                               f"that this rank has sent: the reading has another rank's rows in their place")
