"""gsm8k: the original format is read, answers are compared as numbers, strange ones never crash."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditscope.errors import CreditscopeError
from creditscope.tasks import Problem, find_task
from creditscope.tasks.equations import equations, evaluate, holds
from creditscope.tasks.extraction import final_answer, number_of
from creditscope.tasks.gsm8k import Gsm8k

ROW = {"question": "Half of 48, and 48?",
       "answer": "She sold 48/2 = <<48/2=24>>24 in May.\n48+24 = <<48+24=72>>72\n#### 72"}
needs_math_verify = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(json.dumps(ROW | {"id": f"{split}{i}"}) for i in (1, 2)))
    return tmp_path


TASK, FLEXIBLE = Gsm8k("unused"), Gsm8k("unused", answer="flexible")
"""One process of math-verify each for all tests."""


@pytest.fixture(autouse=True, scope="module")
def _ended() -> Iterator[None]:
    yield
    TASK.close()
    FLEXIBLE.close()


def judge(text: str, answer: str = "72") -> float:
    return TASK.verify(Problem("p", "", answer), text).reward


def test_a_folder_a_file_and_its_sister_are_the_same_source(folder: Path) -> None:
    for source in (folder, folder / "train.jsonl", folder / "test.jsonl"):
        task = find_task(f"gsm8k:{source}")
        assert {p.id for p in task.problems("train")} == {"train1", "train2"}
        assert [p.id for p in task.problems("test")] == ["test1", "test2"]


def test_calculator_marks_are_kept_for_checking_and_stripped_for_display(folder: Path) -> None:
    problem = next(find_task("gsm8k", source=folder).problems("test"))
    assert problem.answer == "72"
    assert problem.meta["chain"] == ("48/2=24", "48+24=72")
    assert problem.meta["solution"] == "She sold 48/2 = 24 in May.\n48+24 = 72\n#### 72"
    assert problem.prompt.startswith(ROW["question"])


def test_lines_with_equations_are_steps(folder: Path) -> None:
    task = find_task("gsm8k", source=folder)
    problem = next(task.problems("test"))
    text = "She sold 48/2 = 24 in May.\nThat is a lot.\n48 + 24 = $73\n#### 73"
    verdict = task.verify(problem, text)
    assert verdict.reward == 0
    assert [(text[s.start:s.end].strip(), s.reward) for s in verdict.steps] == [
        ("She sold 48/2 = 24 in May.", 1), ("48 + 24 = $73", 0)]
    assert all(s.reward for s in task.verify(problem, ROW["answer"]).steps)


@pytest.mark.parametrize(("given_", "answer"), [
    ("#### 72", "72"), ("#### $1,200.00", "1200"), ("#### 40%", "40"), ("#### 18 apples.", "18"), ("#### −3", "-3"),
    ("####٧٢", "72"), ("####72", "72"), (r"so \boxed{72}", "72"), (r"\boxed{\$72}", "72"), ("#### 1e3", "1000"),
    ("#### 5\nno, wait\n#### 72", "72"), ("#### 0072", "72"), ("#### 72.0", "72"),
    ("#### " + "9" * 300, "9" * 300)])
def test_these_answers_are_right(given_: str, answer: str) -> None:
    assert judge(given_, answer) == 1


@pytest.mark.parametrize("text", ["", "72", "####", "#### ", "#### 7 2", "#### 73", "#### -72", "#### 1e9999",
                                  "#### 1e999999999999", "#### nan", "#### inf", r"\boxed{", r"\boxed{}"])
def test_these_answers_are_wrong_and_do_not_crash(text: str) -> None:
    assert judge(text) == 0


def test_an_unmarked_number_counts_only_where_the_answer_is_read_flexibly() -> None:
    problem, text = Problem("p", "", "72"), "It is 7, no, 72."
    strict, flexible = TASK.verify(problem, text), FLEXIBLE.verify(problem, text)
    assert (strict.reward, strict.lost) == (0, True)
    assert (flexible.reward, flexible.lost) == (1, False)


@pytest.mark.parametrize(("text", "strict", "flexible"), [
    ("#### 72", 1, 1), ("#### 7\nno, 72", 0, 0), ("#### N\nIt is 72.", 0, 1), ("so 72 apples", 0, 1), ("7", 0, 0),
    (r"\boxed{72", 0, 1), (r"#### N, so \boxed{72}", 1, 1), ("", 0, 0)])
def test_flexible_pays_what_strict_pays_and_what_is_lost_to_form(text: str, strict: float, flexible: float) -> None:
    problem = Problem("p", "", "72")
    found = TASK.verify(problem, text)
    assert (found.reward, found.lost) == (strict, strict < flexible)
    assert FLEXIBLE.verify(problem, text).reward == flexible


def test_a_reference_that_is_no_number_says_nothing_about_form() -> None:
    assert TASK.verify(Problem("p", "", "a circle"), "a circle").lost is None


def test_the_instruction_shows_a_line_and_no_placeholder(folder: Path) -> None:
    prompt = next(find_task("gsm8k", source=folder).problems("test")).prompt
    assert prompt.splitlines()[-1] == "#### 18"
    assert final_answer("#### N") == "N"  # what a copied placeholder would give
    assert judge("#### N") == 0


def test_an_unknown_extraction_is_refused_by_name() -> None:
    with pytest.raises(CreditscopeError, match="unknown --answer 'loose'"):
        Gsm8k("unused", answer="loose")
    with pytest.raises(CreditscopeError, match="--answer goes with arithmetic and gsm8k"):
        find_task("turns", answer="flexible")


@needs_math_verify
def test_fractions_and_latex_go_to_math_verify() -> None:
    assert judge(r"\boxed{\frac{144}{2}}") == 1
    assert judge("#### 1/2", "0.5") == 1
    assert judge(r"\boxed{\frac{1}{3}}", "0.5") == 0


@pytest.mark.slow
@needs_math_verify
@pytest.mark.parametrize("text", ["#### 9**9**9**9**9", r"\boxed{9^{9^{9^{9}}}}", "#### 10!!!!!!",
                                  r"\boxed{" + r"\frac{1}{" * 60])
def test_an_explosive_expression_is_stopped_and_reported_or_judged_wrong(text: str) -> None:
    task = Gsm8k("unused", seconds=0.5)
    verdict = task.verify(Problem("p7", "", "72"), text)
    task.close()
    assert verdict.reward == 0
    assert verdict.error is None or "row p7" in verdict.error


@given(st.text(alphabet="#0123456789.,$%e+-*/=(){}\\ \nboxedfrac<>x٣", max_size=120))
def test_reading_never_raises(text: str) -> None:
    answer = final_answer(text)
    if answer is not None:
        number_of(answer)
    for left, right in equations(text):
        holds(left, right)


def test_long_texts_take_no_time() -> None:
    began = time.process_time()
    for text in ("#### " + "1," * 50000, "\\boxed{" * 20000, "=" * 20000, "1+" * 20000 + "=3", "(" * 20000 + "1+1=2"):
        judge(text, "72")
    assert time.process_time() - began < 5


@given(st.integers(-999, 999), st.integers(-999, 999), st.integers(1, 999))
def test_expressions_have_their_value(a: int, b: int, c: int) -> None:
    assert evaluate(f"({a}) + {c}*({b}) - 6/{c}") == a + c * b - evaluate(f"6/{c}")  # type: ignore[operator]


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-10**9, max_value=10**9))
def test_number_of_reads_what_is_printed_with_commas_and_a_dollar(value: Decimal) -> None:
    assert number_of(f"${value:,.2f}") == value


@pytest.mark.parametrize(("row", "says"), [
    ({"answer": "#### 1"}, "question"), ({"question": "q"}, "answer"), ({"question": "q", "answer": "7"}, "####"),
    (["list"], "object"), ("not json", "object")])
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: object, says: str) -> None:
    (tmp_path / "test.jsonl").write_text("\n" + json.dumps(row))
    with pytest.raises(CreditscopeError, match=f"line 2.*{says}"):
        find_task(f"gsm8k:{tmp_path}").problems("test")


def test_missing_data_says_what_to_write() -> None:
    with pytest.raises(CreditscopeError, match="gsm8k:FOLDER"):
        find_task("gsm8k")
    with pytest.raises(CreditscopeError, match=r"no such file: nowhere/test\.jsonl"):
        find_task("gsm8k:nowhere/test.jsonl").problems("test")


@pytest.mark.slow
def test_a_lone_file_holds_out_a_tenth_of_its_questions(tmp_path: Path) -> None:
    rows = [{"question": f"How much is {i} + 1?", "answer": f"{i}+1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"}
            for i in range(300)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = find_task(f"gsm8k:{tmp_path / 'mine.jsonl'}")
    train, test = ({p.prompt for p in task.problems(split)} for split in ("train", "test"))
    assert not train & test
    assert len(train) + len(test) == 300
    assert 10 <= len(test) <= 55
