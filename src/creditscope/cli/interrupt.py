"""Ctrl-C: the first ends the work after its step, the second at once."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def nothing_written() -> Iterator[None]:
    """Ctrl-C inside says what is left of work that writes its result at the end."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; nothing was written, and the same command starts again") from None


class Interrupt:
    """Ctrl-C once: finish the step, keep everything, stop. Twice: stop now; the record stays valid.

    While `keeps()` is false there is nothing to keep, and the first stops at once: a pipe may never be written to.
    """

    def __init__(self, keeps: Callable[[], bool] = lambda: True) -> None:
        self.asked = False
        self._keeps = keeps

    def __enter__(self) -> Interrupt:
        self._before = {s: signal.signal(s, self._catch) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        return self.asked

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.asked or not self._keeps():
            raise KeyboardInterrupt
        self.asked = True
        with contextlib.suppress(OSError):  # a full disk, or a closed stream
            # os.write, because a signal may arrive in the middle of a print.
            os.write(2, b"stopping after this step; everything is kept (again to stop at once)\n")
