"""The Triton kernels of `routes`: products and sums of per-rollout gradients on one GPU, and rows of layer norms.

Triton is looked up when this module is imported; without it the names are there and nothing can be launched.
"""

# Kernels are written in Triton's languages, whose types are not Python's, and Triton need not be installed.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, name-defined, no-any-return"

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor


def _find(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


triton = _find("triton")
tl = _find("triton.language")
gluon = _find("triton.experimental.gluon")
gl = _find("triton.experimental.gluon.language")
hopper = _find("triton.experimental.gluon.language.nvidia.hopper")
host = _find("triton.experimental.gluon.nvidia.hopper")
tools = _find("triton.tools.tensor_descriptor")


def _kernel(language: Any, *scalars: str) -> Any:
    """Compile on first use, and only once whatever the values of the named scalars; without Triton, leave it alone."""
    return language.jit(do_not_specialize=list(scalars)) if language else lambda f: f


_gluon_jit: Any = gluon.jit if gluon else lambda f: f

# ---- products and sums of columns ------------------------------------------------------------------------------------
#
# In a pass of its own, on the tensor cores. mma wants its first factor with row lane // 4 in a lane, and its second,
# transposed, likewise: for x xᵀ both are the registers that the lane loaded, and no number moves between lanes. The
# order of columns is free as long as all rollouts agree, so a lane loads 16 bytes at once and calls them what the
# instruction wants. For the sum over rollouts movmatrix turns 8×8 numbers and a product with ones adds them.


@functools.cache
def mma(dtype: torch.dtype, wide: bool) -> tuple[str, str, str, int]:
    """PTX for x xᵀ and Σ_i x_i over 32 columns, eight in a lane; its constraints; PTX to round sums; a pair of ones.

    `wide` is for 16 rollouts. Eight fill one half of the rows; the other half is given the next columns of the same, so
    that registers are used just as they were loaded, and `passes` adds the two diagonal blocks.
    """
    kind, ones = {torch.bfloat16: ("bf16", 0x3F803F80), torch.float16: ("f16", 0x3C003C00)}[dtype]
    deep = 16 if wide else 8
    product = f"mma.sync.aligned.m16n8k{deep}.row.col.f32.{kind}.{kind}.f32 {{%s}}, {{%s}}, {{%s}}, {{%s}};"

    def four(first: int) -> str:
        return ", ".join(f"${first + j}" for j in range(4))

    # Outputs: products in 0-7, sums in 8-23. Inputs: x from 24 on, then products and sums so far, then ones in the row
    # whose lanes keep these sums and zeros elsewhere.
    so_far = 32 if wide else 28
    keep = so_far + 24
    lines = [".reg .b32 u, v, z; mov.b32 z, 0;"]
    for half in range(2):
        x = 24 + 2 * half
        rows = f"${x}, ${x + 4}, ${x + 1}, ${x + 5}" if wide else f"${x}, ${x + 1}"
        factors = (f"${x}, ${x + 1}", f"${x + 4}, ${x + 5}") if wide else (f"${x}", f"${x + 1}")
        for k, factor in enumerate(factors):
            lines.append(product % (four(4 * k), rows, factor, four(4 * k if half else so_far + 4 * k)))
    for j in range(4):
        lines.append(f"movmatrix.sync.aligned.m8n8.trans.b16 u, ${24 + j};")
        if wide:
            lines.append(f"movmatrix.sync.aligned.m8n8.trans.b16 v, ${28 + j};")
        rows, factor = (f"${keep}, z, ${keep}, z", "u, v") if wide else (f"${keep}, z", "u")
        lines.append(product % (four(8 + 4 * j), rows, factor, four(so_far + 8 + 4 * j)))
    constraints = ["=&f"] * 24 + ["r"] * (8 if wide else 4) + ["f"] * 24 + ["r"] * 4
    rounding = " ".join(f"cvt.rn.{kind}x2.f32 ${j}, ${5 + 4 * j}, ${4 + 4 * j};" for j in range(4))
    return "{ " + " ".join(lines) + " }", ",".join(constraints), rounding, ones


@_gluon_jit
def _load(words, stride, limit, n, WIDE: gl.constexpr):
    """Eight loads per lane of x: pairs of numbers, rows `stride` pairs apart; 512 (wide) or 1024 columns."""
    SPANS: gl.constexpr = 4 if WIDE else 8
    e = gl.arange(0, 512, layout=gl.BlockedLayout([4], [32], [4], [0]))
    row = e // 16 % 8
    word = e // 128 * (SPANS * 16) + e % 16
    at = words + row * stride + word
    x0 = gl.load(at, mask=gl.max_constancy((row < n) & (word < limit), [4]), other=0)
    x1 = gl.load(at + 16, mask=gl.max_constancy((row < n) & (word + 16 < limit), [4]), other=0)
    x2 = gl.load(at + 32, mask=gl.max_constancy((row < n) & (word + 32 < limit), [4]), other=0)
    x3 = gl.load(at + 48, mask=gl.max_constancy((row < n) & (word + 48 < limit), [4]), other=0)
    if WIDE:
        at += 8 * stride
        row += 8
    else:
        at += 64
        word += 64
    x4 = gl.load(at, mask=gl.max_constancy((row < n) & (word < limit), [4]), other=0)
    x5 = gl.load(at + 16, mask=gl.max_constancy((row < n) & (word + 16 < limit), [4]), other=0)
    x6 = gl.load(at + 32, mask=gl.max_constancy((row < n) & (word + 32 < limit), [4]), other=0)
    x7 = gl.load(at + 48, mask=gl.max_constancy((row < n) & (word + 48 < limit), [4]), other=0)
    return x0, x1, x2, x3, x4, x5, x6, x7


@_gluon_jit
def _columns(x, low, high, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, ROUND: gl.constexpr, ONES: gl.constexpr,
             WIDE: gl.constexpr):
    """Products, added to low and high, and sums of what `_load` loaded.

    Of the k-th 32 columns the four lanes of row k keep the sums, so that a warp's leave in order: where `_kept` says.
    """
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    row = gl.arange(0, 512, layout=layout) // 16 % 8
    s0 = gl.zeros([512], gl.float32, layout)
    s1 = gl.zeros([512], gl.float32, layout)
    s2 = gl.zeros([512], gl.float32, layout)
    s3 = gl.zeros([512], gl.float32, layout)
    for k in gl.static_range(4 if WIDE else 8):
        keep = gl.where(row == k, ONES, 0)
        if WIDE:
            low, high, s0, s1, s2, s3 = gl.inline_asm_elementwise(
                ASM, CONSTRAINTS, [x[k], x[k + 4], low, high, s0, s1, s2, s3, keep], dtype=(gl.float32,) * 6,
                is_pure=True, pack=4)
        else:
            low, high, s0, s1, s2, s3 = gl.inline_asm_elementwise(
                ASM, CONSTRAINTS, [x[k], low, high, s0, s1, s2, s3, keep], dtype=(gl.float32,) * 6,
                is_pure=True, pack=4)
    sums = gl.inline_asm_elementwise(ROUND, "=&r,=&r,=&r,=&r,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f", [s0, s1, s2, s3],
                                     dtype=gl.int32, is_pure=True, pack=4)
    return low, high, sums


@_gluon_jit
def _kept(WIDE: gl.constexpr):
    """The pair of columns whose sums `_columns` left in each element, and whether it left any."""
    e = gl.arange(0, 512, layout=gl.BlockedLayout([4], [32], [4], [0]))
    if WIDE:
        return e // 128 * 64 + e % 128, e % 128 < 64
    else:  # noqa: RET505 (a compile-time choice: only one branch is compiled)
        return e, e >= 0


@_gluon_jit
def _add_products(partial, low, high):
    """Each warp's 16×16 products, row by row, onto its own slot of `partial` in float64."""
    e = gl.arange(0, 512, layout=gl.BlockedLayout([4], [32], [4], [0]))
    row = e // 16 % 8 + e % 4 // 2 * 8
    slot = partial + e // 128 * 256 + row * 16 + e // 4 % 4 * 2 + e % 2
    gl.store(slot, gl.load(slot) + low.to(gl.float64))
    gl.store(slot + 8, gl.load(slot + 8) + high.to(gl.float64))


@_kernel(gluon, "n", "size")
def pass_kernel(words, dw, partial, n, size, stride, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr,
                 ROUND: gl.constexpr, ONES: gl.constexpr, WIDE: gl.constexpr):
    """dw = Σ_i x_i, and x xᵀ onto `partial`, for x of n rows of `size` pairs of numbers, `stride` pairs apart."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    WIDTH: gl.constexpr = 256 if WIDE else 512
    pair, kept = _kept(WIDE)
    low = gl.zeros([512], gl.float32, layout)
    high = gl.zeros([512], gl.float32, layout)
    start = gl.program_id(0) * WIDTH
    step = gl.num_programs(0) * WIDTH
    x = _load(words + start, stride, size - start, n, WIDE)
    for at in range(start, size, step):
        # The cache answers after some 800 cycles: the next step is on its way while this one is worked on.
        y = _load(words + at + step, stride, size - at - step, n, WIDE)
        zero = gl.zeros([512], gl.float32, layout)
        # The tensor cores round towards zero: short chains there, ordinary additions above them.
        more, other, sums = _columns(x, zero, zero, ASM, CONSTRAINTS, ROUND, ONES, WIDE)
        gl.store(dw + at + pair, sums, mask=gl.max_constancy(kept & (pair < size - at), [4]))
        low += more
        high += other
        x = y
    _add_products(partial + gl.program_id(0) * 1024, low, high)


# ---- the fused kernel ------------------------------------------------------------------------------------------------
#
# Beside a matrix product the tensor cores are busy and answer others late: here a thread holds all rows of its columns
# and multiplies them on the plain cores, 36 products per column.


@functools.cache
def fma(dtype: torch.dtype) -> tuple[str, str]:
    """PTX for the 36 products of 8 rows with each other and the rows' sums, for eight columns of a thread."""
    kind = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    pairs = [(i, j) for i in range(8) for j in range(i, 8)]
    # Outputs: products in 0-35, sums in 36-39. Inputs: row i in 40 + 4i to 43 + 4i, products so far in 72-107.
    lines = [".reg .b32 f<8>; .reg .f32 s<2>; .reg .b16 h<2>;"]
    first = True
    for word in range(4):
        for half in range(2):
            for i in range(8):
                x = f"${40 + 4 * i + word}"
                if kind == "bf16":
                    lines.append(f"and.b32 f{i}, {x}, 0xFFFF0000;" if half else f"shl.b32 f{i}, {x}, 16;")
                else:
                    lines.append(f"mov.b32 {{h0, h1}}, {x}; cvt.f32.f16 f{i}, h{half};")
            lines += [f"fma.rn.f32 ${k}, f{i}, f{j}, ${72 + k if first else k};" for k, (i, j) in enumerate(pairs)]
            first = False
            lines.append(f"add.f32 s{half}, f0, f1;")
            lines += [f"add.f32 s{half}, s{half}, f{i};" for i in range(2, 8)]
        lines.append(f"cvt.rn.{kind}x2.f32 ${36 + word}, s1, s0;")
    return "{ " + " ".join(lines) + " }", ",".join(["=&f"] * 36 + ["=&r"] * 4 + ["r"] * 32 + ["f"] * 36)


@_gluon_jit
def _load_rows(words, stride, limit, n):
    """Eight rows of eight columns for each of 128 threads. They are read this once: the cache may forget them."""
    e = gl.arange(0, 512, layout=gl.BlockedLayout([4], [32], [4], [0]))
    at = words + e
    ok = gl.max_constancy(e < limit, [4])
    x0 = gl.load(at, mask=ok, other=0, eviction_policy="evict_first")
    x1 = gl.load(at + stride, mask=ok & (n > 1), other=0, eviction_policy="evict_first")
    x2 = gl.load(at + 2 * stride, mask=ok & (n > 2), other=0, eviction_policy="evict_first")
    x3 = gl.load(at + 3 * stride, mask=ok & (n > 3), other=0, eviction_policy="evict_first")
    x4 = gl.load(at + 4 * stride, mask=ok & (n > 4), other=0, eviction_policy="evict_first")
    x5 = gl.load(at + 5 * stride, mask=ok & (n > 5), other=0, eviction_policy="evict_first")
    x6 = gl.load(at + 6 * stride, mask=ok & (n > 6), other=0, eviction_policy="evict_first")
    x7 = gl.load(at + 7 * stride, mask=ok & (n > 7), other=0, eviction_policy="evict_first")
    return x0, x1, x2, x3, x4, x5, x6, x7


@_gluon_jit
def _multiply_rows(x, p, FMA: gl.constexpr, CONSTRAINTS: gl.constexpr):
    p0, p1, p2, p3, p4, p5, p6, p7, p8, sums = gl.inline_asm_elementwise(
        FMA, CONSTRAINTS,
        [x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32,
               gl.float32, gl.int32), is_pure=True, pack=4)
    return (p0, p1, p2, p3, p4, p5, p6, p7, p8), sums


@_gluon_jit
def _place(tile, tall, wide):
    """Row and column of a tile, walking bands of 16 tile rows so that neighbours share their factors in the cache."""
    band = tile // (16 * wide)
    first = band * 16
    height = gl.minimum(tall - first, 16)
    within = tile - first * wide
    return first + within % height, within // height


@_gluon_jit
def _wait_for(counter, value, SEM: gl.constexpr):
    """A warp's first lane until the counter in memory has reached the value; a barrier must follow for the others."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .s32 v; mov.u32 v, %laneid; setp.ne.s32 p, v, 0; @p bra over; "
        "again: ld." + SEM + ".gpu.global.s32 v, [$1]; setp.lt.s32 p, v, $2; @!p bra over; "
        "nanosleep.u32 40; bra again; over: mov.s32 $0, 0; }",
        "=r,l,r", [counter.to(gl.int64), value], dtype=gl.int32, is_pure=False, pack=1)


@_gluon_jit
def _wait_written():
    """Until the bulk stores that this thread asked for are in memory, not just read from where they came."""
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.s32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False,
                              pack=1)


@_gluon_jit
def _fetch(delta, a, d_ring, a_ring, full, stage, i, k, row, column, ok):
    """Ask for the factors of one product of 64 tokens; they announce themselves at full[stage]."""
    hopper.mbarrier.expect(full.index(stage), 2 * 64 * (128 + 256), pred=ok)
    hopper.tma.async_copy_global_to_shared(delta, [i, k * 64, row * 128], full.index(stage), d_ring.index(stage), ok)
    hopper.tma.async_copy_global_to_shared(a, [i, k * 64, column * 256], full.index(stage), a_ring.index(stage), ok)


@_gluon_jit
def _multiply(delta, a, out, d_ring, a_ring, tile, full, done, read, n, steps, items, group, tall, wide,
              STAGES: gl.constexpr, BUFFERS: gl.constexpr):
    """Eight warps: tiles of dW_i, item after item, rounded into the ring of scratch."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 256, 16])
    # Where the next factors come from. Divisions are slow and the tensor cores would wait: one set per item.
    asked = gl.program_id(0)
    k_asked = 0
    i = asked % n
    row, column = _place(asked // n, tall, wide)
    for stage in gl.static_range(STAGES - 1):
        _fetch(delta, a, d_ring, a_ring, full, stage, i, k_asked, row, column, asked < items)
        k_asked += 1
        if k_asked == steps:
            k_asked = 0
            asked += gl.num_programs(0)
            i = asked % n
            row, column = _place(asked // n, tall, wide)
    before = STAGES - 1
    stage = 0
    phase = 0
    written = -1
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        chunk = item // group
        acc = gl.zeros([128, 256], gl.float32, layout)
        for k in range(steps):
            hopper.mbarrier.wait(full.index(stage), phase)
            acc = hopper.warpgroup_mma(d_ring.index(stage).reshape([64, 128]).permute((1, 0)),
                                       a_ring.index(stage).reshape([64, 256]), acc, is_async=True)
            acc = hopper.warpgroup_mma_wait(1, deps=[acc])
            # The product before this one is finished in all warps: its stage may be filled again.
            gl.thread_barrier()
            _fetch(delta, a, d_ring, a_ring, full, before, i, k_asked, row, column, asked < items)
            k_asked += 1
            if k_asked == steps:
                k_asked = 0
                asked += gl.num_programs(0)
                i = asked % n
                row, column = _place(asked // n, tall, wide)
            # Has everyone read the chunk whose place this one takes? Asked while the tensor cores are busy.
            if (k == 0) & (chunk >= BUFFERS):
                _wait_for(read + chunk - BUFFERS, gl.num_programs(0), "relaxed")
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        value = hopper.warpgroup_mma_wait(0, deps=[acc])
        # The item before this one has had the whole product's time to reach memory: to wait and to tell costs nothing.
        # What a bulk store has written is in the cache that all share, so that the word needs no fence.
        _wait_written()
        gl.thread_barrier()
        if written >= 0:
            gl.atomic_add(done + written, 1, sem="relaxed", scope="gpu")
        tile.store(value.to(tile.dtype))
        hopper.fence_async_shared()
        gl.thread_barrier()
        within = item - chunk * group
        at = (chunk % BUFFERS) * group + within % n * (group // n) + within // n
        hopper.tma.async_copy_shared_to_global(out, [at * 128, 0], tile)
        written = chunk
    _wait_written()
    gl.thread_barrier()
    gl.atomic_add(done + written, 1, sem="relaxed", scope="gpu")


@_gluon_jit
def _follow(words, dw, partial, done, read, n, items, group, tall, wide, d_out, d_in, FMA: gl.constexpr,
            CONSTRAINTS: gl.constexpr, BUFFERS: gl.constexpr):
    """Four warps: when a chunk of tiles is complete for all rollouts, its products and its sum."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    PAIRS: gl.constexpr = 128 * 256 // 2
    pid = gl.program_id(0)
    pair = gl.arange(0, 512, layout=layout)
    zero = gl.zeros([512], gl.float32, layout)
    p = (zero, zero, zero, zero, zero, zero, zero, zero, zero)
    stride = (group // n) * PAIRS
    for chunk in range((items + group - 1) // group):
        count = gl.minimum(group, items - chunk * group)
        _wait_for(done + chunk, count, "acquire")
        gl.thread_barrier()
        size = count // n * PAIRS
        at = words + ((chunk % BUFFERS) * group).to(gl.int64) * PAIRS
        step = gl.num_programs(0) * 512
        x = _load_rows(at + pid * 512, stride, size - pid * 512, n)
        for here in range(pid * 512, size, step):
            # The cache answers after some 800 cycles: the next step is on its way while this one is worked on.
            y = _load_rows(at + here + step, stride, size - here - step, n)
            p, sums = _multiply_rows(x, p, FMA, CONSTRAINTS)
            tile_row, tile_column = _place(chunk * (group // n) + here // PAIRS, tall, wide)
            row = tile_row * 128 + here % PAIRS // 128 + pair // 128
            column = tile_column * 128 + pair % 128
            to = gl.max_contiguous(gl.multiple_of(row.to(gl.int64) * (d_in // 2) + column, [4]), [4])
            gl.store(dw + to, sums, mask=gl.max_constancy((row < d_out) & (column < d_in // 2), [4]))
            x = y
        gl.thread_barrier()
        gl.atomic_add(read + chunk, 1, sem="release", scope="gpu")
    for k in gl.static_range(9):
        total = gl.sum(p[k].reshape([128, 4]), axis=0)
        gl.store(partial + pid * 36 + k * 4 + gl.arange(0, 4, layout=total.type.layout), total)


@_kernel(gluon, "n", "steps", "items", "group", "tall", "wide", "d_out", "d_in")
def fused_kernel(delta, a, out, words, dw, partial, done, read, n, steps, items, group, tall, wide, d_out, d_in,
                  FMA: gl.constexpr, CONSTRAINTS: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr):
    """Chunks of `group` items, an item being one rollout's tile; done and read count, for each chunk, what is ready."""
    d_ring = gl.allocate_shared_memory(delta.dtype, [STAGES, 1, 64, 128], delta.layout)
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES, 1, 64, 256], a.layout)
    tile = gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(i), count=1)
    hopper.fence_async_shared()
    gl.warp_specialize([
        (_multiply, (delta, a, out, d_ring, a_ring, tile, full, done, read, n, steps, items, group, tall, wide, STAGES,
                     BUFFERS)),
        (_follow, (words, dw, partial, done, read, n, items, group, tall, wide, d_out, d_in, FMA, CONSTRAINTS,
                   BUFFERS)),
    ], [4], [152])


# ---- kernels in plain Triton -----------------------------------------------------------------------------------------


@_kernel(triton, "n", "columns", "steps")
def dot_kernel(x, dw, partial, n, columns, stride, steps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """What `pass_kernel` does, for more than 16 rollouts and for rows that are not whole 16-byte words."""
    pid = tl.program_id(0)
    row = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, ROWS], tl.float32)
    for step in range(pid, steps, tl.num_programs(0)):
        column = step * WIDTH + tl.arange(0, WIDTH)
        block = tl.load(x + row[:, None].to(tl.int64) * stride + column[None, :],
                        mask=(row < n)[:, None] & (column < columns)[None, :], other=0.0)
        total += tl.dot(block, tl.trans(block))
        tl.store(dw + column, tl.sum(block.to(tl.float32), 0).to(dw.dtype.element_ty), mask=column < columns)
    slot = partial + pid * ROWS * ROWS + row[:, None] * ROWS + row[None, :]
    tl.store(slot, tl.load(slot) + total.to(tl.float64))


@_kernel(triton)
def _inner(x, i, t, j, s, size, TOKENS: tl.constexpr, STEP: tl.constexpr, LIMIT: tl.constexpr):
    """x_it · x_js for a block of tokens t of rollout i and one of tokens s of rollout j."""
    total = tl.zeros([TOKENS, TOKENS], tl.float32)
    for start in range(0, size, LIMIT):
        # The tensor cores round towards zero: chains of at most LIMIT there, ordinary additions above them.
        part = tl.zeros([TOKENS, TOKENS], tl.float32)
        for k in range(start, min(start + LIMIT, size), STEP):
            left = x.load([i, t * TOKENS, k]).reshape(TOKENS, STEP)
            right = x.load([j, s * TOKENS, k]).reshape(TOKENS, STEP)
            part = tl.dot(left, right.T, part)
        total += part
    return total


@_kernel(triton, "n", "blocks", "d_in", "d_out")
def ghost_kernel(a, delta, partial, n, blocks, d_in, d_out, TOKENS: tl.constexpr, STEP: tl.constexpr,
                  LIMIT: tl.constexpr):
    """Σ (a_it·a_js)(δ_it·δ_js) over one block of tokens t of rollout i and one of tokens s of rollout j."""
    first, second = tl.program_id(0), tl.program_id(1)
    if first <= second:
        i, j = first // blocks, second // blocks
        t, s = first % blocks, second % blocks
        inputs = _inner(a, i, t, j, s, d_in, TOKENS, STEP, LIMIT)
        total = tl.sum(inputs * _inner(delta, i, t, j, s, d_out, TOKENS, STEP, LIMIT))
        # K is symmetric: the block and its mirror image.
        tl.store(partial + ((i * n + j) * blocks + t) * blocks + s, total)
        tl.store(partial + ((j * n + i) * blocks + s) * blocks + t, total)


@_kernel(triton, "t", "d")
def _norm_kernel(grad, x, mean, rstd, dw, db, t, d, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """Σ_t δ_t x̂_t and Σ_t δ_t of one rollout, for WIDTH features; x̂ = (x − mean)·rstd."""
    row, column = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    weight, bias = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for start in range(0, t, TOKENS):
        token = start + tl.arange(0, TOKENS)
        place = (row * t + token).to(tl.int64)
        here = (token < t)[:, None] & (column < d)[None, :]
        delta = tl.load(grad + place[:, None] * d + column[None, :], mask=here, other=0.0).to(tl.float32)
        value = tl.load(x + place[:, None] * d + column[None, :], mask=here, other=0.0).to(tl.float32)
        middle = tl.load(mean + place, mask=token < t, other=0.0)
        scale = tl.load(rstd + place, mask=token < t, other=0.0)
        weight += tl.sum(delta * (value - middle[:, None]) * scale[:, None], 0)
        bias += tl.sum(delta, 0)
    tl.store(dw + row * d + column, weight, mask=column < d)
    tl.store(db + row * d + column, bias, mask=column < d)


def norm_rows(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Each rollout's gradient of a layer norm's weight and bias, (N, d) float32, in one pass over δ and x (N, T, d)."""
    n, t, d = x.shape
    dw, db = (torch.empty(n, d, dtype=torch.float32, device=x.device) for _ in range(2))
    _norm_kernel[(n, -(-d // 64))](grad.contiguous(), x.contiguous(), mean.contiguous(), rstd.contiguous(), dw, db, t,
                                   d, 64, 64, num_warps=4)
    return dw, db
