"""What the callback asks of a trainer: the rows of the coming optimiser step, their w, and what follows from a step.

`generations` answers for GRPOTrainer and RLOOTrainer, `preferences` for DPOTrainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from torch import Tensor, nn

from creditscope.batch.rollouts import Rollouts
from creditscope.methods.axes import Method
from creditscope.plugins.common.gather_ranks import Rows
from creditscope.plugins.trl.passes import Inputs
from creditscope.policy.loading import Policy


class StepRows(Protocol):
    """The rows of one optimiser step of this rank."""

    @property
    def inputs(self) -> Inputs: ...

    @property
    def rollouts(self) -> Rollouts: ...

    @property
    def credit(self) -> Tensor:
        """(B, T) A"""

    @property
    def fresh(self) -> bool:
        """Whether the policy that sampled the rows is the live one."""

    def rows(self, index: Tensor) -> Self: ...

    def sampled_by(self, live: Tensor) -> Rollouts:
        """The rollouts with log π_old, where the live log-probs are these."""

    def w(self, live: Tensor) -> Tensor:
        """(B, T) ∂J/∂log π of the step at these log-probs."""

    def value(self, live: Tensor) -> float:
        """J of these rows."""


class TrainerSource(Protocol):
    """A kind of trainer."""

    @property
    def name(self) -> str:
        """Of the trainer's loss."""

    @property
    def method(self) -> Method | None:
        """The row of the table with the trainer's loss; None where the table has none."""

    @property
    def updates(self) -> int:
        """Optimiser steps that learn from one batch."""

    @property
    def rows_per_pass(self) -> int: ...

    @property
    def apart(self) -> str:
        """Why the trainer's gradient may not be the sum of the rows."""

    def begin(self, resumed: bool) -> None: ...

    def due(self, step: int) -> bool:
        """Whether the coming optimiser step is on schedule, and its rows can be known."""

    def take(self, policy: Policy | None, ended: bool = True) -> StepRows:
        """The rows of the step, after its backward; `policy` decodes the texts for a record. `ended` says whether the
        trainer has counted the last micro-batch."""

    def logits(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """(B, T, V) of each completion token."""

    def terms(self, model: nn.Module, window: Any, chunks: Sequence[Tensor],
              whole: Mapping[nn.Parameter, Tensor | None]) -> dict[str, float]:
        """Metrics of parts of the loss, by further passes; `whole` is the gradient of the rows."""

    def assigned(self, rows: Rows) -> dict[str, Any]:
        """Metrics of credit before the step."""

    def moved(self, rows: Rows, after: Tensor) -> dict[str, Any]:
        """Metrics of log π after the step against before."""

    def arrays(self, rows: Rows, after: Tensor, special: Mapping[int, str]) -> dict[str, Any]:
        """The arrays of groups/*.npz."""

    def line(self) -> dict[str, Any]:
        """Metrics of the step's batch that need no reading, at the end of the step."""

    def settings(self) -> dict[str, Any]:
        """Of the run, under the names of `creditscope lab train`, where this kind of trainer has others."""
