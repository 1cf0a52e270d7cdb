"""Answers without a reward: counted in TRL's log and in the record, left out of both, and named by the doctor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl")

from creditscope.diagnosis.engine import diagnose  # noqa: E402
from creditscope.diagnosis.read import read  # noqa: E402
from creditscope.plugins.trl import ScopeCallback  # noqa: E402
from creditscope.plugins.trl.batch import Generation, reward_metrics  # noqa: E402
from creditscope.runs.record import Record  # noqa: E402
from plugins.trl_makers import reward, trainer  # noqa: E402

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.conformance
ROWS = 16  # of a generation


def lacking(every: int) -> Any:
    """A reward function that gives no number for each `every`-th answer; 0 for none."""
    def function(completions: list[str], **_: Any) -> list[float | None]:
        return [None if every and i % every == 0 else r for i, r in enumerate(reward(completions))]

    return function


def watched(out: Path, funcs: Any, **settings: Any) -> Any:
    live = trainer(funcs=funcs, **settings)
    live.add_callback(ScopeCallback(live, every=1, out=out, alarm=False))
    live.train()
    return live


def told(live: Any, name: str) -> list[float]:
    return [entry[f"creditscope/{name}"] for entry in live.state.log_history if f"creditscope/{name}" in entry]


def test_answers_without_a_reward_are_counted_as_errors(tmp_path: Path) -> None:
    live = watched(tmp_path, lacking(ROWS))
    steps = Record.open(tmp_path).steps()
    assert [line["reward/errors"] for line in steps] == told(live, "reward/errors") == [1, 1, 1]
    assert [line["rollouts/sampled"] for line in steps] == told(live, "rollouts/sampled") == [ROWS] * 3
    assert min(told(live, "scope/agreement")) > 1 - 1e-10  # TRL gives them advantage 0


@pytest.mark.parametrize("every", [0, 2])
def test_the_rewards_of_the_record_are_those_that_trl_logs(every: int, tmp_path: Path) -> None:
    live = watched(tmp_path, lacking(every))
    theirs = [entry for entry in live.state.log_history if "reward" in entry]
    for line, entry in zip(Record.open(tmp_path).steps(), theirs, strict=True):
        assert line["reward/mean"] == pytest.approx(entry["reward"], abs=1e-6)
        assert line["reward/std"] == pytest.approx(entry["reward_std"], abs=1e-6)
        assert line["reward/errors"] == (ROWS / every if every else 0)


@pytest.mark.parametrize(("every", "state"), [(0, "fine"), (2, "broken")])
@pytest.mark.parametrize("logging", [1, 2])
def test_the_doctor_names_missing_rewards_from_the_log_and_from_the_record(every: int, state: str, logging: int,
                                                                          tmp_path: Path) -> None:
    live = watched(tmp_path / "run", lacking(every), max_steps=4, logging_steps=logging)
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": live.state.log_history}))
    for source in (tmp_path / "trainer_state.json", tmp_path / "run"):
        found = {each.rule: each for each in diagnose(read(source)).findings}["reward missing"]
        assert (found.state, "50% of the answers have no reward" in found.sentence) == (state, state == "broken")


def test_a_function_that_does_not_apply_to_a_prompt_is_no_error_where_another_gives_a_number(tmp_path: Path) -> None:
    live = watched(tmp_path, [lacking(2), reward])
    assert told(live, "reward/errors") == [0, 0, 0]


def test_without_any_reward_every_group_is_dead_and_there_is_no_mean() -> None:
    made = Generation(torch.zeros(4), 2, {})
    assert reward_metrics(made, torch.zeros(4).bool()) == {
        "signal/groups": 2, "signal/live_groups": 0, "signal/dead_groups": 1.0}


def test_a_group_with_one_reward_is_dead_whatever_the_others_would_have_got() -> None:
    # Group 0 has the rewards 1 and None, group 1 has 1 and 0.
    found = reward_metrics(Generation(torch.tensor([1.0, 0.0, 1.0, 0.0]), 2, {}), torch.tensor([1, 0, 1, 1]).bool())
    assert (found["signal/groups"], found["signal/live_groups"], found["signal/dead_groups"]) == (2, 1, 0.5)
    assert found["reward/mean"] == pytest.approx(2 / 3)
