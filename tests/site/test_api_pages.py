"""Every public name of the packages that users import is on a page of the API."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("creditscope", "creditscope.credit", "creditscope.diagnosis", "creditscope.exact", "creditscope.optimizer")


def documented(package: str) -> set[str]:
    """Names of the directives and of code between backticks on the pages."""
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    return set(re.findall(rf"\b{re.escape(package)}\.(\w+)", pages)) | set(re.findall(r"^\.\. auto\w+:: (\w+)$", pages,
                                                                                      re.MULTILINE))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_on_a_page_of_the_api(package: str) -> None:
    assert set(importlib.import_module(package).__all__) - documented(package) == set()


def test_the_names_for_trl_are_on_their_page() -> None:
    trl = (ROOT / "src" / "creditscope" / "plugins" / "trl" / "__init__.py").read_text()
    names = re.findall(r'"(\w+)"', re.search(r"__all__ = \[(.*?)\]", trl, re.DOTALL)[1])
    assert len(names) >= 3
    assert set(names) - documented("creditscope.plugins.trl") == set()
