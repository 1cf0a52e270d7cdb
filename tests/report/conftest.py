"""Records that the tests of the report share, each made once in a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from report import records


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the processes of a session share."""
    return records.shared(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def rich_run(base: Path) -> Path:
    """A real run with everything on; not to be written into."""
    return records.once(base, "rich", records.rich)


@pytest.fixture(scope="session")
def long_run(base: Path, rich_run: Path) -> Path:
    """Five hundred steps; not to be written into."""
    return records.once(base, "long", lambda path: records.long(path, rich_run))
