"""Rules that change R, or the credit, on the way: what they decide, and that a run follows them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import mini
from creditscope import CreditscopeError, Record
from creditscope.lab.train import train
from creditscope.runs.adapt import ADAPTS, RANK, Setting, decide, falls, parse_adapt, raised
from creditscope.runs.config import Config

START = Setting(4, "outcome")
SMALL = Config(model=mini.model(), task=mini.TASK, prompts=2, group=2, steps=6, max_tokens=12, eval_problems=0,
               checkpoint_every=1, keep_every=1, lr=1e-4, scope="light", probe="off")
pytestmark = pytest.mark.usefixtures("mini_task")


def lines(ranks: Sequence[float | None], groups: int | Sequence[int] = 4, switched: int | Sequence[int] = 0,
          spent: int = 8) -> list[dict[str, Any]]:
    """The lines of a record; None is a step without a reading."""
    groups = [groups] * len(ranks) if isinstance(groups, int) else groups
    switched = [switched] * len(ranks) if isinstance(switched, int) else switched
    return [{"adapt/group": g, "adapt/switched": s, "rollouts/spent": spent} | ({} if rank is None else {RANK: rank})
            for rank, g, s in zip(ranks, groups, switched, strict=True)]


def after(spec: str, *args: Any, budget: int = 100, **named: Any) -> Setting:
    return decide(spec, START, lines(*args, **named), budget)


def follow(spec: str, ranks: Sequence[float | None], budget: int = 64) -> list[Setting]:
    """The settings of the steps of a run with these ranks, two prompts a step."""
    seen: list[dict[str, Any]] = []
    out: list[Setting] = []
    for rank in ranks:
        out.append(decide(spec, START, seen, budget))
        seen += lines([rank], out[-1].group, int(out[-1].credit != START.credit), spent=2 * out[-1].group)
    return out


def run(config: Config, out: Path, resume: bool = False, stop_after: int | None = None) -> list[dict[str, Any]]:
    asked = iter(range(10**6))
    list(train(config, out, {}, resume, stop=lambda: stop_after is not None and next(asked) + 1 >= stop_after))
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "scope/"))}
            for line in Record.open(out).steps()]


# -- what a rule decides -----------------------------------------------------------------------------------------------


def test_the_rank_has_fallen_when_its_last_mean_is_under_a_share_of_its_first() -> None:
    # First two: mean 3. Last two: mean 2.25, which is 0.75 of it: under 0.8, not under 0.75.
    ranks = [2.0, 4.0, 9.0, 2.5, 2.0]
    assert falls(ranks, window=2, fall=0.8)
    assert not falls(ranks, window=2, fall=0.75)
    assert not falls(ranks[::-1], window=2, fall=1.0)
    # Of `window` readings the first are the last: nothing has fallen, whatever the order.
    assert not falls([5.0, 1.0], window=2, fall=1.0)
    assert not falls([1.0], window=2, fall=1.0)


def test_raise_group_doubles_R_when_the_rank_falls_and_not_before() -> None:
    # Five of 4.0, then 2.0s: after k of them the last five have mean (4(5−k) + 2k)/5 = 4 − 0.4k < 3.2 from k = 3 on.
    assert [after("raise_group", [4.0] * 5 + [2.0] * k).group for k in range(5)] == [4, 4, 4, 8, 8]
    assert after("raise_group", [2.0] * 5 + [4.0] * 5).group == 4
    assert after("raise_group", []) == START
    assert after("raise_group", [4.0] * 5 + [2.0] * 5).credit == "outcome"


def test_after_a_raise_the_reference_is_taken_anew() -> None:
    fallen = [4.0] * 2 + [2.0] * 2
    spec = "raise_group,window=2"
    assert after(spec, fallen).group == 8
    # The rank at R = 8 stays at 2, half of what it first was at R = 4: no further raise.
    assert after(spec, [*fallen, 2.0, 2.0, 2.0], [4] * 4 + [8] * 3).group == 8
    # It falls at R = 8, from 3 to 1.
    assert after(spec, [*fallen, 3.0, 3.0, 1.0, 1.0], [4] * 4 + [8] * 4).group == 16
    # One reading at R = 8 says nothing yet.
    assert after(spec, [*fallen, 0.1], [4] * 4 + [8]).group == 8


def test_R_is_raised_to_the_ceiling_and_no_further() -> None:
    fallen = [4.0, 1.0]
    assert after("raise_group,window=1,most=6", fallen).group == 6
    assert after("raise_group,window=1,most=6", fallen, 6).group == 6
    assert [raised(group, 32) for group in (3, 16, 17, 32, 40)] == [6, 32, 32, 32, 40]


def test_steps_without_a_reading_and_values_that_are_not_finite_are_no_readings() -> None:
    ranks = [4.0, None, 4.0, None, 2.0, None, 2.0]
    assert after("raise_group,window=2", ranks) == after("raise_group,window=2", [4.0, 4.0, 2.0, 2.0])
    assert after("raise_group,window=2", ranks).group == 8
    # The record leaves them out, so a resumed run never sees them.
    assert after("raise_group,window=1", [4.0, float("nan")]) == after("raise_group,window=1", [4.0, None])
    assert after("raise_group,window=1", [float("inf"), 4.0]).group == 4


def test_denser_credit_switches_once_and_stays() -> None:
    spec = "denser_credit,window=1"
    assert after(spec, [4.0, 3.5]) == START
    assert after(spec, [4.0, 2.0]) == Setting(4, "step_reward")
    assert after(spec, [4.0, 2.0, 9.0], switched=[0, 0, 1]) == Setting(4, "step_reward")
    assert after(f"{spec},to=optimal_token", [4.0, 2.0]) == Setting(4, "optimal_token")


def test_late_group_raises_by_what_was_spent_whatever_the_rank() -> None:
    # 8 rollouts a step of 100: half is spent after 7 steps, 56 ≥ 50, not after 6.
    for ranks in (4.0, None, 0.1):
        assert [after("late_group", [ranks] * n).group for n in (0, 6, 7, 12)] == [4, 4, 8, 8]
    assert after("late_group,at=0.4", [None] * 5).group == 8, "40 of 40"
    assert after("late_group,at=0.4", [None] * 4).group == 4
    assert after("late_group", [None] * 12, groups=[4] * 7 + [8] * 5).group == 8, "once, not again"


def test_a_rank_that_halves_at_every_R_climbs_to_the_ceiling() -> None:
    found = follow("raise_group,window=1,most=20", [4.0, 2.0] * 5)
    assert [step.group for step in found] == [4, 4, 8, 8, 16, 16, 20, 20, 20, 20]


def test_a_rank_that_fell_once_and_stays_there_raises_R_once() -> None:
    assert [step.group for step in follow("raise_group,window=1", [4.0, 2.0, 2.0, 2.0, 2.0, 2.0])] == [4, 4] + [8] * 4


def test_the_control_spends_its_share_first_and_then_more_a_step() -> None:
    # 8 rollouts a step at R = 4, so a quarter of 64 is spent after two steps.
    for ranks in ([4.0, 1.0] * 3, [None] * 6):
        assert [step.group for step in follow("late_group,at=0.25", ranks)] == [4, 4, 8, 8, 8, 8]
    assert [step.group for step in follow("late_group,at=0.25,most=6", [None] * 4)] == [4, 4, 6, 6]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_ranks_do_R_never_falls_nor_passes_its_ceiling_and_credit_changes_at_most_once(seed: int) -> None:
    draw = random.Random(seed)
    ranks = [draw.choice([None, draw.uniform(1, 4)]) for _ in range(60)]
    groups = [step.group for step in follow("raise_group,window=2,fall=0.9,most=24", ranks)]
    assert groups == sorted(groups)
    assert set(groups) <= {4, 8, 16, 24}
    assert len(set(groups)) > 1, "some fall, else nothing is tested"
    credits = [step.credit for step in follow("denser_credit,window=2,fall=0.9", ranks)]
    assert sorted(set(credits)) == ["outcome", "step_reward"]
    assert credits == sorted(credits)


def test_a_decision_depends_on_the_lines_alone_and_none_decides_nothing() -> None:
    fallen = [4.0] * 5 + [1.0] * 5
    assert after("none", fallen) == START
    for spec in ADAPTS:
        assert after(spec, fallen) == after(spec, fallen)


def test_the_page_of_the_lab_tells_every_rule_with_its_options() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "lab.md").read_text()
    for row in ADAPTS.values():
        options = ", ".join(f"`{name}={option.default}`" for name, option in row.options.items())
        assert f"| `{row.name}` | {row.rule} | {options} |".replace("|  |", "| |") in page, row.name


@pytest.mark.parametrize(("spec", "message"), [
    ("raise_grup", "did you mean 'raise_group'"),
    ("none,most=4", "has no options"),
    ("raise_group,most=1", "option most of adapt 'raise_group' must be a whole number of at least 2, got 1"),
    ("raise_group,fall=1.5", "must be a finite number in 0 .. 1, got 1.5"),
    ("late_group,at=1", "in 0.01 .. 0.99, got 1"),
    ("denser_credit,to=gae", "'gae'"),
    ("denser_credit,to=step_rewards", "did you mean 'step_reward'"),
    ("denser_credit,most=8", "'most'")])
def test_a_rule_that_does_not_exist_is_refused(spec: str, message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        parse_adapt(spec)


@pytest.mark.parametrize(("changes", "message"), [
    ({"adapt": "raise_group", "scope": "off"}, "reads the effective rank, and --scope is off; give --scope light"),
    ({"adapt": "denser_credit", "scope": "off"}, "reads the effective rank, and --scope is off"),
    ({"adapt": "raise_group", "steps": 5}, "compares the last 5 readings .* first 5, and the run has 5"),
    ({"adapt": "raise_group", "steps": 60, "every": 20}, "and the run has 3"),
    ({"adapt": "late_group"}, "goes by the share of the budget that was spent; give --rollouts"),
    ({"adapt": "raise_group,most=8", "group": 8}, "at most 8, and --group is 8 already; give raise_group,most=32"),
    ({"adapt": "denser_credit", "credit": "step_reward"}, "which is the run's credit already"),
    ({"adapt": "denser_credit,to=optimal_token", "top_p": 0.9}, "--adapt optimal_token: --top-p 0.9")])
def test_settings_under_which_a_rule_could_do_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        replace(SMALL, **changes)


def test_the_budget_may_not_change_on_resume_where_the_rule_goes_by_its_share() -> None:
    assert "rollouts" in replace(SMALL, adapt="raise_group", rollouts=99).free
    assert "rollouts" not in replace(SMALL, adapt="late_group", rollouts=99).free
    assert not {"adapt", "every", "scope"} & replace(SMALL, adapt="raise_group").free


# -- a run follows it --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_late_group_raises_R_at_its_share_and_the_budget_ends_the_run(tmp_path: Path) -> None:
    # 2 prompts: 4 rollouts a step at R = 2, so 8 of 16 are spent after two; the third has R = 4 and spends the rest.
    # Brake, full probe and microscope meet both sizes.
    config = replace(SMALL, adapt="late_group", rollouts=16, inner_steps=2, minibatches=2, brake="recall",
                     probe="full", probe_every=1, scope="full", credit="optimal_token")
    found = run(config, tmp_path / "run")
    assert [line["adapt/group"] for line in found] == [2, 2, 4]
    assert [line["rollouts/spent"] for line in found] == [4, 4, 8]
    assert [line["adapt/switched"] for line in found] == [0, 0, 0]
    record = Record.open(tmp_path / "run")
    assert [record.reading(step)["gram"].shape[0] for step in range(3)] == [4, 4, 8]
    assert [record.reading(step)["layers"].shape[1:] for step in range(3)] == [(2, 2, 2), (2, 2, 2), (2, 4, 4)]
    assert [len(record.group(step)["reward"]) for step in range(3)] == [4, 4, 8]


@pytest.mark.slow
def test_a_critic_and_a_resumed_run_meet_both_sizes(tmp_path: Path) -> None:
    config = replace(SMALL, adapt="late_group", rollouts=16, method="ppo")
    whole = run(config, tmp_path / "whole")
    assert [line["rollouts/used"] for line in whole] == [4, 4, 8]
    assert all("critic/loss" in line for line in whole)
    run(config, tmp_path / "cut", stop_after=2)
    assert run(config, tmp_path / "cut", resume=True) == whole, "what was spent before the stop counts"


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "metric"), [("raise_group", "adapt/group"), ("denser_credit", "adapt/switched")])
def test_a_run_stopped_around_a_change_goes_on_as_if_it_had_not_been(rule: str, metric: str, tmp_path: Path) -> None:
    config = replace(SMALL, adapt=f"{rule},window=1,fall=1.0", prompts=3, group=4, steps=5, seed=1)
    whole = run(config, tmp_path / "whole")
    changes = [line[metric] for line in whole]
    at = next(step for step, value in enumerate(changes) if value != changes[0])
    assert 0 < at < 4, "a step follows the change"
    for cut in (at, at + 1):  # before the decision, and after the first step that follows it
        run(config, tmp_path / str(cut), stop_after=cut)
        assert run(config, tmp_path / str(cut), resume=True) == whole
        one, two = (load_file(Record.open(tmp_path / name).checkpoint_path(5) / "policy.safetensors")
                    for name in ("whole", str(cut)))
        assert all(torch.equal(one[key], two[key]) for key in one)
    # And the record alone says why: the rule, told its lines up to a step, gives that step's setting.
    for step, line in enumerate(whole):
        found = decide(config.adapt, Setting(4, "outcome"), whole[:step], 0)
        assert (found.group, int(found.credit != "outcome")) == (line["adapt/group"], line["adapt/switched"])
        assert line["rollouts/used"] == 3 * found.group


@pytest.mark.slow
def test_denser_credit_changes_the_credit_of_the_steps_that_follow(tmp_path: Path) -> None:
    config = replace(SMALL, adapt="denser_credit,window=1,fall=1.0", prompts=3, group=4, steps=5, seed=1)
    found = run(config, tmp_path / "run")
    switched = [line["adapt/switched"] for line in found]
    assert switched == sorted(switched)
    assert {0, 1} == set(switched)
    for line in found:
        if line["adapt/switched"] == 0:
            assert line.get("credit/within", 0.0) < 1e-9, "outcome credit is the same for every token"
    assert max(line.get("credit/within", 0.0) for line in found if line["adapt/switched"]) > 1e-3
    # Until the switch it is the run without the rule.
    plain = run(replace(config, adapt="none"), tmp_path / "plain")
    at = switched.index(1)
    bare = [{k: v for k, v in line.items() if not k.startswith("adapt/")} for line in found]
    assert bare[:at] == plain[:at]
    assert bare[at:] != plain[at:]


def test_a_credit_that_the_task_cannot_give_is_refused_before_there_is_anything_to_switch(tmp_path: Path) -> None:
    with pytest.raises(CreditscopeError, match="credit 'state_return' needs a task that names the state"):
        run(replace(SMALL, adapt="denser_credit,to=state_return"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
