"""GRPOTrainer and RLOOTrainer as the callback reads them: answers that they generate, and w by a row of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.batch import metrics
from creditscope.batch.answers import PromptsSeen
from creditscope.methods.axes import Method
from creditscope.microscope.shards import many_ranks
from creditscope.objective.kept import kept_arrays
from creditscope.objective.surrogate import effective_credit
from creditscope.optimizer.kl_pull import kl_pull
from creditscope.optimizer.overshoot import Overshoot
from creditscope.plugins.common.gather_ranks import Rows
from creditscope.plugins.trl.batch import ROW, Generation, Window, micro_batches, number, objective, window_of
from creditscope.plugins.trl.passes import Inputs, chosen, logits
from creditscope.plugins.trl.stated import stated
from creditscope.policy.loading import Policy
from creditscope.runs import schema

TRACKED = (schema.OPTIMIZER_OVERSHOOT, schema.OVERSHOOT_PAST, schema.OVERSHOOT_DISTANCE, schema.OVERSHOOT_MAX,
           schema.OVERSHOOT_KL)
"""Of `Overshoot`. Metrics that count updates are left out: the batch may have been used before this step."""


class Generations:
    """A `TrainerSource`. Rows are numbered when they are generated, and found again in TRL's buffer."""

    def __init__(self, trainer: Any, every: int) -> None:
        self._trainer, self._every = trainer, every
        self.method: Method = getattr(trainer, "row", None) or stated(trainer)
        self.name = self.method.name
        self.rows_per_pass = int(trainer.args.per_device_train_batch_size)
        self.apart = (f"and that of row {self.method.name!r} have cosine {{cosine:.3f}}: a subclass, dropout, an "
                      f"entropy bonus or a router's loss adds terms that the row does not have. Readings are of the "
                      f"row")
        self._made: Generation | None = None
        self._fresh = False
        self._seen: PromptsSeen | None = None
        number(trainer, self._generated)

    @property
    def made(self) -> Generation:
        assert self._made is not None
        return self._made

    @property
    def updates(self) -> int:
        args = self._trainer.args
        return int(max(1, args.steps_per_generation * self._trainer.num_iterations // args.gradient_accumulation_steps))

    def _generated(self, made: Generation) -> None:
        self._made, self._fresh = made, True
        if self._seen is not None:
            self._seen.add(made.prompts)

    def begin(self, resumed: bool) -> None:
        self._seen = None if resumed else PromptsSeen()  # prompts before a resume are not known

    def due(self, step: int) -> bool:
        buffered = self._trainer._buffered_inputs
        if self._made is None or not buffered or ROW not in buffered[0]:
            return False
        # Readings take the passes over a batch in turn: at the first of them the ratio is always 1.
        number, at = divmod(step, self._every)
        return bool(at == (number - number * self._every) % self.updates % self._every)

    def take(self, policy: Policy | None, ended: bool = True) -> Window:
        return self.window(micro_batches(self._trainer, ended), policy)

    def window(self, parts: Sequence[Inputs], policy: Policy | None) -> Window:
        return window_of(self._trainer, self.method, parts, self.made, policy)

    def logits(self, model: nn.Module, inputs: Inputs) -> Tensor:
        return logits(model, inputs, self._trainer.temperature)

    def terms(self, model: nn.Module, window: Window, chunks: Sequence[Tensor],
              whole: Mapping[nn.Parameter, Tensor | None]) -> dict[str, float]:
        """`optimizer.kl_pull` of the rows whose gradient is `whole`, by one more pass; nothing among many ranks."""
        if not self.method.has_loss_kl or many_ranks():
            return {}
        reward = self.method.replace(beta=0.0)
        try:
            for p in whole:
                p.grad = None
            for chunk in chunks:
                part = window.rows(chunk)
                with self._trainer.accelerator.autocast():
                    logp = chosen(self.logits(model, part.inputs), part.inputs)
                w, w_reward = (effective_credit(lambda lp, one=one: objective(one, lp), logp)  # type: ignore[misc]
                               for one in (part, replace(part, method=reward)))
                torch.autograd.backward(logp, -(w - w_reward).to(logp.dtype))
            return kl_pull((g, p.grad) for p, g in whole.items())
        except torch.OutOfMemoryError:  # a further set of gradients
            return {}

    def assigned(self, rows: Rows) -> dict[str, Any]:
        return metrics.assigned(rows.credit, rows.rollouts)

    def moved(self, rows: Rows, after: Tensor) -> dict[str, Any]:
        track = Overshoot(self.method, rows.rollouts, rows.credit)
        track.see(rows.live)
        track.see(after)
        told = track.metrics()
        return {name: told[name] for name in TRACKED if name in told}

    def arrays(self, rows: Rows, after: Tensor, special: Mapping[int, str]) -> dict[str, Any]:
        return kept_arrays(self.method, rows.rollouts, rows.credit, rows.w, rows.live, after, special=special)

    def line(self) -> dict[str, Any]:
        # A batch that is used again has no new rollouts.
        line: dict[str, Any] = dict(self.made.metrics) if self._fresh else {schema.ROLLOUTS_SPENT: 0}
        if self._fresh and self._seen is not None:
            line |= self._seen.metrics()
        self._fresh = False
        return line

    def settings(self) -> dict[str, Any]:
        args, trainer = self._trainer.args, self._trainer
        updates = max(1, args.steps_per_generation // args.gradient_accumulation_steps)
        return {"group": trainer.num_generations, "prompts": args.generation_batch_size // trainer.num_generations,
                "inner_steps": trainer.num_iterations, "minibatches": updates, "temperature": args.temperature,
                "top_p": args.top_p, "max_tokens": trainer.max_completion_length}
