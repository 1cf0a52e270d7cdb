"""The house's arrows: a module imports only what stands below it, and light doors stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import creditscope
from cli import loaded

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
            "tasks", "lab.config", "verbs.optimizer", "report.build", "report.tokens", "report.watch", "verbs.report",
            "doctor.rules", "doctor.read", "verbs.doctor", "verbs.selftest", "offline.settings", "verbs.scope", "cli"}


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


def test_imports_point_one_way() -> None:
    wrong = [f"{home(path)} has no layer: give it one in LAYERS" for path in modules() if home(path) not in RANK]
    for path in modules():
        above = {name.split(".")[1] for name in imports(path) if name.startswith("creditscope.")} & RANK.keys()
        wrong += [f"{path.relative_to(SRC)} imports {name}, which stands above it" for name in sorted(above)
                  if RANK[name] > RANK.get(home(path), 0)]
    assert not wrong, wrong


def test_imports_inside_the_microscope_point_one_way() -> None:
    wrong = []
    for rank, name in enumerate(MICROSCOPE):
        below = imports(SRC / "microscope" / f"{name}.py")
        wrong += [f"{name} imports {other}, which stands above it" for other in MICROSCOPE[rank + 1:]
                  if f"creditscope.microscope.{other}" in below]
    assert not wrong, wrong


def test_modules_that_promise_to_be_light_load_no_torch() -> None:
    """All of them in one interpreter, one after another: the first after which torch is loaded has loaded it."""
    code = ("import importlib, sys\n"
            "for name in sys.argv[1:]:\n"
            "    importlib.import_module('creditscope.' + name)\n"
            "    if 'torch' in sys.modules: sys.exit(name + ' loads torch')")
    done = subprocess.run([sys.executable, "-c", code, *sorted(NO_TORCH)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_neither_torch_nor_the_trainers() -> None:
    heavy = {"torch", "transformers", "trl", "verl", "rich", "tyro"}
    assert not loaded("import creditscope; from creditscope import METHODS") & heavy


def test_the_public_names_import_torch_and_nothing_heavier() -> None:
    heavy = {"transformers", "trl", "verl", "rich", "tyro"}
    assert not loaded("from creditscope import Rollouts, advantage, surrogate, effective_credit") & heavy


def test_every_public_name_exists_and_a_wrong_one_says_so() -> None:
    for name in creditscope.__all__:
        assert getattr(creditscope, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'surogate'"):
        creditscope.surogate  # noqa: B018
