"""What a notebook shows of a record: settings, steps, last readings, kept files, and the commands that read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from creditscope.errors import CreditscopeError, command_line
from creditscope.files.cells import cell
from creditscope.runs import schema
from creditscope.runs.columns import Steps
from creditscope.runs.frame import NO_METRICS

if TYPE_CHECKING:
    from creditscope.runs.record import Record

SETTINGS = ("model", "task", "method", "credit", "group", "lr", "seed")
LAST = (schema.REWARD_MEAN, schema.SIGNAL_DEAD_GROUPS, schema.ENTROPY_MEAN, schema.LENGTH_MEAN, schema.GRAD_NORM)
LONGEST = 60
"""Characters of a setting."""


def overview(record: Record) -> str:
    """Html. A part that cannot be read is named with its reason."""
    config = record.config
    given = [f"{name} {config[name]!s:.{LONGEST}}" for name in SETTINGS if config.get(name) is not None]
    rows: dict[str, object] = {"settings": ", ".join(given)}
    try:
        steps = record.columns()
        rows |= {"steps": _steps(steps), "last reading": _last(steps),
                 "metrics": f"{len([n for n in steps.names if n not in ('step', *NO_METRICS)])}: see .frame()"}
    except CreditscopeError as error:
        rows["steps"] = f"cannot be read: {error}"
    kept = {"rollouts": record.groups(), "Grams": record.readings(), "optimiser": record.optimizer_readings()}
    rows["kept"] = ", ".join(f"{what} of {_count(len(found), 'step')}" for what, found in kept.items() if found)
    rows["next"] = command_line("report", record.path)
    return cell(f"Record {record.path}", rows)


def _steps(steps: Steps) -> str:
    numbers = steps.column("step").values.tolist()
    return f"{len(numbers)}, from {numbers[0]} to {numbers[-1]}" if numbers else "none yet"


def _last(steps: Steps) -> list[str]:
    """Metric, value, and the step where it is not the last one."""
    out = []
    for key in LAST:
        at, values = steps.numbers(key)
        if len(at):
            step = "" if at[-1] == len(steps) - 1 else f" at step {steps.column('step').values[at[-1]]}"
            out.append(f"{key} {values[-1]:.4g}{step}")
    return out


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
