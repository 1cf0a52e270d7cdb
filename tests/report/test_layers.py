"""The section on layers: shares, ranks and kinds are those of the record's own matrices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from creditscope.microscope.geometry import ranks
from creditscope.microscope.spectrum import spectrum
from creditscope.report.directions import size
from creditscope.report.layers import COLUMNS, kind, section
from creditscope.report.run import Run, read_run
from creditscope.report.section import Section
from records import write_record
from report import records

Arrays = dict[str, NDArray[Any]]


def reading(names: list[str], grams: Any) -> Arrays:
    """The Grams (L, G, R, R) of the groups' rows in each parameter."""
    layers = np.array(grams, dtype=np.float32)
    return {"layer_names": np.array(names), "layer_groups": np.arange(layers.shape[1]), "layers": layers,
            "eps": np.array(1e-6)}


def recorded(path: Path, *readings: Mapping[str, NDArray[Any]]) -> Run:
    return read_run(write_record(path, [{"rollouts/spent": 2}] * len(readings), readings=dict(enumerate(readings))))


def shown(found: Section) -> Mapping[str, Any]:
    assert found.data is not None
    return found.data


# -- by hand -----------------------------------------------------------------------------------------------------------

Q, V, NORM = "model.layers.0.q_proj.weight", "model.layers.1.q_proj.weight", "model.norm.weight"
# q of layer 0: one group with rows of norm 4 and 3, orthogonal: energy 25, r_eff 49/25 = 1.96, top-1 16/25; the other
# group is dead. q of layer 1: equal rows of norm 1 in both groups: energy 4, r_eff 1, top-1 1. The norm has none.
GRAMS = [[[[16, 0], [0, 9]], [[0, 0], [0, 0]]], [[[1, 1], [1, 1]], [[1, 1], [1, 1]]], np.zeros((2, 2, 2))]


def test_shares_are_traces_and_ranks_are_means_of_the_groups_that_have_a_gradient(tmp_path: Path) -> None:
    data = shown(section(recorded(tmp_path / "run", reading([Q, V, NORM], GRAMS))))
    assert data["names"] == [Q, V, NORM]
    assert data["layers"]["share"] == [[0.8621], [0.1379], [0]]  # 25/29, 4/29
    assert data["layers"]["effective_rank"] == [[1.96], [1], [None]]
    assert data["layers"]["top1"] == [[0.64], [1], [None]]


def test_shares_of_a_kind_add_and_its_ranks_are_means_over_parameters(tmp_path: Path) -> None:
    data = shown(section(recorded(tmp_path / "run", reading([Q, V, NORM], GRAMS))))
    assert data["kind_names"] == ["q_proj", "norm"]
    assert data["kinds"]["share"] == [[1], [0]]
    assert data["kinds"]["effective_rank"] == [[1.48], [None]]  # (1.96 + 1)/2
    assert data["kinds"]["top1"] == [[0.82], [None]]


def test_the_stable_rank_is_that_of_the_matrix_of_the_same_name(tmp_path: Path) -> None:
    arrays = reading([Q, V, NORM], GRAMS) | {"matrix_names": np.array([V, Q]),
                                             "matrix_stable_rank": np.array([[2.0, 3.0], [1.5, 1.5]])}
    data = shown(section(recorded(tmp_path / "run", arrays)))
    assert data["layers"]["stable_rank"] == [[1.5], [2.5], [None]]


@pytest.mark.parametrize(("name", "expected"), [
    ("model.layers.11.self_attn.v_proj.weight", "v_proj"), ("h.0.attn.c_attn.bias", "c_attn"),
    ("base_model.model.layers.0.q_proj.lora_B.default.weight", "q_proj"), ("lm_head.weight", "lm_head"),
    ("weight", "weight"), ("", "")])
def test_a_kind_is_the_last_part_of_a_name_that_means_something(name: str, expected: str) -> None:
    assert kind(name) == expected


# -- identities --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_number_is_the_records_own(rich_run: Path) -> None:
    run = read_run(rich_run)
    data = shown(section(run))
    assert data["steps"] == run.record.readings()
    for t, step in enumerate(data["steps"]):
        arrays = run.reading(step)
        assert arrays is not None
        grams = arrays["layers"].astype(np.float64)
        energy = np.trace(grams, axis1=2, axis2=3).sum(axis=1)
        stable = dict(zip(arrays["matrix_names"].tolist(), arrays["matrix_stable_rank"].mean(axis=1), strict=True))
        for i, name in enumerate(data["names"]):
            assert name == arrays["layer_names"][i]
            alive = [ranks(spectrum(block, 1e-6)) for block in grams[i] if block.any()]
            expected = {"share": energy[i] / energy.sum(), "stable_rank": stable.get(name)} | {
                key: np.mean([one[key] for one in alive]) for key in ("effective_rank", "top1")}
            for column in COLUMNS:
                value = data["layers"][column][i][t]
                assert value == (None if expected[column] is None else pytest.approx(expected[column], rel=5.1e-4))


@pytest.mark.slow
def test_shares_of_a_step_add_to_one(rich_run: Path) -> None:
    data = shown(section(read_run(rich_run)))
    for table in (data["layers"], data["kinds"]):
        for t in range(len(data["steps"])):
            assert sum(row[t] for row in table["share"]) == pytest.approx(1, abs=1e-3)


# -- what is not there -------------------------------------------------------------------------------------------------


def test_a_run_without_readings_says_so_and_how_to_get_them(tmp_path: Path) -> None:
    found = section(read_run(records.bare(tmp_path / "run")))
    assert found.data is None
    assert "--scope full" in found.body


def test_readings_without_single_parameters_say_so(tmp_path: Path) -> None:
    found = section(recorded(tmp_path / "run", {"gram": np.eye(2)}))
    assert found.data is None
    assert "single parameters" in found.body


def test_a_step_without_any_gradient_has_no_shares(tmp_path: Path) -> None:
    data = shown(section(recorded(tmp_path / "run", reading([Q], np.zeros((1, 1, 2, 2))))))
    assert data["layers"]["share"] == [[None]]


def test_a_parameter_that_a_step_does_not_have_leaves_a_gap(tmp_path: Path) -> None:
    one = [[[[16, 0], [0, 9]]]]
    data = shown(section(recorded(tmp_path / "run", reading([Q], one), reading([V, Q], one * 2))))
    assert data["names"] == [V, Q]
    assert data["layers"]["effective_rank"] == [[None, 1.96], [1.96, 1.96]]


@pytest.mark.parametrize("damage", [
    {"layers": np.ones((1, 1, 2, 3))}, {"layers": np.ones(3)}, {"layers": np.full((1, 1, 2, 2), np.nan)},
    {"layer_names": np.array(["a", "b"])}, {"matrix_names": np.array(["a"])}, {"layers": np.array("text")}])
def test_a_damaged_reading_is_left_out_and_named(tmp_path: Path, damage: Arrays) -> None:
    good = reading([Q], [[[[16, 0], [0, 9]]]])
    run = recorded(tmp_path / "run", good, good | damage)
    assert shown(section(run))["steps"] == [0]
    assert any("step 1" in fault for fault in run.faults)


def test_without_matrices_the_page_says_what_would_read_them(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", reading([Q], [[[[16, 0], [0, 9]]]]))
    assert "--scope full" in section(run).body


# -- what it costs -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.deep
def test_a_long_run_stays_within_its_bytes(long_run: Path) -> None:
    run = read_run(long_run)
    data = shown(section(run))
    assert size(data) <= 250_000
    assert data["steps"][-1] == run.record.readings()[-1]


def test_hostile_names_are_text_in_which_nothing_is_hidden(tmp_path: Path) -> None:
    names = [*records.HOSTILE, "x" * 10_000]
    data = shown(section(recorded(tmp_path / "run", reading(names, [[[[16, 0], [0, 9]]]] * len(names)))))
    assert not any(c in text for text in data["names"] + data["kind"] + data["kind_names"]
                   for c in "\x00\x1b\u202e\ud800")
    assert max(map(len, data["names"])) < 300
