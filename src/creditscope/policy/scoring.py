"""log π, entropy and Σπ² of given completions: one forward pass, no sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from creditscope.errors import CreditscopeError
from creditscope.policy.loading import Policy
from creditscope.policy.logp import completion_logits

LOGITS = 2**26
"""Logits held at once, 256 MB in float32, unless a single row has more."""
COLUMNS = 64
"""Positions reduced at once: probabilities of one slice are held beside the logits."""

Tick = Callable[[int, int], None]
"""(done, of how much), called after each piece of work."""


@dataclass(frozen=True)
class Scores:
    """(B, T) each, 0 where the mask is False."""

    logp: Tensor
    """log π(y_t)."""
    entropy: Tensor
    """−Σ_v π(v) log π(v), in nats."""
    collision: Tensor
    """Σ_v π(v)²."""


@torch.no_grad()
def score_tokens(policy: Policy, prompts: Sequence[Sequence[int]], tokens: Tensor, mask: Tensor,
                 temperature: float = 1.0, tick: Tick | None = None) -> Scores:
    """log π, entropy and Σπ² of each given token under softmax(logits / temperature).

    Rows are sorted by length and taken as many at a time as LOGITS allows.
    """
    out = Scores(*(torch.zeros(mask.shape, device=mask.device) for _ in range(3)))
    extent = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(dim=1)
    _check(policy, prompts, extent.tolist())
    size = extent.cpu() + torch.tensor([len(prompt) for prompt in prompts])
    done = 0
    for rows in _parts(size.argsort(stable=True), extent.cpu(), policy.model.get_output_embeddings().weight.shape[0]):
        at = rows.to(mask.device)
        width = int(extent[at].max())
        if width:
            found = _score(policy, [prompts[i] for i in rows.tolist()], tokens[at, :width], mask[at, :width],
                           temperature)
            for whole, part in zip((out.logp, out.entropy, out.collision), found, strict=True):
                whole[at, :width] = part.to(whole).masked_fill(~mask[at, :width], 0.0)
        done += len(rows)
        if tick is not None:
            tick(done, len(mask))
    return out


def encode_exactly(policy: Policy, text: str, what: str) -> list[int]:
    """Token ids of a completion that decode to the text, character by character."""
    ids = policy.tokenize(text)
    if policy.decode(ids) != text:
        raise CreditscopeError(f"{what}: the tokenizer of {policy.name!r} does not give the text back: "
                               f"{policy.decode(ids)[:80]!r} for {text[:80]!r}; leave it out, or take another model")
    return ids


def _parts(order: Tensor, extent: Tensor, vocabulary: int) -> list[Tensor]:
    """The rows in their order, split where one more would exceed LOGITS."""
    parts: list[list[int]] = [[]]
    widest = 0
    for row in order.tolist():
        widest = max(widest, int(extent[row]))
        if parts[-1] and (len(parts[-1]) + 1) * (widest + 1) * vocabulary > LOGITS:
            parts.append([])
            widest = int(extent[row])
        parts[-1].append(row)
    return [torch.tensor(part) for part in parts]


def _score(policy: Policy, prompts: Sequence[Sequence[int]], tokens: Tensor, mask: Tensor,
           temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    with policy.active():
        logits = completion_logits(policy, prompts, tokens, mask)
    found: list[list[Tensor]] = [[], [], []]
    for start in range(0, tokens.shape[1], COLUMNS):
        part = logits[:, start:start + COLUMNS]
        log_p = (part.to(torch.promote_types(part.dtype, torch.float32)) / temperature).log_softmax(dim=-1)
        p = log_p.exp()
        found[0].append(log_p.gather(2, tokens[:, start:start + COLUMNS, None]).squeeze(2))
        found[1].append(torch.special.entr(p).sum(dim=-1))
        found[2].append(torch.linalg.vector_norm(p, dim=-1).square())
    logp, entropy, collision = (torch.cat(parts, dim=1) for parts in found)
    return logp, entropy, collision


def _check(policy: Policy, prompts: Sequence[Sequence[int]], lengths: list[int]) -> None:
    room = getattr(policy.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        if not prompt:
            raise CreditscopeError(f"prompt {i} is empty; give it at least one token, such as the model's first token")
        if room is not None and len(prompt) + length > room:
            raise CreditscopeError(f"row {i} has {len(prompt)} tokens in its prompt and {length} in its answer: "
                                   f"together over the context of {room} of model {policy.name!r}; drop that row, or "
                                   f"take a model with more room")
