"""The microscope's own check, Σ_ij K_ij = ‖∇‖², passes on a correct backward and refuses every planted error.

The errors are those of an engine that scales gradients, a fused head, or a wrong loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from creditscope.errors import CreditscopeError
from creditscope.microscope.scope import Microscope
from creditscope.selftest.check import WorstError, worst_of
from creditscope.selftest.gram import batch, observe, random_model

PARAMETERS = ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight",
              "lm_head.weight", "model.embed_tokens.weight")


def agrees(device: torch.device) -> WorstError:
    """|Σ K − ‖∇‖²| / (Σ_i K_ii + ‖∇‖²) of every parameter."""
    model = random_model("llama", device)
    scope = observe(model, *batch(model))
    return worst_of({name: check.error for name, check in scope.checks.items()}, "parameters")


def goes_red(device: torch.device) -> WorstError:
    """The number of planted errors that the microscope did not refuse."""
    missed = []
    for name, plant in PLANTED.items():
        try:
            plant(device)
        except CreditscopeError:
            continue
        missed.append(name)
    return WorstError(len(missed), f"let pass: {', '.join(missed)}" if missed else f"all {len(PLANTED)} were refused")


def _scaled(name: str, factor: float) -> Callable[[torch.device], object]:
    """An engine scales one parameter's gradient."""
    def plant(device: torch.device) -> None:
        model = random_model("llama", device)
        model.get_parameter(name).register_hook(lambda g: g * factor)
        observe(model, *batch(model))

    return plant


class _Fused(torch.autograd.Function):
    """h ↦ h Wᵀ in an autograd function, like a fused head: no torch call shows that it uses W."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].flatten(0, 1).T @ hidden.flatten(0, 1)


def _unseen(device: torch.device) -> None:
    model = random_model("llama", device)
    ids, credit = batch(model)
    with Microscope(model):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = _Fused.apply(hidden, model.lm_head.weight)  # type: ignore[no-untyped-call]
        chosen = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        (chosen * credit).sum().backward()


def _only(mixed: float, rows: list[int]) -> Callable[[torch.device], object]:
    """A loss of row 0 and, with weight `mixed`, a token of row 1, required to be rollout 0's alone; row -> rollout."""
    def plant(device: torch.device) -> None:
        model = random_model("llama", device)
        ids, credit = batch(model)
        credit[1:] = 0
        credit[1, 0] = mixed
        observe(model, ids, credit, rows=torch.tensor(rows, device=device)).require_only(0)

    return plant


def _infinite(device: torch.device) -> None:
    model = random_model("llama", device)
    ids, credit = batch(model)
    observe(model, ids, credit * float("inf"))


PLANTED: Mapping[str, Callable[[torch.device], object]] = {
    **{f"{name} times {factor}": _scaled(name, factor) for name in PARAMETERS for factor in (2.0, 1.001, 0.0)},
    "a head that is a kernel of its own": _unseen,
    "a loss that mixes rows": _only(1.0, [0, 1, 2, 3]),
    "rows with the wrong owner": _only(0.0, [1, 0, 2, 3]),
    "a loss that is not finite": _infinite,
}
