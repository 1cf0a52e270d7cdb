"""The section on directions: its numbers are the record's, and a record that lacks parts gets a sentence."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from creditscope.files.markup import shown as visible
from creditscope.microscope import geometry
from creditscope.microscope.spectrum import orthogonal_null, spectrum
from creditscope.report import directions
from creditscope.report.directions import DEFINITIONS, UNWEIGHTED, WEIGHTED, normalised, section, shuffled, size
from creditscope.report.run import Run, read_run
from creditscope.report.section import Section
from records import write_record
from report import records

Arrays = dict[str, NDArray[Any]]
NAMES = list(map(str, DEFINITIONS))


def reading(rows: NDArray[Any], group: list[int], reward: list[float], credit: list[float] | None = None) -> Arrays:
    """A reading of rows c_i ψ_i: with `credit` the rows given are the scores."""
    out: Arrays = {"group": np.array(group), "reward": np.array(reward), "eps": np.array(2e-16)}
    scores = rows @ rows.T
    if credit is None:
        return out | {"gram": scores}
    return out | {"gram": geometry.weighted(scores, credit), "scores": scores, "row_w": np.array(credit)}


def recorded(path: Path, *readings: Mapping[str, NDArray[Any]], kept: Mapping[int, Mapping[str, NDArray[Any]]] | None
             = None) -> Run:
    lines = [{"rollouts/spent": len(arrays["gram"])} for arrays in readings]
    return read_run(write_record(path, lines, readings=dict(enumerate(readings)), groups=kept))


def shown(found: Section) -> Mapping[str, Any]:
    assert found.data is not None
    return found.data


def cosines(text: str) -> list[int]:
    return [int(x) for x in np.frombuffer(base64.b64decode(text), np.int8)]


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_a_group_of_two_orthogonal_rows_has_the_ranks_that_paper_gives(tmp_path: Path) -> None:
    # σ = (4, 3): Σσ = 7, Σσ² = 25, Σσ⁴ = 256 + 81 = 337.
    data = shown(section(recorded(tmp_path / "run", reading(np.array([[3.0, 0], [0, 4]]), [0, 0], [1.0, 0]))))
    (group,) = data["looks"][0]["groups"]
    ranks = dict(zip(NAMES, group["ranks"][data["kinds"].index(WEIGHTED)], strict=True))
    assert ranks["effective_rank"] == 1.96  # 49/25
    assert ranks["participation_ratio"] == 1.855  # 625/337
    assert ranks["stable_rank"] == 1.562  # 25/16, four digits
    assert ranks["top1"] == 0.64
    assert ranks["energy_rank_90"] == 2  # the first has 0.64
    assert ranks["norm_null"] == 1.96  # no rows are aligned, so the null is the measurement
    assert group["sigma"] == [0.8, 0.6]
    assert group["norm"] == [3, 4]
    assert cosines(group["cos"]) == [0]


def test_the_best_reward_comes_first_and_its_cosines_with_it(tmp_path: Path) -> None:
    # Rows a = (1, 0), b = (-1, 0), c = (3, 4); rewards 0, 1, 0.5: order b, c, a.
    # cos(b, c) = -3/5, cos(b, a) = -1, cos(c, a) = 3/5.
    data = shown(section(recorded(
        tmp_path / "run", reading(np.array([[1.0, 0], [-1, 0], [3, 4]]), [5, 5, 5], [0.0, 1, 0.5]))))
    (group,) = data["looks"][0]["groups"]
    assert group["id"] == 5
    assert group["rows"] == [1, 2, 0]
    assert group["reward"] == [1, 0.5, 0]
    assert group["norm"] == [1, 5, 1]
    assert cosines(group["cos"]) == [-60, -100, 60]


def test_groups_are_compared_by_their_mean_rows(tmp_path: Path) -> None:
    # Means of the groups: (1, 0) and (1, 1); cos = 1/√2 = 0.71, norms 1 and √2.
    rows = np.array([[2.0, 0], [0, 0], [1, 2], [1, 0]])
    data = shown(section(recorded(tmp_path / "run", reading(rows, [0, 0, 1, 1], [1.0, 0, 1, 0]))))
    assert data["looks"][0]["between"] == {"ids": [0, 1], "cos": base64.b64encode(bytes([71])).decode(),
                                           "norm": [1, 1.41]}


def test_orthogonal_scores_of_equal_norm_read_the_orthogonal_null(tmp_path: Path) -> None:
    # R = 4, one right: A = (3/4, −1/4, −1/4, −1/4), r_eff = 4·1·3/4 = 3.
    arrays = reading(np.eye(4), [0] * 4, [1.0, 0, 0, 0], [0.75, -0.25, -0.25, -0.25])
    data = shown(section(recorded(tmp_path / "run", arrays)))
    ranks = dict(zip(NAMES, data["looks"][0]["mean"]["ranks"][0], strict=True))
    assert ranks["effective_rank"] == ranks["w_null"] == ranks["norm_null"] == ranks["shuffled"] == 3
    assert orthogonal_null(1, 4) == 3
    # C S C has eigenvalues 1, 1, 1, 0, so at most three directions are left.
    assert 1 < ranks["centred_effective_rank"] < 3


def test_unequal_scores_part_the_null_of_the_norms_from_that_of_the_credits(tmp_path: Path) -> None:
    # ψ of norm 1 and 2, A = ±1/2: norms 1/2 and 1, (3/2)²/(5/4) = 1.8; the w alone give 1²/(1/2) = 2.
    data = shown(section(recorded(tmp_path / "run", reading(np.diag([1.0, 2]), [0, 0], [1.0, 0], [0.5, -0.5]))))
    ranks = dict(zip(NAMES, data["looks"][0]["mean"]["ranks"][0], strict=True))
    assert (ranks["norm_null"], ranks["w_null"]) == (1.8, 2)


# -- identities --------------------------------------------------------------------------------------------------------


def test_the_square_of_the_sum_of_the_drawn_values_is_the_effective_rank() -> None:
    rows = np.random.default_rng(0).normal(size=(6, 9))
    gram = rows @ rows.T
    assert normalised(gram).sum() ** 2 == pytest.approx(spectrum(gram).effective_rank, rel=1e-12)


def test_the_band_is_made_of_the_same_draws_as_the_permutation_null() -> None:
    draw = np.random.default_rng(1)
    rows, credit = draw.normal(size=(6, 9)), np.array([0.5, 0.1, -0.3, -0.2, 0.4, -0.5])
    null = geometry.permutation_null(rows @ rows.T, credit, draws=directions.DRAWS)["effective_rank"]
    found = shuffled(rows @ rows.T, credit).sum(axis=1) ** 2
    np.testing.assert_allclose(found, null, rtol=1e-10)
    assert np.ptp(found) > 0.1  # equal credits would make any draws agree


def test_a_draw_that_gives_credit_to_no_score_is_left_out() -> None:
    # One of two rollouts has a score, one has credit: in about half of the draws they miss each other.
    found = shuffled(np.diag([1.0, 0]), np.array([1.0, 0]))
    assert 20 < len(found) < directions.DRAWS
    assert found.tolist() == [[1.0, 0.0]] * len(found)


@pytest.mark.slow
def test_the_mean_of_live_groups_is_what_the_run_recorded(rich_run: Path) -> None:
    """`gram/group/…`, `scores/group/…`, `null/group/…` and `also/…`, to the four digits of the page."""
    run = read_run(rich_run)
    data = shown(section(run))
    lines = {line["step"]: line for line in run.steps}
    sources = {WEIGHTED: "gram/group", UNWEIGHTED: "scores/group"}
    compared = 0
    for look in data["looks"]:
        line = lines[look["step"]]
        for kind, ranks in zip(data["kinds"], look["mean"]["ranks"], strict=True):
            for name, value in zip(NAMES, ranks, strict=True):
                key = f"{sources[kind]}/{name}" if kind in sources else f"{kind.replace('also ', 'also/')}/{name}"
                key = "null/group/effective_rank" if (kind, name) == (WEIGHTED, "shuffled") else key
                if key in line:
                    assert value == pytest.approx(line[key], rel=5.1e-4), key
                    compared += 1
    # 13 numbers of the rows, at least 8 of the scores, one of the other credit, at each of the readings.
    assert compared >= len(data["looks"]) * (13 + 8 + 1)


@pytest.mark.slow
def test_every_group_is_read_as_the_library_reads_it(rich_run: Path) -> None:
    run = read_run(rich_run)
    data = shown(section(run))
    for look in data["looks"]:
        arrays = run.reading(look["step"])
        assert arrays is not None
        blocks = dict(geometry.by_group(arrays["gram"], arrays["group"]))
        assert [group["id"] for group in look["groups"]] == list(blocks)
        for group in look["groups"]:
            block = blocks[group["id"]]
            assert ("cos" in group) == bool(block.any())
            if "cos" not in group:
                continue
            expected = geometry.ranks(spectrum(block, float(arrays["eps"])))
            for name, value in zip(NAMES, group["ranks"][0], strict=True):
                if name in expected:
                    assert value == pytest.approx(expected[name], rel=5.1e-4)
            picked = arrays["gram"][np.ix_(group["rows"], group["rows"])]
            norm = np.sqrt(np.diag(picked))
            cosine = (picked / np.outer(norm, norm))[np.triu_indices(len(norm), 1)]
            np.testing.assert_allclose(np.array(cosines(group["cos"])) / 100, cosine, atol=0.00501)


@pytest.mark.slow
def test_the_answers_beside_a_cell_are_those_of_its_rows(rich_run: Path) -> None:
    run = read_run(rich_run)
    told = [look for look in shown(section(run))["looks"] if look["texts"]]
    assert told
    for look in told:
        kept = run.rollouts(look["step"])
        assert kept is not None
        assert look["texts"] == [visible(str(text), directions.LONGEST) for text in kept["text"]]


# -- what is not there -------------------------------------------------------------------------------------------------


def test_a_run_without_readings_says_so_and_how_to_get_them(tmp_path: Path) -> None:
    found = section(read_run(records.bare(tmp_path / "run")))
    assert found.data is None
    assert "--scope full" in found.body


def test_rollouts_that_are_not_those_that_were_read_have_no_texts(tmp_path: Path) -> None:
    arrays = reading(np.eye(2), [0, 0], [1.0, 0])
    kept = {"group": np.array([0, 0]), "text": np.array(["yes", "no"])}
    other = {"group": np.array([0, 1]), "text": np.array(["yes", "no"])}
    same = shown(section(recorded(tmp_path / "same", arrays, kept={0: kept})))["looks"][0]
    wrong = shown(section(recorded(tmp_path / "other", arrays, kept={0: other})))["looks"][0]
    none = shown(section(recorded(tmp_path / "none", arrays)))["looks"][0]
    assert (same["kept"], same["texts"]) == (True, ["yes", "no"])
    assert (wrong["kept"], wrong["texts"]) == (True, None)
    assert (none["kept"], none["texts"]) == (False, None)


def test_groups_of_micro_batches_that_never_met_are_read_one_by_one(tmp_path: Path) -> None:
    arrays = reading(np.array([[3.0, 0], [0, 4], [1, 0], [1, 1]]), [0, 0, 1, 1], [1.0, 0, 1, 0])
    arrays["gram"][:2, 2:] = arrays["gram"][2:, :2] = np.nan
    (look,) = shown(section(recorded(tmp_path / "run", arrays)))["looks"]
    assert look["between"] is None
    assert look["groups"][0]["ranks"][0][0] == 1.96
    assert look["mean"]["live"] == 2


def test_a_dead_group_has_rewards_and_no_rank(tmp_path: Path) -> None:
    arrays = reading(np.eye(4), [0, 0, 1, 1], [1.0, 1, 1, 0], [0.0, 0, 0.5, -0.5])
    data = shown(section(recorded(tmp_path / "run", arrays)))
    dead, alive = data["looks"][0]["groups"]
    assert "cos" not in dead
    assert dead["ranks"][data["kinds"].index(WEIGHTED)] is None
    assert dead["ranks"][data["kinds"].index(UNWEIGHTED)][0] == 2  # its scores are there all the same
    assert alive["ranks"][data["kinds"].index(WEIGHTED)][0] == 2
    assert data["looks"][0]["mean"]["live"] == 1


def test_credit_that_varies_inside_a_rollout_leaves_the_nulls_of_credit_out(tmp_path: Path) -> None:
    (look,) = shown(section(recorded(tmp_path / "run", reading(np.eye(2), [0, 0], [1.0, 0]))))["looks"]
    ranks = dict(zip(NAMES, look["mean"]["ranks"][0], strict=True))
    assert ranks["w_null"] is ranks["shuffled"] is ranks["centred_effective_rank"] is None
    assert "low" not in look["mean"]


@pytest.mark.parametrize("damage", [
    {"gram": np.eye(3)}, {"group": np.array([0, 0, 0])}, {"reward": np.array(1.0)}, {"eps": np.array("much")},
    {"gram": np.array([[1.0, 9], [9, 1]])}, {"other_names": np.array(["a"])}, {"gram": np.full((2, 2), np.nan)}])
def test_a_damaged_reading_is_left_out_and_named(tmp_path: Path, damage: Arrays) -> None:
    good = reading(np.eye(2), [0, 0], [1.0, 0])
    run = recorded(tmp_path / "run", good, good | damage)
    found = section(run)
    assert [look["step"] for look in shown(found)["looks"]] == [0]
    assert "1 of the 2 readings" in found.body
    assert any("step 1" in fault for fault in run.faults)


def test_a_run_of_damaged_readings_alone_is_a_sentence(tmp_path: Path) -> None:
    found = section(recorded(tmp_path / "run", {"gram": np.eye(2)}))
    assert found.data is None
    assert "None of the 1 readings" in found.body


# -- what it costs -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.deep
def test_a_long_run_stays_within_its_bytes_and_keeps_its_last_reading(long_run: Path) -> None:
    run = read_run(long_run)
    data = shown(section(run))
    assert size(data) <= 300_000
    assert data["looks"][-1]["step"] == run.record.readings()[-1]
    assert 10 <= len(data["looks"]) <= directions.MOST


@pytest.mark.slow
def test_groups_of_64_leave_fewer_readings_in_the_file(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    group, reward = np.repeat(np.arange(4), 64).tolist(), (np.arange(256) % 3 == 0).astype(float).tolist()
    many = [reading(draw.normal(size=(256, 300)), group, reward) for _ in range(12)]
    found = section(recorded(tmp_path / "run", *many))
    data = shown(found)
    assert size(data) <= 300_000
    assert 2 <= len(data["looks"]) < 12
    assert data["looks"][-1]["step"] == 11
    assert f"{len(data['looks'])} of the 12 readings" in found.body


@pytest.mark.slow
def test_names_and_answers_of_a_hostile_record_are_text_in_which_nothing_is_hidden(tmp_path: Path) -> None:
    data = shown(section(read_run(records.hostile(tmp_path / "run"))))
    texts = [*data["kinds"], *(text for look in data["looks"] for text in look["texts"] or ())]
    assert any("script" in text for text in texts)
    assert not any(c in text for text in texts for c in "\x00\x1b\u202e\ud800")
    assert max(map(len, texts)) < 1000
