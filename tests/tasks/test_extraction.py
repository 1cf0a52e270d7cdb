"""The number of an answer, by hand: marks, boxes, units, signs, and texts that were made to be slow."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditscope.tasks.extraction import final_answer, last_number, number_of, value_of


@pytest.mark.parametrize(("text", "answer"), [
    ("#### 72", "72"), ("####72\nand more", "72"), ("####\n72", "72"),
    ("#### $1,200.50 per month", "$1,200.50 per month"),
    ("#### 5\nno\n#### 7", "7"), ("#### 7\n#### N", "7"), ("#### 7\n####", "7"), ("#### N", "N"), ("####", None),
    (r"\boxed{7}", "7"), (r"\boxed{7} and \boxed{8}", "8"), (r"\boxed{8} and \boxed{x}", "8"),
    (r"\boxed{\boxed{7}}", "7"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{a{b}c", None),
    (r"\boxed {7}", "7"), (r"\boxed{7 \text{ apples}}", r"7 \text{ apples}"), (r"\boxed{\{7\}}", r"\{7\}"),
    (r"#### 7 and \boxed{8}", "8"), (r"#### \boxed{8}", "8"), (r"#### 7" "\n" r"\boxed{8}", "7"), ("}} 7", None),
    ("#### N\n" r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), ("7", None), ("", None)])
def test_the_marked_answer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(("text", "number"), [
    ("it is 7, no, 72.", 72), ("10 - 3", 3), ("10-3", 3), ("= -3", -3), ("(−3)", -3), ("-$3", -3), ("5 - $3", 3),
    ("f(2)-3", 3), ("1,200 apples", 1200), ("1, 2", 2), ("12,3456", 3456), ("a .5", Decimal("0.5")), ("72 %", 72),
    ("1.5.", Decimal("1.5")), ("1e3", 1000), ("٧٢", 72), ("9" * 400, int("9" * 400)), ("9" * 401, None),
    ("1" * 500 + "72", None), ("none", None), ("-", None), ("", None)])
def test_the_last_number_of_a_text(text: str, number: Decimal | int | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(("text", "number"), [
    ("18 apples", 18), ("5 km/h", 5), ("18 dollars per day.", 18), (r"5\text{ cm}", 5), (r"\text{5}", 5),
    ("5 - x", None), (r"5 \mathrm{kg}", 5), ("5/h", None), ("5 (five)", None), ("5 cm^2", None), ("five", None)])
def test_a_unit_may_follow_a_number_and_an_operator_may_not(text: str, number: int | None) -> None:
    assert number_of(text) == number


def test_a_marked_number_hides_every_other_one() -> None:
    assert value_of("#### 7\nno, 72") == 7
    assert value_of("#### seven\nno, 72") == 72


@given(st.integers(-10**9, 10**9))
def test_a_number_is_found_with_commas_a_mark_a_box_or_nothing(number: int) -> None:
    for form in (f"#### {number:,}", rf"\boxed{{{number}}}", f"the answer is {number:,}.", f"= {number}\n"):
        assert value_of(form) == number


@given(st.text(alphabet="#0123456789.,$%e+-*/=(){}\\ \nboxedfractext<>x٣−", max_size=120))
def test_reading_never_raises_and_a_marked_number_is_the_value(text: str) -> None:
    marked = final_answer(text)
    if marked is not None and (number := number_of(marked)) is not None:
        assert value_of(text) == number
