"""Settings that a program printed into its log: a Python dict or YAML over many lines, a command line, a repr.

    {'actor_rollout_ref': {'actor': {'clip_ratio': 0.2,          pprint of verl's configuration, after Ray's prefix
    actor_rollout_ref:                                           the same as YAML
    python -m verl.trainer.main_ppo data.train_batch_size=512    overrides on a command line
    GRPOConfig(beta=0.04, num_generations=8)                     TRL's arguments, printed or in a notebook's source
    GRPO: num_generations=4, max_steps=75, beta=0.04             some of them in one line, also as --flags

Texts are split into tokens and never evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from creditscope.diagnosis.readers.text import number_of, yaml_of
from creditscope.diagnosis.trainers import FOREIGN, TRL, TRL_DPO
from creditscope.errors import CreditscopeError

MAX_PRINTED = 2**18
"""Longest text of settings inside a log, in characters; verl's whole configuration has 30,000, its layout 120,000."""
MAX_YAML = 2**16
"""The same as YAML, which takes longer to read and has no layout."""
MAX_DEPTH = 50
PREFIX = re.compile(r"^(?:\x1b\[[\d;]*m)*(?:\([\w.:\- ]{1,80}=[^)]{1,80}\))?(?:\x1b\[[\d;]*m)* ?")
"""Ray's "(TaskRunner pid=422294) " with its colours."""
ROOTS = ("actor_rollout_ref", "algorithm", "data", "trainer", "critic", "worker", "checkpointing", "grpo", "loss_fn",
         "policy", "generator", "environment")
"""First names of the configurations that verl, EasyR1, NeMo-RL and SkyRL print."""
_PATHS = frozenset(path for trainer in (*FOREIGN, TRL_DPO) for path in (*trainer.defaults, *trainer.paths.values()))
_HEADS = sorted({path.partition(".")[0] for path in _PATHS if "." in path})
_DICT = re.compile(r"\{'(?:" + "|".join(ROOTS) + r")': \{")
_YAML = re.compile(r"(?:" + "|".join(ROOTS) + r"):\s*$")
_YAML_LINE = re.compile(r"\s*(?:- )*[\w.\-@]+:(?:\s|$)|\s*- |\s*$")
_OVERRIDE = re.compile(r"(?<![\w./])(?:\+{0,2}|--)((?:" + "|".join(_HEADS) + r")(?:\.\w+)+)[= ]"
                       r"([^\s'\"\\\[\]{}]{1,80})(?=[\s'\"\\]|$)")
_CALL = re.compile(r"\bGRPOConfig\(")
_PAIR = re.compile(r"(?<![\w.])(" + "|".join(sorted({*TRL.defaults, *TRL.paths.values()}, key=len, reverse=True))
                   + r")(?: ?[=:] ?| )['\"]?([\w.+\-]{1,40})")
_TEXTS = frozenset({"optim", "dtype", *(name for name, value in TRL.defaults.items() if isinstance(value, str))})
"""Settings of TRL whose value is a word; elsewhere a word is a variable, or the place of a value in a help text."""
_COMMENT = re.compile(r"(?:^|\s)#.*")
_TOKEN = re.compile(r"""\s+|(?P<text>'(?:[^'\\]|\\.)*(?:'|\Z)|"(?:[^"\\]|\\.)*(?:"|\Z))|(?P<mark>[{}\[\](),:=])"""
                    r"""|(?P<word>[^\s{}\[\](),:='"]+)|.""", re.DOTALL)
WORDS: dict[str, Any] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def value_of(word: str) -> Any:
    """A truth value, null or number; anything else is text.

    >>> value_of("1e-6"), value_of("None"), value_of("dapo"), value_of("8")
    (1e-06, None, 'dapo', 8)
    """
    if word in WORDS:
        return WORDS[word]
    if word.isascii() and word.removeprefix("-").isdecimal() and len(word) < 16:
        return int(word)
    number = number_of(word)
    return word if number is None else number


class PrintedSettings:
    """Collects the first settings of each shape from lines given in order."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        """A whole configuration."""
        self.overrides: dict[str, Any] = {}
        """Dotted path -> value, from a command line."""
        self._lines: list[str] = []
        self._size = 0
        self._depth = 0
        self._prefix = ""
        self._shape = ""

    def see(self, line: str) -> bool:
        """Whether the line is part of a configuration, and so no row."""
        if self._shape:
            self._go_on(line)
        elif not self.found and ("': {" in line or "GRPOConfig(" in line or _starts_yaml(line)):
            self._begin(line)
        if any(f"{head}." in line for head in _HEADS):
            self.overrides |= {path: value_of(value) for path, value in _OVERRIDE.findall(line[:MAX_PRINTED])[:500]
                               if "$" not in value and path in _PATHS}
        if "num_generations" in line or "max_completion_length" in line:
            pairs = dict(_PAIR.findall(line[:MAX_PRINTED]))
            if len(pairs) > 1:
                values = {name: value_of(value) for name, value in pairs.items()}
                self.overrides |= {name: value for name, value in values.items()
                                   if not isinstance(value, str) or (name in _TEXTS and value.islower())}
        return self._shape in ("dict", "yaml")

    def end(self) -> dict[str, Any]:
        if self._shape in ("yaml", "dict"):
            self._close()
        return self.found or self.overrides

    def _begin(self, line: str) -> None:
        prefix = PREFIX.match(line)
        self._prefix = prefix[0] if prefix else ""
        text = line[len(self._prefix):]
        for shape, pattern in (("dict", _DICT), ("call", _CALL), ("yaml", _YAML)):
            start = pattern.match(text) if shape == "yaml" else pattern.search(text)
            if start:
                self._shape, self._lines, self._size, self._depth = shape, [], 0, 0
                self._add(text[start.end() - 1 if shape == "call" else start.start():])
                return

    def _go_on(self, line: str) -> None:
        if not line.startswith(self._prefix):  # another process wrote between two lines
            return
        text = line[len(self._prefix):].partition("\x1b")[0]  # another process may write into the same line
        if (self._shape == "yaml" and not _YAML_LINE.match(text)) or (self._shape == "dict" and text[:1].strip()):
            self._close()  # lines of pprint after the first are indented
        else:
            self._add(text)

    def _add(self, text: str) -> None:
        self._size += len(text)
        if self._size > (MAX_YAML if self._shape == "yaml" else MAX_PRINTED):
            self._shape = ""
            return
        if self._shape == "call":
            text = _COMMENT.sub("", text)
        self._lines.append(text if text.endswith("\n") else text + "\n")
        if self._shape != "yaml":
            marks = [found["mark"] for found in _TOKEN.finditer(text) if found["mark"]]
            self._depth += sum((mark in "{[(") - (mark in "}])") for mark in marks)
            if self._depth <= 0:
                self._close()

    def _close(self) -> None:
        text, shape, self._shape = "".join(self._lines), self._shape, ""
        self._lines = []
        if shape == "yaml":
            try:
                found = yaml_of(text, "the settings inside the log")
            except CreditscopeError:
                return
        else:
            found = parse(text)
        if isinstance(found, dict) and len(found) > 1:
            self.found = found


def _starts_yaml(line: str) -> bool:
    return line.rstrip().endswith(tuple(f"{root}:" for root in ROOTS))


def parse(text: str) -> Any:
    """A Python literal of dicts, lists, texts and numbers, or the arguments of a call. Other values are left out.

    >>> parse("{'a': {'b': [1, 'x' 'y']}, 'c': None, 'd': <Enum.A: 1>}")
    {'a': {'b': [1, 'xy']}, 'c': None}
    >>> parse("(beta = 0.04, loss_type='grpo', path=Path('/a'), max_steps=2 * n)")
    {'beta': 0.04, 'loss_type': 'grpo'}
    """
    tokens = ((kind, found[kind]) for found in _TOKEN.finditer(text) if (kind := found.lastgroup))
    return _value(tokens, *next(tokens, _END), depth=0)[0]


_END = ("", "")
_LEFT_OUT = object()


def _value(tokens: Iterator[tuple[str, str]], kind: str, token: str, depth: int) -> tuple[Any, str]:
    """A value, or _LEFT_OUT, and the mark after it."""
    if kind == "mark":
        if token not in "{[(":
            return _LEFT_OUT, token
        value = _holder(tokens, token, depth + 1)
        kind, token = next(tokens, _END)
    elif kind == "text":
        value = ""
        while kind == "text":  # 'a' 'b' is one text
            value += token[1:-1]
            kind, token = next(tokens, _END)
    else:
        value = value_of(token)
        value = _LEFT_OUT if isinstance(value, str) else value
        kind, token = next(tokens, _END)
    while token and not (kind == "mark" and token in ",}])=:"):  # an expression
        value = _LEFT_OUT
        if kind == "mark":
            _holder(tokens, token, depth + 1)
        kind, token = next(tokens, _END)
    return value, token


def _holder(tokens: Iterator[tuple[str, str]], opening: str, depth: int) -> Any:
    """What stands between two brackets: a dict where a value follows `:` or `=`, else a list."""
    named: dict[str, Any] = {}
    listed: list[Any] = []
    kind, token = next(tokens, _END)
    while depth <= MAX_DEPTH and token and not (kind == "mark" and token in "}])"):
        if kind == "mark" and token == ",":
            kind, token = next(tokens, _END)
            continue
        name = token if kind == "word" else ""
        key, mark = _value(tokens, kind, token, depth)
        if mark and mark in ":=":
            value, mark = _value(tokens, *next(tokens, _END), depth)
            while mark and mark in ":=":  # <Enum.A: 1>
                value, mark = _LEFT_OUT, _value(tokens, *next(tokens, _END), depth)[1]
            if value is not _LEFT_OUT:
                named[name if key is _LEFT_OUT else f"{key}"] = value
        elif key is not _LEFT_OUT:
            listed.append(key)
        if not mark or mark in "}])":
            break
        kind, token = next(tokens, _END)
    return named if named or opening == "{" else listed
