"""Bounded time and memory, whatever the file: work grows as the input does, and a line without end is not held."""

from __future__ import annotations

import contextlib
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path

import pytest

from cli import run
from creditscope.batch.jsonl import collate, read_jsonl
from creditscope.batch.jsonl import read_rows as rows_of_rollouts
from creditscope.claims.evidence import from_json
from creditscope.diagnosis.read import read as read_log
from creditscope.diagnosis.readers.settings import settings_file
from creditscope.errors import CreditscopeError
from creditscope.files.jsonlines import MAX_DEPTH, numbered_lines, parse_json
from creditscope.files.specs import read_options
from creditscope.offline.batches import Reader
from creditscope.offline.files import SURVEY, Source
from creditscope.offline.scope import scope_file
from creditscope.offline.settings import Settings
from creditscope.runs.record import Record
from creditscope.studies.processbench import read_processbench
from creditscope.tasks import Problem
from creditscope.tasks.arithmetic import Arithmetic
from creditscope.tasks.extraction import final_answer, number_of
from creditscope.tasks.gsm8k import Gsm8k
from creditscope.tasks.jsonl import read_rows
from creditscope.tasks.turns import Ladder
from creditscope.tasks.worker import Worker, WorkerError
from each import each
from makers import to_rows

TESTS = Path(__file__).resolve().parents[1]
GROWTH = 8
"""Most times the work for an input four times as long: linear takes 4, quadratic 16."""
LEAST = 1e-3
"""Seconds below which a clock says nothing."""
TRIES = 6


def grows_in_proportion(short: Callable[[], object], long: Callable[[], object]) -> bool:
    """Whether four times the input takes less than `GROWTH` times the processor time, the fastest of some tries each:
    other programs only make a try longer. The long one is tried again only while it seems too long."""
    def once(work: Callable[[], object]) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    gc.disable()  # a collection in the middle is no work of theirs
    try:
        most = GROWTH * max(LEAST, min(once(short) for _ in range(3)))
        return any(once(long) < most for _ in range(TRIES))
    finally:
        gc.enable()


# -- time ------------------------------------------------------------------------------------------------------------

GSM8K = Gsm8k("unread.jsonl")
GSM8K._worker = None  # math-verify has a limit of its own, tested below
ANSWERS = {
    "braces": "{", "boxes": "\\boxed{", "closed boxes": "\\boxed{}", "fractions": "\\frac{", "marks": "#### ",
    "marks of equations": "<<", "equals": "=", "sums": "1+", "equations": "1+1=2 ", "brackets": "(", "minus": "-",
    "percents": "%", "digits": "9", "unicode digits": "٣", "ligatures": "ﷺ", "accents": "\u0301", "points": "1.",
    "exponents": "1e9", "commas": "1,", "lines": "\n", "moves": "up\n", "returns": "\r\n",
    "true lines": "12 + 7 = 19\n", "surrogates": "\ud800", "nul": "\x00",
}


@pytest.mark.slow
@each("piece", ANSWERS.values())
def test_verifiers_take_time_in_proportion_to_the_answer(piece: str) -> None:
    sums = Problem("0", "Mia has 12 apples and buys 7.", "19", {"chain": ("12 + 7 = 19",)})
    ladder = Ladder()
    rung = next(iter(ladder.problems("test")))

    def work(length: int) -> Callable[[], object]:
        text = piece * (length // len(piece))

        def judge() -> None:
            for tail in ("", "#### 19", "\\boxed{19}"):
                Arithmetic().verify(sums, text + tail)
                ladder.verify(rung, text + tail)
                for answer in (text + tail, tail + text):
                    GSM8K.verify(sums, answer)
                    final_answer(answer)

        return judge

    assert grows_in_proportion(work(4000), work(16_000))


FILES: dict[str, Callable[[int], tuple[str, str]]] = {
    # name -> so many repetitions -> (name of the file, its text)
    "a table with a wide header and many rows": lambda n: ("t.csv", "reward," + ",".join(
        f"column {i}" for i in range(n)) + "\n" + "1\n" * n),
    "a table with one name in every column": lambda n: ("t.csv", ",".join(
        f"run {i} - reward" for i in range(n)) + "\n" + "1\n" * n),
    "a log of one long row": lambda n: ("t.log", "{'loss': '0', " + ", ".join(["'reward': '1'"] * n) + "}\n"),
    "a row of verl's with many pairs": lambda n: ("t.log", "step:1 - " + " - ".join(["actor/pg_loss:1"] * n) + "\n"),
    "a log of talk": lambda n: ("t.log", "step:1 -step:" * n + "\n"),
    "open braces": lambda n: ("t.log", "{'" * n + "\n"),
    "bars": lambda n: ("t.log", "reward step    : " * n + " | a: 1" * n + "\n"),
    "a configuration without an end": lambda n: ("t.log", "{'data': {'a': '" + "\\'" * n + "\n" + " 'b': {\n" * n),
    "overrides": lambda n: ("t.log", "algorithm." + "a.a" * n + " data.a" * n + "\n"),
    "sessions that go back and forth": lambda n: ("t.log", "".join(
        f"step:{5 + i % 2} - critic/score/mean:1\n" for i in range(n))),
    "a notebook with an open tag": lambda n: ("t.ipynb", json.dumps({"nbformat": 4, "cells": [
        {"outputs": [{"data": {"text/html": "<td " * n + "<!--" * n}}]}]})),
}


@pytest.mark.slow
@each("make", FILES.values())
def test_the_doctor_takes_time_in_proportion_to_the_log(make: Callable[[int], tuple[str, str]], tmp_path: Path) -> None:
    def work(length: int) -> Callable[[], object]:
        name, text = make(length)
        name = f"{length}-{name}"
        (tmp_path / name).write_text(text)

        def read() -> None:
            with contextlib.suppress(CreditscopeError):
                read_log(tmp_path / name)

        return read

    assert grows_in_proportion(work(1000), work(4000))


@pytest.mark.slow
def test_many_choices_to_a_long_chat_take_time_in_proportion_to_the_line(tmp_path: Path) -> None:
    # n messages and n choices: taken once for each choice, the messages would be n² work.
    def work(n: int) -> Callable[[], object]:
        line = {"messages": [{"role": "user", "content": "?"}] * n,
                "choices": [{"message": {"content": "2"}, "reward": i % 2} for i in range(n)]}
        path = tmp_path / f"{n}.jsonl"
        path.write_text(json.dumps(line) + "\n")
        return lambda: list(scope_file(path, Settings()))

    assert grows_in_proportion(work(300), work(1200))


# -- depth -----------------------------------------------------------------------------------------------------------


def test_a_value_as_deep_as_allowed_is_read_and_one_level_more_is_refused() -> None:
    for opens, closes in (("[", "]"), ('{"a": ', "}")):
        deep = opens * MAX_DEPTH + "0" + closes * MAX_DEPTH
        assert parse_json(deep)
        with pytest.raises(ValueError, match="nested too deeply: more than 100 levels"):
            parse_json(f"[{deep}]")


def test_brackets_inside_texts_are_no_depth() -> None:
    assert parse_json(json.dumps({"text": "[{" * 10_000, "wide": [[]] * 1000})) == \
        {"text": "[{" * 10_000, "wide": [[]] * 1000}


def test_every_reader_refuses_every_depth_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    readers: tuple[Callable[[Path], object], ...] = (
        read_jsonl, lambda path: list(read_rows(path)), from_json, read_processbench, read_log,
        lambda path: list(Reader(Source(path)).batches()))
    for depth in (101, 500, *range(900, 1000, 7), 100_000):
        path.write_text('{"a": ' + "[" * depth + "]" * depth + "}\n")
        (tmp_path / "run.json").write_bytes(path.read_bytes())
        for read in readers:
            with pytest.raises(CreditscopeError):
                read(path)
        with pytest.raises(CreditscopeError):
            Record.open(tmp_path)


# -- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "value"), [
    ("1e999999999", Decimal("1e999999999")), ("1e-999999999", Decimal("1e-999999999")), ("9" * 400, int("9" * 400)),
    ("9" * 401, None), ("1" * 5000, None), ("٣٤", 34), ("１２", 12), ("²", 2), ("½", None), ("Ⅷ", None), ("1/0", None),
    ("0/0", None), ("-0", 0), ("+5", 5), ("--5", None), ("1e", 1), ("1e1e1", None), ("nan", None), ("inf", None),
    ("-Infinity", None), ("sNaN", None), ("0x1f", None), ("1_000", None), ("1 000", None), (".", None), ("", None),
    ("\x00", None), ("1\x00", None), ("\ud800", None), ("$-1,200.50", Decimal("-1200.5")), ("1e9999999999999", None),
])
def test_a_pathological_number_is_itself_or_none(text: str, value: Decimal | int | None) -> None:
    assert number_of(text) == value


@pytest.mark.parametrize(("spec", "said"), [
    ("samples=" + "9" * 400, "must be a whole number"), ("samples=" + "9" * 5000, "must be a whole number"),
    ("samples=1e999", "must be a whole number"), ("samples=nan", "must be a whole number"),
    ("samples=٣x", "must be a whole number"), ("samples=" + "x" * 100_000, "must be a whole number"),
    ("x" * 100_000, "is no option"),
    ("x" * 100_000 + "=1", "unknown option"), ("samples=1,samples=2", "given twice"), ("samples=\x00", "is no option"),
])
def test_an_odd_option_is_one_short_sentence(spec: str, said: str) -> None:
    from creditscope.credit.table import parse

    with pytest.raises(CreditscopeError, match=said) as error:
        parse(f"monte_carlo,{spec}")
    assert len(str(error.value)) < 1000
    assert read_options("--credit", "a,b=1") == ("a", {"b": 1})


# -- memory ----------------------------------------------------------------------------------------------------------

LINE = 200 * 2**20
ROOM = 300 * 2**20
"""One and a half times the line; a program that holds the line needs three times as much before it parses."""

bounded = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads its size from /proc")


@contextlib.contextmanager
def room(size: int) -> Iterator[None]:
    """In which this process gets so many bytes more, and no others."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@bounded
@pytest.mark.slow
def test_a_line_of_200_megabytes_is_refused_by_every_reader_in_less_than_its_own_memory(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with path.open("wb") as out:
        out.write(b'{"step": "')
        for _ in range(LINE // 2**20):
            out.write(b"x" * 2**20)
    for name in ("run.json", "trainer_state.json", "t.csv", "t.log", "config.yaml"):
        (tmp_path / name).hardlink_to(path)
    readers: tuple[Callable[[], object], ...] = (
        lambda: list(rows_of_rollouts(path)), lambda: list(Source(path).objects()), lambda: list(read_rows(path)),
        lambda: read_processbench(path), lambda: from_json(path), lambda: Record.open(tmp_path),
        lambda: Record(tmp_path, {}, None).steps(),
        *(partial(read_log, tmp_path / name) for name in ("t.log", "t.csv", "trainer_state.json")),
        lambda: settings_file(tmp_path / "config.yaml"))
    with room(ROOM):
        for read in readers:
            with pytest.raises(CreditscopeError):
                read()
        with pytest.raises(MemoryError):  # can-fail: a reader without the limit of a line
            list(numbered_lines(path, max_line=2 * LINE))


@pytest.mark.slow
@bounded
def test_a_line_of_ten_gigabytes_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "huge.jsonl").open("wb") as out:
        out.truncate(10 * 2**30)
    with room(ROOM):
        assert run("inspect", tmp_path / "huge.jsonl") == 2
    assert "line 1: the line is longer than 67,108,864 bytes" in capsys.readouterr().err


def test_a_long_answer_beside_many_short_ones_is_refused_before_it_is_padded() -> None:
    # 2^27 cells are 1 GB of tokens: 2^17 + 1 columns in 2^10 rows are too many, 8 + 1 in 2 are not.
    short = {"tokens": [1], "logp": [-1.0], "reward": 0.0, "group": 0, "step": [0], "step_reward": [0.0]}
    rows = [short] * (2**10 - 1)
    for name, long in {"tokens": short | {"tokens": [1] * (2**17 + 1)},
                       "step_reward": short | {"step_reward": [0.0] * (2**17 + 1)}}.items():
        with pytest.raises(CreditscopeError, match=f"rollout 1023: an answer of 131,073 {name} in a batch of 1,024"):
            collate([*rows, long])
    assert collate([short, short | {"step_reward": [0.0] * 9}]).step_reward is not None


def test_a_function_that_takes_more_memory_than_it_may_is_told_and_not_the_machine() -> None:
    worker = Worker("builtins:bytearray", seconds=30, memory=2**30)
    with pytest.raises(WorkerError, match="raised MemoryError"):
        worker(2**31)
    worker.close()


# -- what was found by the way ---------------------------------------------------------------------------------------


def test_writing_twice_writes_the_same_where_the_last_step_has_no_chosen_token() -> None:
    row = {"tokens": [1, 2], "logp": [-1.0, -1.0], "mask": [True, False], "reward": 0.0, "group": 0, "step": [0, 1],
           "step_reward": [1.0, 0.0]}
    # Token 2 was not chosen and is last, so it is padding; step 1 is without a token and without a reward.
    first = next(to_rows(collate([row])))
    assert (first["step"], first["step_reward"]) == ([0], [1.0])
    assert next(to_rows(collate([first]))) == first
    state = next(to_rows(collate([row | {"step_state": [3, 4]}])))
    assert (state["step_reward"], state["step_state"]) == ([1.0, 0.0], [3, 4])


@pytest.mark.parametrize("settings", ["a: !!int ''", "a: !!bool maybe", "a: !!timestamp x", "beta: 0x" + "f" * 5000,
                                      "beta: 1:1:" + "1:" * 400 + "1.5", "? [a]\n: 1", "loss_type: 0b" + "1" * 20_000])
def test_yaml_that_no_trainer_writes_is_refused_in_a_sentence(settings: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(settings)
    (tmp_path / "t.log").write_text("{'reward': '1', 'frac_reward_zero_std': '0.5'}\n")
    with pytest.raises(CreditscopeError, match=r"c\.yaml"):
        read_log(tmp_path / "t.log", tmp_path / "c.yaml")


@pytest.mark.slow
def test_a_parquet_file_whose_columns_lie_about_themselves_ends_no_process(tmp_path: Path) -> None:
    whole = (TESTS.parent / "examples" / "completions" / "completions_00003.parquet").read_bytes()
    # can-fail: one byte in what it says of a column, and pyarrow calls terminate(), which nobody can catch.
    (tmp_path / "a.parquet").write_bytes(whole[:2810] + b"\x46" + whole[2811:])
    alone = subprocess.run([sys.executable, "-c", SURVEY, tmp_path / "a.parquet"], capture_output=True, check=False)
    assert alone.returncode < 0
    with pytest.raises(CreditscopeError, match=r"a\.parquet: not a parquet file that can be read: .*histogram"):
        list(Source(tmp_path / "a.parquet").objects())
    (tmp_path / "a.parquet").write_bytes(whole)
    assert len(list(Source(tmp_path / "a.parquet").objects())) == 16


def test_infinities_of_both_signs_are_evidence_and_no_crash(tmp_path: Path) -> None:
    from creditscope.diagnosis.engine import diagnose

    values = ("inf", "-inf", "nan", "1e308", "-1e308", "1e200", "0.5", "0.5")
    lines = [f"{{'loss': '{v}', 'reward': '{v}', 'grad_norm': '{v}', 'kl': '{v}', 'frac_reward_zero_std': '{v}', "
             f"'completions/mean_length': '{v}', 'entropy': '{v}'}}\n" for v in values * 4]
    (tmp_path / "t.log").write_text("".join(lines))
    assert diagnose(read_log(tmp_path / "t.log"))
