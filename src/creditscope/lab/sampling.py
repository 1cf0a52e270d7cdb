"""Groups of completions from any causal language model, with the log-probs of the distribution they were drawn from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.errors import CreditscopeError
from creditscope.lab.decoding import base, start


@dataclass(frozen=True)
class Samples:
    """B = P · R completions, prompt-major: rows i·R … (i+1)·R − 1 answer prompt i."""

    tokens: Tensor
    """(B, T) int64, padded on the right."""
    mask: Tensor
    """(B, T) bool: True for every sampled token, the end token included."""
    logp: Tensor
    """(B, T) float32: log-prob of the token under the distribution it was drawn from, after temperature and top-p."""
    entropy: Tensor
    """(B, T) float32: entropy of the temperature's distribution, before top-p, in nats."""
    finished: Tensor
    """(B,) bool: False where the completion was cut at max_tokens."""


def sample(model: Any, prompts: Sequence[Sequence[int]], group: int, *, max_tokens: int, end: int | Sequence[int],
           temperature: float = 1.0, top_p: float = 1.0, generator: torch.Generator | None = None,
           pad: int = 0) -> Samples:
    """`group` completions of each prompt, by y_t ~ top_p(softmax(logits / temperature)), up to an `end` token.

    A token is F⁻¹(u_it) for a uniform u_it that belongs to row i and position t alone, so a row does not depend on
    when others end. Temperature 0 takes the likeliest token, with certainty: its log-prob and entropy are 0.
    On a GPU the first call captures graphs; `creditscope.lab.decoding.release(model)` frees what they hold.
    """
    policy: Any = base(model)
    texts = [[int(token) for token in prompt] for prompt in prompts]
    ends = [end] if isinstance(end, int) else [int(token) for token in end]
    _check(policy, texts, group, max_tokens, ends, temperature, top_p, pad)
    rows = len(texts) * group
    uniform = torch.rand(max_tokens, rows, dtype=torch.float64, generator=generator,
                         device=generator.device if generator is not None else "cpu")
    uniform.clamp_(max=1 - 2**-50)  # a margin below 1, so that rounding cannot pass the last token
    with torch.inference_mode(False), torch.no_grad(), _evaluating(policy):
        decoder, logits = start(policy, texts, group, max_tokens, pad)
        device = logits.device
        uniform = uniform.to(device)
        logits = logits.repeat_interleave(group, 0)
        stops = torch.tensor(ends, device=device)
        row = torch.arange(rows, device=device)  # which row of the result each row of the batch is
        alive = torch.ones_like(row, dtype=torch.bool)
        pause = _pause(device)
        steps: list[tuple[Tensor, ...]] = []
        for t in range(max_tokens):
            token, chosen, spread = draw(logits, uniform[t, row], temperature, top_p)
            steps.append((row, token, alive, chosen, spread))
            alive = alive & ~torch.isin(token, stops)
            if t + 1 == max_tokens:
                break
            if (t + 1) % pause == 0:
                left = int(alive.sum())
                if left == 0:
                    break
                if decoder.worth(left, len(row)):
                    holes = (~alive[:left]).nonzero()[:, 0]
                    movers = alive[left:].nonzero()[:, 0] + left
                    decoder.keep(left, holes, movers)
                    token, row, alive = (x[:left].index_copy(0, holes, x[movers]) for x in (token, row, alive))
            logits = decoder.step(token)
        finished = torch.ones(rows, dtype=torch.bool, device=device).index_fill_(0, row[alive], False)
        return _gather(steps, finished, pad)


def _gather(steps: list[tuple[Tensor, ...]], finished: Tensor, pad: int) -> Samples:
    """The steps' (row, token, alive, logp, entropy), each over the rows then in the batch, as (B, T) tensors."""
    row, token, alive, logp, entropy = (torch.cat(column) for column in zip(*steps, strict=True))
    at = torch.repeat_interleave(torch.tensor([len(step[0]) for step in steps])).to(row.device)
    row, at, token, logp, entropy = (x[alive] for x in (row, at, token, logp, entropy))
    if not bool(torch.isfinite(logp).all()):
        raise CreditscopeError("the model's logits are not finite; the policy has diverged: go back to a checkpoint "
                               "and lower the learning rate")
    shape = len(finished), int(at.max()) + 1
    mask = torch.zeros(shape, dtype=torch.bool, device=row.device).index_put_((row, at), torch.ones_like(alive[:1]))
    return Samples(tokens=token.new_full(shape, pad).index_put_((row, at), token), mask=mask,
                   logp=torch.zeros(shape, device=row.device).index_put_((row, at), logp.float()),
                   entropy=torch.zeros(shape, device=row.device).index_put_((row, at), entropy.float()),
                   finished=finished)


def draw(logits: Tensor, uniform: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Token, log-prob and entropy of each row, by the inverse of the cumulative distribution at `uniform`.

    The sum runs in float64: in float32 the last of 10⁵ tokens would be drawn as often as rounding likes.

    >>> token, logp, entropy = draw(torch.tensor([[0., 0.]]).log_softmax(-1), torch.tensor([0.7]).double(), 1.0, 1.0)
    >>> token.item(), round(logp.exp().item(), 3), round(entropy.exp().item(), 3)
    (1, 0.5, 2.0)
    """
    if temperature == 0:
        return logits.argmax(-1), torch.zeros_like(uniform), torch.zeros_like(uniform)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
    p = log_p.exp()
    entropy = torch.special.entr(p).sum(-1)
    order = None
    if top_p < 1:
        p, order = p.sort(dim=-1, descending=True, stable=True)
    cumulative = p.cumsum(-1, dtype=torch.float64)
    last = (cumulative < top_p).sum(-1, keepdim=True) if top_p < 1 else None  # the likeliest tokens that reach top_p
    mass = cumulative[:, -1:] if last is None else cumulative.gather(1, last.clamp(max=p.shape[1] - 1))
    pick = torch.searchsorted(cumulative, uniform[:, None] * mass, right=True)  # the first whose sum exceeds u · mass
    pick = pick.clamp_(max=p.shape[1] - 1)  # NaN sorts last: reported by `sample`, not by a crash of the device
    token = pick if order is None else order.gather(1, pick)
    chosen = log_p.gather(1, token)
    if order is not None:
        chosen = chosen - mass.log()
    return token[:, 0], chosen[:, 0], entropy


def _pause(device: torch.device) -> int:
    """Steps between looks for finished rows: on an accelerator a look waits for all that was asked of it."""
    return 1 if device.type == "cpu" else 8


@contextmanager
def _evaluating(policy: nn.Module) -> Iterator[None]:
    """Dropout off; afterwards each module is as it was, also where only some were training."""
    training = [module for module in policy.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check(policy: Any, prompts: list[list[int]], group: int, max_tokens: int, ends: list[int], temperature: float,
           top_p: float, pad: int) -> None:
    if not prompts:
        raise CreditscopeError("sample needs at least one prompt, got 0")
    for name, value in (("group", group), ("max_tokens", max_tokens)):
        if value < 1:
            raise CreditscopeError(f"{name} must be at least 1, got {value}")
    if not 0 <= temperature < float("inf"):
        raise CreditscopeError(f"temperature must be 0 (greedy) or positive, got {temperature}; 1.0 samples the policy")
    if not 0 < top_p <= 1:
        raise CreditscopeError(f"top_p must be in (0, 1], got {top_p}; 1.0 keeps every token, temperature 0 is greedy")
    config = policy.config.get_text_config(decoder=True)
    for name, ids in (("end", ends), ("pad", [pad]), *((f"prompt {i}", prompt) for i, prompt in enumerate(prompts))):
        if not ids:
            raise CreditscopeError(f"{name} is empty; give it at least one token" + ", such as the model's first token"
                                   * name.startswith("prompt"))
        wrong = [token for token in ids if not 0 <= token < config.vocab_size]
        if wrong:
            raise CreditscopeError(f"{name} holds token {wrong[0]}, outside the model's vocabulary of "
                                   f"{config.vocab_size}; use the tokenizer that belongs to the model")
    context = getattr(config, "max_position_embeddings", None)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    length = len(prompts[longest])
    if context is not None and length >= context:
        raise CreditscopeError(f"prompt {longest} has {length} tokens, the model's context {context}; "
                               f"shorten it or drop it")
    if context is not None and length + max_tokens > context:
        raise CreditscopeError(f"prompt {longest} has {length} tokens and max_tokens is {max_tokens}: together "
                               f"{length + max_tokens}, over the model's context of {context}; "
                               f"set max_tokens to {context - length} or less")
