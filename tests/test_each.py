"""Folded cases fail, are counted and are kept apart as cases of their own would."""

from __future__ import annotations

from pathlib import Path

import pytest

from each import Wrong, each


def test_every_case_runs_and_the_failure_names_those_that_are_wrong() -> None:
    seen = []

    @each("a, b", [(1, 1), (1, 2), (3, 3), (4, 5)])
    def equal(a: int, b: int) -> None:
        seen.append(a)
        assert a == b, f"{a} is not {b}"

    with pytest.raises(Wrong) as caught:
        equal()
    assert seen == [1, 1, 3, 4]
    assert caught.value.count == 2
    assert str(caught.value).startswith("2 of 4 cases failed\n  a=1, b=2\n")
    assert "AssertionError: 4 is not 5" in str(caught.value)
    assert f"{__file__}:" in str(caught.value)


def test_two_lists_are_crossed_and_their_failures_counted() -> None:
    @each("a", [0, 1])
    @each("b", [0, 1])
    def at_most_one(a: int, b: int) -> None:
        assert a + b < 1

    with pytest.raises(Wrong) as caught:
        at_most_one()
    assert caught.value.count == 3


def test_an_error_of_any_kind_and_a_failed_raises_are_failures() -> None:
    @each("kind", [ValueError, KeyError, pytest.fail])
    def breaks(kind: type[Exception]) -> None:
        if kind is pytest.fail:
            with pytest.raises(OSError):
                pass
        raise kind("planted")

    with pytest.raises(Wrong, match="3 of 3 cases failed"):
        breaks()


def test_a_test_of_which_every_case_is_skipped_is_skipped_and_no_cases_is_an_error() -> None:
    @each("a", [1, 2])
    def lacks(a: int) -> None:
        pytest.skip("not here")

    with pytest.raises(pytest.skip.Exception):
        lacks()
    with pytest.raises(AssertionError, match="no cases"):
        each("a", [])


class Where:
    value = "outside"


@each("number", [0, 1, 2])
def test_fixtures_are_each_cases_own(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "left behind").touch()
    assert Where.value == "outside"
    monkeypatch.setattr(Where, "value", number)
    assert capsys.readouterr().out == ""
    print(number)
