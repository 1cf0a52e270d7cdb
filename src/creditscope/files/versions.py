"""Versions of Python and packages; none is imported."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable
from typing import Any

from creditscope import __version__


def version(package: str) -> str | None:
    """The installed version, or None.

    >>> version("no such package") is None
    True
    """
    return next((found.version for found in importlib.metadata.distributions(name=package)), None)


def software(packages: Iterable[str]) -> dict[str, Any]:
    """creditscope, Python, platform and packages. No path, no user name and no variable."""
    return {"creditscope": __version__, "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
            "packages": {name: version(name) for name in packages}}
