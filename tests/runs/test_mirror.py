"""A copy of a record that was cut off after any piece is a record, and resumes to the run that was not cut off."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import mini
from creditscope.errors import CreditscopeError
from creditscope.lab.train import train
from creditscope.runs.config import Config
from creditscope.runs.mirror import Inbox, Outbox, Piece, pack, unpack
from creditscope.runs.record import Record
from same_runs import differences, untimed


def config() -> Config:
    """Six steps with three checkpoints of which two stay, and rollouts that are thinned out."""
    return Config(model=mini.model(), task=mini.TASK, steps=6, group=4, prompts=2, checkpoint_every=2, keep_every=1,
                  keep_most=3, eval_problems=4, scope="light", every=2, device="cpu")


def check(path: Path) -> None:
    """What a kill may leave: no checkpoint ahead of its lines, and no line ahead of its files."""
    record = Record.open(path)
    lines = record.steps()
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert all(step <= len(lines) for step in record.checkpoints())
    for line in lines:
        kept = set(line.get("kept", ()))
        assert "groups" not in kept or line["step"] in record.groups() or line["step"] % record.run["apart"]["groups"]
        assert "scope" not in kept or (path / "scope" / f"{line['step']:06d}.npz").exists()


@pytest.mark.slow
def test_a_copy_that_is_cut_off_after_any_piece_resumes_to_the_same_run(mini_task: None, tmp_path: Path) -> None:
    whole, copy, cuts = tmp_path / "whole", tmp_path / "copy", 0
    run, outbox = train(config(), whole, {}), Outbox(whole)
    with Inbox(copy) as inbox:
        for _ in run:
            for piece in outbox.pieces():
                inbox.put([piece])
                if (copy / "run.json").exists():
                    check(copy)
                else:  # a new run may begin in the folder
                    assert piece == Piece("fill", "run.json", piece.data)
                thinned = piece.act == "gone" and piece.path.startswith("checkpoints")
                if thinned or piece == Piece("done", "checkpoints/000004"):
                    cuts += 1
                    shutil.copytree(copy, tmp_path / f"cut-{cuts}")
        for piece in outbox.pieces():
            inbox.put([piece])
        assert not list(outbox.pieces())
    assert differences(whole, copy) == []
    assert cuts >= 2
    for number in range(1, cuts + 1):
        cut = tmp_path / f"cut-{number}"
        assert 4 in Record.open(cut).checkpoints()
        for _ in train(config(), cut, {}, resume=True):
            pass
        assert differences(whole, cut) == []


def record(path: Path, steps: int) -> Record:
    made = Record.create(path, {"seed": 0}, {})
    for step in range(steps):
        made.append(step, {"reward/mean": 0.5})
    return made


def test_what_is_written_between_two_reads_waits_for_the_next_round(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on just after its lines were read: the checkpoint that it makes then is ahead of these lines."""
    with record(tmp_path / "run", 1) as written, Inbox(tmp_path / "copy") as inbox:
        outbox = Outbox(tmp_path / "run")
        read = outbox._new_lines

        def meanwhile() -> tuple[bytes, bool, tuple[int, bytes | None]]:
            found = read()
            step = len(written.steps())
            written.append(step, {"reward/mean": 0.5})
            with written.checkpoint(step + 1) as folder:
                (folder / "state.json").write_text("{}")
            return found

        monkeypatch.setattr(outbox, "_new_lines", meanwhile)
        for lines in (1, 2, 3):
            for piece in outbox.pieces():
                inbox.put([piece])
                if (tmp_path / "copy" / "run.json").exists():
                    check(tmp_path / "copy")
            assert len(untimed(tmp_path / "copy")) == lines
            assert max(Record.open(tmp_path / "copy").checkpoints(), default=0) == (lines if lines > 1 else 0)


def test_lines_are_appended_and_a_rewound_file_is_sent_whole(tmp_path: Path) -> None:
    with record(tmp_path / "run", 2) as written, Inbox(tmp_path / "copy") as inbox:
        outbox = Outbox(tmp_path / "run")
        inbox.put(outbox.pieces())
        written.append(2, {"reward/mean": 0.25})
        sent = list(outbox.pieces())
        assert [(piece.act, piece.path) for piece in sent] == [("grow", "steps.jsonl")]
        assert json.loads(sent[0].data)["step"] == 2
        inbox.put(sent)
        written.rewind(1)
        inbox.put(outbox.pieces())
        assert untimed(tmp_path / "copy") == untimed(tmp_path / "run") == [{"step": 0, "reward/mean": 0.5}]


def test_a_file_that_was_rewound_and_grew_between_two_reads_is_sent_whole_whatever_its_inode(tmp_path: Path) -> None:
    """A resumed run writes its lines twice, so the second file may have the inode that the first one freed."""
    lines = tmp_path / "run" / "steps.jsonl"
    with record(tmp_path / "run", 3), Inbox(tmp_path / "copy") as inbox:
        outbox = Outbox(tmp_path / "run")
        inbox.put(outbox.pieces())
        before = lines.stat()
        with record(tmp_path / "other", 2) as other:
            for step in range(2, 5):
                other.append(step, {"reward/mean": 0.25, "time/step": 0.125})
        with lines.open("r+b") as out:  # in place: the same inode, and longer than what was sent
            out.write((tmp_path / "other" / "steps.jsonl").read_bytes())
        assert (lines.stat().st_ino, lines.stat().st_size > before.st_size) == (before.st_ino, True)
        inbox.put(outbox.pieces())
        assert untimed(tmp_path / "copy") == untimed(tmp_path / "run")
        assert len(untimed(tmp_path / "copy")) == 5


def test_a_torn_line_and_a_run_that_was_removed_send_nothing(tmp_path: Path) -> None:
    with record(tmp_path / "run", 1):
        outbox = Outbox(tmp_path / "run", sent=True)
        with (tmp_path / "run" / "steps.jsonl").open("ab") as out:
            out.write(b'{"step": 1, "rew')
        assert list(outbox.pieces()) == []
    shutil.rmtree(tmp_path / "run")
    assert list(outbox.pieces()) == []  # what is at home stays


def test_a_file_larger_than_a_piece_is_sent_in_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("creditscope.runs.mirror.CHUNK", 7)
    with record(tmp_path / "run", 3) as written, Inbox(tmp_path / "copy") as inbox:
        with written.checkpoint(2) as folder:
            (folder / "state.json").write_text("{}" * 20)
            (folder / "empty.json").touch()
        sent = [piece for parcel in [pack(Outbox(tmp_path / "run").pieces())] for piece in unpack(parcel)[0]]
        assert max(len(piece.data) for piece in sent) == 7
        inbox.put(sent)
    assert differences(tmp_path / "run", tmp_path / "copy") == []
    assert (tmp_path / "copy/checkpoints/000002/empty.json").read_bytes() == b""


@pytest.mark.parametrize("path", ["../elsewhere", "/etc/passwd", "run.lock", "groups/../../x.npz", "model/../../x",
                                  "model/.hidden", "checkpoints/000002/../../../x", "groups/000001.npz/x", "", "other"])
def test_a_path_that_no_run_writes_is_refused(path: str, tmp_path: Path) -> None:
    with Inbox(tmp_path / "run") as inbox, pytest.raises(CreditscopeError, match="is no file of a run"):
        inbox.put([Piece("fill", path, b"x"), Piece("done", path)])
    assert {entry.name for entry in tmp_path.rglob("*")} <= {"run", "run.lock", "groups", "checkpoints",
                                                             "steps.jsonl"}


def test_a_link_out_of_the_copy_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "scope").symlink_to(tmp_path / "other")
    with Inbox(tmp_path / "run") as inbox, pytest.raises(CreditscopeError, match="is a link out of"):
        inbox.put([Piece("fill", "scope/000001.npz", b"x"), Piece("done", "scope/000001.npz")])
    assert not list((tmp_path / "other").iterdir())


def test_a_checkpoint_that_was_damaged_on_its_way_is_refused(tmp_path: Path) -> None:
    with record(tmp_path / "run", 2) as written, written.checkpoint(2) as folder:
        (folder / "state.json").write_text('{"step": 2}')
    sent = [piece._replace(data=b'{"step": 3}') if piece.path.endswith("state.json") else piece
            for piece in Outbox(tmp_path / "run").pieces()]
    with Inbox(tmp_path / "copy") as inbox, pytest.raises(CreditscopeError, match="does not match SHA256SUMS"):
        inbox.put(sent)
    assert Record.open(tmp_path / "copy").checkpoints() == []
    without = [piece for piece in sent if not piece.path.endswith("SHA256SUMS")]
    with Inbox(tmp_path / "copy") as inbox, pytest.raises(CreditscopeError, match="came without SHA256SUMS"):
        inbox.put(without)


@pytest.mark.parametrize("data", [b"", b"[]\n", b'{"pieces": [], "said": 3}\n', b'{"pieces": [["fill", "a", 9]]}\nx',
                                  b'{"pieces": [["run", "a", 0]], "said": {}}\n', b'{"pieces": [["fill", 1, 0]]}\n',
                                  b'{"pieces": [["fill", "a", -1]], "said": {}}\n', b"\x80\x04\x95."])
def test_bytes_that_are_no_parcel_are_refused(data: bytes) -> None:
    with pytest.raises(CreditscopeError, match="is no list of pieces"):
        unpack(data)


def test_a_folder_that_another_process_writes_is_not_copied_into(tmp_path: Path) -> None:
    with record(tmp_path / "run", 1), pytest.raises(CreditscopeError, match="another process is writing"), \
            Inbox(tmp_path / "run"):
        pass
