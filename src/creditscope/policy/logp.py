"""log π of given completions under a policy, with its graph; the norms of its gradient at the output head.

Where the logits of a batch are many, the output head is taken out of the model's forward pass and applied a block of
the vocabulary at a time (`microscope.head`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.batch.rollouts import Rollouts
from creditscope.microscope import head
from creditscope.microscope.head import chosen_logp
from creditscope.policy.loading import Policy

COLUMNS = 64
"""Positions whose probabilities are held at once."""


def token_logp(policy: Policy, prompts: Sequence[Sequence[int]], tokens: Tensor, mask: Tensor, temperature: float,
               grad: bool = True) -> Tensor:
    """(B, T) log π of the chosen tokens at the sampling temperature, 0 where the mask is False; float32 or wider.

    Prompts are padded on the left, and logits are kept for the completion alone.
    """
    with policy.active(), nullcontext() if grad else torch.no_grad():
        hidden = _before_head(policy, prompts, tokens, mask)
        if hidden is None:
            logits = completion_logits(policy, prompts, tokens, mask)
            scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
            scaled = scaled / temperature if temperature != 1.0 else scaled  # no second table of logits at 1
            chosen = scaled.gather(2, tokens[..., None]).squeeze(2) - scaled.logsumexp(dim=2)
        else:
            last = policy.model.get_output_embeddings()
            chosen = chosen_logp(hidden, last.weight, last.bias, tokens, temperature)
        masked: Tensor = chosen.masked_fill(~mask, 0.0)
    return masked


def rollout_logp(policy: Policy, rollouts: Rollouts, temperature: float, grad: bool = True) -> Tensor:
    """(B, T) log π of a batch's chosen tokens after its prompts, as `token_logp`."""
    return token_logp(policy, rollouts.prompt_ids, rollouts.tokens, rollouts.mask, temperature, grad)


def head_norms(policy: Policy, rollouts: Rollouts, temperature: float) -> Tensor:
    """(B, T) ‖∇_W log π(y_t)‖ for the output head W alone, 0 where the mask is False.

    With z = W h the gradient is δ_t h_tᵀ, δ = ∂ log π(y_t)/∂z_t, of norm ‖δ_t‖‖h_t‖. A plain head has
    ‖δ_t‖² = (1 − 2π(y_t) + Σπ²)/τ²; else δ comes from autograd down to z, so it includes what a model does to its
    logits after the head (scaling, soft caps).
    """
    with torch.no_grad():
        hidden = _before_head(policy, rollouts.prompt_ids, rollouts.tokens, rollouts.mask)
    if hidden is not None:
        return _plain_norms(policy, hidden, rollouts.tokens, temperature).masked_fill(~rollouts.mask, 0.0)
    seen: list[tuple[Tensor, Tensor]] = []

    def cut(_: Any, args: tuple[Any, ...], out: Tensor) -> Tensor:
        z = out.detach().requires_grad_()
        seen.append((args[0].detach(), z))
        return z

    handle = policy.model.get_output_embeddings().register_forward_hook(cut)
    try:
        logp = rollout_logp(policy, rollouts, temperature)
    finally:
        handle.remove()
    (given, z), = seen
    (delta,) = torch.autograd.grad(logp.sum(), z)
    wide = torch.promote_types(delta.dtype, torch.float32)
    norms: Tensor = delta.to(wide).norm(dim=2) * given.to(wide).norm(dim=2)
    return norms[:, -rollouts.tokens.shape[1] - 1:-1].masked_fill(~rollouts.mask, 0.0)


@torch.no_grad()
def _plain_norms(policy: Policy, hidden: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    last, found = policy.model.get_output_embeddings(), []
    wide = torch.promote_types(hidden.dtype, torch.float32)
    for at in (slice(start, start + COLUMNS) for start in range(0, tokens.shape[1], COLUMNS)):
        p = (last(hidden[:, at]).to(wide) / temperature).softmax(dim=-1)
        chosen = p.gather(2, tokens[:, at, None]).squeeze(2)
        square = (1 - 2 * chosen + torch.linalg.vector_norm(p, dim=-1).square()).clamp(min=0)
        found.append(square.sqrt() / temperature * hidden[:, at].to(wide).norm(dim=2))
    return torch.cat(found, dim=1)


def completion_logits(policy: Policy, prompts: Sequence[Sequence[int]], tokens: Tensor, mask: Tensor) -> Tensor:
    """(B, T, V) z from which each completion token was chosen."""
    logits: Tensor = policy.model(**model_inputs(prompts, tokens, mask, policy.device), use_cache=False,
                                  logits_to_keep=tokens.shape[1] + 1).logits[:, :-1]
    return logits


def _before_head(policy: Policy, prompts: Sequence[Sequence[int]], tokens: Tensor, mask: Tensor) -> Tensor | None:
    """(B, T, d) the hidden states from which the head makes z; None where the logits are few enough to be held, or
    where the head is more than one linear layer."""
    last = policy.model.get_output_embeddings()
    if type(last) is not nn.Linear or tokens.numel() * len(last.weight) <= head.HELD or policy.uses_logits \
            or last._forward_hooks or last._forward_pre_hooks:
        return None
    with _without(last) as seen:
        out = completion_logits(policy, prompts, tokens, mask)
    # A model that scales or caps its logits gives back other numbers than its head: another tensor, or a changed one.
    if len(seen) != 1 or out.data_ptr() != seen[0][0].data_ptr() or seen[0][0]._version != seen[0][1]:
        policy.uses_logits = True
        return None
    return out


@contextmanager
def _without(last: nn.Linear) -> Iterator[list[tuple[Tensor, int]]]:
    """The head gives back what it is given; yields each such tensor with the number of changes to it so far."""
    seen: list[tuple[Tensor, int]] = []

    def same(hidden: Tensor) -> Tensor:
        seen.append((hidden, hidden._version))
        return hidden

    last.forward = same  # type: ignore[assignment, method-assign]
    try:
        yield seen
    finally:
        del last.forward


def model_inputs(prompts: Sequence[Sequence[int]], tokens: Tensor, mask: Tensor,
                 device: torch.device) -> dict[str, Tensor]:
    """Ids, attention and positions of each prompt with its completion: completions begin in one column.

    The prompt and all columns up to the last chosen token are attended to.
    """
    rows, width = tokens.shape
    longest = max(len(p) for p in prompts)
    ids = torch.zeros(rows, longest + width, dtype=torch.int64)
    attend = torch.zeros(rows, longest + width, dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        ids[i, longest - len(prompt):longest] = torch.tensor(prompt)
        attend[i, longest - len(prompt):longest] = 1
    ids, attend = ids.to(device), attend.to(device)
    extent = (mask * torch.arange(1, width + 1, device=mask.device)).amax(dim=1, keepdim=True)
    ids[:, longest:] = tokens
    attend[:, longest:] = torch.arange(width, device=mask.device) < extent
    position = (attend.cumsum(dim=1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": attend, "position_ids": position}


def padded(answers: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, T) ids, padded on the right, and the mask of those that are there."""
    lengths = torch.tensor([len(answer) for answer in answers])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens = torch.zeros(mask.shape, dtype=torch.int64)
    tokens[mask] = torch.tensor([i for answer in answers for i in answer], dtype=torch.int64)
    return tokens.to(device), mask.to(device)
