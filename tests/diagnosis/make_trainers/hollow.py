"""Import a trainer's modules where packages that do not write its log (GPU kernels, trackers, servers) are missing.

`hollow("flash_attn", …)` answers an import of these packages with empty modules, whose attributes are empty classes.
`cut(file, name, space)` runs one function or class of a source file, where even that does not import.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar


class _Empty(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else cls


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {"__module__": self.__name__})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == each or name.startswith(f"{each}.") for each in self._names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def hollow(*names: str) -> None:
    """From here on these packages or modules are empty."""
    sys.meta_path.insert(0, _Finder(names))


def cut(file: Path, name: str, space: dict[str, Any]) -> Any:
    """One function or class of a file, also a method, run in a namespace of its own."""
    tree = ast.parse(file.read_text())
    found = next(node for node in ast.walk(tree)
                 if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) and node.name == name)
    found.decorator_list = []
    space.setdefault("__name__", file.stem)
    exec(compile(ast.Module([found], []), str(file), "exec"), space)
    return space[name]
