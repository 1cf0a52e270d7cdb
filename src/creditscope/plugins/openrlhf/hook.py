"""An ActorPPOTrainer of OpenRLHF under the microscope, in one line.

    ScopeHook(trainer, every=10, out="runs/mine")

OpenRLHF has no callbacks. Its narrowest points are three: `ppo_train`, one call per batch, whose dictionary goes to
wandb and tensorboard; `training_step`, one call per micro-batch; and the strategy's `backward` and `optimizer_step`
inside it. The hook wraps these on the one trainer that it is given. A line of the record is one batch.

The training is not changed: bit by bit without the Gram; with it, the update that is read is rounded in another order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError
from creditscope.files.versions import software
from creditscope.methods.axes import Method
from creditscope.plugins.common import gather_ranks as together
from creditscope.plugins.common.reader import Part, StepReader, prompt_ids
from creditscope.plugins.common.session import Session, batch_metrics
from creditscope.plugins.openrlhf import names
from creditscope.plugins.openrlhf.stated import settings_of, stated

PACKAGES = ("torch", "transformers", "openrlhf", "deepspeed", "ray", "vllm", "numpy")


class ScopeHook:
    """Reads one update of every `every`-th batch of an ActorPPOTrainer.

    `out` is the folder of the record, on the first rank's machine; without it the metrics go to OpenRLHF's logs alone,
    as `creditscope/…`. `gram=False` leaves out the geometry.
    """

    def __init__(self, trainer: Any, *, every: int = 10, out: str | Path | None = None, gram: bool = True) -> None:
        names.check_trainer(trainer)
        if isinstance(trainer.strategy, _Strategy):
            raise CreditscopeError("this trainer already has a ScopeHook: make one, once")
        self._trainer = trainer
        self._first = bool(trainer.strategy.is_rank_0())
        self.session = Session("openrlhf", every, out if self._first else None)
        self.method: Method = stated(trainer.args)
        """The row of the table with the trainer's loss."""
        self._why = names.why_no_gram(trainer) if gram else None
        self._gram = gram and self._why is None
        self._reader: StepReader | None = None
        self._reading = False
        self._at = 0  # updates of this batch so far
        self._wanted: int | None = None
        self._ppo_train, self._training_step = trainer.ppo_train, trainer.training_step
        trainer.ppo_train, trainer.training_step = self.ppo_train, self.training_step
        trainer.strategy = _Strategy(trainer.strategy, self)

    @property
    def reader(self) -> StepReader:
        """Made at the first reading: only then is the model in its engine."""
        if self._reader is None:
            engine = self._trainer.actor.model  # DeepSpeed's
            self._reader = StepReader(self._trainer.actor, engine.module, self.method, gram=self._gram, engine=engine)
        return self._reader

    def ppo_train(self, kl_ctl: float) -> dict[str, Any]:
        """All updates of one batch; our metrics are added to the dictionary that OpenRLHF logs."""
        session = self.session
        session.begin(lambda: settings_of(self._trainer, self.method, session.every, self._gram), software(PACKAGES))
        with session.reason("read"):
            rows = together.to_first(batch_of(self._trainer.replay_buffer.items))
            if rows:
                session.note(batch_metrics(Rollouts.cat(rows)))
        self._at, self._wanted = 0, session.update(self._updates())
        self._reading = False
        if self._wanted is not None and self._why is not None:
            session.absent(self._why, "the geometry is not read")
        found: dict[str, Any] = self._ppo_train(kl_ctl)
        self._reading = False
        return found | session.end() if self._first else found

    def training_step(self, experience: Any, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch: forward, backward, and where the strategy's gradients are full an optimiser step."""
        self._reading = self._at == self._wanted
        if self._reading:
            with self.session.reason("read"):
                self.reader.open(part_of(experience))
        try:
            return self._training_step(experience, *args, **kwargs)
        finally:
            self.reader.abort() if self._reading else None

    def backward_done(self) -> None:
        if self._reading:
            with self.session.reason("read"):
                self.reader.close()

    def stepping(self) -> None:
        if self._reading:
            with self.session.reason("read"):
                self.reader.stepping()

    def stepped(self) -> None:
        self._at += 1
        if self._reading:
            self._reading = False
            with self.session.reason("read after the step"):
                self.session.take(self.reader.stepped(self._trainer.actor_optim))
            self.reader.begin()

    def close(self) -> None:
        """End the record: every line is on the disk before."""
        self.session.close()

    def _updates(self) -> int:
        """Optimiser steps of one batch."""
        trainer, strategy = self._trainer, self._trainer.strategy
        buffer = trainer.replay_buffer
        if trainer.args.train.dynamic_batch_enable:  # its plan is made inside ppo_train
            steps = len(buffer.items) * _world() // max(1, int(trainer.args.train.batch_size))
        else:
            micro = len(buffer) // max(1, int(buffer.sample_batch_size))
            steps = micro // max(1, int(getattr(strategy, "accumulated_gradient", 1)))
        return max(1, steps) * int(trainer.args.train.max_epochs)


class _Strategy:
    """OpenRLHF's strategy for one trainer, with the hook told of every backward and optimiser step."""

    def __init__(self, inner: Any, hook: ScopeHook) -> None:
        self._inner, self._hook = inner, hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def backward(self, loss: Tensor, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = self._inner.backward(loss, model, *args, **kwargs)
        self._hook.backward_done()
        return found

    def optimizer_step(self, optimizer: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        engine = getattr(model, "model", model)
        full = getattr(engine, "is_gradient_accumulation_boundary", lambda: True)()
        if full:
            self._hook.stepping()
        found = self._inner.optimizer_step(optimizer, model, *args, **kwargs)
        if full:
            self._hook.stepped()
        return found


def part_of(experience: Any) -> Part:
    """A micro-batch of OpenRLHF. Column a of its mask is the token a + 1 columns after the first of `sequences`."""
    names.require("a batch", experience, names.EXPERIENCE)
    mask, ids = experience.action_mask.bool(), experience.sequences
    if not bool(mask.any()):
        raise CreditscopeError("no token of this micro-batch is learned from: every answer is empty or masked")
    reward = experience.rewards if experience.rewards is not None else torch.zeros(len(ids))
    return Part.of(ids[:, -mask.shape[1]:], mask, experience.action_log_probs, experience.advantages,
                   reward.to(ids.device), prompt_ids(ids, before(mask, experience.attention_mask)))


def before(mask: Tensor, attention: Tensor) -> Tensor:
    """(B, T) True on the prompt: positions that are attended to, before the first chosen token."""
    whole = torch.nn.functional.pad(mask, (attention.shape[1] - mask.shape[1], 0))
    return attention.bool() & (whole.cumsum(dim=1) == 0)


def batch_of(items: list[Any]) -> Rollouts:
    """All answers of this rank's replay buffer, one item each."""
    if not items:
        raise CreditscopeError("the replay buffer is empty: there is no batch to read")
    found = []
    for item in items:
        mask = item.action_mask.bool()[None]
        part = Part.of(item.sequences[None, -mask.shape[1]:], mask, item.action_log_probs[None],
                       item.advantages[None], item.rewards.reshape(1).float(),
                       prompt_ids(item.sequences[None], before(mask, item.attention_mask[None])))
        found.append(part.rollouts.to("cpu"))
    return Rollouts.cat(found)


def _world() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
