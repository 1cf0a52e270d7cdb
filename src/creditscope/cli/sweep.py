"""Many trainings in one command: finished runs are used again, the others run side by side under a live table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from creditscope.cli.interrupt import Interrupt
from creditscope.cli.on_ray import ClusterSpec, below_here, connected
from creditscope.cli.output import Output, Screen
from creditscope.cli.processes import Executor, Job, cores, run_jobs
from creditscope.cli.progress import Progress
from creditscope.errors import CreditscopeError, MissingExtra, printable, require_module
from creditscope.files.hub import refuse_missing
from creditscope.files.writing import lock_folder
from creditscope.runs.compare import FREE, Glance, difference, glance, is_finished
from creditscope.runs.config import Config, flags
from creditscope.runs.record import Record

Plan = Mapping[str, Config]
"""A run's folder below the sweep's, and its settings."""
HERE = "here"
"""`--on`: processes on this machine."""
LOCK = ".sweep.lock"
"""Held by the command that writes a sweep's folder."""


def run_all(place: Path, plan: Plan, at_once: int, output: Output, done: Callable[[Path, Config], bool],
            prepare: Callable[[Plan], None], on: str = HERE) -> dict[str, str] | None:
    """Call `prepare` on the runs that are not finished, then train them: failed run -> reason; None after Ctrl-C.

    The sweep's folder is locked meanwhile: two commands would resume the same runs and empty each other's logs.
    """
    check_on(on)
    if all(done(place / name, config) for name, config in plan.items()):
        return {}
    require_module("training", "transformers")
    with _own_folder(place):
        return _run_left(place, plan, at_once, output, done, prepare, on)


@contextmanager
def _own_folder(place: Path) -> Iterator[None]:
    """The sweep's folder, locked. What was made of its path here and got nothing, because of bad input, is taken away
    again."""
    new = [folder for folder in (place, *place.parents) if not folder.exists()]
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CreditscopeError(f"cannot make {place}: {error.strerror}; choose another --out") from None
    lock = lock_folder(place, LOCK)
    try:
        yield
    finally:
        if new and [each.name for each in place.iterdir()] == [LOCK]:
            (place / LOCK).unlink()  # while it is held: nobody else takes it
        lock.release()
        with suppress(OSError):  # it holds runs
            for folder in new:
                folder.rmdir()


def _run_left(place: Path, plan: Plan, at_once: int, output: Output, done: Callable[[Path, Config], bool],
              prepare: Callable[[Plan], None], on: str) -> dict[str, str] | None:
    todo = {name: config for name, config in plan.items() if not done(place / name, config)}
    if not todo:  # another command finished them meanwhile
        return {}
    reused, at_once, console = len(plan) - len(todo), min(at_once, len(todo)), output.console()
    say = partial(print, file=sys.stderr) if output.json else partial(console.print, markup=False, soft_wrap=True)
    with executor(on, say) as run:
        prepare(todo)
        jobs = jobs_of(place, todo, on)
        budgets = {name: config.rollouts or config.steps * config.prompts * config.group
                   for name, config in todo.items()}
        if not output.json:
            console.print(f"{len(todo)} runs of {sum(budgets.values()):,} rollouts together, {at_once} at a time"
                          + (" where the cluster has room" if on != HERE else "")
                          + (f"; {reused} are there already" if reused else ""))
        with Interrupt() as stop, Fleet(console, place, budgets, reused, output.json) as fleet:
            ended = run(jobs, at_once, stop, fleet.watch)
    if stop.asked and len(ended) < len(todo):
        well = reused + sum(why is None for why in ended.values())
        if output.json:
            output.emit({"out": str(place), "finished": False, "runs": len(plan), "done": well})
        else:
            console.print(f"stopped: {well} of {len(plan)} runs are finished, the others keep what they have")
            console.next("the same command goes on")
        return None
    return {name: why for name, why in ended.items() if why is not None}


def check_on(on: str) -> None:
    """Refuse an unknown --on, and one whose library is missing."""
    if on != HERE:
        ClusterSpec.read(on)
        require_module(f"--on {on}", "ray")


def executor(on: str, say: Callable[[str], object]) -> AbstractContextManager[Executor]:
    """Where `--on` says: processes of this machine, or a Ray cluster for the time of the block. `say` prints a line."""
    return nullcontext(run_jobs) if on == HERE else connected(ClusterSpec.read(on), say)


def places(on: str) -> int:
    """Runs at once where --jobs does not say: one per CPU here; a cluster decides itself, by what each run takes."""
    return cores() if on == HERE else sys.maxsize


def jobs_of(place: Path, plan: Plan, on: str = HERE) -> list[Job]:
    """The jobs that make these runs, or resume them."""
    return [Job(name, arguments(config, place / name), (place / name).with_suffix(".log"), place / name,
                () if on == HERE else inputs(config)) for name, config in plan.items()]


def inputs(config: Config) -> tuple[str, ...]:
    """Files below the working directory that a run reads: model, problems, pairs, reward model, modules of the user's
    own functions."""
    functions = [config.credit, "" if config.learned else config.reward, *config.also]
    modules = [word.partition(":")[0].split(".")[0] for word in functions if word and ":" in word]
    return below_here([config.model, config.task.partition(":")[2], config.pairs or "", config.learned or "", *modules,
                       *(f"{name}.py" for name in modules)])


def is_done(path: Path, config: Config, free: frozenset[str] = FREE, beside: str = "") -> bool:
    """Whether the run is finished; other settings are refused. The path of a model named `beside` may have changed."""
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
    """Raise what would end the runs at their start, before the first is started. Loads torch."""
    for model in {config.model for config in configs}:
        refuse_missing(model)
    from creditscope.credit.choice import find_estimator
    from creditscope.lab.setup import check_problems
    from creditscope.policy.loading import load_policy
    from creditscope.tasks import find_task

    for config in {(config.task, config.estimator): config for config in configs}.values():
        check_problems(find_task(config.task, **config.task_options), config, find_estimator(config.estimator))
    for model in {config.model for config in configs} - {"tiny"}:  # the packaged one is there
        load_policy(model, device="cpu")


def check_sweep(place: Path, **counts: int | None) -> None:
    """Refuse flags of a sweep: counts below 1, and an --out that is a file."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise CreditscopeError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if place.exists() and not place.is_dir():
        raise CreditscopeError(f"--out {place} is a file; choose a folder")


def refuse_none(failed: Mapping[str, str]) -> None:
    """The error for a sweep of which every run failed."""
    name, why = next(iter(failed.items()))
    raise CreditscopeError(f"all {len(failed)} runs failed; {name}: {why}")


def show_end(console: Screen, place: Path, failed: Mapping[str, str], files: Sequence[str], drawn: bool,
             after: str) -> None:
    """The last lines of a sweep: failed runs, files, the next command."""
    for name, why in failed.items():
        console.print(f"failed: {name}: {printable(why)}   (all it said: {place / name}.log)", markup=False)
    if not drawn:
        console.print(f"no figure: {MissingExtra('a figure', 'altair')}", markup=False)
    console.print(f"wrote {place}: {', '.join(files)}", markup=False)
    console.next("the same command, for the failed runs" if failed else after)


def arguments(config: Config, path: Path) -> tuple[str, ...]:
    """The arguments of `creditscope` that make this run, or resume it."""
    again = ["--resume"] * (path / "run.json").exists()
    return ("lab", "train", *flags(asdict(config)), "--out", str(path), "--json", *again)


class Fleet(Progress):
    """Runs in progress, read from their records: a live table, or a line per ended run. `budgets`: run -> rollouts."""

    def __init__(self, console: Console, place: Path, budgets: Mapping[str, int], reused: int,
                 quiet: bool = False) -> None:
        super().__init__(console, "runs", quiet)
        self._place, self._budgets, self._reused = place, budgets, reused
        self._seen = {name: glance(place / name) for name in budgets}
        self._told: set[str] = set()
        self.show(self._spent(), sum(budgets.values()))

    def watch(self, running: Sequence[str], ended: Mapping[str, str | None]) -> None:
        """Names of running runs, and of ended ones with the reason where they failed."""
        new = [name for name in ended if name not in self._told]
        if self._quiet or not (new or self.live):
            return
        self._seen |= {name: glance(self._place / name) for name in (*running, *new)}
        self._told.update(new)
        spent = self._spent()
        # What an ended run did not spend is not to come.
        total = sum(self._budgets.values()) - sum(max(0, self._budgets[name] - self._seen[name].spent)
                                                  for name in ended)
        done = f"{len(ended) + self._reused} of {len(self._budgets) + self._reused}"
        left = self.left(spent, total)
        for name in new:
            failure, seen = ended[name], self._seen[name]
            what = (f"failed: {printable(failure)}" if failure is not None else
                    f"{_share(seen)}  {seen.steps} steps  {seen.spent:,} rollouts")
            self.say(f"{name}  {what}  ({done}" + (f", left {left}" if left else "") + ")")
        table = Table.grid(padding=(0, 2))
        for name in running:
            seen = self._seen[name]
            state = f"step {seen.steps}" if seen.steps else "starting"
            table.add_row(Text(name), Text(state), Text(f"{seen.spent:,} rollouts", justify="right"),
                          Text(_share(seen), style="bold"))
        self.show(spent, total, f"runs  {done}", table)

    def _spent(self) -> int:
        return sum(min(seen.spent, self._budgets[name]) for name, seen in self._seen.items())


def _share(seen: Glance) -> str:
    return "" if seen.accuracy is None else f"{seen.accuracy:.1%}"
