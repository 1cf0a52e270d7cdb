"""Every row and every estimator under the name `creditscope_NAME`, and the engine under the vendor `creditscope`.

Importing this module registers: verl does so through the entry point `verl.plugins`.
"""

from __future__ import annotations

import os

from creditscope.credit import ESTIMATORS
from creditscope.methods.table import METHODS
from creditscope.plugins.verl.advantage import advantages_of, credit_of
from creditscope.plugins.verl.loss import loss_of
from creditscope.plugins.verl.names import PREFIX, VENDOR, installed, load


def register() -> tuple[str, ...]:
    """Register once; the names that verl knows afterwards. Rows that verl cannot feed refuse when they are used."""
    algos = load("verl.trainer.ppo.core_algos")
    if f"{PREFIX}grpo" not in algos.POLICY_LOSS_REGISTRY:
        for method in METHODS.values():
            algos.register_policy_loss(f"{PREFIX}{method.name}")(loss_of(method))
            algos.register_adv_est(f"{PREFIX}{method.name}")(advantages_of(method))
        for name in ESTIMATORS:
            algos.register_adv_est(f"{PREFIX}{name}")(credit_of(name))
        if os.environ.get("VERL_ENGINE_VENDOR") == VENDOR:  # verl's engines are heavy to import: only who asks pays
            _register_engine()
    return tuple(sorted(f"{PREFIX}{name}" for name in {*METHODS, *ESTIMATORS}))


def _register_engine() -> None:
    from creditscope.plugins.verl.engine import ScopedEngine

    registry = load("verl.workers.engine").EngineRegistry
    registry.register(model_type="language_model", backend="fsdp2", device=["cuda", "npu", "cpu"],
                      vendor=VENDOR)(ScopedEngine)


if installed():
    register()
