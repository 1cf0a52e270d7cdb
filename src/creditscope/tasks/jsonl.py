"""`jsonl`: the user's own file and the user's own reward.

    {"prompt": "...", "answer": "...", anything else}           one row per line
    def reward(text: str, row: dict) -> float: ...              given as module:function

For credit below the answer the function may return a pair, the reward and the answer's steps: a list of
[start, end, reward] or [start, end, reward, state], characters [start, end) of the text, disjoint and in order. A run
whose credit needs steps ends at once if no answer of its first batch has any.

    def reward(text, row):
        steps, at = [], 0
        for line in text.splitlines(keepends=True):
            steps.append([at, at + len(line), float(line.strip() in row["right_lines"])])
            at += len(line)
        return float(row["answer"] in text), steps

The function runs in a process that can be killed (`worker`). A row that could not be judged gets reward 0 and an error
that names the row; `errors` counts them. The function's name comes from the command line, never from the data.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from creditscope.errors import CreditscopeError
from creditscope.files.jsonlines import encodable, fault, numbered_lines, parse_json
from creditscope.tasks import Problem, Step, Verdict, check_split, in_order
from creditscope.tasks.worker import Worker, WorkerError

HELD_OUT = 0.1  # share of the prompts
TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Jsonl:
    """Rows of `source`, judged by `reward`. About HELD_OUT of the prompts are the test."""

    name = "jsonl"
    may_tell_steps = True  # known once the user's function has seen answers

    def __init__(self, source: str | Path = "", reward: str = "", seconds: float = 5.0, max_tokens: int = 512) -> None:
        if not source:
            raise CreditscopeError("task 'jsonl' needs a file; write jsonl:FILE, or source=FILE")
        if not TARGET.fullmatch(reward):
            raise CreditscopeError(f"task 'jsonl' needs a reward function as module:function, got {reward!r}; "
                                   f"for example my_rewards:score, with my_rewards.py in this folder. A learned "
                                   f"reward, model:FOLDER, goes with a task that has a verifier")
        if not 0 < seconds < float("inf"):
            raise CreditscopeError(f"seconds must be positive, got {seconds}")
        self.reward, self.max_tokens, self.errors, self.files = reward, max_tokens, 0, (Path(source),)
        rows = [_problem(row, where, number) for row, where, number in read_rows(source)]
        self._rows = {"train": [p for p in rows if not in_test(p.prompt)],
                      "test": [p for p in rows if in_test(p.prompt)]}
        self._worker = Worker(reward, seconds)
        try:
            self._worker.start()
        except WorkerError as error:
            raise CreditscopeError(f"the reward function {reward!r} could not be loaded: it {error}") from error

    def problems(self, split: str, seed: int = 0) -> Iterator[Problem]:
        return in_order(self._rows[check_split(split)], split, seed)

    def verify(self, problem: Problem, text: str) -> Verdict:
        row = {**problem.meta, "prompt": problem.prompt, "answer": problem.answer}
        try:
            reward, steps = self._worker.judge(text, row)
        except WorkerError as error:
            self.errors += 1
            return Verdict(0.0, error=f"row {problem.id}: {self.reward} {error}")
        return Verdict(reward, tuple(Step(*step) for step in steps or ()))

    def close(self) -> None:
        self._worker.close()


def read_rows(path: str | Path) -> Iterator[tuple[dict[str, Any], Path, int]]:
    """The objects of a JSONL file, each with its file and line."""
    file = Path(path)
    for number, line in numbered_lines(file):
        try:
            row = parse_json(line)
        except ValueError as error:
            raise CreditscopeError(f"{file}, line {number} is not JSON: {fault(error)}") from None
        if not isinstance(row, dict):
            raise CreditscopeError(f"{file}, line {number} must be an object {{...}}, got {type(row).__name__}")
        yield row, file, number


def text_of(row: dict[str, Any], key: str, where: Path, number: int) -> str:
    """The row's text under that key; a number is taken as its text."""
    value = row.get(key)
    if type(value) is int or (isinstance(value, float) and math.isfinite(value)):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        have = ", ".join(name[:40] for name in list(row)[:20]) or "nothing"
        raise CreditscopeError(f"{where}, line {number} needs a text {key!r}; it has {have}")
    if not encodable(value):
        raise CreditscopeError(f"{where}, line {number}: {key!r} has half a character (a lone surrogate), which cannot "
                               f"be tokenised; write whole characters")
    return value


def _problem(row: dict[str, Any], where: Path, number: int) -> Problem:
    prompt = text_of(row, "prompt", where, number)
    answer = text_of(row, "answer", where, number) if row.get("answer") is not None else ""
    return Problem(str(row.get("id", number)), prompt, answer, row)


def in_test(prompt: str) -> bool:
    """Whether a prompt of a file without splits is held out, by its hash: equal prompts are never split."""
    digest = hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=6).digest()
    return int.from_bytes(digest) / 2**48 < HELD_OUT
