"""How long `creditscope report` takes, as a user meets it: the whole command, from a record of 500 steps.

    python benchmarks/page.py

The record is a real run of the packaged model with everything on (both microscopes, another credit, rollouts kept),
repeated under new step numbers with its numbers varied. Beside it the same command on a short run, and with several
runs side by side; `--help` is what Python and the imports alone take. The table goes to benchmarks/page.md.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from report import records  # noqa: E402

REPEATS = 5


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        short = records.rich(Path(folder) / "short")
        long = records.long(Path(folder) / "long", short)
        cases = {"--help": ["--help"], "5 steps": [str(short)], "500 steps": [str(long)],
                 "500 steps beside 5": [str(short), str(long)]}
        spent: dict[str, list[float]] = {name: [] for name in cases}
        sizes: dict[str, int] = {}
        for _ in range(REPEATS):
            for name, words in cases.items():
                out = Path(folder) / "report.html"
                start = time.perf_counter()
                subprocess.run([sys.executable, "-m", "creditscope", "report", *words,
                                *(["-o", str(out)] if name != "--help" else [])], check=True, capture_output=True)
                spent[name].append(time.perf_counter() - start)
                sizes[name] = out.stat().st_size if name != "--help" else 0
    rows = [f"| {name} | {statistics.median(times):.2f} | {min(times):.2f}–{max(times):.2f} | "
            f"{sizes[name] / 1e6:.2f} |" for name, times in spent.items()]
    table = "\n".join(["| | seconds, median of 5 | range | MB |", "| --- | ---: | ---: | ---: |", *rows])
    (ROOT / "benchmarks" / "page.md").write_text(
        f"# `creditscope report`, the whole command\n\n{os.cpu_count()} cores, Python {sys.version.split()[0]}; "
        f"`python benchmarks/page.py`. The charts' library is in the user's cache; the first report of a machine "
        f"makes it, about two seconds more.\n\n{table}\n")
    print(table)


if __name__ == "__main__":
    main()
