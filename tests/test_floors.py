"""The house's floors: a module imports its own floor or a lower one, and the light packages load no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import creditscope
from cli import loaded

SRC = Path(creditscope.__file__).parent

# Lowest first. A package may import creditscope packages of its own floor or of lower ones.
FLOORS = [
    {"errors", "files"},
    {"methods", "runs", "batch"},
    {"objective", "credit", "microscope", "optimizer"},
    {"diagnosis", "claims", "report"},
    {"tasks", "policy", "exact"},
    {"lab", "studies"},
    {"offline", "plugins", "selftest"},
    {"cli", "__main__"},
]
RANK = {name: rank for rank, floor in enumerate(FLOORS) for name in floor}
TABLE = 1
"""The floor of credit/table.py and optimizer/table.py, below their packages: rows of data, without torch."""
NO_TORCH = ("files", "methods", "runs", "diagnosis", "claims", "report", "cli")
"""Packages of which no module loads torch when it is imported: a log or a record is read without it."""
# The same inside the microscope.
MICROSCOPE = ["gram", "kernels", "routes", "spectrum", "geometry", "sketch", "sources", "rows", "owners", "layouts",
              "recorder", "shards", "calls", "broadcast", "operations", "rerun", "watch", "scope", "proof",
              "distributed"]


def modules() -> list[Path]:
    return sorted(path for path in SRC.rglob("*.py") if path != SRC / "__init__.py")


def home(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    return ".".join(["creditscope", *path.relative_to(SRC).with_suffix("").parts]).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Modules that a file imports, inside functions too: a late import may be heavy, but may not point upwards."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def floor(name: str) -> int | None:
    """The floor of creditscope.PACKAGE.MODULE, or of a name in it; None of what is no module of ours."""
    parts = name.split(".")
    if parts[0] != "creditscope" or len(parts) < 2 or parts[1] not in RANK:
        return None
    rank = RANK[parts[1]]
    return TABLE if rank == TABLE + 1 and parts[2:3] == ["table"] else rank


def test_every_module_stands_on_a_floor_and_imports_point_down() -> None:
    wrong = [f"{home(path)} stands on no floor: give it one in FLOORS" for path in modules() if home(path) not in RANK]
    for path in modules():
        own, used = floor(dotted(path)), imports(path)
        # `from package.table import name` also gives the package itself: what is imported of it is the table alone.
        packages = {name.removesuffix(".table") for name in used if name.endswith(".table")}
        wrong += [f"{dotted(path)} imports {name}, which stands above it" for name in sorted(used - packages)
                  if own is not None and (floor(name) or 0) > own]
    assert not wrong, wrong


def test_one_class_name_has_one_meaning() -> None:
    homes: dict[str, list[str]] = {}
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(dotted(path))
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_files_and_the_functions_of_the_lab_can_be_read_at_once() -> None:
    long = [f"{dotted(path)}: {count} lines" for path in modules()
            if (count := len(path.read_text().splitlines())) > 500]
    for path in (SRC / "lab").glob("*.py"):
        long += [f"{dotted(path)}.{node.name}: {count} lines" for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.FunctionDef) and (count := node.end_lineno - node.lineno + 1) > 80]
    assert not long, long


def test_at_the_top_stand_the_public_names_and_the_errors_alone() -> None:
    assert {path.name for path in SRC.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}


def test_imports_inside_the_microscope_point_one_way() -> None:
    wrong = []
    for rank, name in enumerate(MICROSCOPE):
        below = imports(SRC / "microscope" / f"{name}.py")
        wrong += [f"{name} imports {other}, which stands above it" for other in MICROSCOPE[rank + 1:]
                  if f"creditscope.microscope.{other}" in below]
    assert not wrong, wrong


def test_no_module_of_a_light_package_loads_torch() -> None:
    """All of them in one interpreter, one after another: the first after which torch is loaded has loaded it."""
    code = ("import importlib, sys\n"
            "for name in sys.argv[1:]:\n"
            "    importlib.import_module(name)\n"
            "    if 'torch' in sys.modules: sys.exit(name + ' loads torch')")
    light = [dotted(path) for path in modules() if home(path) in NO_TORCH]
    done = subprocess.run([sys.executable, "-c", code, *light], capture_output=True, text=True, check=False)
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
