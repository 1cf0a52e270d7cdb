"""`creditscope`, and `python -m creditscope`. Loading the verbs takes a second: Ctrl-C is as polite then as later."""

import sys

from creditscope.files.streams import guard


def main() -> None:
    """The command line."""
    guard()
    try:
        from creditscope.cli import main as cli
    except KeyboardInterrupt:
        print("creditscope: interrupted", file=sys.stderr)
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
