"""The citation of a self-test: versions, device, verdicts, and a digest to compare."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from creditscope.files.versions import software
from creditscope.selftest.check import CheckResult

PACKAGES = ("torch", "transformers", "numpy", "trl")


def versions(device: torch.device) -> dict[str, str]:
    """The package, its commit where it is known, and its platform. No path and no name of a person."""
    known = software(PACKAGES)
    found = {"creditscope": known["creditscope"], "commit": commit() or "not known", "python": known["python"],
             **{name: version for name, version in known["packages"].items() if version},
             "platform": known["platform"],
             "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"}
    return found | ({"cuda": torch.version.cuda} if device.type == "cuda" and torch.version.cuda else {})


def commit() -> str | None:
    """The commit of the installed package or of the checkout, with a `+` where files differ from it."""
    try:
        source = importlib.metadata.distribution("creditscope").read_text("direct_url.json")
        found = json.loads(source or "{}").get("vcs_info", {}).get("commit_id")
    except (importlib.metadata.PackageNotFoundError, ValueError, AttributeError):
        found = None
    root = Path(__file__).resolve().parents[3]
    if found or not ((root / ".git").exists() and (root / "src" / "creditscope").is_dir()):
        return str(found) if found else None
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--", "src") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def digest(lines: Iterable[CheckResult], known: Mapping[str, str]) -> str:
    """sha256 over the sorted lines "name: verdict, tolerance" and "version name: value", without times and errors:
    equal on machines with the same software and the same verdicts."""
    told = [f"{line.name}: {line.verdict}, {line.tolerance:g}" for line in lines]
    told += [f"version {name}: {value}" for name, value in known.items()]
    return hashlib.sha256("\n".join(sorted(told)).encode()).hexdigest()


def counts(lines: Sequence[CheckResult]) -> str:
    """For example: 15 of 17 checks passed, 2 not run."""
    passed, failed, left = (sum(line.verdict == verdict for line in lines) for verdict in ("pass", "fail", "not run"))
    tail = [f"{failed} failed"] * (failed > 0) + [f"{left} not run"] * (left > 0)
    return ", ".join([f"{passed} of {len(lines)} checks passed", *tail])


def sentence(lines: Sequence[CheckResult], known: Mapping[str, str], date: str) -> str:
    """The sentence for a paper; where a check failed, what to do instead."""
    if any(line.verdict == "fail" for line in lines):
        return f"Not to be cited: {counts(lines)}. Report it with this block."
    source = f", commit {known['commit'][:12]}" if known["commit"] != "not known" else ""
    return (f"Measured with creditscope {known['creditscope']}{source}; its self-test ({counts(lines)}) ran on {date} "
            f"on {known['device']} with torch {known['torch']}, transformers {known['transformers']} and Python "
            f"{known['python']} (digest {digest(lines, known)[:16]}).")
