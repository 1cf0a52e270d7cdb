"""Makes the files in dumps/ and in examples/completions: what TRL and verl write when asked to log their rollouts.

    python tests/offline/make_dumps.py trl      TRL's GRPOTrainer, three steps of the packaged model
    python tests/offline/make_dumps.py answers  answers.json, for the next
    python tests/offline/make_dumps.py verl     the two writers of an installed verl, from its source as they stand

The packaged model and its task are used throughout, so that a reading with `--model tiny` finds its own answers again.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

DUMPS = Path(__file__).parent / "dumps"
COMPLETIONS = Path(__file__).parents[2] / "examples" / "completions"


def make_trl() -> None:
    """log_completions at every step. A generation serves two steps, so the second logs the answers of the first."""
    import datasets
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from creditscope.policy.loading import TINY
    from creditscope.tasks import find_task

    task = find_task("arithmetic")
    problems = {p.prompt: p for p in islice(task.problems("train", 1), 8)}

    def right(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [task.verify(problems[p], c).reward for p, c in zip(prompts, completions, strict=True)]

    def words(completions: list[str], **_: Any) -> list[float]:
        return [0.01 * len(c.split()) for c in completions]

    for folder, rewards in {COMPLETIONS: [right], DUMPS / "trl_two_rewards": [right, words]}.items():
        with tempfile.TemporaryDirectory() as out:
            args = GRPOConfig(output_dir=out, use_cpu=True, bf16=False, gradient_checkpointing=False, max_steps=3,
                              per_device_train_batch_size=8, num_generations=4, steps_per_generation=2, logging_steps=1,
                              log_completions=True, num_completions_to_print=0, max_completion_length=64, report_to=[],
                              save_strategy="no", learning_rate=1e-5, seed=1, disable_tqdm=True)
            data = datasets.Dataset.from_list([{"prompt": prompt} for prompt in problems])
            GRPOTrainer(model=str(TINY), processing_class=AutoTokenizer.from_pretrained(TINY), reward_funcs=rewards,
                        args=args, train_dataset=data).train()
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(Path(out) / "completions", folder)
    for file in sorted((DUMPS / "trl_two_rewards").iterdir())[1:]:
        file.unlink()


def make_verl() -> None:
    """Both writers of verl: v1's with uid, and RayPPOTrainer's without."""
    found = importlib.util.find_spec("verl")
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).parent / "trainer" / "ppo"
    made = json.loads((DUMPS / "answers.json").read_text())
    for folder, file in {"verl": source / "v1" / "trainer_base.py", "verl_ray": source / "ray_trainer.py"}.items():
        shutil.rmtree(DUMPS / folder, ignore_errors=True)
        write = writer(file)
        for step in (9, 10):  # as text "10" comes first
            rows = made[str(step)]
            uids = [f"{row['problem']}_{row['rollout']}_0" for row in rows]
            extra = {"uid": uids} if folder == "verl" else {"acc": [row["reward"] > 0 for row in rows]}
            # RayPPOTrainer balances a batch over its ranks: rows of a group do not stay together.
            order = range(len(rows)) if folder == "verl" else [*range(0, len(rows), 2), *range(1, len(rows), 2)]
            write([rows[i]["prompt"] for i in order], [rows[i]["text"] for i in order],
                  [rows[i]["answer"] for i in order], [rows[i]["reward"] for i in order],
                  {name: [values[i] for i in order] for name, values in extra.items()}, str(DUMPS / folder), step)


def writer(file: Path) -> Any:
    """`_write_generations` of verl, compiled from its own source: its module imports what needs a cluster."""
    tree = ast.parse(file.read_text())
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_write_generations")
    node.decorator_list = []
    names: dict[str, Any] = {}
    exec("import json, os\nimport numpy as np\n" + ast.unparse(node), names)
    return names["_write_generations"]


def make_answers() -> None:
    """Answers of the packaged model, for verl's writers: they run where creditscope is not installed."""
    import torch

    from creditscope.lab.rollout import roll_out
    from creditscope.policy.loading import load_policy
    from creditscope.tasks import find_task

    policy, task, made = load_policy("tiny", device="cpu"), find_task("arithmetic"), {}
    for step in (9, 10):
        batch = roll_out(policy, task, list(islice(task.problems("train", step), 3)), 4, max_tokens=64, temperature=1.0,
                         top_p=1.0, generator=torch.Generator().manual_seed(step))
        made[str(step)] = [
            {"prompt": problem.prompt, "text": text, "reward": reward, "answer": problem.answer,
             "problem": problem.id, "rollout": i % 4}
            for i, (problem, text, reward) in enumerate(zip(batch.problems, batch.rollouts.text,
                                                            batch.rollouts.reward.tolist(), strict=True))]
    (DUMPS / "answers.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    {"trl": make_trl, "answers": make_answers, "verl": make_verl}[sys.argv[1]]()
