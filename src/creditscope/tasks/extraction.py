r"""The answer in a text, and its number. Every function takes time in proportion to the text.

    strict      the last number that stands after `####`, else the last in a `\boxed{}`
    flexible    the same, else the last number of the text

An answer that is right by the second and not by the first is lost to its form.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation

from creditscope.errors import unknown

EXTRACTIONS = ("strict", "flexible")
LONGEST = 1000  # characters of a marked answer that are read
DIGITS = 400  # of a number
NUMBER = re.compile(r"[-+]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:e[-+]?\d{1,12})?", re.IGNORECASE)
IN_TEXT = re.compile(r"(?:(?<![\w).])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:e[-+]?\d{1,12})?",
                     re.IGNORECASE)
"""A number inside a text. A minus sign counts where neither a word, a digit nor a bracket stands before it."""
BRACES = re.compile(r"\\boxed ?\{|\\[{}]|[{}]")
WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox) ?\{([^{}]{0,200})\}")


def check_extraction(name: str) -> str:
    """`name` itself, if it is one of EXTRACTIONS."""
    if name not in EXTRACTIONS:
        raise unknown("--answer", name, EXTRACTIONS)
    return name


def final_answer(text: str) -> str | None:
    r"""The marked answer: after the last `####` with a number, else in the last `\boxed{}` with one; where none is a
    number, the first of the same order that has a digit, or any.

    >>> final_answer("so\n#### $1,200.\n"), final_answer(r"#### N, that is \boxed{7}"), final_answer("7")
    ('$1,200.', '7', None)
    """
    found = [part for part in (*_marked(text), *_boxed(text)) if part]
    return min(found, key=_kind, default=None)  # of equals the first


def value_of(text: str) -> Decimal | None:
    """The number of the marked answer; else the last number of the text, however it stands there.

    >>> value_of("#### 7"), value_of("it is 7, or rather 1,200 apples.")
    (Decimal('7'), Decimal('1200'))
    """
    marked = final_answer(text)
    number = number_of(marked) if marked is not None else None
    return number if number is not None else last_number(text)


def last_number(text: str) -> Decimal | None:
    """The last number of a text; None where there is none, or it has more than DIGITS digits.

    >>> last_number("10 - 3 = 7"), last_number("from 5 to -3."), last_number("none")
    (Decimal('7'), Decimal('-3'), None)
    """
    last = deque(IN_TEXT.finditer(_plain(text).replace("$", "")), maxlen=1)
    return _decimal(last[0][0].replace(",", "")) if last and len(last[0][0]) <= DIGITS else None


def number_of(text: str) -> Decimal | None:
    r"""The text as a number, if it is one: `$1,200.50`, `-3`, `40 %`, `٣`, `18 apples`, `5 \text{ km/h}`; else None.

    >>> number_of("$1,200.50") == number_of("1200.5"), number_of("1/2")
    (True, None)
    """
    plain = WORDS.sub(r" \1 ", _plain(text[:LONGEST]))
    plain = plain.replace("\\$", "").replace("$", "").replace("\\%", "").replace("%", "").replace("€", "")
    plain = plain.replace("\\!", "").replace(",", "").replace("\\", " ").strip().rstrip(".").strip()
    found = NUMBER.match(plain)
    if not found:
        return None
    rest = plain[found.end():].strip()
    if rest and not (rest[0].isalpha() and rest.replace(" ", "").replace("/", "").isalpha()):
        return None  # a unit may follow, an operator may not
    return _decimal(found[0])


def _kind(part: str) -> int:
    """0 for a number, 1 for an expression with a digit, 2 for other texts, such as the N of a copied `#### N`."""
    return 0 if number_of(part) is not None else 1 if any(map(str.isdigit, part)) else 2


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("−", "-").strip()


def _decimal(digits: str) -> Decimal | None:
    try:
        return Decimal(digits)  # compared, never expanded: 1e9999 costs nothing
    except InvalidOperation:
        return None


def _marked(text: str) -> Iterator[str]:
    """The first line after each `####`, the last first."""
    for after in reversed(text.split("####")[1:]):
        yield after.strip().partition("\n")[0][:LONGEST].strip()


def _boxed(text: str) -> Iterator[str]:
    r"""What is inside each `\boxed{}` that holds no other, the last first."""
    found, latest = list[str](), -1
    opened: list[int] = []  # per open brace: where the inside of a box begins, -1 for another brace
    for each in BRACES.finditer(text):
        if each[0] == "{":
            opened.append(-1)
        elif each[0] == "}":
            begin = opened.pop() if opened else -1
            if begin == latest >= 0:  # no box was opened in this one
                found.append(text[begin:each.start()][:LONGEST].strip())
        elif each[0].startswith("\\boxed"):
            latest = each.end()
            opened.append(latest)
    return reversed(found)
