"""jsonl: a user's reward may do anything, and the run goes on."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from creditscope.errors import CreditscopeError
from creditscope.tasks import Problem, find_task
from creditscope.tasks.jsonl import Jsonl
from creditscope.tasks.worker import Worker

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


def test_train_is_shuffled_by_the_seed_and_equal_prompts_keep_their_split(file: Path) -> None:
    task = Jsonl(file, reward="my_rewards:same")
    train, test = list(task.problems("train")), list(task.problems("test"))
    assert sorted([*train, *test], key=lambda p: int(p.id)) == sorted([*train, *test], key=lambda p: int(p.answer))
    assert train == list(task.problems("train")) != list(task.problems("train", seed=1))
    assert [int(p.id) for p in test] == sorted(int(p.id) for p in test)
    assert not {p.prompt for p in train} & {p.prompt for p in test}
    assert len(train) + len(test) == 40
    whole = Jsonl(file, reward="my_rewards:same", test=file)
    assert len(list(whole.problems("train"))) == len(list(whole.problems("test"))) == 40


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
    ({"reward": "my_rewards:number"}, "not a function"), ({"reward": "my_rewards:same", "held_out": 1.0}, "held_out"),
    ({"reward": "my_rewards:same", "seconds": 0}, "seconds"), ({"reward": "my_rewards:same", "test": "nope"}, "nope")])
def test_bad_options_are_refused_before_the_run(file: Path, options: dict[str, object], says: str) -> None:
    with pytest.raises(CreditscopeError, match=says):
        find_task("jsonl", source=file, **options)


@pytest.mark.parametrize(("line", "says"), [
    ("{", "line 2 is not JSON"), ("[]", "line 2 must be an object"),
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
