"""Generated pages are current, and what the README says can be pasted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from makers import load_script

ROOT = Path(__file__).resolve().parent.parent


def generator() -> ModuleType:
    return load_script(ROOT / "docs" / "generate.py")


def test_the_page_of_methods_is_current() -> None:
    assert generator().methods_page() == (ROOT / "docs" / "methods.md").read_text(), "run: make docs"


@pytest.mark.slow
def test_the_page_of_credit_is_current() -> None:
    assert generator().credit_page() == (ROOT / "docs" / "credit.md").read_text(), "run: make docs"


@pytest.mark.conformance
@pytest.mark.slow
def test_the_page_of_conformance_is_current() -> None:
    pytest.importorskip("trl")

    def without_rounding(text: str) -> str:  # the last digits differ from machine to machine
        return re.sub(r"\| (0|< 1e-1\d) \|", "| tiny |", text)

    page = without_rounding(generator().conformance_page())
    assert page == without_rounding((ROOT / "docs" / "conformance.md").read_text()), "run: make docs"


def test_the_readmes_first_snippet_prints_what_the_readme_shows() -> None:
    readme = (ROOT / "README.md").read_text()
    snippet = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", readme, re.DOTALL)
    assert snippet is not None
    done = subprocess.run([sys.executable, "-c", snippet[1]], capture_output=True, text=True, check=True)
    assert done.stdout == snippet[2]


@pytest.mark.parametrize("verb", ["methods dr_grpo"])
def test_what_the_readme_shows_of_a_verb_is_what_it_prints(verb: str) -> None:
    readme = (ROOT / "README.md").read_text()
    shown = re.search(rf"\$ creditscope {verb}\n(.*?)```", readme, re.DOTALL)
    assert shown is not None
    command = [sys.executable, "-m", "creditscope", *verb.split()]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == shown[1]


def test_every_link_in_the_pages_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
