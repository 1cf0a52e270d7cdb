"""The exception for users: what was given, what is allowed and how to repair it."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable


class CreditscopeError(ValueError):
    """Bad input. The command line prints it without a traceback and exits with 2."""


def printable(text: str) -> str:
    r"""Text that is safe to show on a terminal: control characters are escaped.

    >>> printable("red \x1b[31m alert")
    'red \\x1b[31m alert'
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def require(value: object, kind: type, what: str, repair: str) -> None:
    """Refuse an argument of another class, with the repair.

    >>> require("grpo", int, "method", "give a number")
    Traceback (most recent call last):
    creditscope.errors.CreditscopeError: method must be int, got str; give a number
    """
    if not isinstance(value, kind):
        raise CreditscopeError(f"{what} must be {kind.__name__}, got {type(value).__name__}; {repair}")


def command_line(*words: object) -> str:
    """A command to copy, each word quoted for a shell.

    >>> print(command_line("report", "my run $(date)", "--open"))
    creditscope report 'my run $(date)' --open
    """
    return shlex.join(["creditscope", *map(str, words)])


def unknown(kind: str, given: object, choices: Iterable[str], see: str = "") -> CreditscopeError:
    """An error for a name that is not one of `choices`, with the nearest one as a guess.

    >>> print(unknown("method", "grop", ["grpo", "dapo"], see="creditscope list methods"))
    unknown method 'grop'; did you mean 'grpo'? Choices: dapo, grpo. See: creditscope list methods
    """
    names = sorted(choices)
    given = f"{given[:80]}…" if isinstance(given, str) and len(given) > 80 else given
    near = difflib.get_close_matches(str(given).lower(), names, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else "."
    tail = f" See: {see}" if see else ""
    return CreditscopeError(f"unknown {kind} {given!r}{guess} Choices: {', '.join(names)}.{tail}")
