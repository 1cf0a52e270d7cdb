"""The observer of the microscope inside another library's trainer, on one rank or on many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from creditscope.errors import CreditscopeError
from creditscope.microscope import distributed
from creditscope.microscope.observer import Observer
from creditscope.microscope.proof_ranks import prove_ranks
from creditscope.microscope.scope import Microscope
from creditscope.microscope.shards import many_ranks


class RankObserver(Observer):
    """Among many ranks every pass has its own microscope, with a sketch for pairs over ranks."""

    _wrong = ""  # the error of the last proof

    def reset(self) -> None:
        super().reset()
        self._scopes: list[Microscope] = []

    def apart(self) -> None:
        """The coming pass has a microscope of its own, with a sketch for pairs over passes and ranks."""
        self.scope = Microscope(self.model, sketch=self.sketcher)
        self._scopes.append(self.scope)

    @contextmanager
    def around(self, rows: Tensor) -> Iterator[None]:
        if many_ranks():
            self.apart()
        with super().around(rows):
            yield

    def prove(self, due: str, pull: Callable[[Tensor], None], rollouts: int) -> None:
        """Where it fails, `require_proof` refuses readings until another proof has passed."""
        with self._judged():
            self.proofs.run(due, self.scope, pull, rollouts)

    def prove_halves(self, due: str, pull: Callable[[Tensor], None], rollouts: int, scale: float,
                     reduce: Callable[[], None] | None) -> None:
        """The same on every rank at once, each with its own rollouts."""
        scope = Microscope(self.model, sketch=self.sketcher)
        with self._judged():
            prove_ranks(scope, pull, rollouts, seed=None if due == "all" else self.proofs.readings, scale=scale,
                        reduce=reduce)

    def prove_ranks(self, weights: Tensor, scale: float) -> None:
        """The same for the reading's own rows of all ranks, after plain passes of the weighted losses."""
        with self._judged():
            distributed.prove_rows(self._scopes, [weights[block.rows.cpu()] for block in self.blocks], scale=scale)

    @contextmanager
    def _judged(self) -> Iterator[None]:
        try:
            yield
            self._wrong = ""
        except CreditscopeError as error:
            self.proofs.again()
            self._wrong = str(error)

    def require_proof(self) -> None:
        if self._wrong:
            raise CreditscopeError(self._wrong)

    def across(self, group: Tensor, scale: float | None = None, engine: Any = None) -> distributed.RanksReading:
        """All ranks' rows, whose sum the engine multiplies by `scale`: proven against the reduced gradient."""
        return distributed.across(self._scopes, [group[block.rows] for block in self.blocks], scale=scale,
                                  engine=engine)

    @property
    def eps(self) -> float:
        return max(scope.eps for scope in self._scopes)
