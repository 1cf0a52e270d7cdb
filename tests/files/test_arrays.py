"""Arrays of a record that came from anybody: what does not fit is told with its file, and nothing else happens."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from creditscope import CreditscopeError, Record
from creditscope.batch.kept import rollouts_of
from creditscope.claims.evidence import read_evidence
from creditscope.cli.main import main
from creditscope.runs.arrays import READING, ROLLOUTS

Array = np.ndarray[Any, Any]
KEPT = {"tokens": np.ones((4, 3), dtype=np.int64), "mask": np.ones((4, 3), dtype=bool), "logp": np.full((4, 3), -0.5),
        "ref_logp": np.full((4, 3), -0.5), "entropy": np.full((4, 3), 0.5), "reward": np.array([1.0, 0.0, 1.0, 0.0]),
        "group": np.array([0, 0, 1, 1]), "step": np.zeros((4, 3), dtype=np.int64),
        "step_reward": np.ones((4, 2)), "step_state": np.array([[0, 1]] * 4), "prompt": np.array(["p"] * 4),
        "text": np.array(["t"] * 4), "pieces": np.array([["a", "b", "c"]] * 4)}
READ = {"group": np.array([0, 0, 1, 1]), "reward": np.array([1.0, 0.0, 1.0, 0.0]), "gram": np.eye(4) + 0.1,
        "eps": np.array(1e-12), "row_w": np.array([0.5, -0.5, 0.5, -0.5]), "scores": np.eye(4) + 0.2,
        "layer_names": np.array(["a.q_proj.weight"]), "layer_groups": np.array([0, 1]),
        "layers": np.ones((1, 2, 2, 2), dtype=np.float32), "other_names": np.array(["salt"]),
        "other_grams": np.eye(4)[None]}
WRONG: dict[str, Callable[[Array], Array]] = {
    "no axis": lambda a: np.array(3.0) if a.ndim else np.zeros(2), "an axis more": lambda a: a[None],
    "no entry": lambda a: np.zeros((0, 0)), "text": lambda a: np.full(a.shape, "x"),
    "bytes": lambda a: np.full(a.shape, b"x"), "complex": lambda a: np.full(a.shape, 1j),
    "dates": lambda a: np.full(a.shape, np.datetime64("2020-01-01")),
    "records": lambda a: np.zeros(a.shape, dtype=[("a", "i4"), ("b", "f8")]),
    "long doubles": lambda a: np.ones(a.shape, dtype=np.longdouble), "nan": lambda a: np.full(a.shape, np.nan),
    "inf": lambda a: np.full(a.shape, np.inf), "huge": lambda a: np.full(a.shape, 1e300),
    "tiny": lambda a: np.full(a.shape, 1e-310), "negative": lambda a: np.full(a.shape, -1.0),
    "other byte order": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "halves": lambda a: np.zeros(a.shape, dtype=np.float16),
    "largest": lambda a: np.full(a.shape, 2**64 - 1, dtype=np.uint64),
    "least": lambda a: np.full(a.shape, -2**63, dtype=np.int64)}


def record(path: Path, kept: dict[str, Array], read: dict[str, Array]) -> Record:
    with Record.create(path, {"method": "grpo", "group": 2, "steps": 1, "seed": 0}, {}) as out:
        out.save_group(0, kept)
        out.save_reading(0, read)
        out.append(0, {"reward/mean": 0.5})
    return Record.open(path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("shelf", "name"), [*(("groups", name) for name in KEPT), *(("scope", name) for name in READ)])
def test_an_array_that_does_not_fit_is_refused_or_read(shelf: str, name: str, tmp_path: Path) -> None:
    found, whole = record(tmp_path / "run", KEPT, READ), KEPT if shelf == "groups" else READ
    for change in WRONG.values():
        np.savez(found.path / shelf / "000000.npz", **(whole | {name: change(whole[name])}))
        for read in (lambda: rollouts_of(found.group(0)), lambda: read_evidence(found)):
            with contextlib.suppress(CreditscopeError):
                read()


def test_the_whole_arrays_are_read(tmp_path: Path) -> None:
    found = record(tmp_path / "run", KEPT, READ)
    assert len(rollouts_of(found.group(0))) == 4
    assert read_evidence(found).groups["size"] == [2.0, 2.0]
    assert (set(ROLLOUTS), set(READING)) == (set(KEPT), set(READ))


@pytest.mark.parametrize(("verb", "kept", "read", "message"), [
    ("prefix", {"logp": np.zeros(3)}, {}, "step 0 in {run} are damaged: 'logp' is (3,) of float64, and should be "
                                          "numbers (4, 3); choose another step of those kept: [0]"),
    ("prefix", {"tokens": None}, {}, "are damaged: there is no 'tokens'"),
    ("check", {}, {"gram": np.eye(3)}, "{run}/scope/000000.npz is damaged ('gram' is (3, 3) of float64, and should be "
                                       "numbers (4, 4)); delete the file to leave it out"),
    ("check", {"group": np.array(["x"] * 4)}, {}, "{run}/groups/000000.npz is damaged ('group' is (4,) of <U1, and "
                                                  "should be whole numbers (4))"),
    ("check", {}, {"reward": None}, "is damaged (there is no 'reward')"),
])
def test_a_verb_names_the_file_and_what_was_expected(verb: str, kept: dict[str, Any], read: dict[str, Any],
                                                     message: str, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    arrays = [{name: array for name, array in (whole | new).items() if array is not None}
              for whole, new in ((KEPT, kept), (READ, read))]
    record(run, *arrays)
    with pytest.raises(SystemExit) as stop:
        main([verb, str(run)])
    assert stop.value.code == 2
    assert message.format(run=run) in capsys.readouterr().err


def test_texts_of_no_letters_are_not_counted_to_a_million_millions(tmp_path: Path) -> None:
    found = record(tmp_path / "run", KEPT, READ)
    head = b"{'descr': '<U0', 'fortran_order': False, 'shape': (1000000000000,), }".ljust(117) + b"\n"
    with zipfile.ZipFile(found.path / "groups" / "000000.npz", "w") as out:
        out.writestr("text.npy", b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)
    with pytest.raises(CreditscopeError, match="1,000,000,000,000 entries in 128 bytes"):
        found.group(0)
