"""Layers and parameters of which this rank holds a part, as torch.distributed.tensor lays them out.

A sharded data-parallel engine (FSDP2, ZeRO) cuts parameters where they are kept and puts whole ones in place for the
length of a call: the rules of `layers` see those. Tensor parallel cuts the call itself. Then a layer is measured on its
own part, dW_i = [δ_i^(1); δ_i^(2)] a_iᵀ or δ_i [a_i^(1), a_i^(2)]ᵀ, with no traffic, and

    K_ij = Σ_ranks ⟨dW_i^(rank), dW_j^(rank)⟩        S_i = Σ_ranks P_out^(rank) dW_i^(rank) P_in^(rank)ᵀ

while a parameter that every rank holds as a whole is counted once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.errors import CreditscopeError
from creditscope.microscope.recorder import Recorder
from creditscope.microscope.site import Forward, Site, replaced
from creditscope.microscope.sketch import Block


def many_ranks() -> bool:
    """Whether this process is one of several that train together, so that `.grad` may hold others' gradients too."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_shard(x: Any) -> bool:
    """Whether x is a DTensor; torch's module for them is heavy, and is loaded only by who makes some."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """The part that this rank holds."""
    return x.to_local() if is_shard(x) else x  # type: ignore[attr-defined]


def whole_shape(p: Tensor) -> tuple[int, ...]:
    """A parameter's shape, also while ZeRO-3 has emptied it."""
    return tuple(getattr(p, "ds_shape", p.shape))


def block(x: Tensor) -> Block | None:
    """Which part of a parameter or its gradient this rank holds; None for all of it."""
    if not is_shard(x):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, start = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)  # type: ignore[attr-defined]
    return Block(tuple(x.shape), tuple(start))


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


@contextmanager
def stand_ins(module: nn.Module) -> Iterator[None]:
    """The module with plain tensors for its cut parameters, so that rules can be tried on it before any call.

    Only scales are tried by value; a matrix stands for its shape.
    """
    tensors: dict[str, Tensor] = {}
    for attribute, p in module._parameters.items():
        if p is not None and (is_shard(p) or hasattr(p, "ds_shape")):
            shape, dtype = whole_shape(p), torch.promote_types(p.dtype, torch.float32)
            draw = torch.Generator().manual_seed(0)
            made = (torch.randn(shape, generator=draw, dtype=dtype).to(p.device) if len(shape) == 1
                    else torch.empty(shape, dtype=dtype, device="meta"))
            tensors[attribute] = made.requires_grad_(p.requires_grad)
    with replaced(module, tensors):
        yield


# -- tensor parallel ---------------------------------------------------------------------------------------------------


def on_shards(site: Site, recorder: Recorder, forward: Forward) -> Forward:
    """`forward`, and where the module's weight is cut for its call, `forward` on this rank's part of everything."""
    module = site.module

    def sharded(*args: Any, **kwargs: Any) -> Any:
        if not any(is_shard(p) for p in module._parameters.values()):
            return forward(*args, **kwargs)
        x, *rest = (*args, *kwargs.values())
        dim = _cut(module)
        if rest or dim is None:
            raise CreditscopeError(
                f"{site.where} ({type(module).__name__}) is laid out over ranks as {_layout(module)}, which the "
                f"microscope does not read; it reads nn.Linear and nn.Embedding cut along one dimension, Linear "
                f"without a bias where its inputs are cut. Leave the others whole on every rank (no SequenceParallel), "
                f"or freeze them")
        _note(site, recorder)
        return (_linear if isinstance(module, nn.Linear) else _embedding)(module, forward, x, dim)

    return sharded


def _cut(module: nn.Module) -> int | None:
    """The dimension along which a layer's weight is cut; None where it is cut in another way than we read."""
    weight: Any = module._parameters.get("weight")
    if not isinstance(module, nn.Linear | nn.Embedding) or not is_shard(weight) or len(weight.placements) != 1 \
            or not weight.placements[0].is_shard():
        return None
    dim = int(weight.placements[0].dim)
    return None if dim == 1 and module._parameters.get("bias") is not None else dim


def _layout(module: nn.Module) -> str:
    held: dict[str, Any] = {name: p for name, p in module._parameters.items() if p is not None}
    return ", ".join(f"{name} {p.placements if is_shard(p) else 'whole'}" for name, p in held.items())


def _note(site: Site, recorder: Recorder) -> None:
    for attribute, name in site.names.items():
        p = site.module._parameters[attribute]
        assert p is not None
        held = block(p)
        assert held is not None
        recorder.blocks[name] = held
        recorder.mesh = p.device_mesh  # type: ignore[attr-defined]


def _linear(module: nn.Module, forward: Forward, x: Tensor, dim: int) -> Tensor:
    """y^(rank) = x W^(rank)ᵀ where outputs are cut (dim 0); y = Σ_ranks x^(rank) W^(rank)ᵀ where inputs are (dim 1)."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    weight: Any = module._parameters["weight"]
    mesh, lead = weight.device_mesh, x.shape[:-1]
    given = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()])
    given = given.redistribute(mesh, [Replicate() if dim == 0 else Shard(x.dim() - 1)])
    # Every rank's part of the outputs sends a gradient of its own to the whole input.
    mine = given.to_local(grad_placements=[Partial()] if dim == 0 else None)
    held = {a: p.to_local() for a, p in module._parameters.items() if p is not None}  # type: ignore[attr-defined]
    with replaced(module, held):
        y = forward(mine)
    return _joined(y, (*lead, weight.shape[0]), mesh, Shard(y.dim() - 1) if dim == 0 else Partial())


def _embedding(module: Any, forward: Forward, ids: Tensor, dim: int) -> Tensor:
    """Features are cut (dim 1), or the vocabulary (dim 0): then ids of other ranks' rows look up 0."""
    from torch.distributed.tensor import Partial, Shard

    weight: Any = module._parameters["weight"]
    held, padding = block(weight), module.padding_idx
    assert held is not None
    ids, mine = local(ids), weight.to_local()
    here = (ids >= held.start[0]) & (ids < held.start[0] + len(mine))
    inside = padding is not None and 0 <= padding - held.start[0] < len(mine)
    try:
        module.padding_idx = padding - held.start[0] if inside else None
        with replaced(module, {"weight": mine}):
            y = forward((ids - held.start[0]).clamp(0, len(mine) - 1))
    finally:
        module.padding_idx = padding
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
    """Grams and sketches of cut parameters become those of the whole ones, on every rank; the others stay as they are.

    What every rank holds as a whole every rank has measured as a whole: adding that up too would count it again.
    """
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
