"""docs/trainers.md: which of our metrics is which name of which trainer, and what was read of a log of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from creditscope.diagnosis.log import Log
from creditscope.diagnosis.read import read
from creditscope.diagnosis.remedies import REMEDIES, change
from creditscope.diagnosis.spelling import TEMPLATES
from creditscope.diagnosis.trainers import COMMON, FOREIGN, Trainer
from creditscope.runs import schema

LOGS = Path(__file__).resolve().parent.parent / "tests" / "diagnosis" / "logs"
MADE: Mapping[str, tuple[tuple[str, ...], str, str]] = {
    # trainer -> (logs, what made them, source)
    "TRL": (("trl-dapo", "trl-twice"), "real runs of a tiny model (`make_logs.py`)", "PyPI"),
    "verl": (("verl-steady",), "advantages, loss, metrics and console line by verl's own functions on drawn batches "
             "(`make_verl_logs.py`)", "PyPI"),
    "OpenRLHF": (("openrlhf",), "rollout statistics, loss and logger are its own, batches are drawn", "PyPI"),
    "SkyRL": (("skyrl",), "console logger, rollout metrics and reduction are its own, batches are drawn", "PyPI"),
    "AReaL": (("areal",), "tracker of statistics, table and logger are its own, batches are drawn", "PyPI"),
    "prime-rl": (("prime_rl",), "episodes by verifiers 0.4.0, their metrics and the file monitor by prime-rl; numbers "
                 "of the trainer's process are drawn", "repository at 559b447; verifiers from PyPI"),
    "NeMo-RL": (("nemo_rl/tensorboard", "nemo_rl"), "the TensorBoard writer is its own; lines of the console are "
                "written as `grpo_train` prints them", "repository at 7ea279a; the package on PyPI is empty"),
    "ms-swift": (("swift",), "rows of a real run of TRL, with its own `add_train_message` and writer of JSON "
                 "lines", "PyPI"),
    "unsloth": (("unsloth",), "rows of a real run of TRL with the columns that unsloth's source adds; unsloth "
                "itself was not run", "PyPI"),
    "open-r1": (("open_r1",), "its own dataclasses, printed before the lines of a real run of TRL",
                "repository at 1416fa0"),
    "EasyR1": (("easyr1", "easyr1-console"), "metrics of the batch, loss and both loggers are its own, batches are "
               "drawn", "repository at b44b311"),
}
WHERE: Mapping[str, str] = {
    "TRL": "`trainer_state.json`, what it prints", "verl": "what it prints, its file logger",
    "OpenRLHF": "what it prints (`Global step N: {…}`), TensorBoard, exports of wandb",
    "SkyRL": "what its console logger prints, TensorBoard, exports of wandb",
    "AReaL": "the tables that it prints, TensorBoard, exports of wandb",
    "prime-rl": "RUN/metrics.jsonl, what orchestrator and trainer print, exports of wandb",
    "NeMo-RL": "TensorBoard, exports of wandb; what it prints has the reward, the loss and the length alone",
    "ms-swift": "`logging.jsonl`, `trainer_state.json`", "unsloth": "as TRL's", "open-r1": "as TRL's",
    "EasyR1": "experiment_log.jsonl, what it prints, TensorBoard, exports of wandb"}
"""Trainer -> files with its log."""
APART: Mapping[str, str] = {
    "open-r1": "the line `Script parameters GRPOScriptArguments(…)`; a `trainer_state.json` of its is TRL's and "
        "read as such",
    "prime-rl": "its names, or `SUCCESS Step N |` in the console"}
SHORT = {"loss": "loss", "lr": "learning rate", "dead": "dead groups", "entropy": "entropy", "truncated": "cut answers",
         "clip": "clipped tokens", "kl": "KL to the reference"}
Table = Callable[[list[str], list[list[str]]], list[str]]


def ours(metric: str) -> str:
    return SHORT.get(metric) or schema.METRICS[metric].name


def name_in(trainer: Trainer, metric: str) -> str:
    """Its name, its older names, the pattern of held-out columns, or a dash."""
    if metric in trainer.metrics:
        return f"`{trainer.metrics[metric]}`"
    if metric == schema.EVAL_REWARD and trainer.held_out:
        return f"`{trainer.held_out}`"
    return ", ".join(f"`{name}`" for name in trainer.aliases.get(metric, ())) or "–"


def apart(trainer: Trainer) -> str:
    """What only this trainer's log has."""
    both = " with ".join(f"`{name}`" for name in sorted(trainer.together))
    marks = ", ".join(f"`{mark}`" for mark in sorted(trainer.marks)[:2])
    return APART.get(trainer.name) or "; ".join(text for text in (marks, both) if text)


def found_in(log: Log) -> tuple[str, str]:
    """(metrics that were read, metrics of the row that this log does not have)."""
    asked = [metric for metric in COMMON if metric not in log.trainer.absent]
    seen = [metric for metric in asked if log.series(metric) is not None]
    return ", ".join(map(ours, seen)), ", ".join(ours(metric) for metric in asked if metric not in seen) or "–"


def trainers_page(table: Table) -> list[str]:
    page = ["# Trainers whose logs are read\n\n",
            "`creditscope doctor` reads logs of these trainers, each as a row of data in "
            "`creditscope/diagnosis/trainers/`. Names and defaults are compared with the trainer's own source: TRL's "
            "in the test environment, verl's by stored values, those of the others by "
            "`tests/diagnosis/logs/trainers.json`, which `make_trainers/names.py` writes from their source files. "
            "Names of earlier versions are read where they are known. ms-swift, unsloth and open-r1 run TRL's or "
            "transformers' trainer: their rows are TRL's with what differs. EasyR1 is a fork of verl. verifiers 0.4 "
            "has no trainer of its own; prime-rl trains on its episodes.\n\n"]
    page += table(["trainer", "version", "where its log is", "told apart by", "rollouts for `creditscope inspect`"],
                  [[each.name, each.version, WHERE[each.name], apart(each), each.rollouts] for each in FOREIGN])
    page += ["\n## Which name is which\n\n",
             "Rows are our metrics, `a + b` is a sum of two columns, a dash means that there is none: the reason is "
             "in the next table. `train/` before a name is dropped. Patterns of held-out columns are regular "
             "expressions.\n\n"]
    for group in (FOREIGN[:4], FOREIGN[4:7], FOREIGN[7:]):
        page += [*table(["metric", *(f"{each.name} {each.version}" for each in group)],
                        [[ours(metric), *(name_in(each, metric) for each in group)] for metric in COMMON]), "\n"]
    page += ["## What is absent, and why\n\n",
             *table(["trainer", "metric", "why"], [[each.name, ours(metric), why] for each in FOREIGN
                                                   for metric, why in each.absent.items()])]
    page += ["\n## What was read of a log of its own making\n\n",
             "The logs are in `tests/diagnosis/logs`, the scripts that made them in `tests/diagnosis/make_trainers`. "
             "\"Not in this log\" are metrics that the trainer writes under other settings, or to other files.\n\n"]
    rows = []
    for each in FOREIGN:
        logs, made, source = MADE[each.name]
        for name in logs:
            seen, missing = found_in(read(LOGS / name))
            rows.append([each.name, f"`{name}`", f"{made}; source: {source}", seen, missing])
    page += table(["trainer", "log", "made by", "read", "not in this log"], rows)
    page += ["\n## Changes in each trainer's spelling\n\n",
             "TRL's, verl's and creditscope's are in [the doctor's page](doctor.md#remedies); unsloth and open-r1 take "
             "TRL's. Causes without a setting are left out here.\n\n"]
    own = [each for each in FOREIGN if each.speech == "own" or each.remedies]
    keys = [key for key in REMEDIES if key in TEMPLATES]
    for group in (own[:3], own[3:5], own[5:]):
        page += [*table(["cause", *(each.name for each in group)],
                        [[key, *(change(key, each) or "–" for each in group)] for key in keys]), "\n"]
    return page
