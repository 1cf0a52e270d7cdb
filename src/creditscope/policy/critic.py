"""V, a learned value function beside the policy, with a loss of its own: the policy's gradient stays Σ w ∇log π.

    V(s_t) = head(h_t)                       h_t: the output embedding's input where token t is predicted
    min_φ 1/Σ_i L_i Σ_it (V_φ(s_it) − G_it)²        G_it = γ^(chosen tokens after t) · r_i

The target is the return to go, λ = 1, whatever the λ of the policy's credit, so that it holds none of the critic's own
errors (VAPO's decoupled GAE, arXiv:2504.05118). KL in the reward is not in it; `credit.gae` subtracts that itself.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError, unknown
from creditscope.files.memory import enough_memory
from creditscope.policy.loading import Policy
from creditscope.policy.logp import model_inputs
from creditscope.runs import schema

KINDS = {
    "head": "a small network on the policy's own last hidden state, through which no gradient passes",
    "model": "a copy of the policy as it is now, which trains whatever the policy trains, with the same head on top",
}
LR = {"head": 1e-3, "model": 3e-4}


class Critic:
    """A value head, on the policy's states or on those of a copy, with an optimiser of its own.

    The head is float32 at least. Its last layer starts at 0 and its bias at the mean return of the first batch, so that
    V starts as a constant. A head may stay near that constant, as on the packaged model: read
    critic/explained_variance before using λ < 1.
    """

    def __init__(self, policy: Policy, *, kind: str = "head", lr: float | None = None, epochs: int = 1,
                 width: int = 256, gamma: float = 1.0, seed: int = 0) -> None:
        if kind not in KINDS:
            raise unknown("critic", kind, KINDS)
        lr = LR[kind] if lr is None else lr
        for name, count in {"epochs": epochs, "width": width}.items():
            if count < 1:
                raise CreditscopeError(f"{name} of the critic must be at least 1, got {count}")
        if not 0 < lr < math.inf:
            raise CreditscopeError(f"lr of the critic must be above 0 and finite, got {lr}")
        if not 0 <= gamma <= 1:
            raise CreditscopeError(f"gamma of the critic must be in 0 .. 1, got {gamma}; give the one that gae has")
        self.kind, self.epochs, self.gamma = kind, epochs, float(gamma)
        self._body = policy if kind == "head" else _copy(policy)
        self._head = _head(policy, width, seed)
        self.optimizer = torch.optim.AdamW(self.trainable().values(), lr, weight_decay=0.0)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name -> parameter, without the policy's own."""
        body = {} if self.kind == "head" else self._body.trainable()
        return {f"head.{name}": p for name, p in self._head.named_parameters()} | {
            f"body.{name}": p for name, p in body.items()}

    @torch.no_grad()
    def values(self, rollouts: Rollouts, parts: int = 1) -> Tensor:
        """(B, T) V before each chosen token, 0 where the mask is False; in `parts` micro-batches."""
        found = [self._value(self._states(rollouts.rows(rows))) for rows in torch.arange(len(rollouts)).chunk(parts)]
        flat = torch.cat(found)
        out = flat.new_zeros(rollouts.mask.shape)
        out[rollouts.mask] = flat
        return out

    @enough_memory("fitting the critic", "raise --accumulate, or lower --prompts, --group or --max-tokens")
    def fit(self, rollouts: Rollouts, parts: int = 1) -> dict[str, float]:
        """`epochs` steps on the whole batch in `parts` micro-batches; returns the fit of V before the first step.

            critic/loss                  mean (V − G)² over the chosen tokens
            critic/explained_variance    1 − Var(G − V)/Var(G); absent where all returns are equal
        """
        chunks = torch.arange(len(rollouts)).chunk(parts)
        # The policy does not change here, so the states under a head are computed once for all epochs.
        kept = [self._states(rollouts.rows(rows)) for rows in chunks] if self.kind == "head" else []
        returns = reward_to_go(rollouts, self.gamma)
        targets = [returns[rows][rollouts.mask[rows]].to(self._bias.dtype) for rows in chunks]
        target = torch.cat(targets)
        shift = self._start(target.mean())
        old: list[Tensor] = []
        for epoch in range(self.epochs):
            self.optimizer.zero_grad(set_to_none=True)
            for i, rows in enumerate(chunks):
                value = self._value(kept[i] if kept else self._states(rollouts.rows(rows)))
                if epoch == 0:
                    old.append(value.detach())
                loss = (value - targets[i]).square().sum() / len(target)
                loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return _quality(torch.cat(old) - shift, target)

    @property
    def _bias(self) -> nn.Parameter:
        last = self._head[-1]
        assert isinstance(last, nn.Linear)
        return last.bias

    @torch.no_grad()
    def _start(self, mean: Tensor) -> Tensor:
        """Set the bias to the first batch's mean return; return the change, 0 in later batches.

        The optimiser's state tells whether there was a first batch, so a restored checkpoint knows too.
        """
        if self.optimizer.state:
            return torch.zeros_like(mean)
        shift = mean - self._bias
        self._bias.copy_(mean)
        return shift

    def _value(self, states: Tensor) -> Tensor:
        value: Tensor = self._head(states.to(self._bias.dtype)).squeeze(1)
        return value

    def _states(self, rollouts: Rollouts) -> Tensor:
        """(N, d) h_t for the N chosen tokens, row by row; under a head without a graph behind them."""
        tokens, mask = rollouts.tokens, rollouts.mask
        inputs = model_inputs(rollouts.prompt_ids, tokens, mask, self._body.device)
        seen: list[Tensor] = []

        def cut(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            seen.append(args[0])
            return (args[0][:, :1], *args[1:])  # the logits are not used: one column is enough

        handle = self._body.model.get_output_embeddings().register_forward_pre_hook(cut)
        try:
            with self._body.active(), torch.set_grad_enabled(self.kind == "model" and torch.is_grad_enabled()):
                self._body.model(**inputs, use_cache=False, logits_to_keep=tokens.shape[1] + 1)
        finally:
            handle.remove()
        (hidden,) = seen
        # The last column predicts what would come after the completion; the one before it predicts the last token.
        return hidden[:, -tokens.shape[1] - 1:-1][mask]


def reward_to_go(rollouts: Rollouts, gamma: float) -> Tensor:
    """(B, T) G_it = γ^(chosen tokens after t) · r_i, 0 where the mask is False: δ = 0 in `credit.gae` for V = G."""
    after = (rollouts.mask.flip(1).cumsum(1).flip(1) - 1).clamp(min=0)
    go: Tensor = rollouts.reward[:, None] * torch.full_like(rollouts.reward, gamma)[:, None].pow(after)
    return go.masked_fill(~rollouts.mask, 0.0)


def _quality(value: Tensor, target: Tensor) -> dict[str, float]:
    value, target = value.double(), target.double()
    error = target - value
    out: dict[str, float] = {schema.CRITIC_LOSS: float(error.square().mean())}
    if bool((target != target[0]).any()):
        out[schema.CRITIC_EXPLAINED_VARIANCE] = float(1 - error.var(correction=0) / target.var(correction=0))
    return out


def _head(policy: Policy, width: int, seed: int) -> nn.Sequential:
    """LayerNorm → Linear → GELU → Linear(1) of the model's width, the last layer 0."""
    inputs = policy.model.get_output_embeddings().weight.shape[1]
    # torch.manual_seed would also seed the GPUs, which are sampled from.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        first, last = nn.Linear(inputs, width), nn.Linear(width, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    dtype = torch.promote_types(next(policy.model.parameters()).dtype, torch.float32)
    return nn.Sequential(nn.LayerNorm(inputs), first, nn.GELU(), last).to(policy.device, dtype)


def _copy(policy: Policy) -> Policy:
    """A copy of the policy's model; with LoRA its adapters are trained and the base stays frozen."""
    model = copy.deepcopy(policy.model)
    output = model.get_output_embeddings()
    if output.weight is not model.get_input_embeddings().weight:
        output.requires_grad_(False)  # V comes from its input: it would be kept in the checkpoint and never learn
    return Policy(f"{policy.name} (critic)", model, policy.tokenizer, policy.chat, policy.lora)
