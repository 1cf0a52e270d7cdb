"""A run in a few numbers: from its record, through a file, and back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from creditscope.claims.evidence import (
    Evidence,
    cells,
    families,
    from_json,
    mean_of,
    places,
    read_evidence,
    read_place,
    to_json,
)
from creditscope.errors import CreditscopeError
from creditscope.microscope.spectrum import spectrum
from creditscope.runs.record import Record
from each import each

CONFIG = {"model": "tiny", "task": "arithmetic", "method": "p1_grpo", "group": 4, "seed": 0, "credit": None}


def reading(rng: np.random.Generator, rewards: list[float], size: int = 4, layers: int = 2) -> dict[str, Any]:
    """What the microscope writes: rows c_i ψ_i over `layers` tracked layers and one that is not tracked."""
    reward = np.array(rewards)
    group = np.arange(len(reward)) // size
    credit = reward - np.array([reward[group == g].mean() for g in group])
    psi = rng.normal(size=(layers + 1, len(reward), 30))
    rows = credit[None, :, None] * psi
    each = rows @ rows.transpose(0, 2, 1)
    names = [*(f"model.layers.{i}.self_attn.{'qv'[i % 2]}_proj.weight" for i in range(layers)), "model.norm.weight"]
    blocks = [[k[np.ix_(group == g, group == g)] for g in np.unique(group)] for k in each]
    return {"group": group, "reward": reward, "gram": each.sum(axis=0), "row_w": credit, "eps": np.array(2e-16),
            "layer_names": np.array(names), "layer_groups": np.unique(group),
            "layers": np.array(blocks, dtype=np.float32)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    with Record.create(tmp_path / "run", CONFIG, {"torch": "2", "cuda": {"nested": 1}}) as record:
        for step, rewards in enumerate(([1, 0, 0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 1, 0])):
            record.save_reading(step, reading(rng, [float(r) for r in rewards]))
            record.append(step, {"reward/mean": 0.5, "rollouts/spent": 8, "rollouts/sampled": 8, "policy/other": 1.0,
                                 "eval/accuracy": 0.4 + step / 10})
        record.append(2, {"eval/accuracy": 0.7})
    return tmp_path / "run"


def test_live_groups_are_rows_and_unanimous_ones_are_counted(run: Path) -> None:
    found = read_evidence(Record.open(run))
    assert found.groups["step"] == [0, 1, 1]
    assert found.groups["right"] == [1, 2, 1]
    assert found.groups["orthogonal_null"] == [3, 4, 3]  # 4k(R − k)/R
    assert found.readings == {"step": [0, 1], "unanimous": [1, 0], "unanimous_largest": [0, 0]}
    assert found.finished
    assert found.steps[-1] == {"step": 2, "eval/accuracy": 0.7}
    assert "policy/other" not in found.steps[0]
    assert found.versions == {"torch": "2"}


def test_ranks_are_those_of_the_gram_and_of_its_tracked_layers(run: Path) -> None:
    found = read_evidence(Record.open(run))
    arrays = Record.open(run).reading(1)
    block = arrays["gram"][:4, :4]
    assert found.groups["all/effective_rank"][1] == pytest.approx(spectrum(block).effective_rank)
    layers = arrays["layers"][:, 0].astype(float)
    assert found.groups["qv/effective_rank"][1] == pytest.approx(
        spectrum(layers[0] + layers[1], 1e-6).effective_rank)
    single = [spectrum(k, 1e-6).effective_rank for k in layers[:2]]
    assert found.groups["layer/effective_rank"][1] == pytest.approx(sum(single) / 2)
    # R = 4 independent rows of 90 numbers and a mixed group: the centred matrix has at most R − 1 directions.
    assert found.groups["all/numerical_rank"][1] == 4
    assert found.groups["all/centred_effective_rank"][1] < 3 + 1e-9
    assert all(x is not None and x < 1e-12 for x in found.groups["w_sum"])


def test_the_rank_of_equal_norms_is_that_of_the_directions_with_the_norms_of_the_credits(tmp_path: Path) -> None:
    # Two right of four, |c| = ½ each. Scores of any length along e₁, e₁, e₂, e₃: with equal norms σ² is as 2 : 1 : 1,
    # (√2 + 1 + 1)²/4 = (3 + 2√2)/2. A rollout without a gradient has no direction: 2 : 1, (√2 + 1)²/3 = 1 + 2√2/3.
    reward, credit = np.array([1.0, 1.0, 0.0, 0.0]), np.array([0.5, 0.5, -0.5, -0.5])
    found = []
    for name, lengths in (("unequal", [8.0, 0.01, 3.0, 1.0]), ("one is 0", [8.0, 0.01, 3.0, 0.0])):
        rows = (credit * lengths)[:, None] * np.eye(3)[[0, 0, 1, 2]]
        with Record.create(tmp_path / name, CONFIG, {}) as record:
            record.save_reading(0, {"group": np.zeros(4, dtype=int), "reward": reward, "row_w": credit,
                                    "gram": rows @ rows.T, "eps": np.array(2e-16)})
            record.append(0, {"reward/mean": 0.5})
        found += read_evidence(Record.open(tmp_path / name)).column("all/equal_norm_rank")
    assert found == pytest.approx([(3 + 2 * 2**0.5) / 2, 1 + 2 * 2**0.5 / 3], abs=1e-6)


def test_the_rank_of_equal_norms_goes_by_the_credits_where_these_differ(tmp_path: Path) -> None:
    # One right of four, c = ¾, −¼, −¼, −¼, orthogonal scores of norms 1, 2, 3, 4: the credits' null
    # (6/4)²/(12/16) = 3 = 4k(R−k)/R, where the measured rows ¾, 2/4, ¾, 1 have 3²/(9 + 4 + 9 + 16)·16 = 144/38.
    credit = np.array([0.75, -0.25, -0.25, -0.25])
    with Record.create(tmp_path / "run", CONFIG, {}) as record:
        record.save_reading(0, {"group": np.zeros(4, dtype=int), "reward": np.array([1.0, 0.0, 0.0, 0.0]),
                                "row_w": credit, "gram": np.diag((credit * [1, 2, 3, 4])**2), "eps": np.array(2e-16)})
        record.append(0, {"reward/mean": 0.25})
    found = read_evidence(Record.open(tmp_path / "run"))
    assert found.column("all/equal_norm_rank") == pytest.approx([3.0], abs=1e-12)
    assert found.column("all/effective_rank") == pytest.approx([144 / 38], abs=1e-12)


def test_a_mixed_group_whose_credits_are_all_0_has_its_ranks_and_no_number_of_its_credits(tmp_path: Path) -> None:
    # As under a KL term, whose gradient needs no credit.
    arrays = reading(np.random.default_rng(1), [1.0, 0.0, 0.0, 1.0])
    with Record.create(tmp_path / "run", CONFIG, {}) as record:
        record.save_reading(0, arrays | {"row_w": np.zeros(4)})
        record.append(0, {"reward/mean": 0.5})
    found = read_evidence(Record.open(tmp_path / "run"))
    assert found.column("all/effective_rank") == [pytest.approx(spectrum(arrays["gram"]).effective_rank)]
    for name in ("w_null", "w_sum", "all/equal_norm_rank", "all/centred_effective_rank"):
        assert found.column(name) == [], name
    assert "NaN" not in to_json(found)


def test_a_group_under_another_credit_has_columns_of_its_own(tmp_path: Path) -> None:
    arrays = reading(np.random.default_rng(1), [1.0, 0.0, 0.0, 1.0])
    other = np.zeros((1, 4, 4))
    other[0] = np.eye(4)
    with Record.create(tmp_path / "run", CONFIG, {}) as record:
        record.save_reading(0, arrays | {"other_names": np.array(["step_reward"]), "other_grams": other})
        record.append(0, {"reward/mean": 0.5})
    found = read_evidence(Record.open(tmp_path / "run"))
    assert found.groups["credit:step_reward/effective_rank"] == [pytest.approx(4.0)]


def test_the_file_says_what_the_record_says(run: Path, tmp_path: Path) -> None:
    found = read_evidence(Record.open(run))
    (tmp_path / "x.evidence.json").write_text(to_json(found))
    again = from_json(tmp_path / "x.evidence.json")
    assert again.config == found.config
    assert again.finished == found.finished
    assert again.points() == found.points() == [(0, 0.4), (8, 0.5), (16, 0.7)]
    assert again.points(by="step") == [(0, 0.4), (1, 0.5), (2, 0.7)]
    for name, column in found.groups.items():
        assert again.groups[name] == pytest.approx(column, rel=5e-5)  # five digits
    assert read_place(places([tmp_path])[0]).subject == "tiny · arithmetic · p1_grpo"
    assert len(places([tmp_path])) == 1, "where the run is, its file says nothing new"
    assert len(places([tmp_path, tmp_path / "x.evidence.json"])) == 2, "unless it is asked for"


def test_where_a_file_lay_is_not_published(tmp_path: Path) -> None:
    place = {"model": "/home/somebody/warm", "task": "gsm8k:/home/somebody/data/gsm8k"}
    with Record.create(tmp_path / "run", CONFIG | place, {}) as record:
        record.append(0, {"reward/mean": 0.0})
    found = read_evidence(Record.open(tmp_path / "run"))
    assert (found["model"], found["task"]) == ("warm", "gsm8k:gsm8k")
    assert "somebody" not in to_json(found)


def test_a_hub_name_stays_whole(tmp_path: Path) -> None:
    with Record.create(tmp_path / "run", CONFIG | {"model": "nvidia/Nemotron", "task": "gsm8k:openai/gsm8k"}, {}) as r:
        r.append(0, {"reward/mean": 0.0})
    found = read_evidence(Record.open(tmp_path / "run"))
    assert (found["model"], found["task"]) == ("nvidia/Nemotron", "gsm8k:openai/gsm8k")


def evidence(seed: int, group: int, rank: float, **more: Any) -> Evidence:
    return Evidence(name=f"{group}-{seed}", config=CONFIG | {"seed": seed, "group": group} | more,
                    groups={"step": [0, 0, 10], "all/effective_rank": [rank, rank + 2, rank + 1]})


def test_runs_that_differ_in_the_seed_and_in_what_is_swept_are_one_family() -> None:
    runs = [evidence(s, g, 2.0) for s in range(2) for g in (2, 8)] + [evidence(0, 2, 2.0, lr=0.1), evidence(
        0, 2, 2.0, method="grpo")]
    assert sorted(len(family) for family in families(runs, ("group",))) == [1, 1, 4]
    assert {group: len(some) for group, some in cells(runs, "group").items()} == {2: 4, 8: 2}


@pytest.mark.parametrize("setting", ["model", "task", "method", "lr"])
def test_model_task_method_and_lr_must_be_equal_even_where_a_run_does_not_know_them(setting: str) -> None:
    known = evidence(0, 2, 2.0, lr=0.1)
    without = Evidence(name="x", config={name: value for name, value in known.config.items() if name != setting})
    other = Evidence(name="y", config=dict(known.config) | {setting: "another"})
    assert [len(family) for family in families([known, without, other], ("group",))] == [1, 1, 1]
    assert [len(family) for family in families([known, without, other], ("group", setting))] == [3]


def test_a_setting_that_a_run_does_not_know_is_no_difference_and_neither_is_when_it_was_evaluated() -> None:
    runs = [evidence(0, 2, 2.0), evidence(1, 2, 2.0, beta=0.1), evidence(2, 2, 2.0, eval_every=5),
            evidence(3, 2, 2.0, eval_every=10, eval_rollouts=640), evidence(4, 2, 2.0, eval_rollouts=1280)]
    assert [len(family) for family in families(runs, ("group",))] == [5]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_a_run_that_does_not_know_a_setting_joins_no_two_that_differ_in_it(order: tuple[int, ...]) -> None:
    runs = [evidence(0, 2, 2.0), evidence(1, 2, 2.0, beta=0.1), evidence(2, 2, 2.0, beta=0.2)]
    found = list(families([runs[i] for i in order], ("group",)))
    assert sorted(len(family) for family in found) == [1, 2]
    assert all(len({run["beta"] for run in family} - {None}) == 1 for family in found)


def test_with_three_runs_the_interval_is_over_runs_and_with_fewer_there_is_none() -> None:
    value, unit = mean_of([evidence(s, 8, rank) for s, rank in enumerate((1.0, 2.0, 3.0))], "all/effective_rank") or (
        None, None)
    # Each run: readings (r + 1, r + 1); the means are 2, 3, 4: 3 ± 4.3027·1/√3.
    assert value is not None
    assert (value.mean, value.n, unit) == (3.0, 3, "runs")
    assert value.high == pytest.approx(3 + 4.3027 / 3**0.5)
    value, unit = mean_of([evidence(0, 8, 1.0)], "all/effective_rank") or (None, None)
    assert value is not None
    assert (value.mean, value.low, value.high, value.n, unit) == (2.0, None, None, 2, "readings of one run")
    value, unit = mean_of([evidence(s, 8, 1.0 + s) for s in range(2)], "all/effective_rank") or (None, None)
    assert value is not None
    assert (value.mean, value.low, value.high, value.n, unit) == (2.5, None, None, 4, "readings of 2 runs")
    assert mean_of([evidence(0, 8, 1.0)], "no/such") is None


# -- what is broken --------------------------------------------------------------------------------------------------


def test_a_reading_cut_in_half_is_one_sentence(run: Path) -> None:
    file = run / "scope" / "000001.npz"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CreditscopeError, match="cannot read the readings of step 1"):
        read_evidence(Record.open(run))


def test_a_reading_that_lacks_an_array_is_one_sentence(tmp_path: Path) -> None:
    with Record.create(tmp_path / "run", CONFIG, {}) as record:
        record.save_reading(0, {"group": np.zeros(2, dtype=int)})
        record.append(0, {"reward/mean": 0.0})
    with pytest.raises(CreditscopeError, match=r"000000\.npz is damaged \(there is no 'reward'\)"):
        read_evidence(Record.open(tmp_path / "run"))


def test_arrays_that_do_not_fit_are_one_sentence(tmp_path: Path) -> None:
    arrays = reading(np.random.default_rng(0), [1.0, 0.0, 0.0, 1.0])
    with Record.create(tmp_path / "run", CONFIG, {}) as record:
        record.save_reading(0, arrays | {"gram": arrays["gram"][:2]})
        record.append(0, {"reward/mean": 0.0})
    with pytest.raises(CreditscopeError, match="damaged"):
        read_evidence(Record.open(tmp_path / "run"))


@each(("break_it", "said"), [
    (lambda d: d.pop("format"), "holds no evidence"), (lambda d: d.pop("groups"), "damaged"),
    (lambda d: d["steps"].update({"step": [0]}), "damaged"),
    (lambda d: d["steps"].update({"step": ["x", 1, 2]}), "damaged"),
    (lambda d: d.update(config=[]), "damaged"), (lambda d: d["groups"].update(size=[1.0]), "damaged"),
    (lambda d: d.update(turns=3), "damaged"), (lambda d: d["groups"].pop("step"), "groups without their steps"),
    (lambda d: d["config"].update(lr=math.nan), "damaged"), (lambda d: d["config"].update(lr=-math.inf), "damaged"),
    (lambda d: d["config"].update(deep=[{"x": math.nan}]), "damaged"),
    (lambda d: d["groups"].update(size=[10**400] * 3), "damaged")])
def test_a_file_that_is_not_as_it_was_written_is_refused(run: Path, tmp_path: Path, break_it: Any, said: str) -> None:
    data = json.loads(to_json(read_evidence(Record.open(run))))
    break_it(data)
    (tmp_path / "x.evidence.json").write_text(json.dumps(data))
    with pytest.raises(CreditscopeError, match=said):
        from_json(tmp_path / "x.evidence.json")


def test_a_folder_without_runs_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(CreditscopeError, match="holds no run"):
        read_place(tmp_path)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(CreditscopeError, match="cannot read"):
        read_place(tmp_path / "x.json")
