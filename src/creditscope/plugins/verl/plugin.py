"""Every row and every estimator under the name `creditscope_NAME`, and the engine under the vendor `creditscope`.

Importing this module registers: verl does so through the entry point `verl.plugins`.
"""

from __future__ import annotations

import os

from creditscope.credit import ESTIMATORS
from creditscope.errors import installed
from creditscope.methods.table import METHODS
from creditscope.plugins.verl.advantage import estimator_of
from creditscope.plugins.verl.loss import loss_of
from creditscope.plugins.verl.names import PREFIX, VENDOR, load


def register() -> tuple[str, ...]:
    """Register once; the names that verl knows afterwards. Rows that verl cannot feed refuse when they are used."""
    algos = load("verl.trainer.ppo.core_algos")
    if f"{PREFIX}grpo" not in algos.POLICY_LOSS_REGISTRY:
        for method in METHODS.values():
            algos.register_policy_loss(f"{PREFIX}{method.name}")(loss_of(method))
            algos.register_adv_est(f"{PREFIX}{method.name}")(estimator_of("outcome", method))
        for name in ESTIMATORS:
            algos.register_adv_est(f"{PREFIX}{name}")(estimator_of(name))
        if os.environ.get("VERL_ENGINE_VENDOR") == VENDOR:  # verl's engines take long to import
            from creditscope.plugins.verl.engine import ScopedEngine

            registry = load("verl.workers.engine").EngineRegistry
            registry.register(model_type="language_model", backend="fsdp2", device=["cuda", "npu", "cpu"],
                              vendor=VENDOR)(ScopedEngine)
    return tuple(sorted(f"{PREFIX}{name}" for name in {*METHODS, *ESTIMATORS}))


if installed("verl"):
    register()
