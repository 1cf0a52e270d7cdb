"""TRL's loop with a loss and a credit of ours.

    ScopedGRPOTrainer(model=..., args=..., reward_funcs=..., train_dataset=..., method="gspo", credit="prefix_tree")

Credit and the weight α of every token are fixed once, on the whole generation of all ranks, and shuffled with the rows:
accumulation, minibatches and ranks change neither, whatever a method's denominators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl import DPOTrainer, GRPOTrainer

from creditscope.batch.rollouts import Rollouts
from creditscope.credit import find_estimator
from creditscope.credit.tools import Tools
from creditscope.errors import CreditscopeError
from creditscope.lab.rollout import step_tensors
from creditscope.methods.axes import OWN_CREDIT, Method
from creditscope.methods.find import find
from creditscope.objective.weights import aggregate, alpha, kept, with_limit
from creditscope.plugins.trl import batch, names
from creditscope.plugins.trl.callback import ScopeCallback
from creditscope.plugins.trl.passes import Inputs, chosen, entropy, logits, score
from creditscope.policy.loading import Policy
from creditscope.runs import schema
from creditscope.tasks import Step, Verdict
from creditscope.tasks.worker import check_steps

Judge = Callable[[str, Mapping[str, Any]], Sequence[Sequence[Any]]]
"""(text of the answer, row of the dataset) -> [[start, end, reward], ...], or [start, end, reward, state]."""

DECIDED = ("loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level", "scale_rewards",
           "off_policy_mask_threshold", "top_entropy_quantile", "multi_objective_aggregation", "use_liger_kernel",
           "use_bias_correction_kl", "sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos",
           "vespo_k_neg", "vespo_lambda_neg", "entropy_coef", "use_adaptive_entropy", "router_aux_loss_coef")
"""Settings of TRL's loss, which the method's row decides."""


class CreditMixin:
    """Before a GRPOTrainer: `class Mine(CreditMixin, GRPOTrainer)`. Its loss is a row of the table.

    `method` and `credit` are written as for `creditscope lab train`; `steps` gives the steps of an answer, for credits
    that need them. β is TRL's: `GRPOConfig(beta=...)`. The rest are ScopeCallback's; its readings here take
    all groups.
    """

    def __init__(self, *args: Any, method: str = "grpo", credit: str | None = None, steps: Judge | None = None,
                 every: int = 10, out: str | Path | None = None, gram: bool = True,
                 tell: Callable[[dict[str, Any]], None] | None = None, config: Mapping[str, Any] | None = None,
                 alarm: bool = True, stop_on: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names.check_trainer(self)
        if isinstance(self, DPOTrainer):
            raise CreditscopeError("CreditMixin gives credit to answers that a trainer samples, and a DPOTrainer "
                                   "samples none; put it before a GRPOTrainer, or use ScopeCallback")
        names.require(type(self).__name__, self, names.OVERRIDDEN)
        here: Any = self
        self.row: Method = row_for(method, here)
        self.credit = credit or OWN_CREDIT
        self._estimator, self._steps = find_estimator(self.credit), steps
        gives = {"entropy", "collision"} | ({"steps", "states"} if steps else set())
        self._estimator.row.require(frozenset(gives), "TRL's trainer" if steps else "TRL's trainer (without steps=)")
        if self.row.external:
            raise CreditscopeError(f"method {method!r} takes its credit from a critic, and TRL's trainer has none; "
                                   f"choose another of: creditscope list methods")
        self.scope = ScopeCallback(here, every=every, out=out, groups=None, gram=gram, tell=tell, config=config,
                                   alarm=alarm, stop_on=stop_on)
        here.add_callback(self.scope)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        here: Any = self
        if not here.model.training:
            return found
        made = batch.numbered(here, found)
        if made.metrics[schema.REWARD_ERRORS]:
            raise CreditscopeError(f"{made.metrics[schema.REWARD_ERRORS]} answers have no reward: no function gave a "
                                   f"number, and the table has no rule for that. Return 0.0 in place of None")
        whole = self._whole(inputs, found, made)
        credit = self._estimator(self.row, whole, _Progress(here))
        keep = kept(self.row, whole, credit)
        # Ranks average their gradients, so weights among all rows are multiplied by the number of ranks.
        ranks = here.accelerator.num_processes
        mine, width = found[batch.ROW], found["completion_ids"].shape[1]
        found["advantages"] = credit[mine, :width]
        if whole.step is not None:
            found |= {key: getattr(whole, name)[mine] for name, key in batch.LABELS.items()
                      if getattr(whole, name) is not None}
            found[batch.LABELS["step"]] = found[batch.LABELS["step"]][:, :width]
        if not self.row.local:
            for key, weigh in ((batch.ALPHA, alpha), (batch.SHARE, aggregate)):
                found[key] = weigh(self.row, whole, keep, torch.float64)[mine, :width] * ranks
        return found

    def _compute_loss(self, model: Any, inputs: Inputs) -> Tensor:
        here: Any = self
        if not here.model.training:  # evaluation is TRL's own: its answers have no weights of ours
            loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
            return loss
        # The observer needs whole groups, and accumulation spreads their rows over micro-batches: then the callback
        # runs a pass of its own.
        whole = here.args.steps_per_generation == 1 and here.accelerator.num_processes == 1 and not here.args.fp16
        inside = whole and self.scope.open()
        with here.accelerator.autocast():
            z = logits(model, inputs, here.temperature)
        live = chosen(z, inputs)
        if inside:
            self.scope.seen(inputs, live)
        self._log("entropy", entropy(z), inputs)
        if not bool(batch.mask_of(inputs).any()):
            return live.sum() * 0.0
        window = batch.window_of(here, self.row, [inputs], self.scope.generations.made, None)
        if self.row.has_loss_kl and self.row.kl_to == "ref":
            apart = inputs["ref_per_token_logps"] - live.detach()
            self._log("kl", apart.exp() - apart - 1, inputs)
        return -batch.objective(window, live)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().training_step(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self.scope.abort()
            raise

    def _clip_grad_norm(self, model: Any) -> Any:
        self.scope.close()
        return super()._clip_grad_norm(model)  # type: ignore[misc]

    def _whole(self, asked: list[dict[str, Any]], found: Inputs, made: batch.Generation) -> Rollouts:
        """The generation of all ranks, in the order of its numbers, with what method and credit need."""
        here: Any = self
        keys = ("completion_ids", "completion_mask", "tool_mask", "ref_per_token_logps", batch.ROW)
        mine = {key: everywhere(here, found[key]) for key in keys if found.get(key) is not None}
        extra: dict[str, Tensor] = {}
        method = self.row
        if {"entropy", "collision"} & {*self._estimator.row.needs} or method.has_reward_kl or method.entropy_cost \
                or method.keep == "low_entropy":
            extra |= {name: everywhere(here, x) for name, x in vars(score(here, found)).items()}
        if self._steps is not None:
            told = zip(("step", "step_reward", "step_state"), self._labels(self._steps, asked, found), strict=True)
            extra |= {name: everywhere(here, x, 0 if name == "step_reward" else -1) for name, x in told
                      if x is not None}
        return replace(batch.rollouts_of(mine, made, None), **extra)  # type: ignore[arg-type]

    def _labels(self, steps: Judge, asked: list[dict[str, Any]],
                found: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        here: Any = self
        policy = Policy("the trainer's", here.model, here.processing_class)
        mask = batch.mask_of(found)
        verdicts, pieces = [], []
        for tokens, chose, row in zip(found["completion_ids"], mask, asked, strict=True):
            ids = tokens[chose].tolist()
            text = policy.decode(ids)
            try:
                spans = check_steps(steps(text, row), len(text))
            except (TypeError, ValueError) as error:
                raise CreditscopeError(f"steps= {error}") from error
            verdicts.append(Verdict(0.0, tuple(Step(*span) for span in spans)))
            pieces.append(policy.pieces(ids))
        return step_tensors(verdicts, pieces, mask.shape[1])

    def _log(self, name: str, values: Tensor, inputs: Inputs) -> None:
        """Add the mean over chosen tokens to TRL's logs."""
        here: Any = self
        mask = batch.mask_of(inputs)
        totals = here.accelerator.reduce(torch.stack([values.detach().masked_fill(~mask, 0.0).sum().double(),
                                                      mask.sum().double()]), reduction="sum")
        here._metrics["train"][name].append(float(totals[0] / totals[1].clamp(min=1)))


class ScopedGRPOTrainer(CreditMixin, GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer with any method and credit of the table, under the microscope."""


class _Progress(Tools):
    def __init__(self, trainer: Any) -> None:
        self.progress = trainer.state.global_step / max(1, trainer.state.max_steps)


def row_for(method: str, trainer: Any) -> Method:
    """The row of that name with TRL's β and limit. Settings of TRL that the row decides are refused."""
    args = trainer.args
    defaults = {f.name: f.default for f in fields(args)}
    for name in DECIDED:
        if name in defaults and getattr(args, name) != defaults[name]:
            raise CreditscopeError(f"{name}={getattr(args, name)!r}: the row of method {method!r} decides that; leave "
                                   f"it out, or give a row of your own: creditscope list methods")
    row = with_limit(find(method), trainer.max_completion_length)
    if row.linked:
        raise CreditscopeError(f"method {method!r} learns from pairs, and GRPOTrainer has none; use TRL's DPOTrainer "
                               f"with ScopeCallback, or creditscope lab train --method {method}")
    if args.beta and row.kl == "none":
        raise CreditscopeError(f"beta={args.beta}: method {method!r} has no KL term; set beta=0, or choose one that "
                               f"has, such as grpo")
    if getattr(trainer, "aux_loss_enabled", False):
        raise CreditscopeError("the model's router has a loss of its own, which no row has; set router_aux_loss_coef=0")
    if args.use_vllm and args.vllm_importance_sampling_correction:
        raise CreditscopeError("vllm_importance_sampling_correction=True multiplies TRL's own loss; set it to False")
    return row.replace(beta=args.beta) if args.beta else row


def everywhere(trainer: Any, x: Tensor, pad: int = 0) -> Tensor:
    """The rows of all ranks on this one's device, right-padded to one width."""
    x = x.to(trainer.accelerator.device)
    if trainer.accelerator.num_processes == 1:
        return x
    if x.dim() > 1:
        x = trainer.accelerator.pad_across_processes(x, dim=1, pad_index=pad)
    found: Tensor = trainer.accelerator.gather(x)
    return found
