"""What a plain `pip install creditscope` can do: commands that run without any extra, and those that say which one.

    python tests/light.py            in an environment without torch: .ci/dist does
    python tests/light.py --hide     in any other: the modules of the extras cannot be found

Prints one JSON object, command -> exit code, its output and its errors. Imports nothing but creditscope.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from creditscope.cli.commands import COMMANDS, GROUPS
from creditscope.errors import EXTRAS, installed

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "examples" / "logs" / "flat-trl"
LOGS = ROOT / "tests" / "diagnosis" / "logs"
RECORD = ROOT / "tests" / "runs" / "record_0.1"
EVIDENCE = ROOT / "results" / "p1-tiny"

# A command's words, where OUT is a new folder.
RUN: tuple[list[str], ...] = (
    ["--version"], ["--help"], *([group, "--help"] for group in GROUPS), *([*words, "--help"] for words in COMMANDS),
    ["env"], ["env", "--json"], ["list", "methods"], ["list", "methods", "grpo"], ["list", "methods", "--dialects"],
    ["list", "credits"], ["list", "credits", "gae"], ["list", "brakes"], ["papers", "carry"],
    ["doctor", str(LOG)], ["doctor", str(LOG / "trainer_state.json"), "--json"],
    *(["doctor", str(LOGS / name)] for name in ("trl-dapo", "verl-steady", "ours-fell")), ["doctor", str(RECORD)],
    ["report", str(RECORD), "-o", "OUT/one.html", "--json"],
    ["report", str(LOGS / "ours-fell"), str(LOGS / "ours-braked"), "-o", "OUT/two.html", "--papers"],
    ["report", str(EVIDENCE), "-o", "OUT/evidence.html"], ["inspect", str(LOGS / "ours-fell")],
    ["papers", "check"], ["papers", "check", str(RECORD), "--save", "OUT/evidence"],
    ["papers", "check", str(EVIDENCE), "--claim", "P1.5", "--all"],
)
"""Commands that end with 0."""
LAB, TORCH = "pip install 'creditscope[lab]'", "pip install 'creditscope[torch]'"
REFUSED: tuple[tuple[list[str], str], ...] = (
    (["lab", "train", "--out", "OUT/run"], f"training needs transformers: {LAB}"),
    (["lab", "demo", "--out", "OUT/demo"], f"training needs transformers: {LAB}"),
    (["lab", "warmup", "tiny", "--task", "turns", "--out", "OUT/warm"], f"training needs transformers: {LAB}"),
    (["lab", "pairs", "--out", "OUT/pairs.jsonl"], f"sampling pairs needs transformers: {LAB}"),
    (["lab", "reward", "pairs.jsonl", "--out", "OUT/reward"], f"training needs transformers: {LAB}"),
    (["lab", "compare", "credit", "--out", "OUT/compare"], f"training needs transformers: {LAB}"),
    (["lab", "train", "--engine", "trl", "--out", "OUT/trl"],
     "creditscope.plugins.trl needs trl: pip install 'creditscope[trl]'"),
    (["papers", "reproduce", "p1", "--out", "OUT/p1"], f"training needs transformers: {LAB}"),
    (["papers", "localise"], f"localising errors needs transformers: {LAB}"),
    (["papers", "check", "--exact"], f"a claim by closed form or enumeration needs torch: {TORCH}"),
    (["inspect", str(RECORD), "--prefix"], f"the prefix bias needs torch: {TORCH}"),
    (["inspect", str(ROOT / "tests" / "offline" / "dumps" / "verl")], f"reading rollouts needs torch: {TORCH}"),
    (["selftest"], f"the self-test needs transformers: {LAB}"),
)
"""Commands that end with 2, and the one sentence on stderr."""
CORE = {"vl_convert"}
"""Modules of an extra that a plain installation has too."""


class Hidden:
    """A finder of modules that does not find those of the extras."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in EXTRAS.keys() - CORE:
            return None
        found: ModuleSpec | None = self._finder.find_spec(name, path, target)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def hide() -> None:
    """From here on the modules of the extras are as if they were not installed."""
    sys.meta_path[:] = [Hidden(finder) for finder in sys.meta_path]
    importlib.invalidate_caches()


def run(words: list[str], out: str) -> dict[str, Any]:
    from creditscope.cli.main import main

    printed, errors, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        try:
            main([word.replace("OUT", out) for word in words])
        except SystemExit as end:
            code = int(end.code or 0)
    return {"code": code, "out": printed.getvalue(), "err": errors.getvalue()}


def wrong(found: dict[str, dict[str, Any]]) -> list[str]:
    """Commands that did not end as RUN and REFUSED say."""
    ends = [(words, 0, "") for words in RUN] + [(words, 2, f"creditscope: {said}\n") for words, said in REFUSED]
    return [f"{key(words)}: exit {end['code']}, {end['err'].strip()[-300:]!r}" for words, code, said in ends
            if (end := found[key(words)])["code"] != code or said not in ("", end["err"])]


def key(words: list[str]) -> str:
    return " ".join(words)


def main() -> None:
    if "--hide" in sys.argv:
        hide()
    there = sorted(name for name in EXTRAS.keys() - CORE if installed(name))
    assert not there, f"this is no plain installation: {', '.join(there)} can be imported; use --hide"
    with tempfile.TemporaryDirectory() as out:
        found = {key(words): run(words, out) for words in [*RUN, *(words for words, _ in REFUSED)]}
    if "--json" in sys.argv:
        print(json.dumps(found))
    faults = wrong(found)
    print("\n".join(faults) or f"{len(RUN)} commands run without torch, {len(REFUSED)} name the extra they need",
          file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
