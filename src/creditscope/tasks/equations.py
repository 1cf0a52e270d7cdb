"""Equations inside a line of prose: found by walking from each `=`, judged in exact fractions. Parsed, never run.

    "She earned 0.2 x 50 = $<<0.2*50=10>>10."  ->  0.2*50 = 10
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from fractions import Fraction

SIGNS = {"x": "*", "X": "*", "×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"}
LEFT = set("0123456789.,$% +-*/()") | set(SIGNS)
REACH = 80  # characters looked at on each side of an equals sign
DIGITS = 15  # a longer number is not a reasoning step
CHARACTERS = set("0123456789.+-*/() ")
LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")  # Python's grammar has no 007
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def equations(line: str) -> list[tuple[str, str]]:
    """(left, right) of every complete equation: an expression on its left, one plain number on its right.

    Incomplete ones (`60 g * 4 = 240`, `2 * x = 80`, `= 3 1/2`) are left out, not judged wrong.

    >>> equations("May: 48/2 = <<48/2=24>>24 clips, so 48+24=72.")
    [('48/2', '24'), ('48+24', '72')]
    """
    found = []
    for i, char in enumerate(line):
        if char != "=":
            continue
        start = i
        while start > 0 and i - start < REACH and line[start - 1] in LEFT:
            start -= 1
        left, right = _plain(line[start:i]), _first_number(line[i + 1:i + REACH])
        if right and any(op in left[1:] for op in "+-*/") and evaluate(left) is not None:
            found.append((left, right))
    return found


def _first_number(text: str) -> str:
    """The number the text starts with, unless it is part of a longer expression."""
    text = text.lstrip(" $").replace(",", "")
    end = 0
    while end < len(text) and (text[end] in "0123456789." or (end == 0 and text[end] in "-−")):
        end += 1
    rest = text[end:].lstrip()
    if rest[:1] in set("%+-*/×÷^(") or rest[:1].isdigit():
        return ""
    return text[:end].replace("−", "-").rstrip(".")


def holds(left: str, right: str) -> bool:
    """Whether left = right, where right may be rounded by half a unit of its last digit.

    >>> holds("100/3", "33.33"), holds("7+5", "13"), holds("7+", "7")
    (True, False, False)
    """
    value, result = evaluate(left), _number(right)
    if value is None or result is None:
        return False
    decimals = len(right.partition(".")[2])
    return abs(value - result) <= (Fraction(1, 2 * 10**decimals) if decimals else 0)


def evaluate(expression: str) -> Fraction | None:
    """The value of + − * / and brackets over decimal numbers; None if it is not such an expression.

    >>> evaluate("2*(3+4)-1/2"), evaluate("1/0"), evaluate("2**3")
    (Fraction(27, 2), None, None)
    """
    text = LEADING_ZEROS.sub("", " ".join(expression[:4 * REACH].split()))
    if not set(text) <= CHARACTERS:
        return None
    try:
        return _value(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, text: str) -> Fraction:
    """The value of a parsed expression; nothing is run, and operations not in OPERATIONS are refused."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left, text), _value(node.right, text))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, text)
    number = _number(text[node.col_offset:node.end_col_offset]) if isinstance(node, ast.Constant) else None
    if number is None:
        raise ValueError("no expression of numbers")
    return number


def _plain(text: str) -> str:
    for sign, plain in SIGNS.items():
        text = text.replace(sign, plain)
    return text.replace(",", "").replace("$", "").replace("%", "/100").replace(" ", "")


def _number(text: str) -> Fraction | None:
    if len(text) > DIGITS or not set(text) <= set("0123456789.-"):  # no exponents: 1e99999 would be written out
        return None
    try:
        return Fraction(Decimal(text))
    except InvalidOperation:
        return None
