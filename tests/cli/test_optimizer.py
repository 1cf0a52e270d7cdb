"""`creditscope inspect` on records made by hand: every number on the screen is one that was put in."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cli
from creditscope import Record
from creditscope.optimizer.table import BRAKES
from each import each

STEPS = 5
SWEEP = {"phi": np.array([0.001, 0.1, 1.0]), "change": np.array([0.5, 0.25, 0.0]),
         "cosine": np.array([0.75, np.nan, 1.0]), "layer_names": np.array(["h.0.[bold]attn", "h.1.mlp"]),
         "layer_change": np.array([[0.5, 0.125, 0.0], [0.875, 0.25, 0.0]]),
         "layer_cosine": np.array([[0.5, 0.5, 1.0], [0.5, 0.5, 1.0]]), "layer_ratio": np.array([3e-4, 1e-5])}


def line(step: int) -> dict[str, float]:
    """Means over five steps, d = −0.02 .. 0.02: past 0.02·k, distance 0.04·k, after 0.2·k − 0.1, KL 0.001·k."""
    d = 0.01 * (step - 2)
    out = {"optimizer/overshoot": 0.005, "overshoot/past": 0.06, "overshoot/max": 1.0 + step, "overshoot/carry": 0.7,
           "overshoot/carry_predicted": 0.68, "overshoot/by_momentum": 0.75, "overshoot/by_fresh": 0.25,
           "optimizer/scale_change": 0.003, "update/cosine": 0.25, "update/ratio": 1e-5, "update/momentum": 0.625,
           "update/zero": 0.0, "update/zero_bf16": 0.375, "reward/mean": 0.1 * step, "objective/value": 0.5 * step}
    for k in (1, 2, 3):
        out |= {f"overshoot/{k}/past": 0.02 * k + d, f"overshoot/{k}/distance": 0.04 * k,
                f"overshoot/{k}/after": 0.2 * k - 0.1, f"overshoot/{k}/kl": 0.001 * k}
    return out


def make_run(path: Path, config: dict[str, Any] | None = None, change: dict[str, Any] | None = None,
             sweep: dict[str, Any] | None = SWEEP) -> str:
    """A run of five steps; a changed value of None leaves the key out."""
    with Record.create(path, {"method": "dapo", "beta": None} | (config or {}), {}) as record:
        for step in range(STEPS):
            values = line(step) | (change or {})
            record.append(step, {key: value for key, value in values.items() if value is not None})
        if sweep is not None:
            record.save_optimizer(3, sweep)
    return str(path)


BARE = dict.fromkeys(line(0))
"""Nothing at all is written."""


run = partial(cli.run, "inspect")


def data(capsys: pytest.CaptureFixture[str], *args: object) -> Any:
    return cli.run_json(capsys, "inspect", *args)


def test_the_list_of_brakes_names_each_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("list", "brakes") == 0
    said = capsys.readouterr().out
    for row in BRAKES.values():
        assert row.title in said
        assert all(f"{name}={option.default}" in said for name, option in row.options.items())
    assert [row["name"] for row in cli.run_json(capsys, "list", "brakes")["brakes"]] == list(BRAKES)
    (one,) = cli.run_json(capsys, "list", "brakes", "shorten")["brakes"]
    assert one["name"] == "shorten"
    assert cli.run("list", "brakes", "shrten") == 2
    assert "unknown brake 'shrten'; did you mean 'shorten'?" in capsys.readouterr().err


def test_the_data_are_means_over_steps_with_student_s_interval(tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = data(capsys, make_run(tmp_path / "a"))["runs"]
    past = found["by_update"]["3"]["past"]
    # s² = (4 + 1 + 0 + 1 + 4)·1e-4/4, so half = t_4·s/√5 = 2.7764·√(2.5e-4/5).
    assert past["mean"] == pytest.approx(0.06, abs=1e-12)
    assert past["high"] - past["mean"] == pytest.approx(2.7764 * (2.5e-4 / 5) ** 0.5, abs=1e-12)
    assert past["n"] == 5
    assert list(found["by_update"]) == ["1", "2", "3"]
    assert found["furthest"] == 5.0
    assert found["overshoot"]["carry"]["mean"] == pytest.approx(0.7)
    assert found["scale_change"]["mean"] == pytest.approx(0.003)
    assert set(found["update"]) == {"cosine", "ratio", "momentum", "zero", "zero_bf16"}
    assert (found["sweep"]["step"], found["sweep"]["phi"]) == (3, [0.001, 0.1, 1.0])
    assert found["sweep"]["cosine"] == [0.75, None, 1.0]  # what was not defined is absent, not 0
    assert found["sweep"]["layers"]["h.1.mlp"] == {"change": [0.875, 0.25, 0.0], "cosine": [0.5, 0.5, 1.0],
                                                   "ratio": [1e-5]}
    assert found["progress"]["r"] == pytest.approx(1.0)
    assert found["law"]["kind"] == "length"
    assert found["thresholds"]["held"] == 0.01


def test_the_screen_says_each_block_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(make_run(tmp_path / "a"), "--why") == 0
    out = capsys.readouterr().out
    for text in (
        "After 3 updates 6.0 % of tokens are past the bound, by 0.12 nats on average; 50 % of that was moved after "
        "their own gradient had stopped.",
        "The carry is 0.70 where momentum alone predicts 0.68: within 10 %.",
        "furthest token 5 nats", "growth by momentum 0.75", "by fresh gradients 0.25",
        "reward scale, at step 3", "over φ, is in h.1.mlp: 0.875",
        "Credit a tenth as large would have changed the update by 0.30 %, less than 5 %: the optimiser is blind to",
        "largest in h.0.[bold]attn: 0.0003",
        "cosine with the downhill gradient is 0.25, below 0.5", "62 % of it comes from momentum.",
        "In bfloat16 38 % of the weights would not move",
        "at ratio 1 J = Σ_i A_i·L_i/ΣL", "In this run J rose and fell with the reward: r = 1.00",
        "95 % t-interval of a mean over the run's steps", "Next: creditscope list brakes",
    ):
        assert text in out.replace("\n", " ").replace("  ", " ") or text in out, text


@pytest.mark.slow
@each(("change", "block", "words"), [
    ({"overshoot/3/past": 0.004}, "overshoot", "0.40 % of tokens are past the bound, less than 1 %: the bound holds."),
    ({"overshoot/3/distance": None, "overshoot/3/after": None}, "overshoot", "6.0 % of tokens are past the bound. The"),
    ({"overshoot/carry": 0.9}, "overshoot", "predicts 0.68: apart by more than 10 %."),
    ({"optimizer/scale_change": 0.2}, "scale", "between 5 % and 50 %"),
    ({"optimizer/scale_change": 0.9}, "scale", "90.00 %, more than 50 %: the update follows the size of the credit."),
    ({"update/cosine": 0.75}, "update", "0.75, at least 0.5: it goes where this batch points."),
    ({"update/cosine": None, "update/zero_bf16": 0.05}, "update", "62 % of it comes from momentum."),
    ({"objective/value": 1e-9}, "progress", "J stayed within 1e-06 of 0."),
    ({"objective/value": 0.5}, "progress", "J or the reward did not vary over 5 steps."),
    ({"objective/value": None}, "progress", "The loss at ratio 1 says whether good answers are longer than bad ones"),
])
def test_verdicts_turn_where_they_say(change: dict[str, Any], block: str, words: str, tmp_path: Path,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = data(capsys, make_run(tmp_path / "a", change=change))["runs"]
    assert words in found["verdicts"][block]


@pytest.mark.parametrize(("values", "words"), [
    ((4, 3, 2, 1, 0), "In this run J went against the reward: r = -1.00"),
    # x − 2 against 1, −2, 0, 2, −1: Σ = −2 + 2 + 0 + 2 − 2 = 0.
    ((1, -2, 0, 2, -1), "J says little of the reward: r = 0.00, its interval holds 0."),
])
def test_r_is_called_what_it_is(values: tuple[float, ...], words: str, tmp_path: Path,
                                capsys: pytest.CaptureFixture[str]) -> None:
    with Record.create(tmp_path / "a", {"method": "dr_grpo"}, {}) as record:
        for step, value in enumerate(values):
            record.append(step, {"objective/value": float(value), "reward/mean": float(step)})
    (found,) = data(capsys, str(tmp_path / "a"))["runs"]
    assert found["verdicts"]["progress"].startswith(words)


def test_three_steps_are_too_few_for_r(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Record.create(tmp_path / "a", {"method": "dr_grpo"}, {}) as record:
        for step in range(3):
            record.append(step, {"objective/value": float(step), "reward/mean": float(step)})
    (found,) = data(capsys, str(tmp_path / "a"))["runs"]
    assert found["verdicts"]["progress"].startswith("3 steps are too few")


@pytest.mark.slow
@each(("config", "kind", "formula"), [
    ({"method": "grpo"}, "zero", "J = 0"),
    ({"method": "grpo", "beta": 0.04}, "penalty", "J = − 0.04·K3"),
    ({"method": "grpo", "beta": 0.5}, "penalty", "J = − 0.5·K3"),
    ({"method": "dr_grpo", "beta": 0.5}, "length", "J = Σ_i A_i·L_i/(B·L_max) − 0.5·K3"),
    ({"method": "dapo", "beta": 0.0}, "length", "J = Σ_i A_i·L_i/ΣL"),
    ({"method": "grpo", "credit": "outcome"}, "zero", "J = 0"),
    ({"method": "dapo", "credit": "salt"}, "outside", "J = Σ_it 1/ΣL · 1{group not unanimous} · A_it"),
    ({"method": "grpo", "credit": "gae"}, "outside", "J = Σ_it 1/(B·L_i) · A_it"),
    ({"method": "reinforce_pp", "credit": "gae"}, "outside", "J = Σ_it 1/ΣL · A_it"),
    ({"method": "trl_dapo"}, "length", "J = Σ_i A_i·L_i/ΣL"),
])
def test_the_law_is_the_run_s_own(config: dict[str, Any], kind: str, formula: str, tmp_path: Path,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = data(capsys, make_run(tmp_path / "a", config))["runs"]
    assert (found["law"]["kind"], found["law"]["formula"]) == (kind, formula)


@pytest.mark.parametrize("method", ["my_own", None, {"name": "grpo"}])
def test_a_method_that_is_not_in_the_table_has_no_law(method: Any, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = data(capsys, make_run(tmp_path / "a", {"method": method}))["runs"]
    assert found["law"] is None
    assert run(found["run"]) == 0


def test_what_was_not_measured_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = make_run(tmp_path / "a", change=BARE | {"objective/value": 0.5, "reward/mean": 0.25}, sweep=None)
    (found,) = data(capsys, only)["runs"]
    assert (found["overshoot"], found["by_update"], found["scale_change"], found["sweep"], found["update"],
            found["furthest"]) == ({}, {}, None, None, {}, None)
    assert set(found["verdicts"]) == {"progress"}
    assert run(only) == 0
    out = capsys.readouterr().out
    for word in ("overshoot", "φ", "carry", "momentum"):
        assert word not in out
    assert "Next: creditscope lab train --inner-steps 4 --probe light" in out


def test_the_last_sight_stands_for_the_updates_where_they_were_not_told_apart(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = {"overshoot/past": 0.06, "overshoot/distance": 0.5, "overshoot/after": 0.25}
    path = make_run(tmp_path / "a", change=BARE | whole, sweep=None)
    assert run(path) == 0
    assert "After the last update 6.0 % of tokens are past the bound, by 0.5 nats" in capsys.readouterr().out


def test_the_meaning_of_the_numbers_is_printed_when_it_is_asked_for(tmp_path: Path,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "a")
    for flags, there in (((), False), (("--why",), True)):
        assert run(path, *flags) == 0
        out = capsys.readouterr().out
        assert ("share of a full step that a token still makes" in out) is there
        assert ("95 % t-interval of a mean" in out) is there
        assert ("Next: the same with --why, for the meaning of each number" in out) is not there


def test_several_runs_stand_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [make_run(tmp_path / "a"), make_run(tmp_path / "b", {"method": "grpo"}, {"overshoot/3/past": 0.25})]
    assert [one["method"] for one in data(capsys, *paths)["runs"]] == ["dapo", "grpo"]
    assert run(*paths) == 0
    rows = {line.split("  ")[0].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert "dapo" in rows["method"]
    assert "grpo" in rows["method"]
    assert rows["inner updates"].split()[-2:] == ["3", "3"]
    assert "6.0 % [" in rows["past the bound"]
    assert "25.0 % [25.0, 25.0]" in rows["past the bound"]
    assert f"Next: creditscope inspect {paths[0]}" in rows


# -- what others may have written -------------------------------------------------------------------------------------


def test_a_run_that_is_not_there_and_one_without_a_reading_say_what_to_do(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path / "nowhere")) == 2
    assert "nowhere does not exist; name a file of rollouts, a folder of them, or a run" in capsys.readouterr().err
    assert run(make_run(tmp_path / "a", change=BARE, sweep=None)) == 2
    err = capsys.readouterr().err
    assert "holds no reading of the optimiser; train with --inner-steps 4 --probe light" in err
    assert len(err.splitlines()) == 1


@pytest.mark.slow
@each("value", ["0.5", "[red]", True, 1e200, [1.0], {"a": 1}])
@each("key", ["overshoot/past", "overshoot/2/after", "update/cosine", "overshoot/max"])
def test_a_value_that_is_no_number_is_refused_by_name(key: str, value: Any, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    assert run(make_run(tmp_path / "a", change={key: value})) == 2
    err = capsys.readouterr().err
    assert f"step 0: {key} is " in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("literal", "words"), [
    ("NaN", "step 5: update/ratio is "), ("-Infinity", "step 5: update/ratio is "), ("1" + "0" * 400, "not a step")])
def test_a_number_that_json_should_not_hold_is_refused(literal: str, words: str, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(make_run(tmp_path / "a"))
    with (path / "steps.jsonl").open("a") as out:
        out.write(f'{{"step": 5, "update/ratio": {literal}}}\n')
    assert run(str(path)) == 2
    assert words in capsys.readouterr().err


@each(("change", "words"), [
    ({"phi": None}, "phi is not there"),
    ({"phi": np.ones((2, 2))}, "phi is float64 of shape (2, 2)"),
    ({"phi": np.ones(33)}, "not 1 to 32 numbers"),
    ({"change": np.ones(2)}, "change is float64 of shape (2,), not numbers of shape (3,)"),
    ({"cosine": np.array(["a", "b", "c"])}, "cosine is <U1 of shape (3,)"),
    ({"change": None}, "change is not there"),
    ({"layer_names": np.ones(2)}, "layer_names is float64"),
    ({"layer_change": np.ones((3, 3))}, "layer_change is float64 of shape (3, 3), not numbers of shape (2, 3)"),
])
def test_a_reading_of_another_shape_is_refused(change: dict[str, Any], words: str, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    arrays = {name: value for name, value in (SWEEP | change).items() if value is not None}
    assert run(make_run(tmp_path / "a", sweep=arrays)) == 2
    err = capsys.readouterr().err
    assert "optimizer/000003.npz" in err
    assert words in err


@pytest.mark.parametrize(("part", "values", "words"), [
    ("layer_change", [[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]], "over φ, is in h.1.mlp: 0.75"),
    ("layer_change", [[0.5, 0.5, 0.0], [np.nan, np.inf, 0.0]], "over φ, is in h.0.[bold]attn: 0.5"),
    ("layer_ratio", [1e-5, 2e-3], "largest in h.1.mlp: 0.002"),
])
def test_the_layer_that_changes_most_is_named(part: str, values: list[Any], words: str, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    assert run(make_run(tmp_path / "a", sweep=SWEEP | {part: np.array(values)})) == 0
    assert words in capsys.readouterr().out.replace("\n", " ")


def test_a_reading_without_layers_is_shown_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = {name: SWEEP[name] for name in ("phi", "change", "cosine")}
    assert run(make_run(tmp_path / "a", sweep=bare)) == 0
    out = capsys.readouterr().out
    assert "reward scale, at step 3" in out
    assert "most in" not in out


def test_text_from_a_record_neither_moves_the_cursor_nor_sets_markup(tmp_path: Path,
                                                                     capsys: pytest.CaptureFixture[str]) -> None:
    names = np.array(["\x1b[2Jevil[/]", "[bold]x" * 99])
    path = make_run(tmp_path / "[b]run", {"method": "\x1b]0;gotcha[/red]"}, sweep=SWEEP | {"layer_names": names})
    assert run(path) == 0
    assert run(path, path) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[2Jevil[/]" in out
    assert "[b]run" in out


def test_a_beta_that_no_method_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, beta in enumerate(("much", -1.0)):
        assert run(make_run(tmp_path / str(number), {"method": "grpo", "beta": beta})) == 2
        assert "beta" in capsys.readouterr().err


# -- the carry --------------------------------------------------------------------------------------------------------


def test_the_carry_is_p2_s_table(capsys: pytest.CaptureFixture[str]) -> None:
    found = cli.run_json(capsys, "papers", "carry", "--betas", "0.9", "0.95")
    # Eq. 36 at T = 2, k = 0: 0.9·0.1/0.19 · √(1.95/0.95).
    assert found["steps"]["2"][0] == pytest.approx(0.9 * 0.1 / 0.19 * (1.95 / 0.95) ** 0.5, abs=1e-12)
    assert round(found["steps"]["10"][0], 4) == 0.9047
    assert round(found["steps"]["50"][4], 4) == 0.6763
    assert found["limit"] == pytest.approx([(0.9 / 0.95**0.5) ** (k + 1) for k in range(5)], abs=1e-12)
    assert found["steps"]["1000"] == pytest.approx(found["limit"], abs=1e-12)
    assert cli.run("papers", "carry") == 0
    out = capsys.readouterr().out
    assert "β₁ = 0.9, β₂ = 0.999" in out
    assert f"{0.9 / 0.999**0.5:.4f}" in out


@pytest.mark.parametrize("betas", [("1.0", "0.9"), ("0.9", "0"), ("nan", "0.9"), ("0.9", "1e-300")])
def test_betas_that_adam_cannot_have_are_refused_in_words(betas: tuple[str, str],
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("papers", "carry", "--betas", *betas) == 2
    assert "β" in capsys.readouterr().err


@pytest.mark.slow
def test_reading_a_run_loads_no_torch(tmp_path: Path) -> None:
    code = ("import sys; from creditscope.cli.main import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
            "sys.exit('torch' in sys.modules)")
    command = [sys.executable, "-c", code, "inspect", make_run(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "After 3 updates" in done.stdout


@pytest.mark.parametrize(("rows", "rank"), [
    (np.eye(16)[:4], 4.0),  # four orthogonal updates
    (np.ones((4, 16)), 1.0),  # the same one four times
    (np.diag([3.0, 1.0])[:, :2].repeat(2, axis=1), 16 / 10)])  # σ = 3√2 and √2: (4√2)²/20
def test_the_path_of_updates_has_the_rank_of_its_rows(rows: Any, rank: float, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "run", sweep=None)
    with Record.resume(path, Record.open(path).config) as record:
        for step, row in enumerate(rows):
            record.save_optimizer(step, {"path_update": row})
    assert data(capsys, path)["runs"][0]["path"] == [pytest.approx(rank), len(rows)]
    assert run(path) == 0
    assert f"effective rank of the path {rank:.3g} of {len(rows)} updates" in " ".join(capsys.readouterr().out.split())


def test_one_update_is_no_path_and_a_list_of_words_is_refused(tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "run", sweep={"path_update": np.ones(16)})
    assert data(capsys, path)["runs"][0]["path"] is None
    path = make_run(tmp_path / "words", sweep={"path_update": np.array(["a"])})
    with Record.resume(path, Record.open(path).config) as record:
        record.save_optimizer(4, {"path_update": np.array(["b"])})
    assert run(path) == 2
    assert "path_update is not the same kind of list" in capsys.readouterr().err
