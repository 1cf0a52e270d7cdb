"""A RayPPOTrainer of SkyRL under the microscope, in one line.

    trainer = scoped(trainer, every=10, out="runs/mine")

SkyRL's driver has the batch, its workers have the model. `SkyRLCallback` is a TrainingCallback of the driver: it sees
rewards and groups where advantages are computed, asks the workers for the reading at the end of a step, writes the
record, and adds our metrics to SkyRL's logs in `on_log`. `scoped` also makes the trainer build the workers that read.

The training is not changed: bit by bit without the Gram; with it, the update that is read is rounded in another order.
"""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import ray
import torch
from skyrl.train.utils.callbacks import TrainingCallback
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError
from creditscope.files.versions import software
from creditscope.methods.axes import Method
from creditscope.plugins.common.reader import Part
from creditscope.plugins.common.session import Session, batch_metrics
from creditscope.plugins.skyrl import names
from creditscope.plugins.skyrl.stated import settings_of, stated
from creditscope.plugins.skyrl.worker import CREDIT, GROUP, REQUEST, REWARD, PolicyWorker

PACKAGES = ("torch", "transformers", "skyrl", "ray", "vllm", "numpy")


def scoped(trainer: Any, *, every: int = 10, out: str | Path | None = None, gram: bool = True) -> Any:
    """The trainer with a SkyRLCallback, whose `build_models` makes our policy workers in place of SkyRL's."""
    trainer.add_callback(SkyRLCallback(trainer, every=every, out=out, gram=gram))
    build = trainer.build_models

    @wraps(build)
    def build_models(theirs: Any, critic: Any, ref: Any) -> Any:
        return build(PolicyWorker, critic, ref)

    trainer.build_models = build_models
    return trainer


class SkyRLCallback(TrainingCallback):  # type: ignore[misc]
    """Reads one update of every `every`-th batch.

    `out` is the folder of the record, on the driver's machine; without it the metrics go to SkyRL's logs alone, as
    `creditscope/…`. `gram=False` leaves out the geometry. With SkyRL's own workers there is no w, overshoot or Gram.
    """

    def __init__(self, trainer: Any, *, every: int = 10, out: str | Path | None = None, gram: bool = True) -> None:
        names.check_trainer(trainer)
        self.session = Session("skyrl", every, out)
        self.method: Method = stated(trainer.cfg.trainer.algorithm)
        """The row of the table with the trainer's loss."""
        self._why = names.why_no_gram(trainer.cfg.trainer) if gram else None
        self._gram = gram and self._why is None
        self._asked = False
        self._logs: dict[str, float] = {}
        compute = trainer.compute_advantages_and_returns

        @wraps(compute)
        def outer(data: Any) -> Any:
            data = compute(data)
            self._advantages(trainer, data)
            return data

        trainer.compute_advantages_and_returns = outer

    def on_step_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        if self._asked:
            with self.session.reason("read"):
                self.session.take(self._reading(trainer))
        self._asked = False
        self._logs = self.session.end()

    def on_log(self, trainer: Any, callback_input: Any, control: Any) -> None:
        callback_input.logs.update(self._logs)
        self._logs = {}

    def on_train_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        self.session.close()

    def _advantages(self, trainer: Any, data: Any) -> None:
        """A batch whose advantages were just computed: SkyRL drops rewards and uids after this."""
        session = self.session
        session.begin(lambda: settings_of(trainer, self.method, session.every, self._gram), software(PACKAGES))
        with session.reason("read"):
            names.require("a batch", data, names.BATCH)
            reward, group = data["rewards"].float().sum(dim=1), groups_of(data)
            session.note(batch_metrics(rollouts_of(data, reward, group)))
            boundaries = data.metadata.get("policy_mini_batch_boundaries") or [None]
            update = session.update(len(boundaries) * int(trainer.cfg.trainer.update_epochs_per_batch))
            if update is None:
                return
            if self._why is not None:
                session.absent(self._why, "the geometry is not read")
            data[REWARD], data[GROUP], data[CREDIT] = reward, group, data["advantages"].clone()
            data.metadata[REQUEST] = {"update": update, "batch": session.batches, "gram": self._gram}
            self._asked = True

    def _reading(self, trainer: Any) -> Any:
        workers = trainer.policy_model
        found = ray.get(workers.async_run_ray_method("pass_through", "take_reading"))
        for _, why in found:
            if why:
                raise CreditscopeError(why)
        reading = found[0][0]
        if reading is None:
            raise CreditscopeError("the policy workers took no reading: build them from "
                                   "creditscope.plugins.skyrl.worker.PolicyWorker, as scoped(trainer) does")
        return reading


def groups_of(data: Any) -> Tensor:
    """(B,) the group of each row, from SkyRL's uids."""
    uids = data.metadata.get("uids")
    if uids is None:
        raise CreditscopeError("the batch has no uids in its metadata, so answers to one prompt are unknown; tested "
                               f"with skyrl {', '.join(names.TESTED)}: install one of these")
    first: dict[Any, int] = {}
    return torch.tensor([first.setdefault(uid, len(first)) for uid in uids])


def rollouts_of(data: Any, reward: Tensor, group: Tensor) -> Rollouts:
    """All answers of the batch, with the tokens that the policy chose, also those which the loss leaves out."""
    mask = data["response_mask"] > 0
    ids = data["sequences"][:, -mask.shape[1]:]
    blank = torch.zeros(mask.shape)
    return Part.of(ids, mask, blank, blank, reward, group).rollouts
