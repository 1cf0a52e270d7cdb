"""Write what the self-test compares with: goldens.npz from TRL's and verl's own code, verdicts.json from our claims.

    PYTHONPATH=src:tests/conformance python tests/selftest/make_goldens.py

It needs TRL. verl's arrays are those of tests/conformance/verl_0.9.1.npz, which `verl_peer.py` wrote where verl is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import trl
import trl_peer
import verl_peer
import verl_table
from batches import batches

from creditscope.methods.dialects import DIALECTS
from creditscope.selftest import conformance, formulas

HOME = Path(conformance.__file__).parent


def arrays() -> dict[str, Any]:
    """Everything that goldens.npz holds."""
    out: dict[str, Any] = {}
    used = {f"trl_{name}": batch for name, batch in trl_peer.even_batches().items()}
    used |= {f"verl_{name}": batch for name, batch in batches().items()}
    for name, batch in used.items():
        out |= {f"batch/{name}/{field}": value.numpy() for field, value in batch.items() if field != "value"}
    out |= {"trl/version": np.array(trl.__version__), "verl/version": verl_table.goldens()["verl"]}
    out["trl/cases"] = np.array([json.dumps({
        "row": case.dialect, "changes": dict(case.changes), "config": case.config, "settings": dict(case.settings),
        "text": case.text, "tolerance": trl_peer.TOLERANCE}) for case in trl_peer.CASES])
    for name, batch in trl_peer.even_batches().items():
        here = [number for number, case in enumerate(trl_peer.CASES) if name in case.batches]
        out[f"trl/index/trl_{name}"] = np.array(here)
        out[f"trl/w/trl_{name}"] = np.stack([trl_peer.trl_credit(trl_peer.CASES[n], batch).numpy() for n in here])
    out["verl/cases"] = np.array([json.dumps({
        "row": case.row, "changes": dict(case.changes), "config": "", "settings": {}, "text": case.settings,
        "tolerance": case.tolerance}) for case in verl_peer.CASES])
    for name in batches():
        out[f"verl/index/verl_{name}"] = np.arange(len(verl_peer.CASES))
        out[f"verl/w/verl_{name}"] = verl_table.goldens()[f"w/{name}"]
        for number, case in enumerate(verl_peer.CASES):
            if DIALECTS[case.row].baseline == "external":
                out[f"verl/credit/verl_{name}/{number}"] = verl_table.goldens()[f"advantages/{name}"][number]
    return out


if __name__ == "__main__":
    np.savez_compressed(HOME / conformance.GOLDENS, **arrays())
    (HOME / formulas.VERDICTS).write_text(
        json.dumps(formulas.exact_verdicts(), indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
