"""Our side of a comparison: a batch as Rollouts."""

from __future__ import annotations

from batches import Batch

from creditscope import Rollouts


def as_rollouts(batch: Batch) -> Rollouts:
    """What the policy sampled; the live log-probs stay in batch["logp"]."""
    return Rollouts(tokens=batch["tokens"], mask=batch["mask"], logp=batch["old"], reward=batch["reward"],
                    group=batch["group"], ref_logp=batch["ref"], entropy=batch["entropy"],
                    collision=batch["collision"])
