"""The section on the optimiser: numbers and sentences of `diagnosis.optimizer_numbers`; what was not read is said."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from creditscope.diagnosis.optimizer_numbers import OVERSHOOT, UPDATE, of_steps, read
from creditscope.diagnosis.optimizer_verdicts import j_and_reward, verdicts
from creditscope.diagnosis.thresholds import BLIND, FOLLOWS
from creditscope.report import glossary, optimizer
from creditscope.report.directions import size
from creditscope.report.optimizer import BY_UPDATE, cell_of, past_key, section
from creditscope.report.run import Run, read_run
from creditscope.report.section import Section
from creditscope.runs.record import Record
from records import write_record
from report import records

Line = dict[str, float]


def recorded(path: Path, lines: list[Line], probes: Mapping[int, Mapping[str, NDArray[Any]]] | None = None,
             **config: Any) -> Run:
    given = [{"rollouts/spent": 8, **line} for line in lines]
    return read_run(write_record(path, given, {"optimizer": "adamw", **config}, probes=probes))


def probe(**other: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Two layers under a tenth of, the same, and ten times the credit."""
    return {"phi": np.array([0.1, 1.0, 10.0]), "change": np.array([0.02, 0.0, 0.01]),
            "cosine": np.array([0.9997, 1.0, 0.9998]), "since": np.array("start"), "layer_names": np.array(["a", "b"]),
            "layer_change": np.array([[0.01, 0.0, np.nan], [0.04, 0.0, 0.3]]),
            "layer_cosine": np.array([[0.999, 1.0, 0.99], [0.9, 1.0, 0.8]]), "layer_ratio": np.array([1e-3, 2e-3]),
            **other}


def shown(found: Section) -> Mapping[str, Any]:
    assert found.data is not None
    return found.data


def text(html: str) -> str:
    """What a reader sees, words separated by one space."""
    return " ".join(unescape(re.sub("<[^>]+>", " ", html)).split())


def block(body: str, title: str) -> str:
    """The text of a block, from its heading to the next."""
    return text(body.split(f"<h3>{title}</h3>")[1].split("<h3>")[0])


# -- by hand -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "said"), [
    ([BLIND - 0.02, BLIND], "by 4.00 %, less than 5 %"),  # the mean of 3 and 5 %
    ([FOLLOWS + 0.4], "by 90.00 %, more than 50 %"),
    ([0.2], "by 20.00 %, between 5 % and 50 %")])
def test_what_the_optimiser_does_not_see_is_one_sentence_with_its_number(
        tmp_path: Path, change: list[float], said: str) -> None:
    run = recorded(tmp_path / "run", [{"optimizer/scale_change": float(value)} for value in change])
    assert said in block(section(run).body, "Reward scale")


def test_where_clipping_hides_the_past_the_sentence_is_about_the_step_itself(tmp_path: Path) -> None:
    body = section(recorded(tmp_path / "run", [{"optimizer/scale_change_now": 0.4}])).body
    assert "from the step itself on, would have changed the update by 40.00 %" in text(body)


def test_the_sentence_ends_with_the_cosine_at_ten_times_the_credit(tmp_path: Path) -> None:
    lines: list[Line] = [{"optimizer/scale_change": 0.02}]
    body = section(recorded(tmp_path / "ten", lines, {0: probe()})).body
    assert "At × 10 the two updates have cosine 0.9998 (step 0)" in body
    unknown = probe(cosine=np.array([0.9997, 1.0, np.nan]))
    body = section(recorded(tmp_path / "tenth", lines, {0: unknown})).body
    assert "At × 0.1 the two updates have cosine 0.9997 (step 0)" in body


def test_a_sweep_has_the_layers_least_and_most_change_and_the_layer_that_changes_most_first(tmp_path: Path) -> None:
    (found,) = shown(section(recorded(tmp_path / "run", [{}], {0: probe()})))["sweeps"]
    assert found["phi"] == [0.1, 1, 10]
    assert found["change"] == [0.02, 0, 0.01]
    assert found["cosine"] == [0.9997, 1, 0.9998]
    assert (found["low"], found["high"]) == ([0.01, 0, 0.3], [0.04, 0, 0.3])  # at ten one layer is not a number
    assert found["layers"] == [["b", 0.04, 0.9, 0.002], ["a", 0.01, 0.999, 0.001]]


def test_a_table_row_is_the_mean_and_its_interval_over_steps(tmp_path: Path) -> None:
    # 0.1, 0.2, 0.3: mean 0.2, s = 0.1, 4.3027·0.1/√3 = 0.2484: [−4.84 %, 44.8 %].
    run = recorded(tmp_path / "run", [{"overshoot/1/past": value} for value in (0.1, 0.2, 0.3)])
    body = section(run).body
    assert "20 % [-4.84, 44.8]" in body
    assert "After 1 update 20.0 % of tokens are past the bound." in block(body, "Overshoot by inner update")


def test_the_blocks_are_those_of_the_verb_in_its_order_each_with_its_sentence(tmp_path: Path) -> None:
    line: Line = {"overshoot/1/past": 0.06, "overshoot/1/distance": 0.1, "overshoot/carry": 0.7, "overshoot/max": 2.5,
                  "overshoot/carry_predicted": 0.68, "optimizer/scale_change": 0.003, "update/cosine": 0.25,
                  "update/momentum": 0.625, "reward/mean": 0.5, "objective/value": 0.0}
    run = recorded(tmp_path / "run", [line] * 3, method="grpo")
    body, found = section(run).body, of_steps(run.config, run.steps)
    said = verdicts(found) | {"progress": j_and_reward(found)}
    titles = {"Overshoot by inner update": "overshoot", "Reward scale": "scale", "Update geometry": "update",
              "The loss as progress": "progress"}
    assert re.findall("<h3>([^<]+)</h3>", body) == list(titles)
    for title, name in titles.items():
        assert said[name] in block(body, title)
    assert "The carry is 0.70 where momentum alone predicts 0.68: within 10 %." in text(body)
    assert "The furthest token was 2.5 nats past." in text(body)
    assert "J stayed within 1e-06 of 0." in text(body)


def test_the_correlation_of_j_and_reward_is_told_with_its_interval(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", [{"reward/mean": 0.1 * step, "objective/value": -float(step)}
                                      for step in range(5)], method="dr_grpo")
    assert "r of J, before the first update on a batch, and the mean reward: -1 [-1, -1], over 5 steps." in block(
        section(run).body, "The loss as progress")


@pytest.mark.slow
def test_no_number_is_defined_twice_and_each_leads_to_its_definition(rich_run: Path) -> None:
    body = section(read_run(rich_run)).body
    links = re.findall(r'href="#(glossary-[^"]+)"', body)
    assert set(links) == {glossary.anchor(key) for key in (
        *(past_key(None, head.key) for head in BY_UPDATE), *(
            key for key in (*OVERSHOOT.values(), *UPDATE.values(), "optimizer/scale_change",
                            "optimizer/scale_change_now") if key in read_run(rich_run).steps.names))}
    assert len(links) == len(set(links))
    assert not any(glossary.TERMS[link.removeprefix("glossary-")].sentence in text(body) for link in links)


def test_a_run_that_was_only_looked_at_in_the_end_has_one_row(tmp_path: Path) -> None:
    found = section(recorded(tmp_path / "run", [{"overshoot/past": 0.25}]))
    assert "<td>last</td>" in found.body
    assert [chart["name"] for chart in shown(found)["charts"]] == ["past"]
    assert shown(found)["charts"][0]["rows"] == [{"step": 0, "after the last update": 0.25}]


@pytest.mark.parametrize(("brake", "said"), [
    ("shorten,share=0.02", "share = 0.02"), ("recall", "cancels its share"), ("vapour", "does not know")])
def test_the_brake_is_told_with_its_options(tmp_path: Path, brake: str, said: str) -> None:
    assert said in section(recorded(tmp_path / "run", [{"overshoot/past": 0.25}], brake=brake)).body


@pytest.mark.parametrize("brake", ["none", None, 3])
def test_a_run_without_a_brake_says_nothing_of_it(tmp_path: Path, brake: object) -> None:
    assert "rake" not in section(recorded(tmp_path / "run", [{"overshoot/past": 0.25}], brake=brake)).body


# -- identities --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_means_are_those_of_the_verb(rich_run: Path) -> None:
    body, found = text(section(read_run(rich_run)).body), read(rich_run)
    means = {past_key(k, head.key): row[head.key] for k, row in found.by_update.items() for head in BY_UPDATE
             if head.key in row} | {UPDATE[name]: value for name, value in found.update.items()}
    assert len(means) > 10
    assert [key for key, value in means.items() if cell_of(value, key) not in body] == []
    assert [said for said in verdicts(found).values() if said not in body] == [verdicts(found)["progress"]]
    assert j_and_reward(found) in body
    assert found.path is not None
    assert f"updates that were kept have effective rank {found.path[0]:.3g}" in body


@pytest.mark.slow
def test_the_sweep_is_that_of_the_verb(rich_run: Path) -> None:
    run = read_run(rich_run)
    sweeps = shown(section(run))["sweeps"]
    assert [one["step"] for one in sweeps] == run.record.optimizer_readings()
    theirs = read(rich_run).sweep
    assert theirs is not None
    mine = sweeps[-1]
    for name in ("phi", "change", "cosine"):
        for value, expected in zip(mine[name], getattr(theirs, name), strict=True):
            assert value == (None if expected is None else pytest.approx(expected, rel=5.1e-4))
    most = max((values["change"][theirs.phi.index(0.1)], name) for name, values in theirs.layers.items())
    assert mine["layers"][0][0] == most[1]


@pytest.mark.slow
def test_charts_hold_the_steps_of_the_record(rich_run: Path) -> None:
    run = read_run(rich_run)
    charts = {chart["name"]: chart for chart in shown(section(run))["charts"]}
    assert set(charts) == {"past", "distance", "carry", "scale", "update", "stay"}
    rows = [(row["step"], row["cosine with −gradient"]) for row in charts["update"]["rows"]]
    assert rows == [(step, pytest.approx(value, rel=5.1e-4)) for step, value in run.series("update/cosine")]


# -- what is not there -------------------------------------------------------------------------------------------------


def test_a_run_without_a_probe_says_so_and_how_to_get_one(tmp_path: Path) -> None:
    found = section(read_run(records.bare(tmp_path / "run")))
    assert found.data is None
    assert "--probe light" in found.body
    assert "<table" not in found.body


def test_a_run_without_a_probe_still_says_whether_its_loss_follows_the_reward(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", [{"reward/mean": 0.1 * step, "objective/value": float(step)} for step in range(5)])
    assert re.findall("<h3>([^<]+)</h3>", section(run).body) == ["The loss as progress"]
    assert "In this run J rose and fell with the reward: r = 1.00" in text(section(run).body)


def test_damaged_sketches_of_the_updates_cost_their_rank_and_nothing_else(tmp_path: Path) -> None:
    probes = {step: probe(path_update=np.ones(4 + step)) for step in range(2)}
    run = recorded(tmp_path / "run", [{"update/cosine": 0.5}] * 2, probes)
    found = section(run)
    assert "effective rank" not in found.body
    assert len(shown(found)["sweeps"]) == 2
    assert any("path_update is not the same kind of list" in fault for fault in run.faults)


def test_a_light_probe_says_what_the_full_one_would_add(tmp_path: Path) -> None:
    found = section(recorded(tmp_path / "run", [{"overshoot/1/past": 0.1}]))
    assert "--probe full" in found.body
    assert shown(found)["sweep"] is None


@pytest.mark.parametrize("damage", [
    {"phi": np.ones((2, 2))}, {"cosine": np.ones(2)}, {"change": np.array("text")}, {"layer_change": np.ones(3)}])
def test_a_damaged_sweep_is_left_out_and_named(tmp_path: Path, damage: dict[str, NDArray[Any]]) -> None:
    run = recorded(tmp_path / "run", [{"overshoot/past": 0.1}] * 2, {0: probe(), 1: probe(**damage)})
    assert [one["step"] for one in shown(section(run))["sweeps"]] == [0]
    assert any("optimiser of step 1" in fault for fault in run.faults)


def test_a_probe_of_which_nothing_can_be_read_is_not_called_off(tmp_path: Path) -> None:
    found = section(recorded(tmp_path / "run", [{}], {0: {"phi": np.array("text")}}))
    assert found.data is None
    assert "cannot be used" in found.body


def test_scales_that_no_logarithm_has_are_left_out(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", [{}], {0: probe(phi=np.array([0.0, 1.0, np.inf]))})
    assert shown(section(run))["sweeps"][0]["phi"] == [1]


def test_a_metric_that_is_text_is_no_number(tmp_path: Path) -> None:
    with Record.create(tmp_path / "run", {}, {}) as record:
        record.append(0, {"overshoot/past": "much", "overshoot/1/past": "more", "update/cosine": 0.5})
    found = section(read_run(tmp_path / "run"))
    assert [chart["name"] for chart in shown(found)["charts"]] == ["update"]


# -- what it costs -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.deep
def test_a_long_run_stays_within_its_bytes(long_run: Path) -> None:
    data = shown(section(read_run(long_run)))
    assert size(data) <= 250_000
    assert all(len(chart["rows"]) <= optimizer.POINTS for chart in data["charts"])


@pytest.mark.slow
def test_hostile_names_are_text_in_which_nothing_is_hidden(tmp_path: Path) -> None:
    found = section(read_run(records.hostile(tmp_path / "run")))
    names = [row[0] for one in shown(found)["sweeps"] for row in one["layers"]]
    assert any("script" in name for name in names)
    assert "<script" not in found.body
    assert not any(c in name for name in names for c in "\x00\x1b\u202e\ud800")
