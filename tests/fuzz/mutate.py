"""Damage that keeps a file almost right: one JSON value replaced, doubled or removed, or one odd piece of text put in.

Random bytes rarely get past the parser. What is wrong in one place only goes as deep as a right file does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

DEEP = 990
"""Lists inside lists: json still reads so many, and whoever walks them one call deeper may not."""


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**400, -(10**400), 10**4000, 1e308, -1e308,
    1e200, 1e39, 5e-324, 0.5, float("nan"), float("inf"), float("-inf"), "", " ", "0", "nan", "1e999", "9" * 5000, "٣",
    "\x00", "\ud800", "\u2028", "\ufeff", "x" * 3000, [], {}, [[]], [{}], [0.5], ["a"], {"": {}}, {"role": 1},
    {"value": {}}, nested(50), nested(DEEP), [0] * 300)
"""Values that programs do not expect."""

PIECES: tuple[bytes, ...] = (
    b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r\n", b"\r", b"\xed\xa0\x80", b"\xe2\x80\xa8", b"NaN", b"-Infinity",
    b"1e999999999",
    b"9" * 400, b"9" * 5000, b"0x" + b"f" * 5000, b"1:" * 300 + b"1.5", b"!!int ''", b"!!bool x", b"&a [*a]", b"{" * 60,
    b"[" * 1100, b"- " * 60, b"\\frac{" * 60, b"(" * 90, b"-" * 90, b"% " * 40, b"=" * 90, b"#### ", b"\\boxed{", b"<<",
    b"1/0", b"%%%\n", b",,,,", b"\"", b"'", b"${x}", b"\xd9\xa3", b"\xc2\xb2", b"\xc2\xbd", b"\\ud800", b"step:1 - ")
"""Texts that parsers do not expect."""


def damaged(data: bytes, draw: random.Random) -> bytes:
    """The data with one value of one of its JSON texts changed, or one piece put in."""
    lines = data.split(b"\n")
    order = draw.sample(range(len(lines)), len(lines))
    for at in order[:8] if draw.random() < 0.7 else ():
        head = 1 if lines[at][:1] in (b"\0", b"\1", b"\2") else 0
        try:
            value = json.loads(lines[at][head:])
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict | list):
            try:
                changed = json.dumps(_changed(value, draw)).encode()
            except RecursionError:  # what was put in twice
                continue
            return b"\n".join([*lines[:at], lines[at][:head] + changed, *lines[at + 1:]])
    at = draw.randrange(len(data) + 1)
    cut = at + draw.choice((0, 0, 1, 8))
    return data[:at] + draw.choice(PIECES) + data[cut:]


def _changed(value: Any, draw: random.Random) -> Any:
    """The same tree with one of its nodes changed."""
    holder, key = draw.choice(list(_places(value)))
    if isinstance(holder, dict):
        act = draw.randrange(8)
        if act == 0:
            holder[draw.choice(("step", "tokens", "reward", "group", "\ud800", "x" * 3000, ""))] = holder.pop(key)
        elif act == 1:
            del holder[key]
        else:
            holder[key] = draw.choice(VALUES)
    elif draw.randrange(4):
        holder[key] = draw.choice(VALUES)
    else:
        del holder[key]
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (dict, key) and (list, index); of a long list its first entries."""
    waiting = [value]
    found = False
    while waiting:
        holder = waiting.pop()
        for key in list(holder)[:200] if isinstance(holder, dict) else range(min(len(holder), 20)):
            found = True
            yield holder, key
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])
    if not found:
        yield {"": value}, ""
