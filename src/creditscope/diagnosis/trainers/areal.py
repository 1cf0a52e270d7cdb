"""AReaL 1.0.4, `PPOTrainer` with `PPOActor`: names as in trainer/ppo/actor.py and utils/stats_tracker.py, settings as
in api/cli_args.py."""

from __future__ import annotations

from creditscope.diagnosis.log import LogSettings as Settings
from creditscope.diagnosis.trainers.trainer import NOTHING, Trainer
from creditscope.methods import table
from creditscope.methods.axes import Method
from creditscope.runs import schema

_ROWS = {("group", "group"): table.GRPO, ("group", "None"): table.DR_GRPO}


def areal_method(s: Settings) -> Method | None:
    """actor.reward_norm over a group as one row, with a mean over tokens; None under any other normalisation."""
    norm = (s.word("actor.reward_norm.mean_level"), s.word("actor.reward_norm.std_level"))
    row = _ROWS.get(norm)
    if row is None or s.get("actor.adv_norm.mean_level") or s.get("actor.adv_norm.std_level"):
        return None
    if s.switch("actor.reward_norm.mean_leave1out"):
        row = row.replace(baseline="leave_one_out")
    if s.switch("actor.use_sapo_loss") or s.word("actor.importance_sampling_level") != "token":
        return None
    return row.replace(aggregate="token_mean")


AREAL = Trainer(
    name="AReaL", version="1.0.4", speech="own",
    marks=frozenset({"ppo_actor/task_reward/avg", "ppo_actor/update/actor_loss/avg", "ppo_actor/no_eos_ratios/avg"}),
    metrics={
        "loss": "ppo_actor/update/actor_loss/avg", schema.GRAD_NORM: "ppo_actor/update/grad_norm",
        "lr": "ppo_actor/update/lr", schema.REWARD_MEAN: "ppo_actor/task_reward/avg",
        schema.REWARD_MIN: "ppo_actor/task_reward/min", schema.REWARD_MAX: "ppo_actor/task_reward/max",
        "entropy": "ppo_actor/update/entropy/avg",
        schema.LENGTH_MEAN: "ppo_actor/seq_len/avg - ppo_actor/prompt_len/avg",
        "truncated": "ppo_actor/no_eos_ratios/avg", "clip": "ppo_actor/update/clip_ratio/avg",
        schema.SAMPLER_RATIO: "ppo_actor/update/behave_imp_weight/avg",
        schema.ADVANTAGE_MAX: "ppo_actor/advantages/max", schema.ADVANTAGE_MIN: "ppo_actor/advantages/min",
    },
    aliases={schema.REWARD_MEAN: ("rollout/reward",), "kl old": ("ppo_actor/update/approx_kl/avg",),
             "score with kl": ("ppo_actor/final_reward/avg",)},
    held_out=r"eval-rollout/reward",
    logged={"ppo_actor/eps_clip": "actor.eps_clip"},
    absent={
        schema.REWARD_STD: "mean, minimum and maximum are logged", "dead": "not counted",
        schema.LENGTH_MAX: "`seq_len/max` counts the prompt too",
        "kl": "`kl_rewards` is −`kl_ctl`·KL per token, in the reward", schema.SAMPLER_GAP: "not logged",
    },
    defaults={
        "actor.reward_norm.mean_level": None, "actor.reward_norm.std_level": None,
        "actor.reward_norm.mean_leave1out": None, "actor.adv_norm.mean_level": None,
        "actor.adv_norm.std_level": None, "actor.use_sapo_loss": False, "actor.importance_sampling_level": "token",
        "actor.ppo_n_minibatches": 4, "actor.recompute_logprob": False, "actor.use_decoupled_loss": False,
        "gconfig.n_samples": 1, "gconfig.max_new_tokens": 16384,
    },
    paths={
        "learning_rate": "actor.optimizer.lr", "adam_epsilon": "actor.optimizer.eps",
        "weight_decay": "actor.optimizer.weight_decay", "grad_clip": "actor.optimizer.gradient_clipping",
        "optimizer": "actor.optimizer.type", "temperature": "gconfig.temperature", "top_p": "gconfig.top_p",
        "top_k": "gconfig.top_k", "clip_low": "actor.eps_clip", "clip_high": "actor.eps_clip_higher",
        "steps": "total_train_steps", "dtype": "actor.dtype", "limit": "gconfig.max_new_tokens",
        "group": "gconfig.n_samples", "lora": "actor.lora_rank",
    },
    words={
        "beta": "actor.kl_ctl", "minibatch": "train_dataset.batch_size / actor.ppo_n_minibatches",
        "prompts": "train_dataset.batch_size", "warmup": "actor.optimizer.warmup_steps_proportion",
        "schedule": "actor.optimizer.lr_scheduler_type", "dump": "rollout.dump_to_file=true",
        "correction": "actor.use_decoupled_loss=true",
    },
    remedies={"dilution": "should_accept_fn of the workflow: refuse groups whose rewards are equal",
              "dead groups": "should_accept_fn of the workflow, to refuse groups whose rewards are equal, prompts of "
              "middling difficulty, or a larger gconfig.n_samples",
              "clip": "actor.ppo_n_minibatches above 1, to reuse a batch; actor.eps_clip acts only then",
              "updates": "fewer updates per batch: a smaller actor.ppo_n_minibatches"},
    rollouts="`rollout.dump_to_file`: LOGS/rollout/VERSION/TASK.jsonl",
    facts={
        "method": areal_method,
        "loss": lambda s: (f"reward_norm={s.word('actor.reward_norm.mean_level')}/"
                           f"{s.word('actor.reward_norm.std_level')}"),
        # Without recompute_logprob the ratio is taken against the sampler, and is not 1 at the first update either.
        "updates": lambda s: int(s.number("actor.ppo_n_minibatches")) if s.switch("actor.recompute_logprob") else None,
        "beta": lambda s: 0.0,  # KL is in the reward
        "group": lambda s: s.number("gconfig.n_samples"),
        **NOTHING,
        "limit": lambda s: s.number("gconfig.max_new_tokens"),
        "dead_counted": lambda s: False,
        "per_token": lambda s: True,
        "sampler": lambda s: True,
        "horizon": lambda s: None,
    },)
