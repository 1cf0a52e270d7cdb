"""Every Python block of the pages runs, every `creditscope` command on them is one that the real parser takes, every
example has a test, and the version stands in one place."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from creditscope import METHODS, CreditscopeError, __version__
from creditscope.cli import main as cli
from creditscope.cli.commands import COMMANDS, GROUPS, find, help_for
from creditscope.cli.compare import Compare
from creditscope.cli.old_names import RENAMED
from creditscope.optimizer.probe import Probe
from each import each
from makers import make
from records import write_record
from small_models import batch, build, objective

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"),
                *(ROOT / "recipes").glob("*.md"), *(ROOT / "results").glob("*.md"),
                *(ROOT / "benchmarks").glob("*.md")])


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# -- commands --------------------------------------------------------------------------------------------------------

FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


PROGRAMS = "creditscope|python3?|pip|make|torchrun|accelerate|git"


def lines(text: str) -> Iterator[str]:
    """The lines of fenced blocks that a reader pastes into a shell."""
    for language, block in FENCED.findall(text):
        for line in re.sub(r"\\\n\s*", "", block).splitlines() if language != "python" else ():
            if re.match(rf"(?:\$ )?(?:\w+=\S+ )*(?:\S+/)?(?:{PROGRAMS}) (?!\d)", line.strip()):
                yield line.strip().removeprefix("$ ")


def shown(text: str) -> Iterator[str]:
    """What stands after `creditscope` in such a line, whatever starts it."""
    for line in lines(text):
        if found := re.match(r"(?:.* -m )?(?:\w+=\S+ )*(?:\S+/)?creditscope (?!\d)(.*)", line):
            yield found[1]


def uncommented(text: str) -> list[str]:
    """Lines with words after a wide gap that are not behind a #: pasted, they would be arguments."""
    return [line for line in lines(text) if re.search(r"\S\s{2,}(?!#)\S", line.partition(" #")[0])]


def refused(verb: Compare, value: str) -> bool:
    try:
        verb.config(value)
    except CreditscopeError:
        return True
    return False


def loose_words(verb: Any) -> list[str]:
    """Words that a positional which takes any number of them has swallowed, and that name neither a run nor a row."""
    if isinstance(verb, Compare):
        return [value for value in verb.values if refused(verb, value)]
    paths = getattr(verb, "runs", ())
    return [str(path) for path in paths if not re.search(r"[/.*]", str(path)) and not (ROOT / path).exists()]


def mentioned(text: str) -> list[str]:
    """What stands after `creditscope` between single backticks: a command, or the name of one."""
    return re.findall(r"(?<!`)`creditscope ([^`\n]+)`", FENCED.sub("", text))


def parse(command: str) -> Any:
    """As `creditscope` does it, up to a pipe or a comment, without running the verb."""
    given = shlex.split(command, comments=True)
    ends = [given.index(sign) for sign in ("|", "&&", ";", ">", "&") if sign in given]
    return cli.parse(given[:min(ends, default=len(given))])


def pages() -> dict[str, str]:
    """The pages, and the --help of every group and command with its examples as a block."""
    helps = {f"creditscope {command.name} --help": command.load().__doc__ for command in COMMANDS.values()}
    helps |= {f"creditscope {group} --help": help_for([group, "--help"][not group:]) for group in ("", *GROUPS)}
    return {page_name(page): page.read_text() for page in PAGES} | {
        name: f"```\n{text}\n```\n" for name, text in helps.items()}


def test_a_command_in_a_block_is_one_that_the_parser_takes() -> None:
    wrong: dict[str, Any] = {}
    for page, text in pages().items():
        for command in shown(text):
            try:
                verb = parse(command)
                assert not loose_words(verb), loose_words(verb)
            except (SystemExit, CreditscopeError, AssertionError) as error:
                wrong[f"{page}: creditscope {command}"] = error
    assert not wrong, wrong


def test_what_stands_behind_a_command_is_a_comment_to_the_shell_too() -> None:
    wrong = {page: found for page, text in pages().items() if (found := uncommented(text))}
    assert not wrong, wrong


@each("page", PAGES)
def test_a_command_in_the_text_names_a_verb_and_flags_that_exist(page: Path,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    for command in mentioned(page.read_text()):
        words = command.split()
        if words == ["--version"] or help_for(words) is not None:
            continue
        verb, rest = find(words)
        flags = re.findall(r"--[a-z][\w-]*", " ".join(rest))
        if flags:
            with pytest.raises(SystemExit):
                parse(f"{verb.name} --help")
            help_text = capsys.readouterr().out
            missing = [flag for flag in flags if not re.search(rf"{flag}\b", help_text)]
            assert not missing, f"{page_name(page)}: creditscope {verb.name} has no {missing}"


def test_no_page_shows_a_command_by_its_old_name() -> None:
    history = (ROOT / "CHANGELOG.md").read_text()
    texts = pages() | {page_name(path): path.read_text() for folder in ("src", "examples", "benchmarks", "recipes")
                       for path in (ROOT / folder).rglob("*.py")} | {"SECURITY.md": (ROOT / "SECURITY.md").read_text()}
    old = re.compile(rf"\bcreditscope ({'|'.join({words[0] for words, _ in RENAMED} - {'report'})})\b(?![.:/]\w)")
    assert old.search(history)  # what was released is told in the words of its time
    assert not {name: found for name, text in texts.items() if (found := old.findall(text))}


def test_the_pages_have_commands_and_a_wrong_one_is_seen() -> None:
    assert sum(len(list(shown(page.read_text()))) for page in PAGES) > 90
    text = "```\n$ creditscope trian --steps 2\n```\nSee `creditscope papers check --strikt`.\n"
    assert (list(shown(text)), mentioned(text)) == (["trian --steps 2"], ["papers check --strikt"])
    for wrong in ("trian --steps 2", "lab train --step 2", "lab train --steps two", "lab train --group 1"):
        with pytest.raises((SystemExit, CreditscopeError)):
            parse(wrong)


def test_words_that_a_list_of_runs_would_swallow_are_seen() -> None:
    text = ("```\ncreditscope papers check --exact    what needs no run\n"
            "creditscope report runs/a \\\n  runs/b  # two\n```\n")
    assert uncommented(text) == ["creditscope papers check --exact    what needs no run"]
    assert list(shown(text))[1] == "report runs/a runs/b  # two"
    assert list(shown("```\ntorchrun -m creditscope lab train --steps 2\n```\n")) == ["lab train --steps 2"]
    for command, loose in {"papers check --exact what needs no run": ["what", "needs", "no", "run"],
                           "lab compare credit outcome salt,rank=2 table": ["table"],
                           "lab compare brake none recall": [],
                           "report runs/a results/p1-*": []}.items():
        assert loose_words(parse(command)) == loose


# -- Python ----------------------------------------------------------------------------------------------------------


class Loss:
    """A loss whose forward runs when its backward is asked for: pages show only the line inside the block."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def backward(self) -> None:
        objective(self._model, *batch()).backward()


def looked_at(folder: Path) -> dict[str, Any]:
    model = build("llama")
    return {"model": model, "loss": Loss(model), "objective": lambda: objective(model, *batch())}


def recorded(folder: Path) -> dict[str, Any]:
    """Runs where the pages have theirs."""
    for name in ("runs/demo/r8", "runs/mine"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_record(folder / name, [{"reward/mean": 0.5}] * 3, {"seed": 0},
                     groups={step: {"w": np.ones((2, 3))} for step in range(3)},
                     readings={step: {"path_update": np.eye(256, dtype=np.float32)[step]} for step in range(3)})
    return {}


def shipped(folder: Path) -> dict[str, Any]:
    """The run that comes with the checkout, where the pages have theirs."""
    shutil.copytree(ROOT / "examples" / "run", folder / "runs" / "mine")
    return {}


def optimised(folder: Path) -> dict[str, Any]:
    rollouts = make([1, 0, 1], [0, 0, 0], [2, 3, 2])
    theta = torch.nn.Parameter(rollouts.logp.clone())
    model = torch.nn.ParameterDict({"theta": theta})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "method": METHODS["grpo"], "rollouts": rollouts, "forward": lambda: theta * 1.0,
            "optimizer": optimizer, "logp": theta * 1.0, "probe": Probe(optimizer, model.named_parameters())}


def trained(folder: Path) -> dict[str, Any]:
    trl = pytest.importorskip("trl")
    from creditscope.plugins.trl import ScopeCallback, ScopedGRPOTrainer
    from plugins.trl_makers import trainer

    return {"trainer": trainer(), "ScopeCallback": ScopeCallback, "GRPOTrainer": lambda _: trainer(max_steps=1),
            "GRPOConfig": trl.GRPOConfig,
            "scoped": lambda **settings: trainer(ScopedGRPOTrainer, extra=settings)}


def plain(folder: Path) -> dict[str, Any]:
    return {"rollouts": make([1, 0, 1], [0, 0, 0], [2, 3, 2]), "Path": Path, "args": Arguments(folder)}


def own(folder: Path) -> dict[str, Any]:
    return {"my_loss": lambda logp: logp.sum(), "logp": torch.zeros(2, 3)}


class Arguments:
    """Of a trainer, as far as the page reads them."""

    def __init__(self, folder: Path) -> None:
        self.output_dir = str(folder)

    def to_json_string(self) -> str:
        return "{}"


Setup = Callable[[Path], dict[str, Any]]
BLOCKS: dict[tuple[str, int], tuple[Setup, dict[str, str]]] = {
    ("README.md", 0): (trained, {}),
    ("README.md", 1): (plain, {}),
    ("README.md", 2): (looked_at, {}),
    ("README.md", 3): (plain, {}),
    ("CONTRIBUTING.md", 0): (plain, {}),
    ("CONTRIBUTING.md", 1): (plain, {}),
    ("docs/doctor.md", 0): (plain, {}),
    ("docs/howto/alarm.md", 0): (trained, {}),
    ("docs/howto/own_loop.md", 0): (plain, {}),
    ("docs/howto/own_loop.md", 1): (own, {}),
    ("docs/howto/own_loop.md", 2): (looked_at, {}),
    ("docs/howto/trl.md", 0): (plain, {}),
    ("docs/howto/trl.md", 1): (trained, {}),
    ("docs/lab.md", 0): (plain, {}),
    ("docs/lab.md", 1): (plain, {}),
    ("docs/lab.md", 2): (recorded, {}),
    ("docs/microscope.md", 0): (looked_at, {"loss = ...": "loss = objective()"}),
    ("docs/microscope.md", 1): (recorded, {}),
    ("docs/optimizer.md", 0): (optimised, {}),
    ("docs/optimizer.md", 1): (optimised, {}),
    ("docs/prefix_bias.md", 0): (plain, {}),
    ("docs/record.md", 0): (plain, {}),
    ("docs/record.md", 1): (shipped, {}),
    ("docs/trl.md", 0): (trained, {}),
    ("docs/tutorial.md", 0): (trained, {}),
    ("docs/trl.md", 1): (trained, {"model=..., args=GRPOConfig(...), reward_funcs=..., train_dataset=...,": "",
                                   "ScopedGRPOTrainer(": "scoped("}),
}
"""(page, number) -> what the page takes as given, and what a reader fills in."""
ELSEWHERE = {("docs/scale.md", 0), ("docs/scale.md", 1),  # two ranks: tests/distributed runs both
             ("docs/doctor.head.md", 0),  # the same block as in docs/doctor.md, which is written from it
             ("docs/record.head.md", 0), ("docs/record.head.md", 1)}  # the same for docs/record.md


def blocks() -> dict[tuple[str, int], str]:
    return {(page_name(page), number): block for page in PAGES for number, block in enumerate(
        block for language, block in FENCED.findall(page.read_text()) if language == "python")}


def test_every_python_block_is_run_by_this_file_or_named_as_run_elsewhere() -> None:
    assert blocks().keys() == BLOCKS.keys() | ELSEWHERE


@pytest.mark.parametrize("where", BLOCKS, ids=str)
def test_a_python_block_runs_as_it_stands(where: tuple[str, int], tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    setup, filled = BLOCKS[where]
    names = setup(tmp_path)
    monkeypatch.chdir(tmp_path)
    code = blocks()[where]
    for blank, value in filled.items():
        assert blank in code
        code = code.replace(blank, value)
    exec(compile(code, f"{where[0]} block {where[1]}", "exec"), names)
    if where == ("docs/trl.md", 0):
        assert (tmp_path / "runs" / "mine" / "steps.jsonl").exists()


# -- examples --------------------------------------------------------------------------------------------------------


def test_every_example_is_loaded_by_a_test() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    for example in (ROOT / "examples").glob("*.py"):
        assert f'"examples" / "{example.name}"' in tests, f"no test runs examples/{example.name}"


# -- the version -------------------------------------------------------------------------------------------------------


def test_the_version_stands_in_one_place_and_everything_else_reads_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/creditscope/__init__.py"
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__
    literal = re.compile(rf"[\"']{re.escape(__version__)}[\"']")
    found = [path for path in (ROOT / "src").rglob("*.py") if literal.search(path.read_text())]
    assert found == [ROOT / "src" / "creditscope" / "__init__.py"]
    try:
        assert importlib.metadata.version("creditscope") == __version__, "install again: the metadata are of old"
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("creditscope is not installed here")
