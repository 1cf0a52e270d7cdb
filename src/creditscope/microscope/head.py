"""log π of chosen tokens through an output head, a block of the vocabulary at a time.

    z_t = W h_t + b        log π(y_t) = z_t[y_t]/τ − log Σ_v exp(z_t[v]/τ)
    δ_t[v] = c_t (1{v = y_t} − π_t(v))/τ        dW = Σ_t δ_t h_tᵀ        dh_t = Wᵀ δ_t

The forward pass keeps log Σ exp alone; the backward pass computes each block of z again. A block of the vocabulary is a
block of the rows of W, so the products ⟨dW_i, dW_j⟩ of all blocks add up to the Gram of W. The (B, T, V) logits are
never held; the price is one more product with W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from creditscope.microscope.calls import PLAIN, Call, unwatched
from creditscope.microscope.recorder import Recorder
from creditscope.microscope.rows import RowOwners
from creditscope.microscope.sources import ParameterSource

HELD = 2**26
"""Logits of a block: with their probabilities and gradients at most 1 GB."""
ALIGNED = 128
"""A block is a multiple of so many words where it has as many. Products with odd blocks ran on a GPU's kernels for
unaligned rows: 44 of the 115 ms of a pass (0.6 B weights, H200)."""


def chosen_logp(hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor,
                temperature: float = 1.0) -> Tensor:
    """(B, T) log π of `tokens` from (B, T, d) hidden states and a head (V, d); float32 or wider.

    >>> hidden, weight = torch.ones(1, 2, 1), torch.tensor([[0.0], [0.0], [2.0], [0.0]])
    >>> whole = (hidden @ weight.T).log_softmax(-1)
    >>> torch.allclose(chosen_logp(hidden, weight, None, torch.tensor([[2, 0]])), whole[0, [0, 1], [2, 0]][None])
    True
    """
    given = (hidden, weight) if bias is None else (hidden, weight, bias)
    if has_torch_function(given):
        found: Tensor = handle_torch_function(chosen_logp, given, hidden, weight, bias, tokens, temperature)
        return found
    made: Tensor = _Chosen.apply(hidden, weight, bias, tokens, temperature, _plain)  # type: ignore[no-untyped-call]
    return made


def blocks(shape: tuple[int, ...], vocabulary: int) -> Iterator[slice]:
    """The vocabulary in blocks of at most HELD logits of (B, T) tokens."""
    step = max(1, HELD // max(1, shape[0] * shape[1]))
    step -= step % ALIGNED if step > ALIGNED else 0
    return (slice(start, min(start + step, vocabulary)) for start in range(0, vocabulary, step))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, part: slice, temperature: float) -> Tensor:
    """(B, T, block) z/τ as the model computes it, in float32 or wider."""
    z = F.linear(hidden, weight[part], None if bias is None else bias[part])
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    return z.div_(temperature) if temperature != 1.0 else z


Pull = Callable[[Iterator[tuple[slice, Tensor]], Tensor, Tensor, Tensor | None], tuple[Tensor | None, Tensor | None]]
"""(each block with its (B, T, block) δ, hidden, weight, bias) → dW and db."""


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float,
                pull: Pull) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        chosen, sums = hidden.new_zeros(tokens.shape, dtype=wide), []
        for part in blocks(tuple(tokens.shape), len(weight)):
            z = _logits(hidden, weight, bias, part, temperature)
            inside = (tokens >= part.start) & (tokens < part.stop)
            at = (tokens - part.start).clamp(0, z.shape[-1] - 1)
            chosen = torch.where(inside, z.gather(2, at[..., None]).squeeze(2), chosen)
            sums.append(z.logsumexp(dim=2))
            del z
        total = torch.stack(sums).logsumexp(dim=0)
        ctx.save_for_backward(hidden, weight, bias, tokens, total)
        ctx.temperature, ctx.pull = temperature, pull
        return chosen - total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *_pulled(ctx, ctx.saved_tensors, grad), None, None, None


def _pulled(ctx: Any, saved: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dh, dW and db: W's by `ctx.pull`, which takes the blocks of δ one by one."""
    hidden, weight, bias, tokens, total = saved
    dh = torch.zeros_like(hidden, dtype=total.dtype) if ctx.needs_input_grad[0] else None

    def deltas() -> Iterator[tuple[slice, Tensor]]:
        for part in blocks(tuple(tokens.shape), len(weight)):
            p = _logits(hidden, weight, bias, part, ctx.temperature).sub_(total[..., None]).exp_()
            delta = p.mul_(-grad[..., None])
            inside = (tokens >= part.start) & (tokens < part.stop)
            at = (tokens - part.start).clamp(0, delta.shape[-1] - 1)
            delta.scatter_add_(2, at[..., None], torch.where(inside, grad, 0.0)[..., None])
            delta = (delta.div_(ctx.temperature) if ctx.temperature != 1.0 else delta).to(hidden.dtype)
            if dh is not None:
                dh.add_(_wide_product(delta, weight[part]))
            yield part, delta

    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        dw, db = ctx.pull(deltas(), hidden, weight, bias)
    else:
        dw = db = None
        for _ in deltas():
            pass
    return None if dh is None else dh.to(hidden.dtype), dw, db


def _wide_product(delta: Tensor, weight: Tensor) -> Tensor:
    """(B, T, v) δ and (v, d) W → (B, T, d) in float32 or wider: Σ_v δ_v = 0, so that blocks cancel one another, and
    rounding each to half precision would cost more than rounding their sum."""
    if delta.dtype not in (torch.bfloat16, torch.float16):
        return delta @ weight
    if delta.is_cuda:
        flat: Tensor = torch.mm(delta.flatten(0, 1), weight, out_dtype=torch.float32)
        return flat.view(*delta.shape[:2], -1)
    return delta.float() @ weight.float()


def _plain(deltas: Iterator[tuple[slice, Tensor]], hidden: Tensor, weight: Tensor,
           bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """dW = Σ_t δ_t h_tᵀ and db = Σ_t δ_t, block by block."""
    dw, db = torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
    flat = hidden.flatten(0, 1)
    for part, delta in deltas:
        torch.mm(delta.flatten(0, 1).t(), flat, out=dw[part])
        if db is not None:
            db[part] = delta.sum(dim=(0, 1))
    return dw, db


class _WatchedHead(torch.autograd.Function):
    """`_Chosen` whose backward pass reports each block's rows."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float,
                pull: Pull, recorder: Recorder) -> Tensor:
        ctx.recorder = recorder
        found: Tensor = _Chosen.forward(ctx, hidden, weight, bias, tokens, temperature, pull)
        return found

    @unwatched
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *_pulled(ctx, ctx.kept, grad), None, None, None, None


def head(call: Call) -> Any:
    """The rule of `chosen_logp`: rows of a head, block by block."""
    hidden, weight, bias, tokens, temperature = (*call.args, *[None] * 5)[:5]
    sources = call.source(weight), None if bias is None else call.source(bias)
    source = sources[0]
    plain = not {type(t) for t in (hidden, weight, bias) if t is not None} - PLAIN
    if source is None or not source.matrix or source.turned or source.key is None or source.key.part is not None \
            or not plain or (bias is not None and bias.requires_grad and sources[1] is None):
        return None
    rows, where = call.rows_of(hidden), call.where
    rows.owned(tuple(hidden.shape[:-1]), where)
    for each, kind in zip(sources, ("matrix", "dense"), strict=True):
        call.recorder.forward(kind, each, hidden.requires_grad)
    pull = _reporting(call.recorder, rows, where, source, sources[1])
    return _WatchedHead.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, tokens, 1.0 if temperature is None else temperature, pull, call.recorder)


def _reporting(recorder: Recorder, rows: RowOwners, where: str, weight: ParameterSource,
               bias: ParameterSource | None) -> Pull:
    def pull(deltas: Iterator[tuple[slice, Tensor]], hidden: Tensor, _: Tensor,
             offset: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        sums: list[Tensor] = []

        def arranged() -> Iterator[tuple[int, Tensor]]:
            for part, delta in deltas:
                recorder.stray(where, rows.stray(delta))
                mine = rows.arrange(delta, where, blank=True)
                if offset is not None:
                    sums.append(mine.sum(dim=1))
                yield part.start, mine

        dw = recorder.blocks_of_matrix(weight, arranged(), rows.arrange(hidden, where))
        db = recorder.dense(bias, torch.cat(sums, dim=1)) if bias is not None else None
        return dw, db

    return pull
