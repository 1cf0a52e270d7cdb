"""Layers and parameters of which this rank holds a part, as torch.distributed.tensor lays them out.

A sharded data-parallel engine (FSDP2, ZeRO) gathers whole parameters for each call, which the rules of `operations`
read. Tensor parallel cuts the call itself, dW_i = [δ_i^(1); δ_i^(2)] a_iᵀ or δ_i [a_i^(1), a_i^(2)]ᵀ. Each rank
measures its part without communication, and

    K_ij = Σ_ranks ⟨dW_i^(rank), dW_j^(rank)⟩        S_i = Σ_ranks P_out^(rank) dW_i^(rank) P_in^(rank)ᵀ

while a parameter that every rank holds as a whole is counted once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from creditscope.errors import CreditscopeError
from creditscope.microscope.recorder import Recorder
from creditscope.microscope.sketch import ParameterBlock
from creditscope.microscope.sources import ParameterSource


def many_ranks() -> bool:
    """Whether several processes may train together, so that `.grad` may hold other ranks' gradients."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_shard(x: Any) -> bool:
    """Whether x is a DTensor; torch's module for them is slow to load, and is not loaded for this."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    return x.to_local() if is_shard(x) else x  # type: ignore[attr-defined]


def block(x: Tensor) -> ParameterBlock | None:
    """Which part of a parameter or its gradient this rank holds; None for all of it."""
    if not is_shard(x):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, start = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)  # type: ignore[attr-defined]
    return ParameterBlock(tuple(x.shape), tuple(start))


def parts(x: Tensor) -> int:
    """How many different parts of x there are among the ranks: 1 where each holds all of it."""
    if not is_shard(x):
        return 1
    count = 1
    for dim, placement in enumerate(x.placements):  # type: ignore[attr-defined]
        if placement.is_partial():
            raise CreditscopeError(f"a gradient of shape {tuple(x.shape)} is not reduced yet ({placement}): read it "
                                   f"after the engine has")
        count *= 1 if placement.is_replicate() else x.device_mesh.size(dim)  # type: ignore[attr-defined]
    return count


def on_shards(recorder: Recorder, func: Any, args: Sequence[Any], kwargs: dict[str, Any],
              source: Callable[[Any], ParameterSource | None], run: Callable[..., Any]) -> Any:
    """F.linear and torch.embedding on this rank's part of everything; `run` measures that part as its own call."""
    given = [*args, *kwargs.values()]
    weight: Any = given[1] if func is F.linear else given[0]
    held = source(weight)
    dim = _cut(weight)
    if func not in (F.linear, torch.embedding) or held is None or dim is None \
            or (func is F.linear and dim == 1 and len(given) > 2 and given[2] is not None):
        layout = ", ".join(f"{name} {t.placements if is_shard(t) else 'whole'}" for t in given
                           if (found := source(t)) is not None for name in found.names)
        raise CreditscopeError(
            f"parameters are laid out over ranks as {layout}, which the microscope does not read in "
            f"{getattr(func, '__name__', func)}; it reads Linear and Embedding cut along one dimension, Linear without "
            f"a bias where its inputs are cut. Leave the others whole on every rank (no SequenceParallel), or freeze "
            f"them")
    for t in given:
        if (found := source(t)) is not None:
            held_block = block(t)
            assert held_block is not None
            recorder.blocks[found.names[0]] = held_block
            recorder.mesh = t.device_mesh
    return (_linear if func is F.linear else _embedding)(run, given, dim)


def _cut(weight: Any) -> int | None:
    """The dimension along which a weight is cut; None for any other layout."""
    if not is_shard(weight) or len(weight.placements) != 1 or not weight.placements[0].is_shard():
        return None
    return int(weight.placements[0].dim)


def _linear(run: Callable[..., Any], given: Sequence[Any], dim: int) -> Tensor:
    """y^(rank) = x W^(rank)ᵀ where outputs are cut (dim 0); y = Σ_ranks x^(rank) W^(rank)ᵀ where inputs are (dim 1)."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    x, weight, bias = [*given, None][:3]
    mesh, lead = weight.device_mesh, x.shape[:-1]
    spread = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()])
    spread = spread.redistribute(mesh, [Replicate() if dim == 0 else Shard(x.dim() - 1)])
    # Every rank's part of the outputs sends a gradient of its own to the whole input.
    mine = spread.to_local(grad_placements=[Partial()] if dim == 0 else None)
    held = [None if p is None else p.to_local() for p in (weight, bias)]
    y = run(F.linear, (mine, *held), [(p, q) for p, q in zip((weight, bias), held, strict=True) if p is not None])
    return _joined(y, (*lead, weight.shape[0]), mesh, Shard(y.dim() - 1) if dim == 0 else Partial())


def _embedding(run: Callable[..., Any], given: Sequence[Any], dim: int) -> Tensor:
    """Features are cut (dim 1), or the vocabulary (dim 0): then ids of other ranks' rows look up 0."""
    from torch.distributed.tensor import Partial, Shard

    weight, ids, padding = [*given, -1][:3]
    held = block(weight)
    assert held is not None
    ids, mine = local(ids), weight.to_local()
    here = (ids >= held.start[0]) & (ids < held.start[0] + len(mine))
    inside = 0 <= padding - held.start[0] < len(mine) and padding >= 0
    y = run(torch.embedding, (mine, (ids - held.start[0]).clamp(0, len(mine) - 1),
                              padding - held.start[0] if inside else -1), [(weight, mine)])
    y = y.masked_fill(~here[..., None], 0)
    return _joined(y, (*ids.shape, weight.shape[1]), weight.device_mesh, Partial() if dim == 0 else Shard(ids.dim()))


def _joined(y: Tensor, shape: tuple[int, ...], mesh: Any, placement: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(y, mesh, [placement], shape=whole.shape, stride=whole.stride())


def add_norms(recorder: Recorder, norms: dict[str, float]) -> dict[str, float]:
    """‖∇‖² of a cut parameter is the sum over its parts."""
    names = [name for name in norms if name in recorder.blocks]
    if recorder.mesh is None:
        return norms
    sums = torch.tensor([norms[name] for name in names], dtype=torch.float64, device=recorder.mesh.device_type)
    torch.distributed.all_reduce(sums, group=recorder.mesh.get_group())
    return norms | dict(zip(names, sums.tolist(), strict=True))


def add_parts(recorder: Recorder) -> None:
    """Add up Grams and sketches of cut parameters over the ranks; every rank has measured the others as a whole."""
    if recorder.mesh is None:
        return
    group = recorder.mesh.get_group()
    names = sorted(name for name in recorder.grams if name in recorder.blocks)
    if names:
        stacked = torch.stack([recorder.grams[name] for name in names])
        torch.distributed.all_reduce(stacked, group=group)
        recorder.grams.update(zip(names, stacked.unbind(), strict=True))
    if recorder.block_sketch is not None:
        rows = recorder.block_sketch.contiguous()
        torch.distributed.all_reduce(rows, group=group)
        recorder.sketch = rows if recorder.sketch is None else recorder.sketch + rows
