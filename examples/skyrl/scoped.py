"""SkyRL's training command with its policy under the microscope; settings are SkyRL's.

    python examples/skyrl/scoped.py trainer.strategy=fsdp trainer.remove_microbatch_padding=false ...
"""

from __future__ import annotations

import sys
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from creditscope.plugins.skyrl import scoped


class Scoped(BasePPOExp):
    """SkyRL's experiment; the one line that differs is the last."""

    def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
        return scoped(super().get_trainer(*args, **kwargs), every=10, out="runs/skyrl")


@ray.remote(num_cpus=1)
def train(cfg: SkyRLTrainConfig) -> None:
    Scoped(cfg).run()


if __name__ == "__main__":
    config = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(config)
    initialize_ray(config)
    ray.get(train.remote(config))
