"""The exceptions for users: what was given, what is allowed and how to repair it."""

from __future__ import annotations

import difflib
import importlib.util
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

EXTRAS = {
    "torch": "torch",
    "transformers": "lab", "safetensors": "lab", "tokenizers": "lab", "huggingface_hub": "lab",
    "trl": "trl", "datasets": "trl", "pyarrow": "trl",
    "verl": "verl",
    "openrlhf": "openrlhf",
    "skyrl": "skyrl",
    "peft": "lora",
    "math_verify": "math",
    "gguf": "gguf",
    "accelerate": "log",
    "altair": "plot", "vl_convert": "plot",
    "ray": "ray",
}
"""Module -> the extra of creditscope that brings it. An extra whose modules need torch brings torch too."""


class CreditscopeError(ValueError):
    """Bad input. The command line prints it without a traceback and exits with 2."""


class MissingExtra(CreditscopeError, ImportError):
    """Something that an extra brings is not installed.

    >>> print(MissingExtra("creditscope lab train", "transformers"))
    creditscope lab train needs transformers: pip install 'creditscope[lab]'
    """

    def __init__(self, what: str, module: str, extra: str = "") -> None:
        extra = extra or EXTRAS[module]
        super().__init__(f"{what} needs {module.replace('_', '-')}: pip install 'creditscope[{extra}]'")
        self.name = module


def installed(module: str) -> bool:
    """Whether a module can be imported; it is not. A folder of the same name in the working directory is no module.

    >>> installed("json"), installed("no_such_module")
    (True, False)
    """
    if module in sys.modules:
        return sys.modules[module] is not None
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def require_module(what: str, module: str, extra: str = "") -> None:
    """Raise unless a module is installed, without importing it. Name the extra where `what` needs more than this one.

    >>> require_module("creditscope.errors", "json")
    """
    if not installed(module):
        raise MissingExtra(what, module, extra)


@contextmanager
def install_hint(what: str) -> Iterator[None]:
    """A failed import of a module that an extra brings becomes the command that installs it.

        with install_hint("--lora"):
            import peft                 # --lora needs peft: pip install 'creditscope[lora]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS or installed(module):  # installed: a part of it is missing, and the error says which
            raise
        raise MissingExtra(what, module) from None


def printable(text: str) -> str:
    r"""Text that is safe to show on a terminal: control characters are escaped.

    >>> printable("red \x1b[31m alert")
    'red \\x1b[31m alert'
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def require(value: object, kind: type, what: str, repair: str) -> None:
    """Refuse an argument of another class, with the repair.

    >>> require("grpo", int, "method", "give a number")
    Traceback (most recent call last):
    creditscope.errors.CreditscopeError: method must be int, got str; give a number
    """
    if not isinstance(value, kind):
        raise CreditscopeError(f"{what} must be {kind.__name__}, got {type(value).__name__}; {repair}")


def command_line(*words: object) -> str:
    """A command to copy, each word quoted for a shell.

    >>> print(command_line("report", "my run $(date)", "--open"))
    creditscope report 'my run $(date)' --open
    """
    return shlex.join(["creditscope", *map(str, words)])


def unknown(kind: str, given: object, choices: Iterable[str], see: str = "") -> CreditscopeError:
    """An error for a name that is not one of `choices`, with the nearest one as a guess.

    >>> print(unknown("method", "grop", ["grpo", "dapo"], see="creditscope list methods"))
    unknown method 'grop'; did you mean 'grpo'? Choices: dapo, grpo. See: creditscope list methods
    """
    names = sorted(choices)
    given = f"{given[:80]}…" if isinstance(given, str) and len(given) > 80 else given
    near = difflib.get_close_matches(str(given).lower(), names, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else "."
    tail = f" See: {see}" if see else ""
    return CreditscopeError(f"unknown {kind} {given!r}{guess} Choices: {', '.join(names)}.{tail}")
