"""Constructions that try to make the microscope silently wrong, each against one backward per rollout.

A construction is exact (every parameter's Gram and .grad are those of the loop), or it is refused in words. Nothing
else is right: no wrong number, no other exception, no changed buffer, hook, attribute or random state. EITHER is
written where both outcomes are fine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributions import Normal
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from creditscope import CreditscopeError, Microscope
from each import each

EXACT, REFUSED, EITHER = "exact", "refused", "exact or refused"
D, VOCAB, EXPERTS = 8, 11, 3
ORDER = torch.tensor([1, 2, 3, 0])
BACK = ORDER.argsort()
SIX = torch.tensor([3, 4, 5, 0, 1, 2])
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [2, 2, 3, 3, 3, 3], [4, 4, 4, 4, 5, 5], [6, 6, 6, 6, 6, 6]])

OPEN: dict[str, str] = {
    "classes_as_an_argument": "an argument of the model with B vectors is taken for rows",
    "the_batch_is_the_second_argument": "an argument of the model with B vectors is taken for rows",
    "cancelling_rollouts_and_a_hook_on_a_parameter": "the self-check compares sums, and these are 0",
}
"""Constructions that are not handled yet → what happens. Strict: one that is repaired must leave this list."""


# -- what the constructions are made of --------------------------------------------------------------------------------


class Parts(nn.Module):
    """Parameters of every kind, for constructions to use as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.matrix, self.vector = weights(D, D), weights(D)
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.experts = weights(EXPERTS, D, D)
        self.gate = nn.Linear(D, EXPERTS, bias=False)
        self.conv = nn.Conv1d(D, D, 3, padding=1)
        self.table = nn.Embedding(32, D)
        self.down, self.up = weights(2, D), weights(D, 2)


class Language(nn.Module):
    """ids (B, T) → embedding → x + tanh(construction(x)) → logits."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(VOCAB, D), middle, nn.Linear(D, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(x + torch.tanh(self.middle(x)))


class Vectors(nn.Module):
    """x (B, d) → x + tanh(construction(x)) → scores."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.middle, self.head = middle, nn.Linear(D, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + torch.tanh(self.middle(x)))


class Apply(nn.Module):
    """A function of parts and activations as a module."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, parts

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.parts, x)


@dataclass
class Trial:
    """A model and `loss(weights)` = Σ_i weights_i J_i."""

    model: nn.Module
    loss: Callable[[Tensor], Any]
    rollouts: int
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-7


@dataclass(frozen=True)
class Construction:
    build: Callable[[], Trial]
    outcome: str
    words: str
    about: str


TABLE: dict[str, Construction] = {}


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.3)


def noise(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tokens(*shape: int, seed: int = 3) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def log_likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(logits.double(), -1).gather(-1, targets[..., None])[..., 0]


def language(model: nn.Module, rows: int = 4, width: int = 6, segments: Tensor | None = None,
             read: Callable[[Any, Tensor], Tensor] = lambda model, ids: model(ids), **options: Any) -> Trial:
    """Credit times log-likelihood of fixed tokens."""
    ids, targets, credit = tokens(rows, width), tokens(rows, width, seed=4), noise(rows, width)
    owner = torch.arange(rows)[:, None].expand(rows, width) if segments is None else segments
    more = {} if segments is None else {"segments": segments}

    def loss(weight: Tensor) -> Tensor:
        return (log_likelihood(read(model, ids), targets) * credit * weight[owner]).sum()

    return Trial(model, loss, int(owner.max()) + 1, more, **options)


def vectors(model: nn.Module, rows: int = 4) -> Trial:
    x, targets, credit = noise(rows, D), tokens(rows), noise(rows, seed=8)
    return Trial(model, lambda weight: (log_likelihood(model(x), targets) * credit * weight).sum(), rows)


def construction(outcome: str, words: str = "") -> Callable[[Callable[[], Trial]], Callable[[], Trial]]:
    """Enter a function that makes a trial into the table. Its docstring says what is tried."""

    def enter(build: Callable[[], Trial]) -> Callable[[], Trial]:
        TABLE[build.__name__] = Construction(build, outcome, words, str(build.__doc__))
        return build

    return enter


def inside(outcome: str, words: str = "", rows: int = 4, width: int = 6, *, frozen: bool = False, flat: bool = False,
           segments: Tensor | None = None, dtype: torch.dtype = torch.float64, autocast: bool = False,
           tolerance: float = 1e-7) -> Callable[[Callable[[Any, Tensor], Tensor]], Callable[[Any, Tensor], Tensor]]:
    """Enter a function of (parts, activations) that stands in the middle of a model."""

    def enter(function: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        def build() -> Trial:
            middle = Apply(function, Parts())
            if flat:
                return vectors(Vectors(middle).to(dtype), rows)
            model = Language(middle).to(dtype)
            model.embedding.weight.requires_grad_(not frozen)

            def read(model: nn.Module, ids: Tensor) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    return model(ids)

            return language(model, rows, width, segments, read, tolerance=tolerance)

        TABLE[function.__name__] = Construction(build, outcome, words, str(function.__doc__))
        return function

    return enter


def middle(module: nn.Module, **kwargs: Any) -> Trial:
    return language(Language(module).double(), **kwargs)


# -- the check ---------------------------------------------------------------------------------------------------------


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradients(trial: Trial, weight: Tensor) -> dict[str, Tensor]:
    """One forward and backward from a fixed random state; the gradients by name."""
    for p in trial.model.parameters():
        p.grad = None
    torch.manual_seed(5)
    trial.loss(weight).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in trainable(trial.model).items()}


def state(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that a pass may change besides parameters, and the random state."""
    modules = {name: (sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
               for name, m in model.named_modules()}
    return {"modules": modules, "buffers": {name: b.tolist() for name, b in model.named_buffers()},
            "random": torch.get_rng_state().tolist()}


def measured(trial: Trial) -> str:
    """`exact`, or the words of the refusal; an AssertionError for anything else."""
    rows = [gradients(trial, one) for one in torch.eye(trial.rollouts, dtype=torch.float64)]
    start = copy.deepcopy(dict(trial.model.named_buffers()))
    plain = gradients(trial, torch.ones(trial.rollouts, dtype=torch.float64))
    after = state(trial.model)
    with torch.no_grad():
        for name, buffer in trial.model.named_buffers():
            if name in start:
                buffer.copy_(start[name])
    scope = Microscope(trial.model, **trial.options)
    try:
        with scope:
            found = gradients(trial, torch.ones(trial.rollouts, dtype=torch.float64))
    except CreditscopeError as error:
        assert state(trial.model)["modules"] == after["modules"]
        return str(error)
    assert state(trial.model) == after, "the pass left another state than without the microscope"
    for name, gradient in plain.items():
        each = torch.stack([row[name].double().flatten() for row in rows])
        scale = float(each.abs().max())  # their sum may be 0 but for rounding
        assert far(found[name], gradient, scale) <= trial.tolerance, f".grad of {name} differs"
        gram = scope.layers.get(name)
        assert gram is not None or not each.any(), f"{name} is not measured"
        if gram is not None:
            assert gram.shape == (trial.rollouts, trial.rollouts)
            assert far(gram, each @ each.T) <= trial.tolerance, f"the Gram of {name} differs"
    return EXACT


def far(found: Tensor, wanted: Tensor, scale: float = 0.0) -> float:
    """The largest difference, as a share of the largest entry, or of `scale` where that is larger."""
    wanted = wanted.double()
    if not wanted.numel():
        return 0.0
    return float((found.double() - wanted).abs().max()) / max(float(wanted.abs().max()), scale, 1e-12)


def check(name: str) -> None:
    torch.manual_seed(0)
    entry = TABLE[name]
    outcome = measured(entry.build())
    if outcome == EXACT:
        assert entry.outcome != REFUSED, "it was measured, and exactly"
    else:
        assert entry.outcome != EXACT, f"refused: {outcome}"
        assert entry.words in outcome


# -- rows and positions are moved --------------------------------------------------------------------------------------


@inside(EXACT)
def rows_permuted_by_index(m: Any, x: Tensor) -> Tensor:
    """Rows are shuffled by an index tensor before a Linear and put back after it."""
    return m.first(x[ORDER])[BACK]


@inside(EXACT)
def rows_permuted_by_index_select(m: Any, x: Tensor) -> Tensor:
    """The same through index_select."""
    return m.first(x.index_select(0, ORDER)).index_select(0, BACK)


@inside(EXACT)
def rows_permuted_by_lists(m: Any, x: Tensor) -> Tensor:
    """The same with lists for indices."""
    return m.first(x[[1, 2, 3, 0]])[[3, 0, 1, 2]]


@inside(EITHER)
def rows_permuted_by_numpy_index(m: Any, x: Tensor) -> Tensor:
    """The same with a numpy array for index."""
    return m.first(x[np.array([1, 2, 3, 0])])[np.array([3, 0, 1, 2])]


@inside(EXACT)
def rows_sorted_by_a_key(m: Any, x: Tensor) -> Tensor:
    """Rows are sorted by their sum before a Linear."""
    order = x.sum((1, 2)).argsort()
    return m.first(x[order])[order.argsort()]


@inside(EXACT)
def rows_rotated_by_cat(m: Any, x: Tensor) -> Tensor:
    """The first row is moved to the end by slices and cat."""
    y = m.first(torch.cat([x[1:], x[:1]]))
    return torch.cat([y[-1:], y[:-1]])


@inside(EITHER)
def rows_permuted_by_gather(m: Any, x: Tensor) -> Tensor:
    """Rows are shuffled by gather along axis 0."""
    y = m.first(x.gather(0, ORDER[:, None, None].expand_as(x)))
    return y.gather(0, BACK[:, None, None].expand_as(x))


@inside(EITHER)
def rows_permuted_by_take_along_dim(m: Any, x: Tensor) -> Tensor:
    """Rows are shuffled by take_along_dim."""
    return torch.take_along_dim(m.first(torch.take_along_dim(x, ORDER[:, None, None], 0)), BACK[:, None, None], 0)


@inside(EITHER)
def rows_permuted_by_an_embedding(m: Any, x: Tensor) -> Tensor:
    """Activations are the table of an embedding call, rows are its ids."""
    return m.first(F.embedding(ORDER, x.reshape(4, -1)).view_as(x))[BACK]


@inside(EITHER)
def rows_permuted_and_put_back_by_an_embedding(m: Any, x: Tensor) -> Tensor:
    """The same, and back by another embedding call."""
    y = m.first(F.embedding(ORDER, x.reshape(4, -1)).view_as(x))
    return F.embedding(BACK, y.reshape(4, -1)).view_as(x)


@inside(EITHER)
def rows_permuted_by_a_matrix(m: Any, x: Tensor) -> Tensor:
    """Rows are shuffled by a product with a permutation matrix."""
    swap = torch.eye(4, dtype=x.dtype)[ORDER]
    return torch.einsum("bc,btd->ctd", swap, m.first(torch.einsum("bc,ctd->btd", swap, x)))


@inside(EITHER)
def rows_permuted_by_an_aten_call(m: Any, x: Tensor) -> Tensor:
    """Rows are shuffled by torch.ops.aten.index."""
    return m.first(torch.ops.aten.index.Tensor(x, [ORDER]))[BACK]


@inside(EITHER)
def rows_permuted_behind_an_ellipsis(m: Any, x: Tensor) -> Tensor:
    """x[..., order, :, :]: the dots stand for no axis."""
    return m.first(x[..., ORDER, :, :])[..., BACK, :, :]


@inside(EITHER)
def rows_turned_upside_down(m: Any, x: Tensor) -> Tensor:
    """flipud and rot90 reverse the rows."""
    return m.first(x.flipud()).flipud() + torch.rot90(m.second(torch.rot90(x, 2, (0, 1))), 2, (0, 1))


@inside(EITHER)
def rows_rolled_flat(m: Any, x: Tensor) -> Tensor:
    """roll without axes shifts the flat tensor by one row."""
    return m.first(x.roll(x[0].numel())).roll(-x[0].numel())


@inside(EITHER)
def rows_shifted_by_narrow(m: Any, x: Tensor) -> Tensor:
    """narrow(0, 1, B) of a doubled batch."""
    return m.first(torch.cat([x, x]).narrow(0, 1, 4)).roll(1, 0)


@inside(EITHER)
def rows_shifted_by_padding(m: Any, x: Tensor) -> Tensor:
    """A row of zeros is put in front and the last one is cut off."""
    y = m.first(F.pad(x, (0, 0, 0, 0, 1, 0))[:-1])
    return F.pad(y, (0, 0, 0, 0, 0, 1))[1:]


@inside(EITHER)
def groups_before_members(m: Any, x: Tensor) -> Tensor:
    """(G·n, T, d) is viewed as (G, n, T, d), turned to (n, G, T, d) and flattened."""
    y = m.first(x.view(2, 2, 6, D).transpose(0, 1).reshape(4, 6, D))
    return y.view(2, 2, 6, D).transpose(0, 1).reshape(4, 6, D)


@inside(EITHER)
def members_flipped_in_groups(m: Any, x: Tensor) -> Tensor:
    """The same with a flip inside of each group."""
    return m.first(x.view(2, 2, 6, D).flip(1).reshape(4, 6, D)).view(2, 2, 6, D).flip(1).reshape(4, 6, D)


@inside(EXACT)
def time_first_and_flat(m: Any, x: Tensor) -> Tensor:
    """(B, T, d) → (T·B, d) through transpose."""
    return m.first(x.transpose(0, 1).reshape(-1, D)).view(6, 4, D).transpose(0, 1)


@inside(EITHER)
def time_first_by_einsum(m: Any, x: Tensor) -> Tensor:
    """(B, T, d) → (T·B, d) through einsum."""
    return m.first(torch.einsum("btd->tbd", x).reshape(-1, D)).view(6, 4, D).transpose(0, 1)


@inside(EITHER, rows=6)
def time_first_by_einsum_where_rows_are_as_many_as_positions(m: Any, x: Tensor) -> Tensor:
    """The same with B = T, where shapes do not tell."""
    return torch.einsum("btd->tbd", m.first(torch.einsum("btd->tbd", x)))


@inside(EITHER)
def time_first_in_place(m: Any, x: Tensor) -> Tensor:
    """transpose_ turns a tensor that is known already."""
    y = x.clone()
    y.transpose_(0, 1)
    return m.first(y.reshape(-1, D)).view(6, 4, D).transpose(0, 1)


@inside(EITHER)
def time_first_by_strides(m: Any, x: Tensor) -> Tensor:
    """as_strided swaps the axes."""
    y = x.contiguous().as_strided((6, 4, D), (D, 6 * D, 1)).reshape(-1, D)
    return m.first(y).view(6, 4, D).transpose(0, 1)


@inside(EITHER)
def time_first_by_an_aten_call(m: Any, x: Tensor) -> Tensor:
    """torch.ops.aten.transpose is no method of Tensor."""
    return m.first(torch.ops.aten.transpose.int(x, 0, 1).reshape(-1, D)).view(6, 4, D).transpose(0, 1)


@inside(EITHER)
def time_first_by_vmap(m: Any, x: Tensor) -> Tensor:
    """vmap takes axis 1 and gives axis 0."""
    y = torch.vmap(lambda r: r * 1.0, in_dims=1, out_dims=0)(x)
    return m.first(y.reshape(-1, D)).view(6, 4, D).transpose(0, 1)


@inside(EITHER)
def time_first_by_unbind_and_stack(m: Any, x: Tensor) -> Tensor:
    """Steps are unbound and stacked, then flattened."""
    y = m.first(torch.stack(x.unbind(1)).view(-1, D))
    return torch.stack(y.view(6, 4, D).unbind(1))


@inside(EITHER, rows=6)
def steps_stacked_where_rows_are_as_many_as_positions(m: Any, x: Tensor) -> Tensor:
    """torch.stack of x[:, t], with B = T."""
    return m.first(torch.stack([x[:, t] for t in range(6)])).transpose(0, 1)


@inside(EITHER, rows=6)
def rows_one_by_one_where_rows_are_as_many_as_positions(m: Any, x: Tensor) -> Tensor:
    """for row in x, select(0, i): each row is (T, heads, d) with T = B."""
    z = x.view(6, 6, 2, 4).repeat(1, 1, 1, 2)
    by_loop = torch.stack([m.first(row) for row in z])
    return (by_loop + torch.stack([m.second(z.select(0, i)) for i in range(6)])).sum(2)


@inside(EITHER, width=4)
def copies_before_rows(m: Any, x: Tensor) -> Tensor:
    """unsqueeze(0).expand gives as many copies as there are rows."""
    scale = torch.arange(1.0, 5.0, dtype=x.dtype).view(4, 1, 1, 1)
    return m.first(x.unsqueeze(0).expand(4, -1, -1, -1) * scale).sum(0)


@inside(EITHER, width=4)
def as_many_copies_of_the_batch_as_positions(m: Any, x: Tensor) -> Tensor:
    """repeat makes B·T rows of a batch with B·T positions."""
    y = m.conv(x.transpose(1, 2).repeat(4, 1, 1))
    return y.view(4, 4, D, 4).sum(0).transpose(1, 2)


@inside(EITHER)
def masked_select_into_rows(m: Any, x: Tensor) -> Tensor:
    """20 selected positions, unequally many per row, are viewed as 4 rows of 5."""
    keep = torch.ones(4, 6, dtype=torch.bool)
    keep[0, :4] = False
    y = m.first(x.masked_select(keep[..., None]).view(4, 5, D)).reshape(-1, D)
    out = torch.zeros_like(x)
    out[keep] = y
    return out


@inside(EXACT)
def mask_index_into_rows(m: Any, x: Tensor) -> Tensor:
    """The same by x[mask]."""
    keep = torch.ones(4, 6, dtype=torch.bool)
    keep[0, :4] = False
    out = torch.zeros_like(x)
    out[keep] = m.first(x[keep].view(4, 5, D)).reshape(-1, D)
    return out


@inside(EITHER)
def packing_by_hand(m: Any, x: Tensor) -> Tensor:
    """x[mask] → Linear → scatter back, with as many positions as rows and with more."""
    few, many = torch.zeros(4, 6, dtype=torch.bool), torch.ones(4, 6, dtype=torch.bool)
    few[0, :2] = few[2, 1:3] = True
    many[0, 4:] = many[2, 1:3] = False
    out = torch.zeros_like(x)
    out[few] = m.first(x[few])
    return out.masked_scatter(many[..., None], m.second(x[many]))


@inside(EITHER)
def packing_into_rows_of_another_length(m: Any, x: Tensor) -> Tensor:
    """24 tokens as 6 rows of 4: a convolution then mixes rollouts' tokens, and a Linear does not."""
    return m.first(x.reshape(2, 12, D)).view(4, 6, D)


@inside(EITHER, frozen=True)
def frozen_activations_are_permuted(m: Any, x: Tensor) -> Tensor:
    """Activations without a gradient (frozen embedding) are shuffled."""
    return m.first(x[ORDER])[BACK]


@inside(EITHER, frozen=True)
def frozen_activations_time_first(m: Any, x: Tensor) -> Tensor:
    """Activations without a gradient are turned and flattened."""
    return m.first(x.transpose(0, 1).reshape(-1, D)).view(6, 4, D).transpose(0, 1)


@inside(EITHER)
def detached_activations_time_first(m: Any, x: Tensor) -> Tensor:
    """Detached activations (a value head) are turned and flattened."""
    return m.first(x.detach().transpose(0, 1).reshape(-1, D)).view(6, 4, D).transpose(0, 1)


@inside(EITHER)
def turned_into_an_out_argument(m: Any, x: Tensor) -> Tensor:
    """out= receives the turned activations under no_grad."""
    y = torch.empty(6, 4, D, dtype=x.dtype)
    with torch.no_grad():
        torch.mul(x.transpose(0, 1), 1.0, out=y)
    return x + m.first(y.view(-1, D)).view(6, 4, D).transpose(0, 1)


@inside(EITHER)
def groups_swapped_through_a_view(m: Any, x: Tensor) -> Tensor:
    """A view of a copy is written to; the copy itself was not named in any call."""
    y = x.clone()
    y.view(2, 2, 6, D).copy_(x.view(2, 2, 6, D).transpose(0, 1))
    z = m.first(y).clone()
    z.view(2, 2, 6, D).copy_(z.view(2, 2, 6, D).transpose(0, 1).clone())
    return z


@inside(EITHER)
def rows_swapped_through_views(m: Any, x: Tensor) -> Tensor:
    """y[0] and y[1] change places by copy_."""
    def swapped(y: Tensor) -> Tensor:
        z = y.clone()
        z[0].copy_(y[1])
        z[1].copy_(y[0])
        return z

    return swapped(m.first(swapped(x)))


@inside(EITHER)
def rows_filled_through_views(m: Any, x: Tensor) -> Tensor:
    """zeros_like is filled row by row by copy_, in another order."""
    y, out = torch.zeros_like(x), torch.zeros_like(x)
    for i, j in enumerate(ORDER.tolist()):
        y[i].copy_(x[j])
    z = m.first(y)
    for i, j in enumerate(ORDER.tolist()):
        out[j].copy_(z[i])
    return out


@inside(EITHER)
def tokens_put_through_a_view(m: Any, x: Tensor) -> Tensor:
    """zeros_like(x).view(B·T, d)[slot] = tokens."""
    slot = torch.arange(24).flip(0).roll(5)
    y, out = torch.zeros_like(x), torch.zeros_like(x)
    y.view(-1, D)[slot] = x.reshape(-1, D)
    out.view(-1, D)[slot.argsort()] = m.first(y).view(-1, D)
    return out


@inside(EITHER, frozen=True)
def data_is_replaced(m: Any, x: Tensor) -> Tensor:
    """y.data = shuffled rows."""
    y, out = x.clone(), torch.zeros_like(x)
    y.data = x[ORDER].clone()
    z = m.first(y)
    for i, j in enumerate(ORDER.tolist()):
        out[j].copy_(z[i])
    return out


@inside(EITHER, flat=True)
def inputs_are_permuted(m: Any, x: Tensor) -> Tensor:
    """The model's float inputs (B, d) are shuffled and sorted before a Linear."""
    order = x[:, 0].argsort()
    return m.first(x[ORDER])[BACK] + m.second(x.index_select(0, order))[order.argsort()]


class Ids(nn.Module):
    """A model that does something to its ids first."""

    def __init__(self, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.linear, self.head = nn.Embedding(VOCAB, D), nn.Linear(D, D), nn.Linear(D, VOCAB)
        self.before, self.after = before, after

    def forward(self, ids: Tensor) -> Tensor:
        return self.after(self.head(torch.tanh(self.linear(self.embedding(self.before(ids))))))


@construction(EITHER)
def ids_are_permuted() -> Trial:
    """ids[order] before the embedding."""
    return language(Ids(lambda ids: ids[ORDER], lambda y: y[BACK]).double())


@construction(EITHER)
def ids_are_transposed() -> Trial:
    """ids.t() before the embedding, B ≠ T."""
    return language(Ids(lambda ids: ids.t(), lambda y: y.transpose(0, 1)).double())


@construction(EITHER)
def ids_are_transposed_where_rows_are_as_many_as_positions() -> Trial:
    """ids.t() before the embedding, B = T."""
    return language(Ids(lambda ids: ids.t(), lambda y: y.transpose(0, 1)).double(), rows=6)


@construction(EITHER)
def ids_are_transposed_and_flat() -> Trial:
    """ids.t().reshape(-1) before the embedding."""
    return language(Ids(lambda ids: ids.t().reshape(-1), lambda y: y.view(6, 4, -1).transpose(0, 1)).double())


@construction(EITHER)
def ids_are_changed_where_rows_are_as_many_as_positions() -> Trial:
    """ids.clamp(...) is a new tensor, B = T."""
    return language(Ids(lambda ids: ids.clamp(0, 9), lambda y: y).double(), rows=6)


# -- packed rows: owners by position -----------------------------------------------------------------------------------


@inside(EITHER, segments=SEGMENTS)
def packed_positions_permuted(m: Any, x: Tensor) -> Tensor:
    """Positions of packed rows are shuffled by index, index_select, dots and gather."""
    back, at = SIX.argsort(), SIX[None, :, None].expand_as(x)
    y = m.first(x[:, SIX])[:, back] + m.second(x.index_select(1, SIX)).index_select(1, back)
    return y + (x[..., SIX, :] @ m.matrix)[:, back] + (x.gather(1, at) * m.vector)[:, back]


@inside(EITHER, segments=SEGMENTS)
def packed_positions_flipped(m: Any, x: Tensor) -> Tensor:
    """flip along positions, and along features."""
    return m.first(x.flip(-2)).flip(-2) + m.second(x.flip(-1)).flip(-1)


@inside(EITHER, segments=SEGMENTS)
def packed_positions_rolled(m: Any, x: Tensor) -> Tensor:
    """roll along positions."""
    return m.first(x.roll(2, 1)).roll(-2, 1)


@inside(EITHER, segments=SEGMENTS)
def packed_positions_swapped_by_cat(m: Any, x: Tensor) -> Tensor:
    """The halves of each packed row change places."""
    y = m.first(torch.cat([x[:, 3:], x[:, :3]], 1))
    return torch.cat([y[:, 3:], y[:, :3]], 1)


@inside(EXACT, segments=SEGMENTS)
def packed_rows(m: Any, x: Tensor) -> Tensor:
    """Segments without any move."""
    return m.first(x) * m.vector


# -- routers -----------------------------------------------------------------------------------------------------------


@inside(EXACT)
def experts_in_a_loop(m: Any, x: Tensor) -> Tensor:
    """Tokens are picked for each expert, weighed, and added back."""
    flat = x.reshape(-1, D)
    score = m.gate(flat)
    out = torch.zeros_like(flat)
    for k in range(EXPERTS):
        at = (score.argmax(-1) == k).nonzero().flatten()
        out.index_add_(0, at, (flat[at] @ m.experts[k]) * score.softmax(-1)[at, k, None])
    return out.view_as(x)


@inside(EXACT)
def tokens_duplicated_and_sorted(m: Any, x: Tensor) -> Tensor:
    """Each token goes to two experts; copies are sorted by expert and split."""
    flat = x.reshape(-1, D)
    weight, expert = m.gate(flat).topk(2, -1)
    order = expert.flatten().argsort()
    parts = flat.repeat_interleave(2, 0)[order].split(torch.bincount(expert.flatten(), minlength=EXPERTS).tolist())
    y = torch.cat([part @ m.experts[k] for k, part in enumerate(parts)])[order.argsort()]
    return (y.view(-1, 2, D) * weight[..., None]).sum(1).view_as(x)


@inside(EXACT)
def tokens_dropped_down_to_as_many_as_rows(m: Any, x: Tensor) -> Tensor:
    """The four best tokens of four rows go on; all others are dropped."""
    flat = x.reshape(-1, D)
    best = m.gate(flat)[:, 0].topk(4).indices
    out = torch.zeros_like(flat)
    out[best] = flat[best] @ m.matrix
    return out.view_as(x)


@inside(EXACT, rows=3)
def experts_choose_where_experts_are_as_many_as_rows(m: Any, x: Tensor) -> Tensor:
    """(E, capacity, d) picked tokens through bmm, with E = B and capacity = T."""
    flat = x.reshape(-1, D)
    best = m.gate(flat).t().topk(6, -1).indices
    y = torch.bmm(flat[best], m.experts)
    return torch.zeros_like(flat).index_add(0, best.flatten(), y.flatten(0, 1)).view_as(x)


@inside(EITHER, rows=3)
def experts_choose_by_one_hot_products(m: Any, x: Tensor) -> Tensor:
    """The same with one-hot dispatch and einsum."""
    flat = x.reshape(-1, D)
    pick = F.one_hot(m.gate(flat).t().topk(6, -1).indices, 18).double()
    return torch.einsum("ecn,ecd->nd", pick, torch.bmm(torch.einsum("ecn,nd->ecd", pick, flat), m.experts)).view_as(x)


def slots(score: Tensor) -> tuple[Tensor, Tensor]:
    """The expert of each token, and its place in that expert's buffer."""
    expert = score.argmax(-1)
    slot = torch.zeros_like(expert)
    for k in range(EXPERTS):
        slot[expert == k] = torch.arange(int((expert == k).sum()))
    return expert, slot


@inside(EITHER, rows=3)
def capacity_buffers_where_experts_are_as_many_as_rows(m: Any, x: Tensor) -> Tensor:
    """Tokens are put into (E, capacity, d) buffers, E = B."""
    flat = x.reshape(-1, D)
    expert, slot = slots(m.gate(flat))
    buffer = x.new_zeros(EXPERTS, 17, D).index_put((expert, slot), flat)
    return torch.bmm(buffer, m.experts)[expert, slot].view_as(x)


@inside(EITHER)
def capacity_of_all_positions(m: Any, x: Tensor) -> Tensor:
    """Buffers hold B·T slots, in another order than the batch's."""
    flat = x.reshape(-1, D)
    expert, slot = slots(m.gate(flat))
    buffer = x.new_zeros(EXPERTS, 24, D).index_put((expert, slot), flat)
    return torch.bmm(buffer, m.experts)[expert, slot].view_as(x)


@inside(EITHER)
def dispatch_by_setitem(m: Any, x: Tensor) -> Tensor:
    """buffer[slot] = tokens reorders all positions; experts read slices of the buffer."""
    slot = torch.arange(24).flip(0).roll(5)
    flat = x.reshape(-1, D)
    buffer = torch.zeros_like(flat)
    buffer[slot] = flat
    return torch.cat([m.first(buffer[:10]), m.second(buffer[10:])])[slot].view_as(x)


@inside(EITHER)
def dispatch_by_scatter(m: Any, x: Tensor) -> Tensor:
    """The same by index_copy and by scatter."""
    slot = torch.arange(24).flip(0).roll(5)
    flat = x.reshape(-1, D)
    copied = torch.zeros_like(flat).index_copy(0, slot, flat)
    scattered = torch.zeros_like(flat).scatter(0, slot[:, None].expand_as(flat), flat)
    return (m.first(copied) + m.second(scattered))[slot].view_as(x)


@inside(EXACT)
def all_experts_on_all_tokens(m: Any, x: Tensor) -> Tensor:
    """bmm of (E, B·T, d) and (E, d, d)."""
    return torch.bmm(x.reshape(1, -1, D).expand(EXPERTS, -1, -1), m.experts).sum(0).view_as(x)


@inside(EITHER)
def all_experts_on_all_tokens_time_first(m: Any, x: Tensor) -> Tensor:
    """The same with tokens in another order."""
    y = torch.bmm(x.transpose(0, 1).reshape(1, -1, D).expand(EXPERTS, -1, -1), m.experts)
    return y.sum(0).view(6, 4, D).transpose(0, 1)


@inside(EXACT)
def matrices_looked_up_by_a_router(m: Any, x: Tensor) -> Tensor:
    """experts[argmax]: one matrix per token."""
    return torch.einsum("btd,btdf->btf", x, m.experts[m.gate(x).argmax(-1)])


# -- constants of a row's shape ----------------------------------------------------------------------------------------


@inside(EXACT, flat=True)
def prototypes_as_many_as_rows(m: Any, x: Tensor) -> Tensor:
    """embedding(arange(K)) with K = B belongs to all rows."""
    table = m.table(torch.arange(4))
    return (x @ table.T).softmax(-1) @ table


@inside(EXACT)
def memory_of_the_shape_of_the_ids(m: Any, x: Tensor) -> Tensor:
    """embedding(ids of shape (B, T)) that are a constant."""
    memory = m.table(torch.arange(24).view(4, 6))
    return torch.einsum("btd,ksd->btks", x, memory).softmax(-1).flatten(2) @ memory.flatten(0, 1)


@inside(EXACT)
def a_vocabulary_as_large_as_the_batch(m: Any, x: Tensor) -> Tensor:
    """Fixed features of B·T words times a weight."""
    return (x @ F.linear(noise(24, D), m.matrix).T).softmax(-1) @ noise(24, D, seed=9)


@inside(EXACT, flat=True)
def fixed_features_as_many_as_rows(m: Any, x: Tensor) -> Tensor:
    """Fixed features of B words times a weight."""
    return (x @ F.linear(noise(4, D), m.matrix).T) @ noise(4, D, seed=9)


@inside(EXACT, rows=D, flat=True)
def a_mask_on_a_weight_as_high_as_the_batch(m: Any, x: Tensor) -> Tensor:
    """weight · mask, d = B."""
    return F.linear(x, m.matrix * (noise(D, D) > 0).double())


@inside(EXACT, rows=2, width=4)
def a_mask_on_a_weight_as_high_as_all_positions(m: Any, x: Tensor) -> Tensor:
    """weight · mask, d = B·T."""
    return F.linear(x, m.matrix * (noise(D, D) > 0).double())


@inside(EXACT, rows=D, flat=True)
def merged_low_rank_update_as_high_as_the_batch(m: Any, x: Tensor) -> Tensor:
    """Frozen W + up · down, d = B."""
    return F.linear(x, noise(D, D) + m.up @ m.down)


@inside(EXACT, rows=2, width=4)
def merged_low_rank_update_as_high_as_all_positions(m: Any, x: Tensor) -> Tensor:
    """Frozen W + up · down, d = B·T."""
    return F.linear(x, noise(D, D) + m.up @ m.down)


@inside(EXACT, rows=D, flat=True)
def a_factory_on_activations_as_high_as_the_batch(m: Any, x: Tensor) -> Tensor:
    """weight · x.new_ones(d, d), d = B."""
    return F.linear(x, m.matrix * x.new_ones(D, D))


@inside(EXACT, rows=2, width=4)
def a_factory_on_activations_as_high_as_all_positions(m: Any, x: Tensor) -> Tensor:
    """weight · x.new_ones(d, d), d = B·T."""
    return F.linear(x, m.matrix * x.new_ones(D, D))


@inside(EITHER)
def slopes_of_as_many_heads_as_rows(m: Any, x: Tensor) -> Tensor:
    """A learned slope per head times distances of shape (heads, T), heads = B."""
    bias = m.vector[:4, None] * torch.arange(6.0, dtype=x.dtype).expand(4, 6).contiguous()
    score = torch.einsum("btd,bsd->bts", x, x)[:, None] + bias[None, :, None, :]
    return torch.einsum("bhts,bsd->btd", score.softmax(-1), x)


@inside(EXACT, rows=6)
def relative_positions_where_rows_are_as_many_as_positions(m: Any, x: Tensor) -> Tensor:
    """embedding((T, T) distances), B = T."""
    at = torch.arange(6)
    return torch.einsum("btd,tsd->bts", x, m.table(at[:, None] - at + 6)).softmax(-1) @ x


@inside(EXACT, rows=2)
def a_learned_bias_of_as_many_heads_as_rows(m: Any, x: Tensor) -> Tensor:
    """Relative bias (heads, T, T) by addition and as attn_mask, heads = B."""
    q = x.view(2, 6, 2, 4).transpose(1, 2)
    at = torch.arange(6)
    bias = m.table.weight[at[:, None] - at + 6][..., :2].permute(2, 0, 1)
    y = (q @ q.mT + bias).softmax(-1) @ q + F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
    return y.transpose(1, 2).reshape(2, 6, D)


@inside(EXACT, rows=D, width=D)
def everything_is_eight(m: Any, x: Tensor) -> Tensor:
    """B = T = d: a vector, a column and a matrix by broadcasting, a matrix by product."""
    return x * m.vector + m.vector[:, None] + m.matrix + x @ m.matrix + m.matrix @ x


@inside(EXACT)
def a_parameter_with_a_value_per_row(m: Any, x: Tensor) -> Tensor:
    """A parameter (B, T, d), and one row of a table per row."""
    return x + m.table.weight[:24].view(4, 6, D) + m.table.weight[torch.arange(4)][:, None]


@inside(EITHER)
def a_parameter_with_a_value_per_position(m: Any, x: Tensor) -> Tensor:
    """A tensor made of parameters, laid out by all B·T positions."""
    return (x.reshape(-1, D) + m.table.weight[:24] * 2).view_as(x)


@inside(EITHER, segments=SEGMENTS)
def a_parameter_with_a_value_per_packed_position(m: Any, x: Tensor) -> Tensor:
    """The same with owners by position."""
    return (x.reshape(-1, D) + m.table.weight[:24] * 2).view_as(x)


class Labels(nn.Module):
    """Scores of inputs against labels that are made of fixed features."""

    def __init__(self, labels: int) -> None:
        super().__init__()
        self.encode, self.score = nn.Linear(5, D), nn.Linear(D, D)
        self.register_buffer("features", torch.randn(labels, 5))

    def labels(self) -> Tensor:
        return self.encode(self.features)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return torch.tanh(self.score(x)) @ (self.labels() if labels is None else labels).T


@construction(EXACT)
def a_buffer_with_as_many_vectors_as_rows() -> Trial:
    """Linear(buffer (B, k)) inside of a model with inputs (B, d)."""
    model, x, credit = Labels(4).double(), noise(4, D), noise(4, 4, seed=8)
    return Trial(model, lambda weight: (model(x) * credit * weight[:, None]).sum(), 4)


@construction(EXACT)
def a_buffer_with_as_many_vectors_as_positions() -> Trial:
    """Linear(buffer (B·T, k)) inside of a model with inputs (B, T, d)."""
    model, x, credit = Labels(12).double(), noise(3, 4, D), noise(3, 4, 12, seed=8)
    return Trial(model, lambda weight: (model(x) * credit * weight[:, None, None]).sum(), 3)


class Plain(nn.Module):
    """Fixed features are an attribute, not a buffer."""

    def __init__(self, labels: int) -> None:
        super().__init__()
        self.encode, self.score = nn.Linear(5, D), nn.Linear(D, D)
        self.features = noise(labels, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x) @ self.encode(self.features).T


@construction(EITHER)
def an_attribute_with_as_many_vectors_as_rows() -> Trial:
    """Linear(attribute (B, k)) inside of a model with inputs (B, d)."""
    model, x, credit = Plain(4).double(), noise(4, D), noise(4, 4, seed=8)
    return Trial(model, lambda weight: (model(x) * credit * weight[:, None]).sum(), 4)


@construction(EITHER)
def an_attribute_with_as_many_vectors_as_positions() -> Trial:
    """Linear(attribute (B·T, k)) inside of a model with inputs (B, T, d)."""
    model, x, credit = Plain(12).double(), noise(3, 4, D), noise(3, 4, 12, seed=8)
    return Trial(model, lambda weight: (model(x) * credit * weight[:, None, None]).sum(), 3)


@construction(EITHER)
def classes_as_an_argument() -> Trial:
    """model(x, arange(K)) with K = B: the second argument belongs to no row."""
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.table = nn.Linear(D, D), nn.Embedding(9, D)

        def forward(self, x: Tensor, classes: Tensor) -> Tensor:
            return self.score(x) @ self.table(classes).T

    model, x, classes, credit = Classes().double(), noise(4, D), torch.arange(4), noise(4, 4, seed=8)
    return Trial(model, lambda weight: (model(x, classes) * credit * weight[:, None]).sum(), 4)


@construction(EITHER)
def labels_before_the_model() -> Trial:
    """A method of the model runs on a constant of B vectors before the model sees its batch."""
    model, x, credit = Labels(4).double(), noise(4, D), noise(4, 4, seed=8)

    def loss(weight: Tensor) -> Tensor:
        return (model(x, model.labels()) * credit * weight[:, None]).sum()

    return Trial(model, loss, 4)


@construction(EXACT)
def a_pruned_layer_as_high_as_the_batch() -> Trial:
    """torch.nn.utils.prune multiplies the weight by a buffer, d = B."""
    layer = nn.Linear(D, D)
    prune.random_unstructured(layer, "weight", 0.5)
    return vectors(Vectors(layer).double(), rows=D)


@construction(EXACT)
def weight_decomposition_as_high_as_the_batch() -> Trial:
    """magnitude · (W + up·down) / ‖·‖ with a frozen W, d = B."""

    class Decomposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(D, D).requires_grad_(False)
            self.up, self.down, self.magnitude = weights(D, 2), weights(2, D), weights(D, 1)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.base.weight + self.up @ self.down
            return F.linear(x, self.magnitude * weight / weight.norm(dim=1, keepdim=True), self.base.bias)

    return vectors(Vectors(Decomposed()).double(), rows=D)


class PositionsFirst(nn.Module):
    """A model whose first operation is the lookup of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.embedding = nn.Embedding(12, D), nn.Embedding(VOCAB, D)
        self.head = nn.Linear(D, VOCAB)

    def forward(self, ids: Any) -> Tensor:
        ids = ids["ids"] if isinstance(ids, dict) else ids
        return self.head(torch.tanh(self.positions(torch.arange(ids.shape[1])) + self.embedding(ids)))


@construction(EITHER)
def forward_is_called_directly() -> Trial:
    """model.forward(ids) shows no input to hooks; positions come first, B = T."""
    return language(PositionsFirst().double(), rows=6, read=lambda model, ids: model.forward(ids))


@construction(EITHER)
def the_batch_is_a_dict() -> Trial:
    """model({"ids": ids}); positions come first, B = T."""
    return language(PositionsFirst().double(), rows=6, read=lambda model, ids: model({"ids": ids}))


@construction(EXACT)
def the_batch_is_a_keyword() -> Trial:
    """model(ids=ids); positions come first, B = T."""
    return language(PositionsFirst().double(), rows=6, read=lambda model, ids: model(ids=ids))


# -- functions that are not seen ---------------------------------------------------------------------------------------


class Product(Function):
    """x Wᵀ with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).t() @ x.flatten(0, 1)


class Rounded(Function):
    """Rounding whose gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round(decimals=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Turned(Function):
    """(B, T, d) → (T·B, d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.transpose(0, 1).reshape(-1, x.shape[-1]).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view(6, 4, -1).transpose(0, 1)


class Shuffled(Function):
    """x[order], hidden from torch functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.order = order
        with torch._C.DisableTorchFunction():
            return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad[ctx.order.argsort()], None


class Recomputed(Function):
    """A checkpoint written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.function = function
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            dx, *rest = torch.autograd.grad(ctx.function(x), [x, *parameters], grad)
        return dx, None, *rest


@inside(REFUSED, "cannot split into rows")
def a_function_uses_a_weight(m: Any, x: Tensor) -> Tensor:
    """autograd.Function multiplies by a weight."""
    return Product.apply(x, m.matrix)


@inside(REFUSED)
def a_function_uses_a_weight_besides(m: Any, x: Tensor) -> Tensor:
    """The same weight in a Function and in a product that is seen."""
    return Product.apply(x, m.matrix) + F.linear(x, m.matrix)


@inside(REFUSED, "cannot split into rows")
def a_function_rounds_a_weight(m: Any, x: Tensor) -> Tensor:
    """Quantisation of a weight by an autograd.Function."""
    return F.linear(x, Rounded.apply(m.first.weight), m.first.bias)


@inside(EXACT)
def straight_through_by_detach(m: Any, x: Tensor) -> Tensor:
    """Quantisation of a weight by w + (round(w) − w).detach(), and by torch's fake quantisation."""
    weight = m.matrix + (m.matrix.round(decimals=1) - m.matrix).detach()
    return F.linear(x, weight) + F.linear(x, torch.fake_quantize_per_tensor_affine(m.first.weight, 0.05, 0, -128, 127))


@inside(EITHER)
def a_function_turns_the_batch(m: Any, x: Tensor) -> Tensor:
    """autograd.Function (B, T, d) → (T·B, d) without parameters."""
    return m.first(Turned.apply(x)).view(6, 4, D).transpose(0, 1)


@inside(EITHER)
def a_function_permutes_rows_and_puts_them_back(m: Any, x: Tensor) -> Tensor:
    """autograd.Function x[order] on both sides of a Linear."""
    return Shuffled.apply(m.first(Shuffled.apply(x, ORDER)), BACK)


@torch.library.custom_op("attacks::shuffled", mutates_args=())
def shuffled(x: Tensor, order: Tensor) -> Tensor:
    return x[order].clone()


shuffled.register_autograd(lambda ctx, grad: (grad[ctx.saved_tensors[0].argsort()], None),
                           setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]))


@inside(EITHER)
def a_custom_operator_permutes_rows_and_puts_them_back(m: Any, x: Tensor) -> Tensor:
    """torch.library operator x[order] on both sides of a Linear."""
    return torch.ops.attacks.shuffled(m.first(torch.ops.attacks.shuffled(x, ORDER)), BACK)


@torch.jit.script
def scripted_order(x: Tensor, order: Tensor) -> Tensor:
    return x[order] * 1.0


@inside(EITHER)
def a_script_permutes_rows_and_puts_them_back(m: Any, x: Tensor) -> Tensor:
    """torch.jit.script function x[order] on both sides of a Linear."""
    return scripted_order(m.first(scripted_order(x, ORDER)), BACK)


@inside(EITHER)
def rows_permuted_and_put_back_without_torch_functions(m: Any, x: Tensor) -> Tensor:
    """DisableTorchFunction hides x[order] on both sides of a Linear."""
    with torch._C.DisableTorchFunction():
        y = x[ORDER]
    y = m.first(y)
    with torch._C.DisableTorchFunction():
        return y[BACK]


@inside(EITHER, rows=6)
def vmap_turns_the_batch_and_turns_it_back(m: Any, x: Tensor) -> Tensor:
    """vmap from axis 1 to axis 0 on both sides of a Linear, B = T."""
    turn = torch.vmap(lambda r: r * 1.0, in_dims=1, out_dims=0)
    return turn(m.first(turn(x)))


@torch.library.custom_op("attacks::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(-1, x.shape[-1]).clone()


turned.register_autograd(lambda ctx, grad: grad.view(6, 4, -1).transpose(0, 1))


@torch.library.custom_op("attacks::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


product.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].flatten(0, 1).t() @ grad.flatten(0, 1)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@inside(EITHER)
def a_custom_operator_turns_the_batch(m: Any, x: Tensor) -> Tensor:
    """torch.library operator (B, T, d) → (T·B, d)."""
    return m.first(torch.ops.attacks.turned(x)).view(6, 4, D).transpose(0, 1)


@inside(EXACT)
def a_custom_operator_uses_a_weight(m: Any, x: Tensor) -> Tensor:
    """torch.library operator that multiplies by a weight."""
    return torch.ops.attacks.product(x, m.matrix)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(-1, x.shape[2])


@inside(EITHER)
def a_script_turns_the_batch(m: Any, x: Tensor) -> Tensor:
    """torch.jit.script function (B, T, d) → (T·B, d)."""
    return m.first(scripted(x)).view(6, 4, D).transpose(0, 1)


@construction(REFUSED)
def a_scripted_module() -> Trial:
    """torch.jit.script'ed Linear."""
    return middle(torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.Tanh()).double()))


@inside(EITHER)
def torch_functions_are_switched_off(m: Any, x: Tensor) -> Tensor:
    """DisableTorchFunction hides a transpose."""
    with torch._C.DisableTorchFunction():
        y = x.transpose(0, 1).reshape(-1, D)
    return m.first(y).view(6, 4, D).transpose(0, 1)


@construction(EITHER)
def a_compiled_function_with_a_weight() -> Trial:
    """torch.compile (aot_eager) of a closure that uses a Linear."""
    torch._dynamo.reset()
    parts = Parts()
    run = torch.compile(lambda x: torch.tanh(parts.first(x)), backend="aot_eager")
    return middle(Apply(lambda m, x: run(x), parts))


@construction(EITHER)
def a_compiled_function_turns_the_batch() -> Trial:
    """torch.compile (aot_eager) of (B, T, d) → (T·B, d)."""
    torch._dynamo.reset()
    run = torch.compile(lambda x: x.transpose(0, 1).reshape(-1, D), backend="aot_eager")
    return middle(Apply(lambda m, x: m.first(run(x)).view(6, 4, D).transpose(0, 1), Parts()))


@construction(EITHER)
def a_compiled_function_permutes_rows_and_puts_them_back() -> Trial:
    """torch.compile (aot_eager) of x[order] on both sides of a Linear."""
    torch._dynamo.reset()
    run = torch.compile(lambda x, order: x[order] * 1.0, backend="aot_eager")
    return middle(Apply(lambda m, x: run(m.first(run(x, ORDER)), BACK), Parts()))


@inside(REFUSED, "cannot split into rows")
def vmap_of_a_linear(m: Any, x: Tensor) -> Tensor:
    """A Linear under vmap."""
    return torch.vmap(m.first)(x)


@inside(REFUSED)
def vmap_of_a_linear_besides(m: Any, x: Tensor) -> Tensor:
    """The same Linear under vmap and outside."""
    return torch.vmap(m.first)(x) + m.first(x)


@inside(REFUSED)
def a_gradient_of_activations(m: Any, x: Tensor) -> Tensor:
    """torch.func.grad and jvp of a function with weights."""
    slope = torch.func.grad(lambda y: torch.tanh(y @ m.matrix).sum())(x)
    return slope + torch.func.jvp(lambda y: torch.tanh(y @ m.matrix), (x,), (torch.ones_like(x),))[1]


@inside(EXACT)
def functional_call_with_other_weights(m: Any, x: Tensor) -> Tensor:
    """torch.func.functional_call with weights made of parameters."""
    return torch.func.functional_call(m.first, {"weight": m.first.weight * 2, "bias": m.vector}, (x,))


@construction(EXACT)
def functional_call_of_the_whole_model() -> Trial:
    """Every parameter of the model is replaced by 1.5 times itself."""
    def read(model: nn.Module, ids: Tensor) -> Tensor:
        return torch.func.functional_call(model, {name: p * 1.5 for name, p in model.named_parameters()}, (ids,))

    return middle(nn.Linear(D, D), read=read)


class Kind(Tensor):
    """A tensor subclass."""


@inside(EITHER)
def activations_of_a_subclass(m: Any, x: Tensor) -> Tensor:
    """A Linear on a tensor subclass."""
    return m.first(x.as_subclass(Kind)).as_subclass(Tensor)


@inside(EITHER)
def rows_permuted_in_a_subclass(m: Any, x: Tensor) -> Tensor:
    """Rows are shuffled while activations are of a subclass."""
    return m.first(x.as_subclass(Kind)[ORDER].as_subclass(Tensor))[BACK]


@inside(EITHER)
def nested_tensors(m: Any, x: Tensor) -> Tensor:
    """A Linear on a jagged tensor."""
    ragged = torch.nested.as_nested_tensor(list(x), layout=torch.jagged)
    return torch.nested.to_padded_tensor(m.first(ragged), 0.0)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@inside(EXACT)
def checkpoints(m: Any, x: Tensor) -> Tensor:
    """Two layers in a checkpoint of each kind."""
    y = checkpoint(lambda z: m.second(torch.tanh(m.first(z))), x, use_reentrant=False)
    return checkpoint(lambda z: (z @ m.matrix) * m.vector + m.scalar, y, use_reentrant=True)


@inside(EXACT)
def checkpoints_inside_of_checkpoints(m: Any, x: Tensor) -> Tensor:
    """A reentrant checkpoint in another."""
    def inner(z: Tensor) -> Tensor:
        return checkpoint(m.first, torch.tanh(m.second(z)), use_reentrant=True)

    return checkpoint(inner, x, use_reentrant=True)


@inside(EXACT)
def a_layer_in_two_checkpoints(m: Any, x: Tensor) -> Tensor:
    """The same layer in two reentrant checkpoints."""
    return checkpoint(m.first, torch.tanh(checkpoint(m.first, x, use_reentrant=True)), use_reentrant=True)


@inside(EITHER)
def a_checkpoint_permutes_rows(m: Any, x: Tensor) -> Tensor:
    """Rows are shuffled inside of a checkpoint of each kind."""
    y = checkpoint(lambda z: m.first(z[ORDER])[BACK], x, use_reentrant=True)
    return y + checkpoint(lambda z: m.second(z[ORDER])[BACK], x, use_reentrant=False)


@inside(EITHER)
def a_checkpoint_of_permuted_rows(m: Any, x: Tensor) -> Tensor:
    """Rows are shuffled before a reentrant checkpoint and put back after it."""
    return checkpoint(m.first, x[ORDER], use_reentrant=True)[BACK]


@inside(EITHER)
def a_checkpoint_of_permuted_rows_that_is_not_reentrant(m: Any, x: Tensor) -> Tensor:
    """The same with use_reentrant=False."""
    return checkpoint(m.first, x[ORDER], use_reentrant=False)[BACK]


@inside(EITHER)
def a_checkpoint_of_a_turned_batch(m: Any, x: Tensor) -> Tensor:
    """A reentrant checkpoint of (T·B, d)."""
    y = checkpoint(m.first, x.transpose(0, 1).reshape(-1, D), use_reentrant=True)
    return y.view(6, 4, D).transpose(0, 1)


@inside(EITHER)
def a_weight_made_in_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    """tanh(W) W in a checkpoint of each kind."""
    def function(w: Tensor) -> Tensor:
        return torch.tanh(w) @ w

    return x @ checkpoint(function, m.matrix, use_reentrant=False) \
        + x @ checkpoint(function, m.up @ m.down, use_reentrant=True)


@inside(EITHER)
def a_checkpoint_by_hand(m: Any, x: Tensor) -> Tensor:
    """autograd.Function that runs a layer twice, under no_grad and again in its backward."""
    return Recomputed.apply(x, lambda y: F.linear(torch.tanh(F.linear(y, m.matrix)), m.matrix), m.matrix)


# -- tensors made of parameters ----------------------------------------------------------------------------------------


@inside(EITHER)
def a_copy_of_a_weight_is_changed_in_place(m: Any, x: Tensor) -> Tensor:
    """One row of a clone is set to 0, one column is doubled."""
    weight = m.matrix.clone()
    weight[0] = 0
    weight[:, 0] *= 2
    return x @ weight


@inside(EITHER)
def a_view_of_a_copy_is_changed_in_place(m: Any, x: Tensor) -> Tensor:
    """A part of a clone is negated through a view; the weight itself is used too."""
    weight = m.matrix.clone()
    weight.view(-1)[:D].neg_()
    return x @ weight + x @ m.matrix


@inside(EXACT)
def a_weight_and_its_transpose(m: Any, x: Tensor) -> Tensor:
    """W, Wᵀ, a contiguous copy of Wᵀ, and a part that is detached."""
    y = torch.tanh(x @ m.matrix) @ m.matrix.t() + F.linear(x, m.matrix) + x @ m.matrix.T.contiguous()
    return y + x @ torch.cat([m.matrix[:, :4], m.matrix[:, 4:].detach()], 1)


@inside(EXACT)
def merged_and_normalised_updates(m: Any, x: Tensor) -> Tensor:
    """W + up·down, and its rows normalised and scaled."""
    weight = m.first.weight + m.up @ m.down
    scaled = m.vector[:, None] * weight / weight.norm(dim=1, keepdim=True)
    return F.linear(x, weight, m.first.bias) + F.linear(x, scaled)


@inside(EXACT)
def weights_made_of_activations(m: Any, x: Tensor) -> Tensor:
    """Hypernetworks: one matrix per row from activations and parameters."""
    outer = (x.mean(1) @ m.matrix)[:, :, None] * m.vector
    mixed = torch.einsum("bd,edf->bef", x.mean(1), m.experts)
    return torch.bmm(x, outer) + torch.einsum("btd,bed->bte", x, mixed) @ m.gate.weight


@inside(EXACT)
def convolutions(m: Any, x: Tensor) -> Tensor:
    """conv1d, its transpose, conv2d, and a product over unfolded windows."""
    y = m.conv(x.transpose(1, 2)) + F.conv_transpose1d(x.transpose(1, 2), m.conv.weight, padding=1)
    z = F.conv2d(x[:, None], m.matrix[None, None, :3, :3], padding=1)[:, 0]
    windows = F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).flatten(-2)
    return y.transpose(1, 2) + z + F.linear(windows, torch.cat([m.matrix, m.first.weight, m.second.weight], 1))


@inside(EITHER)
def rows_as_groups_of_one_convolution(m: Any, x: Tensor) -> Tensor:
    """conv1d of (1, B·d, T) with B groups and repeated weights."""
    y = F.conv1d(x.transpose(1, 2).reshape(1, -1, 6), m.conv.weight.repeat(4, 1, 1), groups=4, padding=1)
    return y.view(4, D, 6).transpose(1, 2)


@inside(EXACT)
def bilinear_forms(m: Any, x: Tensor) -> Tensor:
    """F.bilinear with a stack of matrices."""
    return F.bilinear(x, torch.tanh(x), m.experts) @ m.gate.weight


@inside(EXACT)
def soft_prompts_and_sinks(m: Any, x: Tensor) -> Tensor:
    """A class token, a prompt and a sink, expanded to the batch and concatenated."""
    prompt = m.table.weight[:3].unsqueeze(0).repeat(4, 1, 1)
    y = m.first(torch.cat([m.vector.expand(4, 1, D), prompt, x], 1)).cumsum(1)[:, 4:]
    return y + torch.cat([x @ x.mT, m.scalar.expand(4, 6, 1)], -1).softmax(-1)[..., :-1] @ x


@inside(EXACT)
def parameters_in_places_of_a_mask(m: Any, x: Tensor) -> Tensor:
    """where and masked_fill with parameters, also where no activation is in the call."""
    mask = torch.zeros(4, 6, 1, dtype=torch.bool)
    mask[1, 2] = mask[3] = True
    return torch.where(mask, m.vector, x) + x.masked_fill(mask, m.scalar) + torch.where(mask, m.down[0], m.scalar)


@inside(REFUSED, "in place")
def parameters_written_into_activations(m: Any, x: Tensor) -> Tensor:
    """y[2, :] = parameter."""
    y = m.first(x).clone()
    y[2, :] = m.vector
    return y


@inside(EXACT)
def lookups_by_activations(m: Any, x: Tensor) -> Tensor:
    """Ids come from activations, some negative, and from the table's end."""
    ids = m.gate(x).argmax(-1)
    return m.table(ids) + m.table.weight[-1 - ids] + x


@construction(EXACT)
def lookup_by_keywords() -> Trial:
    """torch.embedding(weight=..., indices=...)."""
    class Keywords(Ids):
        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.embedding(weight=self.embedding.weight, indices=ids))

    return language(Keywords(lambda ids: ids, lambda y: y).double())


@inside(EXACT)
def a_norm_under_no_grad(m: Any, x: Tensor) -> Tensor:
    """The weight is used under no_grad first, and into out=."""
    with torch.no_grad():
        size = (x @ m.matrix).norm(dim=-1, keepdim=True)
        fixed = torch.empty_like(x)
        torch.matmul(x, m.matrix, out=fixed)
    return x @ m.matrix / size + fixed


@inside(EITHER)
def complex_views(m: Any, x: Tensor) -> Tensor:
    """A real parameter is viewed as a complex matrix, and complex activations are multiplied by it."""
    weight = torch.view_as_complex(m.matrix.view(D, 4, 2))
    return torch.view_as_real(x.to(torch.complex128) @ weight).flatten(-2)


@inside(EITHER)
def complex_products_with_a_conjugate(m: Any, x: Tensor) -> Tensor:
    """(x C) Cᴴ for C made of two real parameters."""
    weight = torch.complex(m.matrix, m.first.weight)
    return (x.to(torch.complex128) @ weight @ weight.H).real


@inside(EITHER)
def complex_linear(m: Any, x: Tensor) -> Tensor:
    """F.linear of complex activations and a real parameter cast to complex."""
    z = F.linear(torch.complex(x, x.roll(1, -1)), m.matrix.to(torch.complex128))
    return torch.view_as_real(z).sum(-1)


@inside(EITHER)
def complex_rotation(m: Any, x: Tensor) -> Tensor:
    """Pairs of features are rotated by complex numbers made of a real parameter."""
    turn = torch.view_as_complex(m.vector.view(4, 2))
    return torch.view_as_real(torch.view_as_complex(x.reshape(4, 6, 4, 2)) * turn).flatten(-2)


@inside(EITHER, flat=True, rows=D)
def a_weight_from_the_left(m: Any, x: Tensor) -> Tensor:
    """(W xᵀ)ᵀ with B = d."""
    return (m.matrix @ x.t()).t()


# -- layers ------------------------------------------------------------------------------------------------------------


@inside(EXACT)
def a_recurrent_loop(m: Any, x: Tensor) -> Tensor:
    """h ← tanh(x_t W + U h) from a learned state; steps stacked along axis 1."""
    h, out = m.vector.expand(4, D), []
    for t in range(6):
        h = torch.tanh(x[:, t] @ m.matrix + m.first(h))
        out.append(h)
    return torch.stack(out, 1)


@inside(EITHER, rows=6)
def a_recurrent_loop_with_time_first(m: Any, x: Tensor) -> Tensor:
    """The same with steps stacked along axis 0 before a head, B = T."""
    h, out = m.vector.expand(6, D), []
    for t in range(6):
        h = torch.tanh(x[:, t] @ m.matrix + m.first(h))
        out.append(h)
    return m.second(torch.stack(out)).transpose(0, 1)


class Cells(nn.Module):
    """An LSTMCell in a Python loop, with a generator for its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.start = nn.LSTMCell(D, D), weights(D)

    def steps(self, x: Tensor) -> Any:
        h = c = self.start.expand(len(x), -1)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            yield h

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(list(self.steps(x)), 1)


@construction(EXACT)
def cells_in_a_loop() -> Trial:
    """LSTMCell from a learned state, B = d."""
    return middle(Cells(), rows=D)


@construction(EXACT)
def a_time_first_lstm() -> Trial:
    """nn.LSTM on (T, B, d), B = T."""
    return middle(Apply(lambda m, x: m(x.transpose(0, 1))[0].transpose(0, 1), nn.LSTM(D, D)), rows=6)


@construction(EITHER)
def an_lstm_on_a_packed_sequence() -> Trial:
    """pack_padded_sequence with rows of different lengths."""
    def run(m: Any, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([6, 3, 5, 2]), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(m(packed)[0], batch_first=True)[0]

    return middle(Apply(run, nn.LSTM(D, D, batch_first=True)))


@construction(EITHER)
def a_linear_on_packed_data() -> Trial:
    """A Linear on PackedSequence.data: (T·B, d), time first."""
    def run(m: Any, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([6, 6, 6, 6]), batch_first=True)
        return pad_packed_sequence(PackedSequence(m(packed.data), *packed[1:]), batch_first=True)[0]

    return middle(Apply(run, nn.Linear(D, D)))


@construction(EXACT)
def chunks_and_replicas() -> Trial:
    """A batch is split over a layer and a shallow copy of it, rows and positions in chunks."""
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            replica = nn.Linear.__new__(nn.Linear)
            replica.__dict__ = dict(self.layer.__dict__)
            y = torch.cat([self.layer(x[:2]), replica(x[2:])])
            y = torch.cat([self.layer(part) for part in y.chunk(3, 1)], 1)
            return torch.cat([self.layer(part) for part in y.reshape(-1, D).split(7)]).view_as(x)

    return middle(Split())


@construction(EITHER)
def a_copy_of_a_layer() -> Trial:
    """copy.deepcopy of a layer inside of the forward: its gradient goes nowhere."""
    return middle(Apply(lambda m, x: m(x) + copy.deepcopy(m)(x), nn.Linear(D, D)))


@construction(EXACT)
def lists_and_dicts_of_parameters() -> Trial:
    """ParameterList and ParameterDict."""
    parts = nn.Module()
    parts.several = nn.ParameterList([weights(D, D), weights(D)])
    parts.named = nn.ParameterDict({"a": weights(D)})
    return middle(Apply(lambda m, x: x @ m.several[0] + m.several[1] + x * m.named["a"], parts))


@construction(EXACT)
def a_cached_parametrisation() -> Trial:
    """parametrize.cached() around the forward of an orthogonal layer used twice."""
    layer = parametrizations.orthogonal(nn.Linear(D, D))

    def read(model: nn.Module, ids: Tensor) -> Tensor:
        with parametrize.cached():
            return model(ids)

    return middle(Apply(lambda m, x: m(torch.tanh(m(x))), layer), read=read)


@construction(REFUSED)
def a_weight_cached_before_the_context() -> Trial:
    """A tensor made of a parameter outlives the context in which it was made."""
    parts = Parts().double()
    held: list[Tensor] = []

    def run(m: Any, x: Tensor) -> Tensor:
        if not held:
            held.append(torch.tanh(m.matrix))
        return x @ held[0]

    trial = middle(Apply(run, parts))
    plain = trial.loss

    def loss(weight: Tensor) -> Any:
        return Twice(plain(weight), retain=1)

    trial.loss = loss
    return trial


@construction(EXACT)
def lazy_layers() -> Trial:
    """LazyLinear that was run once before."""
    return middle(nn.LazyLinear(D).double())


@construction(REFUSED)
def a_parameter_is_replaced_in_the_forward() -> Trial:
    """Every forward puts a new parameter under the old name."""
    class Fresh(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weights(D, D)

        def forward(self, x: Tensor) -> Tensor:
            self.weight = nn.Parameter(self.weight.detach().clone())
            return x @ self.weight

    return middle(Fresh())


# -- hooks -------------------------------------------------------------------------------------------------------------


@construction(EXACT)
def hooks_replace_inputs_and_outputs() -> Trial:
    """Forward hooks shuffle rows, scale the output and add the bias once more."""
    layer = nn.Linear(D, D)
    layer.register_forward_pre_hook(lambda m, args: (args[0][ORDER],))
    layer.register_forward_hook(lambda m, args, out: out[BACK] * 2 + m.bias)
    return middle(layer)


@construction(EXACT)
def hooks_replace_gradients() -> Trial:
    """Full backward hooks and a hook on an activation change gradients."""
    def clamped(m: Any, x: Tensor) -> Tensor:
        y = m(x)
        y.register_hook(lambda g: g.clamp(-0.02, 0.02))
        return y

    layer = nn.Linear(D, D)
    layer.register_full_backward_hook(lambda m, down, up: (down[0] * 0.5,))
    layer.register_full_backward_pre_hook(lambda m, up: (up[0] * 0.5,))
    return middle(Apply(clamped, layer))


@construction(REFUSED, "self-check failed")
def a_hook_doubles_a_parameters_gradient() -> Trial:
    """p.register_hook(2 g) on a layer's weight."""
    layer = nn.Linear(D, D)
    layer.weight.register_hook(lambda g: g * 2)
    return middle(layer)


@construction(EITHER)
def hooks_that_count() -> Trial:
    """Hooks on a parameter and on a tensor made of it count their calls in a buffer."""
    parts = Parts()
    parts.register_buffer("calls", torch.zeros(()))

    def count(g: Tensor) -> None:
        parts.calls.add_(1)

    def run(m: Any, x: Tensor) -> Tensor:
        weight = torch.tanh(m.matrix)
        weight.register_hook(count)
        return x @ weight

    parts.matrix.register_hook(count)
    return middle(Apply(run, parts))


# -- losses, backwards and batches -------------------------------------------------------------------------------------


class Twice:
    """A loss whose backward is done otherwise."""

    def __init__(self, loss: Tensor, retain: int = 0, how: Callable[[Tensor], None] | None = None) -> None:
        self.loss, self.retain, self.how = loss, retain, how

    def backward(self) -> None:
        for _ in range(self.retain):
            self.loss.backward(retain_graph=True)
        if self.how is not None:
            self.how(self.loss)


def otherwise(**kwargs: Any) -> Trial:
    trial = middle(nn.Linear(D, D))
    plain = trial.loss
    trial.loss = lambda weight: Twice(plain(weight), **kwargs)
    return trial


@construction(EXACT)
def the_graph_is_retained() -> Trial:
    """backward(retain_graph=True), once."""
    return otherwise(retain=1)


@construction(REFUSED, "two backward passes")
def the_graph_is_taken_back_twice() -> Trial:
    """backward(retain_graph=True), twice."""
    return otherwise(retain=2)


@construction(EXACT)
def backward_of_a_list() -> Trial:
    """torch.autograd.backward([loss])."""
    return otherwise(how=lambda loss: torch.autograd.backward([loss]))


@construction(EITHER)
def gradients_by_autograd_grad() -> Trial:
    """torch.autograd.grad, with .grad filled by hand."""
    trial = middle(nn.Linear(D, D))
    plain, model = trial.loss, trial.model

    def fill(loss: Tensor) -> None:
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.grad = g

    trial.loss = lambda weight: Twice(plain(weight), how=fill)
    return trial


@construction(REFUSED)
def gradients_of_some_parameters_only() -> Trial:
    """backward(inputs=[...])."""
    trial = middle(nn.Linear(D, D))
    plain, model = trial.loss, trial.model
    trial.loss = lambda weight: Twice(plain(weight), how=lambda loss: loss.backward(inputs=[model.head.weight]))
    return trial


@construction(REFUSED)
def a_gradient_penalty() -> Trial:
    """The loss holds a gradient with respect to activations (create_graph)."""
    model, ids, credit = Language(nn.Linear(D, D)).double(), tokens(4, 6), noise(4, 6, VOCAB)

    def loss(weight: Tensor) -> Tensor:
        x = model.embedding(ids)
        (g,) = torch.autograd.grad((model.head(torch.tanh(model.middle(x))) * credit).sum(), x, create_graph=True)
        return (g.square().sum((1, 2)) * weight).sum()

    return Trial(model, loss, 4)


@construction(EITHER)
def a_gradient_inside_of_the_forward() -> Trial:
    """The forward takes a gradient of detached activations."""
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(torch.tanh(y @ m.matrix).sum(), y)
        return x @ m.matrix - 0.1 * g

    return middle(Apply(run, Parts()))


def with_scalar(loss: Callable[[Any, Tensor, Tensor], Tensor]) -> Trial:
    """A model with a scalar parameter that only the loss uses."""
    model = Language(Apply(lambda m, x: m.first(x), Parts())).double()
    ids = tokens(4, 6)
    return Trial(model, lambda weight: loss(model, model(ids), weight), 4)


@construction(EXACT)
def a_temperature_in_the_loss() -> Trial:
    """Logits are divided by exp(parameter) outside of the model."""
    return with_scalar(lambda model, y, weight: (
        log_likelihood(y / model.middle.parts.scalar.exp(), tokens(4, 6)) * noise(4, 6) * weight[:, None]).sum())


@construction(EITHER)
def a_scalar_times_each_rows_loss() -> Trial:
    """parameter · J_i, per row."""
    return with_scalar(lambda model, y, weight: (
        (y * noise(4, 6, VOCAB)).sum((1, 2)) * model.middle.parts.scalar * weight).sum())


@construction(REFUSED)
def a_scalar_times_the_whole_loss() -> Trial:
    """parameter · Σ_i J_i."""
    return with_scalar(lambda model, y, weight: (
        y * noise(4, 6, VOCAB) * weight[:, None, None]).sum() * model.middle.parts.scalar)


@construction(REFUSED)
def weight_decay_in_the_loss() -> Trial:
    """‖W‖² belongs to no row."""
    return with_scalar(lambda model, y, weight: (
        y * weight[:, None, None]).sum() + weight.sum() * model.head.weight.square().sum())


@construction(EXACT)
def a_loss_of_some_rows() -> Trial:
    """Rows 1 and 2 alone reach the loss, by a slice; the others' rows of K are 0."""
    return with_scalar(lambda model, y, weight: (y[1:3] * noise(2, 6, VOCAB) * weight[1:3, None, None]).sum())


@construction(EXACT)
def a_head_on_completion_tokens() -> Trial:
    """The head runs outside of the model's forward, on masked positions alone."""
    model, keep = Language(nn.Linear(D, D)).double(), noise(4, 6) > -0.3
    owner, ids = torch.arange(4)[:, None].expand(4, 6)[keep], tokens(4, 6)
    credit = noise(int(keep.sum()), VOCAB)
    outer = nn.Module()
    outer.model = model

    def loss(weight: Tensor) -> Tensor:
        x = torch.tanh(model.middle(model.embedding(ids)))
        return (model.head(x[keep]) * credit * weight[owner][:, None]).sum()

    return Trial(model, loss, 4)


@construction(EXACT)
def data_made_inside_of_the_context() -> Trial:
    """Ids are made, sliced and copied in the context before the model sees them."""
    model, credit = Language(nn.Linear(D, D)).double(), noise(4, 6, VOCAB)

    def loss(weight: Tensor) -> Tensor:
        return (model(tokens(4, 7)[ORDER][:, :-1].contiguous().long()) * credit * weight[:, None, None]).sum()

    return Trial(model, loss, 4)


@construction(EXACT)
def no_gradient_at_all() -> Trial:
    """All credits are 0."""
    trial = middle(nn.Linear(D, D))
    plain = trial.loss
    trial.loss = lambda weight: plain(weight * 0)
    return trial


@construction(EXACT)
def one_row_of_one_position() -> Trial:
    """B = T = 1."""
    return middle(Apply(lambda m, x: m.first(x) * m.vector, Parts()), rows=1, width=1)


@construction(EITHER)
def rows_of_no_positions() -> Trial:
    """ids of shape (4, 0)."""
    model = Language(nn.Linear(D, D)).double()
    return Trial(model, lambda weight: model(tokens(4, 0)).sum(), 4)


@construction(EITHER)
def images() -> Trial:
    """Inputs (B, channels, height, width) with as many channels as rows."""
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)).double()
    x, credit = noise(3, 3, 5, 5), noise(3, 2)
    return Trial(model, lambda weight: (model(x) * credit * weight[:, None]).sum(), 3)


@construction(EITHER)
def a_mask_of_positions_is_the_first_argument() -> Trial:
    """model(mask (T,), x (B, T, d))."""
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, 3)

        def forward(self, mask: Tensor, x: Tensor) -> Tensor:
            return self.linear(x * mask[:, None])

    model, x, credit = Masked().double(), noise(4, 6, D), noise(4, 6, 3, seed=8)
    mask = torch.ones(6, dtype=torch.float64)
    return Trial(model, lambda weight: (model(mask, x) * credit * weight[:, None, None]).sum(), 4)


@construction(EITHER)
def the_batch_is_the_second_argument() -> Trial:
    """model(table, x): the first tensor is a constant of the batch's shape."""
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.value = nn.Linear(6 * D, 5), nn.Linear(D, 5)

        def forward(self, table: Tensor, x: Tensor) -> Tensor:
            return self.value(x) @ self.key(table.flatten(1)).T

    model, table, x, credit = Late().double(), noise(4, 6, D), noise(4, 6, D, seed=8), noise(4, 6, 4, seed=9)
    return Trial(model, lambda weight: (model(table, x) * credit * weight[:, None, None]).sum(), 4)


@inside(EXACT, dtype=torch.bfloat16, tolerance=4e-2)
def half_precision(m: Any, x: Tensor) -> Tensor:
    """bfloat16: products, broadcasting and a convolution."""
    return m.conv(x.transpose(1, 2)).transpose(1, 2) * m.vector + m.first(x)


@inside(EITHER, dtype=torch.float32, autocast=True, tolerance=4e-2)
def autocast_to_half_precision(m: Any, x: Tensor) -> Tensor:
    """float32 parameters under bfloat16 autocast: products, a convolution, a stack."""
    y = m.conv(x.transpose(1, 2)).transpose(1, 2) * m.vector + m.first(x) + x @ m.matrix
    return y + torch.bmm(x.reshape(1, -1, D).expand(EXPERTS, -1, -1), m.experts).sum(0).view_as(x)


# -- rollouts that cancel: every sum over them is 0, and so is every check of sums -----------------------------------


def cancelling(function: Callable[[Any, Tensor], Tensor], parts: nn.Module) -> Trial:
    """Two pairs of equal rollouts with opposite credits."""
    model = Language(Apply(function, parts)).double()
    ids, credit = tokens(2, 6)[[0, 0, 1, 1]], noise(2, 6, VOCAB)[[0, 0, 1, 1]]
    credit = credit * torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64).view(4, 1, 1)
    return Trial(model, lambda weight: (model(ids) * credit * weight[:, None, None]).sum(), 4)


@construction(EXACT)
def cancelling_rollouts() -> Trial:
    """Every gradient is 0 but for rounding; rows are not."""
    return cancelling(lambda m, x: m.first(x) * m.vector, Parts())


@construction(REFUSED)
def cancelling_rollouts_in_a_function() -> Trial:
    """A weight in an autograd.Function."""
    return cancelling(lambda m, x: Product.apply(x, m.matrix), Parts())


@construction(REFUSED)
def cancelling_rollouts_in_a_function_besides() -> Trial:
    """The same weight in an autograd.Function and in a product that is seen."""
    return cancelling(lambda m, x: Product.apply(x, m.matrix) + F.linear(x, m.matrix), Parts())


@construction(EITHER)
def cancelling_rollouts_and_a_copy_changed_in_place() -> Trial:
    """One row of a clone of a weight is set to 0, one column is tripled."""
    def run(m: Any, x: Tensor) -> Tensor:
        weight = m.matrix.clone()
        weight[0] = 0
        weight[:, 1] *= 3
        return F.linear(x, weight)

    return cancelling(run, Parts())


@construction(EITHER)
def cancelling_rollouts_and_a_hook_on_a_parameter() -> Trial:
    """A hook triples a parameter's gradient."""
    parts = Parts()
    parts.matrix.register_hook(lambda g: g * 3)
    return cancelling(lambda m, x: F.linear(x, m.matrix), parts)


# -- results and side effects ------------------------------------------------------------------------------------------


@dataclass
class Output:
    hidden: Tensor


@construction(EXACT)
def a_module_returns_a_dataclass() -> Trial:
    """The result is no pytree, so nobody finds the tensors inside."""
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weights(D, D)

        def forward(self, x: Tensor) -> Output:
            return Output(torch.tanh(x @ self.weight))

    return middle(Apply(lambda m, x: m(x).hidden, Block()))


@construction(EXACT)
def a_module_returns_a_distribution() -> Trial:
    """A Gaussian actor with a learned deviation, and a critic, on a frozen trunk."""
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(5, D).requires_grad_(False)
            self.mean, self.deviation, self.value = nn.Linear(D, 3), weights(3), nn.Linear(D, 1)

        def forward(self, x: Tensor) -> tuple[Normal, Tensor]:
            h = torch.tanh(self.trunk(x))
            return Normal(self.mean(h), self.deviation.exp()), self.value(h)

    model, x, action, gain = Actor().double(), noise(4, 6, 5), noise(4, 6, 3, seed=8), noise(4, 6, 1, seed=9)

    def loss(weight: Tensor) -> Tensor:
        policy, value = model(x)
        return (weight * ((policy.log_prob(action) * gain).sum((1, 2)) + (value - gain).square().sum((1, 2)))).sum()

    return Trial(model, loss, 4)


@construction(EXACT)
def losses_kept_as_attributes_and_by_hooks() -> Trial:
    """A router keeps a balance loss as an attribute; a hook keeps its logits for another."""
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(D, EXPERTS), weights(EXPERTS, D, D)

        def forward(self, x: Tensor) -> Tensor:
            share = self.gate(x).softmax(-1)
            kept["balance"] = share.square().sum((1, 2))
            return torch.einsum("bte,btd,edf->btf", share, x, self.experts)

    kept: dict[str, Tensor] = {}
    router = Router()
    router.gate.register_forward_hook(lambda m, args, out: kept.update(logits=out))
    trial = middle(router)
    plain = trial.loss

    def loss(weight: Tensor) -> Tensor:
        main = plain(weight)
        return main + ((kept["balance"] + kept["logits"].logsumexp(-1).square().sum(1)) * weight).sum()

    trial.loss = loss
    return trial


@construction(EXACT)
def counters_in_buffers() -> Trial:
    """A module counts its calls and tokens; it must be run once."""
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weights(D, D)
            self.register_buffer("tokens", torch.zeros(D))

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.weight)
            self.tokens += torch.bincount(y.argmax(-1).flatten(), minlength=D)
            return y

    return middle(Counter())


@construction(EXACT)
def dropout_and_noise() -> Trial:
    """Random numbers are drawn before, in and after a layer."""
    def run(m: Any, x: Tensor) -> Tensor:
        return F.dropout(F.linear(F.dropout(x, 0.3), m.matrix), 0.2) + torch.rand_like(x) * m.vector

    return middle(Apply(run, Parts()))


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=OPEN[name])) if name in OPEN else name
    for name in TABLE])
def test_a_construction_is_exact_or_refused(name: str) -> None:
    check(name)


def test_every_construction_says_what_it_tries() -> None:
    assert all(entry.about.endswith(".") for entry in TABLE.values())


def test_making_a_microscope_runs_and_changes_nothing() -> None:
    model = TABLE["counters_in_buffers"].build().model
    before = state(model)
    Microscope(model)
    assert state(model) == before


def test_a_context_leaves_no_hook_and_no_mode_behind_when_the_model_fails() -> None:
    def fail(m: Any, x: Tensor) -> Tensor:
        m.first(x)
        raise KeyError("the model's own")

    model = Language(Apply(fail, Parts())).double()
    before = state(model)
    with pytest.raises(KeyError, match="the model's own"), Microscope(model):
        model(tokens(4, 6))
    assert state(model) == before
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("way", ["model(ids)", "model.forward(ids)", "a submodule"])
def test_two_batches_in_one_context_are_refused(way: str) -> None:
    """Rollouts of different batches would share a row."""
    outer = nn.Sequential(Language(nn.Linear(D, D))).double()
    run: Any = {"model(ids)": outer, "model.forward(ids)": outer.forward, "a submodule": outer[0]}[way]
    with pytest.raises(CreditscopeError), Microscope(outer):
        sum(log_likelihood(run(tokens(4, 6, seed=s)), tokens(4, 6)).sum() for s in (1, 2)).backward()


def test_a_module_that_changes_between_contexts_is_read_as_it_is_now() -> None:
    """What was learned of a module in one context must not be kept for the next."""
    class Gain(nn.Linear):
        gain = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.t() + self.bias).clamp(-2.0, 2.0) * self.gain

    layer = Gain(D, D)
    trial = middle(layer)
    assert measured(trial) == EXACT
    layer.gain = 3.0
    assert measured(trial) == EXACT
    trial.model.eval()
    with torch.no_grad():
        layer.weight.zero_()
    assert measured(trial) == EXACT


def test_zero_initialised_gates_are_exact_before_and_after_a_step() -> None:
    gate = nn.Parameter(torch.zeros(D))
    parts = nn.ParameterList([gate])
    trial = middle(Apply(lambda m, x: x * torch.exp(-m[0].square().sum()) + x * (1 + m[0] * m[0].abs().mean()), parts))
    assert measured(trial) == EXACT
    with torch.no_grad():
        gate.fill_(0.3)
    assert measured(trial) == EXACT


@each(("given", "words"), [
    ({"rows": torch.rand(4)}, "rows="),
    ({"rows": [0, 1]}, "rows="),
    ({"rows": torch.zeros(2, 2, dtype=torch.long)}, "rows"),
    ({"rows": torch.tensor([0, 0, 2, 2])}, "without 1"),
    ({"rows": torch.arange(4), "segments": torch.zeros(4, 1, dtype=torch.long)}, "not both"),
    ({"segments": torch.ones(4, 3, dtype=torch.bool)}, "segments="),
    ({"sketch": 0}, "sketch"),
    ({"sketch": -1}, "sketch"),
    ({"sketch": True}, "sketch"),
    ({"sketch": 1.5}, "sketch"),
    ({"exact": False}, "exact=False"),
    ({"allow": "0.*"}, "allow="),
    ({"allow": [1]}, "allow="),
])
def test_arguments_that_mean_nothing_are_refused(given: dict[str, Any], words: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(CreditscopeError, match=words), Microscope(model, **given):
        model(torch.rand(4, 3)).sum().backward()


@pytest.mark.parametrize("model", [None, "model", lambda x: x, nn.Linear])
def test_only_modules_are_measured(model: Any) -> None:
    with pytest.raises(CreditscopeError, match=r"torch\.nn\.Module"):
        Microscope(model)


def test_an_empty_batch_is_refused_in_words() -> None:
    model = Language(nn.Linear(D, D)).double()
    with pytest.raises(CreditscopeError), Microscope(model):
        model(tokens(0, 6)).sum().backward()


def test_allow_excuses_the_named_parameter_and_no_other() -> None:
    """A pattern that matches nothing excuses nothing; one that matches leaves the rest exact."""
    trial = TABLE["a_function_uses_a_weight"].build()
    for allow, refused in ((["nothing.*"], True), (["*.matrix"], False)):
        scope = Microscope(trial.model, allow=allow, trust=["Product"])
        for p in trial.model.parameters():
            p.grad = None
        if refused:
            with pytest.raises(CreditscopeError, match="matrix"), scope:
                trial.loss(torch.ones(4, dtype=torch.float64)).backward()
        else:
            with scope:
                trial.loss(torch.ones(4, dtype=torch.float64)).backward()
            assert "middle.parts.matrix" not in scope.layers
            assert scope.coverage < 1
