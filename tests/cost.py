"""What each test costs: a pytest plugin that adds up wall and CPU seconds by file.

    python -m pytest -n 2 -p cost --cost costs.json         the costs, and the dearest files on the terminal
    python tests/cost.py before.json after.json             both as a Markdown table, file by file

CPU is user plus system time of the worker and of the processes that it started and waited for, because wall time
on a shared machine says little and a test that starts processes hides its cost in them. A fixture is charged to the
test that first asked for it. The file holds ``{test: {"wall": s, "cpu": s}}``; the terminal shows the dearest files.
"""

import json
import resource
import sys
from collections import defaultdict
from pathlib import Path

import pytest

SHOWN = 40


def pytest_addoption(parser):
    parser.addoption("--cost", metavar="FILE", help="write wall and CPU seconds of every test to FILE")


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


_seen = {"cpu": 0.0}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart():
    """Importing and collecting is nobody's cost."""
    _seen["cpu"] = cpu_seconds()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Stamp each phase with the CPU used since the phase before; xdist carries the stamp to the controller."""
    outcome = yield
    now = cpu_seconds()
    outcome.get_result().cpu = now - _seen["cpu"]
    _seen["cpu"] = now


class Costs:
    def __init__(self, target: str) -> None:
        self.target = Path(target)
        self.tests = defaultdict(lambda: {"wall": 0.0, "cpu": 0.0})

    def pytest_runtest_logreport(self, report):
        cost = self.tests[report.nodeid]
        cost["wall"] += report.duration
        cost["cpu"] += getattr(report, "cpu", 0.0)

    def pytest_terminal_summary(self, terminalreporter):
        self.target.write_text(json.dumps(self.tests, indent=0))
        terminalreporter.section("cost by file")
        for line in table(self.tests)[: SHOWN + 2]:
            terminalreporter.write_line(line)


def by_file(tests) -> dict:
    files = defaultdict(lambda: {"tests": 0, "wall": 0.0, "cpu": 0.0})
    for name, cost in tests.items():
        row = files[name.split("::")[0]]
        row["tests"] += 1
        row["wall"] += cost["wall"]
        row["cpu"] += cost["cpu"]
    return dict(sorted(files.items(), key=lambda pair: -pair[1]["cpu"]))


def table(tests) -> list[str]:
    """The costs as a Markdown table, dearest file first."""
    rows = by_file(tests)
    return ["| file | tests | wall s | CPU s |", "|---|---:|---:|---:|"] + [
        f"| {name} | {row['tests']} | {row['wall']:.1f} | {row['cpu']:.1f} |" for name, row in rows.items()
    ]


def compared(before, after) -> list[str]:
    """Two runs beside each other, the files that were dearest first."""
    old, new = by_file(before), by_file(after)
    none = {"tests": 0, "wall": 0.0, "cpu": 0.0}
    lines = ["| file | tests before | after | CPU s before | after |", "|---|---:|---:|---:|---:|"]
    for name in sorted(old | new, key=lambda name: -old.get(name, none)["cpu"]):
        a, b = old.get(name, none), new.get(name, none)
        lines.append(f"| {name} | {a['tests']} | {b['tests']} | {a['cpu']:.1f} | {b['cpu']:.1f} |")
    return lines


def pytest_configure(config):
    if config.getoption("--cost") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs(config.getoption("--cost")), "costs")


if __name__ == "__main__":
    print(*compared(*(json.loads(Path(name).read_text()) for name in sys.argv[1:3])), sep="\n")
