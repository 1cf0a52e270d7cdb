"""The release's metadata: extras, addresses, versions and the page for PyPI agree with the code and with each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from creditscope import __version__
from creditscope.errors import EXTRAS

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
OTHER_NAMES = {"vl-convert": "vl-convert-python"}
"""Distributions that are not named as their module."""


def distributions(requirements: list[str]) -> set[str]:
    """Names of distributions, those of creditscope's own extras included."""
    out: set[str] = set()
    for requirement in requirements:
        if own := re.fullmatch(r"creditscope\[(\w+)\]", requirement):
            out |= distributions(PROJECT["project"]["optional-dependencies"][own[1]])
        else:
            out.add(re.split(r"[<>=!\[]", requirement)[0])
    return out


@pytest.mark.parametrize("module", EXTRAS)
def test_the_extra_that_an_error_names_brings_the_module(module: str) -> None:
    name = module.replace("_", "-")
    extra = distributions(PROJECT["project"]["optional-dependencies"][EXTRAS[module]])
    assert OTHER_NAMES.get(name, name) in extra


def test_a_plain_installation_has_no_torch_and_the_extras_whose_packages_need_it_have() -> None:
    core = distributions(PROJECT["project"]["dependencies"])
    assert not core & {"torch", "transformers", "safetensors", "tokenizers", "trl", "altair"}
    extras = {name: distributions(rows) for name, rows in PROJECT["project"]["optional-dependencies"].items()}
    with_torch = {name for name, found in extras.items() if "torch" in found}
    assert with_torch == {"torch", "lab", "trl", "verl", "openrlhf", "skyrl", "lora", "gguf", "log", "ray"}


def test_all_addresses_are_of_one_repository() -> None:
    home = PROJECT["project"]["urls"]["Source"]
    path = home.removeprefix("https://github.com/")
    assert re.fullmatch(r"[\w-]+/[\w-]+", path)
    address = re.compile(r"https://(?:github|raw\.githubusercontent)\.com/([\w-]+/[\w-]+)")
    for file in ("pyproject.toml", "CITATION.cff"):
        assert set(address.findall((ROOT / file).read_text())) == {path}, file


def test_the_citation_agrees_with_the_package() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= found.keys()  # what the format requires
    assert found["version"] == __version__
    assert found["license"] == PROJECT["project"]["license"]
    assert found["repository-code"] == PROJECT["project"]["urls"]["Source"]
    assert [author["name"] for author in found["authors"]] == [
        author["name"] for author in PROJECT["project"]["authors"]]


def test_the_classifiers_name_the_versions_of_python_that_ci_runs() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    named = {found[1] for text in PROJECT["project"]["classifiers"] if (found := re.search(r":: (3\.\d+)$", text))}
    assert named == set(jobs["make"]["strategy"]["matrix"]["python"])
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(jobs["make"]["strategy"]["matrix"]["target"]) <= set(targets)


def test_the_issue_forms_ask_for_the_environment_and_for_the_log() -> None:
    for name in ("bug", "wrong-diagnosis"):
        form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
        asked = {entry["id"]: entry for entry in form["body"]}
        assert "creditscope env" in asked["env"]["attributes"]["description"]
        assert asked["env"]["validations"]["required"]
        assert "log" in asked


@pytest.mark.parametrize(("text", "shown"), [
    ("[a](docs/a.md#b)", "[a](https://github.com/creditscope/creditscope/blob/v1/docs/a.md#b)"),
    ("![a](docs/a.png)", "![a](https://raw.githubusercontent.com/creditscope/creditscope/v1/docs/a.png)"),
    ("[![a](b.svg)](c.md)", "[![a](https://raw.githubusercontent.com/creditscope/creditscope/v1/b.svg)]"
                            "(https://github.com/creditscope/creditscope/blob/v1/c.md)"),
    ('<img width="9" src="a.png">', '<img width="9" src="https://raw.githubusercontent.com/creditscope/creditscope/v1/a.png">'),
    ('<a href="a.md">', '<a href="https://github.com/creditscope/creditscope/blob/v1/a.md">'),
    ("[a](https://arxiv.org/abs/1) [b](#c)", "[a](https://arxiv.org/abs/1) [b](#c)"),
])
def test_relative_links_of_the_readme_are_absolute_on_pypi(text: str, shown: str) -> None:
    assert on_pypi(text) == shown


def on_pypi(text: str) -> str:
    """As the build does it."""
    for rule in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    return text.replace("$HFPR_VERSION", "1")
