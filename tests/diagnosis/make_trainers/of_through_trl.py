"""tests/diagnosis/logs/{swift,unsloth,open_r1}: rows of TRL's real run trl-fall, with what each of the three adds to
them.

    PYTHONPATH=tests/diagnosis/make_trainers:MS_SWIFT:OPEN_R1/src python tests/diagnosis/make_trainers/of_through_trl.py

ms-swift 4.6.0: its own `add_train_message` and JsonlWriter, and the name entropy/mean (grpo_trainer.py). unsloth
2026.10.9: completion_length and kl in each row (rl_replacements.py), and its banner. open-r1 0.1.0.dev0: its own
dataclasses, printed as src/open_r1/grpo.py prints them, before TRL's lines.
"""

import json
import time
from types import SimpleNamespace

from draw import LOGS, batches, home
from hollow import hollow

hollow("modelscope", "json_repair")

from open_r1.configs import GRPOConfig, GRPOScriptArguments  # noqa: E402
from swift.trainers.patcher import add_train_message  # noqa: E402
from swift.utils.io_utils import JsonlWriter  # noqa: E402

state = json.loads((LOGS / "trl-fall" / "trainer_state.json").read_text())
rows = [row for row in state["log_history"] if "reward" in row]
settings = json.loads((LOGS / "trl-fall" / "training_args.json").read_text())

swift = home("swift")
(swift / "logging.jsonl").unlink(missing_ok=True)
writer = JsonlWriter(str(swift / "logging.jsonl"))
for row in rows:
    logs = {"entropy/mean" if name == "entropy" else name: value for name, value in row.items()
            if name != "step" and not name.startswith("creditscope/")}
    add_train_message(logs, SimpleNamespace(global_step=row["step"], max_steps=state["max_steps"], max_memory=8.5),
                      time.time() - row["step"], 0)
    writer.append(logs)
(swift / "args.json").write_text(json.dumps({**settings, "rlhf_type": "grpo"}, indent=2) + "\n")
dumps = LOGS.parents[1] / "offline" / "dumps" / "swift"
dumps.mkdir(parents=True, exist_ok=True)
(dumps / "completions.jsonl").unlink(missing_ok=True)
writer = JsonlWriter(str(dumps / "completions.jsonl"))
for batch in list(batches())[:2]:
    writer.append({"step": [str(batch.step)] * 8, "prompt": [f"What is {row // 4}?" for row in range(8)],
                   "completion": batch.text, "accuracy": batch.reward[:8].tolist(), "format": [1.0] * 8,
                   "advantages": batch.advantage[:8, 0].tolist()})

unsloth = home("unsloth")
own = [{**row, "completion_length": row["completions/mean_length"], "kl": row.get("kl", 0.0)} for row in rows]
(unsloth / "trainer_state.json").write_text(json.dumps({**state, "log_history": own}, indent=2) + "\n")
(unsloth / "training_args.json").write_text(json.dumps(settings, indent=2) + "\n")

script = GRPOScriptArguments(dataset_name="own/prompts")
config = GRPOConfig(output_dir="data/open-r1", use_cpu=True, bf16=False, num_generations=8,
                    **{name: value for name, value in settings.items()
                       if name in ("loss_type", "learning_rate", "beta", "max_completion_length")})
head = "2026-11-18 12:00:00 - INFO - __main__ - "
(home("open_r1") / "train.log").write_text(
    f"{head}Script parameters {script}\n{head}Training parameters {config}\n"
    + (LOGS / "trl-fall" / "train.log").read_text())
