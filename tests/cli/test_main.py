"""The command line as a user meets it: exit codes, JSON, errors without tracebacks."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import creditscope.cli
from cli import run
from creditscope import METHODS
from creditscope.cli.commands import COMMANDS
from creditscope.cli.credits import example
from creditscope.cli.train import Train, TrainFlags
from creditscope.credit import ESTIMATORS, find_estimator
from creditscope.runs.config import Config
from creditscope.runs.record import Record

VERBS = Path(creditscope.cli.__file__).parent


def test_methods_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "methods") == 0
    out = capsys.readouterr().out
    for name in METHODS:
        assert name in out


def test_methods_json_is_the_table_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "methods", "--json") == 0
    table = json.loads(capsys.readouterr().out)
    assert set(table) == set(METHODS)
    assert table["dr_grpo"]["diff"] == {"scale": ["group_std", "none"], "aggregate": ["sequence_mean", "constant"]}
    assert table["dr_grpo"]["properties"]["prefix_cancels"] is True


def test_one_method_shows_equation_diff_citations_and_properties(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "methods", "dapo") == 0
    out = capsys.readouterr().out
    for text in ("min(ρ_it·A_i, clip(ρ_it, 0.8, 1.28)·A_i)", "differs from grpo", "clip_high: 0.2 → 0.28", "2503.14476",
                 "keep: Eq. 8: s.t. 0 < correct < G", "prefix_cancels: yes"):
        assert text in out


def test_a_method_says_of_which_term_its_properties_are(capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (("grpo", "of the policy term alone, without KL, at ratio 1"), ("dpo", "of the preference term"),
                        ("cpo", "of the preference term alone, without the supervised term"),
                        ("orpo", "of the preference term alone, without the supervised term")):
        assert run("list", "methods", name) == 0
        assert f"properties ({words}; measured by the tests)" in " ".join(capsys.readouterr().out.split())
        assert run("list", "methods", name, "--json") == 0
        assert json.loads(capsys.readouterr().out)["properties_of"] == words


def test_a_method_says_what_its_loss_shows_before_anything_has_moved(capsys: pytest.CaptureFixture[str]) -> None:
    for name, formula, words in (("grpo", "J = 0", "A loss of 0 is what this method shows at ratio 1"),
                                 ("dapo", "J = Σ_i A_i·L_i/ΣL", "good answers are longer than bad ones"),
                                 ("cispo", "J = Σ_it 1/ΣL · A_i·log π_it", "how likely good and bad answers are")):
        assert run("list", "methods", name) == 0
        out = capsys.readouterr().out
        assert f"at ratio 1  {formula}\n" in out
        assert words in out
        assert run("list", "methods", name, "--json") == 0
        law = json.loads(capsys.readouterr().out)["at_ratio_one"]
        assert law["formula"] == formula
        assert words in law["sentence"]


def test_dialects_are_listed_and_found_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "methods", "--dialects", "--json") == 0
    assert "trl_cispo" in json.loads(capsys.readouterr().out)
    assert run("list", "methods", "verl_gspo", "--json") == 0
    assert json.loads(capsys.readouterr().out)["parent"] == "gspo_token"


def test_an_unknown_method_is_exit_code_2_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "methods", "grop") == 2
    err = capsys.readouterr().err
    assert "unknown method 'grop'; did you mean 'grpo'?" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_credit_lists_every_estimator_without_loading_torch() -> None:
    code = ("import sys; from creditscope.cli.main import run\nassert run(['list', 'credits']) == 0\n"
            "sys.exit('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for name in ESTIMATORS:
        assert name in done.stdout


def test_credit_json_is_the_list_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "credits", "--json") == 0
    table = json.loads(capsys.readouterr().out)
    assert set(table) == set(ESTIMATORS)
    assert table["gae"]["needs"] == ["critic"]


def test_one_estimator_shows_its_options_and_a_command_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "credits", "monte_carlo") == 0
    out = capsys.readouterr().out
    for text in ("A_it = V(next cut) − V(cut before t)", "option  samples=4   K, continuations at each cut",
                 "arXiv:2410.01679", "docs/credit.md",
                 "creditscope lab train --credit monte_carlo,samples=4"):
        assert text in out
    assert run("list", "credits", "gae", "--json") == 0
    assert json.loads(capsys.readouterr().out)["options"]["lam"]["default"] == 1.0


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_the_example_of_every_estimator_is_a_spec_that_is_found(name: str) -> None:
    words = example(ESTIMATORS[name]).split()
    assert find_estimator(words[words.index("--credit") + 1]).row.name == name


def test_an_unknown_estimator_is_exit_code_2_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "credits", "gea") == 2
    assert "unknown credit 'gea'; did you mean 'gae'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", [" ".join(words) for words in COMMANDS])
def test_the_help_of_every_command_has_commands_to_copy(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*name.split(), "--help") == 0
    assert re.search(rf"^ +creditscope {name}\b", capsys.readouterr().out, re.MULTILINE)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("creditscope 0.")


@pytest.mark.slow
def test_an_unknown_verb_and_an_unknown_flag_are_exit_code_2() -> None:
    assert run("methds") == 2
    assert run("list", "methods", "--jsn") == 2


ROW = {"tokens": [1, 2], "logp": [-0.5, -0.25], "reward": 1.0, "group": 0}


def rollouts_file(path: Path, *rows: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_scope_reads_signal_and_credit_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dead = [ROW | {"group": g} for g in (1, 1, 2, 2)]
    rows = [ROW, ROW | {"reward": 0.0, "tokens": [1], "logp": [-1.0]}, *dead]
    assert run("inspect", rollouts_file(tmp_path / "r.jsonl", *rows), "--method", "dr_grpo", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rollouts"], facts["signal/groups"], facts["signal/live_groups"]) == (6, 3, 1)
    # w = ±½/(6·2) on 2 and 1 tokens of the live group, 0 on the 8 of the dead ones.
    assert facts["w/zero"] == pytest.approx(8 / 11)
    assert facts["w/positive_mass"] == pytest.approx(2 / 3)


def test_scope_takes_step_labels_from_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Both answers are wrong, so their outcome carries nothing. Steps of one token: 1, 0 and 0, 0; their mean is ¼.
    rows = [ROW | {"reward": 0.0, "step": [0, 1], "step_reward": labels} for labels in ([1.0, 0.0], [0.0, 0.0])]
    file = rollouts_file(tmp_path / "labelled.jsonl", *rows)
    assert run("inspect", file, "--method", "dr_grpo", "--json") == 0
    assert "w/positive_mass" not in json.loads(capsys.readouterr().out)
    assert run("inspect", file, "--method", "dr_grpo", "--credit", "step_reward", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    # Credit ¾, −¼, −¼, −¼: half of its mass is positive. Within the rows: (½² + ½²) of ¾² + 3·¼².
    assert facts["w/positive_mass"] == pytest.approx(0.5)
    assert facts["credit/within"] == pytest.approx(0.5 / 0.75)
    assert (facts["credit/dead_groups"], facts["signal/dead_groups"]) == (0.0, 1.0)


@pytest.mark.parametrize(("credit", "message"), [
    ("step_reward", "credit 'step_reward' needs step labels, and these rollouts have none"),
    ("monte_carlo", "neither steps nor pieces"),
    ("salt", "needs a backward pass under the microscope, and there is none here"),
    ("optimal_token", "credit 'optimal_token' needs collision but the rollouts have none"),
    ("sallt", "unknown credit 'sallt'; did you mean 'salt'"),
])
def test_credit_that_a_file_cannot_give_is_exit_code_2_in_words(credit: str, message: str, tmp_path: Path,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    file = rollouts_file(tmp_path / "r.jsonl", ROW, ROW | {"reward": 0.0})
    assert run("inspect", file, "--credit", credit) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "message"), [
    ([ROW | {"step": [0, 2], "step_reward": [1.0, 0.0]}] * 2, "line 1: 'step' names step 2, but 'step_reward' has 2"),
    ([ROW, ROW | {"group": 1}, ROW], "group 1 has one rollout"),
    ([ROW | {"mask": [False, False]}] * 2, "mask is False everywhere"),
    ([ROW, ROW | {"reward": float("nan")}], "line 2: not valid JSON: NaN is not allowed"),
    ([ROW, ROW | {"logp": [-0.5]}], "line 2: 'logp' has 1 entries for 2 tokens"),
    ([ROW, ROW | {"logp": [-0.5, 0.25]}], "r.jsonl, line 2: logp[1] is 0.25, and a log-probability is at most 0"),
    ([ROW | {"ref_logp": [0.5, -0.5]}] * 2, "r.jsonl, line 1: ref_logp[0] is 0.5, and a log-probability is at most 0"),
    ([ROW | {"entropy": [1.0, -0.25]}] * 2, "line 1: entropy[1] is -0.25, and an entropy is at least 0"),
    ([ROW | {"collision": [0.5, 1.5]}] * 2, "line 1: collision[1] is 1.5, and Σ π² lies between 0 and 1"),
])
def test_a_bad_file_is_exit_code_2_in_words(rows: list[dict[str, object]], message: str, tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", rollouts_file(tmp_path / "r.jsonl", *rows)) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_scope_takes_a_log_prob_just_above_0_for_rounding_and_any_number_on_text_of_others(tmp_path: Path) -> None:
    # float32 numbers near 100, as logits may be, are 8e-6 apart.
    rows = [ROW | {"logp": [1e-5, -0.5]}, ROW | {"logp": [3.0, -0.5], "mask": [False, True], "reward": 0.0}]
    assert run("inspect", rollouts_file(tmp_path / "r.jsonl", *rows)) == 0


@pytest.mark.parametrize(("text", "message"), [
    ('"reward": 0, "reward": 1', "r.jsonl, line 2: not valid JSON: 'reward' stands twice in one object; keep one"),
    ('"reward": 0, "note": [{"a": 1, "a": 2}]', "line 2: not valid JSON: 'a' stands twice in one object"),
])
def test_a_name_that_stands_twice_is_refused_with_its_line(text: str, message: str, tmp_path: Path,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(f'{json.dumps(ROW)}\n{{"tokens": [1], "logp": [-0.5], "group": 0, {text}}}\n')
    assert run("inspect", str(file)) == 2
    assert message in capsys.readouterr().err


HOSTILE = "my run $(touch x); 'y' [bold] " + "and a long name " * 11
"""A folder's name that a shell would run, and longer than a line of output."""


@pytest.mark.slow
def test_the_next_line_of_every_verb_is_one_command_whatever_the_path(tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch,
                                                                      capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [ROW | {"prompt": "a", "text": "b", "reward": float(i % 2)} for i in range(4)]
    file, mine = rollouts_file(tmp_path / f"{HOSTILE}.jsonl", *rows), f"{HOSTILE}2"

    def following(*args: str) -> list[str]:
        assert run(*args) == 0
        line = capsys.readouterr().out.splitlines()[-1]
        assert line.startswith("Next: ")
        return shlex.split(line.removeprefix("Next: ").removeprefix("the same with --open, or "))

    small = ("--steps", "1", "--prompts", "1", "--group", "2", "--max-tokens", "2", "--eval-problems", "0")
    assert following("inspect", file, "--out", HOSTILE) == ["creditscope", "report", HOSTILE]
    assert following("inspect", "--prefix", file) == [
        "creditscope", "inspect", file, "--prefix", "--method", "grpo"]
    assert following("report", HOSTILE, "--out", "page.html") == ["creditscope", "papers", "check", HOSTILE]
    for seed, out in enumerate((mine, "other")):
        assert following("lab", "train", *small, "--seed", str(seed), "--inner-steps", "2", "--out", out) == [
            "creditscope", "report", out]
    assert following("inspect", mine, "other") == ["creditscope", "inspect", mine]
    go_on = Train(config=TrainFlags(credit="mine:f"))._go_on(Path(mine))
    assert shlex.split(go_on) == ["creditscope", "lab", "train", "--out", mine, "--resume", "--credit",
                                   "mine:f"]


def test_verbs_print_the_next_line_in_one_place() -> None:
    assert [path.name for path in VERBS.glob("*.py") if '"Next: ' in path.read_text()] == ["output.py"]


def test_env_names_versions_and_no_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("env", "--json") == 0
    out = capsys.readouterr().out
    assert json.loads(out)["packages"]["torch"]
    assert "/" not in out.replace("CPU/", "")


def test_the_table_of_methods_is_shown_without_torch() -> None:
    code = ("import sys; from creditscope.cli.main import run\n"
            "assert run(['list', 'methods']) == run(['list', 'methods', 'dapo']) == 0\n"
            "sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_a_flag_of_resume_is_compared_with_the_run_and_not_with_the_defaults(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    Record.create(tmp_path / "run", asdict(Config(method="dpo", pairs="mine.jsonl"))).close()
    assert run("lab", "train", "--out", tmp_path / "run", "--resume", "--pairs", "other.jsonl") == 2
    assert "other.jsonl: no such file" in capsys.readouterr().err  # and not that GRPO takes no pairs
    assert run("lab", "train", "--resume", "--pairs", "mine.jsonl") == 2  # without --out nothing says which run
    assert "method 'grpo' learns from sampled answers" in capsys.readouterr().err
    words = ("lab", "train", "--resume", f"--out={tmp_path / 'run'}", "--pairs", "mine.jsonl", "--method", "grpo")
    assert run(*words) == 2
    assert "method 'grpo' learns from sampled answers" in capsys.readouterr().err


def test_a_function_of_ones_own_is_given_again_beside_flags_that_fit_the_run_alone(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = asdict(Config(scope="light", also=("mine:f",))) | {"log": []}
    Record.create(tmp_path / "run", config).close()
    words = ("lab", "train", "--out", tmp_path / "run", "--resume", "--also", "mine:f")  # without --scope, as recorded
    assert run(*words) == 2
    assert "mine" in (said := capsys.readouterr().err)
    assert "give --also again" not in said


def test_resume_of_another_command_is_told_by_its_own_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.jsonl").write_text("{}\n")
    words = ("inspect", tmp_path / "r.jsonl", "--temperature", "0", "--out", tmp_path / "m")
    assert run(*words) == run(*words, "--resume") == 2
    first, second = capsys.readouterr().err.strip().splitlines()
    assert first == second


@pytest.mark.parametrize(("name", "why"), [("x" * 300, "File name too long"), ("file/run", "Not a directory")])
def test_a_run_folder_that_cannot_be_made_is_refused_before_the_model_is_loaded(
        name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("creditscope.lab.train.load_policy", lambda *_, **__: pytest.fail("the model was loaded"))
    (tmp_path / "file").touch()
    assert run("lab", "train", "--out", tmp_path / name) == 2
    assert f"{why}; choose another --out" in capsys.readouterr().err
