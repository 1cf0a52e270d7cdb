"""The TRL runs of the tutorial and the gallery: an ordinary script on the packaged model, with the callback.

    python docs/gallery/trl_run.py runs/flat --beta 10        # the KL term outweighs the reward
    python docs/gallery/trl_run.py runs/repaired --beta 0     # the same after the change

Beside the record in OUT/record it leaves what TRL itself saves, OUT/trainer_state.json, and the settings as JSON.
"""

import argparse
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from creditscope.plugins.trl import ScopeCallback
from creditscope.policy.loading import TINY
from creditscope.tasks.arithmetic import Arithmetic

task = Arithmetic()
problems = {problem.prompt: problem for problem, _ in zip(task.problems("train", 0), range(2000), strict=False)}


def right(prompts, completions, **_):
    """1 for a right answer."""
    return [task.verify(problems[prompt], text).reward for prompt, text in zip(prompts, completions, strict=True)]


def main(out, beta, steps):
    args = GRPOConfig(
        output_dir=str(out), max_steps=steps, beta=beta, num_generations=8, per_device_train_batch_size=64,
        max_completion_length=80, learning_rate=2e-4, logging_steps=1, save_strategy="no", report_to="none",
        use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True)
    trainer = GRPOTrainer(
        model=str(TINY), reward_funcs=right, processing_class=AutoTokenizer.from_pretrained(TINY), args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in problems]))
    trainer.add_callback(ScopeCallback(trainer, every=5, out=str(out / "record")))
    trainer.train()
    trainer.save_state()
    (out / "training_args.json").write_text(args.to_json_string())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--beta", type=float, required=True)
    parser.add_argument("--steps", type=int, default=80)
    given = parser.parse_args()
    main(given.out, given.beta, given.steps)
