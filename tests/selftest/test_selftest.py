"""The self-test passes here, and each of its checks goes red when the bug it is for is planted."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import mini
from creditscope import METHODS, CreditscopeError
from creditscope.cli import main as cli
from creditscope.cli.selftest import find_device
from creditscope.microscope import recorder, scope
from creditscope.microscope import sketch as sketches
from creditscope.objective import advantages, penalties, ratios, weights
from creditscope.runs import record
from creditscope.selftest import conformance, formulas, sketch, table, training, twin
from creditscope.selftest.check import CheckResult, WorstError, lacking, run_checks, worst_of
from creditscope.selftest.citation import commit, counts, digest, sentence, versions
from depth import FULL
from plugins.trl_makers import settle

HOME = Path(formulas.__file__).parent
CPU = torch.device("cpu")
BY_NAME = {check.name: check for check in table.CHECKS}
Plant = Callable[[pytest.MonkeyPatch], None]


def said(name: str) -> CheckResult:
    (line,) = run_checks([BY_NAME[name]], CPU)
    return line


# -- it passes -------------------------------------------------------------------------------------------------------


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training of the check that takes a tenth of the packaged model's time."""
    monkeypatch.setattr(training, "SMALL", replace(training.SMALL, model=mini.model(), task=mini.TASK))


def one_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the claims the one whose verdicts the planted bug changes."""
    published = {name: found for name, found in json.loads((HOME / formulas.VERDICTS).read_text()).items()
                 if name.startswith("P1.10 |")}
    monkeypatch.setattr(formulas, "files", lambda _: SimpleNamespace(joinpath=lambda _: SimpleNamespace(
        read_text=lambda encoding: json.dumps(published))))
    monkeypatch.setattr(formulas, "run_exact", partial(formulas.run_exact, ["P1.10"]))


NARROW: dict[str, Plant] = {"training/bits": small, "training/resume": small, "methods/verdicts": one_claim}
"""Checks that take seconds, on less than what is shipped. The planted bug must be what turns them red: without it
`make test` sees them pass on as little."""


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.usefixtures("mini_task")
@pytest.mark.parametrize("name", BY_NAME)
def test_the_check_passes_on_this_machine_or_says_what_it_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "training/trl bits" and not lacking("trl", CPU):
        settle()
    if NARROW.get(name) is small and not FULL:
        small(monkeypatch)
    line = said(name)
    assert line.verdict == ("not run" if lacking(BY_NAME[name].needs, CPU) else "pass"), line


def test_one_claim_alone_passes_so_that_it_is_the_planted_bug_that_turns_it_red(
        monkeypatch: pytest.MonkeyPatch) -> None:
    one_claim(monkeypatch)
    assert said("methods/verdicts").verdict == "pass"


@pytest.mark.parametrize(("fails", "code"), [(False, 0), (True, 1)])
def test_the_command_prints_a_line_a_check_and_a_block_to_cite(fails: bool, code: int, monkeypatch: pytest.MonkeyPatch,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    some = [BY_NAME["selfcheck/green"], BY_NAME["optimizer/carry"], BY_NAME["gram/kernels"]]
    if fails:
        some[0] = replace(some[0], run=lambda device: WorstError(0.25, "planted"))
    monkeypatch.setattr(table, "CHECKS", tuple(some))
    with pytest.raises(SystemExit) as ended:
        cli.main(["selftest", "--device", "cpu"])
    printed = capsys.readouterr().out
    assert ended.value.code == code
    assert ("✗ selfcheck/green      0.25 > 1e-11" in printed) == fails
    assert "✓ optimizer/carry" in printed
    assert re.search(r"– gram/kernels +not run .* needs cuda", printed)
    assert re.search(r"^digest +[0-9a-f]{64}$", printed, re.MULTILINE)
    assert ("Measured with creditscope" in printed) != fails
    assert ("Not to be cited" in printed) == fails


def test_as_json_it_is_one_object_without_nan(monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    broken = replace(BY_NAME["selfcheck/green"], run=lambda device: WorstError(float("nan"), "planted"))
    monkeypatch.setattr(table, "CHECKS", (broken, BY_NAME["optimizer/adamw"]))
    with pytest.raises(SystemExit) as ended:
        cli.main(["selftest", "--json", "--device", "cpu"])
    told = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1
    assert (told["passed"], [line["verdict"] for line in told["checks"]]) == (False, ["fail", "pass"])
    assert told["checks"][0]["worst"] is None
    assert set(told["checks"][0]) == {"name", "what", "verdict", "worst", "tolerance", "why", "detail", "seconds"}
    assert len(told["digest"]) == 64


def test_ctrl_c_ends_it_with_one_word_and_130(monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(device: torch.device) -> WorstError:
        raise KeyboardInterrupt

    monkeypatch.setattr(table, "CHECKS", (replace(BY_NAME["selfcheck/green"], run=interrupt),))
    with pytest.raises(SystemExit) as ended:
        cli.main(["selftest", "--device", "cpu"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "creditscope: interrupted\n"


def test_a_check_that_breaks_is_a_failure_with_its_words_and_the_others_go_on() -> None:
    def breaks(device: torch.device) -> WorstError:
        raise ZeroDivisionError("\x1b[31m planted")

    first, second = run_checks([replace(BY_NAME["selfcheck/green"], run=breaks), BY_NAME["optimizer/carry"]], CPU)
    assert (first.verdict, first.worst, first.detail) == ("fail", None, "ZeroDivisionError: \\x1b[31m planted")
    assert second.verdict == "pass"


def test_no_number_at_all_is_the_worst_of_numbers() -> None:
    assert worst_of({"a": 1.0, "b": float("nan"), "c": 2.0}, "x").detail == "b is the worst of 3 x"


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "cpu:x"])
def test_a_device_that_is_not_there_is_an_error_with_a_way_out(name: str) -> None:
    with pytest.raises(CreditscopeError, match="--device"):
        find_device(name)


# -- the block to cite -----------------------------------------------------------------------------------------------


def line(name: str = "a", verdict: Any = "pass", **changes: Any) -> CheckResult:
    given = {"worst": 0.0, "tolerance": 1e-3, "why": "", "detail": "", "what": "", "seconds": 1.0} | changes
    return CheckResult(name=name, verdict=verdict, **given)


def test_the_digest_by_hand_is_of_verdicts_tolerances_and_versions_and_of_nothing_else() -> None:
    lines = [line("b"), line("a", "not run", tolerance=0)]
    # sha256 of "a: not run, 0\nb: pass, 0.001\nversion torch: 2"
    known = {"torch": "2"}
    assert digest(lines, known) == hashlib.sha256(b"a: not run, 0\nb: pass, 0.001\nversion torch: 2").hexdigest()
    assert digest(lines[::-1], known) == digest(lines, known)
    assert digest([line("b", worst=1e-4, seconds=9.0), lines[1]], known) == digest(lines, known)
    assert digest([line("b", "fail"), lines[1]], known) != digest(lines, known)
    assert digest([line("b", tolerance=1.0), lines[1]], known) != digest(lines, known)
    assert digest(lines, {"torch": "3"}) != digest(lines, known)


def test_the_sentence_names_versions_device_and_what_was_not_run() -> None:
    known = versions(CPU)
    told = sentence([line(), line("b", "not run")], known, "2026-01-02")
    assert "1 of 2 checks passed, 1 not run" in told
    assert all(known[name] in told for name in ("creditscope", "torch", "transformers", "python", "device"))
    assert "2026-01-02" in told
    assert sentence([line(verdict="fail")], known, "").startswith("Not to be cited: 0 of 1 checks passed, 1 failed")
    assert counts([line()]) == "1 of 1 checks passed"


def test_the_commit_is_that_of_the_checkout_or_not_known() -> None:
    found = commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{40}\+?", found)


# -- the goldens -----------------------------------------------------------------------------------------------------


@pytest.mark.conformance
@pytest.mark.slow
def test_the_packaged_goldens_are_what_the_libraries_give() -> None:
    pytest.importorskip("trl")
    from makers import load_script

    fresh = load_script(Path(__file__).with_name("make_goldens.py")).arrays()
    stored = conformance._stored()
    assert fresh.keys() == stored.keys(), "run: python tests/selftest/make_goldens.py"
    for name, value in fresh.items():
        if value.dtype.kind == "f":
            np.testing.assert_allclose(stored[name], value, rtol=1e-12, atol=1e-15, err_msg=name)
        elif not name.endswith("/version"):
            assert np.array_equal(stored[name], value), name


def test_the_goldens_hold_every_dialect_of_both_libraries() -> None:
    from creditscope.methods.dialects import DIALECTS

    for library in ("trl", "verl"):
        assert {g.row for g in conformance.goldens(library)} == {
            name for name, row in DIALECTS.items() if name.startswith(f"{library}_") and not row.linked}


def test_the_twins_batches_reach_every_branch_of_the_table() -> None:
    """Without this the twin could agree because nothing happened."""
    rows, logp = twin.answers(formulas.MOVES["far"], seed=2)
    moved = [p - o for row, lp in zip(rows, logp, strict=True) for p, o in zip(lp, row.old, strict=True)]
    assert min(moved) < np.log(0.6)
    assert max(moved) > np.log(1.5)
    for name in ("grpo", "gmpo", "dppo", "dppo_kl", "grpo_v32", "cppo", "gtpo", "dapo"):
        own = twin.advantages(METHODS[name], rows)
        w = twin.credit(METHODS[name], rows, logp, own)
        stopped = [a for some, given in zip(own, w, strict=True) for a, x in zip(some, given, strict=True)
                   if a != 0 and x == 0]
        assert stopped or name == "dapo", name
    assert len({x for some in twin._conflict(rows) for x in some}) == 3, "weights 0, 1 and 2 of conflict tokens"


# -- planted bugs: each check goes red ---------------------------------------------------------------------------------


def scaled_gram(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Gram that is 0.1 % too large, under a self-check that looks away."""
    right = recorder.weight_gram
    monkeypatch.setattr(recorder, "weight_gram", lambda *a, **k: tuple(
        x * 1.001 if i == 1 else x for i, x in enumerate(right(*a, **k))))
    blind(monkeypatch)


def scaled_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The microscope hands the optimiser 0.1 % too much, under a self-check that looks away."""
    right = recorder.weight_gram
    monkeypatch.setattr(recorder, "weight_gram", lambda *a, **k: tuple(
        x * 1.001 if i == 0 else x for i, x in enumerate(right(*a, **k))))
    blind(monkeypatch)


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A self-check that never goes red."""
    right = scope.GramCheck
    monkeypatch.setattr(scope, "GramCheck", lambda *given: replace(right(*given), tolerance=float("inf")))


def patched(where: Any, name: str, wrong: Callable[[Any], Any]) -> Plant:
    """The function `name` of a module, or the entry of a dictionary, replaced by what `wrong` makes of it."""
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        if isinstance(where, dict):
            monkeypatch.setitem(where, name, wrong(where[name]))
        else:
            monkeypatch.setattr(where, name, wrong(getattr(where, name)))

    return plant


def times(factor: float) -> Callable[[Any], Any]:
    return lambda right: lambda *given, **named: right(*given, **named) * factor


def leaves_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading in a pass of its own that draws from the run's random numbers and keeps a gradient."""
    from creditscope.microscope.observer import Observer

    right = Observer.assign

    def assign(self: Any, *given: Any) -> Any:
        for p in self.model.parameters():
            p.data += 1e-7
        return right(self, *given)

    monkeypatch.setattr(Observer, "assign", assign)


def moves_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback that takes a random number."""
    from creditscope.plugins.trl import ScopeCallback

    right = ScopeCallback.on_step_begin

    def begin(self: Any, *given: Any, **named: Any) -> Any:
        torch.rand(1)
        return right(self, *given, **named)

    monkeypatch.setattr(ScopeCallback, "on_step_begin", begin)


def forgets_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume that starts with an empty AdamW."""
    from creditscope.lab import train

    right = train.load_checkpoint
    monkeypatch.setattr(train, "load_checkpoint", lambda *given, **named: empties(given, right(*given, **named)))


def empties(given: tuple[Any, ...], found: Any) -> Any:
    for some in given:
        if isinstance(some, torch.optim.Optimizer):
            some.state.clear()
    return found


def rounds_what_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that keeps seven digits."""
    right = record.Record.append
    monkeypatch.setattr(record.Record, "append", lambda self, step, line: right(
        self, step, {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in line.items()}))


def on(method: str, plant: Plant) -> Plant:
    """The bug, and of the table the one method that shows it."""
    def both(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(formulas, "METHODS", {method: METHODS[method]})
        plant(monkeypatch)

    return both


def wider(method: str, **bounds: float) -> Plant:
    """A bound of one method that stands a tenth too far out, or too far in."""
    return on(method, patched(formulas, "surrogate", lambda right: lambda m, *given: right(
        m.replace(**bounds), *given)))


PLANTS: dict[str, list[Plant]] = {
    "gram/packaged": [scaled_gram],
    "gram/shapes": [scaled_gram],
    "gram/checkpointing": [scaled_gram],
    "gram/float32": [scaled_gram],
    "selfcheck/green": [scaled_gram],
    "selfcheck/red": [blind, patched(scope.Microscope, "require_only", lambda right: lambda self, rollout: None)],
    "sketch/unbiased": [patched(sketches.Sketcher, "_outer", times(1.05))],
    "sketch/error": [patched(sketches.Sketch, "variance", lambda right: property(lambda self: right.fget(self) / 2))],
    "methods/twin": [on("grpo", patched(ratios.BOUNDS, "clip", lambda right: ratios.BOUNDS["none"])),
                     on("dapo", patched(weights.AGGREGATES, "token_mean", times(1.001))),
                     on("grpo", patched(penalties.KL_ESTIMATORS, "k3", times(0.5))),
                     on("grpo", patched(advantages.SCALES, "group_std", times(1.001))),
                     wider("grpo", clip_high=0.22), wider("grpo", clip_high=0.18), wider("grpo", clip_low=0.22),
                     wider("grpo", clip_low=0.18), wider("gspo", clip_high=4.4e-4), wider("gspo", clip_low=2.7e-4),
                     wider("gmpo", clip_high=0.44), wider("gcpo", clip_low=0.22), wider("cispo", clip_high=0.3),
                     wider("grpo_v32", trust_high=0.55), wider("dppo", trust_high=0.135),
                     wider("dppo", trust_low=0.165)],
    "methods/verdicts": [patched(advantages.BASELINES, "leave_one_out", times(1.001))],
    "optimizer/adamw": [patched(formulas, "adamw", times(1.0000001))],
    "optimizer/carry": [patched(formulas, "carry", times(1.0000001))],
    "conformance/trl": [patched(weights.AGGREGATES, "sequence_mean", times(1 + 1e-9))],
    "conformance/verl": [patched(weights.AGGREGATES, "token_mean", times(1 + 1e-7))],
    "conformance/trl live": [patched(advantages.SCALES, "group_std", times(1 + 1e-9))],
    "training/gradient": [scaled_gradient],
    "training/bits": [leaves_a_trace],
    "training/trl bits": [moves_trl],
    "training/resume": [forgets_the_optimizer],
    "record/round trip": [rounds_what_it_saves],
}


@pytest.mark.slow
@pytest.mark.usefixtures("mini_task")
@pytest.mark.parametrize(("name", "plant"), [(name, plant) for name, plants in PLANTS.items() for plant in plants],
                         ids=lambda x: x if isinstance(x, str) else "")
def test_a_planted_bug_turns_its_line_red_and_the_exit_code_to_1(
        name: str, plant: Plant, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if lacking(BY_NAME[name].needs, CPU):
        pytest.skip(f"needs {BY_NAME[name].needs}")
    sketch._drawn.cache_clear()
    NARROW.get(name, lambda _: None)(monkeypatch)
    plant(monkeypatch)
    monkeypatch.setattr(table, "CHECKS", (BY_NAME[name],))
    with pytest.raises(SystemExit) as ended:
        cli.main(["selftest", "--device", "cpu"])
    sketch._drawn.cache_clear()
    printed = capsys.readouterr().out
    assert f"✗ {name}" in printed
    assert ended.value.code == 1


def test_every_check_that_runs_here_has_a_planted_bug() -> None:
    assert PLANTS.keys() | {"gram/bfloat16", "gram/kernels"} == BY_NAME.keys()
