"""A checkpoint: trainable weights, optimiser state and counters, in safetensors and JSON, bound to its model.

The policy, and the critic where there is one, are each two files: named parameters, and the optimiser's tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from creditscope.errors import CreditscopeError
from creditscope.files.sums import verify
from creditscope.policy.critic import Critic
from creditscope.policy.loading import Policy

# Names of the two files, weights first.
POLICY = ("policy.safetensors", "optimizer.safetensors")
CRITIC = ("critic.safetensors", "critic_optimizer.safetensors")


def save_checkpoint(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer, state: dict[str, Any],
                    critic: Critic | None = None) -> None:
    """Write everything that a later process needs to go on as if nothing had happened."""
    _save(folder, POLICY, policy.trainable(), optimizer)
    if critic is not None:
        _save(folder, CRITIC, critic.trainable(), critic.optimizer)
    (folder / "state.json").write_text(json.dumps(state))


def load_checkpoint(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer,
                    critic: Critic | None = None) -> dict[str, Any]:
    """Put a checkpoint back into a policy, its critic if any, and their optimisers; refuse one of another model.

    Everything is read and compared before anything is changed.
    """
    if critic is not None and (folder / POLICY[0]).exists() and not (folder / CRITIC[0]).exists():
        raise CreditscopeError(f"the checkpoint {folder} has no critic, and this run needs one; resume it with the "
                               f"settings it was started with, or start anew in another folder")
    try:
        verify(folder)
        mine = [(policy.trainable(), optimizer, *_read(folder, POLICY))]
        if critic is not None:
            mine.append((critic.trainable(), critic.optimizer, *_read(folder, CRITIC)))
        state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise CreditscopeError(f"cannot read the checkpoint {folder}: {error}; delete that folder to resume from the "
                               f"one before") from None
    for (parameters, _, weights, _), what, whose in zip(mine, ("model", "critic"), (repr(policy.name), "this run's"),
                                                        strict=False):
        _compare(folder, parameters, weights, what, whose)
    for parameters, own, weights, moments in mine:
        _restore(parameters, own, weights, moments)
    policy.spread()
    return state


def _save(folder: Path, files: tuple[str, str], parameters: Mapping[str, nn.Parameter],
          optimizer: torch.optim.Optimizer) -> None:
    _write({name: p.detach().contiguous() for name, p in parameters.items()}, folder / files[0])
    # "kind|parameter name" -> tensor, for every tensor in the optimiser's state.
    _write({f"{kind}|{name}": value.detach().contiguous() for name, p in parameters.items()
               for kind, value in optimizer.state.get(p, {}).items() if isinstance(value, Tensor)}, folder / files[1])


def _write(tensors: dict[str, Tensor], file: Path) -> None:
    """save_file; a disk that is full is an OSError, as for every other file of a record."""
    try:
        save_file(tensors, file)
    except SafetensorError as error:
        raise OSError(f"{file.name}: {error}") from error


def _read(folder: Path, files: tuple[str, str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return load_file(folder / files[0]), load_file(folder / files[1])


def _compare(folder: Path, mine: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor], what: str,
             whose: str) -> None:
    for name in sorted(set(mine) | set(weights)):
        ours = tuple(mine[name].shape) if name in mine else "absent"
        theirs = tuple(weights[name].shape) if name in weights else "absent"
        if ours != theirs:
            raise CreditscopeError(f"the checkpoint {folder} belongs to another {what}: {name} is {theirs} there and "
                                   f"{ours} in {whose}; give the {what} the run was started with")


def _restore(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor],
             moments: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    for name, parameter in parameters.items():
        entries = {key.split("|", 1)[0]: value for key, value in moments.items() if key.split("|", 1)[1] == name}
        if entries:
            # Adam's step counter lives on the CPU, whatever the parameter's device.
            optimizer.state[parameter] = {kind: value if value.dim() == 0 else value.to(parameter.device)
                                          for kind, value in entries.items()}
