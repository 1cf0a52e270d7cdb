"""What a release holds: every file of the package and nothing else, from the sdist and from the tree alike.

    python .ci/dist_contents.py WHEEL SDIST WHEEL_FROM_THE_TREE
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

NEEDED = ("creditscope/models/tiny/model.safetensors", "creditscope/models/tiny/tokenizer.json",
          "creditscope/report/assets/page.css", "creditscope/selftest/goldens.npz", "creditscope/py.typed")
BESIDES = re.compile(r"creditscope-[^/]+\.dist-info/(METADATA|RECORD|WHEEL|entry_points\.txt|licenses/LICENSE)")
STRAY = re.compile(r"(^|/)(runs|results|\.venv|\.git|__pycache__|\.[a-z_]*cache|\.hypothesis)(/|$)|\.pyc$|\.part$")


def wheel_files(path: str) -> dict[str, str]:
    """Name -> sha256 of every file of a wheel."""
    with zipfile.ZipFile(path) as wheel:
        return {name: hashlib.sha256(wheel.read(name)).hexdigest() for name in wheel.namelist()}


def sdist_files(path: str) -> list[str]:
    """Names inside the sdist's one folder."""
    with tarfile.open(path) as sdist:
        return [name.partition("/")[2] for name in sdist.getnames()]


def package_files() -> set[str]:
    """What git has, or would take, of src/creditscope."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "src/creditscope"],
                            capture_output=True, check=True).stdout.decode().split("\0")
    return {name.removeprefix("src/") for name in listed if name and Path(name).exists()}


def version() -> str:
    """The one place that says it."""
    found = re.search(r'^__version__ = "(.+)"$', Path("src/creditscope/__init__.py").read_text(), re.MULTILINE)
    assert found is not None, "src/creditscope/__init__.py says no __version__"
    return found[1]


def wrong(wheel: str, sdist: str, tree: str) -> list[str]:
    """Everything that is not as it should be."""
    inside, other, source, wanted = wheel_files(wheel), wheel_files(tree), sdist_files(sdist), package_files()
    package = {name for name in inside if not BESIDES.fullmatch(name)}
    out = [f"{wheel} lacks {name}" for name in sorted((wanted | set(NEEDED)) - package)]
    out += [f"{wheel} holds {name}, which is no part of the package" for name in sorted(package - wanted)]
    out += [f"{sdist} holds {name}" for name in source if STRAY.search(name)]
    out += [f"the wheel from the sdist and the wheel from the tree differ in {name}"
            for name in sorted(inside.keys() | other.keys())
            if inside.get(name) != other.get(name) and not name.endswith("/RECORD")]
    out += [f"{path} is not of version {version()}" for path in (wheel, sdist) if f"-{version()}" not in path]
    return out


if __name__ == "__main__":
    found = wrong(*sys.argv[1:])
    print("\n".join(found) or f"{len(wheel_files(sys.argv[1]))} files in the wheel: the package and its metadata")
    sys.exit(bool(found))
