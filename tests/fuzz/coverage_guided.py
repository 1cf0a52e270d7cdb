"""The same doors under a fuzzer that follows coverage (atheris, which is libFuzzer for Python).

    python tests/fuzz/coverage_guided.py rollouts --seconds 180

It starts from real files. An input that raises anything but a CreditscopeError is written to tests/fuzz/cases, one for
each place that raises, and becomes a test once it lies there; the search goes on. One that takes longer than ten
seconds, or two gigabytes, ends it. Exits with 1 if something was found.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import tempfile
import traceback
from pathlib import Path

import atheris

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
with atheris.instrument_imports(include=["creditscope"]):
    from fuzz import targets
    from fuzz.mutate import damaged

MOST = 2**16
"""Bytes of an input."""


def fuzz(name: str, seconds: int, place: Path, cases: Path) -> None:
    """Search; does not return."""
    corpus, work = place / "corpus", place / "work"
    for folder in (corpus, work):
        folder.mkdir()
    known = [case.read_bytes() for case in sorted(cases.glob(f"{name}-*"))]
    for number, seed in enumerate([*targets.TARGETS[name].seeds(), *known]):
        (corpus / f"{number:04d}").write_bytes(seed)
    met: set[str] = set()

    def one(data: bytes) -> None:
        try:
            targets.run(name, data, work)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = next((f for f in reversed(frames) if "creditscope" in f.filename), frames[-1])
            where = f"{type(error).__name__} {ours.filename}:{ours.lineno}"
            if where not in met:
                met.add(where)
                (cases / f"{name}-{hashlib.blake2b(where.encode(), digest_size=4).hexdigest()}").write_bytes(data)
                print(f"FOUND {where}: {str(error)[:200]!r}", file=sys.stderr, flush=True)

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        draw = random.Random(seed)
        return (damaged(data, draw) if draw.random() < 0.5 else atheris.Mutate(data, len(data) or 1))[:most]

    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", f"-max_len={MOST}", "-timeout=10", "-rss_limit_mb=2048",
                   f"-artifact_prefix={cases}/{name}-", "-print_final_stats=1", str(corpus)],
                  one, custom_mutator=mutated, internal_libfuzzer=True)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=sorted(targets.TARGETS))
    parser.add_argument("--seconds", type=int, default=180)
    parser.add_argument("--cases", type=Path, default=HERE / "cases", help="where to write what is found")
    asked = parser.parse_args()
    asked.cases.mkdir(parents=True, exist_ok=True)
    before = set(asked.cases.iterdir())
    with tempfile.TemporaryDirectory() as place:
        child = os.fork()
        if child == 0:
            fuzz(asked.target, asked.seconds, Path(place), asked.cases.resolve())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = sorted(set(asked.cases.iterdir()) - before)
    print(f"{asked.target}: {len(found)} found" + "".join(f"\n  {path}" for path in found))
    return 1 if found or status else 0


if __name__ == "__main__":
    sys.exit(main())
