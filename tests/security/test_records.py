"""A record is data: it names no code to run, leads to no other place, and takes no more room than it shows."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import shutil
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from creditscope.cli.main import main
from creditscope.cli.output import Output
from creditscope.errors import CreditscopeError
from creditscope.files.guards import GROWS, inside, masked, members
from creditscope.runs.record import Record
from report import records

STEP = {"reward/mean": 0.5, "rollouts/spent": 4}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A record of two steps, with rollouts and a checkpoint."""
    path = tmp_path / "run"
    with Record.create(path, {"model": "tiny", "method": "grpo"}, {}) as record:
        for step in range(2):
            record.append(step, STEP)
            record.save_group(step, {"reward": np.zeros(4)})
        with record.checkpoint(2) as folder:
            (folder / "state.json").write_text("{}")
    return path


def said_by(*args: str) -> tuple[int, str]:
    """(exit code, everything printed) of a command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), pytest.raises(SystemExit) as ended:
        main(list(args))
    return int(ended.value.code or 0), out.getvalue()


def contents(path: Path) -> dict[Path, bytes]:
    """Every file at or below a path."""
    return {file: file.read_bytes() for file in (path, *path.rglob("*")) if file.is_file()}


# -- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run.json", "steps.jsonl", "run.lock", "groups", "scope", "optimizer", "checkpoints"])
@pytest.mark.parametrize("whole", [True, False], ids=["absolute", "relative"])
def test_a_link_out_of_a_record_is_neither_read_nor_written(name: str, whole: bool, run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    inner = run / name
    if inner.exists():
        inner.rename(outside)
    else:
        outside.mkdir()
    before = contents(outside)
    inner.symlink_to(outside if whole else Path("..") / outside.name)
    for use in (Record.open, lambda path: Record.resume(path, {"model": "tiny", "method": "grpo"}),
                lambda path: Record.create(path, {}, {})):
        with pytest.raises(CreditscopeError, match=r"is a link out of|cannot write into"):
            use(run)
    assert contents(outside) == before


def test_an_array_or_a_checkpoint_behind_a_link_is_not_read(run: Path, tmp_path: Path) -> None:
    for inner in (run / "groups" / "000000.npz", run / "checkpoints" / "000002"):
        inner.rename(tmp_path / inner.name)
        inner.symlink_to(tmp_path / inner.name)
    record = Record.open(run)
    with pytest.raises(CreditscopeError, match="is a link out of"):
        record.group(0)
    with pytest.raises(CreditscopeError, match="is a link out of"):
        record.checkpoint_path(2)


def test_a_record_that_is_reached_by_a_link_and_links_inside_it_are_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "here").symlink_to(run)
    (run / "groups" / "000001.npz").unlink()
    (run / "groups" / "000001.npz").symlink_to("000000.npz")
    assert Record.open(tmp_path / "here").group(1)["reward"].tolist() == [0.0] * 4


def test_a_lock_that_is_a_link_empties_no_other_file(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("dear")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").symlink_to(precious)
    with pytest.raises(CreditscopeError):
        Record.create(tmp_path / "run", {}, {})
    assert precious.read_text() == "dear"


def test_links_where_parts_of_files_are_made_are_not_written_through(run: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    for name in ("note", ".a.part"):
        (precious / name).write_text("dear")
    (run / f".run.json.{os.getpid()}.part").symlink_to(precious / "note")
    (run / "groups" / f".000000.npz.{os.getpid()}.part").symlink_to(precious)
    (run / "elsewhere").symlink_to(precious)  # a folder that is none of the run's
    with Record.resume(run, {"model": "tiny", "method": "grpo"}) as record:
        record.save_group(0, {"reward": np.ones(4)})
    assert [file.read_text() for file in sorted(precious.iterdir())] == ["dear", "dear"]
    assert record.group(0)["reward"].tolist() == [1.0] * 4


def test_a_new_run_does_not_write_through_a_link_either(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("dear")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f".run.json.{os.getpid()}.part").symlink_to(tmp_path / "precious")
    Record.create(tmp_path / "run", {}, {}).close()
    assert (tmp_path / "precious").read_text() == "dear"


def test_a_place_inside_is_given_back_as_it_is(tmp_path: Path) -> None:
    assert inside(tmp_path, tmp_path / "a" / "b") == tmp_path / "a" / "b"


# -- archives --------------------------------------------------------------------------------------------------------


def bomb(path: Path, size: int, method: int = zipfile.ZIP_DEFLATED) -> Path:
    """A zip of one member of that many zeros, written piece by piece."""
    with zipfile.ZipFile(path, "w", method) as out, out.open("reward.npy", "w", force_zip64=True) as member:
        for _ in range(size // 2**20):
            member.write(bytes(2**20))
    return path


def test_an_archive_that_would_unpack_to_gigabytes_is_refused_before_it_is_unpacked(run: Path) -> None:
    """A thousand names for the same 8 MiB of zeros, in a file of a hundred kilobytes."""
    path = bomb(run / "groups" / "000000.npz", 8 * 2**20)
    with zipfile.ZipFile(path, "a") as out:
        for n in range(1, 1000):
            again = copy.copy(out.infolist()[0])
            again.filename = f"{n}.npy"
            out.filelist.append(again)
        out._didModify = True  # type: ignore[attr-defined]
    assert path.stat().st_size < 2**17
    tracemalloc.start()
    try:
        with pytest.raises(CreditscopeError, match="would unpack to 8,388,608,000 bytes"):
            Record.open(run).group(0)
        assert tracemalloc.get_traced_memory()[1] < 128 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_an_archive_that_lies_about_its_size_gives_no_more_than_it_said(run: Path) -> None:
    path = bomb(run / "groups" / "000000.npz", 256 * 2**20)
    data = path.read_bytes()
    true, told = (size.to_bytes(8, "little") for size in (256 * 2**20, 1000))
    short = (256 * 2**20).to_bytes(4, "little")
    path.write_bytes(data.replace(true, told).replace(short, (1000).to_bytes(4, "little")))
    tracemalloc.start()
    try:
        with pytest.raises(CreditscopeError, match="cannot read the rollouts of step 0"):
            Record.open(run).group(0)
        assert tracemalloc.get_traced_memory()[1] < 128 * 2**20
    finally:
        tracemalloc.stop()


def test_other_ways_to_compress_which_cannot_be_bounded_are_refused(run: Path) -> None:
    bomb(run / "groups" / "000000.npz", 2**20, zipfile.ZIP_BZIP2)
    with pytest.raises(CreditscopeError, match="compressed by method 12"):
        Record.open(run).group(0)


def test_an_archive_may_grow_as_much_as_numbers_do(tmp_path: Path) -> None:
    """A Gram of dead groups is zeros: it shrinks a thousand-fold and is no bomb below LARGEST."""
    np.savez_compressed(tmp_path / "zeros.npz", a=np.zeros(10**6))
    (name, data), = members(tmp_path / "zeros.npz")
    assert name == "a.npy"
    assert len(data) > GROWS * (tmp_path / "zeros.npz").stat().st_size


@pytest.mark.parametrize("name", ["../../escape", "/etc/passwd", "a\x00b", "\x1b[2J"])
def test_the_name_of_an_array_is_a_word_and_no_path(name: str, run: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(run / "groups" / "000000.npz", "w") as out:
        data = io.BytesIO()
        np.lib.format.write_array(data, np.ones(2))
        out.writestr(f"{name}.npy", data.getvalue())
    before = sorted(tmp_path.rglob("*"))
    assert [array.tolist() for array in Record.open(run).group(0).values()] == [[1.0, 1.0]]
    assert sorted(tmp_path.rglob("*")) == before


def test_an_array_of_objects_is_refused(run: Path) -> None:
    np.savez(run / "groups" / "000000.npz", reward=np.array([{"a": 1}], dtype=object))
    with pytest.raises(CreditscopeError, match="allow_pickle=False"):
        Record.open(run).group(0)


# -- functions of the user's own -------------------------------------------------------------------------------------

HOOK = "planted_hook:go"
NAMES: dict[str, Any] = {"credit": HOOK, "reward": HOOK, "also": [HOOK], "adapt": f"denser_credit,to={HOOK}",
                         "brake": HOOK, "task": HOOK, "model": HOOK, "command": HOOK}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be copied."""
    return records.hostile(tmp_path_factory.mktemp("hostile") / "run")


@pytest.fixture
def hooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module that leaves a file when it is imported; the current one, as for a user who unpacked it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "planted_hook.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
                                              "def go(*args, **options):\n    return 0.0\n")
    monkeypatch.setattr("creditscope.report.page.vega", lambda: "")  # charts take seconds and run nothing of a record's
    yield tmp_path
    sys.modules.pop("planted_hook", None)


VERBS: dict[str, Callable[[str], list[str]]] = {
    "report": lambda run: ["report", run], "doctor": lambda run: ["doctor", run],
    "check": lambda run: ["papers", "check", run],
    "optimizer": lambda run: ["inspect", run], "prefix": lambda run: ["inspect", "--prefix", run],
    "compare": lambda run: ["lab", "compare", "credit", "--no-run", "--out", str(Path(run).parents[1])],
    "reproduce": lambda run: ["papers", "reproduce", "p2", "--out", str(Path(run).parents[2]), "--seeds", "1"],
    "resume": lambda run: ["lab", "train", "--out", run, "--resume"],
    "scope": lambda run: ["inspect", f"{run}/steps.jsonl", "--out", run, "--resume"]}


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "where"), [*((verb, "all") for verb in VERBS), *(
    ("resume", where) for where in NAMES)])
def test_a_function_that_a_record_names_is_not_imported(verb: str, where: str, hooked: Path, hostile: Path) -> None:
    run = shutil.copytree(hostile, hooked / "mu4" / "none" / "seed-0")
    file = run / "run.json"
    found = json.loads(file.read_text())
    found.pop("crc32", None)
    plain = {"model": "tiny", "task": "arithmetic", "method": "grpo", "group": 4, "prompts": 2, "steps": 3, "seed": 0}
    found["config"] = plain | (NAMES if where == "all" else {where: NAMES[where]})
    file.write_text(json.dumps(found))
    said_by(*VERBS[verb](str(run)))
    assert not (hooked / "ran").exists()
    assert "planted_hook" not in sys.modules


def test_a_function_that_a_line_of_data_names_is_not_imported(hooked: Path) -> None:
    row = {"prompt": "p", "text": "a", "response": "a", "reward": 1.0, "credit": HOOK, "model": HOOK, "method": HOOK}
    (hooked / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    code, said = said_by("inspect", "rows.jsonl", "--out", "read")
    assert code == 0, said
    assert not (hooked / "ran").exists()


def test_resuming_a_run_with_a_function_asks_for_it_on_the_command_line(run: Path, hooked: Path) -> None:
    shutil.rmtree(run)
    Record.create(run, {"model": "tiny", "task": "arithmetic", "method": "grpo", "credit": HOOK}, {}).close()
    code, said = said_by("lab", "train", "--out", str(run), "--resume")
    assert code == 2
    assert f"was trained with --credit {HOOK}, a function of yours" in said
    assert "give --credit again" in said


def test_the_hook_of_these_tests_would_run(hooked: Path) -> None:
    from creditscope.credit.choice import find_estimator

    with pytest.raises(CreditscopeError, match="must take"):
        find_estimator(HOOK)
    assert (hooked / "ran").exists()


# -- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("json_too", [False, True], ids=["words", "json"])
@pytest.mark.parametrize("verb", ["report", "check", "doctor", "optimizer", "prefix", "compare", "resume"])
def test_no_command_prints_a_control_character_of_a_hostile_record(verb: str, json_too: bool, hooked: Path,
                                                                    hostile: Path) -> None:
    run = shutil.copytree(hostile, hooked / "mu4 \x1b[31m" / "none \x07\x9b" / "seed-0")
    code, said = said_by(*VERBS[verb](str(run)), *["--json"] * json_too)
    assert {c for c in said if not c.isprintable()} <= {"\n"}
    assert "Traceback" not in said
    if json_too and code == 0:
        json.loads(said)


def test_json_escapes_what_a_terminal_would_obey_and_reads_back_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": "\x9b31m \u202e \ud800 \x7f \u2028 ü 漢", "\x85": [1.5, None]}
    Output(json=True).emit(value)
    said = capsys.readouterr().out
    assert {c for c in said if not c.isprintable()} == {"\n"}
    assert "ü 漢" in said
    assert json.loads(said) == value


def test_passwords_and_keys_in_settings_do_not_reach_the_record(tmp_path: Path) -> None:
    secret = {"task": "gsm8k:https://me:PASSWORD@host/data", "model": "https://host/m?b=1&access_token=PASSWORD&c=2",
              "also": ["hf_PASSWORDPASSWORDPASSWORD"], "trl": {"key": "sk-PASSWORDPASSWORDPASSWORD"}}
    Record.create(tmp_path / "run", secret, {}).close()
    Record.resume(tmp_path / "run", secret).close()
    assert "PASSWORD" not in (tmp_path / "run" / "run.json").read_text()
    assert masked(secret)["model"] == "https://host/m?b=1&access_token=***&c=2"
    for plain in ("owner/name", "gsm8k:openai/gsm8k", "a:b@c", "monte_carlo,samples=8", "risk-neutral-and-a-long-name"):
        assert masked(plain) == plain


def test_files_of_a_record_can_be_read_by_others_as_the_umask_says_and_written_by_nobody_else(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with Record.create(tmp_path / "run", {}, {}) as record:
            record.append(0, STEP)
            record.save_group(0, {"a": np.ones(1)})
    finally:
        os.umask(before)
    assert all(not file.stat().st_mode & 0o022 for file in (tmp_path / "run").rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("verb", [["report"], ["papers", "check"], ["inspect", "--prefix"], ["inspect"], ["doctor"],
                                  ["lab", "train", "--resume", "--out"], ["inspect", "ROWS", "--out"]])
@pytest.mark.parametrize("whole", [True, False])
def test_a_link_that_leads_to_itself_is_refused_in_words(verb: list[str], whole: bool, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "loop"
    if whole:
        path.symlink_to(path)
    else:
        path.mkdir()
        for name in ("run.json", "steps.jsonl", "groups"):
            (path / name).symlink_to(path / name)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "p", "response": "r", "reward": 1}\n' * 2)
    with pytest.raises(SystemExit) as stop:
        main([str(rows) if word == "ROWS" else word for word in verb] + [str(path)])
    said = capsys.readouterr().err
    assert (stop.value.code, said.count("\n"), said[:13]) == (2, 1, "creditscope: ")
