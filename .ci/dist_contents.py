"""What a release holds: every file of the package and of the repository, and a page for PyPI whose links work.

    python .ci/dist_contents.py WHEEL SDIST WHEEL_FROM_THE_TREE
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import BytesParser
from pathlib import Path

NEEDED = ("creditscope/models/tiny/model.safetensors", "creditscope/models/tiny/tokenizer.json",
          "creditscope/report/assets/page.css", "creditscope/selftest/goldens.npz", "creditscope/py.typed")
BESIDES = re.compile(r"creditscope-[^/]+\.dist-info/(METADATA|RECORD|WHEEL|entry_points\.txt|licenses/LICENSE)")
MADE = {"PKG-INFO"}
"""Of the sdist, and of no file of the repository."""
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")


def wheel_files(path: str) -> dict[str, str]:
    """Name -> sha256 of every file of a wheel."""
    with zipfile.ZipFile(path) as wheel:
        return {name: hashlib.sha256(wheel.read(name)).hexdigest() for name in wheel.namelist()}


def sdist_files(path: str) -> set[str]:
    """Names inside the sdist's one folder."""
    with tarfile.open(path) as sdist:
        return {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}


def repository_files(folder: str = ".") -> set[str]:
    """What git has, or would take."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder],
                            capture_output=True, check=True).stdout.decode().split("\0")
    return {name for name in listed if name and Path(name).exists()}


def version() -> str:
    """The one place that says it."""
    found = re.search(r'^__version__ = "(.+)"$', Path("src/creditscope/__init__.py").read_text(), re.MULTILINE)
    assert found is not None, "src/creditscope/__init__.py says no __version__"
    return found[1]


def page_faults(wheel: str) -> list[str]:
    """Links of the page that PyPI shows which are relative, or lead to a file that the repository does not have."""
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        page = str(BytesParser().parsebytes(files.read(name)).get_payload())
    home = tomllib.loads(Path("pyproject.toml").read_text())["project"]["urls"]["Source"]
    raw = home.replace("https://github.com/", "https://raw.githubusercontent.com/")
    inside = [f"{home}/blob/v{version()}/", f"{raw}/v{version()}/"]
    out = []
    for link in (first or second for first, second in LINK.findall(page)):
        target = next((link.removeprefix(start).partition("#")[0] for start in inside if link.startswith(start)), None)
        if not link.startswith(("https://", "http://", "#", "mailto:")):
            out.append(f"the page for PyPI links to {link}, which is relative")
        elif target is not None and not Path(target).exists():
            out.append(f"the page for PyPI links to {target}, which the repository does not have")
    return out


def wrong(wheel: str, sdist: str, tree: str) -> list[str]:
    """Everything that is not as it should be."""
    inside, other, source = wheel_files(wheel), wheel_files(tree), sdist_files(sdist)
    wanted = {name.removeprefix("src/") for name in repository_files("src/creditscope")}
    package = {name for name in inside if not BESIDES.fullmatch(name)}
    out = [f"{wheel} lacks {name}" for name in sorted((wanted | set(NEEDED)) - package)]
    out += [f"{wheel} holds {name}, which is no part of the package" for name in sorted(package - wanted)]
    out += [f"{sdist} lacks {name}" for name in sorted(repository_files() - source)]
    out += [f"{sdist} holds {name}, which is no file of the repository"
            for name in sorted(source - repository_files() - MADE)]
    out += [f"the wheel from the sdist and the wheel from the tree differ in {name}"
            for name in sorted(inside.keys() | other.keys())
            if inside.get(name) != other.get(name) and not name.endswith("/RECORD")]
    out += [f"{path} is not of version {version()}" for path in (wheel, sdist) if f"-{version()}" not in path]
    return out + page_faults(wheel)


if __name__ == "__main__":
    found = wrong(*sys.argv[1:])
    print("\n".join(found) or f"{len(wheel_files(sys.argv[1]))} files in the wheel, the package and its metadata; "
          f"{len(sdist_files(sys.argv[2]))} in the sdist, the repository")
    sys.exit(1 if found else 0)
