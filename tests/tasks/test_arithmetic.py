"""arithmetic: every line is judged, the splits are disjoint, the vocabulary is closed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from creditscope.errors import CreditscopeError
from creditscope.tasks import Problem, Task, find_task
from creditscope.tasks.arithmetic import Arithmetic, split_of
from creditscope.tasks.stories import compute, pieces, vocabulary

TASK = Arithmetic(test_size=50)
VOCABULARY = set(vocabulary())
# 12 + 7 = 19, half of it is not whole, 19 - 4 = 15; the 5 is a distractor.
BY_HAND = Problem("hand", "Question: Mia has 12 apples. She is 5 years old. She buys 7 more apples. "
                  "She loses 4 apples. How many apples does Mia have now?\nAnswer:\n", "15",
                  {"chain": ("12 + 7 = 19", "19 - 4 = 15")})


def rewards(text: str, problem: Problem = BY_HAND) -> list[float]:
    return [step.reward for step in TASK.verify(problem, text).steps]


def some(count: int, seed: int = 0, **options: object) -> list[Problem]:
    return list(itertools.islice(Arithmetic(**options).problems("train", seed), count))  # type: ignore[arg-type]


def test_the_reference_solution_earns_1_on_every_line() -> None:
    for problem in [*some(100), *TASK.problems("test")]:
        verdict = TASK.verify(problem, problem.meta["solution"])
        assert verdict.reward == 1
        assert [s.reward for s in verdict.steps] == [1] * (len(problem.meta["chain"]) + 1)


def test_a_right_answer_by_hand() -> None:
    assert rewards("12 + 7 = 19\n19 - 4 = 15\n#### 15") == [1, 1, 1]
    assert rewards("7 + 12 = 19 apples\n19 - 4 = 15\n#### 15") == [1, 1, 1]  # sums commute, a unit may follow


def test_a_false_line_is_wrong_and_what_builds_on_it_too() -> None:
    assert rewards("12 + 7 = 18\n18 - 4 = 14\n#### 14") == [0, 0, 0]


def test_a_true_line_with_the_distractor_is_wrong() -> None:
    assert rewards("12 + 5 = 17\n12 + 7 = 19\n19 - 4 = 15\n#### 15") == [0, 1, 1, 1]


def test_differences_do_not_commute() -> None:
    assert rewards("12 + 7 = 19\n4 - 19 = 15\n#### 15") == [1, 0, 1]


def test_a_line_counts_once() -> None:
    assert rewards("12 + 7 = 19\n12 + 7 = 19\n19 - 4 = 15\n#### 15") == [1, 0, 1, 1]


def test_a_line_may_not_use_a_result_before_it_is_there() -> None:
    assert rewards("19 - 4 = 15\n12 + 7 = 19\n#### 15") == [0, 1, 1]


def test_without_a_reference_a_line_needs_only_known_numbers() -> None:
    loose = Problem("loose", BY_HAND.prompt, "15")
    assert rewards("12 + 5 = 17\n17 - 4 = 13\n9 + 9 = 18\n#### 13", loose) == [1, 1, 0, 0]


def test_only_the_first_marked_answer_counts() -> None:
    assert TASK.verify(BY_HAND, "#### 14\n#### 15").reward == 0
    assert TASK.verify(BY_HAND, "#### 15\n#### 14").reward == 1
    assert rewards("#### 15\n12 + 7 = 19") == [1, 0]


@pytest.mark.parametrize(("text", "strict", "flexible"), [
    ("#### 15", 1, 1), ("12 + 7 = 19\n19 - 4 = 15", 0, 1), (r"so \boxed{15}", 0, 1), ("#### 14\n15", 0, 0),
    ("#### N\nthe answer is 15.", 0, 1), ("15 or 14", 0, 0), ("", 0, 0)])
def test_where_no_number_is_marked_flexible_takes_the_last(text: str, strict: float, flexible: float) -> None:
    found = TASK.verify(BY_HAND, text)
    assert (found.reward, found.lost) == (strict, strict < flexible)
    loose = Arithmetic(answer="flexible").verify(BY_HAND, text)
    assert (loose.reward, loose.lost, loose.steps) == (flexible, False, found.steps)


@pytest.mark.parametrize("text", ["", "\n\n", "15", "####", "#### ", "####15 16", "#### 1e1", "#### ١٥x",
                                  "#### " + "9" * 5000, "9" * 5000 + " + 1 = 2", "+" * 10000])
def test_a_malformed_answer_earns_nothing_and_never_raises(text: str) -> None:
    assert TASK.verify(BY_HAND, text).reward == 0


@given(st.text(alphabet="0123456789+-*/=# \nab\r\u2028", max_size=200))
def test_spans_are_disjoint_in_order_and_hold_every_visible_character(text: str) -> None:
    steps = TASK.verify(BY_HAND, text).steps
    ends = [0, *itertools.chain.from_iterable((s.start, s.end) for s in steps), len(text)]
    assert ends == sorted(ends)
    assert "".join(text[s.start:s.end] for s in steps).split() == text.split()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), low=st.integers(1, 4), more=st.integers(0, 3), largest=st.integers(20, 300),
       distractor=st.floats(0, 1))
def test_problems_obey_their_parameters(seed: int, low: int, more: int, largest: int, distractor: float) -> None:
    options = {"min_steps": low, "max_steps": low + more, "largest": largest, "distractor": distractor}
    for problem in some(5, seed, **options):
        assert low <= len(problem.meta["chain"]) <= low + more
        assert split_of(problem.meta["solution"]) == "train"
        for line in problem.meta["chain"]:
            left, op, right, _, result = line.split()
            assert compute(int(left), op, int(right)) == int(result)
            assert 2 <= int(result) <= largest
        assert distractor > 0 or problem.meta["distractors"] == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_text_is_made_of_the_closed_vocabulary_and_pieces_join_to_it(seed: int) -> None:
    for problem in some(5, seed, largest=99):
        for text in (problem.prompt, problem.meta["solution"]):
            assert "".join(pieces(text)) == text
            assert set(pieces(text)) <= VOCABULARY


def test_the_vocabulary_is_small_and_every_word_of_it_is_used() -> None:
    used = {piece for p in some(1500) for piece in pieces(p.prompt + p.meta["solution"])}
    assert used == VOCABULARY
    assert 70 <= len(VOCABULARY) <= 130


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_train_and_test_share_no_solution(seed: int) -> None:
    test = {p.meta["solution"] for p in TASK.problems("test")}
    assert len(test) == 50
    assert test.isdisjoint(p.meta["solution"] for p in some(40, seed, max_steps=2, largest=20))


def test_a_seed_gives_the_same_problems_and_another_seed_others() -> None:
    assert some(20, seed=3) == some(20, seed=3)
    assert not {p.prompt for p in some(20, seed=3)} & {p.prompt for p in some(20, seed=4)}
    assert list(TASK.problems("test", 1)) == list(TASK.problems("test", 2))


def test_problem_i_can_be_had_without_those_before_it() -> None:
    assert some(6, seed=9)[5] == Arithmetic().problem("train", 5, seed=9)


def test_it_is_a_task_and_is_found_by_name() -> None:
    assert isinstance(find_task("arithmetic"), Task)


@pytest.mark.parametrize(("options", "says"), [
    ({"min_steps": 0}, "min_steps"), ({"min_steps": 5, "max_steps": 4}, "max_steps"), ({"largest": 5}, "largest"),
    ({"distractor": 2.0}, "probability"), ({"test_size": 0}, "test_size"),
    ({"max_stepz": 3}, "did you mean 'max_steps'"),
])
def test_bad_options_are_refused_by_name(options: dict[str, object], says: str) -> None:
    with pytest.raises(CreditscopeError, match=says):
        find_task("arithmetic", **options)


def test_unknown_tasks_splits_and_needless_sources_are_refused() -> None:
    with pytest.raises(CreditscopeError, match="did you mean 'gsm8k'"):
        find_task("gsm8")
    with pytest.raises(CreditscopeError, match="unknown split 'valid'"):
        TASK.problems("valid")
    with pytest.raises(CreditscopeError, match="takes no source"):
        find_task("arithmetic:file.jsonl")
