"""From TRL's buffered inputs to Rollouts, with the weight that TRL's loss gives each token.

TRL shuffles the rows of a generation over its micro-batches. `number` adds a number to every generated row, which TRL
shuffles along; group, reward and answer are found by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from creditscope.batch.answers import answer_metrics, text_hashes
from creditscope.batch.answers import numbered as same_text
from creditscope.batch.metrics import signal, untrained
from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method
from creditscope.objective.surrogate import effective_credit, weighted
from creditscope.objective.weights import aggregate, alpha, kept
from creditscope.plugins.trl import names
from creditscope.plugins.trl.passes import Inputs, take
from creditscope.policy.loading import Policy
from creditscope.runs import schema

ROW, ALPHA, SHARE = "creditscope_row", "creditscope_alpha", "creditscope_share"
"""Our keys in TRL's batch: a row's number in the generation, and the weights that the mixin fixed for it."""
LABELS = {name: f"creditscope_{name}" for name in ("step", "step_reward", "step_state")}
"""Field of Rollouts -> our key, where the mixin knows steps."""


@dataclass(frozen=True)
class Generation:
    """The answers that TRL generated last, all ranks together, in the order of their numbers."""

    reward: Tensor  # (N,) the weighted sum of its reward functions; 0 where none of them gave a number
    size: int  # R
    metrics: dict[str, Any]  # metrics that do not depend on the loss
    prompts: Sequence[Any] = ()  # the hash of each group's prompt

    @property
    def group(self) -> Tensor:
        """(N,): TRL generates the R answers to a prompt one after another."""
        return torch.arange(len(self.reward)) // self.size


def number(trainer: Any, seen: Callable[[Generation], None]) -> None:
    """Wrap the trainer's generation: rows are numbered, and `seen` is called with each `Generation`."""
    inner = trainer._generate_and_score_completions

    @wraps(inner)
    def outer(inputs: Any) -> dict[str, Any]:
        found: dict[str, Any] = inner(inputs)
        if trainer.model.training:
            seen(numbered(trainer, found))
        return found

    trainer._generate_and_score_completions = outer


def numbered(trainer: Any, found: dict[str, Any]) -> Generation:
    """Add the numbers to a batch that was just generated; what TRL logged of it."""
    names.require("a batch", found, names.batch_keys(trainer))
    here = len(found["completion_ids"])
    first, rows = trainer.accelerator.process_index * here, trainer.accelerator.num_processes * here
    found[ROW] = torch.arange(first, first + here, device=found["completion_ids"].device)
    each = torch.tensor([list(logged)[-rows:] for logged in trainer._logs["rewards"].values()]).T
    reward = (each * torch.as_tensor(trainer.reward_weights).cpu()).nansum(dim=1)
    made = Generation(reward, int(trainer.num_generations), {})
    scored = ~each.isnan().all(dim=1)
    about = reward_metrics(made, scored)
    logged = {schema.LENGTH_MEAN: "mean_length", schema.LENGTH_MAX: "max_length",
              schema.LENGTH_TRUNCATED: "clipped_ratio"}
    about |= {ours: trainer._metrics["train"][f"completions/{theirs}"][-1] for ours, theirs in logged.items()
              if trainer._metrics["train"].get(f"completions/{theirs}")}
    about |= {schema.ROLLOUTS_SAMPLED: rows, schema.ROLLOUTS_USED: rows, schema.ROLLOUTS_SPENT: rows}
    about[schema.REWARD_ERRORS] = int((~scored).sum())
    if about[schema.REWARD_ERRORS]:
        about[schema.REWARD_FIRST_ERROR] = "no reward function gave a number"
    about |= untrained_of(trainer, found)
    prompts, answers, rest = texts_of(trainer, found, rows)
    if bool(scored.any()):
        about |= answer_metrics(*(column[scored] for column in (answers, reward, made.group, *rest)))
    return replace(made, metrics=about, prompts=prompts[::made.size])


def reward_metrics(made: Generation, scored: Tensor) -> dict[str, Any]:
    """Rewards and groups of the answers that have a reward.

    TRL leaves an answer for which every function returned None out of its group's mean and gives it A = 0, so a group
    is live where two rewards in it differ; one without any reward is dead.
    """
    count = int(scored.sum())
    groups = len(made.reward) // made.size
    about: dict[str, Any] = {schema.SIGNAL_GROUPS: groups, schema.SIGNAL_LIVE_GROUPS: 0, schema.SIGNAL_DEAD_GROUPS: 1.0}
    if count:
        blank = torch.ones(count, 1, dtype=torch.bool)
        known = signal(Rollouts(tokens=blank.long(), mask=blank, logp=torch.zeros(count, 1),
                                reward=made.reward[scored], group=made.group[scored]))
        live = known[schema.SIGNAL_LIVE_GROUPS]
        about = {name: value for name, value in known.items() if not name.startswith("length/")} | {
            schema.SIGNAL_GROUPS: groups, schema.SIGNAL_DEAD_GROUPS: 1 - live / groups}
    return about


def texts_of(trainer: Any, found: Inputs, rows: int) -> tuple[list[Any], Tensor, tuple[Tensor, ...]]:
    """A hash of each row's prompt, a number for each distinct answer, and lengths and cut answers in one process.

    Among many ranks these are the texts that TRL has gathered for its own logs: a step without a reading sends nothing
    more. Two answers are then equal where their texts are, special tokens left out.
    """
    if trainer.accelerator.num_processes > 1:
        prompts, answers = (list(trainer._logs[name])[-rows:] for name in ("prompt", "completion"))
        # A conversation is a list of messages, which has no hash of its own.
        return list(map(repr, prompts)), torch.tensor([hash(repr(text)) for text in answers]), ()
    hashes, about = answers_of(trainer, found)
    asked = text_hashes(found["prompt_ids"], found["prompt_mask"].bool())
    return [tuple(row) for row in asked.tolist()], same_text(hashes), (about[:, 0], about[:, 1].bool())


def answers_of(trainer: Any, found: Inputs) -> tuple[Tensor, Tensor]:
    """(B, 2) the hash of each answer; (B, 2) its length, and 1 where it was cut at the limit.

    With `mask_truncated_completions` TRL sets the mask of a cut answer to 0; its text ends before the padding.
    """
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    ids, inside, own = found["completion_ids"], found["completion_mask"].bool(), mask_of(found)
    column = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    masked = ~inside.any(dim=1, keepdim=True)
    unpadded = column <= ((ids != tokenizer.pad_token_id) * column).amax(dim=1, keepdim=True)
    inside = torch.where(masked, unpadded, inside)
    length = torch.where(masked, unpadded, own).sum(dim=1)
    last = ids.gather(1, (inside * column).amax(dim=1, keepdim=True).sub(1).clamp(min=0)).squeeze(1)
    # TRL's own test of a cut answer, for the share that it logs.
    ends = getattr(trainer, "eos_token_ids", None) or [tokenizer.eos_token_id]
    stops = torch.tensor([*ends, tokenizer.pad_token_id], device=ids.device)
    cut = inside.any(dim=1) & ~torch.isin(last, stops)
    return text_hashes(ids, inside), torch.stack([length, cut.long()], dim=1).cpu()


def untrained_of(trainer: Any, found: Inputs) -> dict[str, Any]:
    """`batch.metrics.untrained` of this rank's rows: sampled tokens with A ≠ 0 that the loss's mask leaves out, save a
    tool's output and cut answers that TRL was told to mask."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    ids, credit = found["completion_ids"], found["advantages"]
    column = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    given = column <= ((ids != tokenizer.pad_token_id) * column).amax(dim=1, keepdim=True)
    given = given & ((credit if credit.dim() > 1 else credit[:, None]) != 0)
    if found.get("tool_mask") is not None:
        given = given & found["tool_mask"].bool()
    if getattr(trainer.args, "mask_truncated_completions", False):
        given = given & (answers_of(trainer, found)[1][:, 1:] == 0).to(ids.device)
    return untrained(given, found["completion_mask"].bool())


@dataclass(frozen=True)
class Window:
    """The rows of one optimiser step of this rank, and all of its loss but the live log-probs.

        −loss = Σ_it α_it · bound(s_it, A_it) − β Σ_it a_it · R_it
    """

    method: Method
    inputs: dict[str, Any]
    rollouts: Rollouts  # their `logp` is 0; `sampled_by` sets it to log π_old
    credit: Tensor  # (B, T) A
    alpha: Tensor  # (B, T) α over the whole step: accumulation, ranks and TRL's own counts included
    share: Tensor  # (B, T) a: α without token weights
    old: Tensor | None  # (B, T) log π_old; (B,) of whole answers for RLOO; None where π_old is the live policy

    def rows(self, index: Tensor) -> Window:
        return replace(self, inputs=take(self.inputs, index), rollouts=self.rollouts.rows(index),
                       credit=self.credit[index], alpha=self.alpha[index], share=self.share[index],
                       old=None if self.old is None else self.old[index])

    @property
    def fresh(self) -> bool:
        return self.old is None

    def w(self, live: Tensor) -> Tensor:
        return effective_credit(lambda lp: objective(self, lp), live)

    def value(self, live: Tensor) -> float:
        return float(objective(self, live))

    def sampled_by(self, live: Tensor) -> Rollouts:
        live = live.detach().masked_fill(~self.rollouts.mask, 0.0)
        if self.old is None:
            old = live
        elif self.old.dim() == 1:
            # RLOO's ratio is the answer's: its log may be spread over the tokens in any way.
            missing = (self.old - live.sum(dim=1)) / self.rollouts.lengths.clamp(min=1)
            old = (live + missing[:, None]).masked_fill(~self.rollouts.mask, 0.0)
        else:
            old = self.old
        return replace(self.rollouts, logp=old)


def objective(window: Window, live: Tensor) -> Tensor:
    """J = Σ_it α_it · bound(s_it, A_it) − β Σ_it a_it · R_it: `surrogate` with weights of more rows than these."""
    rollouts = window.sampled_by(live)
    live = live.to(torch.promote_types(live.dtype, torch.float32)).masked_fill(~rollouts.mask, 0.0)
    old = rollouts.logp.to(live.dtype).masked_fill(~rollouts.mask, 0.0)
    return weighted(window.method, live, old, rollouts, *(x.to(live.dtype) for x in (
        window.credit, window.alpha, window.share)))


def micro_batches(trainer: Any, ended: bool = True) -> list[Inputs]:
    """The micro-batches since the trainer's last optimiser step; `ended` says whether the last one's step has."""
    every = trainer.args.steps_per_generation
    taken = trainer.current_gradient_accumulation_steps
    last = trainer._step if ended else trainer._step + 1  # TRL counts a micro-batch when its step has ended
    return [trainer._buffered_inputs[i % every] for i in range(last - taken, last)]


def window_of(trainer: Any, method: Method, parts: Sequence[Inputs], made: Generation,
              policy: Policy | None) -> Window:
    """The rows of these micro-batches as one; `policy` decodes the texts for a record."""
    if not any(bool(mask_of(part).any()) for part in parts):
        raise CreditscopeError("no token of the step is learned from: every answer was masked, or is empty")
    inputs = {name: torch.cat([part[name] for part in parts]) for name, value in parts[0].items()
              if isinstance(value, Tensor) and value.dim()}
    rollouts = rollouts_of(inputs, made, policy)
    if ALPHA in inputs:  # the mixin's own loss: weights fixed on the whole generation
        factor = trainer.args.steps_per_generation / trainer.current_gradient_accumulation_steps
        weights = inputs[ALPHA] * factor, inputs[SHARE] * factor
    else:
        each = [_weights(trainer, method, part, made) for part in parts]
        weights = torch.cat([a for a, _ in each]), torch.cat([s for _, s in each])
    credit = inputs["advantages"]
    credit = credit[:, None].expand_as(rollouts.mask) if credit.dim() == 1 else credit
    if "importance_sampling_ratio" in inputs:  # of vLLM: a factor on the policy term, so a factor on A
        credit = credit * inputs["importance_sampling_ratio"]
    old = inputs.get("old_per_token_logps", inputs.get("old_logps"))
    return Window(method, inputs, rollouts, credit.masked_fill(~rollouts.mask, 0.0), *weights, old)


def rollouts_of(inputs: Inputs, made: Generation, policy: Policy | None) -> Rollouts:
    """A numbered batch as Rollouts; `policy` decodes the texts."""
    mask, row = mask_of(inputs), inputs[ROW].cpu()
    found: dict[str, Any] = {"tokens": inputs["completion_ids"], "mask": mask,
                             "logp": torch.zeros(mask.shape, device=mask.device),
                             "reward": made.reward[row].to(mask.device), "group": made.group[row].to(mask.device)}
    known = {"ref_logp": "ref_per_token_logps"} | LABELS
    found |= {name: inputs[key] for name, key in known.items() if inputs.get(key) is not None}
    if policy is not None:
        inside = torch.arange(mask.shape[1], device=mask.device) < Rollouts(**found).extents[:, None]
        ids = [x[m].tolist() for x, m in zip(inputs["completion_ids"], inside, strict=True)]
        prompts = [x[m.bool()].tolist() for x, m in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)]
        found |= {"prompt": [policy.decode(x) for x in prompts], "text": [policy.decode(x) for x in ids],
                  "pieces": [policy.pieces(x) for x in ids]}
    return Rollouts(**found)


def mask_of(inputs: Inputs) -> Tensor:
    """(B, T) True where the policy chose the token: not on padding, nor on a tool's output."""
    mask: Tensor = inputs["completion_mask"].bool()
    return mask if inputs.get("tool_mask") is None else mask & inputs["tool_mask"].bool()


def _weights(trainer: Any, method: Method, part: Inputs, made: Generation) -> tuple[Tensor, Tensor]:
    """(α, a) of a micro-batch under TRL's own loss: an equal part of the step, or by TRL's count of tokens; 0 where no
    token was chosen."""
    mask = mask_of(part)
    if not bool(mask.any()):
        return torch.zeros_like(mask, dtype=torch.float64), torch.zeros_like(mask, dtype=torch.float64)
    rollouts = rollouts_of(part, made, None)
    credit = torch.zeros_like(rollouts.logp)
    keep = kept(method, rollouts, credit)
    steps = trainer.current_gradient_accumulation_steps
    if method.aggregate == "token_mean" and not method.local:
        tokens = max(float(part["num_items_in_batch"]), 1.0) / trainer.accelerator.num_processes
        scale = int(rollouts.lengths.sum()) / (tokens * steps / trainer.args.steps_per_generation)
    else:
        scale = 1 / steps
    return (alpha(method, rollouts, keep, torch.float64) * scale,
            aggregate(method, rollouts, keep, torch.float64) * scale)
