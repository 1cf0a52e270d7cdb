"""Rows that a console prints over several lines, under a line with the step.

    INFO Step 3:                                  SkyRL: pprint of a dict of texts
    {'policy/policy_loss': '0.0100',
     'reward/avg_raw_reward': '0.5000'}

    … Train step 3/100 done.                      AReaL: a table of names and values
    │ ppo_actor/task_reward/avg │ 5.0000e-01 │ ppo_actor/seq_len/avg │ 3.1000e+02 │

    ========================= Step 3/100 =========================      NeMo-RL: points
      • Avg Reward: 0.5000

    Step 3                                        EasyR1: YAML
    actor:
      pg_loss: 0.01
"""

from __future__ import annotations

import re

MAX_NAMES = 2000
"""Names that one block may have."""
_RAY = re.compile(r"(?:\x1b\[[\d;]*m)*\([\w.:\- ]{1,80}=[^)]{1,80}\)(?:\x1b\[[\d;]*m)* ")
"""Ray's "(Runner pid=422294) " with its colours."""
_HEAD = re.compile(r"(?:^|[ |\]])Step (\d{1,15})(?:: ?|/\d{1,15} =+)?$|\bTrain step (\d{1,15})/\d{1,15} done")
_CELL = re.compile(r"│([^│]*)│([^│]*)(?=│)")
_ITEM = re.compile(r"^[{ ]'([^']{1,200})': '?([^',}]{1,40})'?[,}]?$")
_POINT = re.compile(r"^\s*• ([A-Z][\w. ]{1,60}): (-?[\d.]{1,30})(?: |$)")
_YAML = re.compile(r"^((?:  ){0,6})([\w.@/-]{1,100}):(?: (\S{1,60}))?$")


class BlockReader:
    """The entries of lines given in order, each with the place of its first line."""

    def __init__(self) -> None:
        self._place = 0
        self._entry: dict[str, str] = {}
        self._nested: list[str] | None = None
        """Keys above the current line of YAML; None outside of it."""

    def see(self, place: int, line: str) -> tuple[bool, list[tuple[int, dict[str, str]]]]:
        """(whether the line is part of a block, the entries that it ends)"""
        text = line.rstrip("\r\n")
        if len(text) > 2000 or ("Step " not in text and "Train step " not in text and not self._place):
            return False, []
        text = text[len(found[0]) if (found := _RAY.match(text)) else 0:]
        if head := _HEAD.search(text):
            ended = self.end()
            self._place, self._entry = place, {"step": head[1] or head[2]}
            self._nested = [] if text.startswith("Step ") else None
            return True, ended
        if not self._place or len(self._entry) > MAX_NAMES:
            return False, []
        return self._add(text), []

    def end(self) -> list[tuple[int, dict[str, str]]]:
        """The entry of the last block."""
        ended = [(self._place, self._entry)] if len(self._entry) > 1 else []
        self._place, self._entry, self._nested = 0, {}, None
        return ended

    def _add(self, text: str) -> bool:
        if self._nested is not None:
            return self._add_yaml(text)
        if item := _ITEM.match(text) or _POINT.match(text):
            self._entry[item[1]] = item[2]
            return True
        cells = _CELL.findall(text) if "│" in text else []
        self._entry.update({name.strip(): value.strip() for name, value in cells if name.strip()})
        return bool(cells)

    def _add_yaml(self, text: str) -> bool:
        found = _YAML.match(text)
        if found is None:
            self._nested = None
            return False
        assert self._nested is not None
        depth = len(found[1]) // 2
        self._nested[depth:] = [found[2]]
        if found[3] is not None:
            self._entry["/".join(self._nested)] = found[3]
        return True
