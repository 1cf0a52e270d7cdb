"""The list of estimators, how one is named, and what comes back from a user's own."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import creditscope
from creditscope import METHODS, CreditscopeError
from creditscope.credit import ESTIMATORS, NEEDS, Chosen, Estimator, find_estimator
from creditscope.credit.table import parse
from creditscope.credit.tools import Tools
from creditscope.files.specs import check_option
from each import each
from makers import make

PLAIN = METHODS["p1_grpo"]
SOURCE = str(Path(creditscope.__file__).resolve().parents[1])
HELPERS = {"choice", "__init__", "cuts", "prefixes", "steps", "table", "tools", "units"}
WHOLE_SIGNATURE = {"gae"}  # its equation stands at the head of its file, above two schedules


@each("name", ESTIMATORS)
def test_every_row_has_a_function_of_its_name_with_options_by_keyword_alone(name: str) -> None:
    function = ESTIMATORS[name].function
    assert (function.__name__, function.__module__) == (name, f"creditscope.credit.{name}")
    parameters = list(inspect.signature(function).parameters.values())
    assert [p.name for p in parameters[:3]] == ["method", "rollouts", "tools"]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in parameters[3:])


@each("name", [name for name in ESTIMATORS if name not in WHOLE_SIGNATURE])
def test_every_docstring_starts_with_the_equation(name: str) -> None:
    assert re.match(r"A(_it|') = ", inspect.getdoc(ESTIMATORS[name].function) or "")


def test_every_file_of_the_folder_is_a_row_or_a_helper() -> None:
    files = {path.stem for path in (Path(creditscope.__file__).parent / "credit").glob("*.py")}
    assert files == set(ESTIMATORS) | HELPERS


@each("name", ESTIMATORS)
def test_the_options_of_the_list_are_those_of_the_function(name: str) -> None:
    parameters = inspect.signature(ESTIMATORS[name].function).parameters.values()
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == {
        key: option.default for key, option in ESTIMATORS[name].options.items()}
    for key, option in ESTIMATORS[name].options.items():
        check_option(f"credit {name!r}", ESTIMATORS[name].options, key, option.default)


def test_what_an_own_function_raises_is_told_with_its_line_and_its_hands_are_off_the_rollouts(
        folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"rough_{folder.name}"
    (folder / f"{name}.py").write_text(
        "def raises(method, rollouts, tools):\n    return {}['reward_model']\n"
        "def leaves(method, rollouts, tools):\n    raise SystemExit(3)\n"
        "def meddles(method, rollouts, tools):\n    print('hello')\n    return rollouts.reward.zero_()\n")
    batch = make([1, 0], [0, 0], [2, 2])
    with pytest.raises(CreditscopeError, match=rf"raised KeyError: 'reward_model' \({name}.py, line 2\)"):
        find_estimator(f"{name}:raises")(METHODS["grpo"], batch, Tools())
    with pytest.raises(CreditscopeError, match="raised SystemExit: 3"):
        find_estimator(f"{name}:leaves")(METHODS["grpo"], batch, Tools())
    find_estimator(f"{name}:meddles")(METHODS["grpo"], batch, Tools())
    assert batch.reward.tolist() == [1, 0]
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "hello\n")


def test_the_list_is_read_without_torch() -> None:
    code = "import sys; from creditscope.credit import table; table.parse('gae,lam=1'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": SOURCE}, capture_output=True,
                          text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(("change", "says"), [
    ({"needs": ("entropie",)}, "unknown need of estimator 'x': 'entropie'; did you mean 'entropy'"),
    ({"builds_on": "rewards"}, "unknown builds_on of estimator 'x': 'rewards'; did you mean 'reward'")])
def test_a_row_that_needs_or_builds_on_something_unknown_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(CreditscopeError, match=says):
        Estimator(**{"name": "x", "title": "x", "equation": "x", "cost": "x", "cites": "x", **change})


@each("name", [name for name, row in ESTIMATORS.items() if row.needs])
def test_a_place_that_cannot_give_what_is_needed_is_refused_before_the_run(name: str) -> None:
    row = ESTIMATORS[name]
    row.require(frozenset(NEEDS), "a place with everything")
    for need in row.needs:
        says = re.escape(f"credit {name!r} needs {NEEDS[need]}, which task 'x' does not give")
        with pytest.raises(CreditscopeError, match=says):
            row.require(frozenset(NEEDS) - {need}, "task 'x'")


# -- names and options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "name", "options"), [
    ("outcome", "outcome", {}), ("monte_carlo,samples=8", "monte_carlo", {"samples": 8}),
    ("gae,lam=0.95,whiten=false,schedule=linear", "gae", {"lam": 0.95, "whiten": False, "schedule": "linear"}),
    ("my.module:f,x=-1e-3,y=+2", "my.module:f", {"x": -0.001, "y": 2})])
def test_name_and_options_are_read_and_nothing_is_imported(spec: str, name: str, options: dict[str, object]) -> None:
    found = parse(spec)
    assert found == (name, options)
    assert [type(v) for v in found[1].values()] == [type(v) for v in options.values()]


@each(("spec", "says"), [
    ("prefix_tre", "unknown credit 'prefix_tre'; did you mean 'prefix_tree'?.*See: creditscope list credits"),
    ("", "unknown credit ''"), ("os.system('x'):f", "unknown credit"), ("mod:", "unknown credit 'mod:'"),
    ("gae,", "--credit gae,: '' is no option; write gae,key=value"), ("gae,lam", "'lam' is no option"),
    ("gae,lam=", "'lam=' is no option"), ("gae,lam=1,lam=0", "option 'lam' is given twice"),
    ("gae,lambda=1", "unknown option of credit 'gae': 'lambda'.*Choices: alpha, gamma, lam, schedule, whiten"),
    ("outcome,x=1", "credit 'outcome' has no options, got 'x'"),
    ("monte_carlo,samples=2.5", "option samples of credit 'monte_carlo' must be a whole number.*4096, got 2.5"),
    ("monte_carlo,samples=true", "whole number.*got True"), ("gae,lam=high", "finite number.*got 'high'"),
    ("gae,lam=true", "a finite number.*got True"), ("gae,whiten=1", "must be true or false, got 1"),
    ("gae,lam=nan", "finite number in 0 .. 1, got nan"), ("gae,lam=2", "got 2"),
    ("salt,rank=0", "of at least 1, got 0"),
    ("gae,schedule=1", "unknown schedule of credit 'gae': '1'")])
def test_what_cannot_be_meant_is_refused_by_name(spec: str, says: str) -> None:
    with pytest.raises(CreditscopeError, match=says):
        find_estimator(spec)


def test_a_whole_number_is_good_where_a_fraction_is_expected() -> None:
    assert find_estimator("gae,lam=1").options == {"lam": 1}


def test_an_estimator_is_called_with_its_options() -> None:
    batch = make([1, 0], [0, 0], [3, 3])
    half = find_estimator("entropy_mask,share=0.5")(PLAIN, batch, Tools())
    assert int((half != 0).sum()) == 3  # the 0.5 quantile lies between the third and the fourth of six
    assert int((find_estimator("entropy_mask")(PLAIN, batch, Tools()) != 0).sum()) == 2  # the 0.8 quantile is the fifth


# -- a user's own function -------------------------------------------------------------------------------------------

OWN = '''
import torch
def mine(method, rollouts, tools, *, factor=2.0):
    return factor * rollouts.reward
mine.needs = ("entropy",)
def two(rollouts, tools): ...
def many(*args): ...
def four(method, rollouts, tools, more): ...
number = 3
class Late:
    def __call__(self, method, rollouts, tools):
        from {helper} import answer
        return answer * rollouts.reward
late = Late()
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with modules of its own, and not on the path, as when the installed program starts."""
    stem = tmp_path.name.replace("-", "_")  # a module of another test must not be found in its place
    (tmp_path / f"own_{stem}.py").write_text(OWN.replace("{helper}", f"helper_{stem}"))
    (tmp_path / f"helper_{stem}.py").write_text("answer = 42.0")
    (tmp_path / f"raises_{stem}.py").write_text("1 / 0")
    (tmp_path / f"exits_{stem}.py").write_text("raise SystemExit(3)")
    (tmp_path / f"attribute_{stem}.py").write_text("import os\nos.nothing_of_that_name")
    (tmp_path / f"imports_{stem}.py").write_text("import nothing_of_that_name")
    monkeypatch.chdir(tmp_path)
    elsewhere = [p for p in sys.path if p not in ("", str(tmp_path), os.getcwd())]
    monkeypatch.setattr(sys, "path", elsewhere)
    return tmp_path


def spec(folder: Path, start: str, name: str) -> str:
    return f"{start}_{folder.name.replace('-', '_')}:{name}"


def test_your_own_function_is_found_in_the_current_folder(folder: Path) -> None:
    chosen = find_estimator(spec(folder, "own", "mine") + ",factor=3")
    batch = make([1, -1], [0, 0], [2, 1])
    assert chosen(PLAIN, batch, Tools()).tolist() == [[3, 3], [-3, 0]]
    assert chosen.row.needs == ("entropy",)


def test_your_own_function_may_import_its_neighbours_when_it_runs(folder: Path) -> None:
    assert find_estimator(spec(folder, "own", "late"))(PLAIN, make([1], [0], [1]), Tools()).tolist() == [[42]]


def test_the_current_folder_is_the_last_place_to_look_once_the_function_is_found(folder: Path) -> None:
    before = list(sys.path)
    find_estimator(spec(folder, "own", "mine"))
    assert sys.path == [*before, str(folder)]
    find_estimator(spec(folder, "own", "mine"))
    assert sys.path == [*before, str(folder)]


@pytest.mark.slow
def test_the_installed_program_finds_it_too(folder: Path) -> None:
    """A console script has its own folder on the path, not the current one: -P leaves that out."""
    code = ("from creditscope.credit import find_estimator; "
            f"print(find_estimator({spec(folder, 'own', 'mine')!r}).spec)")
    done = subprocess.run([sys.executable, "-P", "-c", code], env=os.environ | {"PYTHONPATH": SOURCE},
                          capture_output=True, text=True, check=False)
    assert done.stdout.strip() == spec(folder, "own", "mine"), done.stderr


@each(("start", "name", "says"), [
    ("absent", "f", "no module 'absent_.*'; start creditscope in the folder that has it, or set PYTHONPATH"),
    ("imports", "f", "was found, but it imports 'nothing_of_that_name', which is not installed"),
    ("own", "absent", "module 'own_.*' has no 'absent'"), ("own", "number", "'number' is a int, not a function"),
    ("raises", "f", "importing 'raises_.*' raised ZeroDivisionError: division by zero"),
    ("exits", "f", "importing 'exits_.*' raised SystemExit: 3"),
    ("attribute", "f", "importing 'attribute_.*' raised AttributeError.*nothing_of_that_name"),
    ("own", "two", r"must take \(method, rollouts, tools\), it takes \(rollouts, tools\)"),
    ("own", "four", r"it takes \(method, rollouts, tools, more\)"), ("own", "many", r"it takes \(args\)")])
def test_an_own_function_that_cannot_serve_is_refused_by_name(folder: Path, start: str, name: str, says: str) -> None:
    with pytest.raises(CreditscopeError, match=says):
        find_estimator(spec(folder, start, name))


def test_an_option_of_your_own_function_is_checked_too(folder: Path) -> None:
    with pytest.raises(CreditscopeError, match=r"unknown option of credit .* 'facto'; did you mean 'factor'"):
        find_estimator(spec(folder, "own", "mine") + ",facto=1")


# -- what comes back -------------------------------------------------------------------------------------------------


def chosen(function: Callable[[], object]) -> Chosen:
    row = Estimator(name="mine", title="x", equation="x", cost="x", cites="")
    return Chosen("mine", lambda method, rollouts, tools: function(), {}, row)


def with_nan() -> Tensor:
    bad = torch.zeros(2, 3)
    bad[1, 0] = bad[0, 2] = float("nan")
    return bad


@each(("function", "says"), [
    (lambda: torch.zeros(3, 2), r"'mine' must be \(B,\) = \(2,\) or \(B, T\) = \(2, 3\), got \(3, 2\)"),
    (lambda: torch.zeros(3), r"got \(3,\)"), (lambda: torch.zeros(()), r"got \(\)"),
    (lambda: torch.zeros(2, 3, 1), r"got \(2, 3, 1\)"),
    (lambda: torch.zeros(2, 3).long(), "'mine' must be a float tensor, got torch.int64"),
    (lambda: torch.zeros(2, 3).bool(), "got torch.bool"), (lambda: [[0.0]], "got list"), (lambda: None, "got NoneType"),
    (lambda: torch.zeros(2, 3, device="meta"), "'mine' must be on cpu, got it on meta"),
    (with_nan, "'mine' must be finite: row 0, column 2 is nan .and 1 more."),
    (lambda: torch.full((2,), torch.inf), "row 0, column 0 is inf .and 4 more.")])
def test_what_comes_back_is_refused_by_name_where_it_is_no_credit(function: Callable[[], object], says: str) -> None:
    with pytest.raises(CreditscopeError, match=says):
        chosen(function)(PLAIN, make([1, 0], [0, 0], [3, 2]), Tools())


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 3)])
def test_credit_by_rollout_or_by_token_is_spread_and_is_zero_on_padding(shape: tuple[int, ...]) -> None:
    leaf = torch.ones(shape, requires_grad=True)
    found = chosen(lambda: 2 * leaf)(PLAIN, make([1, 0], [0, 0], [3, 2]), Tools())
    assert found.tolist() == [[2, 2, 2], [2, 2, 0]]
    assert not found.requires_grad


def test_what_stands_on_padding_need_not_be_finite() -> None:
    odd = torch.ones(2, 3)
    odd[1, 2] = float("nan")
    assert chosen(lambda: odd)(PLAIN, make([1, 0], [0, 0], [3, 2]), Tools()).tolist() == [[1, 1, 1], [1, 1, 0]]
