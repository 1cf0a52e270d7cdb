"""Which rollout owns each position of a batch.

A batch has B rows of T positions. By default row i is rollout i. Several rows may belong to one rollout (`rows`, one id
per row), and a packed row may hold several rollouts (`segments`, one id per position). Activations have the leading
axes (B, T, ...) or (B·T,), or are vectors picked from such ones (`gathered`); `arrange` turns them into (N, W, d).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from creditscope.errors import CreditscopeError


@dataclass(frozen=True)
class RowOwners:
    """The owners of a batch of `batch` rows and, where it has a time axis, `width` positions."""

    batch: int
    width: int | None
    count: int  # N, the number of rollouts
    owner: Tensor | None = None  # (B,) or (B, T) ids from 0 to N−1, −1 for padding; None where row i is rollout i
    index: Tensor | None = None  # (N, W) each rollout's base positions (rows, or row·T + column), padded with 0
    real: Tensor | None = None  # (N, W) False where `index` is padding; None where nothing is padded
    lost: Tensor | None = None  # base positions that are padding; None where there are none
    pieces: tuple[Tensor, ...] = ()  # each rollout's base positions, without padding
    picked: bool = False  # whether the units are vectors picked from a batch, in the shape of `owner`

    @staticmethod
    def of(lead: tuple[int, ...], rows: Tensor | None, segments: Tensor | None, device: torch.device) -> RowOwners:
        """The owners in a batch whose input has leading axes (B,) or (B, T)."""
        batch, width = lead[0], lead[1] if len(lead) > 1 else None
        owner = segments if segments is not None else rows
        if owner is None:
            return RowOwners(batch, width, batch)
        want = (batch,) if segments is None else (batch, width)
        what = "rows" if segments is None else "segments"
        if tuple(owner.shape) != want:
            raise CreditscopeError(f"{what} must name the rollout of each "
                                   f"{'row' if segments is None else 'position'}: shape {want}, got "
                                   f"{tuple(owner.shape)}")
        flat = owner.flatten().cpu()
        count = int(flat.max()) + 1 if len(flat) else 0
        present = torch.bincount(flat[flat >= 0], minlength=max(count, 1))
        absent = (present == 0).nonzero().flatten().tolist() if count > 0 else []
        if int(flat.min()) < -1 or count < 1 or absent:
            raise CreditscopeError(f"{what} must hold the ids 0 ... N−1, each at least once, and −1 for padding; got "
                                   f"ids from {int(flat.min())} to {int(flat.max())}"
                                   + (f", without {absent[0]}" if absent else ""))
        return _sorted(batch, width, count, owner, device)

    def gathered(self, owner: Tensor, device: torch.device) -> RowOwners:
        """Owners of vectors that were picked from this batch: `owner` holds one rollout per vector, of any shape."""
        return _sorted(owner.numel(), None, self.count, owner, device, picked=True)

    @property
    def owners(self) -> Tensor:
        return torch.arange(self.batch) if self.owner is None else self.owner

    @cached_property
    def by_position(self) -> bool:
        """Whether owners are named for each position rather than for each row."""
        return self.owner is not None and self.owner.dim() == 2 and not self.picked

    @cached_property
    def base(self) -> int:
        """The number of owned units: rows, or positions."""
        return self.batch * (self.width or 1) if self.by_position else self.batch

    def owned(self, lead: tuple[int, ...], where: str) -> int:
        """The number of vectors with leading axes `lead` per base unit; an error where their owners are unknown."""
        size = prod(lead)
        if self.picked:
            if self.base and (size < self.base or size % self.base):
                raise CreditscopeError(f"{where} got vectors with leading axes {lead}, but {self.base} were picked")
            return size // max(self.base, 1)
        tokens = self.batch * (self.width or 1)
        fits = lead[:2] == (self.batch, self.width) or lead == (tokens,) if self.by_position else \
            lead[:1] == (self.batch,) or (lead == (tokens,) and self.width is not None)
        if not fits:
            hint = " (with segments, keep all positions: no logits_to_keep)" if self.by_position else ""
            raise CreditscopeError(
                f"{where} got vectors with leading axes {lead}, but the batch has {self.batch} rows"
                + (f" of {self.width} positions" if self.width else "") + f", so their rollouts cannot be told{hint}")
        return size // self.base

    def arrange(self, x: Tensor, where: str, blank: bool = False) -> Tensor:
        """(*lead, d) → (N, W, d), each rollout's vectors; `blank` sets the padding to 0."""
        if self.index is None and not self.picked and x.dim() == 3 and x.shape[0] == self.batch:
            return x
        each = self.owned(tuple(x.shape[:-1]), where)
        units = x.reshape(self.base, each, x.shape[-1])
        if self.index is None:
            return units
        picked = units[self.index]
        if blank and self.real is not None:
            picked = picked.masked_fill(~self.real[..., None, None], 0)
        return picked.flatten(1, 2)

    def stray(self, x: Tensor) -> Tensor | None:
        """Σ x² over the vectors of padding; it has to be 0."""
        if self.lost is None or self.base == 0:
            return None
        return x.reshape(self.base, -1)[self.lost].float().square().sum()

    def spread_shape(self, lead: tuple[int, ...], features: int, where: str) -> tuple[int, ...]:
        """The leading axes of one copy of a parameter per base unit that broadcasts against (*lead, *features)."""
        self.owned(lead, where)
        if self.picked:
            assert self.owner is not None
            kept = lead[: self.owner.dim()]
        else:
            kept = lead[:2] if self.by_position and len(lead) > 1 else lead[:1]
        return (*kept, *[1] * (len(lead) + 1 - features - len(kept)))

    def fold(self, g: Tensor, features: int) -> Tensor:
        """(*spread, *shape) gradients of the copies → (N, *shape): each rollout's sum."""
        shape = g.shape[g.dim() - features:]
        if self.base == 0:
            return g.new_zeros(self.count, *shape)
        units = g.reshape(self.base, -1, *shape).sum(dim=1)
        if self.index is None:
            return units
        picked = units[self.index]
        if self.real is not None:
            picked = picked.masked_fill(~self.real.reshape(*self.real.shape, *[1] * features), 0)
        return picked.sum(dim=1)

    def piece(self, x: Tensor, i: int) -> Tensor | None:
        """The part of x that is rollout i's, in the layout of a smaller batch; None where x is not laid out by rows."""
        at = self.pieces[i] if self.pieces else slice(i, i + 1)
        if self.picked:
            assert self.owner is not None
            axes = self.owner.dim()
            return x.flatten(0, axes - 1)[at] if x.shape[:axes] == self.owner.shape else None
        flat = self.width is not None and x.dim() > 0 and x.shape[0] == self.batch * self.width != self.batch
        if self.by_position:
            if flat:
                return x[at]
            return x.flatten(0, 1)[at][None] if tuple(x.shape[:2]) == (self.batch, self.width) else None
        if flat:
            return x.reshape(self.batch, -1, *x.shape[1:])[at].flatten(0, 1)
        return x[at] if x.dim() > 0 and x.shape[0] == self.batch else None


def _sorted(batch: int, width: int | None, count: int, owner: Tensor, device: torch.device,
            picked: bool = False) -> RowOwners:
    flat = owner.flatten().cpu()
    present = torch.bincount(flat[flat >= 0], minlength=count)
    pieces = [(flat == i).nonzero().squeeze(1) for i in range(count)]
    index = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)
    real = torch.arange(index.shape[1]) < present[:, None]
    lost = (flat < 0).nonzero().squeeze(1)
    return RowOwners(batch, width, count, owner.to(device), index.to(device),
                None if bool(real.all()) else real.to(device), lost.to(device) if len(lost) else None,
                tuple(piece.to(device) for piece in pieces), picked)
