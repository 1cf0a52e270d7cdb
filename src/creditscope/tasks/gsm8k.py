"""`gsm8k`: grade-school word problems in the original JSONL format, from a local file, a folder or the hub.

    {"question": "...", "answer": "48/2 = <<48/2=24>>24 clips in May.\\n...\\n#### 72"}

The answer is marked by `####` or `\\boxed{}`; with answer="flexible" the last number of a text without a marked one
counts too (`extraction`). Plain numbers are compared as numbers; anything else (fractions, LaTeX) goes to math-verify,
if it is installed, in a process that can be killed. A step is a line with an equation, right if all of its equations
are true; whether they help to solve the problem is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Any

from creditscope.errors import CreditscopeError, install_hint, installed
from creditscope.files.hub import answers, cache_alone
from creditscope.tasks import SPLITS, Problem, Step, Verdict, check_split, in_order, spans
from creditscope.tasks.equations import equations, holds
from creditscope.tasks.extraction import LONGEST, check_extraction, final_answer, number_of, value_of
from creditscope.tasks.jsonl import in_test, read_rows, text_of
from creditscope.tasks.worker import Worker, WorkerError

MARK = re.compile(r"<<[^<>\n]{0,200}>>")
MEMORY = 2**31  # bytes for math-verify, which would write out 10^(10^10)
INSTRUCTION = ("\nSolve it step by step, one step a line. Put the answer alone on the last line, as a number after "
               "####. If the answer is 18, the last line is:\n#### 18")
"""A concrete line: small models copy a placeholder such as `#### N` as it stands."""


class Gsm8k:
    """Problems of `source`: a JSONL file, a folder with train.jsonl and test.jsonl, or a hub name."""

    name = "gsm8k"

    def __init__(self, source: str | Path = "", seconds: float = 5.0, max_tokens: int = 320,
                 answer: str = "strict") -> None:
        if not source:
            raise CreditscopeError("task 'gsm8k' needs its data; write gsm8k:FOLDER (with train.jsonl and test.jsonl), "
                                   "gsm8k:FILE, or gsm8k:openai/gsm8k to load it from the hub")
        self.source, self.max_tokens, self.answer = str(source), max_tokens, check_extraction(answer)
        known = installed("math_verify")
        self._worker = Worker("creditscope.tasks.gsm8k:math_equal", seconds, MEMORY) if known else None
        self._rows: dict[str, list[Problem]] = {}

    def problems(self, split: str, seed: int = 0) -> Iterator[Problem]:
        if check_split(split) not in self._rows:
            self._rows[split] = [self._problem(row, where, number, split) for row, where, number in self._read(split)]
        return in_order(self._rows[split], split, seed)

    def verify(self, problem: Problem, text: str) -> Verdict:
        """1 if the answer equals the reference."""
        steps, reference = tuple(_steps(text)), number_of(problem.answer)
        reward, error = self._compare(final_answer(text), problem, reference)
        if reference is None:
            return Verdict(reward, steps, error)
        unmarked = reward == 0 and value_of(text) == reference
        if unmarked and self.answer == "flexible":
            return Verdict(1.0, steps, lost=False)
        return Verdict(reward, steps, error, lost=unmarked)

    def _compare(self, given: str | None, problem: Problem, reference: Decimal | None) -> tuple[float, str | None]:
        """The reward of a marked answer, and why it could not be judged."""
        if given is None:
            return 0.0, None
        mine = number_of(given)
        if mine is not None and reference is not None:
            return float(mine == reference), None
        if self._worker is None:
            return float(given.strip() == problem.answer.strip()), None
        try:
            return self._worker(problem.answer, given), None
        except WorkerError as error:
            return 0.0, f"row {problem.id}: math-verify {error}"

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _problem(self, row: dict[str, Any], where: Path, number: int, split: str) -> Problem:
        question, answer = text_of(row, "question", where, number), text_of(row, "answer", where, number)
        if "####" not in answer:
            raise CreditscopeError(f"{where}, line {number}: the answer must end with '#### N', got {answer[-60:]!r}")
        chain = tuple(mark[2:-2] for mark in MARK.findall(answer))
        meta = {"question": question, "solution": MARK.sub("", answer), "chain": chain}
        final = answer.rpartition("####")[2].strip()
        return Problem(str(row.get("id", f"{split}-{number}")), question + INSTRUCTION, final, meta)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the splits are read from; none where they come from the hub."""
        return tuple(dict.fromkeys(self._places().values()))

    def _places(self) -> dict[str, Path]:
        """The file of each split. Beside a single file may be one that is named for the other split."""
        place = Path(self.source)
        if place.is_dir():
            return {split: place / f"{split}.jsonl" for split in SPLITS}
        if not (place.suffix in (".jsonl", ".json") or place.exists() or self.source.startswith((".", "/", "~"))):
            return {}
        sisters = {split: place.with_name(place.name.replace("train", split).replace("test", split))
                   for split in SPLITS}
        return sisters if all(path.exists() for path in sisters.values()) else dict.fromkeys(SPLITS, place)

    def _read(self, split: str) -> Iterator[tuple[dict[str, Any], Path, int]]:
        places = self._places()
        if places:
            rows = read_rows(places[split])
            if places["train"] != places["test"]:
                return rows
            return (row for row in rows if in_test(str(row[0].get("question"))) == (split == "test"))
        if "/" not in self.source:
            raise CreditscopeError(f"task 'gsm8k' finds no file or folder {self.source!r}; a hub name has the form "
                                   f"owner/name, such as openai/gsm8k")
        return _from_hub(self.source, split)


def _from_hub(name: str, split: str) -> Iterator[tuple[dict[str, Any], Path, int]]:
    with install_hint(f"{name!r} is no local file or folder, and loading it from the hub"):
        import datasets
    reached = answers(name, "dataset")
    try:
        with nullcontext() if reached else cache_alone():
            rows = datasets.load_dataset(name, "main", split=split)
    except Exception as error:  # the hub fails in many ways; all of them mean the same here
        why = (f"the hub did not give it: {type(error).__name__}: {str(error)[:300]}" if reached else
               "it was not loaded here before, and the hub does not answer; connect to the network, or give a path")
        raise CreditscopeError(f"{name!r} is no local file or folder, and {why}") from error
    return ((dict(row), Path(name), number) for number, row in enumerate(rows, start=1))


def math_equal(reference: str, given: str) -> float:
    """math-verify's verdict. Runs in the worker, whose time limit replaces math-verify's own (which needs SIGALRM)."""
    from math_verify import parse, verify

    gold = parse(f"${reference}$", parsing_timeout=None)
    mine = parse(f"${given}$", parsing_timeout=None)
    return float(bool(gold) and bool(mine) and verify(gold, mine, timeout_seconds=None))


def _steps(text: str) -> Iterator[Step]:
    for start, end, line in spans(text):
        found = equations(line[:LONGEST])
        if found and not line.lstrip().startswith("####"):
            yield Step(start, end, float(all(holds(left, right) for left, right in found)))
