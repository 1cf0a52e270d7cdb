"""A process that forks runs for the tests: it has loaded what they need, and has not trained itself."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from faults.kills import warm


@pytest.fixture(scope="package")
def forks() -> Iterator[ProcessPoolExecutor]:
    """Whatever is submitted runs there."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=warm) as pool:
        yield pool
