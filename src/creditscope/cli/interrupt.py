"""Ctrl-C: the first ends the work after its step, the second at once."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType


def holds_a_run(out: Path | None) -> bool:
    """Whether a stop has something to keep."""
    return out is not None and (out / "run.json").exists()


class Interrupt:
    """Ctrl-C once: finish the step, keep everything, stop. Twice: stop now; the record is whole all the same.

    While nothing is kept, once is enough: what is waited for may never come, such as the other end of a pipe.
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
        with contextlib.suppress(OSError):  # a full disk, or nobody who reads
            # os.write, because a signal may arrive in the middle of a print.
            os.write(2, b"stopping after this step; everything is kept (again to stop at once)\n")
