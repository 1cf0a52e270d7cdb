"""Settings that every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before torch is loaded, and for every process that a test starts: tests run side by side, one on each core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from depth import examples

# The machine is noisy: a slow example is not a failure. Examples are fixed, so a red run can be run again.
hypothesis.settings.register_profile("house", deadline=None, max_examples=examples(40), derandomize=True)
hypothesis.settings.load_profile("house")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Small tensors run faster on one thread, and tests run side by side."""
    torch.set_num_threads(1)


@pytest.fixture
def mini_task() -> Iterator[None]:
    """The task of `mini` can be found by its name."""
    import mini

    with mini.known():
        yield
