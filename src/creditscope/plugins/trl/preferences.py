"""DPOTrainer as the callback reads it: pairs of given answers, and w from TRL's own backward pass.

    w_it = −∂loss/∂log π(y_it)

TRL's model returns log π of every token, and its loss is a function of these. At a step that is read, a hook on that
tensor keeps its gradient in TRL's own backward: −w of any loss type, of sums of several and of a subclass, with
accumulation in it. The model is observed by hooks for the length of `compute_loss`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn

from creditscope.errors import CreditscopeError
from creditscope.methods.dialects import TRL_DPO
from creditscope.objective.kept import kept_arrays
from creditscope.objective.links import pair_changes
from creditscope.plugins.common.gather_ranks import Rows
from creditscope.plugins.trl.pairs import PairRows, Pass, pairs_of
from creditscope.plugins.trl.passes import Inputs, placed_logits
from creditscope.plugins.trl.stated import stated_pairs
from creditscope.policy.loading import Policy
from creditscope.runs import schema
from creditscope.runs.numbers import mean

LOGGED = {schema.PAIRS_MARGIN: "rewards/margins", schema.PAIRS_ACCURACY: "rewards/accuracies",
          schema.PAIRS_CHOSEN_REWARD: "rewards/chosen", schema.PAIRS_REJECTED_REWARD: "rewards/rejected",
          schema.PAIRS_CHOSEN_LOGP: "logps/chosen", schema.PAIRS_REJECTED_LOGP: "logps/rejected"}
"""Our name -> that of TRL's log."""


APART = 0.01
"""‖w_row − w‖/‖w‖ above which the row of the table is not the trainer's loss; float32 leaves 1e-6."""


class Preferences:
    """A `TrainerSource`. `compute_loss` of this one trainer is wrapped; without a reading it is TRL's own call."""

    updates = 1
    apart = ("and the sum of the rows have cosine {cosine:.3f}: dropout, or a router's loss, which does not pass "
             "through the log-probs. Readings are of the log-probs alone")

    def __init__(self, trainer: Any, every: int) -> None:
        self._trainer, self._every = trainer, every
        self.name, self.method = stated_pairs(trainer)
        self.rows_per_pass = 2 * int(trainer.args.per_device_train_batch_size)
        self._step = -1
        self._row_error: float | None = None
        self._warned = False
        self._passes: list[Pass] = []
        inner = trainer.compute_loss

        @wraps(inner)
        def outer(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            step = trainer.state.global_step
            if not trainer.model.training or not self.due(step):
                return inner(model, inputs, *args, **kwargs)
            if step != self._step:
                self._step, self._passes = step, []
            with self._observed(inputs) as one:
                found = inner(model, inputs, *args, **kwargs)
            one.loss = float((found[0] if isinstance(found, tuple) else found).detach())
            return found

        trainer.compute_loss = outer

    @contextmanager
    def _observed(self, inputs: Inputs) -> Iterator[Pass]:
        one = Pass(inputs)
        self._passes.append(one)
        unwrap = self._trainer.accelerator.unwrap_model
        models = [unwrap(model) for model in (self._trainer.model, self._trainer.ref_model) if model is not None]
        hooks = [model.register_forward_hook(one.forward, with_kwargs=True) for model in models]
        try:
            yield one
        finally:
            for hook in hooks:
                hook.remove()

    def begin(self, resumed: bool) -> None:
        pass

    def due(self, step: int) -> bool:
        return step % self._every == 0

    def take(self, policy: Policy | None, ended: bool = True) -> PairRows:
        passes, self._passes = self._passes, []
        if not passes:
            raise CreditscopeError("the step's loss was not computed by the trainer's compute_loss, which the callback "
                                   "observes; make training_step call it")
        accelerator = self._trainer.accelerator
        # In float16 the loss is multiplied by the scaler's factor, so that small gradients do not become 0.
        scale = 1.0 if accelerator.scaler is None else float(accelerator.scaler.get_scale())
        found = pairs_of(passes, scale, policy, self.method, accelerator.process_index, accelerator.num_processes)
        self._row_error = found.row_error
        if not self._warned and (found.row_error or 0.0) > APART:
            self._warned = True
            warnings.warn(f"creditscope: w of TRL's loss is not that of row {self.name!r}, which its settings state: "
                          f"‖w_row − w‖/‖w‖ = {found.row_error:.2g}. A subclass has a loss of its own, or changed beta "
                          f"after the start. Readings are of TRL's loss", stacklevel=2)
        return found

    def logits(self, model: nn.Module, inputs: Inputs) -> Tensor:
        return placed_logits(model, inputs)

    def terms(self, model: nn.Module, window: Any, chunks: Sequence[Tensor],
              whole: Mapping[nn.Parameter, Tensor | None]) -> dict[str, float]:
        return {}

    def assigned(self, rows: Rows) -> dict[str, Any]:
        return {} if self._row_error is None else {schema.SCOPE_ROW_ERROR: self._row_error}

    def moved(self, rows: Rows, after: Tensor) -> dict[str, Any]:
        # Which answers are chosen is the same under every loss.
        return dict(pair_changes(self.method or TRL_DPO, rows.live, after, rows.rollouts, rows.credit))

    def arrays(self, rows: Rows, after: Tensor, special: Mapping[int, str]) -> dict[str, Any]:
        return kept_arrays(None, rows.rollouts, rows.credit, rows.w, rows.live, after, special=special)

    def line(self) -> dict[str, Any]:
        """Means over the step's micro-batches, each of which TRL has gathered over the ranks."""
        logs, count = self._trainer._metrics["train"], self._trainer.current_gradient_accumulation_steps
        return {ours: mean(logs[theirs][-count:]) for ours, theirs in LOGGED.items() if logs.get(theirs)}

    def settings(self) -> dict[str, Any]:
        args = self._trainer.args
        pairs = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return {"data": "pairs", "group": 2, "prompts": pairs * self._trainer.accelerator.num_processes,
                "inner_steps": 1, "minibatches": 1}
