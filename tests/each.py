"""Many cases in one test: they all run, and the test fails with the list of those that are wrong.

`@each(names, cases)` stands where `@pytest.mark.parametrize(names, cases)` would, for cases of a few milliseconds of
which no reader asks for one alone: a test of its own costs more time than they do.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

WIDEST = 200


def each(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Every case has a `tmp_path` of its own, undoes its `monkeypatch`, and finds `capsys` empty."""
    given = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    listed = [case if len(given) > 1 else (case,) for case in cases]
    assert listed, f"no cases of {names}"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def folded(**fixtures: Any) -> None:
            wrong: dict[str, BaseException] = {}
            skipped: list[BaseException] = []
            for number, values in enumerate(listed):
                case = dict(zip(given, values, strict=True))
                try:
                    _alone(test, number, case, fixtures)
                except pytest.skip.Exception as reason:
                    skipped.append(reason)
                except (Exception, pytest.fail.Exception) as error:
                    wrong[_name(case)] = error
            if wrong:
                raise Wrong(wrong, len(listed))
            if len(skipped) == len(listed):
                raise skipped[0]

        signature = inspect.signature(test)
        folded.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[p for name, p in signature.parameters.items() if name not in given])
        return folded

    return decorate


def _alone(test: Callable[..., None], number: int, case: dict[str, Any], fixtures: dict[str, Any]) -> None:
    own = dict(fixtures)
    if "tmp_path" in own:
        own["tmp_path"] = own["tmp_path"] / str(number)
        own["tmp_path"].mkdir()
    if "capsys" in own:
        own["capsys"].readouterr()
    if "monkeypatch" not in own:
        return test(**case, **own)
    with own["monkeypatch"].context() as patch:
        return test(**case, **own | {"monkeypatch": patch})


def _name(case: dict[str, Any]) -> str:
    """Rows of a table and functions by their names, all else as Python shows it."""
    return ", ".join(f"{name}={getattr(value, 'name', getattr(value, '__name__', value))!r:.60}"
                     for name, value in case.items())


class Wrong(AssertionError):
    """All cases that failed, each with its error and the line that raised it."""

    def __init__(self, wrong: dict[str, BaseException], count: int) -> None:
        lines = [f"{len(wrong)} of {count} cases failed"]
        for name, error in wrong.items():
            at = traceback.extract_tb(error.__traceback__)[-1]
            lines.append(f"  {name}\n    {at.filename}:{at.lineno}: {type(error).__name__}: {str(error)[:WIDEST]}")
        super().__init__("\n".join(lines))
        self.count = sum(error.count if isinstance(error, Wrong) else 1 for error in wrong.values())
