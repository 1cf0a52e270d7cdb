"""The documentation site, built once per session, whichever process asks first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from browser.conftest import browser  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder of the built site. A warning of the build is a failure, as it is in `make site`."""
    for need in ("sphinx", "furo", "myst_parser", "latex2mathml"):
        pytest.importorskip(need, reason="the site needs: pip install 'creditscope[site]'")
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent  # all processes of a session
    out = shared / "site"
    with FileLock(shared / "site.lock"):
        if not (out / "built").exists():
            build(out, shared / "doctrees")
            (out / "built").touch()
    return out


def build(out: Path, doctrees: Path) -> None:
    """The command of `make site`."""
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "--fresh-env",
               "-c", "docs", "-d", str(doctrees), ".", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": str(ROOT / "src")})
    assert done.returncode == 0, f"make site fails:\n{done.stdout}\n{done.stderr}"
