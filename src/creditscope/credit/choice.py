"""An estimator as a user names it: `monte_carlo,samples=8`, or `my_module:mine` of the user's own."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from creditscope.credit.table import ESTIMATORS, Estimator, parse
from creditscope.errors import CreditscopeError, unknown

if TYPE_CHECKING:
    from torch import Tensor

    from creditscope.batch.rollouts import Rollouts
    from creditscope.credit.tools import Tools
    from creditscope.methods.axes import Method


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

        found = self.function(method, rollouts, tools, **self.options) if self.row.name in ESTIMATORS else \
            self._guarded(method, rollouts, tools)
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

    def _guarded(self, method: Method, rollouts: Rollouts, tools: Tools) -> Any:
        """A user's function: it gets a copy, prints to stderr, and what it raises is told in a sentence."""
        import torch

        copies: dict[str, Any] = {name: value.clone() for name, value in vars(rollouts).items()
                                  if isinstance(value, torch.Tensor)}
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout may be one JSON object
                return self.function(method, replace(rollouts, **copies), tools, **self.options)
        except CreditscopeError:
            raise
        except (Exception, SystemExit) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise CreditscopeError(f"credit {self.row.name!r} raised {type(error).__name__}: {error} "
                                   f"({os.path.basename(frame.filename)}, line {frame.lineno})") from error


def find_estimator(spec: str) -> Chosen:
    """The estimator of that name with its options checked, or a user's own `module:function`. Loads torch."""
    name, options = parse(spec)
    if name in ESTIMATORS:
        row, function = ESTIMATORS[name], ESTIMATORS[name].function
    else:
        function = _own(name)
        row = _described(name, function)
        _check_own(name, function, options)
    return Chosen(spec, function, MappingProxyType(options), row)


def _described(name: str, function: Callable[..., Any]) -> Estimator:
    """A user's function as a row: of what it needs it tells itself, in its attribute `needs`."""
    needs = getattr(function, "needs", ())
    if isinstance(needs, str):
        raise CreditscopeError(f"--credit {name}: needs must be a tuple of names, got {needs!r}; write ({needs!r},)")
    return Estimator(name=name, title=name, equation="your own", cost="your own", cites="", needs=tuple(needs))


def _check_own(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise CreditscopeError(f"--credit {name}: a function of (method, rollouts, tools) is needed") from None
    if len([p for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]) != 3:
        raise CreditscopeError(f"--credit {name}: the function must take (method, rollouts, tools), it takes "
                               f"({', '.join(parameters)})")
    allowed = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    for key in options:
        if key not in allowed:
            raise unknown(f"option of credit {name!r}:", key, allowed) if allowed else CreditscopeError(
                f"credit {name!r} has no options, got {key!r}; they would be keyword-only arguments of the function")


def _own(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    try:
        with _current_folder():
            imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise CreditscopeError(f"--credit {target}: {module!r} was found, but it imports {error.name!r}, which is "
                                   f"not installed here") from None
        raise CreditscopeError(f"--credit {target}: no module {error.name!r}; start creditscope in the folder that has "
                               f"it, or set PYTHONPATH; a module is named without .py") from None
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
