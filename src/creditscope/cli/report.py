"""`creditscope report`: one html file of a run, or of several side by side, or a page that follows a run."""

from __future__ import annotations

import sys
import time
import webbrowser
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from creditscope.claims.evidence import places
from creditscope.cli.doctor import as_dict
from creditscope.cli.output import STATE_COLOURS, Output
from creditscope.cli.positionals import Runs
from creditscope.cli.progress import Progress
from creditscope.diagnosis.engine import SIGNS
from creditscope.diagnosis.finding import State
from creditscope.diagnosis.readers.folders import record_in, state_in
from creditscope.errors import CreditscopeError, MissingExtra, command_line, printable
from creditscope.files.writing import write_file
from creditscope.report.answers import answers
from creditscope.report.build import build, page_of, read
from creditscope.report.page import vega
from creditscope.report.run import Run
from creditscope.report.settings import Several, has_no_step
from creditscope.report.standing import standing
from creditscope.report.watch import Server, Watched, serve
from creditscope.runs.record import WRITERS

OURS = b'<meta name="generator" content="creditscope '
"""A report has this near its start, other files do not."""


@dataclass(frozen=True)
class Report:
    """Make one html file of a run: its faults, and the evidence. Several runs are shown side by side.

    The file is complete: it opens from disk and loads nothing from the network. It starts with the diagnosis, as
    the verb doctor gives it: the first cause, its remedy and its evidence; then signal, credit, directions and
    optimiser in numbers. Both are printed here too. How to read the rest: docs/report.md.

    For example:
      creditscope report runs/mine                   # writes runs/mine/report.html
      creditscope report runs/mine --open            # and opens it
      creditscope report runs/mine --watch --open    # follows a run while it trains
      creditscope report runs/demo -o demo.html      # all runs below, seeds as intervals
      creditscope report runs/a runs/b results/p1-tiny    # runs and files of evidence
    """

    runs: Runs
    """Folders of runs, *.evidence.json files (papers check --save), or folders that hold some of either."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = None
    """The file to write; by default RUN/report.html for one run, and ./report.html for several."""
    open: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Open the page in the browser."""
    watch: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Serve the page to this machine alone and renew it while the run goes on. Writes no file."""
    papers: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also put the papers' claims to these runs, as creditscope papers check does."""
    port: int = 0
    """With --watch: the port; 0 takes any that is free."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        if not self.runs:
            raise CreditscopeError("nothing to report: name a run's folder, such as runs/mine")
        if self.watch and self.out is not None:
            raise CreditscopeError(f"--watch serves the page and writes no file: leave out --out {self.out}")
        if self.port and not self.watch:
            raise CreditscopeError(f"--port {self.port} is where --watch serves: give --watch too")
        return self._serve() if self.watch else self._write()

    def _write(self) -> int:
        start = time.perf_counter()
        if self.out is not None:
            refuse_place(self.out)
        inside = places(self.runs)
        refuse_sources(self.runs)
        with Progress.beside("reading runs", self.output) as bar:
            found = None if all(map(has_no_step, inside)) else read(self.runs, bar.tick)
        if found is None or (isinstance(found, Run) and not found.trained):
            raise CreditscopeError(f"{self.runs[0]} has no step yet; wait for the first, or follow it with --watch")
        out = self.out or (found.record.path if isinstance(found, Run) else Path()) / "report.html"
        refuse_other_files(out)
        text = page_of(found, papers=self.papers)
        write_file(out, text)
        seconds, size = time.perf_counter() - start, len(text.encode())
        if self.output.json:
            # A file of evidence is a summary, and has no answers.
            runs = [(found.name, found)] if isinstance(found, Run) else [
                (entry.name, entry.run) for entry in found.entries if entry.run is not None]
            self.output.emit({"file": str(out), "bytes": size, "seconds": seconds, "charts": bool(vega()),
                              "runs": [{"name": name, "path": str(run.record.path), "diagnosis": as_dict(run.diagnosis),
                                        "answers": [asdict(answer) for answer in answers(run)]} for name, run in runs],
                              "settings": [{"name": name, "state": state, "sentence": sentence}
                                           for name, state, sentence in settings(found)],
                              "faults": list(found.faults)})
        else:
            self._tell(found, out, f"{size / 1e6:.1f} MB in {seconds:.1f} s")
        if self.open:
            show(out.resolve().as_uri())
        return 0

    def _tell(self, found: Run | Several, out: Path, cost: str) -> None:
        console = self.output.console()
        if isinstance(found, Run):
            console.print(Text(printable(found.diagnosis.headline), "bold"))
            if found.ended_by:
                console.print(Text(f"the run ended early with an error: {printable(found.ended_by)}"))
        told = settings(found) if isinstance(found, Several) else [
            (answer.topic, answer.state, answer.sentence) for answer in answers(found)]
        width = max((len(printable(name)) for name, _, _ in told), default=0) + 1
        for name, state, sentence in told:
            console.print(Text(f"{SIGNS[state]} {state:<8}", STATE_COLOURS[state]) + Text(
                f"{printable(name):<{width}}{printable(sentence)}", "default"))
        charts = [] if vega() else [f"no charts: {MissingExtra('a chart', 'vl_convert')}"]
        for line in (*found.faults, *charts, f"wrote {out}: {cost}"):
            console.print(printable(line), markup=False)
        console.next(("" if self.open else "the same with --open, or ") + command_line("papers", "check", *self.runs))

    def _serve(self) -> int:
        watched = Watched(self.runs, lambda: build(self.runs, live=True, papers=self.papers))
        awaited = [path for path in places(self.runs) if not path.exists() or has_no_step(path)]
        if not awaited:
            refuse_sources(self.runs)
            watched.page()  # raises here, not in the browser, what cannot be read
        server = Server(watched, self.port)
        if self.output.json:
            self.output.emit({"url": server.url})
        else:
            console, names = self.output.console(), printable(", ".join(map(str, self.runs)))
            console.print(f"{server.url} follows {names}; Ctrl-C ends it. It answers to this machine alone.",
                          markup=False)
            for path in awaited:
                console.print(f"{printable(str(path))} has not begun: the page waits for it", markup=False)
        sys.stdout.flush()
        if self.open:
            show(server.url)
        serve(server)
        return 0


def settings(found: Run | Several) -> list[tuple[str, State, str]]:
    """(name, state, sentence) of each compared setting; none for one run."""
    return [] if isinstance(found, Run) else [(setting.name, *standing(setting)) for setting in found.settings]


def refuse_sources(paths: Sequence[Path]) -> None:
    """Raise for paths that no report can be made of."""
    for path in paths:
        if not path.exists():
            raise CreditscopeError(f"{path} does not exist; give a folder written by {WRITERS}")
        if path.is_file() and not path.name.endswith(".evidence.json"):
            raise CreditscopeError(f"{path} is no run's folder, nor a *.evidence.json file of creditscope papers check "
                                   f"--save; a trainer's log is read by {command_line('doctor', path)}")
        if state_in(path) is not None and record_in(path) is None:
            raise CreditscopeError(f"{path} holds a log of TRL's, no record; read the log with "
                                   f"{command_line('doctor', path)}. A record is written by {WRITERS}")


def refuse_place(path: Path) -> None:
    """Raise unless the path is an html file in an existing folder."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise CreditscopeError(f"cannot write {path}: a report is an html file; name it "
                               f"{path.with_suffix('.html') if path.name else path / 'report.html'}")
    if not path.parent.is_dir():
        raise CreditscopeError(f"cannot write {path}: the folder {path.parent} does not exist; make it first")


def refuse_other_files(path: Path) -> None:
    """Never overwrite a file that is no report."""
    try:
        with path.open("rb") as file:
            ours = OURS in file.read(4096)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CreditscopeError(f"cannot write {path}: {error.strerror}; choose another file with -o") from None
    if not ours:
        raise CreditscopeError(f"{path} is there and is no report of creditscope's; choose another file with -o")


def show(url: str) -> None:
    """Open a page in the user's browser; where there is none, print its address."""
    if not webbrowser.open(url):
        Console(stderr=True).print(f"no browser was found here; open {url}", markup=False, highlight=False)
