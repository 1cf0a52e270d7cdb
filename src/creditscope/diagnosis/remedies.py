"""The change for each cause, as TRL, verl and creditscope spell it, and the number that should move then. Trainers
with names of their own are spelled by `spelling`. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from creditscope.diagnosis.log import LogSettings
from creditscope.diagnosis.spelling import PARTS, TEMPLATES, spell

if TYPE_CHECKING:
    from creditscope.diagnosis.trainers.trainer import Trainer

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


class Remedy(NamedTuple):
    trl: str
    verl: str
    creditscope: str
    expect: str = ""
    """The number that should move, and when to look."""
    other: str = ""
    """For a trainer whose settings are not known."""
    instead: str = ""
    """Where the settings are already as the change asks."""


REMEDIES: Mapping[str, Remedy] = {
    "reward": Remedy(
        "the reward function or the prompts, print answers with log_completions=True",
        "the reward function or the prompts: dump answers with trainer.rollout_data_dir",
        "the reward function or the task (--reward, --task)",
        "the rewards' std above 0 at the first step", "the reward function, or the prompts: print some answers"),
    "reward missing": Remedy(
        "the reward function: return a number for every answer, not None or NaN",
        "the reward function: return a number for every answer",
        "the reward function (--reward): return a number for every answer; reward/first_error has its message",
        "no missing reward at the first step", "the reward function: return a number for every answer"),
    "form": Remedy(
        "the reward function: where the asked form is missing take the number in \\boxed{}, or the last number; or a "
        "prompt that shows the form by an example line",
        "the reward function: where the asked form is missing take the last number (method='flexible' of verl's "
        "gsm8k.compute_score); or a prompt that shows the form by an example line",
        "--answer flexible, or a prompt that shows the form by an example line",
        "the reward, higher by the share that was lost, at the first step",
        "the reward function: where the asked form is missing take the last number; or a prompt that shows the form"),
    "reward noise": Remedy(
        "the reward function: call it twice on one answer, and print prompt, answer and reward side by side; rewards "
        "must be in the order of completions",
        "the reward function or reward manager: call it twice on one answer, and print prompt, answer and reward side "
        "by side",
        "the reward function (--reward): call it twice on one answer; rewards must be in the order of the answers",
        "no pair of equal answers with different rewards, at the first step",
        "the reward function: call it twice on one answer; rewards must be in the order of the answers"),
    "reward length": Remedy(
        "the reward function: take length out of it, or pay it only for right answers and up to a fixed length",
        "the reward function: take length out of it, or pay it only for right answers and up to a fixed length",
        "the reward function: take length out of it, or pay it only for right answers and up to a fixed length",
        "the correlation of reward and length inside groups, within ± 0.2 at once",
        "the reward function: take length out of it"),
    "reward hacked": Remedy(
        "a reward model that orders held-out pairs of this policy's answers, fewer max_steps, or a larger beta",
        f"a reward model that orders held-out pairs of this policy's answers, fewer steps, or a larger "
        f"{ACTOR}.kl_loss_coef",
        "a reward model that orders held-out pairs of this policy's answers (creditscope lab pairs, lab reward), fewer "
        "--steps, or a larger --beta",
        "the verifier's reward, within 30 steps",
        "a reward model that orders held-out pairs of this policy's answers, fewer steps, or a larger KL term"),
    "one rollout": Remedy(
        "num_generations=8", f"{ROLLOUT}.n=8", "--group 8", "groups whose rewards differ, at the first step"),
    "cold sampler": Remedy(
        "temperature=1.0, top_p=1.0, top_k=0", f"{ROLLOUT}.temperature=1.0, {ROLLOUT}.top_p=1.0, {ROLLOUT}.top_k=-1",
        "--temperature 1, --top-p 1", "distinct answers per group, at the first step", "a temperature of 1",
        "a temperature above 1, or a model that is less sure of its answers"),
    "hot sampler": Remedy(
        "temperature=1.0", f"{ROLLOUT}.temperature=1.0", "--temperature 1", "entropy, at the first step",
        "a temperature of 1", "a temperature below 1, or a model that was first taught to write such answers"),
    "too hard": Remedy(
        "easier prompts, or a reward that pays parts of an answer (more num_generations finds rare right ones)",
        f"easier prompts, a reward that pays parts of an answer, or a larger {ROLLOUT}.n",
        "easier problems, a reward that pays steps, or a larger --group",
        "dead groups, at the first step", "easier prompts, or a reward that pays parts of an answer"),
    "too easy": Remedy(
        "harder prompts: leave out those that all answers solve",
        "harder prompts, or algorithm.filter_groups.enable=True with algorithm.filter_groups.metric=reward",
        "harder problems, or --method dapo, which draws other prompts for those",
        "dead groups, at the first step", "harder prompts: leave out those that all answers solve"),
    "dead groups": Remedy(
        "prompts of middling difficulty, more num_generations, or a reward with more levels",
        "algorithm.filter_groups.enable=True with algorithm.filter_groups.metric=reward, prompts of middling "
        f"difficulty, or a larger {ROLLOUT}.n",
        "--group (more rollouts), easier or harder problems, or --method dapo",
        "dead groups, within a few steps", "prompts of middling difficulty, or more answers per prompt"),
    "dead counted": Remedy(
        "scale_rewards='group' or 'none': then frac_reward_zero_std counts groups",
        "algorithm.filter_groups.enable=True: then training/filter_groups/evicted_samples counts them",
        "none: signal/dead_groups counts groups"),
    "dilution": Remedy(
        "drop unanimous groups in a subclass of GRPOTrainer: loss_type has no value that does",
        "algorithm.filter_groups.enable=True", "--method dapo, which drops unanimous groups and draws others"),
    "KL only": Remedy("beta=0.0, or prompts that leave fewer groups unanimous",
                      f"{ACTOR}.use_kl_loss=False, or algorithm.filter_groups.enable=True",
                      "--beta 0, or --method dapo"),
    "saturation": Remedy(
        "harder prompts where the reward is high, easier ones where it is low",
        "harder prompts where the score is high, easier ones where it is low",
        "harder problems where the reward is high, easier ones where it is low", "dead groups, within a few steps",
        "harder prompts where the reward is high, easier ones where it is low"),
    "truncation": Remedy(
        "max_completion_length (raise it)", "data.max_response_length (raise it)", "--max-tokens (raise it)",
        "the share of cut answers, at the first step", "the limit of an answer's tokens (raise it)"),
    "learning rate": Remedy(
        "a larger learning_rate: ×10 until KL after a step is above 1e-7 (TRL's examples use 1e-6 to 1e-5, with LoRA "
        "1e-5 to 2e-4)",
        f"a larger {ACTOR}.optim.lr: ×10 (verl's examples use 1e-6)",
        "a larger --lr: ×10 until overshoot/kl is above 1e-7", "KL after a step, at the next reading",
        "a larger learning rate: ×10"),
    "schedule": Remedy(
        "fewer warmup_steps than steps, or lr_scheduler_type='constant'",
        f"{ACTOR}.optim.lr_warmup_steps or {ACTOR}.optim.lr_scheduler_type", "--warmup or --schedule",
        "the learning rate, at the first steps", "the warm-up, or the schedule of the learning rate"),
    "epsilon": Remedy("adam_epsilon=1e-8", f"{ACTOR}.optim.override_optimizer_config (eps of 1e-8)", "--eps 1e-8",
                      "KL after a step, at the next reading", "Adam's ε of 1e-8"),
    "rounding": Remedy(
        "float32 weights under autocast: model_init_kwargs={'dtype': 'float32'}; or LoRA",
        f"{ACTOR}.fsdp_config.model_dtype=fp32 (master weights in float32)", "--dtype float32",
        "the share of weights that an update leaves as they are, at the next reading", "float32 master weights"),
    "gradient clip": Remedy("max_grad_norm (raise it to the gradient's norm)",
                            f"{ACTOR}.optim.clip_grad (raise it to the gradient's norm)",
                            "--clip-norm (raise it to the gradient's norm)",
                            "KL after a step, at the next reading", "a clip norm near the gradient's norm"),
    "frozen": Remedy("requires_grad of the weights, or a larger LoRA rank and more target modules",
                     "requires_grad of the weights, or a larger LoRA rank", "--lora (a larger rank, or 0 for all "
                     "weights)",
                     "the share of trained parameters, at the first reading", "which weights are trained"),
    "mask": Remedy(
        "completion_mask and tool_mask of the batch: print them beside the tokens of one answer",
        "response_mask of the batch: print it beside the tokens of one answer",
        "the mask that the loss applies: `creditscope report` shows w of each token of the kept answers",
        "answers without w, at the first step", "the mask of the loss: print it beside the tokens of one answer"),
    "small steps": Remedy(
        "a larger learning_rate, or optim='adamw_torch': ×10 until KL after a step is above 1e-7",
        f"a larger {ACTOR}.optim.lr: ×10", "a larger --lr, or --optimizer adamw",
        "KL after a step, at the next reading",
        "a larger learning rate, or Adam"),
    "KL pull": Remedy("beta=0.0 (TRL's default), or beta at most 0.1",
                      f"{ACTOR}.kl_loss_coef at most 0.1, or algorithm.use_kl_in_reward=False where KL is in the "
                      "reward",
                      "--beta 0, or --beta at most 0.1", "the reward, within 30 steps",
                      "a weight of the KL term of at most 0.1"),
    "clip closed": Remedy("epsilon=0.2", f"{ACTOR}.clip_ratio=0.2", "a method with ε = 0.2",
                          "the clip ratio, at the first step", "a clip range of 0.2"),
    "clip": Remedy("num_iterations=2, or steps_per_generation above gradient_accumulation_steps, to reuse a batch; "
                   "epsilon acts only then",
                   f"{ACTOR}.ppo_epochs=2, or {ACTOR}.ppo_mini_batch_size below data.train_batch_size, to reuse a "
                   f"batch; {ACTOR}.clip_ratio acts only then",
                   "--inner-steps 2 or --minibatches 2, to reuse a batch"),
    "cispo cap": Remedy("epsilon_high=5.0: here it is the ceiling itself, not what is added to 1", "", ""),
    "updates": Remedy(
        "fewer updates per batch: a smaller num_iterations, or steps_per_generation equal to "
        "gradient_accumulation_steps",
        f"fewer updates per batch: a smaller {ACTOR}.ppo_epochs, or a larger {ACTOR}.ppo_mini_batch_size",
        "fewer --inner-steps, or --brake recall", "tokens past their bound, at the next reading",
        "fewer updates per batch"),
    "length constant": Remedy(
        "max_completion_length near the lengths that occur",
        f"{ACTOR}.loss_scale_factor near the lengths that occur, or {ACTOR}.loss_agg_mode=token-mean",
        "--max-tokens near the lengths that occur, or --method dapo"),
    "step size": Remedy(
        "a smaller learning_rate: a tenth", f"a smaller {ACTOR}.optim.lr: a tenth", "a smaller --lr: a tenth",
        "KL after a step below 0.01 nats per token, at the next reading; the reward, within 30 steps",
        "a smaller learning rate: a tenth"),
    "weight decay": Remedy("weight_decay=0.0", f"{ACTOR}.optim.weight_decay=0.0", "--weight-decay 0",
                           "the reward, within 10 steps", "no weight decay"),
    "entropy": Remedy(
        "a smaller learning_rate, or epsilon_high=0.28 with several updates per batch",
        f"{ACTOR}.clip_ratio_high=0.28, {ACTOR}.entropy_coeff=0.001, or a smaller {ACTOR}.optim.lr",
        "a smaller --lr, or --method dapo (ε_high 0.28)", "entropy, within 30 steps", "a smaller learning rate"),
    "length drift": Remedy(
        "a loss without 1/L of each answer (loss_type='dapo' or 'dr_grpo'), or a length term in the reward",
        f"{ACTOR}.loss_agg_mode=token-mean (no 1/L of each answer), or a length term in the reward",
        "--method dapo or dr_grpo (no 1/L of each answer)", "the mean length, within 30 steps",
        "a length term in the reward"),
    "length shrinks": Remedy(
        "what the reward pays for short answers; a smaller learning_rate",
        f"what the reward pays for short answers; a smaller {ACTOR}.optim.lr",
        "what the reward pays for short answers; a smaller --lr", "the mean length, within 30 steps",
        "what the reward pays for short answers; a smaller learning rate"),
    "KL level": Remedy(
        "a smaller learning_rate, or a larger beta to stay near the reference",
        f"a smaller {ACTOR}.optim.lr, or a larger {ACTOR}.kl_loss_coef",
        "a smaller --lr, or a larger --beta", "KL to the reference, within 30 steps", "a smaller learning rate"),
    "reference": Remedy(
        "the reference: it must be the model that training starts from (an adapter that was merged or loaded later "
        "makes another)", "the reference model: it must be the one that training starts from",
        "the reference model", "KL at the first step, 0", "the reference model"),
    "gradient": Remedy(
        "a smaller learning_rate, or bf16=False (float32)",
        f"a smaller {ACTOR}.optim.lr, or {ACTOR}.fsdp_config.dtype (float32)",
        "a smaller --lr, or --dtype float32", "the gradient norm, at the next steps",
        "float32, or a smaller learning rate"),
    "sampler": Remedy(
        "vllm_importance_sampling_mode='token_truncate', and the same dtype in vLLM and the trainer",
        "algorithm.rollout_correction.rollout_is=token, and the same dtype in rollout and actor",
        "--top-p 1, and --dtype float32", "the ratio of sampler and trainer, at the next step"),
    "held out": Remedy(
        "the reward: print answers that got a high reward and read them; held-out accuracy does not follow it",
        "the reward: dump answers with trainer.rollout_data_dir and read those with a high score",
        "the reward: read answers with a high reward in `creditscope report`; held-out accuracy does not follow it",
        "held-out accuracy, at the next evaluation", "the reward: read answers that got a high one"),
    "memorised": Remedy(
        "more prompts in train_dataset: each was sampled again and again", "more prompts in data.train_files",
        "a task with more problems", "held-out accuracy, at the next evaluation", "more prompts"),
    "reward trend": Remedy(
        "a smaller learning_rate, or a larger beta to stay near the reference; if only the prompts got harder, nothing",
        f"a smaller {ACTOR}.optim.lr, or {ACTOR}.use_kl_loss=True; if only the prompts got harder, nothing",
        "a smaller --lr; if only the problems got harder, nothing", "the reward, within 30 steps",
        "a smaller learning rate; if only the prompts got harder, nothing"),
    "displacement": Remedy(
        "a larger beta, or a smaller learning_rate", "a smaller learning rate, or a larger beta",
        "a larger --beta, a smaller --lr, or --method cpo (a supervised term on the chosen answers)",
        "the reward of the chosen answers (pairs/chosen_reward) near 0 or above, within 30 steps",
        "a larger beta, a smaller learning rate, or a supervised term on the chosen answers"),
    "signal": Remedy(
        "a larger batch: more prompts per step (per_device_train_batch_size or gradient_accumulation_steps)",
        "a larger data.train_batch_size", "--prompts (more), or --group (more)", "the noise scale below the batch",
        "more prompts per step"),
    "no gain": Remedy(
        "nothing yet: first find the cause, with trainer.add_callback(ScopeCallback(trainer, out='runs/mine'))",
        "nothing yet: first find the cause, with `creditscope inspect` on dumped rollouts",
        "nothing yet: first find the cause, with --scope light --probe light", "",
        "nothing yet: first find the cause"),
}
"""Cause -> its remedy."""


RATE: Mapping[str, int] = {"learning rate": 1, "small steps": 1, "step size": -1, "entropy": -1, "length shrinks": -1,
                           "KL level": -1, "gradient": -1, "reward trend": -1}
"""Remedy -> 1 where it asks for a larger learning rate, −1 for a smaller one."""
_ASSIGNED = re.compile(r"(?:--(?P<flag>[a-z][\w-]*) |(?P<name>[a-z][\w.]*)=)(?P<value>'[^']*'|[\w.+-]*\w)")


def change(key: str, speech: str | Trainer, settings: LogSettings | None = None) -> str:
    """The change as a trainer spells it, or as trl, verl, creditscope or other; less what the settings already are.

    >>> change("cold sampler", "trl", LogSettings({"temperature": 1.0, "top_p": 0.2}))
    'top_p=1.0, top_k=0'
    """
    remedy = REMEDIES[key]
    text = (getattr(remedy, speech) if isinstance(speech, str) else _spelled(key, speech)) or remedy.other
    parts = PARTS.split(text)
    kept = [k for k in range(0, len(parts), 2) if not _is_so(parts[k], settings)]
    if len(kept) == len(parts[::2]):
        return text
    if not kept:
        return remedy.instead
    return parts[kept[0]] + "".join(parts[k - 1] + parts[k] for k in kept[1:])


def _spelled(key: str, trainer: Trainer) -> str:
    """The trainer's own text, that of its speech with its flags, or the template in its names."""
    if key in trainer.remedies:
        return trainer.remedies[key]
    if trainer.speech == "own":
        return spell(TEMPLATES.get(key, ""), trainer.spelled)
    text: str = getattr(REMEDIES[key], trainer.speech)
    names = "|".join(sorted({*trainer.defaults, *trainer.paths.values()}, key=len, reverse=True))
    return re.sub(rf"(?<![\w.-])({names})\b", rf"{trainer.flag}\1", text) if trainer.flag else text


def _is_so(part: str, settings: LogSettings | None) -> bool:
    """Whether a part of a change sets something, and all of it was given so."""
    found = [(each["name"] or each["flag"].replace("-", "_"), each["value"].strip("'"))
             for each in _ASSIGNED.finditer(part)]
    return bool(found) and settings is not None and all(_equal(_given(settings, name), value) for name, value in found)


def _given(settings: LogSettings, name: str) -> object:
    """A setting as it was given or follows from the log, also of a script under TRL's callback; else None."""
    return next((settings.get(path) for path in (name, f"trl.{name}") if settings.knows(path)), None)


def _equal(given: object, value: str) -> bool:
    try:
        return given is not None and float(f"{given}") == float(value)
    except ValueError:
        return f"{given}" == value
