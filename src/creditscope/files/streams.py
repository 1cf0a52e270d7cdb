"""Standard streams that are closed, full or not read to the end. Imports only the errors: it runs before the rest."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from creditscope.errors import CreditscopeError


class ReaderLeft(BaseException):
    """The reader of the standard output closed it, as in `creditscope list methods | head -1`. Nothing is printed."""


class Guarded(io.TextIOWrapper):
    """A standard stream that replaces `stream`. A character that its encoding lacks becomes a question mark.

    A failed write raises ReaderLeft or a CreditscopeError on the output and is dropped on the error stream; later ones
    go to the null device, so that nothing fails again when the process ends.
    """

    def __init__(self, stream: io.TextIOWrapper, loud: bool) -> None:
        self._loud = loud
        stream.flush()
        super().__init__(stream.detach(), encoding=stream.encoding, errors="replace" if loud else "backslashreplace",
                         line_buffering=stream.line_buffering, write_through=stream.write_through)

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        if self._loud and isinstance(error, BrokenPipeError):
            raise ReaderLeft from None
        if self._loud:
            raise CreditscopeError(f"cannot write to the standard output: {error.strerror}; free some space there, or "
                                   f"send the output elsewhere") from None


def guard() -> None:
    """Replace the standard streams of this process. A closed one becomes the null device: else the next opened file
    would get its number and be written to."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream: Any = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
        elif name != "stdin" and isinstance(stream, io.TextIOWrapper):
            stream = Guarded(stream, loud=name == "stdout")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
