"""`creditscope env`: versions and devices, for bug reports."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from creditscope import __version__
from creditscope.cli.output import Output

PACKAGES = ("torch", "numpy", "transformers", "safetensors", "tyro", "rich", "trl", "verl", "peft", "accelerate",
            "datasets", "math-verify", "gguf")


@dataclass(frozen=True)
class Env:
    """Print versions and devices. Paste it into a bug report; it holds no path, no user name and no variable."""

    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        facts = environment()
        if self.output.json:
            self.output.emit(facts)
            return 0
        console = self.output.console()
        for name, value in facts.items():
            if name != "packages":
                console.print(f"{name:<14}{value}")
        for name, version in facts["packages"].items():
            console.print(f"{name:<14}{version or 'not installed'}")
        return 0


def environment() -> dict[str, Any]:
    """Versions and devices as plain data."""
    import torch

    return {
        "creditscope": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
