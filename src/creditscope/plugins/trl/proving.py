"""Proofs of a reading inside TRL: each row is attributed to the right rollout, on one rank or on many.

The proof of one process, or of many ranks, takes the rows of this rank's first pass, whose losses are weighted by 0 and
1 (`microscope.proof`, `microscope.proof_ranks`). On many ranks all passes of the reading are then run once more without
the microscope, rollouts weighted at random, for the rows that the reading itself has gathered (`prove_gathered`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from creditscope.microscope import distributed as ranks
from creditscope.microscope.shards import many_ranks
from creditscope.plugins.common import gather_ranks as together
from creditscope.plugins.common.observer import RankObserver
from creditscope.plugins.trl.passes import Inputs, chosen

KINDS = (None, "one", "all")
"""What `Proofs.due` may say, the least first."""


def due(observer: RankObserver) -> str | None:
    """What this reading needs; among many ranks the most that one of them needs, so that all take part or none."""
    mine = KINDS.index(observer.proofs.due(observer.model))
    return KINDS[together.most(mine, next(observer.model.parameters()).device)]


def prove_first(observer: RankObserver, kind: str, inputs: Inputs, logits: Callable[[Inputs], Tensor]) -> None:
    """The proof for these rows, of this rank; `observer.require_proof` says how it ended."""
    mask = inputs["completion_mask"]

    def pull(weights: Tensor) -> None:
        logp = chosen(logits(inputs), inputs)
        torch.autograd.backward(logp, mask.to(logp) * weights.to(logp)[:, None])

    if many_ranks():
        model = observer.model
        reduce = None if together.sharded(model) else partial(together.reduce, model)
        observer.prove_halves(kind, pull, len(mask), together.scale(model), reduce)
    else:
        observer.prove(kind, pull, len(mask))


def prove_gathered(observer: RankObserver, model: nn.Module, seed: int, rollouts: int, chunks: Sequence[Tensor],
                   pull: Callable[[Tensor, Tensor], None], idle: Callable[[], None]) -> None:
    """`distributed.prove_rows` of the reading's own rows, after its passes over `chunks` with weighted losses."""
    weights = ranks.draw_weights(rollouts, seed, dist.get_rank())
    for p in model.parameters():
        p.grad = None
    together.run(model, [partial(pull, chunk, weights[chunk.cpu()]) for chunk in chunks], idle)
    together.reduce(model)
    observer.prove_ranks(weights, together.scale(model))
