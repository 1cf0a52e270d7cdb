"""How far a long piece of file work is: the work calls `tell`, and the display sets `told_to`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Tick = Callable[[int, int], object]
_listener: ContextVar[Tick | None] = ContextVar("listener", default=None)


@contextmanager
def told_to(tick: Tick) -> Iterator[None]:
    """Inside the block, `tell` calls `tick`.

    >>> with told_to(print):
    ...     tell(3, 8)
    3 8
    >>> tell(4, 8)
    """
    before = _listener.set(tick)
    try:
        yield
    finally:
        _listener.reset(before)


def tell(done: int, total: int) -> None:
    """Report done/total to the display, if there is one."""
    if tick := _listener.get():
        tick(done, total)
