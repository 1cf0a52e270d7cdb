"""The first screen: what was run, the command, how far it is, and that it stands without a script."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from creditscope.diagnosis.engine import SIGNS
from creditscope.report.answers import answers
from creditscope.report.header import facts, first_screen
from creditscope.report.lifetime import how_far
from creditscope.report.run import Run, read_run
from creditscope.runs.config import Config, flags
from creditscope.runs.record import Record

STEP: dict[str, Any] = {"rollouts/spent": 64, "reward/mean": 0.5, "signal/groups": 8, "signal/live_groups": 5,
                        "time/step": 10.0}
END: dict[str, Any] = {"eval/accuracy": 0.5}
VERSIONS = {"creditscope": "0.1.0", "python": "3.12.1", "platform": "Linux", "devices": ["H200"],
            "packages": {"torch": "2.13.0", "transformers": "5.22.0", "trl": None}}


def made(path: Path, lines: list[dict[str, Any]], config: dict[str, Any] | None = None,
         versions: dict[str, Any] | None = None) -> Run:
    with Record.create(path, asdict(Config(steps=3)) if config is None else config, versions or {}) as record:
        for step, line in enumerate(lines):
            record.append(step, line)
    return read_run(path)


# -- the screen -------------------------------------------------------------------------------------------------------


def test_the_four_topics_are_there_as_text_with_sign_word_findings_and_link(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [STEP] * 3)
    html = first_screen(run)
    assert "<script" not in html
    assert html.count('class="answer ') == 4
    for answer in answers(run):
        assert f'data-topic="{answer.topic.lower()}" data-state="{answer.state}"' in html
        assert f">{SIGNS[answer.state]}</span>{answer.state}</p>" in html
        assert answer.rule in html
        assert f'href="#{answer.evidence}"' in html
    assert "5 of 8 groups carry signal" in html


def test_every_text_of_the_record_is_escaped(tmp_path: Path) -> None:
    bad = "<img src=x onerror=alert(1)>"
    config = asdict(Config()) | {"model": bad, "task": bad, "method": bad, "credit": bad, "seed": bad, "optimizer": bad}
    run = made(tmp_path / "run", [STEP], config, {"creditscope": bad, "devices": [bad], "packages": {"torch": bad}})
    run.faults.append(bad)
    html = first_screen(run)
    assert "<img" not in html
    assert html.count("&lt;img src=x onerror=alert(1)&gt;") >= 8


@pytest.mark.parametrize("versions", [{}, {"packages": None}, {"packages": [1], "devices": "H200"}])
@pytest.mark.parametrize("config", [{}, {"method": 3, "steps": "many", "group": None, "also": "salt", "lr": []}])
def test_a_record_that_says_next_to_nothing_has_a_first_screen(
        tmp_path: Path, config: dict[str, Any], versions: dict[str, Any]) -> None:
    html = first_screen(made(tmp_path / "run", [], config, versions))
    assert 'id="diagnosis" data-state="unknown"' in html
    assert html.count('class="answer unknown"') == 4


def test_damaged_parts_are_named_and_only_they(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [STEP])
    assert 'id="faults"' not in first_screen(run)
    run.faults.append("cannot read the readings of step 3")
    assert "<li>cannot read the readings of step 3</li>" in first_screen(run)


# -- the run line -----------------------------------------------------------------------------------------------------


def test_the_run_line_tells_what_was_run_and_with_what(tmp_path: Path) -> None:
    config = asdict(Config(group=4, prompts=16, inner_steps=2, seed=7, steps=1, credit="step_reward"))
    found = facts(made(tmp_path / "run", [STEP, END], config, VERSIONS))
    assert found == {
        "Run": "finished, 1 of 1 steps", "Model": "tiny", "Task": "arithmetic", "Method": "grpo",
        "Credit": "step_reward", "Batch": "R = 4, P = 16, μ = 2", "Optimiser": "adamw, learning rate 3e-05",
        "Seed": "7",
        "Versions": "creditscope 0.1.0, torch 2.13.0, transformers 5.22.0, Python 3.12.1", "Device": "H200, float32"}


def test_a_run_is_finished_by_its_last_evaluation_its_steps_or_its_budget(tmp_path: Path) -> None:
    long = asdict(Config(steps=99))
    assert how_far(made(tmp_path / "a", [STEP, END], long), 0.0) == "finished, 1 of 99 steps"
    assert how_far(made(tmp_path / "b", [STEP] * 3), 0.0) == "finished, 3 of 3 steps"
    assert how_far(made(tmp_path / "c", [STEP] * 2, long | {"rollouts": 128}), 0.0) == "finished, 2 of 99 steps"
    assert how_far(made(tmp_path / "d", [STEP] * 2, long | {"rollouts": 129}), 0.0).startswith("still going")


def test_a_run_whose_last_evaluation_failed_is_not_finished(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [STEP] * 3 + [{"run/stopped": "out of memory"}])
    assert how_far(run, 0.0) == "stopped early, 3 of 3 steps"


def test_a_run_has_stopped_after_ten_of_its_longest_steps_in_silence(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [STEP, STEP | {"time/step": 2.0}])
    os.utime(tmp_path / "run" / "steps.jsonl", (1000.0, 1000.0))
    assert how_far(run, 1100.0) == "still going, 2 of 3 steps"  # 10 · 10 s
    assert how_far(run, 1100.1) == "stopped early, 2 of 3 steps"


def test_an_error_that_ended_the_run_stands_above_the_diagnosis_as_text(tmp_path: Path) -> None:
    bad = "<img src=x>\n" + "e" * 600
    run = made(tmp_path / "run", [STEP, {"run/stopped": bad}])
    assert how_far(run, 0.0) == "stopped early, 1 of 3 steps"
    html = first_screen(run)
    assert f'id="stopped">The run ended early with an error: &lt;img src=x&gt; {"e" * 488} …</p>' in html
    assert html.index('id="stopped"') < html.index('id="diagnosis"')
    resumed = made(tmp_path / "resumed", [STEP, {"run/stopped": bad}, STEP])
    assert 'id="stopped"' not in first_screen(resumed)


def test_a_minute_of_silence_means_nothing(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [])
    os.utime(tmp_path / "run" / "steps.jsonl", (1000.0, 1000.0))
    assert how_far(run, 1060.0) == "still going, 0 of 3 steps"
    assert how_far(run, 1060.1) == "stopped early, 0 of 3 steps"


# -- the row ----------------------------------------------------------------------------------------------------------


def test_the_screen_says_how_the_row_differs_or_that_it_does_not(tmp_path: Path) -> None:
    config = asdict(Config())
    assert "GRPO&#x27;s row of the table, nothing changed" in first_screen(made(tmp_path / "a", [], config))
    assert "DAPO</a> differs from GRPO in keep, denominator, aggregate, clip high, kl." in first_screen(
        made(tmp_path / "b", [], config | {"method": "dapo"}))
    assert "GRPO differs from GRPO in beta" not in first_screen(made(tmp_path / "c", [], config))
    assert "has no method &#x27;from_the_future&#x27;" in first_screen(
        made(tmp_path / "d", [], config | {"method": "from_the_future"}))


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [
    Config(), Config(model="some folder", group=4, lr=1e-4, clip_norm=None, method="dapo"),
    Config(scope="full", also=("salt", "monte_carlo,samples=4"), log=("wandb", "mlflow"), credit="step_reward")])
def test_the_command_of_a_record_is_that_of_its_settings(config: Config) -> None:
    stored = json.loads(json.dumps(asdict(config)))  # tuples come back from a record as lists
    assert flags(stored) == flags(asdict(config))


def test_the_command_gives_the_settings_back() -> None:
    import tyro

    config = Config(group=4, prompts=2, clip_norm=None, beta=0.04, scope="light", also=("salt", "step_reward"),
                    eval_problems=0)
    model, *rest = flags(json.loads(json.dumps(asdict(config))))
    assert tyro.cli(Config, args=["--model", model, *rest]) == config


def test_a_setting_from_another_version_is_left_out_of_the_command() -> None:
    assert flags({"model": "tiny", "warp": 9}) == ["tiny"]


SCRIPT = {"engine": "trl", "trainer": "GRPOTrainer", "method": "trl_dapo", "lr": 0.01,
          "trl": {"optim": "adamw_torch_fused"}}
"""Settings of a record that TRL's callback wrote."""


def test_a_script_of_ones_own_is_told_by_its_trainer_and_no_command_is_made_up(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [STEP], SCRIPT)
    html = first_screen(run)
    assert "Run by your own script with TRL&#x27;s GRPOTrainer; its settings are in run.json." in html
    assert "creditscope lab train" not in html
    assert facts(run)["Optimiser"] == "adamw_torch_fused, learning rate 0.01"


def test_the_command_with_trls_loop_is_a_command(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [STEP], asdict(Config()) | {"engine": "trl"})
    assert "creditscope lab train tiny" in first_screen(run)


def test_an_optimiser_of_which_only_a_part_is_known_is_told_by_that_part(tmp_path: Path) -> None:
    known = ({"lr": 0.01}, {"optimizer": "sgd", "trl": "text"}, {})
    assert [facts(made(tmp_path / str(k), [], config))["Optimiser"] for k, config in enumerate(known)] == [
        "learning rate 0.01", "sgd", ""]


def test_the_command_can_be_pasted_whatever_the_names_are(tmp_path: Path) -> None:
    html = first_screen(made(tmp_path / "run", [], asdict(Config()) | {"model": "my model; rm -rf ~"}))
    assert "creditscope lab train &#x27;my model; rm -rf ~&#x27;" in html
