"""The first screen: the diagnosis, four topics in numbers, then what was run, in html that needs no script."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from creditscope.diagnosis.trainers import is_script
from creditscope.files.markup import Html, join, tag
from creditscope.methods.find import row_of
from creditscope.report.answers import Answer, answers
from creditscope.report.diagnosed import block, sign
from creditscope.report.lifetime import how_far
from creditscope.report.methods import changes
from creditscope.report.run import Run
from creditscope.runs.config import flags


def first_screen(run: Run) -> Html:
    """Made after the sections: it lists what they could not read."""
    return join(
        tag("h1", run.name), _error(run.ended_by), block(run.diagnosis),
        tag("ul", *map(_answer, answers(run)), class_="answers", aria_label="Four topics in numbers"),
        tag("dl", *(_fact(name, value) for name, value in facts(run).items() if value), class_="facts"),
        _row(run.config), _command(run.config), _faults(run.faults))


def _error(why: str) -> Html | None:
    return tag("p", f"The run ended early with an error: {why}", class_="missing", id="stopped") if why else None


def _answer(answer: Answer) -> Html:
    name = f"answer-{answer.topic.lower()}"
    return tag("li", tag("div", tag("h2", answer.topic, id=name), tag("p", *sign(answer.state), class_="state")),
               tag("div", tag("p", answer.sentence, class_="sentence"),
                   tag("details", tag("summary", "Findings"), tag("p", answer.rule), class_="rule"),
                   tag("p", tag("a", "Evidence", href=f"#{answer.evidence}", aria_label=f"Evidence for {answer.topic}"),
                       class_="evidence")),
               class_=f"answer {answer.state}", data_topic=answer.topic.lower(), data_state=answer.state,
               aria_labelledby=name)


def facts(run: Run) -> dict[str, str]:
    """What was run, by name; empty where the record does not say."""
    config, versions = run.config, run.versions
    packages = versions.get("packages")
    packages = packages if isinstance(packages, dict) else {}
    built = {"creditscope": versions.get("creditscope"), "torch": packages.get("torch"),
             "transformers": packages.get("transformers"), "Python": versions.get("python")}
    return {
        "Run": how_far(run, time.time()),
        "Model": _text(config.get("model")), "Task": _text(config.get("task")),
        "Method": _text(config.get("method")), "Credit": _text(config.get("credit") or "outcome"),
        "Batch": ", ".join(f"{letter} = {config[key]}" for letter, key in LETTERS.items() if key in config),
        "Optimiser": _optimiser(config),
        "Seed": _text(config.get("seed")),
        "Versions": ", ".join(f"{name} {version}" for name, version in built.items() if version),
        "Device": _device(versions, config),
    }


LETTERS = {"R": "group", "P": "prompts", "μ": "inner_steps"}
"""Letter -> setting: rollouts per prompt, prompts per step, passes over a batch."""


def _optimiser(config: Mapping[str, Any]) -> str:
    """Name and learning rate; TRL keeps the name under `optim`."""
    theirs = config.get("trl")
    name = config.get("optimizer") or (theirs.get("optim") if isinstance(theirs, Mapping) else None)
    rate = config.get("lr")
    return ", ".join(part for part in (_text(name), "" if rate is None else f"learning rate {_text(rate)}") if part)


def _device(versions: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    devices = versions.get("devices")
    found = ", ".join(map(_text, devices)) if isinstance(devices, list) and devices else _text(versions.get("platform"))
    return ", ".join(part for part in (found, _text(config.get("dtype"))) if part)


def _text(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _fact(name: str, value: str) -> Html:
    return tag("div", tag("dt", name), tag("dd", value), data_fact=name.lower())


def _row(config: Mapping[str, Any]) -> Html:
    row = row_of(config)
    if row is None:
        return tag("p", f"This version of creditscope has no method {_text(config.get('method'))!r}: how it differs "
                        "from GRPO is not known.", class_="missing", id="row")
    axes = ", ".join(axis.replace("_", " ") for axis, _, _ in changes(row))
    if not axes:
        return tag("p", "The method is GRPO's row of the table, nothing changed.", class_="soft", id="row")
    return tag("p", tag("a", row.title, href="#methods"), f" differs from GRPO in {axes}.", class_="soft", id="row")


def _command(config: Mapping[str, Any]) -> Html:
    """The command to paste; one of the record only if a shell would run creditscope and nothing else."""
    if is_script(config):
        return tag("p", f"Run by your own script with TRL's {config['trainer']}; its settings are in run.json.",
                   class_="soft", id="command")
    told = config.get("command")
    command = told if isinstance(told, str) and _is_ours(told) else shlex.join(
        ["creditscope", "lab", "train", *flags(config)])
    return tag("pre", tag("code", command, id="command"), tabindex="0", role="region",
               aria_label="The command of this run")


def _is_ours(command: str) -> bool:
    """Whether a shell would run creditscope with these words and nothing else.

    >>> _is_ours("creditscope inspect 'a b.jsonl' --rows 64"), _is_ours("creditscope inspect a; rm -rf b")
    (True, False)
    """
    try:
        words = shlex.split(command)
    except ValueError:
        return False
    return words[:1] == ["creditscope"] and shlex.join(words) == command


def _faults(faults: Sequence[str]) -> Html | None:
    return tag("div", tag("p", "Damaged parts of the record, left out below:"),
               tag("ul", *(tag("li", fault) for fault in faults)), class_="missing", id="faults") if faults else None
