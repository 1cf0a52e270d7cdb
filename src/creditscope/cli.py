"""The command line: verb -> module. Bad input ends with one sentence and exit code 2, never with a traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from creditscope import __version__
from creditscope.errors import CreditscopeError, printable
from creditscope.verbs.compare import Compare
from creditscope.verbs.credit import Credit
from creditscope.verbs.demo import Demo
from creditscope.verbs.env import Env
from creditscope.verbs.localise import Localise
from creditscope.verbs.methods import Methods
from creditscope.verbs.scope import Scope
from creditscope.verbs.train import Train

DESCRIPTION = "See where the credit goes when a language model is trained by reinforcement."

Verb = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Scope, tyro.conf.subcommand("scope")]
    | Annotated[Methods, tyro.conf.subcommand("methods")]
    | Annotated[Credit, tyro.conf.subcommand("credit")]
    | Annotated[Localise, tyro.conf.subcommand("localise")]
    | Annotated[Env, tyro.conf.subcommand("env")]
)


def main(args: Sequence[str] | None = None) -> None:
    """Parse, run, and turn what users can cause into an exit code."""
    args = list(sys.argv[1:] if args is None else args)
    if args == ["--version"]:
        print(f"creditscope {__version__}")
        sys.exit(0)
    try:
        verb = tyro.cli(Verb, prog="creditscope", args=args, description=DESCRIPTION)
        if isinstance(verb, Train) and verb.resume:
            # Flags that are not given keep the run's own values: they become the defaults of a second reading.
            verb = tyro.cli(Train, prog="creditscope train", args=args[1:], default=verb.as_recorded())
        code = verb.run()
        sys.stdout.flush()
    except CreditscopeError as error:
        print(f"creditscope: {printable(str(error))}", file=sys.stderr)
        code = 2
    except BrokenPipeError:
        # The reader left, as in `creditscope methods | head`: not our error, and nothing more to say.
        sys.stderr.close()
        code = 0
    except KeyboardInterrupt:
        print("creditscope: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)
