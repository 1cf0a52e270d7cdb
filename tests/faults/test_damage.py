"""Files that were cut, flipped, removed, or could not be written: each is noticed in words, and no number is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mini
from creditscope.cli import main as cli
from creditscope.errors import CreditscopeError
from creditscope.lab.train import train
from creditscope.policy.loading import load_policy
from creditscope.report.build import build
from creditscope.report.watch import Watched
from creditscope.runs import record
from creditscope.runs.config import Config
from creditscope.runs.record import Record
from depth import FULL, examples
from faults.kills import facts, shelves, unlike

CONFIG = Config(model=mini.model(), task=mini.TASK, prompts=2, group=4, steps=4, max_tokens=12, eval_problems=0,
                checkpoint_every=2, keep_every=1, lr=1e-2, seed=4, device="cpu")

pytestmark = pytest.mark.usefixtures("known")


@pytest.fixture(scope="module")
def known() -> Iterator[None]:
    """The task of `mini` can be found while the fixtures below train, too."""
    with mini.known():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, known: None) -> Path:
    """The undisturbed run. Each step moves the weights, so that a run like it has gone the same way."""
    out = tmp_path_factory.mktemp("whole") / "run"
    list(train(CONFIG, out, {}))
    assert all(line["grad/norm"] > 0 for line in Record.open(out).steps() if "reward/mean" in line)
    return out


def stop(config: Config, out: Path) -> Path:
    """A run as a kill leaves it after its third step: one more than its checkpoint has."""
    steps = train(config, out, {})
    for _ in range(3):
        next(steps)
    steps.close()
    return out


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, known: None) -> Path:
    return stop(CONFIG, tmp_path_factory.mktemp("stopped") / "run")


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory, known: None) -> Path:
    """One with files of every kind."""
    config = replace(CONFIG, scope="light", probe="full", probe_every=10)
    return stop(config, tmp_path_factory.mktemp("read") / "run")


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


@pytest.fixture
def shown(read: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(read, tmp_path / "shown"))


def content(out: Path) -> dict[str, Any]:
    """Everything that a record says."""
    found = Record.open(out)
    said: dict[str, Any] = {"config": found.config, "steps.jsonl": found.steps()}
    for shelf, (kept, load) in shelves(found).items():
        for step in kept:
            said |= {f"{shelf}/{step:06d}.npz/{name}": (value.dtype, value.shape, value.tobytes())
                     for name, value in load(step).items()}
    return said


def said_by(*args: str) -> tuple[int, str]:
    """(exit code, everything said) of a command."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out), \
            pytest.raises(SystemExit) as end:
        cli.main(list(args))
    return int(end.value.code or 0), out.getvalue()


def error_of(use: Callable[[], Any]) -> tuple[str, Any]:
    """(what is wrong, nothing) or (nothing, what was found)."""
    try:
        return "", use()
    except CreditscopeError as error:
        return str(error), None


def resumed(out: Path, config: Config = CONFIG) -> None:
    list(train(config, out, {}, resume=True))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def remove(path: Path) -> None:
    path.unlink()


def flip(path: Path, rng: random.Random | None = None) -> None:
    rng = rng or random.Random(path.name)
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = (cut, flip, remove, empty)
FILES = ("run.json", "steps.jsonl", "groups/000001.npz", "scope/000001.npz", "optimizer/000000.npz",
         "groups/000002.npz", "checkpoints/000002/policy.safetensors", "checkpoints/000002/optimizer.safetensors",
         "checkpoints/000002/state.json", "checkpoints/000002/SHA256SUMS")


def repair(out: Path, name: str, whole_file: Path) -> None:
    """What the message says."""
    if name.startswith("checkpoints/"):
        shutil.rmtree(out / "checkpoints" / "000002")
    elif name.endswith(".npz"):
        (out / name).unlink()
    else:
        shutil.copy(whole_file, out / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_by_whoever_reads_it_and_no_number_is_another(
        name: str, read: Path, tmp_path: Path) -> None:
    truth = content(read)
    for damage in DAMAGES:
        out = Path(shutil.copytree(read, tmp_path / damage.__name__))
        damage(out / name)
        said, found = error_of(lambda out=out: content(out))
        if said:
            assert Path(name).name in said or Path(name).stem.lstrip("0") in said, damage
        else:
            assert found.items() <= truth.items(), damage
            gone = [name] if damage is remove and name.endswith(".npz") else []
            assert Record.open(out).missing() == gone
            assert gone or found.keys() == truth.keys(), damage
        for verb in (["papers", "check"], ["report"]) if not name.startswith("checkpoints/") else ():
            code, told = said_by(*verb, str(out), "--json")
            assert code in (0, 2), told
            assert "Traceback" not in told
            if damage is remove and name.endswith(".npz"):
                assert f"lacks files that it had kept: {name};" in json.loads(told)["faults"][0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "damage", "word"), [
    ("run.json", cut, "bring the file back"), ("run.json", remove, "holds no run"),
    ("steps.jsonl", flip, "Cut it after"), ("steps.jsonl", empty, "Bring the whole file back"),
    ("checkpoints/000002/policy.safetensors", cut, "delete that folder"),
    ("checkpoints/000002/optimizer.safetensors", flip, "delete that folder"),
    ("checkpoints/000002/state.json", remove, "delete that folder"),
    ("checkpoints/000002/SHA256SUMS", flip, "delete that folder"), ("groups/000002.npz", cut, "")])
def test_a_run_with_a_damaged_file_names_the_repair_which_leads_to_the_undisturbed_run(
        name: str, damage: Callable[[Path], None], word: str, run: Path, stopped: Path, whole: Path) -> None:
    damage(run / name)
    said, _ = error_of(lambda: resumed(run))
    assert bool(said) == bool(word)  # what is after the checkpoint is made again, and not read
    if said:
        assert word in said
        repair(run, name, stopped / name)
        resumed(run)
    assert unlike(run, whole) == []


@pytest.mark.slow
def test_a_page_that_follows_a_run_outlives_every_damage(shown: Path, read: Path) -> None:
    watched = Watched([shown], lambda: build([shown], live=True))
    watched.page()
    for name in FILES[:5]:
        for damage in (cut, remove):
            damage(shown / name)
            assert watched.page().endswith(b"</html>\n")
            assert bool(watched.notice) == name.endswith(("run.json", "steps.jsonl"))  # others are told on it
            shutil.copy(read / name, shown / name)
            assert watched.page().endswith(b"</html>\n")
            assert watched.notice == ""


def test_a_model_that_was_damaged_after_the_run_is_not_trained_on(whole: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(whole / "model", tmp_path / "model"))
    assert load_policy(str(model)).trainable()
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-1] ^= 1  # the last bit of a weight: nothing else would tell
    (model / "model.safetensors").write_bytes(data)
    with pytest.raises(CreditscopeError, match=r"model.safetensors is not what was written: it does not match "
                                               r"SHA256SUMS. If you changed the file, delete SHA256SUMS there"):
        load_policy(str(model))
    (model / "SHA256SUMS").write_bytes(b"\xff\x00  ../../etc/passwd\n\xfe")  # somebody else's, which names nothing here
    assert load_policy(str(model)).trainable()


def changed(out: Path, name: str, change: Callable[[bytearray], None], truth: dict[str, Any]) -> bool:
    """Whether a record says something else than the truth after a change of a file, and no error."""
    before = (out / name).read_bytes()
    data = bytearray(before)
    change(data)
    (out / name).write_bytes(data)
    try:
        return content(out) != truth
    except CreditscopeError:
        return False
    finally:
        (out / name).write_bytes(before)


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize("name", ["run.json", "steps.jsonl", "groups/000001.npz", "scope/000001.npz"])
def test_no_flipped_bit_changes_what_a_record_says(name: str, shown: Path) -> None:
    rng, truth, data = random.Random(0), content(shown), (shown / name).read_bytes()
    silent = []
    # Anywhere but in the last newline, without which the last line is a torn one; and in the name of the sum.
    sums = [(data.index(b'"crc32"') + i, bit) for i in range(9) for bit in range(8)] if b'"crc32"' in data else []
    for place, bit in [(rng.randrange(len(data) - 1), rng.randrange(8)) for _ in range(examples(150))] + sums:

        def turn(data: bytearray, place: int = place, bit: int = bit) -> None:
            data[place] ^= 1 << bit

        if changed(shown, name, turn, truth):
            silent.append((place, bit))
    assert silent == []


@pytest.mark.slow
@pytest.mark.deep
def test_no_flipped_bit_of_a_zip_files_directory_hides_an_array(tmp_path: Path) -> None:
    """Every bit of it, at full depth: a wrong length there can swallow the entries that follow, and no sum covers it.
    In `make test` every bit of the first entry, which is where those lengths are."""
    with Record.create(tmp_path / "run", {}, {}) as writer:
        writer.save_group(0, {name: np.arange(3) for name in "abc"})
    path = tmp_path / "run" / "groups" / "000000.npz"
    data, start = path.read_bytes(), path.read_bytes().index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", start + 4)
    for place in range(start, len(data) if FULL else second):
        for bit in range(8):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1:])
            said, found = error_of(lambda: Record.open(tmp_path / "run").group(0))
            assert said or list(found) == ["a", "b", "c"], (place - start, bit)


def test_without_its_sum_a_flipped_digit_would_go_unnoticed(run: Path) -> None:
    """Can fail: the sums are what notices."""
    lines = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    for line in lines:
        del line["crc32"]
    (run / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = (run / "steps.jsonl").read_text()
    place = text.index('"reward/mean": 0.') + len('"reward/mean": 0.')
    truth = content(run)

    def turn(data: bytearray) -> None:
        data[place] ^= 1

    assert changed(run, "steps.jsonl", turn, truth)


def test_a_flipped_weight_is_noticed_and_without_the_sums_it_would_be_trained_on(run: Path, whole: Path) -> None:
    path = run / "checkpoints" / "000002" / "policy.safetensors"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 64
    path.write_bytes(data)
    with pytest.raises(CreditscopeError, match=r"policy.safetensors is not what was .*SHA256SUMS; delete that"):
        resumed(run)
    (path.parent / "SHA256SUMS").unlink()
    resumed(run)
    assert any("step 2 has other numbers" in said for said in unlike(run, whole))


def test_a_steps_file_that_was_cut_at_a_line_is_shorter_than_its_checkpoint_and_says_so(run: Path) -> None:
    path = run / "steps.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    for use in (lambda: Record.open(run).steps(), lambda: resumed(run), lambda: list(train(CONFIG, run, {}))):
        with pytest.raises(CreditscopeError, match="ends with step 0, but there is a checkpoint after 2 steps"):
            use()


def test_what_a_kill_leaves_before_run_json_is_no_obstacle_to_starting_there(tmp_path: Path) -> None:
    for name in ("groups", "checkpoints"):
        (tmp_path / name).mkdir()
    for name in ("run.lock", "steps.jsonl", ".run.json.1234.part"):
        (tmp_path / name).touch()
    Record.create(tmp_path, {}, {}).close()
    assert Record.open(tmp_path).steps() == []


def test_a_run_that_starts_and_ends_while_another_is_about_to_start_is_not_written_over(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = record.lock_folder

    def after_another(path: Path) -> Any:
        monkeypatch.setattr(record, "lock_folder", lock)
        with Record.create(path, {"seed": 1}, {}) as other:
            other.append(0, {"reward/mean": 0.5})
        return lock(path)

    monkeypatch.setattr(record, "lock_folder", after_another)
    with pytest.raises(CreditscopeError, match="already holds a run"):
        Record.create(tmp_path / "run", {"seed": 2}, {})
    assert Record.open(tmp_path / "run").config == {"seed": 1}


def test_half_a_checkpoint_never_has_a_checkpoints_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old ones are renamed before they are removed; a kill may come in the middle of that."""
    seen: list[list[str]] = []
    rmtree = shutil.rmtree

    def looking(path: Any, *args: Any, **more: Any) -> None:
        seen.append(sorted(entry.name for entry in (tmp_path / "run" / "checkpoints").iterdir()))
        rmtree(path, *args, **more)

    with Record.create(tmp_path / "run", {}, {}) as writer:
        for step in range(4):
            writer.append(step, {})
            monkeypatch.setattr(shutil, "rmtree", looking)
            with writer.checkpoint(step + 1, keep=2) as folder:
                (folder / "state.json").write_text("{}")
    assert [".000001.old.part", "000002", "000003"] in seen


def test_an_old_checkpoint_that_a_kill_kept_from_going_goes_when_the_run_goes_on(tmp_path: Path) -> None:
    with Record.create(tmp_path / "run", {}, {}) as writer:
        for step in range(3):
            writer.append(step, {})
            with writer.checkpoint(step + 1, keep=9) as folder:
                (folder / "state.json").write_text("{}")
        writer.rewind(3)
        assert writer.checkpoints() == [2, 3]


# -- disks -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """A tmpfs of that size."""
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("mounting a small disk needs root")
    disk = Path(tempfile.mkdtemp())
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
        disk.rmdir()


def fill(disk: Path, leave: int) -> None:
    """Leave so many bytes free."""
    free = os.statvfs(disk)
    with (disk / "ballast").open("wb") as out:
        out.write(bytes(max(0, free.f_bavail * free.f_bsize - leave)))


@pytest.mark.slow
@pytest.mark.parametrize(("after", "leave"), [(1, 0), (1, 8192), (1, 40_000), (2, 0), (3, 90_000)])
def test_a_full_disk_loses_no_step_and_with_room_the_run_goes_on_as_if_nothing_had_been(
        after: int, leave: int, whole: Path) -> None:
    with small_disk("2m") as disk:
        out, steps, done = disk / "run", train(CONFIG, disk / "run", {}), 0
        with pytest.raises(CreditscopeError, match=r"No space left on device.*Make room there"):  # noqa: PT012
            for _ in steps:
                done += 1
                if done == after:
                    fill(disk, leave)
        steps.close()
        left = Record.open(out)
        lines = [facts(line) for line in left.steps() if "run/stopped" not in line]
        assert len(lines) >= done
        assert lines == [facts(line) for line in Record.open(whole).steps()[:len(lines)]]
        assert not list(out.rglob(".*.part"))
        if leave == 0:
            with pytest.raises(CreditscopeError, match="No space left on device"):
                resumed(out)
            assert len(Record.open(out).steps()) >= done
        code, told = said_by("report", str(out), "--json", "-o", str(whole.parent / "full.html"))
        assert code == 0, told
        (disk / "ballast").unlink()
        resumed(out)
        assert unlike(out, whole) == []


@contextlib.contextmanager
def unprivileged(*owned: Path) -> Iterator[None]:
    """As a user for whom modes are not just a word."""
    if os.geteuid() != 0:
        yield
        return
    for path in owned:
        for entry in [path, *path.rglob("*")]:
            os.chown(entry, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["", "checkpoints", "groups"])
def test_a_record_that_becomes_read_only_ends_the_run_in_words_and_can_be_read(part: str, whole: Path) -> None:
    with contextlib.ExitStack() as stack:
        place = Path(tempfile.mkdtemp())
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        config = replace(CONFIG, model=str(shutil.copytree(CONFIG.model, place / "model")))
        stack.enter_context(unprivileged(place))
        steps = train(config, place / "run", {})
        next(steps)
        (place / "run" / part).chmod(0o555)
        with pytest.raises(CreditscopeError, match="Permission denied; what was recorded so far is whole"):
            list(steps)
        done = len(Record.open(place / "run").steps())
        assert done >= 1
        with pytest.raises(CreditscopeError, match="Permission denied"):
            resumed(place / "run", config)
        assert len(content(place / "run")["steps.jsonl"]) == done
        (place / "run" / part).chmod(0o755)
        resumed(place / "run", config)
        os.seteuid(os.getuid())
        assert unlike(place / "run", whole) == []


# -- two at once -------------------------------------------------------------------------------------------------------


def race(out: Path) -> None:
    """A run, and a second one that is started and a third that resumes while it goes on."""
    first = train(CONFIG, out, {})
    next(first)
    for resume in (False, True):
        with contextlib.suppress(CreditscopeError):
            list(train(CONFIG, out, {}, resume))
    list(first)


@pytest.mark.slow
def test_two_runs_never_write_into_one_directory(whole: Path, tmp_path: Path) -> None:
    race(tmp_path / "run")
    assert unlike(tmp_path / "run", whole) == []


@pytest.mark.slow
def test_without_the_lock_they_would(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Can fail: the same race spoils the record."""
    monkeypatch.setattr(record, "lock_folder", lambda path: SimpleNamespace(release=lambda: None))
    try:
        race(tmp_path / "run")
        said = unlike(tmp_path / "run", whole)
    except CreditscopeError as error:
        said = [str(error)]
    assert said
