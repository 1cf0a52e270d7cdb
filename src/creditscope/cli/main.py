"""The command line: verb -> module. Bad input ends with one sentence and exit code 2, never with a traceback."""

from __future__ import annotations

import functools
import importlib
import operator
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from creditscope import __version__
from creditscope.cli.train import Train
from creditscope.errors import CreditscopeError, install_hint, printable
from creditscope.files.memory import is_short, sentence
from creditscope.files.streams import ReaderLeft

DESCRIPTION = "See where the credit goes when a language model is trained by reinforcement."

VERBS: dict[str, type[Any]] = {
    name: getattr(importlib.import_module(f"creditscope.cli.{name}"), name.capitalize())
    for name in ("demo", "warmup", "train", "report", "doctor", "check", "reproduce", "compare", "localise", "scope",
                 "prefix", "optimizer", "methods", "credit", "selftest", "env")}
"""A verb is the class of its name in the module of its name; the order is that of --help."""


def verbs(asked: str) -> Any:
    """All verbs as one type: the one that was asked for with its whole docstring, the others with its first line."""
    listed = [Annotated[verb, tyro.conf.subcommand(
        name, description=None if name == asked else (verb.__doc__ or "").strip().splitlines()[0])]
        for name, verb in VERBS.items()]
    return functools.reduce(operator.or_, listed)


def main(args: Sequence[str] | None = None) -> None:
    """Parse, run, and turn errors that users can cause into an exit code."""
    args = list(sys.argv[1:] if args is None else args)
    try:
        with install_hint("this command"):
            code = run(args)
        sys.stdout.flush()
    except CreditscopeError as error:
        print(f"creditscope: {printable(str(error))}", file=sys.stderr)
        code = 2
    except (ReaderLeft, BrokenPipeError):
        code = 128 + signal.SIGPIPE if "--strict" in args else 0  # 0 would be a verdict
    except KeyboardInterrupt:
        print("creditscope: interrupted", file=sys.stderr)
        code = 130
    except (RuntimeError, MemoryError) as error:
        if not is_short(error):
            raise
        print(f"creditscope: {printable(sentence(error))}", file=sys.stderr)
        code = 2
    sys.exit(code)


def run(args: Sequence[str]) -> Any:
    if args == ["--version"]:
        print(f"creditscope {__version__}")
        return 0
    try:
        verb = tyro.cli(verbs(args[0] if args else ""), prog="creditscope", args=args, description=DESCRIPTION)
        if isinstance(verb, Train) and verb.resume:
            # Flags that are not given keep the run's own values: the words are parsed again with these as defaults.
            verb = tyro.cli(Train, prog="creditscope train", args=args[1:], default=verb.as_recorded())
    except SystemExit as end:  # --help, or a flag that does not exist
        return end.code
    return verb.run()
