"""OpenRLHF's training command with its policy under the microscope.

    CREDITSCOPE_OUT=runs/mine python -m creditscope.plugins.openrlhf.train ARGUMENTS

ARGUMENTS are those of `python -m openrlhf.cli.train_ppo_ray`, which runs with one name changed: the Ray actor that it
starts for the policy is ours.
"""

from __future__ import annotations

import importlib
import runpy
import sys

from creditscope.errors import CreditscopeError
from creditscope.plugins.openrlhf import actor, names


def main() -> None:
    actor.options()  # a wrong variable is refused here, not on the workers
    module = importlib.import_module(names.ACTOR_MODULE)
    setattr(module, names.ACTOR, actor.remote())
    runpy.run_module(names.COMMAND, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    try:
        main()
    except CreditscopeError as error:
        sys.exit(f"error: {error}")
