"""Steps by column: the same mappings come out that were put in, and a column is what the mappings say."""

from __future__ import annotations

from typing import Any

import pytest

from creditscope.runs.columns import BLOCK, Steps

LINES: list[dict[str, Any]] = [
    {"step": 0, "loss": 0.5, "n": 3, "kept": ["scope"]},
    {"step": 1, "n": 4, "odd": 1},
    {"step": 2, "loss": float("inf"), "n": 5, "odd": 0.5},
    {"step": 3, "loss": 0.25, "odd": True, "text": "x"}]


@pytest.mark.parametrize("lines", [[], LINES, LINES * BLOCK, [*LINES[:1] * BLOCK, *LINES[1:2] * BLOCK]])
def test_what_is_put_in_comes_out(lines: list[dict[str, Any]]) -> None:
    steps = Steps.of(iter(lines))
    assert [dict(step) for step in steps] == lines
    assert [list(map(type, step.values())) for step in map(dict, steps)] == [
        [type(line[name]) for name in steps.names if name in line] for line in lines]
    assert steps == lines
    assert Steps.of(steps) is steps


def test_steps_that_differ_in_one_value_are_not_equal() -> None:
    assert Steps.of(LINES) != Steps.of([*LINES[:-1], LINES[-1] | {"text": "y"}])
    assert Steps.of(LINES) != Steps.of(LINES[:-1])


def test_a_step_lacks_what_it_does_not_have() -> None:
    first, second = Steps.of(LINES)[:2]
    assert first["kept"] == ["scope"]
    assert "loss" not in second
    assert second.get("loss") is None
    with pytest.raises(KeyError):
        second["none of them has it"]
    with pytest.raises(IndexError):
        Steps.of(LINES)[4]


def test_a_column_is_an_array_of_one_kind_or_of_objects() -> None:
    steps = Steps.of(LINES)
    assert {name: steps.column(name).values.dtype.str for name in steps.names} == {
        "step": "<i8", "loss": "<f8", "n": "<i8", "kept": "|O", "odd": "|O", "text": "|O"}
    assert steps.column("loss").at.tolist() == [0, 2, 3]
    assert steps.column("nothing").at.tolist() == []


def test_numbers_leave_out_truth_text_and_what_is_not_finite() -> None:
    steps = Steps.of(LINES)
    assert [part.tolist() for part in steps.numbers("loss")] == [[0, 3], [0.5, 0.25]]
    assert [part.tolist() for part in steps.numbers("odd")] == [[1, 2], [1.0, 0.5]]
    assert steps.numbers("text").at.tolist() == []


def test_a_part_of_the_steps_counts_its_own_places() -> None:
    last = Steps.of(LINES)[-2:]
    assert [step["step"] for step in last] == [2, 3]
    assert last.column("odd").at.tolist() == [0, 1]
    assert last.column("kept").at.tolist() == []
    assert last[:0].column("step").at.tolist() == []
    assert [step["step"] for step in Steps.of(LINES).having("loss", "n")] == [0, 2]
    assert Steps.of(LINES)[1:].having("loss")[0]["step"] == 2


def test_values_together_are_those_of_steps_that_have_all() -> None:
    assert Steps.of(LINES)[1:].together("step", "odd", "n") == [(1, 1, 4), (2, 0.5, 5)]
    assert Steps.of(LINES).together("step", "nothing") == []


def test_numeric_keeps_numbers_of_the_named_columns_and_finite_those_that_are() -> None:
    steps = Steps.of(LINES).numeric(lambda name: name in ("step", "loss", "text"))
    assert steps == [{"step": 0, "loss": 0.5}, {"step": 1}, {"step": 2, "loss": float("inf")},
                     {"step": 3, "loss": 0.25}]
    assert steps.finite()[2] == {"step": 2}
    assert list(steps.names) == ["step", "loss"]
