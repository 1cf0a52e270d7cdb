"""The part of `creditscope inspect --prefix`: the sum of weight times advantage on prefixes that answers share.

There the answers of a group have one log-prob in common, so its gradient is multiplied by W = Σ_i ω_it A_it over the
answers with that prefix. Even weights and a group-mean baseline give W = 0 where the whole group shares it; 1/L_i gives
short answers more weight (arXiv:2601.05002, Prop. 1). Read at ratio 1, before any update.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from creditscope.cli.output import Output, new_table
from creditscope.errors import CreditscopeError, command_line, printable, require_module
from creditscope.methods.find import find
from creditscope.methods.table import METHODS, even
from creditscope.offline.settings import Settings
from creditscope.runs import schema
from creditscope.runs.record import Record

if TYPE_CHECKING:
    from creditscope.batch.rollouts import Rollouts
    from creditscope.exact.shared_prefix import PrefixBias
    from creditscope.methods.axes import Method

MOST = 8
"""Nodes to show."""
TAIL = 48
"""Characters of a prefix to show."""
ROUNDING = 1e-9
COLUMNS = {"root": "root", "bias": "bias", "length_positive": "length\nA > 0", "length_negative": "length\nA < 0"}


@dataclass(frozen=True)
class PrefixView:
    """The table of all methods, or one method in full, on the rollouts of one batch."""

    source: Path
    method: str | None
    step: int | None
    settings: Settings
    output: Output

    def run(self) -> int:
        name = self.method or ""
        plain = name if name in METHODS else name.removesuffix("_even")
        # A wrong name is an error before torch is loaded.
        method = None if self.method is None else find(name) if plain == name else even(find(plain))
        require_module("the prefix bias", "torch")
        rollouts, step = (of_run if is_run(self.source) else self._of_file)(self.source, self.step)
        facts: dict[str, Any] = {"source": self.source.name} | ({} if step is None else {"step": step})
        facts |= {"rollouts": len(rollouts), "tokens": int(rollouts.mask.sum())}
        if method is None:
            self._table(rollouts, facts)
        else:
            self._one(method, rollouts, facts)
        return 0

    def _of_file(self, path: Path, step: int | None) -> tuple[Rollouts, int | None]:
        from creditscope.offline.one_batch import read_one

        return read_one(path, self.settings, step)

    def _table(self, rollouts: Rollouts, facts: dict[str, Any]) -> None:
        from creditscope.exact.shared_prefix import prefix_bias, prefix_metrics

        found: dict[str, dict[str, Any]] = {}
        left_out: dict[str, str] = {}
        for name, row in METHODS.items():
            try:
                found[name] = prefix_metrics(prefix_bias(row, rollouts), rollouts)
            except CreditscopeError as error:
                left_out[name] = str(error)
        if not found:
            raise CreditscopeError(next(iter(left_out.values())))
        if (console := self.output.console_or_json(facts | {"methods": found, "left_out": left_out})) is None:
            return
        console.print(self._headline(facts, next(iter(found.values()))), markup=False)
        table = new_table("method", "root\ncancels", *COLUMNS.values())
        for name, reading in found.items():
            table.add_row(name, verdict(reading), *(number(reading.get(f"prefix/{key}")) for key in COLUMNS))
        console.print(table)
        console.print("root: |W| / sum of |weight times advantage|, where a whole group shares the token; 0 cancels\n"
                      "bias: the same of W minus that of even weights, over all shared tokens\n"
                      "length: x of weight ∝ L^x among answers with A > 0, and with A < 0; -1 is 1/L_i, 0 is even")
        for name, why in left_out.items():
            console.print(f"left out: {'' if name in why else f'{name}: '}{printable(why)}", markup=False)
        console.next(self._again("grpo"))

    def _one(self, method: Method, rollouts: Rollouts, facts: dict[str, Any]) -> None:
        from creditscope.exact.shared_prefix import prefix_bias, prefix_metrics

        found = prefix_bias(method, rollouts)
        reading = prefix_metrics(found, rollouts)
        worst = most_biased(found, rollouts)
        data = facts | {"method": method.name} | reading | {"most_biased": worst}
        if (console := self.output.console_or_json(data)) is None:
            return
        console.print(self._headline(facts, reading), markup=False)
        console.print(f"method {method.name}: the root cancels: {verdict(reading)}")
        for name, value in reading.items():
            console.print(f"  {name:<24}", f"{value:.4g}" if isinstance(value, float) else value, markup=False)
        if worst:
            last = "prefix, its last token in «»"
            table = new_table("group", "answers", "W", "evenly", last, left=(last,), title="largest |bias|")
            for node in worst:
                table.add_row(str(node["group"]), f"{node['rows']} of {node['of']}", f"{node['W']:+.2e}",
                              number(node["even"], "+.2e"), escape(printable(node["prefix"].replace("\n", "⏎"))))
            console.print(table)
        if reading.get(schema.PREFIX_BIAS, 0.0) > ROUNDING and even(method).diff(method):
            console.next(self._again(f"{method.name}_even"))
        elif method.name in METHODS:
            console.next(f"creditscope lab train --method {method.name}")
        else:
            console.next(f"creditscope list methods {method.parent}")

    def _again(self, method: str) -> str:
        return command_line("inspect", self.source, "--prefix", *self.settings.flags(), "--method", method)

    def _headline(self, facts: Mapping[str, Any], reading: Mapping[str, Any]) -> str:
        where = printable(facts["source"]) + (f", step {facts['step']}" if "step" in facts else "")
        return (f"{where}: {facts['rollouts']} rollouts, {facts['tokens']} tokens, "
                f"{reading[schema.PREFIX_TOKENS]:.1%} of them on {reading[schema.PREFIX_NODES]} shared tokens; "
                f"{reading[schema.PREFIX_ROOT_NODES]} of these are of a whole group")


def is_run(path: Path) -> bool:
    """Whether a path is a record of creditscope, also a damaged one."""
    return os.path.lexists(path / "run.json")


def of_run(path: Path, step: int | None) -> tuple[Rollouts, int]:
    """The rollouts that a run kept at a step, by default the last, in float64; and the step."""
    record = Record.open(path)
    kept = record.groups()
    if not kept:
        raise CreditscopeError(f"{path} kept no rollouts; train with --keep-every 10, or give a file of rollouts")
    step = kept[-1] if step is None else step
    return record.rollouts(step), step


def most_biased(found: PrefixBias, rollouts: Rollouts) -> list[dict[str, Any]]:
    """The prefixes with the largest |bias|, each extended until its answers differ; none where the bias is 0."""
    tree, bias, total = found.nodes, found.bias, found.total
    size = bias.abs() * tree.shared
    limit = ROUNDING * float(found.mass.max())
    out: dict[int, dict[str, Any]] = {}
    for n in size.argsort(descending=True, stable=True).tolist():
        if len(out) == MOST or float(size[n]) <= limit:
            break
        row, column = (tree.index == n).nonzero()[0].tolist()
        path = list(enumerate(tree.index[row].tolist()))[column + 1:]
        column = max([column, *(at for at, m in path if m >= 0 and tree.rows[m] == tree.rows[n])])
        of = int((rollouts.group == tree.group[n]).sum())
        out.setdefault(int(tree.index[row, column]), {
            "group": int(tree.group[n]), "column": column, "rows": int(tree.rows[n]), "of": of, "W": float(total[n]),
            "even": float(found.even[n]), "bias": float(bias[n]), "prefix": shown(rollouts, row, column)})
    return list(out.values())


def shown(rollouts: Rollouts, row: int, column: int) -> str:
    """The end of a prefix with its last token in «», or its token ids where there is no text."""
    pieces = list(rollouts.pieces[row]) if rollouts.pieces else [f"{i} " for i in rollouts.tokens[row].tolist()]
    before = "".join(pieces[:column])
    return ("…" if len(before) > TAIL else "") + before[-TAIL:] + f"«{pieces[column]}»"


def verdict(reading: Mapping[str, Any]) -> str:
    root = reading.get(schema.PREFIX_ROOT)
    return "–" if root is None else "yes" if root < ROUNDING else "no"


def number(value: float | None, digits: str = ".3f") -> str:
    return "–" if value is None else "0" if abs(value) < ROUNDING else format(value, digits)
