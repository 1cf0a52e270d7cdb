"""Files and folders appear complete or not at all; one process writes into a run's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from creditscope.errors import CreditscopeError
from creditscope.files.writing import check_new_file, check_new_folder, lock_folder, new_file, new_folder, write_file


def test_a_file_that_fails_half_way_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "page").write_text("old")
    with pytest.raises(ZeroDivisionError), new_file(tmp_path / "page") as out:
        1 // out.write(b"")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("page", "old")]


@pytest.mark.parametrize("sync", [False, True])
def test_a_file_and_a_folder_take_their_names_at_the_end(tmp_path: Path, sync: bool) -> None:
    with new_file(tmp_path / "page", sync=sync) as out:
        out.write(b"new")
        assert not (tmp_path / "page").exists()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").touch()
    with new_folder(tmp_path / "folder", sync=sync) as part:
        (part / "new").touch()
        assert [file.name for file in (tmp_path / "folder").iterdir()] == ["old"]
    assert sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*")) == ["folder", "folder/new", "page"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_files_of_a_new_folder_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with new_folder(tmp_path / "model") as part:
            (part / "inner").mkdir()
            for file in (part / "config.json", part / "inner" / "model.safetensors"):
                file.touch(mode=0o600)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "model").rglob("*") if file.is_file()} == {0o640}


def test_a_private_file_is_never_readable_by_others(tmp_path: Path) -> None:
    with new_file(tmp_path / "key", mode=0o600) as out:
        assert not os.fstat(out.fileno()).st_mode & 0o077
    assert not (tmp_path / "key").stat().st_mode & 0o077


def test_a_place_that_cannot_be_written_is_told_with_its_repair(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CreditscopeError, match=r"cannot write .*page: .*; use another disk$"):
        write_file(tmp_path / "file" / "page", "text", repair="use another disk")


@pytest.mark.parametrize("check", [check_new_file, check_new_folder])
def test_an_out_that_cannot_be_made_is_refused_before_the_work(
        tmp_path: Path, check: Callable[[Path], None]) -> None:
    check(tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(CreditscopeError, match=r"cannot make --out .*: File name too long; choose another --out"):
        check(tmp_path / ("x" * 300))
    if sys.platform == "linux":  # of /proc, access() tells root that it may write there
        with pytest.raises(CreditscopeError, match=r"cannot make --out /proc/out: .*; choose another --out"):
            check(Path("/proc/out"))


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    with pytest.raises(CreditscopeError, match="another process is writing into"):
        lock_folder(tmp_path)
    lock.release()
    lock_folder(tmp_path).release()


def test_records_can_be_imported_where_there_is_no_fcntl() -> None:
    """As on Windows."""
    code = "import sys; sys.modules['fcntl'] = None; import creditscope.runs.record, creditscope.cli.main"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
