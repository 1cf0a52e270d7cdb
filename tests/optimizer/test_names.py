"""The package's own names."""

from __future__ import annotations

import pytest

import creditscope.optimizer
from cli import loaded
from creditscope.optimizer.table import BRAKES


def test_the_names_are_there_and_a_wrong_one_says_so() -> None:
    from creditscope.optimizer import Brake, KlStop, Probe, Recall, Restart, Shorten

    names = (Brake, KlStop, Probe, Recall, Restart, Shorten)
    assert [name.__name__ for name in names] == creditscope.optimizer.__all__
    rows = {name.replace("_", "") for name in BRAKES if name != "none"}
    assert {name.__name__.lower() for name in names} - {"probe", "brake"} == rows  # every brake of the list
    with pytest.raises(AttributeError, match=r"'creditscope\.optimizer' has no attribute 'Prob'"):
        creditscope.optimizer.Prob  # noqa: B018


def test_importing_the_package_loads_no_torch() -> None:
    assert "torch" not in loaded("import creditscope.optimizer")
    assert "torch" in loaded("from creditscope.optimizer import Recall")
