"""`creditscope report`: one html file of a run, or of several side by side, or a page that follows a run."""

from __future__ import annotations

import sys
import time
import webbrowser
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from creditscope.errors import CreditscopeError, printable
from creditscope.report.answers import SHAPES, Answer, answers
from creditscope.report.build import build, page_of, read
from creditscope.report.compare import Several
from creditscope.report.page import vega
from creditscope.report.run import Run
from creditscope.report.watch import Server, Watched, serve
from creditscope.verbs.check import write_file
from creditscope.verbs.output import Output

COLOURS = {"good": "green", "watch": "yellow", "broken": "red", "unknown": "default"}
OURS = b'<meta name="generator" content="creditscope '
"""What a report has near its start, and other files do not."""


@dataclass(frozen=True)
class Report:
    """Make one html file of a run: what is wrong with it, and the evidence. Several runs stand side by side.

    The file holds everything: it opens from disk and asks no network. It starts with four sentences (signal, credit,
    directions, optimiser), each good, watch, broken or unknown by a rule that it names; they are printed here too. How
    to read the rest: docs/report.md.

    For example:
      creditscope report runs/mine                        writes runs/mine/report.html
      creditscope report runs/mine --open                 and opens it
      creditscope report runs/mine --watch --open         follows a run while it trains; Ctrl-C ends it
      creditscope report runs/demo -o demo.html           all runs in a folder side by side; seeds give the intervals
      creditscope report runs/a runs/b results/p1-tiny    folders of runs, and files of creditscope check --save
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, *.evidence.json files, or folders that hold some of either."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = None
    """The file to write; by default RUN/report.html for one run, and ./report.html for several."""
    open: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Open the page in the browser."""
    watch: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Serve the page to this machine alone, and keep it new while the run goes on. Writes no file."""
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
        found = read(self.runs)
        if isinstance(found, Run) and not found.trained:
            raise CreditscopeError(f"{self.runs[0]} has no step yet; wait for the first, or follow it with --watch")
        out = self.out or (found.record.path if isinstance(found, Run) else Path()) / "report.html"
        refuse_strangers(out)
        text = page_of(found)
        write_file(out, text)
        seconds, size = time.perf_counter() - start, len(text.encode())
        if self.output.json:
            self.output.emit({"file": str(out), "bytes": size, "seconds": seconds, "charts": bool(vega()),
                              "runs": [{"name": name, "path": str(run.record.path),
                                        "answers": [asdict(answer) for answer in answers(run)]}
                                       for name, run in recorded(found).items()],
                              "faults": list(found.faults)})
        else:
            self._tell(found, out, f"{size / 1e6:.1f} MB in {seconds:.1f} s")
        if self.open:
            show(out.resolve().as_uri())
        return 0

    def _tell(self, found: Run | Several, out: Path, cost: str) -> None:
        """The answer without a browser."""
        console = self.output.console()
        if isinstance(found, Run):
            for answer in answers(found):
                console.print(_state(answer, 8) + Text(f"{answer.topic:<11}{printable(answer.sentence)}", "default"))
        else:
            for name, run in recorded(found).items():
                console.print(Text(f"{printable(name)}:", "default"), *(
                    _state(answer) + Text(f" {answer.topic}", "default") for answer in answers(run)), sep="  ")
        for fault in found.faults:
            console.print(printable(fault), markup=False)
        if not vega():
            console.print("no charts: they need vl-convert: pip install 'creditscope[plot]'", markup=False)
        console.print(f"wrote {out}: {cost}", markup=False)
        following = "" if self.open else "the same with --open, or "
        console.print(f"Next: {following}creditscope check {' '.join(map(str, self.runs))}", markup=False)

    def _serve(self) -> int:
        watched = Watched(self.runs, lambda: build(self.runs, live=True))
        watched.page()  # what cannot be read at all is told here, not in the browser
        server = Server(watched, self.port)
        if self.output.json:
            self.output.emit({"url": server.url})
        else:
            self.output.console().print(f"{server.url} follows {', '.join(map(str, self.runs))}; Ctrl-C ends it. It "
                                        f"answers to this machine alone.", markup=False)
        sys.stdout.flush()
        if self.open:
            show(server.url)
        serve(server)
        return 0


def recorded(found: Run | Several) -> dict[str, Run]:
    """By name the runs of which there is a record; a file of evidence is a summary, which has no answers."""
    if isinstance(found, Run):
        return {found.name: found}
    return {entry.name: entry.run for entry in found.entries if entry.run is not None}


def _state(answer: Answer, width: int = 0) -> Text:
    return Text(f"{SHAPES[answer.state]} {answer.state:<{width}}", COLOURS[answer.state])


def refuse_strangers(path: Path) -> None:
    """Never write over a file that is no report of ours."""
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
    """Open a page in the user's browser, or say that there is none."""
    if not webbrowser.open(url):
        Console(stderr=True).print(f"no browser was found here; open {url}", markup=False, highlight=False)
