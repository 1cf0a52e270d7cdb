"""Many trainings in one command: those that are there are used again, the others run side by side under a live table.

`run_all` is what `compare` and `reproduce` call. How a training is started is behind `run_jobs` (cli/processes):

    run_jobs(jobs, at_once, stop, watch) -> name -> why it failed, None for one that did not
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from creditscope.cli.interrupt import Interrupt
from creditscope.cli.output import Output
from creditscope.cli.processes import Job, run_jobs
from creditscope.cli.progress import Progress
from creditscope.errors import CreditscopeError, printable
from creditscope.runs.compare import FREE, Glance, difference, glance, is_finished
from creditscope.runs.config import Config, flags
from creditscope.runs.record import Record

Plan = Mapping[str, Config]
"""A run's folder below the sweep's, and its settings."""


def run_all(place: Path, plan: Plan, at_once: int, output: Output, done: Callable[[Path, Config], bool],
            prepare: Callable[[Plan], None]) -> dict[str, str] | None:
    """Train the runs of a plan that are not there yet; of those that failed, why. None where somebody stopped it.

    `prepare` gets what is to do, before anything is started: what would end the runs at their start is said there.
    """
    todo = {name: config for name, config in plan.items() if not done(place / name, config)}
    if not todo:
        return {}
    prepare(todo)
    reused, at_once, console = len(plan) - len(todo), min(at_once, len(todo)), output.console()
    jobs = [Job(name, arguments(config, place / name), (place / name).with_suffix(".log"))
            for name, config in todo.items()]
    budgets = {name: config.rollouts or config.steps * config.prompts * config.group for name, config in todo.items()}
    if not output.json:
        console.print(f"{len(todo)} runs of {sum(budgets.values()):,} rollouts together, {at_once} at a time"
                      + (f"; {reused} are there already" if reused else ""))
    with Interrupt() as stop, Fleet(console, place, budgets, reused, output.json) as fleet:
        ended = run_jobs(jobs, at_once, stop, fleet.show)
    if stop.asked and len(ended) < len(todo):
        well = reused + sum(why is None for why in ended.values())
        if output.json:
            output.emit({"out": str(place), "finished": False, "runs": len(plan), "done": well})
        else:
            console.print(f"stopped: {well} of {len(plan)} runs are finished, the others keep what they have")
            console.next("the same command goes on")
        return None
    return {name: why for name, why in ended.items() if why is not None}


def is_done(path: Path, config: Config, free: frozenset[str] = FREE, beside: str = "") -> bool:
    """Whether the run is there and finished. One with other settings, finished or not, is refused.

    A model called `beside` lies beside its runs: where they were moved, it has another path.
    """
    if not (path / "run.json").exists():
        return False
    record = Record.open(path)
    old = dict(record.config)
    if beside and Path(config.model).name == Path(str(old.get("model"))).name == beside:
        old["model"] = config.model
    found = difference(old, asdict(config), free)
    if found:
        raise CreditscopeError(f"{path} holds a run with other settings: its {found}; give the same settings, or "
                               f"choose another --out")
    return is_finished(record.steps())


def refuse_at_once(configs: Sequence[Config]) -> None:
    """Everything that would end the runs at their start, said before the first one does. Torch loads here."""
    from creditscope.credit.choice import find_estimator
    from creditscope.lab.setup import check_problems
    from creditscope.policy.loading import load_policy
    from creditscope.tasks import find_task

    task = find_task(configs[0].task)
    for config in {config.estimator: config for config in configs}.values():
        check_problems(task, config, find_estimator(config.estimator))
    if configs[0].model != "tiny":  # the packaged one is there
        load_policy(configs[0].model, device="cpu")


def refuse_none(failed: Mapping[str, str]) -> None:
    """An error for a sweep of which nothing is left to show."""
    name, why = next(iter(failed.items()))
    raise CreditscopeError(f"all {len(failed)} runs failed; {name}: {why}")


def show_failed(console: Console, place: Path, failed: Mapping[str, str]) -> None:
    for name, why in failed.items():
        console.print(f"failed: {name}: {printable(why)}   (all it said: {place / name}.log)", markup=False)


def arguments(config: Config, path: Path) -> tuple[str, ...]:
    """The `creditscope train` that makes this run, or goes on with it where it was begun."""
    again = ["--resume"] * (path / "run.json").exists()
    return ("train", *flags(asdict(config)), "--out", str(path), "--json", *again)


class Fleet:
    """Runs in progress, followed through their records: a live table on a terminal, elsewhere a line per ended run.

    `budgets` are the rollouts of each run that is still to do, by its folder's name below `place`.
    """

    def __init__(self, console: Console, place: Path, budgets: Mapping[str, int], reused: int,
                 quiet: bool = False) -> None:
        self._place, self._budgets, self._reused, self._quiet = place, budgets, reused, quiet
        self.progress = Progress(console, "runs", quiet)
        self._seen = {name: glance(place / name) for name in budgets}
        self._told: set[str] = set()
        self.progress.show(self._spent(), sum(budgets.values()))

    def __enter__(self) -> Fleet:
        self.progress.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.__exit__()

    def show(self, running: Sequence[str], ended: Mapping[str, str | None]) -> None:
        """The state of things: names of running runs, and of those that ended, with the reason if they failed."""
        new = [name for name in ended if name not in self._told]
        if self._quiet or not (new or self.progress.live):
            return
        self._seen |= {name: glance(self._place / name) for name in (*running, *new)}
        self._told.update(new)
        spent = self._spent()
        # Of a run that ended, what it did not spend is no longer to come.
        total = sum(self._budgets.values()) - sum(max(0, self._budgets[name] - self._seen[name].spent)
                                                  for name in ended)
        done = f"{len(ended) + self._reused} of {len(self._budgets) + self._reused}"
        left = self.progress.left(spent, total)
        for name in new:
            failure, seen = ended[name], self._seen[name]
            what = (f"failed: {printable(failure)}" if failure is not None else
                    f"{_share(seen)}  {seen.steps} steps  {seen.spent:,} rollouts")
            self.progress.say(f"{name}  {what}  ({done}" + (f", left {left}" if left else "") + ")")
        self.progress.show(spent, total, f"runs  {done}", self._table(running))

    def _table(self, running: Sequence[str]) -> Table:
        table = Table.grid(padding=(0, 2))
        for name in running:
            seen = self._seen[name]
            state = f"step {seen.steps}" if seen.steps else "starting"
            table.add_row(Text(name), Text(state), Text(f"{seen.spent:,} rollouts", justify="right"),
                          Text(_share(seen), style="bold"))
        return table

    def _spent(self) -> int:
        return sum(min(seen.spent, self._budgets[name]) for name, seen in self._seen.items())


def _share(seen: Glance) -> str:
    return "" if seen.accuracy is None else f"{seen.accuracy:.1%}"
