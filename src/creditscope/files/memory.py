"""Out of memory, in one sentence: what was being done, how much there is, and the settings that need less."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from creditscope.errors import CreditscopeError


@contextmanager
def enough_memory(doing: str, change: str) -> Iterator[None]:
    """Turn a failed allocation into a CreditscopeError; also a decorator."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_short(error):
            raise
        raise CreditscopeError(sentence(error, doing, change)) from None


def is_short(error: BaseException) -> bool:
    """Whether memory ran out: torch's error on a device or the CPU, or Python's. Loads no torch."""
    torch = sys.modules.get("torch")
    return isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def sentence(error: BaseException, doing: str = "", change: str = "") -> str:
    """The message.

    >>> print(sentence(MemoryError(), "sampling", "lower --group").split(" (")[0])
    out of memory while sampling
    """
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", str(error))
    facts = [f"{asked[1]} more were asked for"] if asked else []
    facts += _has("torch" in sys.modules and isinstance(error, sys.modules["torch"].OutOfMemoryError))
    return (f"out of memory{f' while {doing}' if doing else ''} ({'; '.join(facts) or 'nothing more is known'}); "
            + (change or "raise --accumulate, lower --prompts, --group or --max-tokens, or choose a smaller model"))


def _has(device: bool) -> list[str]:
    try:
        if device:
            import torch

            free, total = torch.cuda.mem_get_info()
            return [f"the device has {total / 2**30:.1f} GiB, of which {free / 2**30:.1f} are free"]
        return [f"this machine has {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"]
    except Exception:  # no device, or one that is in no state to answer
        return []
