"""`creditscope selftest`: the numbers verified on this machine in a minute, with versions, for a paper to cite."""

from __future__ import annotations

import datetime
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from creditscope.cli.output import Output
from creditscope.errors import CreditscopeError, require_module, unknown

if TYPE_CHECKING:
    from creditscope.selftest.check import CheckResult

SHAPES = {"pass": ("✓", "green"), "fail": ("✗", "red"), "not run": ("–", "yellow")}


@dataclass(frozen=True)
class Selftest:
    """Verify the numbers on this machine and device, in about a minute; a paper can cite the block at the end.

    Every check computes the same numbers in two ways: the Gram and a loop of backwards, the table of methods and a twin
    in plain Python, our rows and TRL's own trainers, a run and the same run under the microscope. Planted errors must
    be refused. Exit code 1 if a check fails.

    For example:
      creditscope selftest
      creditscope selftest --device cpu --json
    """

    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda, cuda:1 ..."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        require_module("the self-test", "transformers")
        console = self.output.console()
        quiet = self.output.json
        if not quiet:
            console.print("loading torch and transformers", style="dim")
        from creditscope.selftest.check import run_checks
        from creditscope.selftest.citation import counts, digest, sentence, versions
        from creditscope.selftest.table import CHECKS

        device = find_device(self.device)
        lines: list[CheckResult] = []
        results = run_checks(CHECKS, device)
        for number, check in enumerate(CHECKS, start=1):
            with hushed(), console.status(f"{number}/{len(CHECKS)} {check.name}: {check.what}"):
                lines.append(next(results))
            if not quiet:
                show(console, lines[-1])
        known, today = versions(device), datetime.datetime.now(datetime.UTC).date().isoformat()
        failed = any(line.verdict == "fail" for line in lines)
        if quiet:
            self.output.emit({"passed": not failed, "checks": [asdict(line) for line in lines], "versions": known,
                              "digest": digest(lines, known), "date": today,
                              "citation": sentence(lines, known, today)})
            return int(failed)
        console.print(f"\n{counts(lines)} in {sum(line.seconds for line in lines):.0f} s", style="bold", markup=False)
        for name, value in [*known.items(), ("date", today), ("digest", digest(lines, known))]:
            console.print(f"{name:<14}{value}", markup=False)
        console.print(f"\n{sentence(lines, known, today)}", markup=False, soft_wrap=True)
        console.next("creditscope env" if failed else "creditscope lab demo")
        return int(failed)


def show(console: Console, line: CheckResult) -> None:
    """Two lines: the verdict with its number, then the comparison and the reason for the tolerance."""
    shape, colour = SHAPES[line.verdict]
    number = "" if line.worst is None else f"{line.worst:.2g} {'≤' if line.verdict == 'pass' else '>'} "
    bound = "not run" if line.verdict == "not run" else f"{number}{line.tolerance:g}" if number else "error"
    told = Text(f"{line.name:<21}{bound:<18}{line.seconds:5.1f} s  {line.detail}", "default")
    console.print(Text(f"{shape} ", colour) + told, soft_wrap=True)
    console.print(Text(f"    {line.what}. Tolerance: {line.why}.", "dim"), soft_wrap=True)


def find_device(name: str) -> Any:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise unknown("--device", name, ("auto", "cpu", "cuda"))
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CreditscopeError(f"--device {name} is not usable here: {str(error).splitlines()[0]}. Use --device cpu") \
            from None
    return device


@contextmanager
def hushed() -> Iterator[None]:
    """Silence the libraries that load models. One thread: small tensors run faster so."""
    import torch
    from transformers.utils import logging as said

    trl = logging.getLogger("trl")
    with ExitStack() as after, warnings.catch_warnings():
        after.callback(torch.set_num_threads, torch.get_num_threads())
        after.callback(said.set_verbosity, said.get_verbosity())
        after.callback(trl.setLevel, trl.level)
        if said.is_progress_bar_enabled():
            after.callback(said.enable_progress_bar)
        torch.set_num_threads(1)
        said.set_verbosity_error()
        said.disable_progress_bar()
        trl.setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        yield
