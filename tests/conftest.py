"""Settings that every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before torch is loaded, and for every process that a test starts: tests run side by side, one on each core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What a command prints is compared unwrapped; tests/cli/test_columns.py has the layout at 80 columns.
os.environ["COLUMNS"] = "200"

import hypothesis
import pytest
import torch

from depth import examples

# The machine is noisy: a slow example is not a failure. Examples are fixed, so a red run can be run again. A planted
# bug (tests/mutants.py) need not be shown by the smallest example.
PHASES = set(hypothesis.Phase) - ({hypothesis.Phase.shrink} if "CREDITSCOPE_MUTANT" in os.environ else set())
hypothesis.settings.register_profile("house", deadline=None, max_examples=examples(40), derandomize=True, phases=PHASES)
hypothesis.settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What hypothesis draws for is deep: a part of its draws in `make test`, all of them in the gate."""
    for item in items:
        if hypothesis.is_hypothesis_test(getattr(item, "function", None)):
            item.add_marker(pytest.mark.deep)


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
