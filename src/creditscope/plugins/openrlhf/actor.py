"""OpenRLHF's Ray actor of the policy, with a ScopeHook on the trainer that it makes.

Read from the environment: CREDITSCOPE_EVERY (batches between readings, 10), CREDITSCOPE_OUT (folder of the record, on
the first rank's machine) and CREDITSCOPE_GRAM (0 leaves out the geometry).
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from creditscope.errors import CreditscopeError, install_hint, require_module
from creditscope.plugins.openrlhf import names
from creditscope.plugins.openrlhf.hook import ScopeHook

VARIABLES = ("CREDITSCOPE_EVERY", "CREDITSCOPE_OUT", "CREDITSCOPE_GRAM")


def plain_class() -> Any:
    """The class under OpenRLHF's `@ray.remote`."""
    with install_hint(__name__):
        require_module(__name__, "openrlhf")
        module = importlib.import_module(names.ACTOR_MODULE)
    names.require(names.ACTOR_MODULE, module, (names.ACTOR,))
    actor = getattr(module, names.ACTOR)
    names.require(names.ACTOR, actor, (names.RAY_CLASS,))
    found = actor
    for step in names.RAY_CLASS.split("."):
        found = getattr(found, step)
    names.require(names.ACTOR, found, (names.INIT,))
    return found


Base: Any = plain_class()


class ScopedPolicyModelActor(Base):  # type: ignore[misc]
    """The policy's actor; its trainer is read from the first batch on."""

    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        found = super().init_model_from_pretrained(*args, **kwargs)
        self.scope = ScopeHook(self.trainer, **options())
        return found


def options() -> dict[str, Any]:
    """The arguments of ScopeHook from the environment."""
    every, gram = os.environ.get("CREDITSCOPE_EVERY", "10"), os.environ.get("CREDITSCOPE_GRAM", "1")
    if not every.isdigit() or int(every) < 1:
        raise CreditscopeError(f"CREDITSCOPE_EVERY={every!r} must be a whole number from 1: batches between readings")
    if gram not in ("0", "1"):
        raise CreditscopeError(f"CREDITSCOPE_GRAM={gram!r} must be 1, or 0 to leave out the geometry")
    return {"every": int(every), "out": os.environ.get("CREDITSCOPE_OUT") or None, "gram": gram == "1"}


def remote() -> Any:
    """As a Ray actor, with our variables in the environment of its processes, wherever they run."""
    import ray

    told = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return ray.remote(num_gpus=1, runtime_env={"env_vars": told})(ScopedPolicyModelActor)
