"""Observers of an update: one protocol for the microscope, the probe of the optimiser and the brake.

The events of an update are the methods of `StepObserver`, in their order there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.methods.axes import Method

Cotangent = Callable[[Tensor, Tensor], Tensor | None]
"""(log π of a micro-batch, its rows in the minibatch) -> ∂/∂log π to pull back, None for nothing."""
Around = Callable[[Tensor], AbstractContextManager[Any]]
"""Rows of the batch -> the context of their pass."""


class Passes(Protocol):
    """A minibatch as an observer sees it: passes through the model, one per micro-batch."""

    rollouts: Rollouts
    rows: Tensor
    """The minibatch's rows in the batch, on the CPU."""
    chunks: Sequence[Tensor]
    """The rows of each micro-batch in the minibatch, on the CPU."""

    @property
    def joint(self) -> Sequence[Tensor]:
        """The rows of passes in which every two rows of a group meet: `chunks` itself where no group is cut apart."""

    def logp(self) -> Tensor:
        """(B, T) log π of all rows, without a graph."""

    def w(self, logp: Tensor, credit: Tensor | None = None, method: Method | None = None) -> Tensor:
        """(B, T) ∂J/∂log π at `logp`, under the minibatch's own credit and method or others."""

    def backward(self, cotangent: Cotangent, around: Around = ..., chunks: Sequence[Tensor] | None = None,
                 collect: bool = True) -> None:
        """Add Σ_it c_it ∇log π_it to the gradients, c = cotangent(log π, chunk); without `collect` to those of the
        model's own parameters, where they stay."""

    def head_norms(self, chunk: Tensor) -> Tensor:
        """(B, T) ‖∇_W log π(y_t)‖, W the output head."""


class StepObserver:
    """Follows the updates of a batch. Each event does nothing unless a subclass overrides it."""

    own_pass = False
    """Whether `see` gets a forward pass of its own: the microscope allows one backward pass per forward."""
    early = False
    """Whether `weighed` is called with one micro-batch too, at the cost of a forward pass."""

    def begin(self, method: Method, rollouts: Rollouts, credit: Tensor | None = None) -> None:
        """A new batch."""

    def before(self, minibatch: Passes) -> None:
        """Before the update: passes of the observer's own. Gradients left behind are cleared."""

    def goes_on(self, logp: Tensor, rows: Tensor | None = None) -> bool:
        """False vetoes the update at these log-probs."""
        return True

    def reweigh(self, w: Tensor, logp: Tensor, rows: Tensor | None = None) -> Tensor:
        """The w that is pulled back in place of w = ∂J/∂log π. `rows` are those of a minibatch; by default all."""
        return w

    def weighed(self, minibatch: Passes, logp: Tensor, pulled: Tensor) -> None:
        """w is known before the update's pass: with several micro-batches, or where `early`. Gradients left behind are
        cleared."""

    def around(self, rows: Tensor) -> AbstractContextManager[None]:
        """The context of one forward and backward pass over `rows` of the batch."""
        return nullcontext()

    def see(self, logp: Tensor, rows: Tensor | None = None) -> None:
        """log π of `rows` with its graph, between the forward and the backward pass."""

    def gradient(self, norm: float) -> None:
        """The whole gradient, before it is clipped; `norm` is its norm."""

    def clipped(self, factor: float) -> None:
        """The gradient was multiplied by `factor`, 1 where nothing clips; the optimiser's step follows."""
