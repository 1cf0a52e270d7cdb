"""The sketched Gram over many seeds against the exact Gram: it is unbiased, and its error is the stated one.

    E K̂ = K        E‖K̂ − K‖² = Σ_ij Var K̂_ij, which each sketch estimates from itself
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from creditscope.microscope.sketch import Sketcher
from creditscope.selftest.check import WorstError
from creditscope.selftest.gram import batch, observe, random_model

SEEDS, K = 48, 16


@cache
def _drawn(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """K (N, N), K̂ and the stated Var K̂ (seeds, N, N) of one batch."""
    model = random_model("llama_tied", device)
    given = batch(model)
    sketches = [observe(model, *given, exact=False, sketch=Sketcher(K, seed)).sketch for seed in range(SEEDS)]
    return (observe(model, *given).gram, torch.stack([sketch.gram for sketch in sketches]),
            torch.stack([sketch.variance for sketch in sketches]))


def unbiased(device: torch.device) -> WorstError:
    """The largest |mean K̂ − K| of an entry, in standard errors as the sketches state them."""
    true, drawn, variance = _drawn(device)
    error = (variance.mean(0).clamp(min=0) / SEEDS).sqrt()
    z = ((drawn.mean(0) - true).abs() / error).max()
    return WorstError(float(z), f"over {SEEDS} seeds, k = {K}, {len(true) * (len(true) + 1) // 2} entries")


def stated_error(device: torch.device) -> WorstError:
    """|log₂| of the real E‖K̂ − K‖² over the stated one."""
    true, drawn, variance = _drawn(device)
    real, stated = (drawn - true).square().sum((1, 2)).mean(), variance.sum((1, 2)).mean()
    ratio = float(real / stated)
    return WorstError(abs(math.log2(ratio)) if ratio > 0 else math.inf, f"real / stated = {ratio:.3f}")
