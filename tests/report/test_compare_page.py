"""Several runs on one page: which belong together, their means and intervals, and what is said where there are none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from creditscope.claims.evidence import read_evidence, to_json
from creditscope.errors import CreditscopeError
from creditscope.files.markup import escape
from creditscope.report import compare, rewards, settings, standing
from creditscope.report.page import page
from creditscope.report.run import read_run
from creditscope.runs.record import Record
from report import records

CONFIG = {"model": "tiny", "task": "arithmetic", "method": "p1_grpo", "credit": None, "group": 2, "prompts": 4,
          "steps": 4, "lr": 1e-4, "seed": 0, "scope": "light", "every": 2}


def write(path: Path, x: float = 1.0, steps: int = 4, accuracy: float = 0.5, **settings: Any) -> Path:
    """A run with two evaluations, and readings of the steps 0 and 2: two rows of norms 1 and x, orthogonal.

    σ = (1, x), so r_eff = (1 + x)²/(1 + x²): 2 for x = 1, 1.6 for x = 1/3, 1 for x = 0.
    """
    config = CONFIG | settings
    reading = {"group": np.array([0, 0]), "reward": np.array([1.0, 0.0]), "gram": np.diag([1.0, x * x]),
               "row_w": np.array([0.5, -0.5]), "eps": np.array(1e-12)}
    line = {"rollouts/spent": 4 * config["group"], "reward/mean": 0.5, "signal/dead_groups": 0.25, "entropy/mean": 0.1,
            "length/mean": 9.0}
    lines = [line | {"step": step} | ({"eval/accuracy": 0.25} if step == 0 else {}) for step in range(steps)]
    lines.append({"step": steps, "eval/accuracy": accuracy})
    with Record.create(path, config, {"creditscope": "0.1.0"}) as record:
        for step in range(0, min(steps, 4), 2):
            record.save_reading(step, reading)
    (path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))  # without a sync for each
    return path


def rows_of(html: str, table: str) -> list[list[str]]:
    """The cells of a table's body, as text."""
    body = html.split(f'id="{table}"')[1].split("<tbody>")[1].split("</tbody>")[0]
    return [[re.sub("<[^>]+>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)]
            for row in body.split("</tr>")[:-1]]


def chart(several: settings.Several, name: str) -> dict[str, Any]:
    data = compare.sections(several)[0].data
    assert data is not None
    return next(found for found in data["charts"] if found["name"] == name)


def test_runs_that_differ_in_the_seed_alone_are_one_setting_with_its_t_interval(tmp_path: Path) -> None:
    for seed, x in enumerate((1.0, 1 / 3, 0.0)):
        write(tmp_path / f"seed-{seed}", x, seed=seed)
    several = settings.read([tmp_path])
    # ranks 2, 1.6, 1: mean 4.6/3 = 1.5333; deviations .4667, .0667, −.5333, s² = .50667/2, s = .50332;
    # half = t · s/√3 = 4.3027 · .50332/1.73205 = 1.25034: [0.2830, 2.7837]
    html = compare.sections(several)[0].html()
    assert len(several.settings) == 1
    assert "1.53 [0.28, 2.78]" in html
    first = chart(several, "rank")["rows"][0]
    assert first | {"null": 2.0} == {"step": 0, "name": several.settings[0].name, "value": 1.533, "low": 0.283,
                                     "high": 2.784, "runs": 3, "null": 2.0}


def test_fewer_than_three_runs_have_no_band_and_the_page_says_so(tmp_path: Path) -> None:
    for seed in range(2):
        write(tmp_path / f"seed-{seed}", x=seed, seed=seed)
    several = settings.read([tmp_path])
    assert not any("low" in row or "high" in row for row in chart(several, "rank")["rows"])
    cells = [cell for row in rows_of(compare.sections(several)[0].html(), "settings") for cell in row]
    assert not any("[" in cell for cell in cells)
    assert "every setting" in compare.first_screen(several)


def test_three_runs_have_a_band_and_the_page_complains_of_nothing(tmp_path: Path) -> None:
    for seed in range(3):
        write(tmp_path / f"seed-{seed}", x=seed / 2, seed=seed)
    several = settings.read([tmp_path])
    assert all("low" in row and "high" in row for row in chart(several, "rank")["rows"])
    assert 'id="few"' not in compare.first_screen(several)


def test_one_run_is_drawn_as_it_was_read(tmp_path: Path) -> None:
    write(tmp_path / "a", x=1 / 3, group=2)
    write(tmp_path / "b", x=1.0, group=4)
    several = settings.read([tmp_path])
    own = several.settings[0].runs[0].by_step("all/effective_rank")
    drawn = {row["step"]: row["value"] for row in chart(several, "rank")["rows"] if row["name"] == "R = 2"}
    assert drawn == {step: pytest.approx(value) for step, value in own.items()}


def test_what_differs_names_the_settings_and_orders_them_by_number(tmp_path: Path) -> None:
    for group in (16, 2, 8):
        write(tmp_path / f"r{group}", group=group)
    several = settings.read([tmp_path])
    assert several.differs == ("group",)
    assert [setting.name for setting in several.settings] == ["R = 2", "R = 8", "R = 16"]


def test_every_label_has_all_telling_settings_that_differ_and_they_are_columns(tmp_path: Path) -> None:
    for name, own in {"a": {}, "b": {"inner_steps": 4}, "c": {"lr": 5e-5}}.items():
        write(tmp_path / name, **({"inner_steps": 1} | own))
    several = settings.read([tmp_path])
    assert several.differs == ("inner_steps", "lr")
    assert [setting.name for setting in several.settings] == [
        "μ = 1, lr = 5e-05", "μ = 1, lr = 0.0001", "μ = 4, lr = 0.0001"]
    cells = {row[0]: row[2:4] for row in rows_of(compare.sections(several)[0].html(), "settings")}
    assert cells["μ = 4, lr = 0.0001"] == ["4", "0.0001"]


def test_two_settings_that_differ_together_are_both_in_the_label(tmp_path: Path) -> None:
    write(tmp_path / "a", inner_steps=1, lr=1e-4, beta=0.0, steps=4)
    write(tmp_path / "b", inner_steps=4, lr=1e-3, beta=0.04, steps=4)
    several = settings.read([tmp_path])
    assert [setting.name for setting in several.settings] == [
        "μ = 1, lr = 0.0001, β = 0", "μ = 4, lr = 0.001, β = 0.04"]


def test_another_setting_is_in_the_label_only_where_it_tells_runs_apart(tmp_path: Path) -> None:
    write(tmp_path / "a", lr=1e-4, max_tokens=80)
    write(tmp_path / "b", lr=1e-3, max_tokens=160)
    assert [setting.name for setting in settings.read([tmp_path]).settings] == ["lr = 0.0001", "lr = 0.001"]
    write(tmp_path / "c", lr=1e-3, max_tokens=320)
    assert [setting.name for setting in settings.read([tmp_path]).settings] == [
        "lr = 0.0001, max tokens 80", "lr = 0.001, max tokens 160", "lr = 0.001, max tokens 320"]


def test_a_setting_of_trl_s_own_is_named_unless_the_record_has_it_under_another_name(tmp_path: Path) -> None:
    for name, lr, loss in (("a", 1e-6, "dapo"), ("b", 1e-5, "dapo"), ("c", 1e-5, "grpo")):
        write(tmp_path / name, lr=lr, trl={"learning_rate": lr, "loss_type": loss})
    several = settings.read([tmp_path])
    assert several.differs == ("lr", "trl.loss_type")
    assert [setting.name for setting in several.settings] == [
        "lr = 1e-06, loss_type dapo", "lr = 1e-05, loss_type dapo", "lr = 1e-05, loss_type grpo"]
    assert "They differ in lr, loss_type." in compare.first_screen(several)


def test_a_label_that_is_too_long_is_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "a", brake="x" * settings.LABEL)
    write(tmp_path / "b", brake="none")
    assert [setting.name for setting in settings.read([tmp_path]).settings] == ["brake none", "a"]


def test_settings_that_change_no_result_make_no_other_setting(tmp_path: Path) -> None:
    write(tmp_path / "a", seed=0, scope="light", every=2)
    write(tmp_path / "b", seed=1, scope="full", every=1)
    assert len(settings.read([tmp_path]).settings) == 1


def test_a_run_that_is_there_twice_counts_once_and_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b")
    several = settings.read([tmp_path])
    assert len(several.entries) == 1
    assert "1 of the runs was left out" in several.faults[0]
    assert several.notice is None


def with_rewards(path: Path, low: float, high: float, mean: float = 0.5) -> Path:
    """The run with these ends and this mean of its rewards at every step."""
    text = (path / "steps.jsonl").read_text()
    ends = f'"reward/mean": {mean}, "reward/min": {low}, "reward/max": {high}'
    (path / "steps.jsonl").write_text(text.replace('"reward/mean": 0.5', ends))
    return path


def test_two_runs_of_one_setting_and_seed_with_other_rewards_are_two_settings_by_folder(tmp_path: Path) -> None:
    write(tmp_path / "plain")
    with_rewards(write(tmp_path / "length"), 0.0, 1.0, mean=0.6)
    several = settings.read([tmp_path])
    assert [setting.name for setting in several.settings] == ["length", "plain"]
    write(tmp_path / "faster", lr=1e-3)
    assert [setting.name for setting in settings.read([tmp_path]).settings] == [
        "lr = 0.0001 (length)", "lr = 0.0001 (plain)", "lr = 0.001"]
    assert several.notice == (rewards.SAME, "")
    assert several.left_out == ()
    assert "Their recorded settings are the same." in compare.first_screen(several)


def test_a_copy_that_has_fewer_steps_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    short = write(tmp_path / "copied")
    (short / "steps.jsonl").write_text("".join((short / "steps.jsonl").read_text().splitlines(keepends=True)[:2]))
    assert [entry.name for entry in settings.read([tmp_path]).entries] == ["whole"]


@pytest.mark.parametrize(("own", "line", "details"), [
    ({"task": "turns"}, "These runs have different tasks: their reward curves cannot be compared.",
     "arithmetic in (arithmetic, R = 2); turns in (turns, R = 4)."),
    ({"reward": "mine:length"}, "These runs have different reward functions: their reward curves cannot be compared.",
     "mine:exact in (reward mine:exact, R = 2); mine:length in (reward mine:length, R = 4).")])
def test_runs_of_two_tasks_or_reward_functions_are_warned_of_at_the_top(
        tmp_path: Path, own: dict[str, str], line: str, details: str) -> None:
    write(tmp_path / "a", group=2, **({"reward": "mine:exact"} if "reward" in own else {}))
    write(tmp_path / "b", group=4, **own)
    several = settings.read([tmp_path])
    assert several.notice == (line, details)
    assert several.faults == (f"{line} {details}",)  # in the terminal too
    screen = compare.first_screen(several)
    assert screen.index(line) < screen.index(details) < screen.index('data-topic="diagnosis"')


@pytest.mark.parametrize(("ends", "warned"), [
    ((0.0, 1.0), False), ((0.09, 0.95), False), ((0.11, 1.0), True), ((-1.0, 1.0), True), ((0.0, 100.0), True),
    ((0.5, 0.5), False)])
def test_rewards_in_other_ranges_are_warned_of_and_equal_rewards_say_nothing(
        tmp_path: Path, ends: tuple[float, float], warned: bool) -> None:
    with_rewards(write(tmp_path / "a", group=2), 0.0, 1.0)
    with_rewards(write(tmp_path / "b", group=4), *ends)
    several = settings.read([tmp_path])
    assert several.notice == ((
        "The rewards lie in different ranges: unless the reward function is the same, the reward curves cannot be "
        "compared.", f"from 0 to 1 in R = 2; from {ends[0]:g} to {ends[1]:g} in R = 4.") if warned else None)
    assert ('id="notice"' in compare.first_screen(several)) == warned


def test_a_run_whose_rewards_differ_from_those_of_its_own_setting_is_named_by_its_folder(tmp_path: Path) -> None:
    for seed, high in enumerate((1.0, 1.0, 5.0)):
        with_rewards(write(tmp_path / f"seed-{seed}", seed=seed), 0.0, high)
    notice = settings.read([tmp_path]).notice
    assert notice is not None
    assert "from 0 to 1 in seed-0, seed-1; from 0 to 5 in seed-2" in notice.details


# -- how far ----------------------------------------------------------------------------------------------------------


def unfinished(path: Path, steps: int) -> Path:
    """The first lines of a run, last written long ago."""
    lines = (path / "steps.jsonl").read_text().splitlines(keepends=True)
    (path / "steps.jsonl").write_text("".join(lines[:steps]))
    os.utime(path / "steps.jsonl", (0, 0))
    return path


def test_a_finished_run_is_said_to_be_finished_and_another_how_far_it_is(tmp_path: Path) -> None:
    write(tmp_path / "evaluated", group=2)
    unfinished(write(tmp_path / "planned", group=4), 4)  # all planned steps, without an evaluation at the end: TRL's
    several = settings.read([tmp_path])
    assert "All 2 runs are finished." in compare.first_screen(several)
    assert [row[7] for row in rows_of(compare.sections(several)[1].html(), "states")] == [
        "finished, 4 of 4 steps"] * 2
    unfinished(write(tmp_path / "stopped", group=8), 3)
    several = settings.read([tmp_path])
    assert "2 of 3 runs finished; stopped: stopped early, 3 of 4 steps." in compare.first_screen(several)
    assert rows_of(compare.sections(several)[1].html(), "states")[-1][7] == "stopped early, 3 of 4 steps"


def test_a_file_of_evidence_says_whether_its_run_was_finished(tmp_path: Path) -> None:
    for name, steps in (("a", 5), ("b", 2)):
        path = unfinished(write(tmp_path / name, group=2 if name == "a" else 4), steps)
        (tmp_path / f"{name}.evidence.json").write_text(to_json(read_evidence(Record.open(path))))
    several = settings.read([tmp_path / "a.evidence.json", tmp_path / "b.evidence.json"])
    assert "1 of 2 runs finished; b: not finished, 2 of 4 steps." in compare.first_screen(several)


def test_a_damaged_run_is_named_and_the_others_stand(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (write(tmp_path / "b", group=4) / "steps.jsonl").write_text("no step\n")
    several = settings.read([tmp_path])
    assert [entry.name for entry in several.entries] == ["a"]
    assert "line 1: not a step" in compare.first_screen(several)


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CreditscopeError, match="nowhere was left out"):
        settings.read([tmp_path / "nowhere"])


def test_a_file_of_evidence_stands_beside_a_record_and_says_what_it_lacks(tmp_path: Path) -> None:
    whole = write(tmp_path / "a", group=2)
    other = write(tmp_path / "b", group=4)
    file = tmp_path / "b.evidence.json"
    file.write_text(to_json(read_evidence(Record.open(other))))
    several = settings.read([whole, file])
    by_name = {row[0]: row for row in rows_of(compare.sections(several)[1].html(), "states")}
    assert by_name["b"][1:5] == ["–", "–", "–", "–"]
    assert by_name["b"][-1] == "needs the record"
    assert by_name["a"][-1] == f"creditscope report {whole}"
    assert [setting.name for setting in several.settings] == ["R = 2", "R = 4"]


def test_a_value_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a", group=2)
    text = (path / "steps.jsonl").read_text()
    (path / "steps.jsonl").write_text(text.replace('"reward/mean": 0.5', '"reward/mean": NaN', 1))
    write(tmp_path / "b", group=4)
    several = settings.read([tmp_path])
    drawn = [row["step"] for row in chart(several, "reward")["rows"] if row["name"] == "R = 2"]
    assert drawn == [1, 2, 3]


def test_settings_from_a_stranger_are_text_and_odd_ones_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a", brake="</script><img src=x onerror=alert(1)>")
    write(tmp_path / "b", brake="none")
    write(tmp_path / "c", seed=[1])
    several = settings.read([tmp_path])
    html = compare.first_screen(several) + "".join(section.html() for section in compare.sections(several))
    assert "<img" not in html
    assert "&lt;img" in html
    assert "its seed is [1]" in html


@pytest.mark.slow
def test_hostile_records_are_compared_as_text(tmp_path: Path) -> None:
    records.hostile(tmp_path / "a")
    records.bare(tmp_path / "b")
    several = settings.read([tmp_path])
    text = page("x", compare.first_screen(several), compare.sections(several))
    assert "<img" not in text.split("<script")[0]
    text.encode()


@pytest.mark.slow
def test_the_ends_of_the_order_are_told_with_whether_their_intervals_meet(tmp_path: Path) -> None:
    for seed in range(3):
        write(tmp_path / f"low-{seed}", seed=seed, accuracy=0.3 + 0.01 * seed)
        write(tmp_path / f"high-{seed}", seed=seed, group=4, accuracy=0.8 + 0.01 * seed)
    told = dict(standing.findings(settings.read([tmp_path])))
    # 0.30, 0.31, 0.32: s = 0.01, half = 4.3027 · 0.01/√3 = 0.0248
    assert told["Learning"] == ("Highest accuracy at the end: R = 4 with 81.0 [78.5, 83.5] % (rollouts: 64); lowest: "
                                "R = 2 with 31.0 [28.5, 33.5] % (rollouts: 32). Their intervals do not overlap. Not at "
                                "equal cost: R = 4 spent 2 times the rollouts of R = 2.")
    for seed in range(3):
        write(tmp_path / f"far-{seed}", seed=seed, group=8, accuracy=0.1 + 0.4 * seed)
    # 0.1, 0.5, 0.9 has the mean 0.5 and ends at no share: [0, 1]; the order's ends stay those two
    assert dict(standing.findings(settings.read([tmp_path])))["Learning"] == told["Learning"]
    html = compare.sections(settings.read([tmp_path]))[0].html()
    assert "50.0 [0.0, 100.0]" in html


def test_numbers_of_two_tasks_have_no_order(tmp_path: Path) -> None:
    for name, task, accuracy in (("a", "arithmetic", 0.4), ("b", "turns", 1.0)):
        write(tmp_path / name, task=task, accuracy=accuracy)
    assert list(standing.findings(settings.read([tmp_path]))) == []
    write(tmp_path / "c", task="arithmetic", accuracy=0.6, lr=5e-5)
    said = dict(standing.findings(settings.read([tmp_path])))["Learning"]
    assert said.startswith("arithmetic: Highest accuracy at the end: ")
    assert "100.0" not in said


def test_models_whose_folders_have_one_name_are_two_settings(tmp_path: Path) -> None:
    for seed, folder in enumerate(("first/model", "second/model")):
        write(tmp_path / str(seed), seed=seed, model=f"/somewhere/{folder}")
    several = settings.read([tmp_path])
    assert [setting.name for setting in several.settings] == ["first/model", "second/model"]


def test_a_setting_that_fell_below_its_start_is_named_first(tmp_path: Path) -> None:
    for seed in range(3):  # from 0.25: changes −0.10, −0.11, −0.12, and +0.40, …
        write(tmp_path / f"low-{seed}", seed=seed, accuracy=0.15 - 0.01 * seed)
        write(tmp_path / f"high-{seed}", seed=seed, group=4, accuracy=0.65 + 0.01 * seed)
    several = settings.read([tmp_path])
    assert standing.faults(several) == [
        ("R = 2", "broken", "accuracy 25.0 → 14.0 %: it fell below its start; 75 % live groups", "")]
    assert [standing.standing(setting) for setting in several.settings] == [
        ("broken", "accuracy 25.0 → 14.0 %: it fell below its start; 75 % live groups"),
        ("fine", "accuracy 25.0 → 66.0 %: it rose; 75 % live groups")]
    assert 'data-topic="diagnosis" data-state="broken"' in compare.first_screen(several)
    assert [row[1] for row in rows_of(compare.sections(several)[0].html(), "settings")] == ["✗ broken", "✓ fine"]


def test_a_setting_has_the_first_causes_of_its_runs_diagnoses(tmp_path: Path) -> None:
    for seed in range(2):
        path = write(tmp_path / str(seed), seed=seed, steps=12)
        text = (path / "steps.jsonl").read_text()
        if seed:  # every answer of the second run gets the reward 0
            text = text.replace('"reward/mean": 0.5', '"reward/mean": 0.0, "reward/std": 0.0')
            (path / "steps.jsonl").write_text(text.replace('"signal/dead_groups": 0.25', '"signal/dead_groups": 1.0'))
    (setting,) = settings.read([tmp_path]).settings
    first = read_run(tmp_path / "1").diagnosis.first
    assert first is not None
    assert setting.entries[1].diagnosis.first == first
    assert standing.standing(setting) == (
        "broken", f"accuracy 25.0 → {100 * 0.5:.1f} %; {first.rule} broken in 1 of 2 runs; 38 % live groups")
    assert first.change
    (fault,) = standing.faults(settings.read([tmp_path]))
    assert fault.change == first.change
    screen = compare.first_screen(settings.read([tmp_path]))
    assert f"<strong>Change</strong>: {escape(first.change)}." in screen


def test_a_change_that_seeds_do_not_share_is_not_clear(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.05, 0.25, 0.45)):  # changes −0.2, 0, 0.2
        write(tmp_path / str(seed), seed=seed, accuracy=accuracy)
    runs = settings.read([tmp_path]).settings[0].runs
    assert standing.learnt(runs) == ("fine", "accuracy 25.0 → 25.0 %: no clear change")


def test_live_groups_are_counted_by_credit_where_it_was_recorded(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    text = (path / "steps.jsonl").read_text()
    (path / "steps.jsonl").write_text(text.replace('"signal/dead_groups": 0.25', '"signal/dead_groups": 0.95'))
    several = settings.read([path])
    assert standing.alive(several.settings[0].runs) == "5 % live groups"
    # groups without a difference that get credit all the same are live
    (path / "steps.jsonl").write_text(text.replace('"signal/dead_groups": 0.25', '"signal/dead_groups": 1.0, '
                                                   '"credit/dead_groups": 0.0'))
    assert standing.alive(settings.read([path]).settings[0].runs) == "100 % live groups"


def test_a_run_that_has_only_begun_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a")
    Record.create(tmp_path / "b", CONFIG | {"group": 4}, {}).close()
    (tmp_path / "b" / "steps.jsonl").unlink()
    assert settings.read([tmp_path]).faults == (f"{tmp_path / 'b'} was left out: it has no step yet",)


def test_the_band_of_a_reward_between_0_and_1_stays_there(tmp_path: Path) -> None:
    for seed, reward in enumerate((0.0, 0.5, 1.0)):  # 0.5 ± 4.3027·0.5/√3 = 0.5 ± 1.24
        path = write(tmp_path / str(seed), seed=seed)
        text = (path / "steps.jsonl").read_text()
        (path / "steps.jsonl").write_text(text.replace('"reward/mean": 0.5', f'"reward/mean": {reward}'))
    row = chart(settings.read([tmp_path]), "reward")["rows"][0]
    assert (row["low"], row["high"]) == (0.0, 1.0)


def test_accuracy_by_rollouts_is_drawn_where_a_step_does_not_cost_the_same(tmp_path: Path) -> None:
    write(tmp_path / "a", group=2, lr=1e-4)
    write(tmp_path / "b", group=2, lr=5e-5)

    def charts() -> list[str]:
        data = compare.sections(settings.read([tmp_path]))[0].data
        assert data is not None
        return [found["name"] for found in data["charts"]]

    assert "accuracy" in charts()
    assert "accuracy-rollouts" not in charts()
    write(tmp_path / "c", group=4, lr=1e-4)
    assert "accuracy-rollouts" in charts()


@pytest.mark.slow
def test_fifty_long_runs_stay_small(tmp_path: Path) -> None:
    for seed in range(5):
        for lr in range(10):
            write(tmp_path / f"{lr}-{seed}", x=0.5, steps=150, seed=seed, lr=1e-5 * (lr + 1))
    several = settings.read([tmp_path])
    data = compare.sections(several)[0].data
    assert data is not None
    assert len(several.entries) == 50
    for found in data["charts"]:
        most = compare.BATCHES if found["name"] in ("reward", "live", "entropy", "length") else compare.READINGS
        assert len(found["rows"]) <= 10 * most
    assert sum(len(section.html()) for section in compare.sections(several)) < 300_000


@pytest.mark.slow
def test_more_settings_than_a_chart_can_tell_apart_are_a_table(tmp_path: Path) -> None:
    for lr in range(compare.MANY + 1):
        write(tmp_path / f"{lr}", lr=1e-5 * (lr + 1))
    section = compare.sections(settings.read([tmp_path]))[0]
    assert section.data == {"charts": []}
    assert f"{compare.MANY + 1} settings are too many" in section.html()
    assert len(rows_of(section.html(), "settings")) == compare.MANY + 1


def test_a_run_of_no_step_is_compared_too(tmp_path: Path) -> None:
    Record.create(tmp_path / "a", CONFIG, {}).close()
    write(tmp_path / "b", group=4)
    several = settings.read([tmp_path])
    first = rows_of(compare.sections(several)[0].html(), "settings")[0]
    assert first[:2] == ["R = 2", "? unknown"]
    assert set(first[3:]) == {"–"}


@pytest.mark.slow
def test_comparing_loads_no_torch(tmp_path: Path) -> None:
    write(tmp_path / "a", group=2)
    write(tmp_path / "b", group=4)
    code = ("import sys; from pathlib import Path; from creditscope.report import compare, settings;"
            f"several = settings.read([Path({str(tmp_path)!r})]);"
            "compare.first_screen(several), compare.sections(several); sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
