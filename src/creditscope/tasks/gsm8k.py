"""`gsm8k`: grade-school word problems in the original JSONL format, from a local file, a folder or the hub.

    {"question": "...", "answer": "48/2 = <<48/2=24>>24 clips in May.\\n...\\n#### 72"}

The answer is marked by `####` or `\\boxed{}`. Plain numbers are compared as numbers; anything else (fractions, LaTeX)
goes to math-verify, if it is installed, in a process that can be killed. A step is a line with an equation, right if
all of its equations are true; whether they help to solve the problem is not checked.
"""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from collections.abc import Iterator
from contextlib import nullcontext
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from creditscope.errors import CreditscopeError
from creditscope.files.hub import answers, cache_alone
from creditscope.tasks import SPLITS, Problem, Step, Verdict, check_split, in_order, spans
from creditscope.tasks.equations import equations, holds
from creditscope.tasks.jsonl import in_test, read_rows, text_of
from creditscope.tasks.worker import Worker, WorkerError

MARK = re.compile(r"<<[^<>\n]{0,200}>>")
NUMBER = re.compile(r"[-+]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:e[-+]?\d{1,12})?", re.IGNORECASE)
MEMORY = 2**31  # bytes for math-verify, which would write out 10^(10^10)
LONGEST = 1000  # characters of an answer that are read
INSTRUCTION = "\nSolve it step by step, one step a line. End with a line '#### N', where N is the answer."

class Gsm8k:
    """Problems of `source`: a JSONL file, a folder with train.jsonl and test.jsonl, or a hub name."""

    name = "gsm8k"

    def __init__(self, source: str | Path = "", seconds: float = 5.0, max_tokens: int = 320) -> None:
        if not source:
            raise CreditscopeError("task 'gsm8k' needs its data; write gsm8k:FOLDER (with train.jsonl and test.jsonl), "
                                   "gsm8k:FILE, or gsm8k:openai/gsm8k to load it from the hub")
        self.source, self.max_tokens = str(source), max_tokens
        known = importlib.util.find_spec("math_verify") is not None
        self._worker = Worker("creditscope.tasks.gsm8k:math_equal", seconds, MEMORY) if known else None
        self._rows: dict[str, list[Problem]] = {}

    def problems(self, split: str, seed: int = 0) -> Iterator[Problem]:
        if check_split(split) not in self._rows:
            self._rows[split] = [self._problem(row, where, number, split) for row, where, number in self._read(split)]
        return in_order(self._rows[split], split, seed)

    def verify(self, problem: Problem, text: str) -> Verdict:
        """1 if the marked answer equals the reference."""
        given = final_answer(text)
        steps = tuple(_steps(text))
        if given is None:
            return Verdict(0.0, steps)
        mine, reference = number_of(given), number_of(problem.answer)
        if mine is not None and reference is not None:
            return Verdict(float(mine == reference), steps)
        if self._worker is None:
            return Verdict(float(given.strip() == problem.answer.strip()), steps)
        try:
            return Verdict(self._worker(problem.answer, given), steps)
        except WorkerError as error:
            return Verdict(0.0, steps, error=f"row {problem.id}: math-verify {error}")

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

    def _read(self, split: str) -> Iterator[tuple[dict[str, Any], Path, int]]:
        place = Path(self.source)
        if place.is_dir():
            return read_rows(place / f"{split}.jsonl")
        if place.suffix in (".jsonl", ".json") or place.exists() or self.source.startswith((".", "/", "~")):
            # Beside it may be a file named for the other split; else a tenth of the questions is held out.
            sisters = {s: place.with_name(place.name.replace("train", s).replace("test", s)) for s in SPLITS}
            if sisters["train"] != sisters["test"] and all(path.exists() for path in sisters.values()):
                return read_rows(sisters[split])
            return (found for found in read_rows(place)
                    if in_test(str(found[0].get("question"))) == (split == "test"))
        if "/" not in self.source:
            raise CreditscopeError(f"task 'gsm8k' finds no file or folder {self.source!r}; a hub name has the form "
                                   f"owner/name, such as openai/gsm8k")
        return _from_hub(self.source, split)


def _from_hub(name: str, split: str) -> Iterator[tuple[dict[str, Any], Path, int]]:
    try:
        import datasets
    except ImportError:
        raise CreditscopeError(f"{name!r} is no local file or folder, and loading it from the hub needs the package "
                               f"datasets; pip install datasets, or give a path") from None
    reached = answers(name, "dataset")
    try:
        with nullcontext() if reached else cache_alone():
            rows = datasets.load_dataset(name, "main", split=split)
    except Exception as error:  # the hub fails in many ways; all of them mean the same here
        why = (f"the hub did not give it: {type(error).__name__}: {str(error)[:300]}" if reached else
               "it was not loaded here before, and the hub does not answer; connect to the network, or give a path")
        raise CreditscopeError(f"{name!r} is no local file or folder, and {why}") from error
    return ((dict(row), Path(name), number) for number, row in enumerate(rows, start=1))


# -- reading an answer -----------------------------------------------------------------------------------


def final_answer(text: str) -> str | None:
    """The text after the last `####`, else in the last `\\boxed{}`.

    >>> final_answer("so\\n#### $1,200.\\n"), final_answer(r"it is \\boxed{\\frac{1}{2}}"), final_answer("7")
    ('$1,200.', '\\\\frac{1}{2}', None)
    """
    _, mark, after = text.rpartition("####")
    if mark:
        return after.strip().split("\n", 1)[0][:LONGEST].strip() or None
    start = text.rfind("\\boxed{")
    inside = text[start + len("\\boxed{"):][:LONGEST] if start >= 0 else ""
    depth = 1
    for i, char in enumerate(inside):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return inside[:i].strip() or None
    return None


def number_of(text: str) -> Decimal | None:
    """The text as a number, if it is one: `$1,200.50`, `-3`, `40 %`, `٣`, `18 apples`. None for anything else.

    >>> number_of("$1,200.50") == number_of("1200.5"), number_of("1/2")
    (True, None)
    """
    plain = unicodedata.normalize("NFKC", text[:LONGEST]).strip().replace("−", "-")
    plain = plain.replace("\\$", "").replace("$", "").replace("\\%", "").replace("%", "").replace("€", "")
    plain = plain.replace("\\!", "").replace(",", "").replace("\\", " ").strip().rstrip(".").strip()
    found = NUMBER.match(plain)
    if not found:
        return None
    rest = plain[found.end():].strip()
    if rest and not rest.replace(" ", "").isalpha():  # a unit may follow, an operator may not
        return None
    try:
        return Decimal(found[0])  # compared, never expanded: 1e9999 costs nothing
    except InvalidOperation:
        return None


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
