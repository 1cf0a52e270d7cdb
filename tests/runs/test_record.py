"""The record survives what runs die of."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from creditscope import METHODS, CreditscopeError, __version__, advantage, effective_credit, surrogate
from creditscope.files.versions import software
from creditscope.files.writing import free_path
from creditscope.objective.kept import kept_arrays
from creditscope.runs.record import Record
from makers import make

CONFIG = {"method": "grpo", "seed": 0, "steps": 3}


def new(path: Path) -> Record:
    return Record.create(path, CONFIG, {"torch": "2.13.0"})


def test_what_is_appended_is_read_back_in_order_by_a_second_reader(tmp_path: Path) -> None:
    with new(tmp_path / "run") as record:
        reader = Record.open(tmp_path / "run")
        for step in range(3):
            record.append(step, {"reward/mean": step / 2, "note": "x"})
            assert reader.steps()[-1] == {"step": step, "reward/mean": step / 2, "note": "x"}
        assert reader.config == CONFIG


def test_a_metric_that_is_not_finite_is_absent_and_named(tmp_path: Path) -> None:
    with new(tmp_path / "run") as record:
        record.append(0, {"loss": float("nan"), "reward/mean": 0.5})
        assert record.steps() == [{"step": 0, "reward/mean": 0.5, "absent": {"loss": "nan"}}]


def test_a_torn_last_line_is_not_a_step_and_rewind_removes_it(tmp_path: Path) -> None:
    with new(tmp_path / "run") as record:
        record.append(0, {"a": 1})
        with (tmp_path / "run" / "steps.jsonl").open("a") as out:
            out.write('{"step": 1, "a"')
        assert len(record.steps()) == 1
        record.rewind(1)
        record.append(1, {"a": 2})
        assert [s["a"] for s in record.steps()] == [1, 2]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    with new(tmp_path / "run") as record:
        record.append(0, {"a": 1})
        path = tmp_path / "run" / "steps.jsonl"
        path.write_bytes(b"\x00\xff garbage\n" + path.read_bytes())
        with pytest.raises(CreditscopeError, match="line 1: not a step"):
            record.steps()


def test_rewind_forgets_later_steps_groups_and_checkpoints(tmp_path: Path) -> None:
    with new(tmp_path / "run") as record:
        for step in range(4):
            record.append(step, {})
            record.save_group(step, {"w": np.ones(2)})
            with record.checkpoint(step + 1, keep=9) as folder:
                (folder / "state.json").write_text("{}")
        record.rewind(2)
        assert (len(record.steps()), record.groups(), record.checkpoints()) == (2, [0, 1], [1, 2])


def test_two_writers_never_share_a_folder(tmp_path: Path) -> None:
    with new(tmp_path / "run") as record:
        with pytest.raises(CreditscopeError, match="another process is writing"):
            new(tmp_path / "run")
        record.append(0, {})
        for again in (new, lambda path: Record.resume(path, CONFIG)):
            with pytest.raises(CreditscopeError, match="another process is writing"):
                again(tmp_path / "run")
    with pytest.raises(CreditscopeError, match="already holds a run; continue it with --resume"):
        new(tmp_path / "run")
    Record.resume(tmp_path / "run", CONFIG).close()


def test_a_run_that_took_no_step_may_be_started_anew(tmp_path: Path) -> None:
    new(tmp_path / "run").close()
    with Record.create(tmp_path / "run", CONFIG | {"seed": 7}, {}):
        assert Record.open(tmp_path / "run").config["seed"] == 7


@pytest.mark.parametrize("name", ["run.json", "steps.jsonl"])
def test_a_name_that_stands_twice_in_a_record_is_refused(name: str, tmp_path: Path) -> None:
    with new(tmp_path / "run") as record:
        record.append(0, {"a": 1})
    file = tmp_path / "run" / name
    file.write_text(file.read_text().replace("{", '{"step": 7, "step": 7, ', 1))
    with pytest.raises(CreditscopeError, match=r"'step' stands twice in one object"):
        Record.open(tmp_path / "run").steps()


def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CreditscopeError, match=r"is not empty \(it holds 'thesis.tex'\)"):
        new(tmp_path)


def test_resume_refuses_other_settings_and_allows_the_free_ones(tmp_path: Path) -> None:
    new(tmp_path / "run").close()
    with pytest.raises(CreditscopeError, match="its seed is 0, not 1"):
        Record.resume(tmp_path / "run", CONFIG | {"seed": 1})
    Record.resume(tmp_path / "run", CONFIG | {"steps": 9}, free=frozenset({"steps"})).close()


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    new(tmp_path / "run").close()
    with pytest.raises(CreditscopeError, match="opened for reading"):
        Record.open(tmp_path / "run").append(0, {})


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"format": 99, "config": {}}', '{"format": 1}'])
def test_what_is_no_run_says_so(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(CreditscopeError, match=r"holds no run|cannot read|is not a run"):
        Record.open(tmp_path)


def test_groups_hold_numbers_and_text_and_never_objects(tmp_path: Path) -> None:
    with new(tmp_path / "run") as record:
        record.save_group(5, {"w": np.arange(6).reshape(2, 3), "text": np.array(["a", "βγ"])})
        back = record.group(5)
        assert back["text"].tolist() == ["a", "βγ"]
        assert np.array_equal(back["w"], np.arange(6).reshape(2, 3))
        with pytest.raises(CreditscopeError, match="'x' for groups has dtype object"):
            record.save_group(6, {"x": np.array([{}], dtype=object)})
        with pytest.raises(CreditscopeError, match=r"no rollouts were kept of step 6; kept: \[5\]"):
            record.group(6)


def test_what_the_optimiser_did_is_kept_on_its_own_shelf_and_rewound_with_the_steps(tmp_path: Path) -> None:
    with new(tmp_path / "run") as record:
        assert record.optimizer_readings() == []
        for step in (0, 3):
            record.append(step, {})
            record.save_optimizer(step, {"phi": np.array([0.1, 1.0]) + step, "layer_names": np.array(["wte"])})
        assert record.optimizer_readings() == Record.open(tmp_path / "run").optimizer_readings() == [0, 3]
        assert record.optimizer_reading(3)["phi"].tolist() == [3.1, 4.0]
        assert record.readings() == record.groups() == []
        record.rewind(2)
        with pytest.raises(CreditscopeError, match=r"no optimiser readings were kept of step 3; kept: \[0\]"):
            record.optimizer_reading(3)


def test_a_group_file_that_is_cut_in_half_says_so(tmp_path: Path) -> None:
    with new(tmp_path / "run") as record:
        record.save_group(0, {"w": np.random.default_rng(0).normal(size=1000)})
        path = tmp_path / "run" / "groups" / "000000.npz"
        path.write_bytes(path.read_bytes()[:500])
        with pytest.raises(CreditscopeError, match="cannot read the rollouts of step 0"):
            record.group(0)


@pytest.mark.parametrize("header", ["{'descr': [1], 'fortran_order': False, 'shape': (1,), }", "{'descr': '<f8', "
                                    "'fortran_order': False, 'shape': (1152921504606846976,), }", "None"])
def test_an_array_whose_header_makes_no_sense_says_so(header: str, tmp_path: Path) -> None:
    with new(tmp_path / "run") as record:
        record.save_group(0, {"w": np.ones(1)})
        text = header.ljust(117).encode() + b"\n"
        with zipfile.ZipFile(tmp_path / "run" / "groups" / "000000.npz", "w") as file:
            file.writestr("w.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(8))
        with pytest.raises(CreditscopeError, match="cannot read the rollouts of step 0"):
            record.group(0)


def test_a_checkpoint_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with new(tmp_path / "run") as record:
        with pytest.raises(KeyboardInterrupt), record.checkpoint(1) as folder:  # noqa: PT012
            (folder / "half").touch()
            raise KeyboardInterrupt
        assert record.checkpoints() == []
        assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
        for step in (1, 2, 3):
            with record.checkpoint(step, keep=2) as folder:
                (folder / "whole").touch()
        assert record.checkpoints() == [2, 3]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_ends_in_words_and_leaves_what_was_written(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        record, done = new(disk / "run"), 0
        with pytest.raises(CreditscopeError, match="No space left on device; what was recorded so far is whole"):  # noqa: PT012
            for step in range(1000):
                record.append(step, {"text": "x" * 3000})
                done += 1
        assert [s["step"] for s in Record.open(disk / "run").steps()] == list(range(done))
        record.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_no_completed_step_is_lost_to_a_kill(tmp_path: Path) -> None:
    code = ("import sys; from creditscope.runs.record import Record\n"
            "r = Record.create(sys.argv[1], {}, {})\n"
            "for s in range(10**6):\n    r.append(s, {'x': 'y' * 200}); print(s, flush=True)")
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    while (line := child.stdout.readline()) and int(line) < 20:
        pass
    time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    reported = [20, *map(int, child.stdout.read().split())]
    child.wait()
    steps = [s["step"] for s in Record.open(tmp_path / "run").steps()]
    assert steps == list(range(len(steps)))
    assert steps[-1] >= reported[-1]
    Record.resume(tmp_path / "run", {}).close()  # the lock fell with the process


def test_run_json_holds_the_config_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "s3cret")
    new(tmp_path / "run").close()
    text = (tmp_path / "run" / "run.json").read_text()
    assert set(json.loads(text)) == {"format", "config", "versions", "crc32"}
    assert "s3cret" not in text


def test_a_run_that_is_older_than_a_setting_can_be_resumed(tmp_path: Path) -> None:
    with Record.create(tmp_path / "run", {"lr": 1.0}, {}) as record:
        record.append(0, {"reward/mean": 0.5})
    with Record.resume(tmp_path / "run", {"lr": 1.0, "scope": "off"}) as record:
        assert record.config == {"lr": 1.0, "scope": "off"}
    with pytest.raises(CreditscopeError, match="its scope is 'off', not 'full'"):
        Record.resume(tmp_path / "run", {"lr": 1.0, "scope": "full"})


@pytest.mark.parametrize("size", [2**63, -2**63, 10**399])
def test_a_whole_number_that_no_array_holds_is_damage(size: int, tmp_path: Path) -> None:
    with Record.create(tmp_path / "run", {}, {}) as record:
        record.append(0, {"rollouts/spent": 2**63 - 1})
    assert len(Record.open(tmp_path / "run").steps()) == 1
    with (tmp_path / "run" / "steps.jsonl").open("a") as out:
        out.write(f'{{"step": 1, "rollouts/spent": {size}}}\n')
    with pytest.raises(CreditscopeError, match="line 2: not a step"):
        Record.open(tmp_path / "run").steps()


# -- what a loop of one's own writes and reads -------------------------------------------------------------------------


def test_a_record_says_by_default_which_versions_wrote_it(tmp_path: Path) -> None:
    with Record.create(tmp_path / "run", CONFIG) as record:
        assert record.run["versions"] == software(("torch", "transformers"))
    assert Record.open(tmp_path / "run").run["versions"]["creditscope"] == __version__


def test_rollouts_that_were_kept_come_back_as_the_batch_they_were(tmp_path: Path) -> None:
    """Identity: w of the batch that comes back is that of the batch that was kept, to float32."""
    batch, method = make([1, 0, 1], [0, 0, 0], [2, 3, 1]), METHODS["grpo"]
    credit = advantage(method, batch.reward, batch.group)[:, None].expand_as(batch.mask)
    w = effective_credit(lambda logp: surrogate(method, logp, batch), batch.logp)
    with new(tmp_path / "run") as record:
        record.save_group(4, kept_arrays(method, batch, credit, w, batch.logp))
        record.append(4, {"reward/mean": 2 / 3})
    back = Record.open(tmp_path / "run").rollouts(4)
    for name in ("tokens", "mask", "reward", "group"):
        assert torch.equal(getattr(back, name), getattr(batch, name))
    assert torch.allclose(back.logp, batch.logp, atol=1e-6)
    assert torch.allclose(effective_credit(lambda logp: surrogate(method, logp, back), back.logp), w, atol=1e-6)
    with pytest.raises(CreditscopeError, match=r"no rollouts were kept of step 3; kept: \[4\]"):
        Record.open(tmp_path / "run").rollouts(3)


def test_without_torch_rollouts_are_refused_with_the_command_and_arrays_are_not(tmp_path: Path) -> None:
    with new(tmp_path / "run") as record:
        record.save_group(0, {"reward": np.ones(2)})
    code = (f"import sys; sys.modules['torch'] = None\nfrom creditscope import Record\n"
            f"run = Record.open({str(tmp_path / 'run')!r}); assert run.group(0)['reward'].tolist() == [1, 1]\n"
            "try: run.rollouts(0)\nexcept ValueError as error: print(error)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "Record.rollouts needs torch: pip install 'creditscope[torch]'\n"


def test_a_free_path_is_the_first_that_is_not_taken(tmp_path: Path) -> None:
    for name in ("run", "run-2", "run-3"):
        assert free_path(tmp_path / "run") == tmp_path / name
        (tmp_path / name).mkdir()
