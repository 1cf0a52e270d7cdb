"""What a run is made of before its first step: optimiser, probe, critic; settings that cannot work are refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.nn.utils import get_total_norm

from creditscope.credit import Chosen
from creditscope.errors import CreditscopeError
from creditscope.lab.tools import task_gives
from creditscope.optimizer.probe import Probe
from creditscope.optimizer.scale import Clipping, RewardParts
from creditscope.optimizer.table import OPTIMIZERS
from creditscope.policy.critic import Critic
from creditscope.policy.loading import Policy
from creditscope.runs.config import Config
from creditscope.runs.settings import MOST_DRAWS
from creditscope.tasks import Problem, Task

CONTINUING = MOST_DRAWS + 1  # the "attempt" whose random numbers continue answers


def make_optimizer(policy: Policy, config: Config) -> torch.optim.Optimizer:
    """The optimiser of the policy's weights; of float32 copies of them where they are in half precision."""
    policy.keep_masters()
    parameters = list(policy.trainable().values())
    row = OPTIMIZERS[config.optimizer]
    own: dict[str, Any] = {"betas": (config.beta1, config.beta2), "eps": config.eps} if row.adaptive else {
        "momentum": config.momentum}
    made: torch.optim.Optimizer = getattr(torch.optim, row.kind)(parameters, lr=config.lr,
                                                                 weight_decay=config.weight_decay, **own)
    made.register_step_post_hook(lambda *_: policy.spread())
    return made


def make_probe(policy: Policy, optimizer: torch.optim.Optimizer, config: Config) -> Probe | None:
    """The probe of --probe. The part of the gradient that does not scale with reward is followed by `full` alone:
    a KL term takes a pass of its own to tell apart."""
    if config.probe == "off":
        return None
    parts = RewardParts(optimizer) if config.probe == "full" and config.unscaled else None
    clipping = None if config.clip_norm is None else Clipping(config.clip_norm)
    return Probe(optimizer, policy.trainable().items(), config.probe, config.probe_every, clipping, parts)


def make_critic(policy: Policy, config: Config, own: Chosen, others: Sequence[Chosen]) -> Critic | None:
    """The critic that the run's own credit needs; what needs one in a run without is refused."""
    if "critic" in own.row.needs:
        # The critic's targets are discounted as the estimator's credit is.
        return Critic(policy, kind=config.critic, lr=config.critic_lr, gamma=float(own.options.get("gamma", 1.0)),
                      seed=config.seed)
    if config.critic_warmup:
        raise CreditscopeError(f"--critic-warmup {config.critic_warmup}: --credit {config.estimator} has no critic; "
                               f"leave it out, or say what it needs: needs = ('critic',)")
    for other in others:
        if "critic" in other.row.needs:
            raise CreditscopeError(f"--also {other.spec}: it needs a critic, and --credit {config.estimator} trains "
                                   f"none; leave it out, or train with --credit gae")
    return None


def check_problems(task: Task, config: Config, estimator: Chosen) -> None:
    """Try the first problems before anything is written: a wrong path is found now, not in a run's folder."""
    first = next(iter(task.problems("train", config.seed)), None)
    if first is None:
        raise CreditscopeError(f"task {config.task!r} has no train problems")
    source = f"task {config.task!r}" if config.learned is None else f"--reward {config.reward}"
    estimator.row.require(task_gives(task, first, config.learned is not None), source)
    if config.eval_problems and next(iter(task.problems("test")), None) is None:
        raise CreditscopeError(f"task {config.task!r} has no test problems; give it some, or --eval-problems 0")


def require_finite(policy: Policy, config: Config) -> None:
    """Refuse weights that an update has spoilt."""
    if math.isfinite(float(get_total_norm([p.detach() for p in policy.trainable().values()]))):
        return  # the device is waited for once, not for each weight
    spoilt = next((name for name, p in policy.trainable().items() if not bool(torch.isfinite(p).all())), None)
    if spoilt is not None:
        raise CreditscopeError(f"the update has made {spoilt} infinite or NaN; the checkpoints are from before. Lower "
                               f"--lr {config.lr:g}, or raise --eps {config.eps:g}")


def problem_stream(task: Task, seed: int, skip: int) -> Iterator[Problem]:
    """Train problems without end, epoch after epoch where the task has a last one, from number `skip` on."""

    def endless() -> Iterator[Problem]:
        epoch = 0
        while True:
            yield from task.problems("train", seed + epoch)
            epoch += 1

    return islice(endless(), skip, None)


def stream_seed(seed: int, step: int, attempt: int) -> int:
    """A seed of its own for every draw, so that a resumed run needs no generator state."""
    return (seed * 1_000_003 + step) * (CONTINUING + 1) + attempt
