"""`arithmetic`: generated word problems of 2 to 6 steps, in which every line of the answer can be checked.

    Question: Mia has 12 apples. She buys 7 more apples. ... How many apples does Mia have now?
    Answer:
    12 + 7 = 19
    #### 19

The answer is the number after the first `####`; with answer="flexible", where there is none, the last number of the
text (`extraction`). A line is right when it is true and in the reference solution: `12 + 5 = 17` is true, but wrong
when the 5 was the distractor. Train and test are split by the solution's hash, so they share no solution, whatever the
wording.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from creditscope.errors import CreditscopeError
from creditscope.tasks import Problem, Step, Verdict, check_split, spans
from creditscope.tasks.extraction import check_extraction, value_of
from creditscope.tasks.stories import NUMBER_WORDS, compute, tell

LINE = re.compile(r"(\d{1,9}) ?([-+*/]) ?(\d{1,9}) ?= ?(\d{1,9})(?: [A-Za-z]{1,20})?\.?")
ANSWER = re.compile(r"#### ?(-?\d{1,9})(?: [A-Za-z]{1,20})?\.?")
TEST_SHARE = 8  # one solution in eight belongs to the test split


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Generated word problems. Harder with more steps, larger numbers, more distractors.

    >>> task = Arithmetic()
    >>> problem = next(task.problems("test"))
    >>> task.verify(problem, problem.meta["solution"]).reward
    1.0
    """

    min_steps: int = 2
    max_steps: int = 6
    largest: int = 99
    """No number in a problem or its solution is larger."""
    distractor: float = 0.3
    """Probability of a sentence with an unneeded number before each event."""
    test_size: int = 1000
    name: str = "arithmetic"
    max_tokens: int = 80
    answer: str = "strict"
    """strict: the number after the first `####`; flexible: where that is none, the last number of the text."""
    files: ClassVar[tuple[Path, ...]] = ()

    def __post_init__(self) -> None:
        check_extraction(self.answer)
        if not 1 <= self.min_steps <= self.max_steps <= 12:
            raise CreditscopeError(f"arithmetic needs 1 <= min_steps <= max_steps <= 12, "
                                   f"got {self.min_steps} and {self.max_steps}")
        if not 20 <= self.largest <= 9999:
            raise CreditscopeError(f"arithmetic's largest must be in 20..9999, got {self.largest}")
        if not 0 <= self.distractor <= 1:
            raise CreditscopeError(f"arithmetic's distractor is a probability in 0..1, got {self.distractor}")
        if self.test_size < 1:
            raise CreditscopeError(f"arithmetic's test_size must be at least 1, got {self.test_size}")

    def problems(self, split: str, seed: int = 0) -> Iterator[Problem]:
        """Endless for `train`. `test` is the same `test_size` different problems whatever the seed."""
        if check_split(split) == "train":
            return (self.problem("train", i, seed) for i in itertools.count())
        return itertools.islice(self._different(), self.test_size)

    def problem(self, split: str, index: int, seed: int = 0) -> Problem:
        """Problem `index` of the split; it does not depend on how many were drawn before it."""
        name = f"train-{seed}-{index}" if split == "train" else f"test-{index}"
        rng = random.Random(f"{name}/{self.min_steps}-{self.max_steps}/{self.largest}/{self.distractor}")
        while True:
            story = tell(rng, rng.randint(self.min_steps, self.max_steps), self.largest, self.distractor)
            if split_of(story.solution) == split:
                break
        meta = {"solution": story.solution, "chain": tuple(story.chain), "distractors": story.distractors}
        return Problem(name, story.prompt, str(story.x), meta)

    def verify(self, problem: Problem, text: str) -> Verdict:
        """1 if the answer is the reference; one step per line, the answer's included."""
        left = list(problem.meta.get("chain", ()))  # reference lines not written yet
        known = _numbers(problem.prompt)
        reward: float | None = None
        marked = False
        steps = []
        for start, end, written in spans(text):
            line = written.strip()
            if not line:
                continue
            right = False
            if reward is None and line.startswith("####"):
                found = ANSWER.fullmatch(line)
                marked = found is not None
                right = found is not None and int(found[1]) == int(problem.answer)
                reward = float(right)
            elif reward is None:  # lines after the answer earn nothing
                right = self._judge(line, known, left, reference="chain" in problem.meta)
            steps.append(Step(start, end, float(right)))
        unmarked = not marked and value_of(text) == int(problem.answer)
        if self.answer == "flexible":
            return Verdict(float(reward or unmarked), tuple(steps), lost=False)
        return Verdict(reward or 0.0, tuple(steps), lost=unmarked)

    @staticmethod
    def _judge(line: str, known: set[int], left: list[str], reference: bool) -> bool:
        """Whether the line is true, from known numbers, and (given a reference) its next use in the solution."""
        found = LINE.fullmatch(line)
        if not found:
            return False
        first, op, second, result = int(found[1]), found[2], int(found[3]), int(found[4])
        if compute(first, op, second) != result or not {first, second} <= known:
            return False
        if reference:
            ways = [f"{first} {op} {second} = {result}"]
            if op in "+*":
                ways.append(f"{second} {op} {first} = {result}")
            match = next((way for way in ways if way in left), None)
            if match is None:
                return False
            left.remove(match)
        known.add(result)
        return True

    def _different(self) -> Iterator[Problem]:
        """Test problems in their order, the first of each solution; lazily, since a thousand take a second."""
        seen: set[str] = set()
        for i in itertools.count():
            problem = _test_problem(self, i)
            if problem.meta["solution"] not in seen:
                seen.add(problem.meta["solution"])
                yield problem


@functools.lru_cache(maxsize=4096)
def _test_problem(task: Arithmetic, index: int) -> Problem:
    """Every evaluation of a run asks the same problems."""
    return task.problem("test", index)


def split_of(solution: str) -> str:
    """The split a solution belongs to, from its hash: names, things and wording do not matter.

    >>> split_of("12 + 7 = 19\\n#### 19")
    'train'
    """
    digest = hashlib.blake2b(solution.encode(), digest_size=4).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_SHARE == 0 else "train"


def _numbers(prompt: str) -> set[int]:
    digits = {int(n) for n in re.findall(r"\d{1,9}", prompt)}
    return digits | {value for word, value in NUMBER_WORDS.items() if word in prompt}
