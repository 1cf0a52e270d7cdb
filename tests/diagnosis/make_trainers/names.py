"""tests/diagnosis/logs/trainers.json: names and defaults in the trainers' own source, without running it.

    python tests/diagnosis/make_trainers/names.py FOLDER       with a folder per trainer, named as in SOURCES

"words" are the parts of every name that the files of a trainer write: texts, parts of f-strings and keyword arguments,
split at "/". "settings" are the fields of its configuration with a literal default, by dotted path. Of a trainer that
writes TRL's log only what differs from TRL's row is looked for.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from creditscope.diagnosis.trainers import FOREIGN, TRL, Trainer
from creditscope.diagnosis.trainers.trainer import parts

TRLS = ("completions", "mean_length")
"""Parts of unsloth's `together` that TRL itself writes."""
OLDER = {"train_speed(iter/s)", "reward/all/mean"}
"""Names of earlier versions, in `marks`: ms-swift 2, prime-rl 0.2."""
OUT = Path(__file__).parents[1] / "logs" / "trainers.json"
RLHF = "openrlhf-0.11.2.data/purelib/openrlhf"
SOURCES: Mapping[str, tuple[list[str], list[str], dict[str, str]]] = {
    # trainer -> (files that write metrics, files with settings, prefix of a path -> root class)
    "OpenRLHF": ([f"{RLHF}/trainer/ppo_trainer.py", f"{RLHF}/trainer/ray/ppo_actor.py",
                  f"{RLHF}/trainer/ppo_utils/samples_generator.py", f"{RLHF}/trainer/ppo_utils/experience_maker.py",
                  f"{RLHF}/trainer/ppo_utils/experience.py"], [f"{RLHF}/cli/train_ppo_ray.py"], {}),
    "SkyRL": (["skyrl/train/trainer.py", "skyrl/train/generators/utils.py", "skyrl/train/evaluate.py",
               "skyrl/backends/skyrl_train/workers/worker.py", "skyrl/backends/skyrl_train/utils/ppo_utils.py"],
              ["skyrl/train/config/config.py"], {"trainer": "TrainerConfig", "generator": "GeneratorConfig"}),
    "AReaL": (["areal/trainer/ppo/actor.py", "areal/engine/fsdp_engine.py", "areal/utils/stats_tracker.py",
               "areal/workflow/rlvr.py", "areal/infra/workflow_executor.py"], ["areal/api/cli_args.py"],
              {"actor": "PPOActorConfig", "gconfig": "GenerationHyperparameters", "rollout": "InferenceEngineConfig",
               "train_dataset": "TrainDatasetConfig", "": "PPOConfig"}),
    "prime-rl": (["src/prime_rl/orchestrator/metrics.py", "src/prime_rl/orchestrator/orchestrator.py",
                  "src/prime_rl/trainer/rl/train.py", "src/prime_rl/trainer/rl/loss.py",
                  "src/prime_rl/trainer/utils.py"],
                 [f"packages/prime-rl-configs/src/prime_rl/configs/{name}.py"
                  for name in ("monitors", "orchestrator", "algorithm", "trainer")],
                 {"orchestrator": "OrchestratorConfig", "trainer": "TrainerConfig"}),
    "NeMo-RL": (["nemo_rl/algorithms/grpo.py", "nemo_rl/experience/rollouts.py",
                 "nemo_rl/algorithms/loss/loss_functions.py", "nemo_rl/models/policy/workers/dtensor_policy_worker.py"],
                ["examples/configs/grpo_math_1B.yaml"], {}),
    "ms-swift": (["swift/rlhf_trainers/grpo_trainer.py", "swift/trainers/patcher.py"],
                 ["swift/arguments/rlhf_args.py", "swift/arguments/base_args/model_args.py",
                  "swift/rlhf_trainers/arguments.py", "swift/rlhf_trainers/args_mixin.py"], {}),
    "unsloth": (["unsloth/models/rl_replacements.py"], [], {}),
    "EasyR1": (["verl/trainer/metrics.py", "verl/trainer/core_algos.py", "verl/trainer/ray_trainer.py",
                "verl/workers/actor/dp_actor.py", "verl/workers/fsdp_workers.py"],
               ["verl/trainer/config.py", "verl/workers/config.py", "verl/workers/actor/config.py",
                "verl/workers/rollout/config.py"], {"": "PPOConfig"}),
}


def words(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        texts = [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else \
            [node.arg] if isinstance(node, ast.keyword) and node.arg else []
        for text in texts:
            if "\n" not in text and len(text) < 200:
                yield from (part.strip(" •:'") for part in re.split(r"[/|]", text))


def literal(node: ast.expr | None) -> Any:
    try:
        return ast.literal_eval(node) if node is not None else ...
    except ValueError:
        return ...


def flags(file: Path) -> dict[str, Any]:
    """argparse: the name of a flag -> its default; those of a loop over prefixes for the actor."""
    found = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            first = node.args[0]
            name = first.value if isinstance(first, ast.Constant) else "".join(
                part.value if isinstance(part, ast.Constant) else "actor" for part in first.values)
            default = next((each.value for each in node.keywords if each.arg == "default"), None)
            if isinstance(default, ast.IfExp):
                default = default.body
            found[name.removeprefix("--")] = literal(default)
    return found


def classes(files: list[Path]) -> dict[str, ast.ClassDef]:
    return {node.name: node for file in files for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.ClassDef)}


def fields(root: str, known: Mapping[str, ast.ClassDef], path: str = "", none: bool = False) -> dict[str, Any]:
    """Dotted path -> default. Fields of a configuration that is None by default are None."""
    found: dict[str, Any] = {}
    node = known[root]
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in known:
            found |= fields(base.id, known, path, none)
    for each in node.body:
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        name, value = f"{path}{each.target.id}", each.value
        if isinstance(value, ast.Call) and getattr(value.func, "id", "") in ("field", "Field"):
            given = {key.arg: key.value for key in value.keywords}
            value = given.get("default", given.get("default_factory", value.args[0] if value.args else None))
        inner = [word for word in re.findall(r"\w+", f"{ast.unparse(value) if value is not None else ''} "
                                             f"{ast.unparse(each.annotation)}") if word in known]
        found[name] = None if none else literal(value)
        if inner and path.count(".") < 5:
            found |= fields(inner[0], known, f"{name}.", none or literal(value) is None)
    return found


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{path}{name}.")
        yield f"{path}{name}", value if not isinstance(value, dict) else ...


def settings(folder: Path, name: str) -> dict[str, Any]:
    _, files, roots = SOURCES[name]
    paths = [folder / file for file in files if (folder / file).exists()]
    if name == "OpenRLHF":
        return flags(paths[0])
    if name == "NeMo-RL":
        import yaml

        return dict(flat(yaml.safe_load(paths[0].read_text())))
    known = classes(paths)
    if name == "ms-swift":
        return {key: value for each in known for key, value in fields(each, known).items()}
    return {key: value for prefix, root in roots.items()
            for key, value in fields(root, known, f"{prefix}." if prefix else "").items()}


def names_of(trainer: Trainer) -> set[str]:
    """The names that a row states, less those of the row that it shares and those of older versions."""
    shared = {name for base in FOREIGN if base.name == trainer.through for name in _all_names(base)}
    return {*_all_names(trainer), *trainer.together} - (shared - trainer.together) - OLDER


def _all_names(trainer: Trainer) -> set[str]:
    return {*trainer.metrics.values(), *trainer.marks, *trainer.proofs, *trainer.logged}


def settings_of(trainer: Trainer) -> set[str]:
    """The settings that a row names, less those of the row that it shares."""
    shared = {path for base in FOREIGN if base.name == trainer.through and base is TRL
              for path in (*base.defaults, *base.paths.values())}
    words = {found[0] for text in trainer.words.values() if (found := re.match(r"[a-z_]+(?:\.[a-z_]+)+", text))}
    return {*trainer.defaults, *trainer.paths.values(), *words} - shared


def main(folder: Path) -> None:
    out = {}
    for trainer in FOREIGN:
        if trainer.name not in SOURCES:
            continue
        home = folder / trainer.name
        found = {*TRLS} if trainer.through == "TRL" else set()
        found |= {word for file in SOURCES[trainer.name][0] if (home / file).exists() for word in words(home / file)}
        asked = {piece for text in names_of(trainer) for _, name in parts(text) for piece in re.split("[/|]", name)}
        known, named = settings(home, trainer.name), settings_of(trainer)
        out[trainer.name] = {
            "version": trainer.version, "words": sorted(asked & found), "not found": sorted(asked - found),
            "settings": {path: None if known[path] is ... else known[path] for path in sorted(named) if path in known},
            "no such setting": sorted(path for path in named if path not in known)}
    OUT.write_text(json.dumps(out, indent=1, ensure_ascii=False) + "\n")
    for name, held in out.items():
        print(name, "not found:", held["not found"], "no such setting:", held["no such setting"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
