"""A first user's mistakes end in a sentence that says what to change, in the words of a script; and what is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl", reason="its trainers are read")

from creditscope.errors import CreditscopeError  # noqa: E402
from creditscope.plugins.trl import CreditMixin, ScopeCallback, ScopedGRPOTrainer  # noqa: E402
from creditscope.plugins.trl.callback import WATCHED  # noqa: E402
from creditscope.plugins.trl.engine import refuse_folder  # noqa: E402
from creditscope.runs.record import Record  # noqa: E402
from plugins.trl_makers import FOLDER, model_folder, trainer  # noqa: E402

pytestmark = pytest.mark.conformance

READ = "ScopeCallback reads GRPOTrainer, RLOOTrainer, DPOTrainer and their subclasses; this is"


def sft(kind: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer

    args = trl.SFTConfig(output_dir=FOLDER.name, use_cpu=True, bf16=False, report_to="none")
    return kind(model=model_folder("float64"), args=args, train_dataset=Dataset.from_list([{"text": "a b c"}] * 4),
                processing_class=AutoTokenizer.from_pretrained(model_folder("float64")))


def run_in(out: Path) -> None:
    """The folder of a run of one step."""
    with Record.create(out, {}, {}) as record:
        record.append(0, {"reward/mean": 0.0})


def test_another_kind_of_trainer_is_refused_by_its_kind_and_not_by_its_version() -> None:
    with pytest.raises(CreditscopeError, match=f"{READ} SFTTrainer$"):
        ScopeCallback(sft(trl.SFTTrainer))

    class Mixed(CreditMixin, trl.SFTTrainer):  # type: ignore[misc, name-defined]
        pass

    with pytest.raises(CreditscopeError, match=f"{READ} Mixed$"):
        sft(Mixed)


def test_a_folder_that_holds_a_run_is_kept_and_the_repair_is_one_of_a_script(tmp_path: Path) -> None:
    run_in(tmp_path / "run")
    live = trainer()
    live.add_callback(ScopeCallback(live, out=tmp_path / "run"))  # training may still go on from a checkpoint
    with pytest.raises(CreditscopeError, match=r"run already holds a run: give ScopeCallback another out=, delete the "
                                               r"folder, or go on with trainer\.train\(resume_from_checkpoint=True\)$"):
        live.train()
    assert len(Record.open(tmp_path / "run").steps()) == 1


def test_a_folder_of_something_else_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(CreditscopeError, match=r"is not empty \(it holds 'checkpoint-2'\): .*another out="):
        ScopeCallback(trainer(), out=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CreditscopeError, match=r"file is a file: .*another out="):
        ScopeCallback(trainer(), out=tmp_path / "file")
    (tmp_path / "empty").mkdir()
    ScopeCallback(trainer(), out=tmp_path / "empty")


def test_the_command_line_says_the_same_of_its_own_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in(tmp_path / "run")
    with pytest.raises(CreditscopeError, match=r"already holds a run, and --engine trl .*choose another --out"):
        refuse_folder(tmp_path / "run")
    with pytest.raises(CreditscopeError, match=r"is not empty \(it holds 'run'\); choose another --out$"):
        refuse_folder(tmp_path)
    refuse_folder(tmp_path / "new")
    monkeypatch.setenv("RANK", "1")  # which comes when rank 0 may have begun to write
    refuse_folder(tmp_path / "run")


def test_a_callback_that_was_made_for_another_trainer_is_refused() -> None:
    live, other = trainer(), trainer()
    other.add_callback(ScopeCallback(live))
    with pytest.raises(CreditscopeError, match="this ScopeCallback was made for another trainer"):
        other.train()


@pytest.mark.parametrize("kind", [trl.GRPOTrainer, ScopedGRPOTrainer])
def test_a_second_callback_is_refused(kind: Any, tmp_path: Path) -> None:
    live = trainer(kind)
    scope = ScopeCallback(live, out=tmp_path / "run")
    live.add_callback(scope)
    if kind is trl.GRPOTrainer:
        live.add_callback(scope)  # the same one would write each step twice
    with pytest.raises(CreditscopeError, match="this trainer already has a ScopeCallback"):
        live.train()


def test_trls_logs_have_what_is_watched_and_the_record_has_all(tmp_path: Path) -> None:
    live = trainer(max_steps=1)
    live.add_callback(ScopeCallback(live, every=1, out=tmp_path / "run", alarm=False))
    live.train()
    logged = {name.removeprefix("creditscope/"): value for name, value in live.state.log_history[0].items()
              if name.startswith("creditscope/")}
    line = Record.open(tmp_path / "run").steps()[0]
    assert logged == pytest.approx({name: line[name] for name in WATCHED if name in line})
    # No KL term, no dead group, no pairs.
    assert set(WATCHED) - set(logged) <= {"grad/kl_pull", "grad/kl_size", "signal/dead_reward", "pairs/chosen_change",
                                          "pairs/rejected_change", "pairs/chosen_fell", "scope/row_error"}
    assert {"optimizer/overshoot", "gram/effective_rank", "objective/value", "time/scope"} <= set(line)


def test_the_last_line_says_where_the_record_is_and_what_reads_it(tmp_path: Path,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    out, lines = tmp_path / "run", []
    live = trainer(max_steps=1)
    live.add_callback(ScopeCallback(live, out=out))
    live.train()
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {out}; next: creditscope report {out}"
    live = trainer(max_steps=1)
    live.add_callback(ScopeCallback(live, out=tmp_path / "told", tell=lines.append))  # who is told speaks for the run
    live.train()
    assert len(lines) == 1
    assert "wrote" not in capsys.readouterr().out
