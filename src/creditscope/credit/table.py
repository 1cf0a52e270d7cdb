"""The list of estimators, and how one is named on the command line."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from creditscope.credit.estimator import Estimator
from creditscope.errors import CreditscopeError, unknown

if TYPE_CHECKING:
    from torch import Tensor

    from creditscope.credit.tools import Tools
    from creditscope.method import Method
    from creditscope.rollouts import Rollouts

ROWS = (
    Estimator(
        name="outcome", title="Outcome", builds_on="advantage", cost="nothing",
        equation="A_it = A_i",
        cites="Williams 1992; arXiv:2402.03300",
        claim="unbiased up to the factor (R−1)/R of a group-mean baseline"),
    Estimator(
        name="leave_one_out", siblings=True, title="Leave-one-out baseline", cost="nothing",
        equation="A_it = r_i − mean_{j≠i} r_j",
        cites="arXiv:2402.14740", claim="unbiased"),
    Estimator(
        name="optimal_scalar", siblings=True, title="Optimal scalar baseline", needs=("gram",),
        cost="one forward and backward pass under the microscope",
        equation="A_it = r_i − Σ_j r_j‖ψ_j‖² / Σ_j ‖ψ_j‖²",
        cites="Weaver and Tao 2001; Greensmith et al. 2004",
        claim="least variance of all constant baselines; with its own rollout in it, biased by O(1/R)"),
    Estimator(
        name="optimal_sequence", siblings=True, title="Optimal scalar baseline, norms at the logits",
        needs=("collision",), cost="nothing: Σπ² is kept while sampling",
        equation="A_it = r_i − Σ_j r_j W_j / Σ_j W_j,  W_j = Σ_t (1 − 2π_jt + Σπ²_jt)",
        cites="Weaver and Tao 2001, with the norms of arXiv:2602.07078",
        note="Ours: optimal_scalar without its backward pass."),
    Estimator(
        name="optimal_token", title="Optimal token baseline", needs=("collision",),
        cost="nothing: Σπ² is kept while sampling",
        equation="A_it = r_i − Σ_j r_j W_jt / Σ_j W_jt,  W_jt = Σ_{u≤t} (1 − 2π_ju + Σπ²_ju)",
        cites="arXiv:2602.07078", claim="least variance under its proxy for the score's norm",
        note="Siblings that have ended count no more. The last survivor has no sibling left: baseline 0, as in verl."),
    Estimator(
        name="step_reward", title="Step rewards", needs=("steps",), cost="step labels",
        equation="A_it = r_i,s(t) − mean of the group's step rewards",
        cites="arXiv:2305.20050; arXiv:2402.03300, Sec. 4.1.3",
        claim="none: it maximises right steps, not right answers"),
    Estimator(
        name="step_return", title="Return to go of step rewards", needs=("steps",), cost="step labels",
        equation="A_it = Σ_{s ≥ s(t)} (r_is − mean of the group's step rewards)",
        cites="arXiv:2402.03300, Sec. 4.1.3",
        claim="none: the baseline sums over the steps that follow, so the number of steps matters",
        note="DeepSeekMath divides by the std of the step rewards; here the method's own scale divides."),
    Estimator(
        name="turn_return", siblings=True, title="Return to go, baseline of the turn", needs=("steps",),
        cost="step labels",
        equation="A_it = G_ih − mean_j G_jh,  G_ih = Σ_{s ≥ h} r_is,  h = s(t)",
        cites="arXiv:2606.29238, Eq. 22–27",
        claim="removes the rewards of earlier turns from credit, and v(s_h) − v(s_0) on average over states"),
    Estimator(
        name="state_return", title="Return to go, baseline of the state", needs=("steps", "states"), cost="step labels",
        equation="A_it = G_ih − mean_{j,k: s_jk = s_ih} G_jk; alone in its state: as turn_return",
        cites="arXiv:2505.10978",
        claim="removes P1's multi-turn bias where siblings meet in the same state"),
    Estimator(
        name="monte_carlo", title="Monte Carlo values at step ends", needs=("continuations",),
        cost="K continuations at each step's end",
        equation="A_it = V(next cut) − V(cut before t),  V = mean reward of K continuations",
        cites="arXiv:2410.01679", claim="unbiased values at the cuts",
        note="The prompt's value is the mean reward of the rollout's siblings: they are its continuations already."),
    Estimator(
        name="spo_chain", title="Monte Carlo values, cuts at uncertain tokens", needs=("continuations",),
        cost="K continuations at each cut",
        equation="as monte_carlo, a cut after every m-th token with π < ρ; credit on tokens with π < ρ alone",
        cites="arXiv:2505.23564", claim="unbiased values at the cuts; the mask drops what the policy is sure of"),
    Estimator(
        name="prefix_tree", siblings=True, title="Tree of shared prefixes", cost="nothing: (R, R, T) comparisons",
        equation="A_it = V(y_≤t) − V(y_<t),  V(prefix) = mean reward of the group's rollouts that share it",
        cites="arXiv:2506.05183; arXiv:2506.11902; arXiv:2509.21154",
        claim="values of shared nodes",
        note="With its own rollout in the parent's value credit shrinks by (n−1)/n: E = (q−v)·(1 − (1−(1−d)^R)/(R·d)), "
             "d the chance of reaching the node."),
    Estimator(
        name="prefix_share", title="Shared prefixes weigh 1/n", builds_on="advantage",
        cost="nothing: (R, R, T) comparisons",
        equation="A_it = A_i / n_it,  n_it rollouts of the group share y_≤t",
        cites="arXiv:2509.21154"),
    Estimator(
        name="gae", title="Generalised advantage estimation", needs=("critic",),
        cost="a critic: its forward and backward pass",
        equation="A_it = Σ_l (γλ)^l δ_i,t+l,  δ_it = r_it + γ V_i,t+1 − V_it",
        cites="arXiv:1506.02438; arXiv:1707.06347", claim="unbiased at λ = 1, or with an exact critic"),
    Estimator(
        name="entropy_mask", title="Top 20 % entropy", needs=("entropy",), builds_on="advantage", cost="nothing",
        equation="A_it = A_i · 1{H_it in the batch's top 20 %}",
        cites="arXiv:2506.01939", claim="none: most tokens are left out"),
    Estimator(
        name="entropy_shaping", title="Entropy shaping", needs=("entropy",), builds_on="advantage", cost="nothing",
        equation="A_it = A_i (α₁ + α₂ h_it / mean_j h_jt),  h = H where A > 0 and 1/H where A < 0; j: same sign, alive",
        cites="arXiv:2508.04349",
        note="The paper shapes rewards of ±1 and standardises the two signs apart; here the factor shapes the method's "
             "advantage."),
    Estimator(
        name="salt", title="SALT: spectral split", needs=("gram",), builds_on="advantage",
        cost="one forward and backward pass under the microscope",
        equation="A' = P A + (1 + c)(A − P A),  P onto the top eigenvectors of the group's Gram, "
                 "c = 1 − ‖Σ A_i ψ_i‖ / Σ |A_i|‖ψ_i‖",
        cites="arXiv:2606.05800", claim="more directions in the update",
        note="Not token credit. How strongly the residual grows with the cancellation c is our choice."),
)

ESTIMATORS: Mapping[str, Estimator] = MappingProxyType({row.name: row for row in ROWS})

OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
OPTION = re.compile(r"([a-z_]+)=([-+.\w]+)")


@dataclass(frozen=True)
class Chosen:
    """An estimator with its options, as a user named it: `monte_carlo,samples=8`, or `my_module:mine`."""

    spec: str
    function: Callable[..., Any] = field(repr=False)
    options: Mapping[str, Any]
    row: Estimator
    """What is known about it; of a user's own function, what its attribute `needs` says."""

    def __call__(self, method: Method, rollouts: Rollouts, tools: Tools) -> Tensor:
        """(B, T) credit, 0 where the policy chose nothing; what comes back is checked every time."""
        import torch

        found = self.function(method, rollouts, tools, **self.options)
        shape, rows = tuple(rollouts.mask.shape), len(rollouts)
        if not isinstance(found, torch.Tensor) or not found.is_floating_point():
            kind = found.dtype if isinstance(found, torch.Tensor) else type(found).__name__
            raise CreditscopeError(f"credit {self.row.name!r} must return a float tensor, got {kind}")
        if tuple(found.shape) not in (shape, (rows,), (rows, 1)):
            raise CreditscopeError(f"credit {self.row.name!r} must return (B, T) = {shape} or (B,) = ({rows},), got "
                                   f"{tuple(found.shape)}")
        if found.device != rollouts.mask.device:
            raise CreditscopeError(f"credit {self.row.name!r} must return its result on {rollouts.mask.device}, got it "
                                   f"on {found.device}; make it from the rollouts' own tensors")
        credit = (found[:, None] if found.dim() == 1 else found).detach().expand(shape)
        bad = ~torch.isfinite(credit) & rollouts.mask
        if bool(bad.any()):
            i, t = bad.nonzero()[0].tolist()
            raise CreditscopeError(f"credit {self.row.name!r} must be finite: row {i}, column {t} is "
                                   f"{credit[i, t].item()} (and {int(bad.sum()) - 1} more)")
        return credit.masked_fill(~rollouts.mask, 0.0)


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of `name,key=value,…`; nothing is imported.

    >>> parse("monte_carlo,samples=8")
    ('monte_carlo', {'samples': 8})
    """
    name, *rest = spec.split(",")
    if name not in ESTIMATORS and not OWN.fullmatch(name):
        raise unknown("credit", name, ESTIMATORS, see="creditscope credit")
    options: dict[str, Any] = {}
    for part in rest:
        found = OPTION.fullmatch(part)
        if not found:
            raise CreditscopeError(f"--credit {spec}: {part!r} is no option; write {name},key=value")
        options[found[1]] = _value(found[2])
    return name, options


def find_estimator(spec: str) -> Chosen:
    """The estimator of that name with its options checked, or a user's own `module:function`. Loads torch."""
    name, options = parse(spec)
    if name in ESTIMATORS:
        row, function = ESTIMATORS[name], ESTIMATORS[name].function
    else:
        function = _own(name)
        row = Estimator(name=name, title=name, equation="your own", cost="your own", cites="",
                        needs=tuple(getattr(function, "needs", ())))
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise CreditscopeError(f"--credit {name}: a function of (method, rollouts, tools) is needed") from None
    allowed = {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    for key, value in options.items():
        if key not in allowed:
            raise unknown(f"option of credit {name!r}:", key, allowed)
        like = allowed[key]
        fits = isinstance(value, int | float) if isinstance(like, float) else isinstance(value, type(like))
        fits = fits and isinstance(value, bool) == isinstance(like, bool)  # true is no number, though Python says so
        if like is not inspect.Parameter.empty and like is not None and not fits:
            raise CreditscopeError(f"option {key} of credit {name!r} must be like {like!r}, got {value!r}")
    if name not in ESTIMATORS and len([p for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]) != 3:
        raise CreditscopeError(f"--credit {name}: the function must take (method, rollouts, tools), it takes "
                               f"({', '.join(parameters)})")
    return Chosen(spec, function, MappingProxyType(options), row)


def _own(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    try:
        with _current_folder():
            imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CreditscopeError(f"--credit {target}: no module {error.name!r}; start creditscope in the folder that has "
                               f"it, or set PYTHONPATH") from None
    except (Exception, SystemExit) as error:
        raise CreditscopeError(f"--credit {target}: importing {module!r} raised {type(error).__name__}: {error}"
                               ) from error
    if not hasattr(imported, name):
        raise CreditscopeError(f"--credit {target}: module {module!r} has no {name!r}")
    found = getattr(imported, name)
    if not callable(found):
        raise CreditscopeError(f"--credit {target}: {name!r} is a {type(found).__name__}, not a function")
    result: Callable[..., Any] = found
    return result


@contextlib.contextmanager
def _current_folder() -> Iterator[None]:
    """A module of the current folder can be imported: it comes first, as for --reward.

    An installed `creditscope` does not have that folder on its path. It stays there afterwards, but last: the module
    may still import its neighbours, and a file there called like a library is not taken for the library later on.
    """
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
        sys.path.append(here)


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)
