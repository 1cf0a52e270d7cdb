"""SkyRL's FSDP policy worker under the microscope.

The driver's callback writes into a batch's metadata which of its updates is to be read, and adds rewards, groups and
credit as columns. The worker reads that update in its own passes, and keeps the reading until the callback asks for it.
"""

from __future__ import annotations

from typing import Any

import ray
import torch
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase

from creditscope.plugins.common.reader import Part, StepReader, StepReading
from creditscope.plugins.skyrl import names
from creditscope.plugins.skyrl.stated import stated

REQUEST, REWARD, GROUP, CREDIT = "creditscope", "creditscope_reward", "creditscope_group", "creditscope_credit"
"""Our entry in a batch's metadata, and our columns in it."""


class ScopedPolicyWorker(FSDPPolicyWorkerBase):  # type: ignore[misc]
    """Extends `forward_backward`, one call per update, `_forward_backward_micro` and `optim_step`."""

    _reader: StepReader | None = None
    _data: Any = None  # the rows of the update that is read
    _taken = 0  # of these, in micro-batches so far
    _batch: tuple[Any, int] = (None, 0)  # the batch's request and its updates so far
    _kept: tuple[StepReading | None, str] = (None, "")

    @property
    def reader(self) -> StepReader:
        if self._reader is None:
            names.require(type(self).__name__, self, names.WORKER)
            self._reader = StepReader(
                self.model, self.model.model, stated(self.cfg.algorithm), autocast=_autocast,
                gram=bool(self._batch[0]["gram"]))
        return self._reader

    def forward_backward(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        request = data.metadata.get(REQUEST)
        seen = self._batch[1] if request is not None and request == self._batch[0] else 0
        self._batch = request, seen + 1
        if request is None or seen != request["update"]:
            return super().forward_backward(data, *args, **kwargs)
        self._kept = None, ""
        self._data, self._taken = data, 0
        self.reader.begin()
        return super().forward_backward(data, *args, **kwargs)

    def _forward_backward_micro(self, experience: Any, *args: Any, **kwargs: Any) -> Any:
        if self._data is None:
            return super()._forward_backward_micro(experience, *args, **kwargs)
        try:
            self.reader.open(self._part(experience))
        except Exception as error:
            self._failed(error)
        try:
            found = super()._forward_backward_micro(experience, *args, **kwargs)
        except BaseException:
            self.reader.abort()
            raise
        self._tried(self.reader.close)
        return found

    def optim_step(self) -> Any:
        if self._data is None:
            return super().optim_step()
        self._tried(self.reader.stepping)
        found = super().optim_step()
        self._tried(self._look_after)
        self._data = None
        return found

    def take_reading(self) -> tuple[StepReading | None, str]:
        """The reading of the last batch, and why there is none."""
        kept, self._kept = self._kept, (None, "")
        return kept

    def _look_after(self) -> None:
        self._kept = self.reader.stepped(self.optimizer), ""
        self.reader.begin()

    def _tried(self, what: Any) -> None:
        """A reading that fails is absent, with its reason; the training goes on."""
        if self._data is not None:
            try:
                what()
            except Exception as error:
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._kept = None, f"{type(error).__name__}: {error}"
        self._data = None
        self.reader.begin()

    def _part(self, experience: Any) -> Part:
        names.require("a micro-batch", experience, names.EXPERIENCE)
        width, mask = experience.num_actions, experience.loss_mask > 0
        at = slice(self._taken, self._taken + len(mask))
        self._taken += len(mask)
        reward, group, credit = (self._data[name][at].to(mask.device) for name in (REWARD, GROUP, CREDIT))
        old = experience.action_log_probs if experience.action_log_probs is not None else experience.rollout_logprobs
        return Part.of(experience.sequences[:, -width:].to(mask.device), mask, old.to(mask.device), credit, reward,
                       group)


def _autocast() -> Any:
    """As around SkyRL's own forward."""
    return torch.autocast(device_type="cuda", dtype=torch.bfloat16)


PolicyWorker = ray.remote(num_gpus=1)(ScopedPolicyWorker)
"""For `trainer.build_models(PolicyWorker, CriticWorker, RefWorker)`."""
