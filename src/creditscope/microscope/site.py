"""One module under the microscope, and what a rule for it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from creditscope.microscope.recorder import Recorder

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Site:
    """One module under the microscope: its path, its original forward, and its trainable parameters' names."""

    where: str
    module: nn.Module
    original: Forward
    names: dict[str, str]
    """Attribute → the parameter's name in the model, for parameters that need a gradient."""


Rule = Callable[[Site, Recorder], Forward]

_SWAP = threading.RLock()


@contextmanager
def replaced(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """The module with these tensors in place of the parameters at these paths."""
    with _SWAP:
        kept: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        try:
            for path, tensor in tensors.items():
                parent, _, attribute = path.rpartition(".")
                owner = module.get_submodule(parent)
                kept.append((owner, attribute, owner._parameters[attribute]))
                owner._parameters[attribute] = tensor  # type: ignore[assignment]
            yield
        finally:
            for owner, attribute, parameter in kept:
                owner._parameters[attribute] = parameter
