"""Groups of completions from a causal language model, with log-probs of the distribution they were drawn from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.errors import CreditscopeError
from creditscope.policy.decoding import Growing, Slots, base, begin, read, sliceable, start, write

ROWS = 1024
"""Continuations at a time. More gain little (packaged model, one CPU thread, 1,248 rows: 6.8 s with 64, 5.5 s with 512,
6.0 s with 1,024), and each row holds a cache: 1,024 rows of 1,000 tokens with 28 layers of 2 × 128 keys and values in
bfloat16 are 29 GB."""
TEXTS = 64
"""Rollouts read at a time. A forward keeps logits at every cut of any of them, for all of them: 2 GB for 100 cuts and a
vocabulary of 150,000 in bfloat16."""


@dataclass(frozen=True)
class Samples:
    """B = P · R completions, prompt-major: rows i·R … (i+1)·R − 1 answer prompt i."""

    tokens: Tensor
    """(B, T) int64, padded with 0 on the right."""
    mask: Tensor
    """(B, T) bool: True for every sampled token, the end token included."""
    logp: Tensor
    """(B, T) float32: log-prob of the token under the distribution it was drawn from, after temperature and top-p."""
    entropy: Tensor
    """(B, T) float32: entropy of the temperature's distribution, before top-p, in nats."""
    collision: Tensor
    """(B, T) float32: Σ_v π(v)² of the temperature's distribution, before top-p: the chance that two draws agree."""
    finished: Tensor
    """(B,) bool: False where the completion was cut at max_tokens."""


def sample(model: Any, prompts: Sequence[Sequence[int]], group: int, *, max_tokens: int, end: int | Sequence[int],
           temperature: float = 1.0, top_p: float = 1.0, generator: torch.Generator | None = None) -> Samples:
    """`group` completions of each prompt, by y_t ~ top_p(softmax(logits / temperature)), up to an `end` token.

    A token is F⁻¹(u_it) for a uniform u_it of row i and position t alone, so a row does not depend on when others end.
    Temperature 0 takes the likeliest token: log-prob 0, entropy 0, Σπ² 1. On a GPU the first call captures graphs;
    `creditscope.policy.decoding.release(model)` frees their memory.
    """
    policy: Any = base(model)
    texts = _texts(prompts)
    ends = _ends(end)
    _check(policy, dict(enumerate(texts)), {"group": group, "max_tokens": max_tokens}, ends, temperature, top_p)
    rows = len(texts) * group
    rule = _Rule(_uniform(max_tokens, rows, generator), torch.full((rows,), max_tokens), torch.tensor(ends),
                 temperature, top_p)
    with _sampling(policy):
        decoder, logits = start(policy, texts, group, max_tokens)
        steps = _decode(decoder, logits.repeat_interleave(group, 0), torch.arange(rows), rule)
        return _gather(steps, torch.zeros(rows, dtype=torch.bool, device=logits.device), rule.ends)


def continue_from(model: Any, prompts: Sequence[Sequence[int]], tokens: Tensor, row: Tensor, cut: Tensor, samples: int,
                  *, max_tokens: int, end: int | Sequence[int], temperature: float = 1.0, top_p: float = 1.0,
                  generator: torch.Generator | None = None) -> Samples:
    """`samples` continuations of each prefix prompts[row[n]] + tokens[row[n], :cut[n]]: (N · samples, ·), prefix-major.

    The tokens that `sample` would draw with the prefixes for prompts (the same u_it), at a lower cost: each distinct
    prompt is run once, each rollout once after its prompt, and a prefix is a slice of that cache. Monte Carlo values of
    VinePPO (arXiv:2410.01679) and SPO (arXiv:2505.23564) are mean rewards of such continuations.

    `tokens` (B, T) are completions, padded on the right; 0 ≤ cut ≤ T, and 0 is the prompt itself. Only new tokens are
    returned, at most max_tokens − cut[n] per row; a row that stops there is not finished. A prefix whose last token is
    an `end` is finished and gets no token.
    """
    policy: Any = base(model)
    texts = _texts(prompts)
    ends = _ends(end)
    tokens, row, cut = tokens.detach().cpu(), row.detach().cpu().long(), cut.detach().cpu().long()
    _check_prefixes(len(texts), tokens, row, cut, max_tokens)
    asked = {i: texts[i] for i in torch.unique(row).tolist()}
    _check(policy, asked, {"samples": samples, "max_tokens": max_tokens}, ends, temperature, top_p)
    _check_tokens(policy, tokens, row, cut)
    stops = torch.tensor(ends)
    over = (cut > 0) & torch.isin(tokens[row, (cut - 1).clamp(min=0)], stops) if tokens.shape[1] else cut > 0
    limit = torch.where(over, 0, max_tokens - cut)
    rule = _Rule(_uniform(int(limit.max()), len(row) * samples, generator), limit.repeat_interleave(samples), stops,
                 temperature, top_p)
    steps: list[_Step] = []
    with _sampling(policy):
        for n, decoder, logits in _decoders(policy, texts, tokens, row, cut, limit, samples):
            rows = (n[:, None] * samples + torch.arange(samples)).flatten()
            steps += _decode(decoder, logits.repeat_interleave(samples, 0), rows, rule)
        device = policy.get_input_embeddings().weight.device if not steps else steps[0].token.device
        return _gather(steps, over.repeat_interleave(samples).to(device), rule.ends)


def _decoders(policy: Any, texts: list[list[int]], tokens: Tensor, row: Tensor, cut: Tensor, limit: Tensor,
              samples: int) -> Iterator[tuple[Tensor, Growing | Slots, Tensor]]:
    """Parts of the prefixes that have room: indices, a decoder, their (n, V) logits."""
    work = (limit > 0).nonzero()[:, 0]
    if not len(work):
        return
    rollouts, text = torch.unique(row[work], return_inverse=True)
    distinct: dict[tuple[int, ...], int] = {}
    prompt = torch.tensor([distinct.setdefault(tuple(texts[i]), len(distinct)) for i in rollouts.tolist()])
    known = read(policy, [list(ids) for ids in distinct])
    device = known.mask.device
    lengths = torch.tensor([len(texts[i]) for i in row.tolist()]) + cut
    context = _context(policy)
    if not sliceable(known.cache, known.mask.shape[1] + int(cut[work].max())):
        for part in _parts(lengths[work], limit[work], samples, context):
            n = work[part]
            prefixes = [texts[i] + tokens[i, :c].tolist() for i, c in torch.stack([row[n], cut[n]], 1).tolist()]
            yield n, *start(policy, prefixes, samples, int(limit[n].max()))
        return
    for begun in range(0, len(rollouts), TEXTS):
        here = (text >= begun) & (text < begun + TEXTS)
        n, which = work[here], text[here] - begun
        those = rollouts[begun:begun + TEXTS]
        written = torch.zeros_like(those).scatter_reduce_(0, which, cut[n], "amax")
        cuts = torch.unique(cut[n][cut[n] > 0])
        branches = write(policy, known, prompt[begun:begun + TEXTS].to(device),
                         tokens[those, :int(written.max())].to(device), written.to(device), cuts.to(device))
        for part in _parts(lengths[n], limit[n], samples, context):
            state = branches.prefixes(which[part].to(device), cut[n[part]].to(device))
            yield n[part], begin(policy, state, samples, int(limit[n[part]].max())), state.logits


def _parts(lengths: Tensor, limit: Tensor, samples: int, context: float) -> Iterator[Tensor]:
    """Indices of prefixes of similar length to continue together, at most ROWS rows per part.

    A part takes slots for its longest prefix and its largest limit, which stay within the context: a finished row runs
    along until it is removed, and its position must exist.
    """
    most = max(1, ROWS // samples)
    size = -(-len(lengths) // -(-len(lengths) // most))
    part: list[int] = []
    room = 0
    for i in lengths.argsort(stable=True).tolist():
        room = max(room, int(limit[i]))
        if part and (len(part) == size or int(lengths[i]) + room > context):
            yield torch.tensor(part)
            part, room = [], int(limit[i])
        part.append(i)
    yield torch.tensor(part)


@dataclass(frozen=True)
class _Rule:
    """Parameters of the draw."""

    uniform: Tensor
    """(T, B) float64: u_it of row i at position t."""
    limit: Tensor
    """(B,) tokens that a row may write."""
    ends: Tensor
    """Tokens after which a row writes nothing."""
    temperature: float
    top_p: float


@dataclass(frozen=True)
class _Step:
    """One token per row in the batch."""

    t: int
    row: Tensor
    """The row of the result."""
    alive: Tensor
    token: Tensor
    logp: Tensor
    entropy: Tensor
    collision: Tensor


def _decode(decoder: Growing | Slots, logits: Tensor, row: Tensor, rule: _Rule) -> list[_Step]:
    """Decode rows `row` of the result to their ends, from their first logits."""
    room = int(rule.limit[row].max())
    device = logits.device
    uniform, limit, stops = rule.uniform[:room].to(device), rule.limit.to(device), rule.ends.to(device)
    row = row.to(device)
    alive = torch.ones_like(row, dtype=torch.bool)
    pause = _pause(device)
    steps: list[_Step] = []
    for t in range(room):
        token, *found = draw(logits, uniform[t, row], rule.temperature, rule.top_p)
        steps.append(_Step(t, row, alive, token, *found))
        alive = alive & ~torch.isin(token, stops) & (limit[row] > t + 1)
        if t + 1 == room:
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
    return steps


def _gather(steps: list[_Step], finished: Tensor, ends: Tensor) -> Samples:
    """The steps as (B, T) tensors. `finished`: rows without a step to make; those that drew an end are added."""
    def column(name: str) -> Tensor:
        return torch.cat([getattr(step, name) for step in steps])[alive]

    if not steps:
        none = torch.zeros(len(finished), 0, device=finished.device, dtype=torch.float32)
        return Samples(none.long(), none.bool(), none, none, none, finished)
    alive = torch.cat([step.alive for step in steps])
    device = alive.device
    at = torch.repeat_interleave(torch.tensor([step.t for step in steps]), torch.tensor([len(s.row) for s in steps]))
    at, row, token = at.to(device)[alive], column("row"), column("token")
    if not bool(torch.isfinite(column("logp")).all()):
        raise CreditscopeError("the model's logits are not finite; the policy has diverged: go back to a checkpoint "
                               "and lower the learning rate")
    shape = len(finished), int(at.max()) + 1
    floats = {name: torch.zeros(shape, device=device, dtype=torch.float32).index_put_((row, at), column(name).float())
              for name in ("logp", "entropy", "collision")}
    return Samples(tokens=token.new_zeros(shape).index_put_((row, at), token),
                   mask=torch.zeros(shape, dtype=torch.bool, device=device).index_put_((row, at), alive.new_ones(1)),
                   finished=finished.index_fill(0, row[torch.isin(token, ends.to(device))], True), **floats)


def draw(logits: Tensor, uniform: Tensor, temperature: float,
         top_p: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token, log-prob, entropy and Σ_v π(v)² of each row, by the inverse of the cumulative distribution at `uniform`.

    The cumulative sum is float64: in float32 rounding would decide how often the last of 10⁵ tokens is drawn.

    >>> token, logp, entropy, collision = draw(torch.zeros(1, 2), torch.tensor([0.7]).double(), 1.0, 1.0)
    >>> token.item(), round(logp.exp().item(), 3), round(entropy.exp().item(), 3), round(collision.item(), 3)
    (1, 0.5, 2.0, 0.5)
    """
    if temperature == 0:
        return logits.argmax(-1), torch.zeros_like(uniform), torch.zeros_like(uniform), torch.ones_like(uniform)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
    p = log_p.exp()
    entropy = torch.special.entr(p).sum(-1)
    collision = torch.linalg.vector_norm(p, dim=-1).square()  # without a table of squares
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
    return token[:, 0], chosen[:, 0], entropy, collision


def _pause(device: torch.device) -> int:
    """Steps between searches for finished rows: on an accelerator each one synchronises."""
    return 1 if device.type == "cpu" else 8


def _uniform(tokens: int, rows: int, generator: torch.Generator | None) -> Tensor:
    """(tokens, rows) numbers in [0, 1); those of the first positions do not depend on `tokens`."""
    drawn = torch.rand(tokens, rows, dtype=torch.float64, generator=generator,
                       device=generator.device if generator is not None else "cpu")
    return drawn.clamp_(max=1 - 2**-50)  # a margin below 1, so that rounding cannot pass the last token


@contextmanager
def _sampling(policy: nn.Module) -> Iterator[None]:
    """No graph and no dropout; afterwards each module is in the mode it had."""
    training = [module for module in policy.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _context(policy: Any) -> float:
    """Positions of the model; infinite where it names no limit."""
    found = getattr(policy.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return float("inf") if found is None else int(found)


def _texts(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[int(token) for token in prompt] for prompt in prompts]


def _ends(end: int | Sequence[int]) -> list[int]:
    return [end] if isinstance(end, int) else [int(token) for token in end]


def _check(policy: Any, prompts: Mapping[int, list[int]], counts: Mapping[str, int], ends: list[int],
           temperature: float, top_p: float) -> None:
    if not prompts:
        raise CreditscopeError("sample needs at least one prompt, got 0")
    for name, value in counts.items():
        if value < 1:
            raise CreditscopeError(f"{name} must be at least 1, got {value}")
    if not 0 <= temperature < float("inf"):
        raise CreditscopeError(f"temperature must be 0 (greedy) or positive, got {temperature}; 1.0 samples the policy")
    if not 0 < top_p <= 1:
        raise CreditscopeError(f"top_p must be in (0, 1], got {top_p}; 1.0 keeps every token, temperature 0 is greedy")
    config = policy.config.get_text_config(decoder=True)
    for name, ids in (("end", ends), *((f"prompt {i}", prompt) for i, prompt in prompts.items())):
        if not ids:
            raise CreditscopeError(f"{name} is empty; give it at least one token" + ", such as the model's first token"
                                   * name.startswith("prompt"))
        wrong = [token for token in ids if not 0 <= token < config.vocab_size]
        if wrong:
            raise CreditscopeError(f"{name} holds token {wrong[0]}, outside the model's vocabulary of "
                                   f"{config.vocab_size}; use the tokenizer that belongs to the model")
    context = _context(policy)
    longest = max(prompts, key=lambda i: len(prompts[i]))
    length, max_tokens = len(prompts[longest]), counts["max_tokens"]
    if length >= context:
        raise CreditscopeError(f"prompt {longest} has {length} tokens, the model's context {context}; "
                               f"shorten it or drop it")
    if length + max_tokens > context:
        raise CreditscopeError(f"prompt {longest} has {length} tokens and max_tokens is {max_tokens}: together "
                               f"{length + max_tokens}, over the model's context of {context}; "
                               f"set max_tokens to {context - length} or less")


def _check_prefixes(prompts: int, tokens: Tensor, row: Tensor, cut: Tensor, max_tokens: int) -> None:
    if tokens.dim() != 2 or len(tokens) != prompts:
        raise CreditscopeError(f"tokens has shape {tuple(tokens.shape)} and there are {prompts} prompts; give one row "
                               f"of tokens for each prompt: ({prompts}, T)")
    if row.dim() != 1 or row.shape != cut.shape or not len(row):
        raise CreditscopeError(f"row has shape {tuple(row.shape)} and cut {tuple(cut.shape)}; give both as (N,), "
                               f"a number for each of N ≥ 1 prefixes")
    most = min(tokens.shape[1], max_tokens)
    why = "the tokens of a row" if most == tokens.shape[1] else "max_tokens"
    for name, values, last, what in (("row", row, prompts - 1, "the rows of tokens"), ("cut", cut, most, why)):
        wrong = ((values < 0) | (values > last)).nonzero()[:, 0].tolist()
        if wrong:
            raise CreditscopeError(f"{name}[{wrong[0]}] is {int(values[wrong[0]])}, outside 0 to {last}, {what}")


def _check_tokens(policy: Any, tokens: Tensor, row: Tensor, cut: Tensor) -> None:
    """Every token of a prefix is in the vocabulary; padding need not be."""
    longest = torch.zeros(len(tokens), dtype=torch.long).scatter_reduce_(0, row, cut, "amax")
    vocabulary = policy.config.get_text_config(decoder=True).vocab_size
    taken = torch.arange(tokens.shape[1]) < longest[:, None]
    wrong = (taken & ((tokens < 0) | (tokens >= vocabulary))).nonzero().tolist()
    if wrong:
        i, t = wrong[0]
        raise CreditscopeError(f"tokens[{i}, {t}] is {int(tokens[i, t])}, outside the model's vocabulary of "
                               f"{vocabulary}; use the tokenizer that belongs to the model, and no cut beyond a "
                               f"row's own tokens")
