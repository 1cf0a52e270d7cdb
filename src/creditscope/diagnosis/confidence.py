"""How often a rule was right as the first cause: counts on the held-out runs of benchmarks/clinic.

confidence.json beside this file has the counts; benchmarks/clinic/judge.py writes it. A run of TRL is read three times,
so the inputs are not independent, and counts are never added over them. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

FILE = "confidence.json"
INPUTS: Mapping[str, str] = {"log": "from the log", "callback": "from the log with the callback's metrics",
                             "record": "from the record"}
"""Input -> its words. The file's `runs` has how many faults and healthy runs were read so; its `rules` how often a rule
was `named` first on any of them, how often it was `right`, and on how many `healthy` ones it was named."""


@cache
def counts() -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath(FILE).read_text("utf-8"))
    return found


def told(rule: str, table: Mapping[str, Any] | None = None) -> str:
    """The counts of a rule in one sentence.

    >>> runs = {"log": {"faults": 8, "healthy": 5}}
    >>> told("clip", {"runs": runs, "rules": {"clip": {"log": {"named": 3, "right": 2, "healthy": 1}}}})
    'in the clinic (held-out runs): from the log right 2 of 3 times named first, on 1 of 5 healthy runs'
    >>> told("gradient", {"runs": runs, "rules": {}})
    'in the clinic (held-out runs): never named first'
    """
    table = counts() if table is None else table
    seen = table["rules"].get(rule, {})
    parts = [f"{words} right {each['right']} of {each['named']} times named first, on {each['healthy']} of "
             f"{table['runs'][which]['healthy']} healthy runs"
             for which, words in INPUTS.items() if (each := seen.get(which))]
    return f"in the clinic (held-out runs): {'; '.join(parts) or 'never named first'}"
