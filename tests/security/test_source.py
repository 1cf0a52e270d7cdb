"""What the source may not contain: whoever adds a pickle, an eval or a shell must first change this file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import creditscope

SRC = Path(creditscope.__file__).parent
MODULES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "xml", "lxml", "pty"})
"""Modules whose files can run code, or that parse what we never read."""
CALLS = frozenset({"eval", "exec", "compile", "__import__", "input", "os.system", "os.popen", "tempfile.mktemp",
                   "torch.load", "yaml.load", "yaml.full_load", "yaml.unsafe_load",
                   "shutil.unpack_archive", "runpy.run_path", "runpy.run_module", "subprocess.getoutput",
                   "subprocess.getstatusoutput"})
STARTERS = frozenset({"subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_call",
                      "subprocess.check_output"})
LOADERS = frozenset({"policy/loading.py", "selftest/trl_live.py"})
"""Who loads a model: the one door for users' models, and the self-test, which loads the packaged one."""
IMPORTERS = frozenset({"credit/choice.py", "tasks/worker.py"})
"""Who imports a module that a user names on the command line."""
TABLES = frozenset({"tasks/__init__.py", "microscope/kernels.py", "plugins/verl/names.py", "plugins/openrlhf/actor.py",
                    "plugins/openrlhf/train.py"})
"""Who imports by a variable that holds a constant of the package's own."""
COMMANDS = frozenset({
    ("plugins/openrlhf/train.py", "runpy.run_module(names.COMMAND, run_name='__main__', alter_sys=True)")})
"""Who runs the command of another package, by a constant of the package's own."""


def name_of(node: ast.expr) -> str:
    """a.b.c of an expression, as far as it is one."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def faults(source: str, where: str) -> Iterator[str]:
    """What is forbidden in a source text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"import {name}" for name in names if name.split(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        if (where, ast.unparse(node)) in COMMANDS:
            continue
        name, given = name_of(node.func), {word.arg: word.value for word in node.keywords}
        if name in CALLS or (name in ("np.load", "numpy.load") and "allow_pickle" not in given):
            yield name
        if name in STARTERS and not isinstance(node.args[0], ast.List):
            yield "a process that is not started from a list"
        for word, allowed in {"shell": False, "allow_pickle": False, "trust_remote_code": False}.items():
            if word in given and ast.unparse(given[word]) != str(allowed):
                yield f"{word}="
        if name == "importlib.import_module" and where not in IMPORTERS | TABLES and not constant(node.args[0]):
            yield f"imports what {ast.unparse(node.args[0])} says"
        if name.endswith(".from_pretrained") and where not in LOADERS:
            yield "loads a model past policy/loading.py"


def constant(node: ast.expr) -> bool:
    """A literal, or one that begins with creditscope."""
    if isinstance(node, ast.JoinedStr):
        return isinstance(node.values[0], ast.Constant) and str(node.values[0].value).startswith("creditscope.")
    return isinstance(node, ast.Constant)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda path: str(path.relative_to(SRC)))
def test_no_module_unpickles_evaluates_or_opens_a_shell(path: Path) -> None:
    assert list(faults(path.read_text(), path.relative_to(SRC).as_posix())) == []


@pytest.mark.parametrize("planted", [
    "import pickle", "from dill import loads", "eval('1')", "exec(text)", "os.system('ls')", "torch.load(f)",
    "np.load(f)", "np.load(f, allow_pickle=True)", "yaml.load(text)", "tempfile.mktemp()",
    "subprocess.run(['ls'], shell=True)", "subprocess.run('ls')",
    "subprocess.Popen('ls')", "importlib.import_module(config['reward'])", "importlib.import_module(f'{x}.y')",
    "AutoModel.from_pretrained(x)", "job(trust_remote_code=True)", "read_array(f, allow_pickle=given)",
    "from xml.etree import ElementTree", "input('sure?')"])
def test_a_planted_line_is_noticed(planted: str) -> None:
    assert list(faults(planted, "planted.py"))
