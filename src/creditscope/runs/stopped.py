"""What an error leaves of a run: nothing where it was refused, the reason where it was stopped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from creditscope.errors import CreditscopeError
from creditscope.runs import schema
from creditscope.runs.record import Record


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
