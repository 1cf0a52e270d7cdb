"""`creditscope env`: versions and devices, for bug reports."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from creditscope.cli.output import Output
from creditscope.errors import installed
from creditscope.files.versions import software

PACKAGES = ("torch", "numpy", "transformers", "safetensors", "tyro", "rich", "trl", "verl", "peft", "accelerate",
            "datasets", "math-verify", "gguf")


@dataclass(frozen=True)
class Env:
    """Print versions and devices for a bug report; no path, no user name and no variable is in it.

    For example:
      creditscope env
      creditscope env --json
    """

    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        facts = environment()
        if (console := self.output.console_or_json(facts)) is None:
            return 0
        packages = {name: version or "not installed" for name, version in facts.pop("packages").items()}
        for name, value in (facts | packages).items():
            console.print(f"{name:<14}{value}")
        return 0


def environment() -> dict[str, Any]:
    found = software(PACKAGES)
    packages = found.pop("packages")
    return found | {"cpus": os.cpu_count()} | devices() | {"packages": packages}


def devices() -> dict[str, Any]:
    """What torch sees; nothing where it is not installed."""
    if not installed("torch"):
        return {}
    import torch

    return {"torch_threads": torch.get_num_threads(), "cuda": torch.version.cuda,
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}
