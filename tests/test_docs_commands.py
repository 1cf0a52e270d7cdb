"""Commands of the pages that only read are run as they stand, on the files that come with the checkout."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
import shutil
from pathlib import Path

import pytest

from cli import run
from shown_text import differs
from test_docs_blocks import FENCED, ROOT, pages, shown, uncommented

READS = ("doctor", "report", "inspect", "list", "papers check", "papers carry", "env")
"""Commands that read files and print. Others train, or take minutes."""
LEFT_OUT = {"--watch": "serves until Ctrl-C", "--open": "opens a browser", "--exact": "seconds; tests/claims has it",
            "--resume": "needs a reading that was stopped", "RUN...": "stands for the reader's own runs",
            "RUN": "the same", "PATH": "the same"}
"""Words of a command that is not run here, with the reason."""
STANDS_FOR = {
    "runs/mine": "examples/run", "runs/demo/r2": "examples/run", "runs/demo/r4": "examples/run",
    "runs/demo/r8": "examples/run", "runs/a": "examples/run", "runs/b": "examples/run",
    "runs/brakes/mu4/none/seed-0": "examples/run", "runs/p1-tiny-small": "results/p1-tiny",
    "output/checkpoint-500": "tests/diagnosis/logs/trl-fall", "train.log": "tests/diagnosis/logs/trl-fall/train.log",
    "console.log": "tests/diagnosis/logs/verl-collapse/console.log",
    "verl.log": "tests/diagnosis/logs/verl-collapse/console.log",
    "outputs/.hydra/config.yaml": "tests/diagnosis/logs/verl-collapse/config.yaml",
    "outputs/completions": "examples/completions", "rollouts.jsonl": "examples/rollouts.jsonl",
    "labelled.jsonl": "examples/labelled.jsonl", "metrics.jsonl": "examples/run/steps.jsonl",
    "runs/methods/grpo": "examples/run", "runs/methods/dapo": "examples/run",
    "rollout_data": "tests/offline/dumps/verl",
    **{f"runs/{method}-{seed}": "examples/run" for method in ("grpo", "dapo") for seed in range(3)}}
"""What a reader brings -> a file of the checkout that is as good."""


WRAPPED = ("README.md", "docs/index.md", "docs/tutorial.md")
"""Pages that wrap or cut what they show: tests/site/test_shown_output.py has them."""


def documented() -> dict[str, list[str]]:
    """Command without its comment -> the pages that show it: of the pages, the helps and the examples' own texts."""
    found: dict[str, list[str]] = {}
    for page, text in (pages() | examples()).items():
        for command in shown(text):
            found.setdefault(shlex.join(shlex.split(command, comments=True)), []).append(page)
    return found


def examples() -> dict[str, str]:
    """The docstring of every example, its commands as a block."""
    texts = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in (ROOT / "examples").glob("*.py")}
    return {f"examples/{path.name}": "```\n" + "\n".join(re.findall(r"^    (.*)$", text, re.MULTILINE)) + "\n```\n"
            for path, text in texts.items()}


def reading() -> list[str]:
    commands = [command for command in documented() if command.startswith(READS)]
    return [command for command in commands if not LEFT_OUT.keys() & set(command.split()) and "|" not in command]


def place(folder: Path) -> None:
    """A folder as the pages take it: the checkout, and what a reader would have."""
    for name in ("tests", "results", "docs"):
        (folder / name).symlink_to(ROOT / name)
    for target, source in {"examples": "examples", **STANDS_FOR}.items():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, folder / target)


@pytest.mark.slow
def test_every_documented_command_that_reads_ends_well_on_files_that_ship(tmp_path_factory: pytest.TempPathFactory,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: dict[str, str] = {}
    for command in reading():
        folder = tmp_path_factory.mktemp("place")
        place(folder)
        monkeypatch.chdir(folder)
        words = shlex.split(command)
        for out in (words[i + 1] for i, word in enumerate(words[:-1]) if word == "--out"):
            shutil.rmtree(out, ignore_errors=True)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            code = run(*words)
        if code != 0 and not (code == 1 and "--strict" in words):
            wrong[command] = said.getvalue()
        shutil.rmtree(folder)
    assert not wrong, wrong


def printed() -> dict[str, str]:
    """Command -> what a page shows below it, of the commands on shipped files whose block has nothing else."""
    blocks = [block.partition("\n") for page, text in pages().items() if page not in WRAPPED
              for _, block in FENCED.findall(text)]
    found = {shlex.join(shlex.split(line, comments=True)[2:]): rest for line, _, rest in blocks
             if line.startswith("$ creditscope ") and rest.strip()}
    return {command: rest for command, rest in found.items() if "examples/" in command and command in reading()}


@pytest.mark.slow
def test_what_a_page_shows_below_a_command_is_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                      capsys: pytest.CaptureFixture[str]) -> None:
    place(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert printed()
    for command, told in printed().items():
        shutil.rmtree("runs/mine")
        assert run(*shlex.split(command)) == 0
        assert differs(capsys.readouterr().out, told) == "", command


def test_the_commands_that_are_run_are_many_and_name_files_of_the_checkout() -> None:
    found = reading()
    assert len(found) > 30
    assert sum("examples/" in command for command in found) >= 5
    missing = {word for command in found for word in shlex.split(command) if word.startswith(("examples/", "results/"))
               and not list(ROOT.glob(word))}
    assert not missing


def test_what_stands_behind_a_command_of_an_example_is_a_comment_too() -> None:
    assert {page: wrong for page, text in examples().items() if (wrong := uncommented(text))} == {}
    assert any("creditscope" in text for text in examples().values())
