"""An ordinary TRL script for DPO with one line of creditscope. It runs on a CPU in two to three minutes.

    python examples/trl_dpo.py
    creditscope report runs/mine
"""

import sys

from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

from creditscope.files.writing import free_path
from creditscope.plugins.trl import ScopeCallback
from creditscope.policy.loading import TINY  # the packaged model: any name or folder will do
from creditscope.tasks.arithmetic import Arithmetic


def pairs(count):
    """A right solution, preferred to the same with a wrong last result."""
    for problem, _ in zip(Arithmetic().problems("train", 0), range(count), strict=False):
        *lines, last, answer = problem.meta["solution"].split("\n")
        wrong = str(int(problem.answer) + 1)
        rejected = [*lines, last.rpartition("=")[0] + f"= {wrong}", f"#### {wrong}"]
        yield {"prompt": problem.prompt, "chosen": "\n".join([*lines, last, answer]), "rejected": "\n".join(rejected)}


def main(out="runs/mine", steps=30, model=TINY):
    out = free_path(out)  # runs/mine-2 where runs/mine is there: a record is never written over
    trainer = DPOTrainer(
        model=str(model), processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=Dataset.from_list(list(pairs(240))),
        args=DPOConfig(
            output_dir=f"{out}-trl", max_steps=steps, per_device_train_batch_size=8, learning_rate=3e-5, beta=0.1,
            logging_steps=5, save_strategy="no", report_to="none",
            use_cpu=True, bf16=False, gradient_checkpointing=False))  # on a GPU, leave this line out

    trainer.add_callback(ScopeCallback(trainer, every=5, out=out))  # ← the line
    trainer.train()

    for entry in trainer.state.log_history:
        if "creditscope/pairs/chosen_change" in entry:
            print(f"step {entry['step']}: margin {entry['rewards/margins']:.3f}; a step changes log π of the chosen "
                  f"answers by {entry['creditscope/pairs/chosen_change']:+.3f}, of the rejected by "
                  f"{entry['creditscope/pairs/rejected_change']:+.3f}; the chosen fell in "
                  f"{entry['creditscope/pairs/chosen_fell']:.0%} of the pairs")
    print(f"wrote {out}\nNext: creditscope report {out}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
