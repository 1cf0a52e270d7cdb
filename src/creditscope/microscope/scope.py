"""The microscope: exact geometry of per-rollout gradients, inside the trainer's own backward pass.

    with Microscope(model) as scope:
        loss = ...
        loss.backward()
    scope.gram          # K_ij = ⟨g_i, g_j⟩ over all trainable parameters

Neither model nor loss is changed. While the context is open, torch calls that use trainable parameters are intercepted
(`watch`) and go through the rules of `operations`; modules run unchanged, once, in their own mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from creditscope.errors import CreditscopeError
from creditscope.microscope.gram import SQUARABLE, squared_norms
from creditscope.microscope.recorder import Recorder, in_backward
from creditscope.microscope.shards import add_norms, add_parts, local, many_ranks
from creditscope.microscope.sketch import Sketch, Sketcher
from creditscope.microscope.sources import ParameterSource
from creditscope.microscope.watch import Watch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""How far Σ_ij K_ij may be from ‖∇‖², as a share of Σ_i K_ii + ‖∇‖², by the precision of the activations."""
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}
"""How exact the entries of a Gram are, relative to its largest, by the precision of the activations."""


@dataclass(frozen=True)
class GramCheck:
    """The self-check of one parameter: Σ_ij K_ij against ‖∇‖² of the gradient that arrived at it."""

    from_gram: float
    from_grad: float
    error: float
    """|difference| / (Σ_i K_ii + ‖∇‖²)."""
    tolerance: float


class Microscope:
    """A context around one forward and one backward pass that reads every rollout's gradient.

    Rows of the batch are rollouts. `rows` (B,) merges rows into rollouts; `segments` (B, T) names the rollout of each
    position of packed rows, −1 for padding. `sketch=k` adds a k×k sketch of every row, for pairs in other batches;
    `exact=False` keeps the sketch alone. Parameters whose names match a pattern in `allow` may stay uncovered; autograd
    functions and operators of other packages whose names match one in `trust` are assumed to leave rows in place.
    """

    def __init__(self, model: nn.Module, *, rows: Tensor | None = None, segments: Tensor | None = None,
                 exact: bool = True, sketch: int | Sketcher | None = None, allow: Sequence[str] = (),
                 trust: Sequence[str] = ()) -> None:
        check_arguments(model, rows, segments, exact, sketch, {"allow": allow, "trust": trust})
        self.model, self._owners, self.exact = model, (rows, segments), exact
        self.sketcher = Sketcher(sketch) if isinstance(sketch, int) else sketch
        self._allow, self._trust = tuple(allow), tuple(trust)
        self.parameters = check_model(dict(model.named_modules()), self._allow)
        self._open: Recorder | None = None
        self._watch: Watch | None = None
        self._walked: set[Any] = set()  # kinds of passes whose graph was searched
        self._undo: list[Callable[[], None]] = []
        self._norms: dict[str, list[Tensor]] = {}
        self._kept: dict[str, Tensor] = {}
        self._measured: set[int] = set()
        self._older: set[str] = set()
        """Parameters whose .grad was not empty when the context was entered, or will hold other ranks' gradients."""
        self._weighed: set[str] = set()
        """Parameters that an engine replaced by another tensor, whose gradient is weighed instead."""
        self._result: _Result | None = None

    @property
    def gram(self) -> Tensor:
        """(N, N) float64: K_ij = ⟨g_i, g_j⟩ over all covered parameters; Σ_ij K_ij = ‖∇‖²."""
        return sum(self.layers.values(), torch.zeros(1, dtype=torch.float64))

    @property
    def layers(self) -> dict[str, Tensor]:
        """Parameter name → its (N, N) Gram, for parameters that got a gradient."""
        if not self.exact:
            raise CreditscopeError("this Microscope was made with exact=False and has no exact Gram; read scope.sketch")
        return self._read().layers

    @property
    def coverage(self) -> float:
        """The share of ‖∇‖² that the Grams account for; below 1 only through `allow`."""
        return self._read().coverage

    @property
    def checks(self) -> dict[str, GramCheck]:
        """The self-check of each parameter."""
        return self._read().checks

    @property
    def eps(self) -> float:
        """The relative precision of the Gram's entries, for `spectrum(gram, eps)`."""
        return max(ROUNDING[self._rounded(precision)] for precision in self._read().precisions)

    @property
    def tolerance(self) -> float:
        """The self-check's tolerance, for the coarsest of the activations."""
        return max(TOLERANCE[self._rounded(precision)] for precision in self._read().precisions)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks that hold parts of the layers (tensor parallel), and so the same rollouts."""
        return self._read().mesh

    def require_only(self, rollout: int) -> None:
        """After a pass whose loss is one rollout's: an error unless it alone has a gradient, so that no rows mix."""
        norms = self.gram.diagonal()
        others = [i for i, x in enumerate(norms.tolist()) if i != rollout and x > self.eps * float(norms.max())]
        if others:
            raise CreditscopeError(f"the loss of rollout {rollout} alone has a gradient through rollout {others[0]} "
                                   f"({len(others)} such): the model or the loss mixes rows, by batch statistics for "
                                   f"example, or rows= and segments= name the wrong owners")

    @property
    def sketch(self) -> Sketch:
        """Sketched rows."""
        found = self._read().sketch
        if found is None:
            raise CreditscopeError("this Microscope keeps no sketch; make it with sketch=16")
        return found

    def _read(self) -> _Result:
        if self._result is None:
            raise CreditscopeError("the microscope has nothing to read yet: run forward and backward inside its with "
                                   "block, and read after the block has ended")
        return self._result

    def __enter__(self) -> Microscope:
        if self._open is not None:
            raise CreditscopeError("this Microscope is open already; it does not nest")
        modules = dict(self.model.named_modules())
        self.parameters = check_model(modules, self._allow)  # some may have been frozen, thawed or replaced
        if not _MEASURED.isdisjoint(map(id, self.parameters.values())):
            raise CreditscopeError("another Microscope is open on this model; close it first")
        recorder = Recorder(self._owners, self.exact, self.sketcher, self.parameters)
        recorder.walked, recorder.walks = self._walked, not many_ranks()
        self._open, self._result, self._norms, self._kept = recorder, None, {}, {}
        self._older, self._weighed = set(), set()
        try:
            self._install(recorder, modules.values())
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        recorder = self._open
        assert recorder is not None
        self._remove()
        if kind is None:
            self._result = self._finish(recorder)
        self._norms, self._kept = {}, {}

    def _install(self, recorder: Recorder, modules: Iterable[nn.Module]) -> None:
        ranks = many_ranks()
        self._measured = {id(p) for p in self.parameters.values()}
        _MEASURED.update(self._measured)
        watch = self._watch = Watch(recorder, modules, self._stand_in if ranks else None, self._trust)
        for module in entrances(self.model):
            hook = _meet(recorder, watch, module is self.model)
            self._undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        # Where .grad is empty now, it holds this pass's gradient at the end. Elsewhere a hook reads the gradient as it
        # arrives: among many ranks always, before an engine reduces it.
        for name, p in self.parameters.items():
            if p.grad is not None or ranks:
                self._undo.append(p.register_hook(self._weigh(name, p)).remove)  # type: ignore[no-untyped-call]
                self._older.add(name)
        watch.__enter__()  # type: ignore[no-untyped-call]

    def _remove(self) -> None:
        if self._open is not None:
            self._open.closed = True
            self._open.roots, self._open.nodes = [], set()  # the graph refers to the recorder: break the cycle
        self._open = None
        if self._watch is not None:
            self._watch.leave()
            self._watch = None
            _MEASURED.difference_update(self._measured)
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    def _stand_in(self, x: Tensor) -> str | None:
        """The name of the parameter that a sharding engine has replaced by x for a call; x's gradient is weighed."""
        name = next((name for name, p in self.model.named_parameters() if p is x and name in self.parameters), None)
        if name is not None and name not in self._weighed:
            self._weighed.add(name)
            self._undo.append(x.register_hook(self._weigh(name, x)).remove)  # type: ignore[no-untyped-call]
        return name

    def _weigh(self, name: str, p: Tensor) -> Callable[[Tensor], None]:
        """A hook that notes ‖∇‖² of the gradient as it arrives, before it is added to .grad."""

        def hook(g: Tensor) -> None:
            if self._open is not None and self._open.pulling:
                return  # rows that are pulled back through a tensor made of parameters
            self._norms.setdefault(name, []).append(squared_norms([local(g.detach())])[0])
            if len(self._norms[name]) == 1:
                recorder = self._open
                shared = recorder is not None and sum(use[0].name == name for use in recorder.uses) > 1
                if shared and p.grad is not None:
                    # Reentrant checkpoints deliver a shared parameter's gradient in parts; the sum needs the start.
                    self._kept[name] = p.grad.detach().clone()

        return hook

    def _finish(self, recorder: Recorder) -> _Result | None:
        forward, backward = recorder.seen
        norms = add_norms(recorder, self._arrived(recorder))
        if not forward and not recorder.entered and (backward or norms):
            raise CreditscopeError("a backward ran inside the Microscope, but no forward of the model with rows: it "
                                   "ran before the with block, or its input was made inside and given to a part of "
                                   "the model. Put both passes inside, and call the model itself")
        if not backward and not norms:
            if forward:
                raise CreditscopeError("a forward ran inside the Microscope, but no backward; call loss.backward() "
                                       "inside the with block")
            return None  # nothing happened: reading raises
        wild = next((name for name, norm in norms.items() if not math.isfinite(norm)), None)
        if wild is not None:
            raise CreditscopeError(f"the gradient of {wild!r} is not finite, so its rows have no geometry: the loss or "
                                   f"its scale overflowed, or the run has diverged")
        if recorder.repeats():
            raise _two_forwards()
        recorder.settle()
        add_parts(recorder)
        recorder.require_apart()
        return self._judge(recorder, norms)

    def _arrived(self, recorder: Recorder) -> dict[str, float]:
        """‖∇‖² of this pass by parameter, for those that got a gradient."""
        new = {name: p for name, p in trainable(self.model.named_modules()).items()
               if p.grad is not None and self.parameters.get(name) is not p
               and name not in self._weighed}  # made in the forward
        for name in new:
            recorder.miss(ParameterSource.parameter(name, new[name]), "it was made in the forward pass")
        whole = {name: p.grad for name, p in (self.parameters | new).items()
                 if (name in new or name not in self._older) and p.grad is not None}
        gone = next((name for name in recorder.precision if name not in self._older and name not in whole), None)
        if gone is not None:
            raise CreditscopeError(f"the gradient of {gone!r} is gone before the with block has ended, so nothing is "
                                   f"left to check against; call optimizer.step() and zero_grad() after the block")
        for name, parts in self._norms.items():
            if len(parts) > 1:
                if many_ranks():
                    raise CreditscopeError(f"the gradient of {name!r} came in {len(parts)} parts, as reentrant "
                                           f"checkpoints deliver it, and other ranks' are mixed into their sum; use "
                                           f"checkpoints with use_reentrant=False")
                grad = self.parameters[name].grad
                assert grad is not None
                whole[name] = grad - self._kept[name] if name in self._kept else grad
        real = [torch.view_as_real(g) if g.is_complex() else g.to_dense() if g.is_sparse else g for g in whole.values()]
        norms = dict(zip(whole, squared_norms(real).tolist(), strict=True))
        return {name: norms[name] if name in norms else float(self._norms[name][0]) for name in self.parameters | new
                if name in norms or name in self._norms}

    def _judge(self, recorder: Recorder, norms: dict[str, float]) -> _Result:
        """The self-check: every parameter that got a gradient is accounted for, and by the right amount."""
        names = list(norms)
        for name in recorder.missed:  # its rows are incomplete
            recorder.precision.pop(name, None)
            recorder.grams.pop(name, None)
        missing = [name for name in names if name not in recorder.precision and norms[name] > 0
                   and not any(fnmatchcase(name, pattern) for pattern in self._allow)]
        if missing:
            why = recorder.missed.get(missing[0], "no torch call that uses it was seen, as in compiled code, a fused "
                                                  "kernel, or an autograd.Function of its own")
            raise CreditscopeError(
                f"{len(missing)} parameter(s) got a gradient that the microscope cannot split into rows, first "
                f"{missing[0]!r}: {why}. Name it in allow=[{missing[0]!r}] to measure without it")
        covered = sum(norms[name] for name in names if name in recorder.precision)
        coverage = covered / sum(norms.values()) if sum(norms.values()) > 0 else 1.0
        precisions = frozenset(recorder.precision.values())
        sketch = None
        if recorder.sketch is not None and recorder.sketcher is not None:
            sketch = Sketch(recorder.sketch, recorder.sketcher.k, recorder.sketcher.seed,
                            tuple(sorted(recorder.precision)))
        if not self.exact:
            return _Result({}, self._check_sketch(sketch, recorder), coverage, sketch, precisions, recorder.mesh)
        order = [name for name in self.parameters if name in recorder.grams]
        if not order:
            raise CreditscopeError(f"nothing was measured: the microscope saw none of the {len(names)} parameter(s) "
                                   f"that got a gradient, and allow=[...] names them all")
        stacked = torch.stack([recorder.grams[name] for name in order]).cpu()
        stacked = (stacked + stacked.transpose(1, 2)) / 2
        layers = dict(zip(order, stacked.unbind(), strict=True))
        totals, traces = stacked.sum(dim=(1, 2)).tolist(), stacked.diagonal(dim1=1, dim2=2).sum(dim=1).tolist()
        checks: dict[str, GramCheck] = {}
        for name, total, trace in zip(order, totals, traces, strict=True):
            norm, tolerance = norms.get(name, 0.0), TOLERANCE[self._rounded(recorder.precision[name])]
            error = abs(total - norm) / (trace + norm) if trace + norm != 0 else 0.0
            check = checks[name] = GramCheck(total, norm, error, tolerance)
            if not check.error <= check.tolerance:
                raise CreditscopeError(
                    f"self-check failed for {name!r}: Σ K = {check.from_gram:.6g}, but ‖∇‖² = {check.from_grad:.6g} "
                    f"(off by {check.error:.2g}, tolerance {check.tolerance:.0g}). The parameter is used besides in a "
                    f"way that the microscope did not see (compiled code, a fused kernel), or an engine or a hook "
                    f"changed its gradient{_out_of_range(check, recorder.precision[name])}")
        return _Result(layers, checks, coverage, sketch, precisions, recorder.mesh)

    def _check_sketch(self, sketch: Sketch | None, recorder: Recorder) -> dict[str, GramCheck]:
        """Without Grams: Σ_i S_i against the sketch of the gradient, over all parameters at once."""
        if sketch is None or self.sketcher is None or self._older & recorder.precision.keys():
            return {}  # .grad also holds earlier gradients
        grads = ((name, p.grad) for name, p in self.parameters.items() if name in recorder.precision)
        arrived = self.sketcher.gradient((name, g.detach()) for name, g in grads if g is not None).double().cpu()
        rows = sketch.rows.double().cpu()
        tolerance = max(TOLERANCE[self._rounded(precision)] for precision in recorder.precision.values())
        summed = rows.sum(dim=0)
        scale = float(rows.square().sum() + arrived.square().sum())
        error = float((summed - arrived).square().sum()) / scale if scale != 0 else 0.0
        check = GramCheck(float(summed.square().sum()), float(arrived.square().sum()), error, tolerance)
        if not error <= check.tolerance:
            raise CreditscopeError(f"self-check failed: the rows' sketches do not add up to the sketch of the gradient "
                                   f"(off by {error:.2g}, tolerance {check.tolerance:.0g}). A parameter is used in a "
                                   f"way the microscope did not see; exact=True says which")
        return {"all parameters, sketched": check}

    def _rounded(self, precision: torch.dtype) -> torch.dtype:
        """The precision of products: bfloat16 stands for TF32, to which a GPU may round float32 products."""
        short = precision == torch.float32 and next(iter(self.parameters.values())).is_cuda and _tf32()
        return torch.bfloat16 if short else precision


@dataclass(frozen=True)
class _Result:
    layers: dict[str, Tensor]
    checks: dict[str, GramCheck]
    coverage: float
    sketch: Sketch | None
    precisions: frozenset[torch.dtype]
    mesh: DeviceMesh | None


def _out_of_range(check: GramCheck, precision: torch.dtype) -> str:
    """The advice for a gradient whose products leave the range of this precision; "" for any other."""
    low, high = SQUARABLE if precision != torch.float16 else (1e-9, 1e9)
    if precision == torch.float64 or low <= check.from_grad <= high:
        return ""
    kind = str(precision).removeprefix("torch.")
    size = "small" if check.from_grad < low else "large"
    return (f"; or the gradient is too {size} for products of {kind}: multiply the loss by 2**k, which multiplies the "
            f"Gram by 4**k and changes no rank")


_MEASURED: set[int] = set()
"""Parameters (by identity) that an open Microscope measures."""


def check_arguments(model: Any, rows: Any, segments: Any, exact: Any, sketch: Any, patterns: dict[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        raise CreditscopeError(f"Microscope measures a torch.nn.Module, got {type(model).__name__}")
    for what, ids, where in (("rows", rows, "row, shape (B,)"), ("segments", segments, "position, shape (B, T)")):
        if ids is not None and (not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex()
                                or ids.dtype == torch.bool):
            given = f"a tensor of {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
            raise CreditscopeError(f"{what}= is a tensor of whole numbers, one rollout id per {where}; got {given}")
    if rows is not None and segments is not None:
        raise CreditscopeError("give rows (one rollout id per row) or segments (one per position), not both")
    if not (sketch is None or isinstance(sketch, Sketcher) or (isinstance(sketch, int) and sketch is not True)):
        raise CreditscopeError(f"sketch= is a whole number k ≥ 2 or a Sketcher, got {sketch!r}")
    if not exact and sketch is None:
        raise CreditscopeError("exact=False leaves nothing to measure; give sketch=16, or exact=True")
    for what, given in patterns.items():
        if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(a, str) for a in given):
            raise CreditscopeError(f"{what}= is a list of patterns for names, such as {what}=['lm_head.*']; got "
                                   f"{given!r}")


def trainable(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Parameter]:
    """The trainable parameters by name, as `named_parameters` has them, of modules that were walked already."""
    named: dict[nn.Parameter, str] = {}
    for where, module in modules:
        for name, p in module._parameters.items():
            if p is not None and p.requires_grad and p not in named:
                named[p] = f"{where}.{name}" if where else name
    return {name: p for p, name in named.items()}


def check_model(modules: Mapping[str, nn.Module], allow: Sequence[str] = ()) -> dict[str, nn.Parameter]:
    """The trainable parameters by name; an error where the model of these modules cannot be measured."""
    for where, module in modules.items():
        if ("_orig_mod" in module._modules or module._compiled_call_impl is not None
                or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")):
            raise CreditscopeError(
                f"{where or 'the model'} is compiled: a compiled graph has its gradients fused before "
                f"the microscope could read them. Measure the model before torch.compile (it shares its parameters: "
                f"model._orig_mod), and call that one on the steps you measure")
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
            raise CreditscopeError(f"{where} ({type(module).__name__}) mixes the rows of a batch through its "
                                   f"statistics, so no rollout has a gradient of its own; call model.eval(), or use "
                                   f"LayerNorm")
    found = trainable(modules.items())
    if not found:
        raise CreditscopeError("the model has no trainable parameter: all are frozen. Set requires_grad on those to "
                               "train")
    for name, p in found.items():
        if p.is_complex() and not any(fnmatchcase(name, pattern) for pattern in allow):
            raise CreditscopeError(f"parameter {name!r} is {p.dtype}; the microscope reads real parameters. Hold its "
                                   f"real and imaginary parts (torch.view_as_real), or name it in allow=[{name!r}]")
    devices = sorted(map(str, {p.device for p in found.values()}))
    if len(devices) > 1:
        raise CreditscopeError(f"the model lies on several devices ({', '.join(devices)}); the microscope reads a "
                               f"model on one device, or one shard of it on each rank")
    return found


def _tf32() -> bool:
    """Whether float32 products on the GPU are rounded to ten bits."""
    matmul = torch.backends.cuda.matmul
    try:
        return bool(matmul.fp32_precision == "tf32")
    except AttributeError:
        return bool(matmul.allow_tf32)


def entrances(model: nn.Module) -> list[nn.Module]:
    """The modules whose input shows the batch's shape: the model, and its token embedding where it names one."""
    find = getattr(model, "get_input_embeddings", None)
    try:
        inner = find() if find is not None else None
    except (NotImplementedError, AttributeError):
        inner = None
    return [model] + ([inner] if isinstance(inner, nn.Module) and inner is not model else [])


def _two_forwards() -> CreditscopeError:
    return CreditscopeError("two forward passes ran inside one Microscope, so rollouts of different batches would "
                            "share a row; open one context for each, or put them into one batch")


def _meet(recorder: Recorder, watch: Watch,
          outer: bool) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = [kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
        tensors = [x for x in (*named, *pytree.tree_leaves((args, kwargs))) if isinstance(x, Tensor) and x.dim() > 0]
        if tensors and not in_backward():
            first = next((x for x in tensors if x.dim() > 1), tensors[0])
            if outer and torch.is_grad_enabled():
                if recorder.entered_with_grad:
                    raise _two_forwards()
                recorder.entered_with_grad = True
            recorder.entered = True
            lead = tuple(first.shape[: min(2, first.dim() - int(first.is_floating_point()))])
            if outer or recorder.batch is None:  # a model may insert positions before its embedding (prompts)
                recorder.meet(lead, first.device)
            watch.given([x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() > 0
                         and len(x) == recorder.batch])

    return hook
