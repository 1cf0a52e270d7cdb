"""An estimator by its spec: `monte_carlo,samples=8`, or the user's own `my_module:mine`."""

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
    """An estimator with its options."""

    spec: str
    function: Callable[..., Any] = field(repr=False)
    options: Mapping[str, Any]
    row: Estimator
    """Of the table; for a user's own function, with the needs in its attribute `needs`."""

    def __call__(self, method: Method, rollouts: Rollouts, tools: Tools) -> Tensor:
        """(B, T) credit, 0 where the mask is False; the result is checked at every call."""
        from creditscope.objective.surrogate import check_credit

        found = self.function(method, rollouts, tools, **self.options) if self.row.name in ESTIMATORS else \
            self._guarded(method, rollouts, tools)
        who = f"credit {self.row.name!r}"
        place = getattr(found, "device", rollouts.mask.device)
        if place != rollouts.mask.device:
            raise CreditscopeError(f"{who} must be on {rollouts.mask.device}, got it on {place}; make it from the "
                                   f"rollouts' own tensors")
        credit = check_credit(found, rollouts, who).detach()
        if not credit.is_floating_point():
            raise CreditscopeError(f"{who} must be a float tensor, got {credit.dtype}")
        return credit.expand_as(rollouts.mask).masked_fill(~rollouts.mask, 0.0)

    def _guarded(self, method: Method, rollouts: Rollouts, tools: Tools) -> Any:
        """A user's function gets a copy and prints to stderr; an exception becomes one sentence."""
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
        return Chosen(spec, ESTIMATORS[name].function, MappingProxyType(options), ESTIMATORS[name])
    function = _own(name)
    needs = getattr(function, "needs", ())
    if isinstance(needs, str):
        raise CreditscopeError(f"--credit {name}: needs must be a tuple of names, got {needs!r}; write ({needs!r},)")
    row = Estimator(name=name, title=name, equation="your own", cost="your own", cites="", needs=tuple(needs))
    _check_own(name, function, options)
    return Chosen(spec, function, MappingProxyType(options), row)


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
    """The current folder first on sys.path, as for --reward, and last afterwards.

    An installed `creditscope` does not have that folder on its path. The module may still import its neighbours later,
    and a file named like a library does not shadow the library.
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
