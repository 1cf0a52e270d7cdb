"""The table of commands, its help, and the names of 0.1: each still does what its new words do, and says them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli import loaded, run
from creditscope.cli.commands import COMMANDS, GROUPS, SECTIONS
from creditscope.cli.old_names import GONE, RENAMED, renamed
from each import each
from records import write_record

HELPS = [("--help",), *((group, "--help") for group in GROUPS)]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run and a file of rollouts."""
    write_record(tmp_path / "run", [{"objective/value": float(n), "reward/mean": 0.5 * n} for n in range(5)],
                 {"method": "dr_grpo"})
    row = {"tokens": [1, 2], "logp": [-0.5, -0.25], "reward": 1.0, "group": 0}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"reward": reward}) + "\n" for reward in (1.0, 0.0)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@each("words", HELPS)
def test_a_group_s_help_has_every_command_with_its_job_and_examples(words: tuple[str, ...],
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: creditscope ")
    for section in SECTIONS if words == ("--help",) else (GROUPS[words[0]],):
        assert f"{section.title}:\n" in out
        for command in section.commands:
            assert f"  {command.name} {command.takes}".rstrip() in out
            assert command.job in out
    assert "For example:\n  creditscope " in out
    assert max(map(len, out.splitlines())) <= 80


@each("words", [(), ("list",), ("lab",), ("papers",)])
def test_a_group_without_a_command_shows_its_help_and_is_exit_code_2(words: tuple[str, ...],
                                                                     capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    assert f"usage: creditscope {' '.join((*words, 'COMMAND'))} ..." in capsys.readouterr().out


@each(("words", "message"), [
    (("docter",), "unknown command 'docter'; did you mean 'doctor'? Choices: doctor, env, inspect, lab, list, papers"),
    (("lab", "trian"), "unknown command of creditscope lab 'trian'; did you mean 'train'? Choices: compare, demo"),
    (("--json", "doctor"), "--json: a command comes first, such as creditscope doctor PATH"),
])
def test_words_that_name_no_command_are_answered_with_the_nearest(words: tuple[str, ...], message: str,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@each("words", [*HELPS, *((*words, "--help") for words in COMMANDS)])
def test_no_help_loads_torch(words: tuple[str, ...]) -> None:
    assert "torch" not in loaded("from creditscope.cli.main import main; main(sys.argv[1:])", *words)


# -- the names of 0.1 --------------------------------------------------------------------------------------------------


def test_every_old_name_leads_to_a_command_and_is_not_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    listed = {line.split("  ")[1].split(" ")[0] for line in capsys.readouterr().out.splitlines()
              if line.startswith("  ") and not line.startswith("  creditscope")}
    assert listed == {words[0] for words in COMMANDS}
    for old, new in RENAMED:
        assert any(new[:length] in COMMANDS for length in (1, 2)), new
        assert old[0] == "report" or old[0] not in listed


@each(("old", "new"), [
    ("methods dapo", "list methods dapo"),
    ("methods --dialects --json", "list methods --dialects --json"),
    ("credit gae", "list credits gae"),
    ("optimizer --brakes", "list brakes"),
    ("optimizer --carry --betas 0.9 0.95", "papers carry --betas 0.9 0.95"),
    ("optimizer run", "inspect run --why"),
    ("optimizer run run --json", "inspect run run --json"),
    ("scope rows.jsonl --method dapo", "inspect rows.jsonl --method dapo"),
    ("prefix rows.jsonl --method grpo", "inspect rows.jsonl --prefix --method grpo"),
    ("check run", "papers check run"),
    ("check --claim P9.9", "papers check --claim P9.9"),
    ("train --group 1", "lab train --group 1"),
    ("compare credit --no-run --out none", "lab compare credit --no-run --out none"),
    ("warmup --help", "lab warmup --help"),
    ("demo --help", "lab demo --help"),
    ("reproduce --help", "papers reproduce --help"),
    ("localise --help", "papers localise --help"),
    ("report run --claims --out run/report.html --port 3", "report run --papers --out run/report.html --port 3"),
])
@pytest.mark.usefixtures("there")
def test_an_old_name_does_what_the_new_one_does_and_adds_one_line(old: str, new: str,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    codes, said = [], []
    for words in (old, new):
        codes.append(run(*words.split()))
        said.append(capsys.readouterr())
    assert codes[0] == codes[1]
    assert said[0].out == said[1].out
    hint, _, rest = said[0].err.partition("\n")
    assert hint.startswith(f"creditscope: '{old.split()[0]}")
    assert hint.endswith(f"; the old name will be removed in {GONE}")
    assert rest == said[1].err


def test_the_hint_names_the_words_that_replace_the_old_ones() -> None:
    assert renamed(["train", "tiny"]) == (["lab", "train", "tiny"],
                                          "'train' is now 'lab train'; the old name will be removed in 0.3")
    assert renamed(["lab", "train", "--credit", "credit"]) == (["lab", "train", "--credit", "credit"], "")
    assert renamed([]) == ([], "")
