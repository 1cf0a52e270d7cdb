"""The microscope: exact geometry of per-rollout gradients, inside the trainer's own backward pass.

    with Microscope(model) as scope:
        loss = ...
        loss.backward()
    scope.gram          # K_ij = ⟨g_i, g_j⟩ over all trainable parameters

Nothing of the model or the loss is changed: while the context is open, the layers that hold trainable parameters are
called through the rules of `layers`; afterwards they are as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from creditscope.errors import CreditscopeError
from creditscope.microscope.gram import SQUARABLE, squared_norms
from creditscope.microscope.layers import rule_for
from creditscope.microscope.recorder import Recorder, in_backward
from creditscope.microscope.shards import add_norms, add_parts, local, many_ranks, on_shards, stand_ins, whole_shape
from creditscope.microscope.site import Rule, Site
from creditscope.microscope.sketch import Sketch, Sketcher
from creditscope.microscope.whole import whole

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""How far Σ_ij K_ij may be from ‖∇‖², as a share of Σ_i K_ii + ‖∇‖², by the precision of the activations."""
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}
"""How exact the entries of a Gram are, relative to its largest, by the precision of the activations."""


@dataclass(frozen=True)
class Check:
    """The self-check of one parameter: two routes to ‖∇‖²."""

    from_gram: float
    """Σ_ij K_ij."""
    from_grad: float
    """‖∇‖² of the gradient that arrived at the parameter."""
    error: float
    """|difference| / (Σ_i K_ii + ‖∇‖²)."""
    tolerance: float


class Microscope:
    """A context around one forward and one backward pass that reads every rollout's gradient.

    Rows of the batch are rollouts. `rows` (B,) merges rows into rollouts; `segments` (B, T) names the rollout of each
    position of packed rows, −1 for nobody. `sketch=k` adds a k×k sketch of every row, for pairs in other batches;
    `exact=False` keeps the sketch alone. Parameters whose names match `allow` may stay uncovered; modules named in
    `slow` are measured as a whole, by running them again for each rollout.
    """

    def __init__(self, model: nn.Module, *, rows: Tensor | None = None, segments: Tensor | None = None,
                 exact: bool = True, sketch: int | Sketcher | None = None, allow: Sequence[str] = (),
                 slow: Sequence[str] = (), tolerance: float | None = None) -> None:
        if rows is not None and segments is not None:
            raise CreditscopeError("give rows (one rollout id a row) or segments (one a position), not both")
        if not exact and sketch is None:
            raise CreditscopeError("exact=False leaves nothing to measure; give sketch=16, or exact=True")
        self.model, self._owners, self.exact = model, (rows, segments), exact
        self.sketcher = Sketcher(sketch) if isinstance(sketch, int) else sketch
        self._allow, self._slow, self._tolerance = tuple(allow), tuple(slow), tolerance
        self.parameters = check_model(model)
        self._plan = plan(model, self.parameters, self._slow)
        self._open: Recorder | None = None
        self._undo: list[Callable[[], None]] = []
        self._norms: dict[str, list[Tensor]] = {}
        self._kept: dict[str, Tensor] = {}
        self._older: set[str] = set()
        """Parameters whose .grad held something when the context was entered, or will hold other ranks' gradients."""
        self._weighed: set[str] = set()
        """Parameters for which an engine put another tensor in place, whose gradient is weighed instead."""
        self._result: _Result | None = None

    # -- reading ------------------------------------------------------------------------------------------------------

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
    def checks(self) -> dict[str, Check]:
        """The self-check of each parameter: Σ_ij K_ij against ‖∇‖²."""
        return self._read().checks

    @property
    def eps(self) -> float:
        """The relative precision of the Gram's entries, for `spectrum(gram, eps)`: values below its floor are noise."""
        short = next(iter(self.parameters.values())).is_cuda and _tf32()
        return max(ROUNDING[torch.bfloat16 if short and precision == torch.float32 else precision]
                   for precision in self._read().precisions)

    @property
    def tolerance(self) -> float:
        """The self-check's tolerance, for the coarsest of the activations."""
        return max(self._tolerate(precision) for precision in self._read().precisions)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks that hold parts of the layers (tensor parallel), and so the same rollouts."""
        return self._read().mesh

    def require_only(self, rollout: int) -> None:
        """An error unless this rollout alone has a gradient: the proof that neither model nor loss mixes rows.

        Read it once after a pass whose loss is that rollout's part of the loss; rows that mix show up in the others.
        """
        norms = self.gram.diagonal()
        others = [i for i, x in enumerate(norms.tolist()) if i != rollout and x > self.eps * float(norms.max())]
        if others:
            raise CreditscopeError(f"the loss of rollout {rollout} alone has a gradient through rollout {others[0]} "
                                   f"({len(others)} such): the model or the loss mixes rows, by batch statistics for "
                                   f"example, or rows= and segments= name the wrong owners")

    @property
    def sketch(self) -> Sketch:
        """Sketched rows, for pairs with rollouts of other batches and ranks, and for the path over steps."""
        found = self._read().sketch
        if found is None:
            raise CreditscopeError("this Microscope keeps no sketch; make it with sketch=16")
        return found

    def _read(self) -> _Result:
        if self._result is None:
            raise CreditscopeError("the microscope has nothing to read yet: run forward and backward inside its with "
                                   "block, and read after the block has ended")
        return self._result

    # -- the context --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Microscope:
        if self._open is not None:
            raise CreditscopeError("this Microscope is open already; it does not nest")
        self._look_again()
        recorder = Recorder(self._owners, self.exact, self.sketcher)
        shapes = {name: whole_shape(p) for name, p in self.parameters.items()}
        recorder.heights = {name: shape[0] for name, shape in shapes.items() if len(shape) == 2}
        self._open, self._result, self._norms, self._kept = recorder, None, {}, {}
        self._older, self._weighed = set(), set()
        try:
            self._install(recorder)
        except BaseException:
            self._remove()
            raise
        return self

    def _look_again(self) -> None:
        """Parameters may have been frozen, thawed or replaced, and modules wrapped, since the last time."""
        found = check_model(self.model)
        same = found.keys() == self.parameters.keys() and all(p is self.parameters[name] for name, p in found.items())
        if not same or any(site.module.forward != site.original for site, _ in self._plan):
            self.parameters, self._plan = found, plan(self.model, found, self._slow)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        recorder = self._open
        assert recorder is not None
        self._remove()
        if kind is None:
            self._result = self._finish(recorder)
        self._norms, self._kept = {}, {}

    def _install(self, recorder: Recorder) -> None:
        ranks = many_ranks()
        for site, rule in self._plan:
            forward = rule(site, recorder)
            self._patch(site.module, self._watch(site, on_shards(site, recorder, forward)) if ranks else forward)
        for module in entrances(self.model):
            handle = module.register_forward_pre_hook(_meet(recorder, module is self.model), with_kwargs=True)
            self._undo.append(handle.remove)
        # Where .grad is empty now, it holds this pass's gradient at the end. Elsewhere it is caught as it comes: among
        # many ranks always, before an engine reduces it.
        for name, p in self.parameters.items():
            if p.grad is not None or ranks:
                self._undo.append(p.register_hook(self._weigh(name, p)).remove)  # type: ignore[no-untyped-call]
                self._older.add(name)

    def _patch(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        own = module.__dict__.get("forward")

        def undo() -> None:
            module.__dict__.pop("_creditscope", None)
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own

        self._undo.append(undo)
        module.__dict__["forward"] = forward
        module.__dict__["_creditscope"] = True

    def _remove(self) -> None:
        if self._open is not None:
            self._open.closed = True
        self._open = None
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    def _watch(self, site: Site, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A sharding engine puts whole tensors in the parameters' place for a call: weigh what arrives at those."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            for path, name in site.names.items():
                p = site.module.get_parameter(path)
                if p is not self.parameters[name] and name not in self._weighed:
                    self._weighed.add(name)
                    self._undo.append(p.register_hook(self._weigh(name, p)).remove)  # type: ignore[no-untyped-call]
            return forward(*args, **kwargs)

        return watched

    def _weigh(self, name: str, p: Tensor) -> Callable[[Tensor], None]:
        """‖∇‖² of the gradient as it arrives, before it is added to what .grad holds already."""

        def hook(g: Tensor) -> None:
            self._norms.setdefault(name, []).append(squared_norms([local(g.detach())])[0])
            if len(self._norms[name]) == 1:
                recorder = self._open
                shared = recorder is not None and sum(
                    recorder.calls[name, kind] for kind in ("matrix", "lookup", "dense")) > 1
                if shared and p.grad is not None:
                    # Reentrant checkpoints deliver a shared parameter's gradient in parts; the sum needs the start.
                    self._kept[name] = p.grad.detach().clone()

        return hook

    def _finish(self, recorder: Recorder) -> _Result | None:
        forward, backward = recorder.seen
        norms = add_norms(recorder, self._arrived(recorder))
        if not forward and not recorder.entered and (backward or norms):
            raise CreditscopeError("a backward ran inside the Microscope, but its forward ran before the with block; "
                                   "put both inside")
        if not backward and not norms:
            if forward:
                raise CreditscopeError("a forward ran inside the Microscope, but no backward; call loss.backward() "
                                       "inside the with block")
            return None  # nothing happened at all: reading says so
        wild = next((name for name, norm in norms.items() if not math.isfinite(norm)), None)
        if wild is not None:
            raise CreditscopeError(f"the gradient of {wild!r} is not finite, so its rows have no geometry: the loss or "
                                   f"its scale overflowed, or the run has diverged")
        recorder.settle()
        add_parts(recorder)
        _refuse_strays(recorder)
        _refuse_mixing(recorder)
        return self._judge(recorder, norms)

    def _arrived(self, recorder: Recorder) -> dict[str, float]:
        """‖∇‖² of this pass by parameter, for those that got a gradient."""
        whole = {name: p.grad for name, p in self.parameters.items() if name not in self._older and p.grad is not None}
        gone = next((name for name in recorder.precision if name not in self._older and name not in whole), None)
        if gone is not None:
            raise CreditscopeError(f"the gradient of {gone!r} is gone before the with block has ended, so nothing is "
                                   f"left to check against; call optimizer.step() and zero_grad() after the block")
        for name, parts in self._norms.items():
            if len(parts) > 1:  # it came in several parts: read it as a whole
                if many_ranks():
                    raise CreditscopeError(f"the gradient of {name!r} came in {len(parts)} parts, as reentrant "
                                           f"checkpoints deliver it, and other ranks' are mixed into their sum; use "
                                           f"checkpoints with use_reentrant=False")
                grad = self.parameters[name].grad
                assert grad is not None
                whole[name] = grad - self._kept[name] if name in self._kept else grad
        norms = dict(zip(whole, squared_norms(list(whole.values())).tolist(), strict=True))
        return {name: norms[name] if name in norms else float(self._norms[name][0]) for name in self.parameters
                if name in norms or name in self._norms}

    def _judge(self, recorder: Recorder, norms: dict[str, float]) -> _Result:
        """The self-check: every parameter that got a gradient is accounted for, and by the right amount."""
        names = list(norms)
        missing = [name for name in names if name not in recorder.precision and norms[name] > 0
                   and not any(fnmatchcase(name, pattern) for pattern in self._allow)]
        if missing:
            raise CreditscopeError(
                f"{len(missing)} parameter(s) got a gradient that the microscope did not see, first {missing[0]!r}: it "
                f"is used outside the forward of the module that holds it (a fused head, a compiled model). Name the "
                f"module whose forward uses it in slow=[{_around(missing[0])!r}] to measure that as a whole, or the "
                f"parameter in allow=[...] to measure without it")
        total = sum(norms.values())
        covered = sum(norms[name] for name in names if name in recorder.precision)
        coverage = covered / total if total > 0 else 1.0
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
        checks = {name: self._compare(total, trace, norms.get(name, 0.0), recorder.precision[name])
                  for name, total, trace in zip(order, totals, traces, strict=True)}
        for name, check in checks.items():
            if not check.error <= check.tolerance:
                raise CreditscopeError(
                    f"self-check failed for {name!r}: Σ K = {check.from_gram:.6g}, but ‖∇‖² = {check.from_grad:.6g} "
                    f"(off by {check.error:.2g}, tolerance {check.tolerance:.0g}). The parameter is used in a way the "
                    f"microscope did not see (then name the module whose forward does so in slow=[...]), or an engine "
                    f"scaled its gradient{_out_of_range(check, recorder.precision[name])}")
        return _Result(layers, checks, coverage, sketch, precisions, recorder.mesh)

    def _check_sketch(self, sketch: Sketch | None, recorder: Recorder) -> dict[str, Check]:
        """Without Grams: Σ_i S_i against the sketch of the gradient, over all parameters at once."""
        if sketch is None or self.sketcher is None or self._older & recorder.precision.keys():
            return {}  # what .grad held before is in it, and cannot be taken out again
        grads = ((name, p.grad) for name, p in self.parameters.items() if name in recorder.precision)
        arrived = self.sketcher.gradient((name, g.detach()) for name, g in grads if g is not None).double().cpu()
        rows = sketch.rows.double().cpu()
        worst = max(recorder.precision.values(), key=self._tolerate)
        summed = rows.sum(dim=0)
        scale = float(rows.square().sum() + arrived.square().sum())
        error = float((summed - arrived).square().sum()) / scale if scale != 0 else 0.0
        check = Check(float(summed.square().sum()), float(arrived.square().sum()), error, self._tolerate(worst))
        if not error <= check.tolerance:
            raise CreditscopeError(f"self-check failed: the rows' sketches do not add up to the sketch of the gradient "
                                   f"(off by {error:.2g}, tolerance {check.tolerance:.0g}). A parameter is used in a "
                                   f"way the microscope did not see; exact=True says which")
        return {"all parameters, sketched": check}

    def _tolerate(self, precision: torch.dtype) -> float:
        if self._tolerance is not None:
            return self._tolerance
        short = precision == torch.float32 and next(iter(self.parameters.values())).is_cuda and _tf32()
        return TOLERANCE[torch.bfloat16 if short else precision]

    def _compare(self, total: float, trace: float, norm: float, precision: torch.dtype) -> Check:
        tolerance = self._tolerate(precision)
        scale = trace + norm
        return Check(total, norm, abs(total - norm) / scale if scale != 0 else 0.0, tolerance)


@dataclass(frozen=True)
class _Result:
    layers: dict[str, Tensor]
    checks: dict[str, Check]
    coverage: float
    sketch: Sketch | None
    precisions: frozenset[torch.dtype]
    mesh: DeviceMesh | None


def _out_of_range(check: Check, precision: torch.dtype) -> str:
    """Whether numbers of this precision may be too short for such a gradient, and what to do then."""
    low, high = SQUARABLE if precision != torch.float16 else (1e-9, 1e9)
    if precision == torch.float64 or low <= check.from_grad <= high:
        return ""
    kind = str(precision).removeprefix("torch.")
    size = "small" if check.from_grad < low else "large"
    return (f"; or the gradient is too {size} for products of {kind}: multiply the loss by 2**k, which multiplies the "
            f"Gram by 4**k and changes no rank")


# -- before anything runs ----------------------------------------------------------------------------------------------


def check_model(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name; an error where the model cannot be measured."""
    for where, module in model.named_modules():
        if "_creditscope" in module.__dict__:
            raise CreditscopeError("another Microscope is open on this model; close it first")
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
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise CreditscopeError("the model has no trainable parameter: all are frozen. Set requires_grad on those to "
                               "train")
    devices = sorted({str(p.device) for p in trainable.values()})
    if len(devices) > 1:
        raise CreditscopeError(f"the model lies on several devices ({', '.join(devices)}); the microscope reads a "
                               f"model on one device, or one shard of it on each rank")
    return trainable


def _tf32() -> bool:
    """Whether float32 products on the GPU keep ten bits only."""
    matmul = torch.backends.cuda.matmul
    try:
        return bool(matmul.fp32_precision == "tf32")
    except AttributeError:
        return bool(matmul.allow_tf32)


Plan = list[tuple[Site, Rule]]


def plan(model: nn.Module, trainable: dict[str, nn.Parameter], slow: Sequence[str]) -> Plan:
    """Which module is read by which rule. A module measured as a whole takes all that is inside it along."""
    names = {id(p): name for name, p in trainable.items()}
    modules = dict(model.named_modules())
    roots: list[str] = []
    for pattern in slow:
        found = [where for where in modules if where == pattern or (where and fnmatchcase(where, pattern))]
        if not found:
            raise CreditscopeError(f"slow names {pattern!r}, which is no module of the model; its modules are those of "
                                   f"model.named_modules(), such as {next(iter(list(modules)[1:]), '')!r}")
        roots += found
    chosen: Plan = []
    for where, module in modules.items():
        below = {id(p) for child in module.children() for p in child.parameters()}  # held twice: the inner one is read
        attributes = [a for a, p in module._parameters.items() if id(p) in names and id(p) not in below]
        if not attributes or _inside(where, roots):
            continue
        if isinstance(module, nn.ParameterList | nn.ParameterDict):  # they hold, others compute
            roots.append(where.rpartition(".")[0])
            continue
        original = module.forward
        with stand_ins(module):
            rule = rule_for(module, original, attributes)
        if rule is whole:
            roots.append(where)
        else:
            held = {a: names[id(module._parameters[a])] for a in attributes}
            chosen.append((Site(where or "the model", module, original, held), rule))
    chosen = [(site, rule) for site, rule in chosen if not _inside(site.where, roots)]
    tops = [where for where in dict.fromkeys(roots) if not _inside(where, [r for r in roots if r != where])]
    for where in tops:
        module = modules[where]
        inside = {path: names[id(p)] for path, p in module.named_parameters() if id(p) in names}
        if inside:
            chosen.append((Site(where or "the model", module, module.forward, inside), whole))
    return chosen


def _around(name: str) -> str:
    """The module around the one that holds a parameter, with its layer's number left open."""
    parent = name.rpartition(".")[0].rpartition(".")[0]
    return ".".join("*" if part.isdigit() else part for part in parent.split("."))


def _inside(where: str, roots: Sequence[str]) -> bool:
    return any(where == root or root == "" or where.startswith(f"{root}.") for root in roots)


def entrances(model: nn.Module) -> list[nn.Module]:
    """The modules whose input shows the batch's shape: the model, and its token embedding where it names one."""
    find = getattr(model, "get_input_embeddings", None)
    try:
        inner = find() if find is not None else None
    except (NotImplementedError, AttributeError):
        inner = None
    return [model] + ([inner] if isinstance(inner, nn.Module) else [])


def _meet(recorder: Recorder, outer: bool) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = [kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
        first = next((x for x in (*named, *args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 0), None)
        if first is not None and not in_backward():
            if outer and torch.is_grad_enabled():
                if recorder.entered_with_grad:
                    raise CreditscopeError("two forward passes ran inside one Microscope, so rollouts of different "
                                           "batches would share a row; open one context for each, or put them into one "
                                           "batch")
                recorder.entered_with_grad = True
            recorder.entered = True
            features = 0 if not first.is_floating_point() else 1
            lead = tuple(first.shape[: max(1, min(2, first.dim() - features))])
            if outer or recorder.batch is None:  # a model may put more positions before its embedding (prompts)
                recorder.meet(lead, first.device)

    return hook


# -- after the pass ----------------------------------------------------------------------------------------------------


def _refuse_strays(recorder: Recorder) -> None:
    for where, total in recorder.strays:
        if float(total) > 0:
            raise CreditscopeError(f"positions that belong to nobody (−1) have a gradient in {where}; mask them out of "
                                   f"the loss, or give them to a rollout")


def _refuse_mixing(recorder: Recorder) -> None:
    for where, gap in recorder.mixing:
        if not float(gap) <= 1:
            raise CreditscopeError(
                f"{where} gives one rollout another result alone than in its batch (by {float(gap):.2g} times what "
                f"rounding explains): it mixes rows, or it is random. Turn dropout off (model.eval()); batch "
                f"statistics cannot be measured")
