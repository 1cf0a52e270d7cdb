"""An ordinary TRL script with one line of creditscope. It runs on a CPU in one to three minutes.

    python examples/trl_callback.py
    creditscope report runs/mine
"""

import sys

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from creditscope.files.writing import free_path
from creditscope.plugins.trl import ScopeCallback
from creditscope.policy.loading import TINY  # the packaged model: any name or folder will do
from creditscope.tasks.arithmetic import Arithmetic

task = Arithmetic()
problems = {problem.prompt: problem for problem, _ in zip(task.problems("train", 0), range(400), strict=False)}


def right(prompts, completions, **_):
    """1 for a right answer."""
    return [task.verify(problems[prompt], text).reward for prompt, text in zip(prompts, completions, strict=True)]


def main(out="runs/mine", steps=20):
    out = free_path(out)  # runs/mine-2 where runs/mine is there: a record is never written over
    trainer = GRPOTrainer(
        model=str(TINY), reward_funcs=right, processing_class=AutoTokenizer.from_pretrained(TINY),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in problems]),
        args=GRPOConfig(
            output_dir=f"{out}-trl", max_steps=steps, num_generations=8, per_device_train_batch_size=32,
            max_completion_length=64, learning_rate=3e-5, logging_steps=5, save_strategy="no", report_to="none",
            use_cpu=True, bf16=False, gradient_checkpointing=False))  # on a GPU, leave this line out

    trainer.add_callback(ScopeCallback(trainer, every=5, out=out))  # ← the line
    trainer.train()

    for entry in trainer.state.log_history:
        if "creditscope/gram/group/effective_rank" in entry:
            print(f"step {entry['step']}: {1 - entry['creditscope/signal/dead_groups']:.0%} of the "
                  f"groups carry signal; their 8 answers push in "
                  f"{entry['creditscope/gram/group/effective_rank']:.1f} directions; after the step "
                  f"{entry['creditscope/overshoot/past']:.1%} of tokens are past the clip")
    print(f"wrote {out}\nNext: creditscope report {out}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
