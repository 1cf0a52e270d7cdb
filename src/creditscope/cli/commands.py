"""The table of commands: words, the job of each, its class; and the help of the groups. Nothing loads torch."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from creditscope import __version__
from creditscope.errors import CreditscopeError, unknown

ABOUT = "Why a GRPO-style run does not learn: cause, evidence, change."


@dataclass(frozen=True)
class Command:
    """One command. Its class is loaded when it is asked for, so that every --help answers at once."""

    words: tuple[str, ...]
    takes: str
    """Its positional arguments."""
    job: str
    home: str
    """module:Class in creditscope.cli."""

    @property
    def name(self) -> str:
        return " ".join(self.words)

    def load(self) -> Any:
        module, _, name = self.home.partition(":")
        return getattr(importlib.import_module(f"creditscope.cli.{module}"), name)


@dataclass(frozen=True)
class CommandGroup:
    """Commands of one kind of work. `group` is their first word, and "" for those without one."""

    group: str
    title: str
    commands: tuple[Command, ...]
    examples: tuple[str, ...]


def _section(group: str, title: str, rows: Mapping[str, tuple[str, str, str]], examples: Sequence[str]) -> CommandGroup:
    words = {name: (group, name) if group else (name,) for name in rows}
    return CommandGroup(group, title, tuple(Command(words[name], *row) for name, row in rows.items()), tuple(examples))


SECTIONS = (
    _section("", "A run that you have", {
        "doctor": ("PATH", "its first fault, the evidence, the setting to change", "doctor:Doctor"),
        "report": ("RUN ...", "one html page of a run, or of several side by side", "report:Report"),
        "inspect": ("PATH ...", "rollouts or runs in numbers: signal, w, optimiser", "inspect:Inspect"),
    }, ("creditscope doctor output/checkpoint-500      # TRL's trainer_state.json",
        "creditscope doctor verl.log                   # what verl printed",
        "creditscope report runs/mine --open           # a record, as of ScopeCallback",
        "creditscope inspect rollouts.jsonl            # answers and rewards")),
    _section("list", "What can be chosen", {
        "methods": ("[NAME]", "GRPO, DAPO, ...: equation, differences, properties", "methods:Methods"),
        "credits": ("[NAME]", "estimators of the credit of each token", "credits:Credits"),
        "brakes": ("[NAME]", "what holds tokens at their bound", "brakes:Brakes"),
    }, ("creditscope list methods dapo                 # one row in full",
        "creditscope list methods --dialects           # the rows of TRL and verl",
        "creditscope list credits monte_carlo",
        "creditscope list brakes --json                # for a program")),
    _section("lab", "Experiments on this machine", {
        "demo": ("", "three short runs, R = 2, 4 and 8, and their page", "demo:Demo"),
        "train": ("[MODEL]", "train a model and record every step", "train:Train"),
        "warmup": ("MODEL", "supervised training first, so that rewards differ", "warmup:Warmup"),
        "pairs": ("[MODEL]", "sample preference pairs: best and worst of each group", "pairs:Pairs"),
        "reward": ("PAIRS", "train a reward model on preference pairs", "reward:Reward"),
        "compare": ("SETTING ...", "values of a setting at equal rollouts, over seeds", "compare:Compare"),
    }, ("creditscope lab demo                          # the packaged model",
        "creditscope lab train --method dapo --group 16 --steps 100",
        "creditscope lab compare credit outcome gae --seeds 3")),
    _section("papers", "The claims of two papers", {
        "check": ("[RUN ...]", "verdicts on the claims, from runs or closed forms", "check:Check"),
        "reproduce": ("PAPER", "the runs that a paper needs, then the verdicts", "reproduce:Reproduce"),
        "localise": ("[MODEL]", "how well credit marks the wrong step of a solution", "localise:Localise"),
        "carry": ("", "steps that Adam makes after the gradient is 0", "carry:Carry"),
    }, ("creditscope papers check --exact              # closed forms and enumeration",
        "creditscope papers check runs/mine            # what a run says of the claims",
        "creditscope papers reproduce p1")),
    _section("", "This installation", {
        "selftest": ("", "the numbers by two routes each, in about a minute", "selftest:Selftest"),
        "env": ("", "versions and devices, for a bug report", "env:Env"),
    }, ()),
)

COMMANDS: Mapping[tuple[str, ...], Command] = MappingProxyType(
    {command.words: command for section in SECTIONS for command in section.commands})
GROUPS: Mapping[str, CommandGroup] = MappingProxyType({section.group: section for section in SECTIONS if section.group})


def find(args: Sequence[str]) -> tuple[Command, list[str]]:
    """The command that the first words name, and the words after it."""
    for length in (1, 2):
        if found := COMMANDS.get(tuple(args[:length])):
            return found, list(args[length:])
    if args[0] in GROUPS:
        names = [command.words[1] for command in GROUPS[args[0]].commands]
        raise unknown(f"command of creditscope {args[0]}", args[1], names, see=f"creditscope {args[0]} --help")
    if args[0].startswith("-"):
        raise CreditscopeError(f"{args[0]}: a command comes first, such as creditscope doctor PATH; see: creditscope "
                               f"--help")
    raise unknown("command", args[0], {words[0] for words in COMMANDS}, see="creditscope --help")


def help_for(args: Sequence[str]) -> str | None:
    """The text for `creditscope`, `creditscope GROUP` and their --help; None where the words name a command."""
    if not args or args[0] in ("-h", "--help"):
        return _page("COMMAND", f"creditscope {__version__}. {ABOUT}", SECTIONS, SECTIONS[0].examples)
    if args[0] in GROUPS and (len(args) == 1 or args[1] in ("-h", "--help")):
        section = GROUPS[args[0]]
        return _page(f"{section.group} COMMAND", "", (section,), section.examples)
    return None


def described(doc: str, width: int = 79) -> str:
    """A docstring for --help: paragraphs wrapped, commands as they stand. tyro joins lines that begin with a letter, so
    the further lines of a paragraph are indented.

    >>> print(described("One two three.\\n\\nFor example:\\n  creditscope env --json", width=9))
    One two
      three.
    <BLANKLINE>
    For example:
      creditscope env --json
    """
    return "\n\n".join(part if "\n  " in part else textwrap.fill(
        " ".join(part.split()), width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for part in inspect.cleandoc(doc).split("\n\n"))


def _page(usage: str, about: str, sections: Sequence[CommandGroup], examples: Sequence[str]) -> str:
    width = 2 + max(len(f"{command.name} {command.takes}") for section in sections for command in section.commands)
    lines = [f"usage: creditscope {usage} ...", ""] + [about, ""] * bool(about)
    for section in sections:
        lines.append(f"{section.title}:")
        lines += [f"  {f'{command.name} {command.takes}':<{width}}{command.job}" for command in section.commands]
        lines.append("")
    lines += ["For example:", *(f"  {line}" for line in examples), "",
              f"The flags of a command, and examples: creditscope {usage} --help"]
    return "\n".join(lines)
