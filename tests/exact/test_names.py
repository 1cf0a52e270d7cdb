"""The package's own names."""

from __future__ import annotations

import types

import pytest

import creditscope.exact
from cli import loaded


def test_prefix_bias_of_the_package_is_the_function_whatever_was_imported_before() -> None:
    from creditscope.exact import PrefixBias, prefix_bias, prefix_metrics, shared_prefix

    assert [name.__name__ for name in (PrefixBias, prefix_bias, prefix_metrics)] == creditscope.exact.__all__
    assert isinstance(shared_prefix, types.ModuleType)
    assert creditscope.exact.prefix_bias is shared_prefix.prefix_bias
    with pytest.raises(AttributeError, match=r"'creditscope\.exact' has no attribute 'prefix_bais'"):
        creditscope.exact.prefix_bais  # noqa: B018


def test_importing_the_package_loads_no_torch() -> None:
    assert "torch" not in loaded("import creditscope.exact")
