"""From TRL's own passes over preference pairs to rollouts in groups of two, with the w of TRL's own backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method
from creditscope.objective.surrogate import effective_credit, surrogate
from creditscope.plugins.trl import names
from creditscope.plugins.trl.passes import Inputs, take
from creditscope.policy.loading import Policy


@dataclass
class Pass:
    """TRL's own pass over one micro-batch: rows [chosen; rejected], columns as in its batch."""

    inputs: Inputs
    live: Tensor | None = None  # (2P, S − 1) log π of tokens 1 to S − 1
    ref: Tensor | None = None  # the same of the reference; None where it was computed before the training
    pull: Tensor | None = None  # ∂loss/∂log π, with accumulation and the scaler's factor
    loss: float = 0.0
    ids: Tensor | None = None  # the rows that the model was given

    def forward(self, module: nn.Module, args: Any, given: Inputs, found: Any) -> None:
        """A forward hook of the model and of the reference."""
        logp = getattr(found, "log_probs", None)
        if logp is None:
            return
        if logp.requires_grad:
            self.live, self.ids = logp.detach(), given.get("input_ids")
            logp.register_hook(self.backward)
        elif not torch.is_grad_enabled():
            self.ref = logp.detach()

    def backward(self, grad: Tensor) -> None:
        self.pull = grad.detach()


@dataclass(frozen=True)
class PairRows:
    """The rows of one optimiser step of this rank: the chosen and the rejected answer of each pair in turn."""

    inputs: dict[str, Any]
    rollouts: Rollouts  # reward 1 for the chosen answer, 0 for the rejected one
    credit: Tensor  # (B, T) A: +1 for the chosen answer, −1 for the rejected one
    given: Tensor  # (B, T) w by TRL's own backward
    objective: float  # J = −loss of the whole step
    row_error: float | None = None
    """How far w of the table's row is from TRL's, `row_error`; None where no row has TRL's loss."""

    @property
    def fresh(self) -> bool:
        return True

    def rows(self, index: Tensor) -> PairRows:
        return replace(self, inputs=take(self.inputs, index), rollouts=self.rollouts.rows(index),
                       credit=self.credit[index], given=self.given[index])

    def sampled_by(self, live: Tensor) -> Rollouts:
        """The answers are given, not sampled: log π_old is that of the live policy."""
        return replace(self.rollouts, logp=live.detach().masked_fill(~self.rollouts.mask, 0.0))

    def w(self, live: Tensor) -> Tensor:
        return self.given.to(live)

    def value(self, live: Tensor) -> float:
        return self.objective


def pairs_of(passes: Sequence[Pass], scale: float, policy: Policy | None, method: Method | None = None, rank: int = 0,
             ranks: int = 1) -> PairRows:
    """The passes of one optimiser step, with −∂loss/∂log π divided by `scale`; `policy` decodes the texts, and
    `method` is the row of TRL's loss. The k-th pair of rank r of W is group k·W + r.
    """
    parts = [_answers(one) for one in passes]
    inputs = {name: _stacked([part[name] for part in parts]) for name in parts[0]}
    mask, w, asked = inputs["completion_mask"], -inputs.pop("pull") / scale, inputs.pop("asked")
    live, ref = inputs.pop("live"), inputs.pop("ref", None)
    row = torch.arange(len(mask), device=mask.device)
    chosen = row % 2 == 0
    found: dict[str, Any] = {"tokens": inputs["completion_ids"], "mask": mask, "logp": torch.zeros_like(w),
                             "reward": chosen.to(w.dtype), "group": row // 2 * ranks + rank,
                             "ref_logp": ref if passes[0].ref is not None else None}
    if policy is not None:
        ids = [x[m].tolist() for x, m in zip(inputs["completion_ids"], mask, strict=True)]
        prompts = [x[m].tolist() for x, m in zip(inputs["input_ids"], asked, strict=True)]
        found |= {"prompt": [policy.decode(x) for x in prompts], "text": [policy.decode(x) for x in ids],
                  "pieces": [policy.pieces(x) for x in ids]}
    rollouts = Rollouts(**found)
    credit = torch.where(chosen, 1.0, -1.0)[:, None] * mask
    error = None
    if method is not None and ref is not None:
        ends = torch.tensor([len(part["input_ids"]) for part in parts]).cumsum(0).tolist()
        with suppress(CreditscopeError):  # a pair that the row cannot state: w does not need the row
            error = row_error(method, replace(rollouts, ref_logp=ref), live, w, ends)
    return PairRows(inputs, rollouts, credit.to(w), w, -sum(one.loss for one in passes) / len(passes), error)


def row_error(method: Method, rollouts: Rollouts, live: Tensor, w: Tensor, ends: Sequence[int]) -> float:
    """‖w_row − w‖/‖w‖, where a step's J is the mean of the J of its micro-batches, which end at these rows."""
    row = torch.arange(len(w), device=w.device)
    parts = [row[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    own = torch.cat([effective_credit(lambda lp, part=part: surrogate(method, lp, rollouts.rows(part)),  # type: ignore[misc]
                                      live[part]) for part in parts]) / len(parts)
    return float((own - w).norm() / w.norm().clamp(min=torch.finfo(w.dtype).tiny))


def _answers(one: Pass) -> dict[str, Tensor]:
    """The rows of a pass, a pair's two beside each other: TRL's ids and attention, and by token of the answer its id,
    its column, ∂loss/∂log π, log π and log π_ref.

    TRL has no log π of column 0: nothing predicts it. Its mask may leave out tokens anywhere.
    """
    names.require("a batch", one.inputs, names.PAIR_TENSORS)
    other = sorted({*one.inputs} - {*names.PAIR_TENSORS, *names.PAIR_SUMS})
    if other:
        raise CreditscopeError(f"the batch has {other[0]!r}, and only text is read so far; leave the callback out")
    if one.live is None or one.pull is None:
        raise CreditscopeError("the model gave compute_loss no log_probs with a gradient: the loss of a subclass does "
                               "not take them from fused_lm_head=True, and cannot be read; leave the callback out")
    ids, attended, inside = (one.inputs[name] for name in names.PAIR_TENSORS)
    if one.ids is not None and not torch.equal(one.ids, ids):
        raise CreditscopeError("compute_loss gave the model other rows than its batch has, so that none can be told "
                               "from another; change them in the data collator instead")
    pairs = len(ids) // 2
    order = torch.arange(2 * pairs, device=ids.device).view(2, pairs).T.flatten()
    ids, attended, inside = ids[order], attended[order], inside[order].bool()
    learned = inside.clone()
    learned[:, 0] = False
    count = learned.sum(dim=1)
    width = int(count.max())
    if not width:
        raise CreditscopeError("no token of a micro-batch is learned from: every answer is empty, or was cut off by "
                               "max_length; raise max_length")
    place = learned.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
    mask = torch.arange(width, device=ids.device) < count[:, None]
    before = (place - 1).clamp(min=0)
    by_token = {"pull": one.pull, "live": one.live} | ({} if one.ref is None else {"ref": one.ref})
    told = {name: x[:, -(ids.shape[1] - 1):][order].gather(1, before).masked_fill(~mask, 0.0)
            for name, x in by_token.items()}
    if one.ref is None and all(name in one.inputs for name in names.PAIR_SUMS):
        # TRL's losses take log π_ref of whole answers: it may be spread over the tokens in any way.
        whole = torch.cat([one.inputs[name] for name in names.PAIR_SUMS])[order].to(one.live)
        told["ref"] = (whole / count.clamp(min=1))[:, None] * mask
    return told | {"input_ids": ids, "attention_mask": attended, "asked": attended.bool() & ~inside,
                   "completion_ids": ids.gather(1, place).masked_fill(~mask, 0), "completion_mask": mask,
                   "place": place.masked_fill(~mask, 0)}


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """(Σ B, T) of (B, T) tensors that may differ in T, padded with 0 on the right."""
    width = max(x.shape[1] for x in parts)
    return torch.cat([nn.functional.pad(x, (0, width - x.shape[1])) for x in parts])
