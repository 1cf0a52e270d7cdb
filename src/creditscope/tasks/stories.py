"""Word problems as data: a story is a start, events that change one running value x, distractors and a question.

An event is a row: the kind of thing it applies to, the equations it adds to the solution, its wordings.

    x       the running value            a, b    numbers up to `largest`, half of it
    _       the previous result          c, k    numbers from 2 to 9

`vocabulary()` is closed: about a hundred pieces, digits one by one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

HEAD, TAIL = "Question:", "\nAnswer:\n"
FEMALE, MALE = ("Mia", "Ana", "Lea", "Zoe"), ("Tom", "Ben", "Sam", "Max")
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")
PACKS = ("bags", "boxes", "packs")
MONEY = "dollars"
NUMBER_WORDS = {"half": 2, "twice": 2}  # numbers without a digit
# Pieces of the closed vocabulary: a digit, an operator with its spaces, a word with the space before it, a mark.
PIECE = re.compile(r"[0-9]| [-+*/=] |#### | ?[A-Za-z]+:?|[.?\n ]")


class Event(NamedTuple):
    """One row: where it applies (thing, sale, money), its equations, its wordings."""

    kind: str
    equations: tuple[str, ...]
    wordings: tuple[str, ...]


STARTS = (
    Event("thing", (), ("{P} has {x} {item}.", "{P} starts with {x} {item}.", "{P} finds {x} {item}.")),
    Event("thing", ("c * k",), ("{P} has {c} {pack} with {k} {item} each.", "{P} buys {c} {pack} of {k} {item}.")),
    Event("thing", ("a + b",), ("{Q} has {a} {item}. {P} has {b} more {item} than {Q}.",)),
    Event("thing", ("a - b",), ("{Q} has {a} {item}. {P} has {b} fewer {item} than {Q}.",)),
    Event("thing", ("a * k",), ("{Q} has {a} {item}. {P} has {k} times as many {item}.",)),
    Event("thing", ("a / 2",), ("{Q} has {a} {item}. {P} has half as many {item}.",)),
)
EVENTS = (
    Event("thing", ("x + b",), ("{S} buys {b} more {item}.", "{S} finds {b} more {item}.",
                                "{Q} gives {him} {b} {item}.", "{S} gets {b} {item} from {Q}.")),
    Event("thing", ("x - b",), ("{S} loses {b} {item}.", "{S} sells {b} of the {item}.",
                                "{S} gives {b} {item} to {Q}.", "{Q} takes {b} of the {item}.")),
    Event("thing", ("x / 2",), ("{S} loses half of the {item}.", "{S} gives half of the {item} to {Q}.")),
    Event("thing", ("x / k",), ("{S} puts the {item} into {k} equal {pack} and keeps one of the {pack}.",)),
    Event("thing", ("c * k", "x + _"), ("{S} buys {c} {pack} with {k} {item} each.",
                                        "{S} gets {c} {pack} of {k} {item} from {Q}.")),
    Event("thing", ("c * k", "x - _"), ("{S} gives {k} {item} to each of {c} friends.",
                                        "{S} sells {c} {pack} of {k} {item}.")),
    Event("thing", ("x * 2", "x + _"), ("{Q} has twice as many {item} and gives them all to {P}.",)),
    Event("thing", ("x * k", "x + _"), ("{Q} has {k} times as many {item} and gives them all to {P}.",)),
    Event("sale", ("x * k",), ("{S} sells all the {item} for {k} dollars each.",)),
    Event("money", ("x + b",), ("{S} earns {b} dollars.", "{Q} gives {him} {b} dollars.")),
    Event("money", ("x - b",), ("{S} spends {b} dollars.", "{S} gives {b} dollars to {Q}.")),
    Event("money", ("x / 2",), ("{S} spends half of the dollars.",)),
    Event("money", ("c * k", "x - _"), ("{S} buys {c} {other} for {k} dollars each.",)),
)
DISTRACTORS = ("{Q} has {n} {other}.", "{S} is {n} years old.", "{S} walks {n} miles.", "{Q} buys {n} {other}.")
QUESTIONS = ("How many {item} does {P} have now?", "How many {item} does {P} have in the end?")


@dataclass
class Story:
    """A problem in the making: sentences and equations so far, the running value."""

    rng: random.Random
    largest: int
    x: int = 0
    kind: str = "thing"
    item: str = ""
    person: str = ""
    alone: bool = True  # no other person was named since, so "he" or "she" means the person
    sentences: list[str] = field(default_factory=list)
    chain: list[str] = field(default_factory=list)
    distractors: int = 0

    def happen(self, event: Event) -> bool:
        """Add the event, if numbers can be found that keep every result in 2..largest."""
        for _ in range(12):
            numbers = self._draw()
            done = solve(event.equations, numbers, self.largest)
            if done is not None:
                break
        else:
            return False
        chain, value = done
        self._say(self.rng.choice(event.wordings), numbers)
        self.chain += chain
        self.x = value
        if event.kind == "sale":
            self.kind, self.item = "money", MONEY
        return True

    def distract(self) -> None:
        """Add a sentence with a number that the answer does not need."""
        self._say(self.rng.choice(DISTRACTORS), self._draw())
        self.distractors += 1

    def ask(self) -> None:
        self._say(self.rng.choice(QUESTIONS), {})

    @property
    def prompt(self) -> str:
        return f"{HEAD} {' '.join(self.sentences)}{TAIL}"

    @property
    def solution(self) -> str:
        return "\n".join([*self.chain, f"#### {self.x}"])

    def _draw(self) -> dict[str, int]:
        pick = self.rng.randint
        return {"x": self.x or pick(2, self.largest), "a": pick(2, self.largest), "b": pick(2, self.largest // 2),
                "c": pick(2, 9), "k": pick(2, 9), "n": pick(2, self.largest)}

    def _say(self, wording: str, numbers: dict[str, int]) -> None:
        choice, she = self.rng.choice, self.person in FEMALE
        him = ("her" if she else "him") if self.alone else self.person
        subject = choice((self.person, "She" if she else "He", "Then she" if she else "Then he")) \
            if self.alone and self.sentences else self.person
        words = {"P": self.person, "Q": choice([n for n in FEMALE + MALE if n != self.person]), "S": subject,
                 "him": him, "item": self.item, "pack": choice(PACKS),
                 "other": choice([t for t in THINGS if t != self.item])}
        self.sentences.append(wording.format(**words, **numbers))
        self.alone = "{Q}" not in wording


def tell(rng: random.Random, steps: int, largest: int, distractor: float) -> Story:
    """A random story whose solution has exactly `steps` equations."""
    while True:
        story = Story(rng, largest, item=rng.choice(THINGS), person=rng.choice(FEMALE + MALE))
        told = story.happen(rng.choice([e for e in STARTS if len(e.equations) <= steps]))
        while told and len(story.chain) < steps:
            if rng.random() < distractor:
                story.distract()
            left = steps - len(story.chain)
            kinds = ("money",) if story.kind == "money" else ("thing", "sale")
            fitting = [e for e in EVENTS if e.kind in kinds and len(e.equations) <= left]
            told = any(story.happen(e) for e in rng.sample(fitting, len(fitting)))
        if told:  # a dead end (x = 2, say) is rare: start afresh
            story.ask()
            return story


def solve(equations: tuple[str, ...], numbers: Mapping[str, int], largest: int) -> tuple[list[str], int] | None:
    """The equations with their numbers, and the last result (x if there are none); None if one leaves 2..largest.

    >>> solve(("c * k", "x - _"), {"x": 20, "c": 3, "k": 4}, largest=99)
    (['3 * 4 = 12', '20 - 12 = 8'], 8)
    """
    chain, value = [], numbers["x"]
    for equation in equations:
        left, op, right = equation.split()
        first = numbers[left]
        second = 2 if right == "2" else value if right == "_" else numbers[right]
        result = compute(first, op, second)
        if result is None or not 2 <= result <= largest:
            return None
        chain.append(f"{first} {op} {second} = {result}")
        value = result
    return chain, value


def compute(left: int, op: str, right: int) -> int | None:
    """left op right in whole numbers; None where it is not one.

    >>> compute(12, "/", 4), compute(12, "/", 5), compute(12, "/", 0)
    (3, None, None)
    """
    if op == "/":
        return left // right if right and left % right == 0 else None
    return left + right if op == "+" else left - right if op == "-" else left * right


def pieces(text: str) -> list[str]:
    """The text cut into vocabulary pieces; joined they give it back.

    >>> pieces("12 + 7 = 19")
    ['1', '2', ' + ', '7', ' = ', '1', '9']
    """
    return PIECE.findall(text)


def vocabulary() -> tuple[str, ...]:
    """Every piece that a prompt or a solution can hold, in a fixed order."""
    found = dict.fromkeys([*"0123456789", *(f" {op} " for op in "+-*/="), "#### ", *"\n ."])
    rows = [w for e in STARTS + EVENTS for w in e.wordings] + [*DISTRACTORS, *QUESTIONS]
    subjects = (*FEMALE, *MALE, "She", "He", "Then she", "Then he")
    words = [re.sub(r"\{\w+\}", "", row) for row in rows] + [*subjects, *THINGS, *PACKS, MONEY, "her", "him"]
    found |= dict.fromkeys(pieces(HEAD + TAIL))
    for row in words:
        found |= dict.fromkeys(p if p in ".?" else f" {p.strip()}" for p in pieces(row) if p.strip())
    return tuple(found)
