"""The command line: words -> command -> exit code. Bad input ends with one sentence and exit code 2, never with a
traceback."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from creditscope import __version__
from creditscope.cli.commands import described, find, help_for
from creditscope.cli.old_names import renamed
from creditscope.errors import CreditscopeError, install_hint, printable
from creditscope.files.memory import is_short, sentence
from creditscope.files.streams import ReaderLeft


def main(args: Sequence[str] | None = None) -> None:
    """Parse, run, and turn errors that users can cause into an exit code."""
    args = list(sys.argv[1:] if args is None else args)
    try:
        with install_hint("this command"):
            code = run(args)
        sys.stdout.flush()
    except CreditscopeError as error:
        complain(str(error))
        code = 2
    except (ReaderLeft, BrokenPipeError):
        code = 128 + signal.SIGPIPE if "--strict" in args else 0  # 0 would be a verdict
    except KeyboardInterrupt as stop:
        complain(str(stop) or "interrupted")  # a command may say what is left
        code = 130
    except (RuntimeError, MemoryError) as error:
        if not is_short(error):
            raise
        complain(sentence(error))
        code = 2
    sys.exit(code)


def run(args: Sequence[str]) -> Any:
    """The exit code of a command line."""
    if list(args) == ["--version"]:
        print(f"creditscope {__version__}")
        return 0
    args, hint = renamed(list(args))
    if hint:
        complain(hint)
    if (text := help_for(args)) is not None:
        print(text)
        return 0 if args[-1:] in (["-h"], ["--help"]) else 2  # without a command nothing was done
    try:
        verb = first_look(args)
        if getattr(verb, "resume", False) and hasattr(verb, "as_recorded"):
            # Flags that are not given keep the run's own values: the words are parsed again with these as defaults.
            verb = parse(args, verb.as_recorded(args))
    except SystemExit as end:  # --help, or a flag that does not exist
        return end.code
    return verb.run()


def first_look(args: Sequence[str]) -> Any:
    """The command with its flags. Those beside --resume may fit the run's own settings and not the defaults: where they
    do not, the command with the run's place alone."""
    try:
        return parse(args)
    except CreditscopeError:
        command, words = find(args)
        place = [word for at, word in enumerate(words) if word.split("=")[0] == "--out"
                 or (at and words[at - 1] == "--out")]
        if "--resume" not in words or not place or not hasattr(command.load(), "as_recorded"):
            raise
        return parse([*command.name.split(), *place, "--resume"])


def parse(args: Sequence[str], default: Any = None) -> Any:
    """The command with its flags; `default` has the values of those that are not given."""
    import tyro

    command, words = find(args)
    kind, given = command.load(), {} if default is None else {"default": default}
    return tyro.cli(kind, prog=f"creditscope {command.name}", args=words, description=described(kind.__doc__), **given)


def complain(text: str) -> None:
    """One message on the error stream, wrapped on a terminal."""
    line = f"creditscope: {printable(text)}"
    print(wrapped(line, min(80, shutil.get_terminal_size().columns)) if sys.stderr.isatty() else line, file=sys.stderr)


def wrapped(text: str, width: int) -> str:
    """Lines broken between words; a longer word stays whole. What follows a term and two spaces stays below itself.

    >>> print(wrapped("expected one of\\n  a table   .csv or .tsv with columns", 24))
    expected one of
      a table   .csv or .tsv
                with columns
    """
    def fill(line: str) -> str:
        term = re.match(r" +\S.*? {2,}", line)
        return textwrap.fill(line, width, subsequent_indent=" " * (len(term[0]) if term else 0),
                             break_long_words=False, break_on_hyphens=False)

    return "\n".join(map(fill, text.splitlines()))
