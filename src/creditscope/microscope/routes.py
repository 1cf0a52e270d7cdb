"""The Gram matrix of one weight's per-rollout gradients and their sum, on one GPU, without storing them.

    dW_i = Σ_t δ_it a_itᵀ        dW = Σ_i dW_i        K_ij = ⟨dW_i, dW_j⟩

Four exact routes to the same two tensors, each a function of (delta, a). `weight_gram` takes the one that `route`, the
cost model, predicts to be the fastest:

- `fused`, up to 8 rollouts: one persistent kernel. Eight warps multiply tiles of dW_i on the tensor cores into a ring
  of scratch the size of the L2 cache. Four other warps read every column's N values once, and write products and sum.
- `pass`, up to 64: `torch.bmm` into a scratch chunk, then one pass over it for products and sums.
- `ghost`: K_ij = Σ_ts (a_it·a_js)(δ_it·δ_js), which forms no gradient; dW is the plain product. For few tokens.
- `chunks`: plain torch, any device and dtype; the only route for float32 and where Triton is missing.

No route waits for the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from creditscope.errors import CreditscopeError
from creditscope.microscope import kernels
from creditscope.microscope.gram import products

SCRATCH = 60 << 20  # bytes of per-rollout gradients that `pass` holds: the size of an H200's L2 cache
SMALL = 1 << 13  # entries: the rounding of fewer does not average out in a product, so such a layer is kept in float32
BUFFERS = 3  # chunks in the ring of `fused`, 17 MB each: one being written, one complete, one being read


def weight_gram(delta: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """dW = Σ_i dW_i in a's dtype and K_ij = ⟨dW_i, dW_j⟩ in float64, for dW_i = Σ_t δ_it a_itᵀ.

    `delta` is (N, T, d_out) and `a` (N, T, d_in), for N rollouts of T tokens; padded tokens have δ = 0.

    >>> delta, a = torch.tensor([[[1.0]], [[2.0]]]), torch.tensor([[[3.0, 0.0]], [[0.0, 4.0]]])
    >>> weight_gram(delta, a)
    (tensor([[3., 8.]]), tensor([[ 9.,  0.],
            [ 0., 64.]], dtype=torch.float64))
    """
    if delta.ndim != 3 or a.ndim != 3 or delta.shape[:2] != a.shape[:2]:
        raise CreditscopeError(f"weight_gram needs delta (N, T, d_out) and a (N, T, d_in) of the same N and T, got "
                               f"{tuple(delta.shape)} and {tuple(a.shape)}")
    if delta.dtype != a.dtype or delta.device != a.device:
        raise CreditscopeError(f"weight_gram needs delta and a in one dtype on one device, got {delta.dtype} on "
                               f"{delta.device} and {a.dtype} on {a.device}")
    n, t, d_out = delta.shape
    name = route(n, t, d_out, a.shape[2], a.dtype) if a.is_cuda else "chunks"
    return ROUTES[name](delta.contiguous(), a.contiguous())


def chunks(delta: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Plain torch, a chunk of output rows at a time; float32 products are as exact as torch is told to make them."""
    n, _, d_out = delta.shape
    d_in = a.shape[2]
    dw = a.new_empty(d_out, d_in)
    gram = a.new_zeros(n, n, dtype=torch.float64)
    half = a.element_size() == 2
    if half and d_out * d_in < SMALL:
        delta, a = delta.float(), a.float()
    rows = max(1, SCRATCH // max(1, n * d_in * a.element_size()))
    for start in range(0, d_out, rows):
        part = torch.bmm(delta[:, :, start : start + rows].transpose(1, 2), a)
        dw[start : start + rows] = part.sum(0)
        gram += products(part.flatten(1))
    return dw, gram


def passes(delta: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.bmm` of a chunk of output rows, then one pass over it for its products and its sum."""
    n, _, d_out = delta.shape
    d_in = a.shape[2]
    fast = n <= 16 and d_in % 8 == 0 and kernels.gluon is not None
    size = 16 if n <= 16 else kernels.triton.next_power_of_2(n)
    width, warps = (512 if n > 8 else 1024, 4) if fast else (256, 1) if n <= 16 else (128, 4)
    programs = _multiprocessors(a.device) * (3 if fast else 4 if warps == 4 else 16)
    rows = _rows(n, d_out, d_in)
    # Rows of the scratch begin on whole cache lines.
    scratch = a.new_empty(n, -(-rows * d_in // 64) * 64)
    dw = a.new_empty(d_out, d_in)
    partial = a.new_zeros(programs * (4 if fast else 1), size, size, dtype=torch.float64)
    for start in range(0, d_out, rows):
        here = min(rows, d_out - start)
        columns = here * d_in
        torch.bmm(delta[:, :, start : start + here].transpose(1, 2), a, out=scratch[:, :columns].view(n, here, d_in))
        steps = -(-columns // width)
        grid, out = (min(programs, steps),), dw[start : start + here]
        if fast:
            kernels.pass_kernel[grid](scratch.view(torch.int32), out.view(torch.int32), partial, n, columns // 2,
                                      scratch.stride(0) // 2, *kernels.mma(a.dtype, n > 8), n > 8, num_warps=4)
        else:
            kernels.dot_kernel[grid](scratch, out, partial, n, columns, scratch.stride(0), steps, size, width,
                                     num_warps=warps)
    total = partial.sum(0)
    return dw, total[:n, :n] + total[8 : 8 + n, 8 : 8 + n] if fast and n <= 8 else total[:n, :n]


def fused(delta: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """One persistent kernel: tiles of dW_i into a ring of scratch, then their products and sums."""
    n, t, d_out = delta.shape
    d_in = a.shape[2]
    tall, wide = -(-d_out // 128), -(-d_in // 256)
    items = tall * wide * n
    # Two rounds of the chip per chunk. A chunk must hold at least one: a program reports an item one item later.
    tiles = 2 * -(-_multiprocessors(a.device) // n)
    chunk_count = -(-tall * wide // tiles)
    programs = min(_multiprocessors(a.device), items)
    scratch = a.new_empty(min(BUFFERS, chunk_count) * tiles * n * 128, 256)
    dw = a.new_empty(d_out, d_in)
    partial = a.new_empty(programs, 36, dtype=torch.float32)
    counters = a.new_zeros(2, chunk_count, dtype=torch.int32)
    # Programs wait for each other, so all must be on the chip at once: a cooperative launch.
    kernels.fused_kernel[(programs,)](
        kernels.host.TensorDescriptor.from_tensor(delta, [1, 64, 128], _layout(3)),
        kernels.host.TensorDescriptor.from_tensor(a, [1, 64, 256], _layout(3)),
        kernels.host.TensorDescriptor.from_tensor(scratch, [128, 256], _layout(2)),
        scratch.view(torch.int32), dw.view(torch.int32), partial, counters[0], counters[1], n, -(-t // 64), items,
        tiles * n, tall, wide, d_out, d_in, *kernels.fma(a.dtype), BUFFERS, 3, num_warps=8,
        launch_cooperative_grid=True)
    return dw, partial.sum(0, dtype=torch.float64)[_pair_index(a.device)[:n, :n]]


def ghost(delta: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """K_ij = Σ_ts (a_it·a_js)(δ_it·δ_js), half of it computed; dW is the plain product."""
    n, t, d_out = delta.shape
    d_in = a.shape[2]
    tokens = _ghost_tokens(t)
    blocks = -(-t // tokens)
    partial = a.new_empty(n, n, blocks * blocks, dtype=torch.float32)
    factors = [kernels.tools.TensorDescriptor.from_tensor(x, [1, tokens, 64]) for x in (a, delta)]
    kernels.ghost_kernel[(n * blocks, n * blocks)](*factors, partial, n, blocks, d_in, d_out, tokens, 64, 16384,
                                                   num_warps=8 if tokens == 128 else 4, num_stages=4)
    return delta.flatten(0, 1).T @ a.flatten(0, 1), partial.sum(2, dtype=torch.float64)


ROUTES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "fused": fused, "pass": passes, "ghost": ghost, "chunks": chunks}


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _layout(rank: int) -> Any:
    return kernels.gl.NVMMASharedLayout(128, 16, rank=rank)


@functools.cache
def _pair_index(device: torch.device) -> Tensor:
    """Where the pair (i, j) of eight rows stands among the 36 of `kernels.fma`."""
    index = torch.zeros(8, 8, dtype=torch.long)
    rows, columns = torch.triu_indices(8, 8)
    index[rows, columns] = torch.arange(36)
    return torch.maximum(index, index.T).to(device)


def _rows(n: int, d_out: int, d_in: int) -> int:
    """Output rows in a chunk of `pass`: whole tiles of the matrix product where they fit."""
    rows = max(1, SCRATCH // (2 * n * d_in))
    return min(d_out, rows // 128 * 128 or rows)


def _ghost_tokens(t: int) -> int:
    return 128 if t > 64 else 64


# The cost model, measured once on an NVIDIA H200 in bfloat16; its accuracy: benchmarks/gpu/kernels.md.

_CHIP = 132  # multiprocessors
_MATRIX = 760e12  # operations/s of a large matrix product


def seconds(name: str, n: int, t: int, d_out: int, d_in: int) -> float:
    """The time that a route is predicted to take for one weight.

    >>> seconds("ghost", 8, 64, 3072, 3072) < seconds("fused", 8, 64, 3072, 3072)
    True
    >>> seconds("ghost", 8, 1024, 3072, 3072) < seconds("fused", 8, 1024, 3072, 3072)
    False
    """
    plain = 2 * n * t * d_out * d_in / _MATRIX
    if name == "ghost":
        # Pairs of token blocks in rounds of the chip. Rows far apart in memory make a long sum slower.
        tokens = _ghost_tokens(t)
        blocks = n * -(-t // tokens)
        operations = 2 * tokens * tokens * (d_in + d_out)
        rate = 715e12 / _CHIP / (1.5 if max(d_in, d_out) > 1 << 17 else 1)
        return plain + max(1.0, blocks * (blocks + 1) / 2 / _CHIP) * operations / rate + 25e-6
    if name == "fused":
        # An item of a tile: its steps and their overhead, or the reading of its values, whichever is slower.
        rounds = -(-n * -(-d_out // 128) * -(-d_in // 256) // _CHIP)
        return rounds * max(0.69e-6 * -(-t // 64) + 3.7e-6, 7.2e-6) + 30e-6
    if name == "pass":
        bandwidth = 2.3e12 if n <= 16 and d_in % 8 == 0 else 0.64e12
        return plain + 2 * n * d_out * d_in / bandwidth + 12.4e-6 * -(-d_out // _rows(n, d_out, d_in)) + 11e-6
    raise CreditscopeError(f"no cost model for route {name!r}; there are: fused, pass, ghost")


@functools.cache
def route(n: int, t: int, d_out: int, d_in: int, dtype: torch.dtype) -> str:
    """The route predicted to be the fastest for one weight on a GPU."""
    if kernels.triton is None or n > 64 or dtype not in (torch.bfloat16, torch.float16) or d_out * d_in < SMALL:
        return "chunks"
    able = ["pass"]
    if d_out % 8 == 0 and d_in % 8 == 0 and _hopper():  # what the bulk copies need
        able += ["ghost", "fused"] if n <= 8 and kernels.gluon is not None else ["ghost"]
    return min(able, key=lambda name: seconds(name, n, t, d_out, d_in))


@functools.cache
def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
