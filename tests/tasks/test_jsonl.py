"""jsonl: a user's reward may do anything, and the run goes on."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from creditscope import METHODS
from creditscope.credit import ESTIMATORS, find_estimator
from creditscope.credit.tools import Tools
from creditscope.errors import CreditscopeError
from creditscope.lab.rollout import step_tensors
from creditscope.lab.tools import task_gives
from creditscope.tasks import Problem, Step, Verdict, find_task
from creditscope.tasks.jsonl import Jsonl
from creditscope.tasks.worker import Worker
from makers import make

REWARDS = '''
import os, sys, time
def same(text, row): return text == row["answer"]
def misbehave(text, row):
    print("noise on stdout")
    if text == "none": return None
    if text == "nan": return float("nan")
    if text == "inf": return float("inf")
    if text == "string": return "1.0"
    if text == "raise": raise KeyError("no such key")
    if text == "exit": sys.exit(3)
    if text == "die": os._exit(7)
    if text == "hang": time.sleep(60)
    if text == "spin":
        while True: pass
    return len(row["extra"])
number = 3
def by_lines(text, row):
    """1 for each line that the row's labels call right; the state is the line before."""
    steps, at, state = [], 0, "start"
    for line in text.splitlines(keepends=True):
        steps.append((at, at + len(line), line.strip() in row["steps"], state))
        at, state = at + len(line), line.strip()
    return float(row["answer"] in text), steps
def as_told(text, row):
    """What the row says, to be judged as an answer of a function."""
    return eval(row["returns"])
'''
ROWS = [{"prompt": f"{i} + 1?", "answer": i + 1, "extra": [1, 2]} for i in range(40)]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    monkeypatch.chdir(tmp_path)  # the reward's module is found in the folder one works in
    return tmp_path / "rows.jsonl"


@pytest.fixture
def task(file: Path) -> Iterator[Jsonl]:
    made = Jsonl(file, reward="my_rewards:misbehave", seconds=0.5)
    yield made
    made.close()


def test_rows_are_judged_by_the_function(file: Path) -> None:
    task = find_task(f"jsonl:{file}", reward="my_rewards:same")
    problem = next(task.problems("train"))
    assert task.verify(problem, problem.answer).reward == 1
    assert task.verify(problem, "no").reward == 0


# -- a pair: the reward and the steps --------------------------------------------------------------------------------


@pytest.fixture
def steps_file(file: Path) -> Path:
    file.write_text("\n".join(json.dumps({"prompt": f"{i}?", "answer": str(i + 3), "solution": f"a\n{i + 3}",
                                          "steps": ["a", str(i + 3)]}) for i in range(20)))
    return file


def test_steps_come_with_their_spans_rewards_and_states(steps_file: Path) -> None:
    task = find_task(f"jsonl:{steps_file}", reward="my_rewards:by_lines")
    found = task.verify(Problem("x", "p", "4", {"steps": ["a", "4"]}), "a\nb\n4")
    # Characters 0–2 are "a\n", 2–4 "b\n", 4–5 "4".
    assert found == Verdict(1.0, (Step(0, 2, 1.0, "start"), Step(2, 4, 0.0, "a"), Step(4, 5, 1.0, "b")))
    assert task.verify(Problem("x", "p", "4", {"steps": []}), "") == Verdict(0.0)


def test_credit_by_steps_runs_on_labels_that_stand_in_the_file(steps_file: Path) -> None:
    task = find_task(f"jsonl:{steps_file}", reward="my_rewards:by_lines")
    problem = next(task.problems("test"))
    given = task_gives(task, problem)
    for name in ("step_reward", "state_return"):
        ESTIMATORS[name].require(given, "task 'jsonl'")
    texts = [f"a\n{problem.answer}", "b\nb"]
    step, worth, state = step_tensors([task.verify(problem, text) for text in texts],
                                      [["a", "\n", problem.answer], ["b", "\n", "b"]], 3)
    batch = replace(make([1, 0], [0, 0], [3, 3]), step=step, step_reward=worth.double(), step_state=state)
    # Steps earn 1, 1 and 0, 0: mean ½.
    assert find_estimator("step_reward")(METHODS["p1_grpo"], batch, Tools()).tolist() == [[.5] * 3, [-.5] * 3]


@pytest.mark.slow
@pytest.mark.parametrize(("returns", "steps"), [
    ("1.0, []", []), ("[1, [[0, 4, 0]]]", [(0, 4, 0.0, None)]), ("1, ((0, 1, True), (3, 4, -2.5, None))",
                                                              [(0, 1, 1.0, None), (3, 4, -2.5, None)]),
    ("1, [[0, 2, 1, ''], [2, 4, 1, 'x']]", [(0, 2, 1.0, ""), (2, 4, 1.0, "x")]),
    ("1, [[__import__('numpy').int64(1), 2, __import__('numpy').float32(0.5)]]", [(1, 2, 0.5, None)])])
def test_a_pair_is_taken_as_lists_or_tuples_with_or_without_states(
        file: Path, returns: str, steps: list[tuple[int, int, float, str | None]]) -> None:
    task = Jsonl(file, reward="my_rewards:as_told")
    verdict = task.verify(Problem("x", "p", "a", {"returns": returns}), "text")
    assert verdict == Verdict(1.0, tuple(Step(*step) for step in steps))


def test_spans_count_characters_as_python_does(file: Path) -> None:
    task = Jsonl(file, reward="my_rewards:as_told")
    text = "é😀\ud800\n"  # four characters, though eight and more bytes
    good, bad = (task.verify(Problem("x", "p", "a", {"returns": f"1, [[0, {end}, 1]]"}), text) for end in (4, 5))
    assert good.steps == (Step(0, 4, 1.0),)
    assert bad.error is not None


@pytest.mark.slow
@pytest.mark.parametrize(("returns", "says"), [
    ("1, [[0, 2, 1], [1, 3, 1]]", r"step 1 \(from 0\) \[1, 3, 1\]; it begins before step 0 ends, at 2"),
    ("1, [[2, 4, 1], [0, 2, 1]]", r"step 1 .*begins before step 0 ends, at 4"),
    ("1, [[0, 2, 1], [2, 5, 1]]", r"step 1 .*0 <= start < end <= 4, the length of the text"),
    ("1, [[-1, 2, 1]]", "step 0 .*0 <= start < end <= 4"), ("1, [[2, 2, 1]]", "0 <= start < end"),
    ("1, [[3, 2, 1]]", "0 <= start < end"), ("1, [[0.0, 2, 1]]", "step 0 .*whole numbers"),
    ("1, [[0, True, 1]]", "whole numbers"), ("1, [['0', 2, 1]]", "whole numbers"),
    ("1, [[0, 2, float('nan')]]", "step 0 .*its reward must be a finite number, not nan"),
    ("1, [[0, 2, None]]", "finite number, not None"), ("1, [[0, 2, '1']]", "finite number, not '1'"),
    ("1, [[0, 2, 10**400]]", "step 0 .*finite number"),
    ("1, [[0, 2, 1, 7]]", "step 0 .*its state must be a text.*not int"),
    ("1, [[0, 2]]", r"step 0 .*must be \[start, end, reward\] or"), ("1, [[0, 2, 1, 's', 0]]", "step 0"),
    ("1, ['abc']", "step 0"), ("1, {0: 1}", "the steps {0: 1} .dict.; they must be a list"),
    ("1, 2", "the steps 2 .int."), ("1, None", "the steps None"),
    ("None, []", "None .NoneType.; it must return a number"),
    ("float('nan'), [[0, 2, 1]]", "nan; it must return a finite number"),
    ("1, [], []", "must return a number, or a pair"), ("[1]", "must return a number, or a pair")])
def test_a_bad_step_is_named_and_the_answer_earns_nothing(file: Path, returns: str, says: str) -> None:
    task = Jsonl(file, reward="my_rewards:as_told")
    verdict = task.verify(Problem("7", "p", "a", {"returns": returns}), "text")
    assert (verdict.reward, verdict.steps, task.errors) == (0, (), 1)
    assert verdict.error is not None
    assert re.match(f"row 7: my_rewards:as_told returned .*{says}", verdict.error)


def test_train_is_shuffled_by_the_seed_and_equal_prompts_keep_their_split(file: Path) -> None:
    task = Jsonl(file, reward="my_rewards:same")
    train, test = list(task.problems("train")), list(task.problems("test"))
    assert sorted([*train, *test], key=lambda p: int(p.id)) == sorted([*train, *test], key=lambda p: int(p.answer))
    assert train == list(task.problems("train")) != list(task.problems("train", seed=1))
    assert [int(p.id) for p in test] == sorted(int(p.id) for p in test)
    assert not {p.prompt for p in train} & {p.prompt for p in test}
    assert len(train) + len(test) == 40


@pytest.mark.slow
@pytest.mark.parametrize(("text", "says"), [
    ("none", "returned None"), ("nan", "returned nan"), ("inf", "returned inf"), ("string", "must return a number"),
    ("raise", "KeyError.*my_rewards.py, line 10"), ("exit", "SystemExit"), ("die", "exit status 7"),
    ("hang", "within 0.5 s"), ("spin", "within 0.5 s")])
def test_what_a_reward_does_wrong_is_reported_with_the_row_and_the_next_call_works(
        task: Jsonl, text: str, says: str) -> None:
    problem = next(task.problems("train"))
    verdict = task.verify(problem, text)
    assert verdict.reward == 0
    assert verdict.error is not None
    assert verdict.error.startswith(f"row {problem.id}: my_rewards:misbehave ")
    assert re.search(says, verdict.error)
    assert task.errors == 1
    assert task.verify(problem, "fine").reward == 2


def test_a_call_costs_less_than_five_milliseconds(task: Jsonl) -> None:
    problem = next(task.problems("train"))
    task.verify(problem, "fine")
    began = time.perf_counter()
    for _ in range(50):
        task.verify(problem, "fine")
    assert (time.perf_counter() - began) / 50 < 5e-3


def test_a_hang_in_a_thread_is_stopped_too(task: Jsonl) -> None:
    problem, errors = next(task.problems("train")), []
    thread = threading.Thread(target=lambda: errors.append(task.verify(problem, "hang").error))
    thread.start()
    thread.join(timeout=20)
    assert "within 0.5 s" in errors[0]


def test_the_process_ends_with_its_task(file: Path) -> None:
    worker = Worker("my_rewards:same", seconds=5)
    worker.start()
    assert worker._process is not None
    process = worker._process
    del worker
    assert process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@pytest.mark.parametrize(("options", "says"), [
    ({}, "module:function"), ({"reward": "no_colon"}, "module:function"),
    ({"reward": "os.system('x'):f"}, "module:function"),
    ({"reward": "absent_module:f"}, "absent_module"), ({"reward": "my_rewards:absent"}, "absent"),
    ({"reward": "my_rewards:number"}, "not a function"), ({"reward": "my_rewards:same", "seconds": 0}, "seconds")])
def test_bad_options_are_refused_before_the_run(file: Path, options: dict[str, object], says: str) -> None:
    with pytest.raises(CreditscopeError, match=says):
        find_task("jsonl", source=file, **options)


@pytest.mark.parametrize(("line", "says"), [
    ("{", "line 2 is not JSON"), ("[]", "line 2 must be an object"),
    ('{"prompt": "p", "answer": "1", "answer": "2"}', "line 2 is not JSON: 'answer' stands twice"),
    ('{"answer": "1"}', "line 2 needs a text 'prompt'"),
    ('{"prompt": ""}', "'prompt'"), ('{"prompt": "p", "answer": []}', "'answer'")])
def test_a_bad_row_is_named_by_file_and_line(file: Path, line: str, says: str) -> None:
    file.write_text('{"prompt": "p"}\n' + line)
    with pytest.raises(CreditscopeError, match=says):
        Jsonl(file, reward="my_rewards:same")


def test_the_reward_cannot_come_from_the_data(file: Path) -> None:
    file.write_text(json.dumps({"prompt": "p", "reward": "my_rewards:same"}))
    with pytest.raises(CreditscopeError, match="module:function"):
        Jsonl(file)


def test_text_that_is_not_plain_reaches_the_function(task: Jsonl) -> None:
    assert task.verify(Problem("x", "p", "a", {"extra": [1]}), "line\nbreak \u2028 \ud800 ٣").reward == 1
    assert "not JSON" in str(task.verify(Problem("x", "p", "a", {"extra": {1}}), "").error)


@pytest.mark.parametrize("key", ["prompt", "answer"])
def test_half_a_character_is_refused_where_it_stands(key: str, file: Path) -> None:
    row = {"prompt": "1 + 1", "answer": "2"}
    file.write_text(json.dumps(row) + "\n" + json.dumps(row | {key: "\ud800"}) + "\n")
    with pytest.raises(CreditscopeError, match=f"line 2: '{key}' has half a character"):
        find_task(f"jsonl:{file}", reward="my_rewards:by_lines")
