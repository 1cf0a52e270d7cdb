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
"""An archive may take LARGEST bytes, or GROWS times its own size, once it is unpacked. Numbers shrink two-fold, zeros a
thousand-fold."""
SECRETS = re.compile(r"(?<=://)[^/\s@]+(?=@)"
                     r"|(?<=[?&])((?:access_|api_)?(?:token|key|secret|password|signature)=)[^&\s]+"
                     r"|\b(?:hf_|sk-|gh[opsu]_|github_pat_|AKIA)[\w-]{16,}")
"""User and password in an address, a key in its query, and keys that can be told by how they begin."""


def resolved(path: Path) -> Path:
    """Where a path leads, links followed; a link may lead to itself."""
    try:
        return path.resolve()
    except (RuntimeError, OSError):
        raise CreditscopeError(f"{path} is a link that leads to itself; put the file or the folder itself there") \
            from None


def inside(root: Path, path: Path) -> Path:
    """The path, unless a link takes it out of the folder `root`: who reads, writes or deletes there would do it
    elsewhere."""
    if path.is_symlink() and not resolved(path).is_relative_to(resolved(root)):
        raise CreditscopeError(f"{path} is a link out of {root}, and is not followed; put the file itself there")
    return path


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of each file in a zip archive. Nothing is unpacked before all have said how large they are, nor
    more of one than it said."""
    with zipfile.ZipFile(path) as stored:
        parts = stored.infolist()
        size, most = sum(part.file_size for part in parts), max(LARGEST, GROWS * path.stat().st_size)
        if size > most:
            raise CreditscopeError(f"{path} would unpack to {size:,} bytes, over {most:,}; no run writes such a file")
        for part in parts:
            # Python unpacks other methods to their end, whatever they said.
            if part.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise CreditscopeError(f"{path}: {part.filename!r} is compressed by method {part.compress_type}; a run "
                                       f"writes 0 (stored) or 8 (deflated)")
            if part.comment:  # a flipped length makes one of the entries that come after it
                raise CreditscopeError(f"{path}: {part.filename!r} has a comment, and no run writes one")
            with stored.open(part) as data:
                yield part.filename, data.read(part.file_size)


def masked(value: Any) -> Any:
    """A setting without passwords and keys, whatever its shape.

    >>> masked({"task": "gsm8k:https://me:pass@host/a?token=1&b=2", "lr": 0.1})
    {'task': 'gsm8k:https://***@host/a?token=***&b=2', 'lr': 0.1}
    """
    if isinstance(value, str):
        return SECRETS.sub(lambda found: f"{found[1] or ''}***", value)
    if isinstance(value, dict):
        return {key: masked(inner) for key, inner in value.items()}
    return [masked(inner) for inner in value] if isinstance(value, list) else value
