"""The house's arrows: a module imports only what stands below it, and light doors stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import creditscope

SRC = Path(creditscope.__file__).parent

# Lowest first. A module may import creditscope modules from its own layer or from lower ones.
LAYERS = [
    {"errors"},
    {"options", "strangers", "streams", "memory"},
    {"method", "rollouts", "groups", "jsonlines", "intervals", "arrays", "columns"},
    {"methods", "rollouts_jsonl", "record", "microscope"},
    {"dialects"},
    {"catalogue"},
    {"advantages"},
    {"credit"},
    {"weights", "ratios"},
    {"edges"},
    {"penalties", "metrics"},
    {"objective"},
    {"describe", "properties", "progress", "prefix_bias", "optimizer"},
    {"tasks"},
    {"exactness"},
    {"compare"},
    {"figures", "claims", "doctor"},
    {"lab"},
    {"offline", "plugins"},
    {"report"},
    {"sweeps"},
    {"selftest"},
    {"verbs"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
# The same inside the microscope; `kernels` is left out, for it and `gram` call each other.
MICROSCOPE = ["gram", "spectrum", "geometry", "sketch", "sources", "rows", "layouts", "recorder", "shards",
              "operations", "watch", "scope", "proof", "ranks"]
NO_TORCH = {"errors", "arrays", "columns", "options", "strangers", "streams", "memory", "method", "methods", "dialects",
            "describe", "record", "intervals", "progress", "compare", "figures", "claims.verdict", "claims.evidence",
            "claims.turns", "claims.table", "claims.page", "claims.p1_runs", "claims.p2_runs", "claims.ours", "sweeps",
            "verbs.check", "verbs.reproduce", "microscope.spectrum", "microscope.geometry", "optimizer",
            "optimizer.table", "optimizer.findings", "optimizer.verdicts", "credit", "credit.table", "credit.choice",
            "tasks", "lab.config", "verbs.optimizer", "report.build", "report.watch", "verbs.report", "doctor.rules",
            "doctor.read", "verbs.doctor", "verbs.selftest", "offline.settings", "verbs.scope", "cli"}


def modules() -> list[Path]:
    return sorted(path for path in SRC.rglob("*.py") if path != SRC / "__init__.py")


def home(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Modules that a file imports, inside functions too: a late import may be heavy, but may not point upwards."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SRC)))
def test_imports_point_one_way(path: Path) -> None:
    assert home(path) in RANK, f"{home(path)} has no layer: give it one in LAYERS"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "creditscope" and len(parts) > 1 and parts[1] in RANK:
            assert RANK[parts[1]] <= RANK[home(path)], f"{home(path)} imports {parts[1]}, which stands above it"


@pytest.mark.parametrize("name", MICROSCOPE)
def test_imports_inside_the_microscope_point_one_way(name: str) -> None:
    below = imports(SRC / "microscope" / f"{name}.py")
    above = MICROSCOPE[MICROSCOPE.index(name) + 1:]
    found = [other for other in above if f"creditscope.microscope.{other}" in below]
    assert not found, f"{name} imports {found[0]}, which stands above it"


@pytest.mark.parametrize("name", sorted(NO_TORCH))
def test_modules_that_promise_to_be_light_load_no_torch(name: str) -> None:
    code = f"import sys, creditscope.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_package_loads_neither_torch_nor_the_trainers() -> None:
    code = ("import sys, creditscope; from creditscope import METHODS;"
            "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'trl', 'verl', 'rich', 'tyro')))")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_public_names_import_torch_and_nothing_heavier() -> None:
    code = ("import sys; from creditscope import Rollouts, advantage, surrogate, effective_credit;"
            "sys.exit(any(m in sys.modules for m in ('transformers', 'trl', 'verl', 'rich', 'tyro')))")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_exists_and_a_wrong_one_says_so() -> None:
    for name in creditscope.__all__:
        assert getattr(creditscope, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'surogate'"):
        creditscope.surogate  # noqa: B018
