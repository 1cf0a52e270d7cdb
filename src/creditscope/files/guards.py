"""Guards against hostile files: symlinks, zip bombs, sizes, secrets. No torch."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from creditscope.errors import CreditscopeError

LARGEST = 2**30
GROWS = 20
"""An archive may unpack to LARGEST bytes, or to GROWS times its size. Numbers compress two-fold, zeros 1000-fold."""
SECRETS = re.compile(r"(?<=://)[^/\s@]+(?=@)"
                     r"|(?<=[?&])((?:access_|api_)?(?:token|key|secret|password|signature)=)[^&\s]+"
                     r"|\b(?:hf_|sk-|gh[opsu]_|github_pat_|AKIA)[\w-]{16,}")
"""User and password in an address, a key in its query, and keys with a known prefix."""


def resolved(path: Path) -> Path:
    """`Path.resolve`, with an error for a link to itself."""
    try:
        return path.resolve()
    except (RuntimeError, OSError):
        raise CreditscopeError(f"{path} is a link that leads to itself; put the file or the folder itself there") \
            from None


def inside(root: Path, path: Path) -> Path:
    """The path; an error where it is a symlink to a place outside `root`."""
    if path.is_symlink() and not resolved(path).is_relative_to(resolved(root)):
        raise CreditscopeError(f"{path} is a link out of {root}, and is not followed; put the file itself there")
    return path


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of each file in a zip archive. The sum of the declared sizes is checked first, and no more than its
    declared size is read of a file."""
    with zipfile.ZipFile(path) as stored:
        parts = stored.infolist()
        size, most = sum(part.file_size for part in parts), max(LARGEST, GROWS * path.stat().st_size)
        if size > most:
            raise CreditscopeError(f"{path} would unpack to {size:,} bytes, over {most:,}; no run writes such a file")
        for part in parts:
            # For other methods Python does not stop at the declared size.
            if part.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise CreditscopeError(f"{path}: {part.filename!r} is compressed by method {part.compress_type}; a run "
                                       f"writes 0 (stored) or 8 (deflated)")
            if part.comment:  # a wrong length hides later entries in it
                raise CreditscopeError(f"{path}: {part.filename!r} has a comment, and no run writes one")
            with stored.open(part) as data:
                yield part.filename, data.read(part.file_size)


def masked(value: Any) -> Any:
    """A setting with passwords and keys replaced by ***.

    >>> masked({"task": "gsm8k:https://me:pass@host/a?token=1&b=2", "lr": 0.1})
    {'task': 'gsm8k:https://***@host/a?token=***&b=2', 'lr': 0.1}
    """
    if isinstance(value, str):
        return SECRETS.sub(lambda found: f"{found[1] or ''}***", value)
    if isinstance(value, dict):
        return {key: masked(inner) for key, inner in value.items()}
    return [masked(inner) for inner in value] if isinstance(value, list) else value
