"""A checkpoint: trainable weights, optimiser state and counters, in safetensors and JSON, bound to its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from creditscope.errors import CreditscopeError
from creditscope.lab.policy import Policy


def save_checkpoint(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Write everything that a later process needs to go on as if nothing had happened."""
    weights = {name: p.detach().contiguous() for name, p in policy.trainable().items()}
    save_file(weights, folder / "policy.safetensors")
    save_file(_optimizer_tensors(policy, optimizer), folder / "optimizer.safetensors")
    (folder / "state.json").write_text(json.dumps(state))


def load_checkpoint(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a checkpoint back into a policy and its optimiser; refuse one that was made with another model."""
    try:
        weights = load_file(folder / "policy.safetensors")
        moments = load_file(folder / "optimizer.safetensors")
        state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise CreditscopeError(f"cannot read the checkpoint {folder}: {error}; delete that folder to resume from the "
                               f"one before") from None
    mine = policy.trainable()
    for name in sorted(set(mine) | set(weights)):
        ours = tuple(mine[name].shape) if name in mine else "absent"
        theirs = tuple(weights[name].shape) if name in weights else "absent"
        if ours != theirs:
            raise CreditscopeError(f"the checkpoint {folder} belongs to another model: {name} is {theirs} there and "
                                   f"{ours} in {policy.name!r}; give the model the run was started with")
    with torch.no_grad():
        for name, parameter in mine.items():
            parameter.copy_(weights[name])
    for name, parameter in mine.items():
        entries = {key.split("|", 1)[0]: value for key, value in moments.items() if key.split("|", 1)[1] == name}
        if entries:
            # Adam's step counter lives on the CPU, whatever the parameter's device.
            optimizer.state[parameter] = {kind: value if value.dim() == 0 else value.to(parameter.device)
                                          for kind, value in entries.items()}
    return state


def _optimizer_tensors(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """"kind|parameter name" -> tensor, for every tensor in the optimiser's state."""
    return {f"{kind}|{name}": value.detach().contiguous()
            for name, p in policy.trainable().items()
            for kind, value in optimizer.state.get(p, {}).items() if isinstance(value, Tensor)}
