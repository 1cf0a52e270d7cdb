"""The token matrix: one row w_it ∇_θ log π(y_it) a token, (ΣL × P). Its rows sum to rollouts, rollouts to the gradient.

Below the head a token's gradient has no cheap exact factor, since every later token reads it. So there are two doors:
`token_gram_head` is the whole Gram of the head's weight alone, nearly free, and biased as a picture of the model: what
the other layers do is not in it. `token_spectrum` is the whole model, exact, but only the leading singular values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from creditscope.errors import CreditscopeError

LogProbs = Callable[[dict[str, Tensor]], Tensor]
Parameters = Mapping[str, Tensor]


# The head alone.

def token_gram_head(hidden: Tensor, weight: Tensor, tokens: Tensor, w: Tensor, bias: Tensor | None = None,
                    temperature: float = 1.0, chunk: int = 8192) -> Tensor:
    """(n, n) the Gram of the head's share of the token rows, in float64: HEAD ONLY, not the model's.

    With logits z = W h / τ a token's gradient for W is δ hᵀ, δ = (e_y − π)/τ, so an entry is a product of dot products:

        K_ts = w_t w_s (h_t · h_s)(δ_t · δ_s)

    A bias adds 1 to h_t · h_s. `hidden` (n, d) enters the head at the position that predicts `tokens` (n,); `weight` is
    (V, d). No (n, V) array is made: the vocabulary is passed twice, `chunk` columns at a time. Where the head is tied
    to the embedding, the embedding's share is not in it.

    >>> h, y = torch.tensor([[2.0], [1.0]]), torch.tensor([0, 1])
    >>> token_gram_head(h, torch.zeros(2, 1), y, torch.ones(2)).tolist()    # π = ½: δ = ±(½, −½)
    [[2.0, -1.0], [-1.0, 0.5]]
    """
    _check_head(hidden, weight, tokens, w, bias, temperature)
    h, y, w = hidden.detach().double(), tokens, w.detach().double().to(hidden.device)
    normaliser = torch.full((len(h),), -torch.inf, dtype=torch.float64, device=h.device)
    for _, logits in _logits(h, weight, bias, temperature, chunk):
        normaliser = torch.logaddexp(normaliser, logits.logsumexp(dim=1))
    deltas = torch.zeros(len(h), len(h), dtype=torch.float64, device=h.device)
    for start, logits in _logits(h, weight, bias, temperature, chunk):
        delta = logits.sub_(normaliser[:, None]).exp_().neg_()
        here = ((y >= start) & (y < start + delta.shape[1])).nonzero()[:, 0]
        delta[here, y[here] - start] += 1
        deltas += delta @ delta.T
    inputs = h @ h.T if bias is None else h @ h.T + 1
    return inputs * deltas * torch.outer(w, w) / temperature**2


def _logits(h: Tensor, weight: Tensor, bias: Tensor | None, temperature: float,
            chunk: int) -> Iterator[tuple[int, Tensor]]:
    """(first column, float64 logits) of one piece of the vocabulary after another."""
    for start in range(0, len(weight), chunk):
        z = h @ weight[start : start + chunk].detach().double().T
        if bias is not None:
            z += bias[start : start + chunk].detach().double()
        yield start, z / temperature


# The whole model.

@dataclass(frozen=True, eq=False)
class TokenSpectrum:
    """The leading singular values of the token matrix as far as Lanczos got, and how far each can be off."""

    values: NDArray[np.float64]
    """σ₁ ≥ σ₂ ≥ ..., never above the true ones but for rounding."""
    residuals: NDArray[np.float64]
    """A singular value lies within this distance of the one given, as far as Lanczos goes; eps·σ₁ of the parameters'
    type is added for the rounding of the products, which in bfloat16 is all that matters."""
    matvecs: int
    """Products with J Jᵀ: each is a backward pass, and one through it."""
    tokens: int
    """Rows with credit other than 0: there are no more singular values than these."""
    tolerance: float

    @property
    def converged(self) -> NDArray[np.bool_]:
        """Whether the residual is within `tolerance` of σ₁."""
        return np.asarray(self.residuals <= self.tolerance * self.values[0], dtype=np.bool_)


def token_spectrum(logp_fn: LogProbs, params: Parameters, w: Tensor, k: int = 8, seed: int = 0,
                   steps: int | None = None, tolerance: float = 1e-6) -> TokenSpectrum:
    """The k leading singular values of diag(w) J, J = ∂ log π(y_t) / ∂θ over all of `params`, by Lanczos.

    `logp_fn` takes the parameters by name and returns (n,) log-probs; for a module it is
    `lambda p: chosen_logp(torch.func.functional_call(model, p, (ids,)).logits)`, in eval mode and outside a Microscope.
    Only v ↦ w∘J Jᵀ(w∘v) is needed: Jᵀ by a backward pass, J by a backward pass through that one, so no row is ever
    formed; the graphs of one forward and one backward pass are held meanwhile. It runs until the k residuals are within
    `tolerance` of σ₁, or for `steps` products: 3k + 30 unless told, and never more than there are live tokens (then all
    is exact). Equal values are found one at a time, as Lanczos breaks down.

    Fused attention kernels cannot be differentiated twice: `attn_implementation="sdpa"` is run on its mathematical
    kernel here, `"eager"` works as it is.

    >>> x, theta = torch.tensor([[3.0, 0.0], [0.0, 1.0]]), {"theta": torch.zeros(2)}
    >>> token_spectrum(lambda p: x @ p["theta"], theta, torch.tensor([1.0, -2.0]), k=2).values.round(6)
    array([3., 2.])
    """
    _check_params(params)
    credit = _check_credit(w)
    rows = credit.nonzero()[:, 0]
    n = len(rows)
    if not 1 <= k <= n:
        raise CreditscopeError(f"token_spectrum needs 1 ≤ k ≤ {n}, the number of tokens with credit, got k = {k}")
    steps = min(n, 3 * k + 30 if steps is None else steps)
    if steps < k:
        raise CreditscopeError(f"{k} values need {k} steps or more, got steps = {steps}; leave it out for 3k + 30")
    with _differentiable_attention():
        product = _product(_Jacobian(logp_fn, params, credit), credit, rows)
        squares, off, used = lanczos(product, n, k, steps, seed, tolerance)
    values = np.sqrt(np.clip(squares, 0.0, None))
    rounding = max(torch.finfo(p.dtype).eps for p in params.values()) * values[0]
    return TokenSpectrum(values, _in_singular_values(off, values) + rounding, used, n, tolerance)


def token_energy(logp_fn: LogProbs, params: Parameters, w: Tensor, draws: int = 16,
                 seed: int = 0) -> tuple[float, float]:
    """Σσ² = Σ_t w_t²‖∇ log π(y_t)‖² of the token matrix and its standard error, by E‖Jᵀ(w∘z)‖² with random signs z.

    One backward a draw. What the leading values are a share of: σ₁²/Σσ² is the top share, Σσ²/σ₁² the stable rank.
    """
    if draws < 2:
        raise CreditscopeError(f"token_energy needs two draws or more for a standard error, got {draws}")
    _check_params(params)
    credit = _check_credit(w)
    random = torch.Generator().manual_seed(seed)
    jacobian = _Jacobian(logp_fn, params, credit)
    found = []
    for _ in range(draws):
        signs = torch.randint(2, credit.shape, generator=random) * 2 - 1
        row = jacobian.transposed_times(credit * signs)
        found.append(sum(float(part.double().square().sum()) for part in row))
    return float(np.mean(found)), float(np.std(found, ddof=1) / np.sqrt(draws))


def lanczos(product: Callable[[Tensor], Tensor], n: int, k: int, steps: int, seed: int,
            tolerance: float) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """(the k leading eigenvalues, their residuals ‖Ay − θy‖, products used) of a positive semi-definite v ↦ Av on ℝⁿ.

    A q_j = β_{j−1} q_{j−1} + α_j q_j + β_j q_{j+1}; the eigenvalues θ of the tridiagonal T are those of A on the Krylov
    space, and ‖A y − θ y‖ = β_m |s_m| with s the eigenvector of T. Every q is orthogonalised against all before,
    twice: without it rounding brings copies of values that have converged. When β = 0 the space is closed and a fresh
    direction is drawn, for a second copy of a multiple eigenvalue is invisible from inside.
    """
    random = torch.Generator().manual_seed(seed)
    basis = torch.zeros(0, n, dtype=torch.float64)
    alphas: list[float] = []
    betas: list[float] = []
    q = _fresh(basis, n, random)
    opened = 0  # the step at which the present Krylov space began
    while True:
        basis = torch.cat([basis, q[None]])
        used = len(basis)
        image = product(q).to(basis)
        alphas.append(float(image @ q))
        for _ in range(2):
            image = image - basis.T @ (basis @ image)
        beta = float(image.norm()) if used < n else 0.0
        values, vectors = np.linalg.eigh(np.diag(alphas) + np.diag(betas, 1) + np.diag(betas, -1))
        values, last = values[::-1], np.abs(vectors[-1, ::-1])
        closed = beta <= 1e-13 * max(values[0], 0.0)
        residuals = np.zeros(used) if closed else beta * last
        settled = bool((_in_singular_values(residuals[:k], np.sqrt(np.clip(values[:k], 0.0, None)))
                        <= tolerance * np.sqrt(max(values[0], 0.0))).all())
        # A space that has just been opened has not yet shown its large values.
        if used == steps or (used >= k and settled and not closed and used - opened >= k):
            return values[:k].copy(), residuals[:k].copy(), used
        if closed:
            opened = used
            q = _fresh(basis, n, random)
            betas.append(0.0)
        else:
            q = image / beta
            betas.append(beta)


def _fresh(basis: Tensor, n: int, random: torch.Generator) -> Tensor:
    """A random unit vector orthogonal to the basis."""
    q = torch.randn(n, dtype=torch.float64, generator=random)
    for _ in range(2):
        q = q - basis.T @ (basis @ q)
        q = q / q.norm()
    return q


def _in_singular_values(residual: NDArray[np.float64], value: NDArray[np.float64]) -> NDArray[np.float64]:
    """|σ̂ − σ| from |σ̂² − σ²| ≤ residual: at most residual/σ̂ and at most √residual."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.fmin(residual / value, np.sqrt(residual)), dtype=np.float64)


class _Jacobian:
    """J = ∂ log π / ∂θ at one θ, as the two products v ↦ Jᵀv and u ↦ Ju, both from one forward pass.

    Jᵀv is a backward pass with cotangent v. It is linear in v, and Ju is its derivative: a backward pass through the
    backward pass. Forward-mode differentiation would do for Ju, but it was slower on a Llama and is not the transpose
    of what a trainer's backward computes: it moves the embedding's `padding_idx` row, whose gradient autograd drops.
    """

    def __init__(self, logp_fn: LogProbs, params: Parameters, credit: Tensor) -> None:
        self.theta = {name: p.detach().requires_grad_() for name, p in params.items()}
        with torch.enable_grad():
            self.logp = logp_fn(self.theta)
        _check_logp(self.logp, credit)
        if not self.logp.requires_grad:
            raise CreditscopeError("logp_fn does not depend on the parameters it is given; call the model through "
                                   "torch.func.functional_call(model, params, ...), without no_grad or detach")
        with torch.no_grad():
            apart = float((logp_fn(self.theta) - self.logp).abs().max())
        # Dropout moves log-probs by tenths; two orders of the same sum by a few units in the last place.
        if apart > max(1e-3, 16 * torch.finfo(self.logp.dtype).eps):
            raise CreditscopeError(f"logp_fn gives other log-probs each time, {apart:.2g} apart; call model.eval(), so "
                                   f"that dropout is off, and keep sampling out of it")

    def transposed_times(self, v: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.logp, list(self.theta.values()), v.to(self.logp), retain_graph=True,
                                   materialize_grads=True)

    def times(self, u: tuple[Tensor, ...]) -> Tensor:
        # A parameter that no log-prob uses has a gradient of plain zeros, which is no function of the cotangent.
        used = [(grad, part) for grad, part in zip(self._backward, u, strict=True) if grad.requires_grad]
        (image,) = torch.autograd.grad([grad for grad, _ in used], self._cotangent, [part for _, part in used],
                                       retain_graph=True)
        return image

    def differentiate_the_backward(self) -> None:
        """Keep the graph of Jᵀv as a function of v, where every operation allows it."""
        with torch.enable_grad():
            self._cotangent = torch.zeros_like(self.logp, requires_grad=True)
            try:
                self._backward = torch.autograd.grad(self.logp, list(self.theta.values()), self._cotangent,
                                                     create_graph=True, materialize_grads=True)
                self.times(tuple(torch.zeros_like(p) for p in self.theta.values()))
            except (NotImplementedError, RuntimeError) as error:
                raise _not_twice(error) from error


def _product(jacobian: _Jacobian, credit: Tensor, rows: Tensor) -> Callable[[Tensor], Tensor]:
    """v ↦ w∘J Jᵀ(w∘v) over the rows that have credit."""
    jacobian.differentiate_the_backward()

    def product(v: Tensor) -> Tensor:
        cotangent = torch.zeros_like(credit)
        cotangent[rows] = credit[rows] * v
        return credit[rows] * jacobian.times(jacobian.transposed_times(cotangent)).cpu().double()[rows]

    return product


@contextmanager
def _differentiable_attention() -> Iterator[None]:
    """Of scaled_dot_product_attention's kernels only the mathematical one has a second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def _not_twice(error: Exception) -> Exception:
    if not re.search(r"derivative for .* is not implemented|differentiate twice|once_differentiable", str(error)):
        return error
    return CreditscopeError(f"logp_fn uses an operation that cannot be differentiated twice "
                            f"({str(error).splitlines()[0][:160]}); load the model with "
                            f"attn_implementation=\"eager\" or \"sdpa\", without fused kernels, outside a Microscope")


# What comes in.

def _check_head(hidden: Tensor, weight: Tensor, tokens: Tensor, w: Tensor, bias: Tensor | None,
                temperature: float) -> None:
    n = len(hidden)
    wrong = (hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or tokens.shape != (n,)
             or w.shape != (n,) or (bias is not None and bias.shape != (len(weight),)))
    if wrong:
        given = ", ".join(f"{name} {tuple(x.shape)}" for name, x in
                          (("hidden", hidden), ("weight", weight), ("tokens", tokens), ("w", w), ("bias", bias))
                          if x is not None)
        raise CreditscopeError(f"token_gram_head needs hidden (n, d), weight (V, d), tokens (n,), w (n,) and, if there "
                               f"is one, bias (V,), got {given}; flatten the batch with the mask first")
    if temperature <= 0:
        raise CreditscopeError(f"the temperature must be above 0, got {temperature}")
    if n and (int(tokens.min()) < 0 or int(tokens.max()) >= len(weight)):
        raise CreditscopeError(f"tokens must lie in the vocabulary, 0 to {len(weight) - 1}, got {int(tokens.min())} to "
                               f"{int(tokens.max())}; leave padding out")


def _check_params(params: Parameters) -> None:
    if not params:
        raise CreditscopeError("params is empty; pass dict(model.named_parameters()), or those of some layers")
    for name, p in params.items():
        if not p.is_floating_point():
            raise CreditscopeError(f"parameter {name!r} is {p.dtype}; a gradient needs floating point")


def _check_credit(w: Tensor) -> Tensor:
    if w.dim() != 1 or not bool(torch.isfinite(w).all()):
        raise CreditscopeError(f"w must be (n,) and finite, one credit a token, got shape {tuple(w.shape)} with "
                               f"{int((~torch.isfinite(w)).sum())} not finite; flatten it with the mask")
    if not bool(w.any()):
        raise CreditscopeError("every token's credit is 0, so the token matrix is 0 and has no spectrum")
    return w.detach().double().cpu()


def _check_logp(logp: Tensor, credit: Tensor) -> None:
    if logp.shape != credit.shape:
        raise CreditscopeError(f"logp_fn must return (n,) log-probs, one for each of the {len(credit)} credits in w, "
                               f"got shape {tuple(logp.shape)}")
