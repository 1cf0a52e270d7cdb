"""What an error leaves of a run: nothing where it was refused, the reason where it was stopped.

    with stopped(record, fresh) as begun:    writes it
    ended_by(record.steps())                 reads it
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from creditscope.errors import CreditscopeError
from creditscope.runs import schema
from creditscope.runs.record import Record

LONGEST = 500
"""Characters of a reason that are shown: a record is untrusted."""


@contextmanager
def stopped(record: Record, fresh: bool) -> Iterator[list[int]]:
    """A run that is refused before its first step leaves no folder; one that fails later records the reason. The caller
    appends each step that begins to the list: a refused resumption begins none and changes nothing.
    """
    begun: list[int] = []
    try:
        yield begun
    except CreditscopeError as error:
        lines = record.steps()
        if fresh and not lines:
            shutil.rmtree(record.path, ignore_errors=True)
        elif begun:
            with suppress(CreditscopeError):  # the disk may be what stopped it
                record.append(max([begun[-1], *(line["step"] + 1 for line in lines)]), {schema.RUN_STOPPED: str(error)})
        raise


def ended_by(steps: Sequence[Mapping[str, Any]]) -> str:
    """The error that ended a run, in one line; "" where its last line has none, as after a resumption.

    >>> ended_by([{"step": 0}, {"step": 1, "run/stopped": "the loss is nan"}])
    'the loss is nan'
    """
    why = steps[-1].get(schema.RUN_STOPPED) if steps else None
    text = " ".join(why.split()) if isinstance(why, str) else ""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
